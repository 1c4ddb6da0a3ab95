"""Figures of what the bytes mean: family match, re-sharding reads, gather and scatter over run sizes.

Each is a ratio to its floor: both sides are taken in turn, in the same run, and the median of the pairs counts, so that
a machine that slows down for a second slows both.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import kvd
from kvd.clientlib import paged
from kvd.kvctl.bench.floors import median_ns
from kvd.layout.geometry import kv_planes

CHUNKS = 128
_TOKENS = 16
_SHARDS = 8
_MIB = 1 << 20
RUNS = (64, 128, 256, 512, 1 << 10, 2 << 10, 4 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10, 256 << 10)
LONG_RUN_BYTES_MIN = 32 << 10
_MOVED_BYTES = 8 * _MIB
_CACHE_BYTES = 64 * _MIB
_COPIES = 4  # objects and caches in turn, so that nothing stays in the last-level cache by chance
_LINE_BYTES = 64
# Tensors and slots start on cache lines; a buffer of malloc starts 16 bytes into one, which costs most for short runs.
OFFSETS = (0, 16)


def paired_ratio(
    floor: Callable[[], object], action: Callable[[], object], pairs: int, repeats: int
) -> float:
    """Median over `pairs` of time of `floor` ÷ time of `action`."""
    return statistics.median(median_ns(floor, repeats) / median_ns(action, repeats) for _ in range(pairs))


def geometries() -> dict[str, kvd.Geometry]:
    """The plain one and a hybrid, eight shards a group, small heads."""
    planes = kv_planes(_SHARDS, 2, 2, "bfloat16")
    state = (kvd.Plane("state", _SHARDS, 8, "float32"),)
    return {
        "full": kvd.Geometry([kvd.Group(kvd.Rule.FULL, (0,), planes)]),
        "hybrid": kvd.Geometry([
            kvd.Group(kvd.Rule.FULL, (0,), planes),
            kvd.Group(kvd.Rule.WINDOW, (1,), planes, 4 * _TOKENS),
            kvd.Group(kvd.Rule.STATE, (2,), state),
        ]),
    }  # fmt: skip


def family_match_over_plain(store: kvd.Store, *, pairs: int = 15, calls: int = 400) -> dict[str, float]:
    """Time of a match by geometry of 128 chunks × 8 shards a group ÷ that of a plain match of 128 keys."""
    ratios: dict[str, float] = {}
    for name, geom in geometries().items():
        manifest = kvd.Manifest(
            model=f"bench-{name}", revision="1", dtype="bfloat16", tenant="", salt="", fixed="*"
        )
        ns = store.namespace(manifest)
        chain = ns.chain(list(range(CHUNKS * _TOKENS + 1)), _TOKENS)
        with ns.reserve(chain, geom=geom, split=kvd.Split(tp=_SHARDS)) as writes:
            for write in writes:
                write.view[:1] = b"\0"
            writes.publish()
        if (ns.match(chain, geom), ns.match(chain)) != (CHUNKS, CHUNKS):
            raise RuntimeError("the bench's own families are not all there")
        plain, by_rules = _caller(ns.match, chain), _caller(ns.match, chain, geom)
        ratios[name] = 1 / paired_ratio(plain, by_rules, pairs, calls)
    return ratios


def _caller(action: Callable[..., object], *args: object) -> Callable[[], object]:
    return lambda: action(*args)


def reshard_over_plain(store: kvd.Store, *, pairs: int = 9, chunks: int = 8) -> dict[str, float]:
    """Bandwidth of a TP 2 rank that reads what TP 4 wrote ÷ that of the same rank reading what TP 2 wrote.

    Objects are those of a model of 32 layers, 8 KV heads and head size 128 in BF16, 256 tokens a chunk; they go into
    blocks of 32 tokens of a head-first cache (runs of 8 KiB).
    """
    geom = kvd.Geometry.attention(layers=32, kv_heads=8, head_dim=128, dtype="bfloat16")
    block, tokens = 32, 256
    planes = kv_planes(4, 128, 128, "bfloat16")
    blocks = chunks * tokens // block
    layout = kvd.PagedLayout("blocks-2-heads-block-dim", planes, 32, blocks, block)
    tensors = [bytearray(layout.tensor_bytes()) for _ in range(layout.tensors_count)]
    actions: dict[int, Callable[[], object]] = {}
    held: list[kvd.FamilyLeases] = []
    for tp in (2, 4):
        manifest = kvd.Manifest(
            model=f"bench-tp{tp}", revision="1", dtype="bfloat16", tenant="", salt="", fixed="*"
        )
        ns = store.namespace(manifest)
        chain = ns.chain(list(range(chunks * tokens + 1)), tokens)
        members = geom.objects(chunk_tokens=tokens, tp=tp)
        with ns.reserve(chain, geom=geom, split=kvd.Split(tp=tp)) as writes:
            source = os.urandom(_MIB)
            writes.fill([source * (members[i % len(members)].size_bytes // _MIB) for i in range(len(writes))])
            writes.publish()
        cache = ns.register(layout, tensors, geom=geom)
        leases = ns.acquire(chain, geom)
        held.append(leases)
        if len(leases) != chunks:
            raise RuntimeError("the bench's own objects are not all there")
        actions[tp] = _caller(leases.scatter, cache, list(range(blocks)))
        actions[tp]()
    moved = chunks * geom.bytes_per_token * tokens // 2
    ratio = paired_ratio(actions[2], actions[4], pairs, 3)
    result = {"ratio": ratio, "plain_gb_s": moved / median_ns(actions[2], 5)}
    for leases in held:
        leases.release()
    return result


class _Paged:
    """Blocks of one run each in a cache, in no order, and objects of them; the same memory as torch tensors."""

    def __init__(self, run_bytes: int, offset_bytes: int = 0) -> None:
        import numpy

        def filled(*shape: int) -> Any:
            """Random bytes, `offset_bytes` behind the start of a cache line."""
            size = int(numpy.prod(shape))
            memory: Any = numpy.empty(size + 2 * _LINE_BYTES, numpy.uint8)
            start = -memory.ctypes.data % _LINE_BYTES + offset_bytes
            memory[start : start + size] = rng.integers(0, 255, size, dtype=numpy.uint8)
            return memory[start : start + size].reshape(shape)

        self.run_bytes = run_bytes
        self.moved = _MOVED_BYTES // run_bytes
        blocks = _CACHE_BYTES // run_bytes
        rng = numpy.random.default_rng(run_bytes)
        self.cache: Any = filled(blocks, run_bytes)
        self.objects: Any = filled(_COPIES, self.moved, run_bytes)
        self.ids: Any = [
            rng.permutation(blocks)[: self.moved].astype(numpy.int64) for _ in range(2 * _COPIES)
        ]
        stride = run_bytes
        self.plan = paged.plan(_MOVED_BYTES, blocks, self.moved, [(0, run_bytes, 0, 0, stride, stride, ())])
        self.flat = [memoryview(one).cast("B") for one in self.objects]
        self.cache_flat = memoryview(self.cache).cast("B")
        self._turn = 0

    def turn(self) -> tuple[int, int]:
        """Which object and which ids are next."""
        self._turn += 1
        return self._turn % _COPIES, self._turn % len(self.ids)

    def gather(self) -> None:
        o, i = self.turn()
        paged.gather(self.plan, [self.flat[o]], [self.cache_flat], self.ids[i])

    def scatter(self) -> None:
        o, i = self.turn()
        paged.scatter(self.plan, [self.flat[o]], [self.cache_flat], self.ids[i])

    def floor(self) -> None:
        """The same bytes as one non-temporal copy, between an object and a stretch of the cache."""
        o, i = self.turn()
        at = i * _MOVED_BYTES % (_CACHE_BYTES - _MOVED_BYTES)
        paged.copy(self.flat[o], self.cache_flat[at : at + _MOVED_BYTES])

    def floor_out(self) -> None:
        """The same the other way."""
        o, i = self.turn()
        at = i * _MOVED_BYTES % (_CACHE_BYTES - _MOVED_BYTES)
        paged.copy(self.cache_flat[at : at + _MOVED_BYTES], self.flat[o])

    def torch_actions(self) -> tuple[Callable[[], object], Callable[[], object]] | None:
        """index_select into an object and index_copy_ out of one, on one thread; None without torch."""
        try:
            import torch
        except ImportError:
            return None
        torch.set_num_threads(1)
        cache, objects = torch.from_numpy(self.cache), torch.from_numpy(self.objects)
        ids = [torch.from_numpy(one) for one in self.ids]

        def gather() -> None:
            o, i = self.turn()
            torch.index_select(cache, 0, ids[i], out=objects[o])

        def scatter() -> None:
            o, i = self.turn()
            cache.index_copy_(0, ids[i], objects[o])

        return gather, scatter


def paged_sweep(
    runs: Sequence[int] = RUNS, offsets: Sequence[int] = OFFSETS, *, pairs: int = 9, repeats: int = 5
) -> list[dict[str, float]]:
    """For each offset and run size: gather and scatter over the non-temporal copy of the same bytes, and over torch."""
    return [
        _paged_row(run_bytes, offset_bytes, pairs, repeats) for offset_bytes in offsets for run_bytes in runs
    ]


def _paged_row(run_bytes: int, offset_bytes: int, pairs: int, repeats: int) -> dict[str, float]:
    one = _Paged(run_bytes, offset_bytes)
    one.gather()
    one.scatter()
    row = {
        "run_bytes": run_bytes,
        "offset_bytes": offset_bytes,
        "gather_over_floor": paired_ratio(one.floor, one.gather, pairs, repeats),
        "scatter_over_floor": paired_ratio(one.floor_out, one.scatter, pairs, repeats),
    }
    theirs = one.torch_actions()
    if theirs is not None:
        row["gather_over_torch"] = paired_ratio(theirs[0], one.gather, pairs, repeats)
        row["scatter_over_torch"] = paired_ratio(theirs[1], one.scatter, pairs, repeats)
    return row


def worst(rows: Sequence[dict[str, float]], figure: str, run_bytes_min: int = 0) -> tuple[float, str] | None:
    """(the smallest ratio, at which run size and offset) of a figure; None where it was not taken."""
    found = [row for row in rows if figure in row and row["run_bytes"] >= run_bytes_min]
    if not found:
        return None
    row = min(found, key=lambda row: row[figure])
    where = f"worst at runs of {int(row['run_bytes']):,} B"
    if row["offset_bytes"]:
        where += f" that start {int(row['offset_bytes'])} B into a cache line"
    return row[figure], where
