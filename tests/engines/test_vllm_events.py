"""KV events as vLLM's own types read them. Runs where vLLM is installed (`make test-engines-vllm`)."""

from __future__ import annotations

from array import array

import msgpack
import pytest

from kvd.core import events as ev
from kvd.server.event_view import View, short_hash

msgspec = pytest.importorskip("msgspec", reason="vLLM is not installed here")
kv_events = pytest.importorskip("vllm.distributed.kv_events", reason="vLLM is not installed here")


def test_vllm_reads_what_kvd_publishes() -> None:
    view, identities = View(8, str), [bytes([n]) * 32 for n in range(3)]
    entries, nothing = array("I", [4, 5, 6]), memoryview(array("I"))
    effect = ev.DoPublish(
        1, 0, b"".join(identities), bytes(3), 0, 1, array("I"), array("Q"), array("I"), 2,
        array("I", [ev.NONE, ev.PREVIOUS, ev.PREVIOUS]),
    )  # fmt: skip
    events = [*view.published(effect, ev.Published(1, bytes(3), memoryview(entries), bytes(3), 3))]
    gone = ev.Evicted(2, memoryview(entries), nothing, nothing, nothing, nothing)
    events += view.evicted(ev.DoEvict(2, entries, ev.Reason.CLEAR, withdraw=False), gone)
    payload = msgpack.packb([1.5, events, None, "00ff"])
    batch = msgspec.msgpack.decode(payload, type=kv_events.KVEventBatch)
    stored, removed, cleared = batch.events
    hashes = [short_hash(identity) for identity in identities]
    assert isinstance(stored, kv_events.BlockStored)
    assert (stored.block_hashes, stored.parent_block_hash, stored.medium) == (hashes, None, "CPU")
    assert isinstance(removed, kv_events.BlockRemoved)
    assert removed.block_hashes == hashes
    assert isinstance(cleared, kv_events.AllBlocksCleared)
