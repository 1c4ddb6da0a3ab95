"""Splits and re-sharding: every byte once, nothing copied in vain, the whole judged by a slow reference."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import object_bytes, rows_of

from kvd import limits
from kvd.errors import CompatibilityError, InvariantError, UsageError
from kvd.layout import shards, strided
from kvd.layout.geometry import Geometry, Group, Plane, Rule, kv_planes
from kvd.layout.shards import Objects, Split

HYBRID = Geometry([
    Group(Rule.FULL, (1, 4, 6), kv_planes(4, 6, 4, "bfloat16", "int8")),
    Group(Rule.WINDOW, (0, 2, 5), kv_planes(2, 4, 4, "bfloat16"), 7),
    Group(Rule.STATE, (3, 5), (
        Plane("ssm", 4, 6, "float32"), Plane("conv_x", 4, 4, "bfloat16"), Plane("conv_b", 1, 8, "bfloat16"),
        Plane("conv_c", 1, 8, "bfloat16"),
    )),
], 7)  # fmt: skip
LATENT = Geometry.latent(layers=3, latent_dim=16, rope_dim=4, dtype="bfloat16")
LLAMA = Geometry.attention(layers=32, kv_heads=8, head_dim=128, dtype="bfloat16")
CHUNK = 16

SPLITS = st.builds(
    Split,
    tp=st.sampled_from([1, 2, 4, 8]),
    pp=st.sampled_from([1, 2, 3]),
    cp=st.sampled_from([1, 2, 4]),
    cp_interleave_tokens=st.sampled_from([0, 1]),
    pp_rule=st.sampled_from(shards.PP_RULES),
)


def built(geom: Geometry, split: Split, seed: int = 7) -> dict[int, bytes]:
    rows = rows_of(geom, CHUNK, seed)
    objects = Objects(geom, split, CHUNK)
    return {part.index: object_bytes(geom.groups[part.group], rows[part.group], part) for part in objects}


@pytest.mark.slow
@settings(deadline=None)
@given(SPLITS, st.sampled_from([HYBRID, LATENT]))
def test_sizes_are_those_of_the_bytes(split: Split, geom: Geometry) -> None:
    objects = Objects(geom, split, CHUNK)
    assert {part.index: part.size_bytes for part in objects} == {
        index: len(data) for index, data in built(geom, split).items()
    }
    assert objects.chunk_bytes == geom.stored_bytes(CHUNK)
    assert sum(objects.group_masks) == (1 << len(objects)) - 1


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(SPLITS, SPLITS, st.sampled_from([HYBRID, LATENT]))
def test_resharding_builds_exactly_the_other_split(written: Split, wanted: Split, geom: Geometry) -> None:
    source = built(geom, written)
    expected = built(geom, wanted)
    plan = shards.reshard(Objects(geom, written, CHUNK), Objects(geom, wanted, CHUNK))
    made = {index: bytearray(len(data)) for index, data in expected.items()}
    moved = strided.run_reference(plan, source.__getitem__, made.__getitem__)
    assert {index: bytes(data) for index, data in made.items()} == expected
    assert moved == geom.stored_bytes(CHUNK)  # each byte once
    assert all(len(copy.loops) <= strided.LOOPS_MAX for copy in plan)


def test_a_head_range_is_one_run_a_layer() -> None:
    four, two = LLAMA.objects(chunk_tokens=256, tp=4), LLAMA.objects(chunk_tokens=256, tp=2)
    plan = shards.reshard(four, two)
    assert len(plan) == 4
    for copy in plan:
        assert copy.run_bytes == 2 * 2 * 256 * 128 * 2  # 2 heads, K and V
        assert copy.runs_count == 32
    assert [(copy.src, copy.dst) for copy in plan] == [(0, 0), (1, 0), (2, 1), (3, 1)]
    eight = shards.reshard(two, LLAMA.objects(chunk_tokens=256, tp=8))
    assert {copy.run_bytes for copy in eight} == {2 * 256 * 128 * 2}


def test_a_rank_reads_only_what_it_needs() -> None:
    four, eight = LLAMA.objects(chunk_tokens=256, tp=4), LLAMA.objects(chunk_tokens=256, tp=8)
    part = eight.for_rank(tp_rank=5)[0]
    needed = shards.parts_needed(shards.reshard(four, eight, [part.index]))
    assert needed == {2: part.size_bytes}


def test_the_same_split_is_one_copy_a_member() -> None:
    four = LLAMA.objects(chunk_tokens=256, tp=4)
    assert [(c.src, c.dst, c.run_bytes, c.loops) for c in shards.reshard(four, four)] == [
        (i, i, 8 << 20, ()) for i in range(4)
    ]


def test_few_heads_are_stored_once_and_read_by_all() -> None:
    """Row E4: store a replicated head once per rank and the sizes and counts here fail."""
    latent = LATENT.objects(chunk_tokens=CHUNK, tp=8)
    assert len(latent) == 1
    assert latent[0].ranks == tuple(range(8))
    assert [len(latent.writes(tp_rank=rank)) for rank in range(8)] == [1] + [0] * 7
    assert all(latent.for_rank(tp_rank=rank) == [latent[0]] for rank in range(8))
    grouped = LLAMA.objects(chunk_tokens=256, tp=32)
    assert len(grouped) == 8
    assert grouped[3].ranks == (12, 13, 14, 15)
    assert grouped.chunk_bytes == LLAMA.stored_bytes(256)
    assert [part.index for rank in range(32) for part in grouped.writes(tp_rank=rank)] == list(range(8))


def test_stages_hold_their_layers() -> None:
    objects = HYBRID.objects(chunk_tokens=CHUNK, pp=2)
    assert [(p.group, p.stage, p.layers, p.model_layers) for p in objects] == [
        (0, 0, (0, 1), (1,)), (0, 1, (1, 3), (4, 6)),
        (1, 0, (0, 2), (0, 2)), (1, 1, (2, 3), (5,)),
        (2, 1, (0, 2), (3, 5)),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("rule", "layers", "pp", "sizes"),
    [
        ("even", 10, 4, [2, 3, 2, 3]), ("inner", 10, 4, [2, 3, 3, 2]), ("front", 10, 4, [3, 3, 2, 2]),
        ("ceil", 10, 4, [3, 3, 3, 1]), ("inner", 61, 8, [7, 7, 8, 8, 8, 8, 8, 7]), ("inner", 32, 4, [8] * 4),
        ("ceil", 5, 4, [2, 2, 1, 0]),
    ],
)  # fmt: skip
def test_stage_rules(rule: str, layers: int, pp: int, sizes: list[int]) -> None:
    stages = Split(pp=pp, pp_rule=rule).stages(layers)
    assert [end - begin for begin, end in stages] == sizes
    assert stages[0][0] == 0
    assert all(a[1] == b[0] for a, b in itertools.pairwise(stages))
    assert stages[-1][1] == layers


@settings(deadline=None)
@given(SPLITS, st.sampled_from([HYBRID, LATENT]))
def test_every_rank_finds_all_it_reads_and_each_part_has_one_writer(split: Split, geom: Geometry) -> None:
    objects = Objects(geom, split, CHUNK)
    ranks = [
        {"tp_rank": t, "pp_rank": p, "cp_rank": c}
        for t in range(split.tp) for p in range(split.pp) for c in range(split.cp)
    ]  # fmt: skip
    written = sorted(part.index for rank in ranks for part in objects.writes(**rank))
    assert written == list(range(len(objects)))
    read = {part.index for rank in ranks for part in objects.for_rank(**rank)}
    assert read == set(range(len(objects)))


@settings(deadline=None)
@given(st.integers(0, 0xFFFF))
def test_codes_are_splits_or_refused(code: int) -> None:
    try:
        split = Split.from_code(code)
    except UsageError:
        return
    assert split.code == code
    assert Split.from_code(split.code) == split


def test_the_code_of_a_split_is_fixed() -> None:
    assert Split().code == 0
    assert Split(tp=4).code == 3
    assert Split(pp=3, pp_rule="inner").code == 2 << 6 | 1 << 14
    assert Split(tp=64, pp=16, cp=8, cp_interleave_tokens=64, pp_rule="ceil").code == 0xFFFF
    assert Split(tp=2, pp=2, cp=2, cp_interleave_tokens=16).name == "TP 2 x PP 2 x CP 2 by 16"
    assert Split().name == "TP 1"
    assert Split(pp_rule="ceil", cp_interleave_tokens=16) == Split()


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: LLAMA.objects(chunk_tokens=256, tp=3), "8 heads of group full .* tp=3 .* 1, 2, 4, 8, 16"),
        (lambda: Split(tp=0), "tp is 0"),
        (lambda: Split(tp=65), "allowed: 1 … 64"),
        (lambda: Split(tp=2.0), "tp is 2.0"),
        (lambda: Split(pp=17), "pp is 17"),
        (lambda: Split(cp=3), "cp is 3; allowed: 1, 2, 4, 8"),
        (lambda: Split(cp=2.0), "cp is 2.0; allowed: 1, 2, 4, 8"),
        (lambda: Split(cp=True), "cp is True"),
        (lambda: Split(cp=2, cp_interleave_tokens=16.0), "cp_interleave_tokens is 16.0"),
        (lambda: Split(cp=2, cp_interleave_tokens=5), "interleave_tokens is 5"),
        (lambda: Split(pp=2, pp_rule="odd"), "pp_rule is 'odd'"),
        (lambda: Split.from_code(70_000), "code is 70000"),
        (lambda: Split.from_code(1 << 14), "canonical 0"),
        (lambda: LATENT.objects(chunk_tokens=16, pp=4), "at most the 3 layers"),
        (lambda: LATENT.objects(chunk_tokens=10, cp=4), "10 cannot be dealt out to 4"),
        (lambda: LATENT.objects(chunk_tokens=4, cp=8), "4 cannot be dealt out to 8"),
        (
            lambda: LATENT.objects(chunk_tokens=24, split=Split(cp=2, cp_interleave_tokens=16)),
            "multiples of 32",
        ),
        (lambda: LLAMA.objects(chunk_tokens=256, tp=8, pp=16, cp=2), "into 256 objects; at most 128"),
        (lambda: LLAMA.objects(chunk_tokens=256, tp=2, split=Split()), "either split= or"),
        (lambda: LLAMA.objects(chunk_tokens=256, tp=2).for_rank(tp_rank=2), "tp_rank is 2"),
        (lambda: LLAMA.objects(chunk_tokens=0), "chunk_tokens 0"),
    ],
)
def test_splits_that_cannot_be_are_refused(build: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        build()


def test_what_cannot_be_resharded_is_named() -> None:
    with pytest.raises(CompatibilityError, match="another geometry"):
        shards.reshard(LLAMA.objects(chunk_tokens=256), LATENT.objects(chunk_tokens=256))
    with pytest.raises(CompatibilityError, match=r"objects of 256 tokens .* 512"):
        shards.reshard(LLAMA.objects(chunk_tokens=256), LLAMA.objects(chunk_tokens=512))


def test_objects_say_what_they_are() -> None:
    assert repr(LLAMA.objects(chunk_tokens=256, tp=2)) == (
        "Objects(TP 2, 256 tokens: 2 objects of 16777216 B, 16777216 B)"
    )


def test_members_fit_the_index() -> None:
    objects = LLAMA.objects(chunk_tokens=256, tp=8, pp=16)
    assert len(objects) == objects.members_count == limits.members_per_family_max
    assert objects[127].member.layers == (30, 32)
    assert objects[127].member.heads == (7, 8)


@pytest.mark.slow
@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3)), max_size=6),
    st.integers(1, 4),
)
def test_reduce_keeps_the_meaning(shape: list[tuple[int, int, int]], unit: int) -> None:
    """Random nested arrays: strides of a dense source and of a permuted destination."""
    extents = [count for count, _, _ in shape]
    order = sorted(range(len(shape)), key=lambda axis: (shape[axis][1], shape[axis][2], axis))

    def dense(axes: list[int]) -> dict[int, int]:
        strides, stride = {}, unit
        for axis in reversed(axes):
            strides[axis] = stride
            stride *= extents[axis]
        return strides

    src, dst = dense(list(range(len(shape)))), dense(order)
    loops = [(extents[axis], src[axis], dst[axis]) for axis in range(len(shape))]
    total = unit
    for extent in extents:
        total *= extent
    source = bytes(i % 251 for i in range(total))
    plain, reduced = bytearray(total), bytearray(total)
    strided.run_reference([strided.Copy(0, 0, 0, 0, unit, tuple(loops))], lambda _: source, lambda _: plain)
    plan = strided.copies(0, 0, 0, 0, loops, unit)
    assert strided.run_reference(plan, lambda _: source, lambda _: reduced) == total
    assert reduced == plain
    assert all(len(copy.loops) <= strided.LOOPS_MAX for copy in plan)
    back = bytearray(total)
    strided.run_reference([copy.reversed() for copy in plan], lambda _: bytes(reduced), lambda _: back)
    assert back == source
    if src == dst:
        assert [(copy.run_bytes, copy.loops) for copy in plan] == [(total, ())]


def test_a_plan_that_leaves_its_buffer_is_caught() -> None:
    with pytest.raises(InvariantError, match="leaves its buffer"):
        strided.run_reference([strided.Copy(0, 0, 0, 0, 9)], lambda _: bytes(8), lambda _: bytearray(9))
