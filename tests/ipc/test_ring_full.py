"""A daemon that does not keep up: the ring of asks is full, which has a name, costs nothing and passes."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from raw import MANIFEST

import kvd
from kvd.errors import CapacityError, Retry, UnavailableError

ITEMS = 4096


def test_a_full_ring_of_asks_is_told_by_name_and_passes(daemon: Any) -> None:
    """Fails if a full ring blocks past the deadline, is told as anything else, or leaves something behind."""
    one = daemon(clients={"sq_size": "512KiB"}, pool={"families_max": 8 * ITEMS})
    with kvd.connect(one.socket) as store:
        ns = store.namespace(kvd.Manifest(**MANIFEST))
        chains = [ns.chain([at, *range(ITEMS - 1)], chunk_tokens=1) for at in range(6)]
        ns.reserve(chains[0], 64).abort()
        os.kill(one.pid, signal.SIGSTOP)
        errors = []
        try:
            for chain in chains:  # 131 KB each: three fit
                with pytest.raises((CapacityError, UnavailableError)) as caught:
                    ns.reserve(chain, 64, deadline_s=0.05)
                errors.append(caught.value)
        finally:
            os.kill(one.pid, signal.SIGCONT)
        codes = [error.code for error in errors]
        assert codes[0] == "KVD-UNAVAILABLE-DEADLINE"
        assert codes[-1] == "KVD-CAPACITY-RING-FULL", codes
        assert errors[-1].retry is Retry.AFTER
        with ns.reserve(chains[0], 64) as writes:
            writes.fill([b"\5" * 64] * ITEMS)
            writes.publish()
        assert ns.match(chains[0]) == ITEMS
        assert one.call("status")["core"]["pool"]["reserved_bytes"] == 0, (
            "what was granted too late came back"
        )
