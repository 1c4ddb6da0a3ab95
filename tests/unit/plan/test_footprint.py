"""What a model keeps and what a reader needs of it: against kvd.layout's own rule, over real configurations."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.errors import UsageError
from kvd.kvctl.plan_options import footprint_of
from kvd.layout.family import Completeness
from kvd.layout.geometry import Geometry, Group, Plane, Rule
from kvd.layout.shards import Split
from kvd.plan.breakeven import LoadCost, PrefillCost, break_even_tokens, load_gain_ns
from kvd.plan.capacity import CapacityPlan
from kvd.plan.footprint import Footprint, KeptGroup, PrefixRead
from kvd.plan.objects import ObjectsPlan
from kvd.plan.units import GIB, MIB

CONFIGS = sorted((Path(__file__).parents[4] / "shared" / "configs").glob("*.json"))
HYBRID = Footprint(
    (
        KeptGroup(name="full", token_bytes=100, members_count=2),
        KeptGroup(name="window 9", token_bytes=300, last_tokens=8, members_count=2),
        KeptGroup(name="state", snapshot_bytes=5_000, members_count=4),
    )
)


def geometry(path: Path) -> Geometry:
    return Geometry.from_hf_config(str(path), dtype="bfloat16")


@pytest.mark.skipif(not CONFIGS, reason="no model configurations in ../shared/configs")
def test_every_real_model_keeps_and_needs_what_the_layout_says() -> None:
    """Stored bytes, members, and what kvd loads of a prefix, chunk by chunk, against `Completeness.required`."""
    assert len(CONFIGS) > 30
    for path in CONFIGS:
        geom = geometry(path)
        for tp in (1, 3 if "smollm" in path.name else 2):
            kept = footprint_of(geom, tp)
            assert kept.stored_bytes(8_192, 3) == geom.stored_bytes(8_192, snapshots=3), path.name
            for chunk_tokens in (64, 256, 2_048):
                objects = geom.objects(chunk_tokens=chunk_tokens, tp=tp)
                assert sum(group.members_count for group in kept.groups) == len(objects)
                rule = Completeness(geom, chunk_tokens)
                for chunks in (0, 1, 2, 3, 7, 16, 40):
                    masks = rule.required(chunks, Split(tp=tp).code)
                    loaded = sum(
                        part.size_bytes for mask in masks for part in objects if mask >> part.index & 1
                    )
                    needed = kept.needed_bytes(chunks * chunk_tokens, chunk_tokens)
                    bound = any(group.last_is_bound for group in kept.groups)
                    assert needed == loaded or (bound and needed > loaded), (path.name, chunk_tokens, chunks)
                    if chunks and not bound:
                        tokens = chunks * chunk_tokens
                        assert kept.needed_bytes(tokens) == geom.resident_bytes(tokens), (path.name, tokens)


@pytest.mark.skipif(not CONFIGS, reason="no model configurations in ../shared/configs")
@pytest.mark.parametrize(
    ("name", "tp", "members"),
    [("deepseek-v3", 8, [1]), ("llama-3.1-8b", 16, [8]), ("llama-3.1-8b", 4, [4]), ("gemma-3-1b", 4, [1, 1])],
)
def test_replicated_heads_and_latents_are_stored_once(name: str, tp: int, members: list[int]) -> None:
    kept = footprint_of(geometry(CONFIGS[0].with_name(f"{name}.json")), tp)
    assert [group.members_count for group in kept.groups] == members


def test_a_chunked_group_is_taken_at_its_most() -> None:
    """It needs tokens since the last multiple of its stretch: from none to all but one of it."""
    plane = Plane("k", 1, 1, "uint8")
    geom = Geometry([Group(Rule.CHUNKED, (0,), (plane,), 512)], 1)
    kept = footprint_of(geom)
    assert kept.groups[0].last_is_bound
    needed = [kept.needed_bytes(tokens) for tokens in range(0, 2_000, 16)]
    exact = [geom.resident_bytes(tokens) for tokens in range(0, 2_000, 16)]
    assert all(most >= least for most, least in zip(needed, exact, strict=True))
    assert max(needed) == 511
    assert "the most is taken" in kept.windows_said


def test_groups_of_one_rule_keep_names_of_their_own() -> None:
    wide, narrow = Plane("k", 8, 16, "uint8"), Plane("k", 1, 16, "uint8")
    geom = Geometry([Group(Rule.FULL, (0, 2), (wide,)), Group(Rule.FULL, (1,), (narrow,))], 3)
    assert [group.name for group in footprint_of(geom).groups] == ["full", "full (2)"]


lengths = st.integers(0, 400)


@given(lengths, st.integers(1, 40), st.none() | st.integers(0, 100), st.integers(1, 9))
def test_needed_chunks_are_those_that_hold_a_needed_token(
    tokens: int, chunk: int, last: int | None, size: int
) -> None:
    group = KeptGroup(name="g", token_bytes=size, last_tokens=last)
    first = 0 if last is None else max(0, tokens - last)
    held = {token // chunk for token in range(first, tokens)}
    assert group.needed_chunks(tokens, chunk) == len(held)
    assert group.needed_bytes(tokens, chunk) == len(held) * chunk * size


groups = st.lists(
    st.builds(
        lambda size, last, state: (
            KeptGroup(name="", snapshot_bytes=size) if state else KeptGroup(name="", token_bytes=size, last_tokens=last)
        ),
        st.integers(1, 10**6), st.none() | st.integers(0, 200), st.booleans(),
    ),
    min_size=1, max_size=4,
).map(lambda found: Footprint(tuple(replace(group, name=str(n)) for n, group in enumerate(found))))  # fmt: skip


@given(groups, st.integers(1, 32))
def test_needed_bytes_are_concave_in_whole_chunks(kept: Footprint, chunk: int) -> None:
    """What makes bisection right: each further chunk adds no more than the one before."""
    needed = [kept.needed_bytes(n * chunk, chunk) for n in range(1, 40)]
    added = [b - a for a, b in pairwise(needed)]
    assert all(later <= earlier for earlier, later in pairwise(added))
    assert min(added) >= 0


costs = st.builds(
    LoadCost, st.integers(0, 10**6), st.integers(10**6, 10**10), st.none() | st.integers(10**6, 10**10),
    st.integers(0, 10**6),
)  # fmt: skip
prefills = st.builds(PrefillCost, st.integers(0, 10**6), st.integers(0, 10**8), st.integers(0, 10**8))


@settings(max_examples=80)
@given(costs, prefills, groups, st.integers(1, 16), st.integers(16, 300))
def test_break_even_length_of_windows_and_states_is_found_by_bisection(
    cost: LoadCost, prefill: PrefillCost, kept: Footprint, chunk: int, tokens_max: int
) -> None:
    def gain(chunks: int) -> int:
        tokens = chunks * chunk
        return load_gain_ns(cost, prefill, tokens + 1, tokens, kept.needed_bytes(tokens, chunk))

    found = break_even_tokens(cost, prefill, kept, tokens_max, chunk_tokens=chunk)
    gains = {n: gain(n) for n in range(1, tokens_max // chunk + 1)}
    rounded_ns = 8  # parts are rounded to whole ns each
    if found is None:
        assert gains[tokens_max // chunk] <= 0
        assert max(gains.values()) <= rounded_ns
        return
    assert found % chunk == 0
    assert gains[found // chunk] > 0
    assert all(gains[n] <= rounded_ns for n in gains if n < found // chunk)
    assert all(gains[n] > -rounded_ns for n in gains if n > found // chunk)


def test_a_window_pays_from_a_length_at_which_all_of_it_would_not() -> None:
    """Bytes per token alone would say that loading never pays."""
    kept = Footprint(
        (
            KeptGroup(name="full", token_bytes=1_000),
            KeptGroup(name="window", token_bytes=9_000, last_tokens=1_023),
        )
    )
    cost, prefill = (
        LoadCost(0, 10**9, None, 0),
        PrefillCost(0, 2_000_000, 0),
    )  # 2 us a token; 1 us and 10 us to load
    # 1 us × n + 9 us × 1,023 < 2 us × n from n = 9,208 on; in chunks of 256 the window is 1,024.
    assert break_even_tokens(cost, prefill, kept, 1 << 20) == 9 * 1_023 + 1
    assert break_even_tokens(cost, prefill, kept, 1 << 20, chunk_tokens=256) == 9_472
    assert break_even_tokens(cost, prefill, Footprint.by_hand(10_000), 1 << 20) is None


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: KeptGroup(name="g"), "bytes per token = 0 is below 1"),
        (lambda: KeptGroup(name="g", token_bytes=1, snapshot_bytes=1), "allowed: one of them"),
        (lambda: KeptGroup(name="g", snapshot_bytes=1, last_tokens=1), "no window for a snapshot"),
        (lambda: KeptGroup(name="g", token_bytes=1, members_count=0), "members of a chunk = 0"),
        (lambda: KeptGroup(name="g", token_bytes=1, last_tokens=-1), "last tokens needed = -1"),
        (lambda: Footprint(()), "groups = 0 is below 1"),
        (lambda: Footprint((HYBRID.groups[0],) * 2), "a name is given twice"),
        (lambda: PrefixRead(footprint=HYBRID, tokens=100, chunk_tokens=16), "allowed: 96 or 112"),
        (lambda: PrefixRead(footprint=HYBRID, tokens=10, chunk_tokens=16), "allowed: 16"),
        (lambda: PrefixRead(footprint=HYBRID, tokens=0), "--prefix-tokens = 0"),
    ],
)
def test_what_cannot_be_kept_is_refused(make: object, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        make()  # type: ignore[operator]


def test_a_read_is_added_up_by_group() -> None:
    read = PrefixRead(footprint=HYBRID, tokens=64, chunk_tokens=16)
    assert [(step.label, step.value) for step in read.steps] == [
        ("read, full", 6_400), ("read, window 9", 16 * 300), ("read, state", 5_000), ("to load", 16_200),
    ]  # fmt: skip
    assert read.steps[1].expression == "last 1 chunk × 16 tokens × 300 B"
    assert any("window 9: 8 tokens" in line for line in read.assumptions)
    assert any("snapshot is read, taken exactly behind token 64" in line for line in read.assumptions)
    plain = PrefixRead(footprint=Footprint.by_hand(100), tokens=64)
    assert [step.label for step in plain.steps] == ["to load"]
    assert plain.assumptions == ()


ROOM = CapacityPlan(
    prefixes_count=10, prefix_tokens=64, footprint=HYBRID, chunk_tokens=16, replicas_count=1, hosts_count=1,
    dram_per_host_bytes=GIB, usable_share=Fraction(1), spare_hosts=0,
)  # fmt: skip
COUNT = ObjectsPlan(prefixes_count=10, prefix_tokens=64, footprint=HYBRID, chunk_tokens=16)


def test_capacity_counts_tokens_and_snapshots() -> None:
    assert ROOM.prefix_bytes == HYBRID.stored_bytes(64, 1) == 64 * 400 + 5_000
    assert replace(ROOM, snapshots_count=3).unique_bytes == 10 * (64 * 400 + 15_000)
    shared = replace(ROOM, shared_tokens=32)
    assert shared.unique_bytes == 10 * (32 * 400 + 5_000) + 32 * 400 + 5_000
    assert any("one behind what all share" in line for line in shared.assumptions)
    labels = [step.label for step in ROOM.steps]
    assert labels[:4] == ["one prefix, full", "one prefix, window 9", "one prefix, state", "one prefix"]
    assert any("all tokens of window 9 are kept" in line for line in ROOM.assumptions)


def test_objects_are_counted_by_group_with_snapshots_among_them() -> None:
    assert COUNT.objects_count == 10 * 4 * (2 + 2) + 10 * 4
    assert COUNT.object_bytes is None
    assert {step.label: step.value for step in COUNT.steps}["one object, window 9"] == 16 * 300 // 2
    found = {one["name"]: one for one in COUNT.answers["groups"]}  # type: ignore[union-attr,index,call-overload]
    assert found["state"] == {"name": "state", "members_count": 4, "object_bytes": 1_250, "objects_count": 40}
    assert replace(COUNT, snapshots_count=4).objects_count - COUNT.objects_count == 30 * 4
    assert "leave the snapshots as they are" in COUNT.conclusion


def test_only_whole_chunks_are_stored_and_shared() -> None:
    """A shared beginning that ends within a chunk is in every prefix's own chunk as well."""
    plain = replace(ROOM, footprint=Footprint.by_hand(1), prefix_tokens=70, shared_tokens=40)
    assert plain.unique_bytes == 10 * 32 + 32
    assert any("the last 6 tokens of a prefix fill no chunk of 16" in line for line in plain.assumptions)
    assert any("8 tokens of the 40 shared fill no chunk" in line for line in plain.assumptions)
    count = replace(COUNT, footprint=Footprint.by_hand(1), prefix_tokens=70, shared_tokens=40)
    assert count.families_count * 16 == plain.unique_bytes


def test_a_model_of_states_keeps_a_snapshot_a_prefix_and_no_chunks() -> None:
    states = Footprint((KeptGroup(name="state", snapshot_bytes=4 * MIB, members_count=2),))
    room = replace(ROOM, footprint=states)
    assert room.unique_bytes == 40 * MIB
    count = replace(COUNT, footprint=states)
    assert (count.objects_count, count.families_count, count.chunk_bytes) == (20, 10, 0)
    assert "one chunk" not in [step.label for step in count.steps]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"snapshots_count": 0}, "snapshots = 0 is below 1"),
        ({"snapshots_count": 5}, "allowed: 1 … 4"),
        ({"snapshots_count": 3, "shared_tokens": 32}, "with 2 chunks of its own"),
        ({"snapshots_count": 1, "shared_tokens": 64}, "allowed: leave it out"),
        ({"snapshots_count": 1, "footprint": Footprint.by_hand(1)}, "no states are kept"),
        ({"chunk_tokens": 65}, "nothing would ever be stored"),
    ],
)
def test_snapshots_that_cannot_be_are_refused(change: dict[str, object], says: str) -> None:
    for plan in (ROOM, COUNT):
        with pytest.raises(UsageError, match=says):
            replace(plan, **change)  # type: ignore[arg-type]


@given(groups, st.integers(1, 50), st.integers(1, 300), st.integers(1, 64), st.integers(0, 300))
def test_capacity_and_objects_count_the_same_bytes(
    kept: Footprint, prefixes: int, tokens: int, chunk: int, shared: int
) -> None:
    chunk, shared = min(chunk, tokens), min(shared, tokens)
    count = ObjectsPlan(
        prefixes_count=prefixes,
        prefix_tokens=tokens,
        footprint=kept,
        chunk_tokens=chunk,
        shared_tokens=shared,
    )
    by_object = sum(count.group_objects_count(group) * group.object_bytes(chunk) for group in kept.groups)
    assert by_object == count.unique_bytes
    assert count.unique_bytes <= prefixes * kept.stored_bytes(tokens, 1) + kept.snapshot_bytes
