"""Figures of large copies: 8 MiB objects in and out, paged scatter, each against its floor in the same run."""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

import kvd
from kvd import limits
from kvd.clientlib import paged
from kvd.kvctl.bench.floors import BLOCK_BYTES, Buffers, median_ns
from kvd.kvctl.bench.index import TOKENS

_ID = limits.identity_bytes
REQUEST_OBJECTS = 32  # 8,192 tokens in chunks of 256, one shard of TP 4 of a model with 128 KiB a token


def put_gb_s(ns: kvd.Namespace, sources: Buffers, batches: int) -> float:
    """8 MiB objects in, end to end: reserve, copy with checksum, publish; a request's batch each, median batch."""
    times = []
    for turn in range(batches):
        chain = ns.chain_of(os.urandom(REQUEST_OBJECTS * _ID), TOKENS)
        blocks = _rotated(sources, turn)
        begin = time.perf_counter_ns()
        with ns.reserve(chain, nbytes=BLOCK_BYTES) as writes:
            writes.fill(blocks)
            writes.publish()
        times.append(time.perf_counter_ns() - begin)
    return REQUEST_OBJECTS * BLOCK_BYTES / statistics.median(times)


def get_gb_s(ns: kvd.Namespace, destinations: Buffers, batches: int) -> float:
    """8 MiB objects out: acquire, copy, release, a request's batch each, not verified; median batch."""
    chains = [ns.chain_of(os.urandom(REQUEST_OBJECTS * _ID), TOKENS) for _ in range(3)]
    for chain in chains:
        with ns.reserve(chain, nbytes=BLOCK_BYTES) as writes:
            writes.fill(_rotated(destinations, 0))
            writes.publish()
    times = []
    for turn in range(batches):
        targets = _rotated(destinations, turn)
        begin = time.perf_counter_ns()
        with ns.acquire(chains[turn % len(chains)]) as leases:
            copied = leases.copy_to(targets)
        times.append(time.perf_counter_ns() - begin)
        if copied != REQUEST_OBJECTS * BLOCK_BYTES:
            raise RuntimeError("an object of the bench left before it was read")
    return REQUEST_OBJECTS * BLOCK_BYTES / statistics.median(times)


def _rotated(buffers: Buffers, turn: int) -> list[memoryview]:
    count = len(buffers.blocks)
    return [buffers.blocks[(turn * REQUEST_OBJECTS + i) % count] for i in range(REQUEST_OBJECTS)]


def scatter_over_torch(rounds: int = 15) -> dict[str, Any] | None:
    """Paged scatter of 32 blocks of 256 KiB into a cache of 512 blocks, against index_copy_ on the same tensors."""
    try:
        import torch
    except ImportError:
        return None
    torch.set_num_threads(1)
    block_bytes, blocks, moved = 256 << 10, 512, 32
    cache = torch.zeros(blocks, block_bytes, dtype=torch.uint8)
    objects = [torch.randint(0, 255, (moved, block_bytes), dtype=torch.uint8) for _ in range(8)]
    stride = block_bytes
    plan = paged.plan(moved * stride, blocks, moved, [(0, stride, 0, 0, stride, stride, ())])
    generator = torch.Generator().manual_seed(5)
    ids = [torch.randperm(blocks, generator=generator)[:moved] for _ in range(8)]
    numpy_ids = [i.numpy() for i in ids]
    cache_view = memoryview(cache.numpy()).cast("B")
    object_views = [memoryview(o.numpy()).cast("B") for o in objects]
    turn = {"n": 0}

    def ours() -> None:
        n = turn["n"] = (turn["n"] + 1) % 8
        paged.scatter(plan, [object_views[n]], [cache_view], numpy_ids[n])

    def theirs() -> None:
        n = turn["n"] = (turn["n"] + 1) % 8
        cache.index_copy_(0, ids[n], objects[n])

    ours()
    if not torch.equal(cache[ids[1]], objects[1]):
        raise RuntimeError("scatter put bytes in the wrong place")
    pairs = [(median_ns(theirs, 20), median_ns(ours, 20)) for _ in range(rounds)]
    moved_bytes = moved * block_bytes
    return {
        "ratio": statistics.median(t / o for t, o in pairs),
        "torch_gb_s": moved_bytes / statistics.median(t for t, _ in pairs),
        "kvd_gb_s": moved_bytes / statistics.median(o for _, o in pairs),
    }
