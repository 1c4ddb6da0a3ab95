"""`kvctl bench local`: everything in one run, with floors beside it, targets, and how each figure grows."""

from __future__ import annotations

import importlib.util
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import kvd
from kvd.errors import UsageError
from kvd.kvctl.bench import bulk, floors, geometry, index
from kvd.kvctl.bench.daemon import Bench, running

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Row:
    """One figure: its key in the JSON, what it is, its value, and what it must reach (None: reported only)."""

    key: str
    what: str
    value: float | None
    bound: str = ""
    target: float | None = None
    note: str = ""

    @property
    def passed(self) -> bool | None:
        """Whether the target is reached; None without a target or a value."""
        if self.target is None or self.value is None:
            return None
        return self.value <= self.target if self.bound == "≤" else self.value >= self.target


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure."""

    families: int = 1_000_000
    turnover: int = 10
    idle_s: float = 10.0
    growth: tuple[int, ...] = (10_000, 100_000, 1_000_000, 4_000_000)
    crowds: tuple[int, ...] = (1, 8, 64)

    @staticmethod
    def quick() -> Plan:
        """A short form that exercises everything; its figures are not the documented ones."""
        return Plan(families=100_000, turnover=2, idle_s=2.0, growth=(10_000, 100_000), crowds=(1, 8))


def measure(plan: Plan, progress: Progress) -> dict[str, Any]:
    """Run everything; returns {"rows": [Row…], "growth": …, "host": …}."""
    if importlib.util.find_spec("numpy") is None:
        raise UsageError("the bench needs numpy: pip install numpy", code="numpy")
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        raise UsageError(
            "the bench needs two CPUs: one for the client, one for the daemon", code="cpus", cpus=len(cpus)
        )
    own, other = cpus[0], cpus[1]
    os.sched_setaffinity(0, {own})
    begin = time.monotonic()
    try:
        rows, details = _index_rows(plan, own, other, progress)
        more, bulk_details = _bulk_rows(other, progress)
        meant, geometry_details = _geometry_rows(other, progress)
        growth = _growth(plan, other, progress)
    finally:
        os.sched_setaffinity(0, set(cpus))
    return {
        "rows": [*rows, *more, *meant],
        "growth": growth,
        "details": {**details, **bulk_details, **geometry_details},
        "host": {
            "cpus": os.cpu_count(), "machine": platform.machine(), "kernel": platform.release(),
            "python": platform.python_version(), "kvd": kvd.__version__,
            "pinning": f"client on CPU {own}, daemon on CPU {other}", "took_s": round(time.monotonic() - begin, 1),
        },
    }  # fmt: skip


def tiny_settings(families: int) -> dict[str, Any]:
    """A daemon whose index, not whose pool, is the limit: room for tiny objects, `families` entries."""
    pool = max(64 << 20, (families + families // 8) * index.TINY_BYTES * 2)
    return {
        "pool_size": f"{pool >> 20}MiB",
        "pool_families_max": families,
        "pool_records_max": families + 8192,
    }


def _index_rows(plan: Plan, own: int, other: int, progress: Progress) -> tuple[list[Row], dict[str, Any]]:
    with running(other, **tiny_settings(plan.families)) as bench, bench.connect("bench") as store:
        filled = index.Filled(store, store.namespace(index.manifest()))
        total = plan.families * plan.turnover
        keep = plan.families * 3 // 4
        seconds = index.write_through(filled, total, keep, progress)
        progress("look-ups, leases")
        families = int(bench.status()["core"]["families"])
        metadata = index.metadata_bytes(bench, families)
        rows = [
            Row(
                "fetch_p50_us", "look-up + lease + memoryview of one object", index.fetch_us(filled), "≤", 1.5
            ),
            Row(
                "match128_mkeys_s",
                "look-up, 128 keys a call, million keys/s",
                index.match_mkeys_s(filled),
                "≥",
                15,
            ),
            Row("lease128_us", "acquire + release of 128 leases", index.lease_us(filled), "≤", 12),
            Row("miss128_us", "look-up of 128 keys that all miss", index.miss_us(filled), "≤", 10),
        ]
        progress("publishing one at a time")
        pairs = [(floors.wake_us(own, other), index.publish_us(filled, 1, 400)) for _ in range(5)]
        ratio, wake, one = (
            statistics.median(column) for column in zip(*((p / w, w, p) for w, p in pairs), strict=True)
        )
        same_cpu = _same_cpu(bench, filled, own, other)
        rows.append(
            Row("publish1_over_wake", "reserve + publish of one ÷ bare wake-up", ratio, "≤", 4,
                f"{one:.1f} µs ÷ {wake:.1f} µs; on one CPU {same_cpu['publish1_us']:.1f} ÷ {same_cpu['wake_us']:.1f}")
        )  # fmt: skip
        batch = index.median_of(3, lambda: index.publish_us(filled, index.BATCH, 200) / index.BATCH)
        rows.append(
            Row("publish128_us_per_object", "the same in batches of 128, with eviction", batch, "≤", 4)
        )
        rows.append(
            Row("metadata_bytes_per_object", f"daemon + META at {families:,} objects", metadata, "≤", 512)
        )
        progress(f"idle for {plan.idle_s:g} s")
        idle = [bench.connect(f"idle-{i}") for i in range(7)]
        try:
            rows.append(
                Row(
                    "idle_cpu_pct",
                    "daemon with 8 idle clients",
                    index.idle_cpu_pct(bench, plan.idle_s),
                    "≤",
                    0.5,
                )
            )
        finally:
            for other_store in idle:
                other_store.close()
    details = {
        "write_through": {"families": total, "seconds": seconds, "us_per_object": seconds / total * 1e6},
        "same_cpu": same_cpu, "families": families,
    }  # fmt: skip
    return rows, details


def _same_cpu(bench: Bench, filled: index.Filled, own: int, other: int) -> dict[str, float]:
    os.sched_setaffinity(bench.pid, {own})
    try:
        return {"wake_us": floors.wake_us(own, own), "publish1_us": index.publish_us(filled, 1, 500)}
    finally:
        os.sched_setaffinity(bench.pid, {other})


def _bulk_rows(other: int, progress: Progress) -> tuple[list[Row], dict[str, Any]]:
    progress("large copies")
    with (
        running(other, pool_size="2GiB", pool_families_max=65536) as bench,
        bench.connect("bench") as store,
    ):
        ns = store.namespace(index.manifest())
        pool = bench.status()["pool"]
        engine, like_pool = floors.Buffers(1 << 30, shared=False), floors.Buffers(1 << 30, shared=True)
        bulk.put_gb_s(
            ns, engine, 2 * pool["size_bytes"] // (bulk.REQUEST_OBJECTS * floors.BLOCK_BYTES)
        )  # every page was touched
        rounds = []
        for _ in range(5):
            floor_in = floors.memcpy_gb_s(engine, like_pool, 1)
            put = bulk.put_gb_s(ns, engine, 12)
            floor_out = floors.memcpy_gb_s(like_pool, engine, 1)
            get = bulk.get_gb_s(ns, engine, 12)
            rounds.append((put / floor_in, get / floor_out, floor_in, floor_out, put, get))
    put_ratio, get_ratio, floor_in, floor_out, put, get = map(statistics.median, zip(*rounds, strict=True))
    progress("paged scatter")
    scatter = bulk.scatter_over_torch()
    rate = pool["population"]["gib_per_s"]
    pages = ", ".join(sorted({segment["pages"] for segment in pool["segments"]}))
    rows = [
        Row("put8_over_memcpy", "8 MiB in, end to end, checksum included ÷ memcpy", put_ratio, "≥", 1.1,
            f"{put:.1f} ÷ {floor_in:.1f} GB/s"),
        Row("get8_over_memcpy", "8 MiB out, not verified ÷ memcpy", get_ratio, "≥", 1.4,
            f"{get:.1f} ÷ {floor_out:.1f} GB/s"),
        Row("scatter_over_torch", "paged scatter ÷ torch index_copy_", scatter["ratio"] if scatter else None, "≥", 2,
            f"{scatter['kvd_gb_s']:.1f} ÷ {scatter['torch_gb_s']:.1f} GB/s" if scatter else "torch is not installed"),
        Row("populate_gib_s", "population of the pool", rate, "", None, f"pages: {pages}"),
    ]  # fmt: skip
    return rows, {
        "memcpy_in_gb_s": floor_in,
        "memcpy_out_gb_s": floor_out,
        "put8_gb_s": put,
        "get8_gb_s": get,
        "scatter": scatter,
    }


def _geometry_rows(other: int, progress: Progress) -> tuple[list[Row], dict[str, Any]]:
    progress("family match, re-sharding")
    with (
        running(other, pool_size="768MiB", pool_families_max=65536) as bench,
        bench.connect("bench") as store,
    ):
        match = geometry.family_match_over_plain(store)
        reshard = geometry.reshard_over_plain(store)
    progress("gather and scatter over run sizes")
    sweep = geometry.paged_sweep()
    rows = [
        Row("family_match_over_plain", "match of 128 chunks × 8 shards by geometry ÷ plain match of 128",
            max(match.values()), "≤", 2, ", ".join(f"{name} {ratio:.2f}" for name, ratio in match.items())),
        Row("reshard_4to2_over_plain", "a TP 2 rank reads what TP 4 wrote ÷ what TP 2 wrote", reshard["ratio"],
            "≥", 0.8, f"plain {reshard['plain_gb_s']:.1f} GB/s"),
    ]  # fmt: skip
    for figure, what, target, from_bytes in (
        ("gather_over_floor", "gather ÷ non-temporal copy, runs of 32 KiB and up", 0.8, geometry.LONG_RUN_BYTES_MIN),
        ("scatter_over_floor", "scatter ÷ non-temporal copy, runs of 32 KiB and up", 0.8, geometry.LONG_RUN_BYTES_MIN),
        ("gather_sweep_over_torch", "gather ÷ index_select, every run size", 1.0, 0),
        ("scatter_sweep_over_torch", "scatter ÷ index_copy_, every run size", 1.0, 0),
    ):  # fmt: skip
        worst = geometry.worst(sweep, figure.replace("_sweep", ""), from_bytes)
        note = worst[1] if worst else "torch is not installed"
        rows.append(Row(figure, what, worst[0] if worst else None, "≥", target, note))
    return rows, {"family_match": match, "reshard": reshard, "paged_sweep": sweep}


def _growth(plan: Plan, other: int, progress: Progress) -> dict[str, Any]:
    sizes = []
    for families in plan.growth:
        with running(other, **tiny_settings(families)) as bench, bench.connect("bench") as store:
            filled = index.Filled(store, store.namespace(index.manifest()))
            count = families * 9 // 10
            index.write_through(filled, count, count, progress)
            sizes.append({
                "objects": count, "match128_mkeys_s": index.match_mkeys_s(filled, 2000),
                "miss128_us": index.miss_us(filled, 2000), "fetch_p50_us": index.fetch_us(filled, 10000),
                "lease128_us": index.lease_us(filled, 1000),
                "publish128_us_per_object": index.publish_us(filled, index.BATCH, 100) / index.BATCH,
                "metadata_bytes_per_object": index.metadata_bytes(bench, count),
            })  # fmt: skip
    crowds = []
    with running(other, **tiny_settings(100_000)) as bench, bench.connect("bench") as store:
        filled = index.Filled(store, store.namespace(index.manifest()))
        index.write_through(filled, 150_000, 60_000, progress)
        for clients in plan.crowds:
            crowds.append(
                {"clients": clients, "publish128_us_per_object": index.crowd(bench, filled, clients)}
            )
    return {"objects": sizes, "clients": crowds}
