"""`kvctl plan breakeven --measure`: lookup, load and copy rates of the daemon this host runs.

Publishes some objects in a scratch namespace, looks them up, leases and copies them, and clears that namespace, also
when it fails. The namespace is the same in every run, since a daemon keeps the names of empty ones; its keys are not.
Called by `kvd.kvctl.plan_load`, in the calling thread. It asks for no more than a sixteenth of the pool; in a full pool
as many bytes of others, the coldest, leave for it.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass

from kvd.errors import CapacityError, KvdError
from kvd.plan import units

OBJECT_BYTES = 1 << 20
OBJECTS_MAX = 64
RUN_BYTES = 64 << 10  # of the paged copy: a head of 256 tokens and more
ROUNDS = 7
CHUNK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Measured:
    """Rates of one run: medians of some rounds, one thread, other load of the host included."""

    chunks: int
    lookup_ns: int
    load_bytes_per_s: int
    copy_bytes_per_s: int

    @property
    def said(self) -> str:
        """For the table of a plan."""
        return (
            f"{units.counted(self.chunks, 'chunk')} looked up and leased in {units.format_ns(self.lookup_ns)}, "
            f"loaded at {units.format_bandwidth(self.load_bytes_per_s)}, "
            f"copied into blocks of host memory at {units.format_bandwidth(self.copy_bytes_per_s)}"
        )


def measure(socket: str | None, deadline_s: float) -> Measured:
    """Measure through a client. Raises UnavailableError, CapacityError (a pool too small or all leased)."""
    import kvd

    with kvd.connect(socket, client="kvctl-plan", deadline_s=deadline_s) as store:
        pool_bytes = sum(store.segment_bytes)
        count = min(OBJECTS_MAX, pool_bytes // 16 // OBJECT_BYTES)
        if count < 1:
            raise CapacityError(
                f"a pool of {pool_bytes} B is too small to measure with objects of {OBJECT_BYTES} B; give the rates",
                code="measure",
            )
        manifest = kvd.Manifest(
            model="kvctl-plan-measure", revision="1", dtype="uint8", tenant="", salt="", fixed="*"
        )  # fmt: skip
        ns = store.namespace(manifest)
        try:
            return _measure(ns, count)
        finally:
            with contextlib.suppress(KvdError):  # what failed first is what is told
                store.call("clear", namespace=store.namespace_number(ns))


def _measure(ns: object, count: int) -> Measured:
    from kvd.clientlib import paged
    from kvd.clientlib.namespace import Namespace

    assert isinstance(ns, Namespace)
    # Tokens at random: what another run keeps or has left is not met.
    tokens = list(array("I", os.urandom(4 * count * CHUNK_TOKENS)))
    chain = ns.chain(tokens, CHUNK_TOKENS)
    with ns.reserve(chain, nbytes=OBJECT_BYTES) as writes:
        writes.fill([os.urandom(1 << 16) * (OBJECT_BYTES >> 16)] * count)
        writes.publish()
    size_bytes = count * OBJECT_BYTES
    blocks = OBJECT_BYTES // RUN_BYTES
    targets = [bytearray(OBJECT_BYTES) for _ in range(count)]
    cache = bytearray(size_bytes)
    plan = paged.plan(OBJECT_BYTES, count * blocks, blocks, [(0, RUN_BYTES, 0, 0, RUN_BYTES, RUN_BYTES, ())])
    ids = list(reversed(range(count * blocks)))
    with ns.acquire(chain) as leases:
        if len(leases) != count:
            raise CapacityError(
                "the objects of the measurement left before they were read: the pool is full", code="measure"
            )
        load_ns = _median_ns(lambda: leases.copy_to(targets))

        def scatter() -> None:
            paged.scatter(plan, [lease.view for lease in leases], [cache], ids)

        copy_ns = _median_ns(scatter)
    lookup_ns = _median_ns(lambda: ns.acquire(chain).release())
    return Measured(
        count, lookup_ns, size_bytes * 1_000_000_000 // load_ns, size_bytes * 1_000_000_000 // copy_ns
    )


def _median_ns(action: Callable[[], object]) -> int:
    action()
    times = []
    for _ in range(ROUNDS):
        begin = time.perf_counter_ns()
        action()
        times.append(time.perf_counter_ns() - begin)
    return max(1, int(statistics.median(times)))
