"""Bytes that change after publication: who notices, what is withdrawn, and what a damaged index does to the daemon.

A client with a writable mapping can spoil published bytes (never the books): by default nobody looks. `verify_reads`,
`kvctl verify` and the daemon's sample do; each is tested here, with the same test failing when it is off.
"""

from __future__ import annotations

import json
import os
import re
import struct
from array import array
from collections.abc import Callable
from typing import Any

import pytest
from restart_world import until

import kvd
from kvd.errors import CorruptionError, KvdError
from kvd.shm import _native
from kvd.shm.layout import EntryState

pytestmark = pytest.mark.slow
CHUNK_TOKENS, CHUNKS, SIZE = 16, 8, 64 << 10
MANIFEST = kvd.Manifest(model="m", revision="r1", dtype="bfloat16", fixed="*", tenant="", salt="")


def publish(store: kvd.Store, seed: int, chunks: int = CHUNKS) -> tuple[kvd.Namespace, kvd.Chain]:
    ns = store.namespace(MANIFEST)
    chain = ns.chain(array("I", [seed, *range(chunks * CHUNK_TOKENS - 1)]), CHUNK_TOKENS)
    with ns.reserve(chain, nbytes=SIZE) as writes:
        writes.fill([identity * (SIZE // 32) for identity in chain])
        assert all(status == kvd.Published.PUBLISHED for status in writes.publish())
    return ns, chain


def spoil(store: kvd.Store, running: Any, identity: bytes) -> None:
    """Change one byte of a published object, as a client with a writable mapping can."""
    (member,) = running.call("inspect", key=identity.hex())["members"]
    view = store.native.writable(member["place"], SIZE)
    view.view[SIZE // 2] ^= 1
    view.retire()


def walked(running: Any, **params: Any) -> Any:
    """What a walk found, when it has ended."""
    number = running.call("verify", **params)["number"]
    while (status := running.call("verify_status"))["running"] is not None:
        assert status["running"]["number"] == number
    return status["last"]


def lines(running: Any, event: str) -> list[dict[str, Any]]:
    return [row for row in map(json.loads, running.log_text().splitlines()) if row["event"] == event]


def test_by_default_nobody_looks(daemon: Any) -> None:
    """Said plainly in the docs: without verify_reads a reader gets the bytes that are there."""
    running = daemon(objects={"verify_sample": 0})
    with kvd.connect(running.socket) as store:
        ns, chain = publish(store, 1)
        spoil(store, running, chain[3])
        with ns.acquire(chain) as leases:
            assert len(leases) == CHUNKS
            assert bytes(leases[3].view) != chain[3] * (SIZE // 32)


def test_verify_reads_finds_it_and_the_daemon_withdraws_it(daemon: Any) -> None:
    """Without the report of the client the second match would find all 8 again."""
    running = daemon(objects={"verify_sample": 0})
    with (
        kvd.connect(running.socket, client="scribbler") as store,
        kvd.connect(running.socket, access="read", verify_reads=True) as reader,
    ):
        _, chain = publish(store, 1)
        spoil(store, running, chain[3])
        ns = reader.namespace(MANIFEST)
        with ns.acquire(chain) as leases:
            assert bytes(leases[2].view) == chain[2] * (SIZE // 32)
            with pytest.raises(CorruptionError) as caught:
                _ = leases[3].view
            assert caught.value.fields["withdrawn"] is True
            assert ns.match(chain) == 3, "the family and all behind it are not found any more"
            assert bytes(leases[2].view) == chain[2] * (SIZE // 32), "what is leased stays readable"
        assert reader.stats()["verify_failed"] == 1
        counters = running.call("status")["counters"]
        assert (counters["damage_reports"], counters["verify_damaged"]) == (1, 1)
        (line,) = until(lambda: lines(running, "object_damaged"), "the line in the log")
        assert line["key"] == chain[3].hex()[:16]
        assert (line["writer_name"], line["writer_pid"], line["found_by"]) == (
            "scribbler",
            os.getpid(),
            "reader",
        )
        with ns_writes(store, chain) as writes:
            writes.fill([identity * (SIZE // 32) for identity in chain[3:]])
            writes.publish()
        assert ns.match(chain) == CHUNKS, "it can be written again at once"


def ns_writes(store: kvd.Store, chain: kvd.Chain) -> Any:
    return store.namespace(MANIFEST).reserve(chain[3:], nbytes=SIZE)


def test_a_report_alone_withdraws_nothing(daemon: Any) -> None:
    """A reader that lies (or whose own memory is bad) takes nothing away from the others."""
    running = daemon()
    with kvd.connect(running.socket) as store:
        ns, chain = publish(store, 1)
        assert store.call("damaged", key=chain[0].hex(), member=0) == {"damaged": False, "looked_at": 1}
        assert store.call("damaged", key=chain[0].hex(), member=9) == {"damaged": False, "looked_at": 0}
        with pytest.raises(KvdError, match="no family"):
            store.call("damaged", key="ab" * 32, member=0)
        assert ns.match(chain) == CHUNKS


def test_a_walk_finds_withdraws_and_tells(daemon: Any) -> None:
    running = daemon(objects={"verify_sample": 0})
    with kvd.connect(running.socket, client="scribbler") as store:
        ns, good = publish(store, 1)
        _, bad = publish(store, 2)
        spoil(store, running, bad[5])
        with ns.acquire(bad) as leases:
            last = walked(running)
            assert (last["damaged"], last["keys"], last["stopped"]) == (1, [bad[5].hex()], False)
            assert last["objects"] + last["damaged"] + last["left"] <= 2 * CHUNKS
            assert (ns.match(good), ns.match(bad)) == (CHUNKS, 5)
            assert running.call("status")["core"]["pool"]["limbo_bytes"] > 0, "held: memory comes back later"
            assert bytes(leases[4].view) == bad[4] * (SIZE // 32)
        assert lines(running, "sweep_ended")[0]["damaged"] == 1
        again = walked(running)
        assert (again["damaged"], again["objects"]) == (0, CHUNKS + 5)
        status = running.call("status")
        assert status["verify"]["last"]["number"] == 2
        assert running.call("health")["state"] == "ok"


def test_a_walk_keeps_to_its_rate_stops_when_told_and_knows_its_namespace(daemon: Any) -> None:
    """2 MiB/s for 16 MiB: it cannot be done when it was only just begun; reports do not wait for its pause."""
    running = daemon(objects={"verify_sample": 0})
    with kvd.connect(running.socket) as store:
        for seed in range(32):
            ns, chain = publish(store, seed)
        begun = running.call("verify", rate=2 << 20)
        assert begun["started"]
        assert not running.call("verify", rate=2 << 20)["started"], "one walk at a time"
        while not running.call("verify_status")["running"]["objects"]:
            pass
        assert store.call("damaged", key=chain[0].hex(), member=0)["looked_at"] == 1
        assert running.call("verify_stop")["ended"]["stopped"]
        assert running.call("verify_stop")["ended"] is None, "that one ended before"
        last = running.call("verify_status")["last"]
        assert last["stopped"]
        assert last["objects"] < 32 * CHUNKS
        other = store.namespace(
            kvd.Manifest(model="other", revision="r", dtype="float16", fixed="*", tenant="", salt="")
        )
        with other.reserve(other.chain(list(range(16)), CHUNK_TOKENS), nbytes=SIZE) as writes:
            writes.fill([b"x" * SIZE])
            writes.publish()
        assert walked(running, namespace=2)["objects"] == 1
        assert walked(running)["objects"] == 32 * CHUNKS + 1
        with pytest.raises(KvdError, match="at least 1048576"):
            running.call("verify", rate=5)
        assert ns.match(chain) == CHUNKS


def test_the_sample_finds_a_writer_whose_bytes_are_not_what_it_said(daemon: Any) -> None:
    """Every object is a sample here. With verify_sample = 0 the match at the end would find it."""
    running = daemon(objects={"verify_sample": 1})
    with kvd.connect(running.socket) as store:
        ns = store.namespace(MANIFEST)
        chain = ns.chain(array("I", range(CHUNK_TOKENS)), CHUNK_TOKENS)
        with ns.reserve(chain, nbytes=SIZE) as writes:
            writes.fill([b"a" * SIZE])
            # After its checksum was computed with the copy, before it is published.
            place = store.native.writable(int(writes._places[0]), SIZE)
            place.view[0] ^= 1
            place.retire()
            writes.publish()
        counters: Callable[[], Any] = lambda: running.call("status")["counters"]  # noqa: E731
        while not counters()["verify_damaged"]:
            pass
        assert ns.match(chain) == 0
        assert counters()["verify_samples"] == 1


# --- META -----------------------------------------------------------------------------------------------------


def meta_of(pid: int) -> int:
    """Where the daemon has META mapped writable."""
    with open(f"/proc/{pid}/maps") as maps:
        for row in maps:
            if "kvd-meta" in row and re.match(r"\S+ rw-s", row):
                return int(row.split("-")[0], 16)
    pytest.fail("the daemon maps no META")


def test_a_damaged_index_stops_the_daemon(daemon: Any) -> None:
    """A record that points outside the pool: bad memory, since nobody else can write there. Exit code 70, no answer."""
    running = daemon()
    running.expected_codes.add(70)
    with (
        kvd.connect(running.socket, reattach=False) if _reattaches() else kvd.connect(running.socket) as store
    ):
        _, chain = publish(store, 1)
        record = _record_of(store, running, chain[0])
        base = meta_of(running.pid)
        memory = os.open(f"/proc/{running.pid}/mem", os.O_RDWR)
        try:
            offsets = _native.layout()
            header = os.pread(memory, offsets["MetaHeader"], base)
            (records_offset,) = struct.unpack_from("<Q", header, offsets["MetaHeader.records_offset"])
            at = base + records_offset + offsets["Record"] * record + offsets["Record.place"]
            os.pwrite(memory, struct.pack("<Q", 0x7FFF << 48), at)
        except OSError as error:
            pytest.skip(f"this system does not let a test write another process's memory: {error}")
        finally:
            os.close(memory)
        with pytest.raises((KvdError, OSError)):
            while True:  # a walk reads what it says; the daemon ends while it does
                walked(running)
        assert running.wait() == 70
        assert "InvariantError" in running.log_text()


def _reattaches() -> bool:
    import inspect

    return "reattach" in inspect.signature(kvd.connect).parameters


def _record_of(store: kvd.Store, running: Any, identity: bytes) -> int:
    """The record of the first member, from the daemon's own listing."""
    row = running.call("inspect", key=identity.hex())
    assert row["state"] == EntryState.READY.name.lower()
    return int(row["members"][0]["record"])
