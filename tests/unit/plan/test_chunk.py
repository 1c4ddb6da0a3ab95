"""The chunk-size sweep: names of chunks, the reference cache, what is counted, and a recorded trace."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.errors import UsageError
from kvd.kvctl.plan_trace import read_trace
from kvd.plan import ledger
from kvd.plan.chunk import (
    Published,
    RecordedRequest,
    ReferenceLru,
    SweepCosts,
    SweepSetup,
    chunk_chain,
    percentile,
    replay,
    sweep,
    usable_prefix,
)
from kvd.plan.footprint import Footprint

TRACE = Path(__file__).parents[4] / "shared" / "traces" / "mooncake_conversation.jsonl"
SETUP = SweepSetup(footprint=Footprint.by_hand(10), trace_block_tokens=64)


def request(tokens: int, *ids: int, at_ms: int = 0) -> RecordedRequest:
    return RecordedRequest(at_ms, tokens, 1, ids)


def test_chunks_are_named_by_the_prefix_they_end() -> None:
    prompt = request(300, 7, 8, 9, 10, 11)
    assert chunk_chain(prompt, 64, 64) == [7, 8, 9, 10]
    assert chunk_chain(prompt, 64, 128) == [8, 10]
    assert chunk_chain(prompt, 64, 32) == [14, 15, 16, 17, 18, 19, 20, 21, 22]
    assert chunk_chain(prompt, 64, 512) == []


def test_block_ids_must_fit_the_length() -> None:
    with pytest.raises(UsageError, match="2 block ids for 300 tokens"):
        chunk_chain(request(300, 1, 2), 64, 64)


@given(
    st.lists(st.integers(0, 3), max_size=6),
    st.lists(st.integers(0, 3), max_size=6),
    st.sampled_from([16, 64, 128]),
)
def test_two_prompts_share_names_exactly_as_far_as_they_share_blocks(
    left: list[int], right: list[int], chunk: int
) -> None:
    """Ids made as a trace makes them: one per distinct prefix. A common chunk is one whose blocks are all common."""
    ids: dict[tuple[int, ...], int] = {}

    def chain(blocks: list[int]) -> list[int]:
        named = [ids.setdefault(tuple(blocks[: n + 1]), len(ids)) for n in range(len(blocks))]
        return chunk_chain(request(len(blocks) * 64, *named), 64, chunk) if blocks else []

    a, b = chain(left), chain(right)
    common_blocks = next((n for n, (x, y) in enumerate(zip(left, right, strict=False)) if x != y),
                         min(len(left), len(right)))  # fmt: skip
    assert sum(x == y for x, y in zip(a, b, strict=False)) == common_blocks * 64 // chunk
    assert len(set(a)) == len(a)


def test_usable_prefix_leaves_the_last_token_and_whole_blocks() -> None:
    assert usable_prefix(8_192, 8_192, 16) == 8_176
    assert usable_prefix(8_193, 8_192, 16) == 8_192
    assert usable_prefix(1, 0, 16) == 0
    assert usable_prefix(100, 64, 16) == 64


def test_percentile_is_the_nearest_rank() -> None:
    assert percentile([], 99) == 0
    assert percentile([5], 1) == 5
    assert percentile(list(range(1, 101)), 99) == 99
    assert percentile(list(range(1, 101)), 100) == 100


class SlowLru:
    """The rule said plainly: evict, among families with no child present, the one used longest ago."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.clock = capacity, 0
        self.used: dict[int, int] = {}
        self.parent: dict[int, int | None] = {}

    def match(self, chain: Sequence[int]) -> int:
        self.clock += 1
        hits = 0
        while hits < len(chain) and chain[hits] in self.used:
            self.used[chain[hits]] = self.clock
            hits += 1
        return hits

    def publish(self, chain: Sequence[int]) -> Published:
        self.clock += 1
        kept = chain[: self.capacity]
        stored = sum(family not in self.used for family in kept)
        for position, family in enumerate(kept):
            self.used[family] = self.clock
            self.parent[family] = kept[position - 1] if position else None
        evicted = 0
        while len(self.used) > self.capacity:
            parents = {self.parent[family] for family in self.used}
            leaves = [family for family in self.used if family not in parents]
            oldest = min(self.used[family] for family in leaves)
            victim = next(family for family in leaves if self.used[family] == oldest)
            del self.used[victim]
            evicted += 1
        return Published(stored, evicted)


paths = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=1, max_size=40)


@settings(max_examples=60)
@given(paths, st.integers(1, 12))
def test_reference_cache_keeps_prefixes_and_agrees_with_the_plain_rule(
    prompts: list[list[int]], room: int
) -> None:
    """Fails if chains are touched from the front: then a prefix is older than its suffix and leaves before it."""
    fast, slow = ReferenceLru(10, room * 10), SlowLru(room)
    ids: dict[tuple[int, ...], int] = {}
    for blocks in prompts:
        chain = [ids.setdefault(tuple(blocks[: n + 1]), len(ids)) for n in range(len(blocks))]
        hits = fast.match(chain, 0)
        assert hits == slow.match(chain)
        if hits < len(chain):  # as in a replay: a whole hit publishes nothing, its order is the match's alone
            assert fast.publish(chain, 0) == slow.publish(chain)
        assert fast.families_count <= room
        for name, family in ids.items():
            if family in fast and len(name) > 1:
                assert ids[name[:-1]] in fast
        assert {family for family in ids.values() if family in fast} == set(slow.used)


def test_a_chain_longer_than_the_cache_keeps_its_beginning() -> None:
    cache = ReferenceLru(10, 30)
    assert cache.publish([1, 2, 3, 4, 5], 0) == Published(3, 0)
    assert [family in cache for family in (1, 2, 3, 4)] == [True, True, True, False]


def test_replay_counts() -> None:
    """Two requests for one prompt of 256 tokens, then a longer one: every figure by hand."""
    costs = SweepCosts(
        match_per_chunk_ns=1, lease_per_chunk_ns=10, publish_per_object_ns=100, load_per_object_ns=1_000,
        load_bytes_per_s=10**9,
    )  # fmt: skip
    setup = replace(SETUP, footprint=Footprint.by_hand(10, 2), costs=costs)
    prompts = [
        request(256, 1, 2, 3, 4),
        request(256, 1, 2, 3, 4, at_ms=1_000),
        request(320, 1, 2, 3, 4, 5, at_ms=2_000),
    ]
    row = replay(prompts, 64, setup, ReferenceLru)
    assert row.usable_tokens == 240 + 256
    assert row.requests_hit_count == 2
    assert row.fetched_bytes == 2 * 4 * 640
    # 256 tokens present, of which 255 may be used, in blocks of 16: 16 tokens are loaded and computed all the same.
    assert row.fetched_in_vain_bytes == 16 * 10
    assert row.objects_written_count == row.objects_peak_count == 10
    assert row.objects_evicted_count == 0
    assert row.metadata_peak_bytes == 10 * 512
    assert row.metadata_cpu_ns == (1 + 8 * 100) + (4 + 40) + (5 + 40 + 2 * 100)
    assert row.load_p50_ns == row.load_p99_ns == 8 * 1_000 + 4 * 640
    assert row.fetched_mean_bytes_per_s == 2 * 4 * 640 // 2
    assert row.fetched_peak_bytes_per_s == Fraction(2 * 4 * 640, 10)
    assert row.usable_share == Fraction(496, 832)


def test_smaller_chunks_lose_less_of_a_shared_prefix_and_make_more_objects() -> None:
    prompts = [request(192, 1, 2, 3), request(256, 1, 2, 3, 4)]
    small, large = (replay(prompts, size, SETUP, ReferenceLru) for size in (64, 128))
    assert (small.usable_tokens, large.usable_tokens) == (192, 128)
    assert (small.objects_peak_count, large.objects_peak_count) == (4, 2)


@pytest.mark.parametrize(
    ("sizes", "change", "says"),
    [
        ([96], {}, "allowed: a divisor or a multiple of 64"),
        ([8], {}, "not a multiple of the engine's block of 16"),
        ([64, 64], {}, "name one twice"),
        ([], {}, "number of --chunk-tokens = 0 is below 1"),
        ([0], {}, "--chunk-tokens = 0 is below 1"),
        ([64], {"capacity_bytes": 639}, "capacity = 639 B holds no chunk of 64 tokens"),
    ],
)
def test_sweep_refuses(sizes: list[int], change: dict[str, int], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        sweep([request(64, 1)], sizes, replace(SETUP, **change))  # type: ignore[arg-type]


def test_an_empty_trace_is_refused() -> None:
    with pytest.raises(UsageError, match="has no requests"):
        sweep([], [64], SETUP)


def test_sweep_sorts_requests_and_rows_and_replays_through_the_cache_it_is_given() -> None:
    made: list[tuple[int, int | None]] = []
    heard: list[int] = []

    def factory(family_bytes: int, capacity_bytes: int | None) -> ReferenceLru:
        made.append((family_bytes, capacity_bytes))
        return ReferenceLru(family_bytes, capacity_bytes)

    late, early = request(256, 1, 2, 3, 4, at_ms=9), request(192, 1, 2, 3, at_ms=3)
    found = sweep([late, early], [128, 64], replace(SETUP, capacity_bytes=5_000), factory,
                  lambda row: heard.append(row.chunk_tokens))  # fmt: skip
    assert made == [(640, 5_000), (1_280, 5_000)]
    assert heard == [row.chunk_tokens for row in found.rows] == [64, 128]
    assert found.rows[0].usable_tokens == 192
    assert found.most is found.proposed is found.rows[0]
    assert json.loads(json.dumps(ledger.as_dict(found)))["answers"]["proposed_chunk_tokens"] == 64


def test_the_largest_chunk_within_one_per_cent_is_proposed() -> None:
    prompts = [request(6_400, *range(100)), request(6_464, *range(101))]
    found = sweep(prompts, [16, 64, 128, 256], SETUP)
    assert [row.usable_tokens for row in found.rows] == [6_400, 6_400, 6_400, 6_400]
    assert found.proposed.chunk_tokens == 256


@pytest.mark.slow
@pytest.mark.skipif(not TRACE.exists(), reason=f"no recorded trace at {TRACE}")
def test_the_public_trace_gives_the_published_block_hit_ratio() -> None:
    """An infinite cache of 512-token blocks hits 0.366 of them, 5 % of the unique blocks under LRU 0.196."""
    requests = list(read_trace(TRACE, 100_000))
    blocks = sum(len(r.block_ids) for r in requests)
    for capacity, expected in ((None, 0.366), (182_790 // 20, 0.196)):
        cache = ReferenceLru(1, capacity)
        hits = 0
        for one in requests:
            hits += cache.match(one.block_ids, one.timestamp_ms)
            cache.publish(one.block_ids, one.timestamp_ms)
        assert hits / blocks == pytest.approx(expected, abs=0.002)
    setup = SweepSetup(footprint=Footprint.by_hand(131_072, 4), trace_block_tokens=512)
    found = sweep(requests, [256, 512, 1_024], setup)
    assert [round(float(row.usable_share), 3) for row in found.rows] == [0.374, 0.373, 0.34]
    assert found.proposed.chunk_tokens == 512
