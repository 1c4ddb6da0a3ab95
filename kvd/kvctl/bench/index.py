"""Figures of the index and the rings: match, miss, fetch, leases, publish, turnover, metadata, growth. Tiny objects."""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import kvd
from kvd import limits
from kvd.kvctl.bench.daemon import Bench
from kvd.kvctl.bench.floors import median_ns

TINY_BYTES = 64
BATCH = 128
TOKENS = 16
_FILL_BATCH = 2048
_SOURCE = bytes(range(TINY_BYTES))
_ID = limits.identity_bytes


@dataclass(slots=True)
class Filled:
    """A client, its namespace, and identities that are in the index now (the newest, so that eviction spares them)."""

    store: kvd.Store
    ns: kvd.Namespace
    identities: list[bytes] = field(default_factory=list)


def manifest() -> kvd.Manifest:
    """The namespace of the bench."""
    return kvd.Manifest(model="bench", revision="1", dtype="bfloat16", tenant="", salt="", fixed="*")


def write_through(filled: Filled, families: int, keep: int, progress: Callable[[str], None]) -> float:
    """Publish that many tiny families of unique keys in batches; keeps the last `keep` identities. Returns seconds."""
    begin = time.perf_counter()
    filled.identities = []
    done = 0
    while done < families:
        count = min(_FILL_BATCH, families - done)
        chain = filled.ns.chain_of(os.urandom(count * _ID), TOKENS)
        with filled.ns.reserve(chain, nbytes=TINY_BYTES) as writes:
            writes.fill([_SOURCE] * count)
            writes.publish()
        done += count
        if families - done < keep:
            ids = bytes(chain.identities)
            filled.identities.extend(ids[at : at + _ID] for at in range(0, len(ids), _ID))
        progress(f"writing {done:,} of {families:,} families through the index")
    return time.perf_counter() - begin


def batches(identities: list[bytes], count: int, seed: int) -> list[bytes]:
    """`count` batches of 128 identities, scattered over the whole index."""
    rng = random.Random(seed)
    return [b"".join(rng.sample(identities, BATCH)) for _ in range(count)]


def match_mkeys_s(filled: Filled, calls: int = 4000) -> float:
    """Millions of keys a second, 128 a call, all hits, from Python; median call."""
    chains = [filled.ns.chain_of(ids, TOKENS) for ids in batches(filled.identities, calls, 1)]
    match = filled.ns.match
    for chain in chains[:16]:
        if match(chain) != BATCH:
            raise RuntimeError("the bench's own keys are not all there")
    every = iter(chains)
    return BATCH / median_ns(lambda: match(next(every)), calls) * 1e3


def miss_us(filled: Filled, calls: int = 4000) -> float:
    """A look-up of 128 keys none of which is there: each is probed (present), not only the first."""
    keys = [os.urandom(BATCH * _ID) for _ in range(calls)]
    every = iter(keys)
    native = filled.store.native
    return median_ns(lambda: native.present(next(every)), calls) / 1e3


def fetch_us(filled: Filled, calls: int = 20000) -> float:
    """Look-up, lease and memoryview of one object, from Python; median."""
    rng = random.Random(2)
    # Fresh objects: who asks has just computed the identity, so the key itself is not a cache miss.
    every = iter([bytes(bytearray(identity)) for identity in rng.choices(filled.identities, k=calls)])
    fetch = filled.store.fetch

    def one() -> None:
        lease = fetch(next(every))
        if lease is not None:
            lease.view  # noqa: B018 - making the view is what is measured

    return median_ns(one, calls) / 1e3


def lease_us(filled: Filled, calls: int = 2000) -> float:
    """Acquire and release 128 leases as one batch; median."""
    every = iter([filled.ns.chain_of(ids, TOKENS) for ids in batches(filled.identities, calls, 3)])
    acquire = filled.ns.acquire
    return median_ns(lambda: acquire(next(every)).release(), calls) / 1e3


def publish_us(filled: Filled, batch: int, calls: int) -> float:
    """Reserve, fill and publish a batch of tiny objects while the daemon sleeps before each; median µs a batch."""
    chains = iter([filled.ns.chain_of(os.urandom(batch * _ID), TOKENS) for _ in range(calls)])
    reserve, sources = filled.ns.reserve, [_SOURCE] * batch

    def one() -> None:
        with reserve(next(chains), nbytes=TINY_BYTES) as writes:
            writes.fill(sources)
            writes.publish()

    return median_ns(one, calls) / 1e3


def metadata_bytes(bench: Bench, families: int) -> float:
    """All memory of the daemon beyond the pool's payload, per object."""
    return bench.memory_bytes() / families


def idle_cpu_pct(bench: Bench, seconds: float) -> float:
    """CPU share of the daemon while its clients do nothing."""
    before, begin = bench.cpu_seconds(), time.monotonic()
    time.sleep(seconds)
    return (bench.cpu_seconds() - before) / (time.monotonic() - begin) * 100


def crowd(bench: Bench, filled: Filled, clients: int, calls: int = 200) -> float:
    """publish128 in µs an object, with eviction, while so many clients hold 128 leases each (hazard scan included)."""
    others = [bench.connect(f"crowd-{i}") for i in range(clients - 1)]
    leases = []
    try:
        for i, store in enumerate(others):
            ids = b"".join(
                filled.identities[-(BATCH * (i % 8 + 1)) : len(filled.identities) - BATCH * (i % 8)]
            )
            leases.append(store.namespace(filled.ns.manifest).acquire(filled.ns.chain_of(ids, TOKENS)))
        return publish_us(filled, BATCH, calls) / BATCH
    finally:
        for lease in leases:
            lease.release()
        for store in others:
            store.close()


def median_of(times: int, action: Callable[[], float]) -> float:
    """The median of a figure taken several times."""
    return statistics.median(action() for _ in range(times))
