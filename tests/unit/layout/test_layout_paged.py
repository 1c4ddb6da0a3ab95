"""Paged layouts: every named one against a reference built element by element; mismatches and misfits refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import object_bytes, paged_tensors, rows_of

from kvd.errors import CompatibilityError, InvariantError, UsageError
from kvd.layout import paged, states, strided
from kvd.layout.geometry import Geometry, Group, Plane, Rule, kv_planes
from kvd.layout.paged import NAMED, PagedLayout
from kvd.layout.shards import Objects, Split
from kvd.layout.states import StateLayout

LAYERS, HEADS, BLOCK, CHUNK, BLOCKS = 3, 4, 4, 16, 11
KV = kv_planes(HEADS, 6, 6, "bfloat16")
UNEQUAL = kv_planes(HEADS, 6, 4, "bfloat16", "int8")
SCALED = (
    *kv_planes(HEADS, 8, 8, "int8"),
    Plane("k_scale", HEADS, 1, "float32"),
    Plane("v_scale", HEADS, 1, "float32"),
)
LATENT = (Plane("latent", 1, 16, "bfloat16"), Plane("rope", 1, 4, "bfloat16"))
SUITS_ALL = tuple(name for name, (order, separate) in NAMED.items() if "C" in order or "P" in separate)


def held_by(layout: PagedLayout, rows: dict[str, Any]) -> dict[str, Any]:
    """The rows that this rank holds."""
    layers = slice(layout.first_layer, layout.first_layer + layout.layers)
    heads = slice(layout.first_head, layout.first_head + layout.heads)
    return {name: data[layers, :, heads] for name, data in rows.items()}


def check_both_ways(layout: PagedLayout, geom: Geometry, split: Split, part_index: int, seed: int) -> None:
    """Gather gives the reference object, scatter gives the reference memory, both touch nothing else."""
    objects = Objects(geom, split, CHUNK)
    part = objects[part_index]
    group = geom.groups[part.group]
    rows = rows_of(geom, CHUNK, seed)[part.group]
    ids = [int(i) for i in np.random.default_rng(seed).permutation(BLOCKS)[: CHUNK // BLOCK]]
    expected = object_bytes(group, rows, part)
    full = paged_tensors(layout, held_by(layout, rows), ids, seed)
    plan = paged.plan(layout, group, part)
    assert plan.object_bytes == len(expected)
    assert (plan.blocks_count, plan.blocks_per_object) == (BLOCKS, CHUNK // BLOCK)
    assert plan.tensors_count == len(full) == layout.tensors_count
    assert all(len(entry.loops) <= strided.LOOPS_MAX for entry in plan.entries)
    out = bytearray(len(expected))
    plan.gather_reference([memoryview(t.tobytes()) for t in full], ids, out)
    assert plan.whole == (plan.copied_bytes == len(expected))
    if plan.whole:
        assert bytes(out) == expected
    back = [bytearray(t.tobytes()) for t in full]
    plan.scatter_reference(expected, ids, back)
    assert [bytes(b) for b in back] == [t.tobytes() for t in full]
    # Into noise: exactly copied_bytes come from the object, the rest stays.
    noise = [bytearray(np.random.default_rng(seed + 1 + i).bytes(t.nbytes)) for i, t in enumerate(full)]
    before = [bytes(n) for n in noise]
    plan.scatter_reference(expected, ids, noise)
    again = bytearray(len(expected))
    plan.gather_reference(noise, ids, again)
    assert bytes(again) == bytes(out)
    changed = sum(a != b for x, y in zip(noise, before, strict=True) for a, b in zip(x, y, strict=True))
    assert changed <= plan.copied_bytes


@pytest.mark.parametrize("name", sorted(NAMED))
@pytest.mark.parametrize("planes", [KV, UNEQUAL, SCALED, LATENT], ids=["kv", "unequal", "scaled", "latent"])
def test_named_layouts_against_the_reference(name: str, planes: tuple[Plane, ...]) -> None:
    geom = Geometry([Group(Rule.FULL, tuple(range(LAYERS)), planes)])
    arguments = {"planes": planes, "layers": LAYERS, "blocks": BLOCKS, "block_tokens": BLOCK}
    if planes is not KV and name not in SUITS_ALL:
        with pytest.raises(UsageError, match="planes of equal size"):
            PagedLayout(name, **arguments)
        return
    check_both_ways(PagedLayout(name, **arguments), geom, Split(), 0, 11)


@settings(max_examples=30, deadline=None)
@given(
    st.permutations("LBPHN"),
    st.sampled_from(["", "L", "P", "LP", "PL"]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 4]),
    st.data(),
)
def test_any_order_and_any_other_split(
    axes: list[str], separate: str, written_tp: int, reader_tp: int, data: st.DataObject
) -> None:
    """Objects of one TP scatter straight into the blocks of a rank of another."""
    geom = Geometry([Group(Rule.FULL, tuple(range(LAYERS)), KV)])
    rank = data.draw(st.integers(0, reader_tp - 1))
    heads = HEADS // reader_tp
    mine = tuple(Plane(p.name, heads, p.dim, p.dtype) for p in KV)
    layout = PagedLayout(
        "".join(axes) + "D", mine, LAYERS, BLOCKS, BLOCK, separate=separate, first_head=rank * heads
    )
    objects = Objects(geom, Split(tp=written_tp), CHUNK)
    for part in objects:
        shares = part.heads[0] < (rank + 1) * heads and rank * heads < part.heads[1]
        if shares:
            check_both_ways(layout, geom, Split(tp=written_tp), part.index, 5)
        else:
            with pytest.raises(CompatibilityError, match="share nothing"):
                paged.plan(layout, geom.groups[0], part)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_stage_and_a_context_rank_have_their_own_blocks(tp: int) -> None:
    """Layers of a stage, and the tokens that context rank 1 holds, in its own order."""
    geom = Geometry([Group(Rule.FULL, tuple(range(4)), KV)])
    layout = PagedLayout("LBHNC", tuple(Plane(p.name, HEADS // tp, p.dim, p.dtype) for p in KV), 2, BLOCKS, BLOCK,
                         separate="L", first_layer=2)  # fmt: skip
    objects = Objects(geom, Split(tp=tp, pp=2, cp=2, cp_interleave_tokens=1), CHUNK)
    part = objects.for_rank(pp_rank=1, cp_rank=1)[0]
    assert part.layers == (2, 4)
    rows = rows_of(geom, CHUNK, 3)[0]
    own = {name: data[2:4, 1::2, : HEADS // tp] for name, data in rows.items()}
    ids = [9, 2]
    full = paged_tensors(layout, own, ids, 3)
    plan = paged.plan(layout, geom.groups[0], part)
    assert plan.blocks_per_object == 2
    out = bytearray(part.size_bytes)
    plan.gather_reference([memoryview(t.tobytes()) for t in full], ids, out)
    assert bytes(out) == object_bytes(geom.groups[0], rows, part)


def test_runs_are_as_long_as_the_layouts_allow() -> None:
    planes = kv_planes(8, 128, 128, "bfloat16")
    geom = Geometry([Group(Rule.FULL, tuple(range(32)), planes)])
    part = geom.objects(chunk_tokens=256)[0]

    def shape(name: str) -> tuple[int, int, int]:
        layout = PagedLayout(name, planes, 32, 4096, 16)
        plan = paged.plan(layout, geom.groups[0], part)
        assert plan.copied_bytes == part.size_bytes
        return len(plan.entries), plan.run_bytes_min, max(len(entry.loops) for entry in plan.entries)

    assert shape("blocks-2-heads-block-dim") == (32, 16 * 256, 2)
    assert shape("transformers") == (64, 16 * 256, 1)
    assert shape("vllm-hnd") == (32, 256, 3)
    assert shape("sglang-page-first") == (1, 256, 3)
    whole = PagedLayout("transformers", planes, 32, 16, 256)
    assert paged.plan(whole, geom.groups[0], part).run_bytes_min == 256 * 256  # a chunk a block: whole heads


def test_numpy_strides_are_the_described_ones() -> None:
    for name in NAMED:
        layout = PagedLayout(name, KV, LAYERS, BLOCKS, BLOCK)
        tensor = np.zeros(layout.shape(), dtype=np.uint16)
        layout.verify(tensor.shape, tensor.strides, "bfloat16")
        assert layout.tensor_bytes() == tensor.nbytes
        assert len(paged.block_slots(layout)) == layout.tensors_count
    assert PagedLayout("vllm-hnd", KV, LAYERS, BLOCKS, BLOCK).shape() == (BLOCKS, HEADS, BLOCK, 12)
    assert PagedLayout("transformers", KV, LAYERS, BLOCKS, BLOCK).shape() == (HEADS, BLOCKS, BLOCK, 6)
    assert paged.block_slots(PagedLayout("transformers", KV, 2, 1, 4)) == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_raw_bytes_may_hold_any_planes() -> None:
    mixed = PagedLayout("vllm-hnd", SCALED, LAYERS, BLOCKS, BLOCK)
    raw = np.zeros((BLOCKS, HEADS, BLOCK, 8 + 8 + 4 + 4), dtype=np.uint8)
    mixed.verify(raw.shape, raw.strides, "uint8")
    with pytest.raises(CompatibilityError, match="element type of plane k_scale is int8"):
        mixed.verify(mixed.shape(), raw.strides, "int8")
    with pytest.raises(CompatibilityError, match="shape"):
        mixed.verify((*raw.shape[:-1], 23), raw.strides, "uint8")
    lone = PagedLayout("transformers", KV, LAYERS, BLOCKS, BLOCK)
    lone.verify((HEADS, BLOCKS, BLOCK, 12), (BLOCKS * BLOCK * 12, BLOCK * 12, 12, 1), "uint8")


def test_mismatched_tensors_are_refused() -> None:
    """Row A8: drop a comparison from `verify` and the case of that field fails."""
    layout = PagedLayout("vllm-hnd", KV, LAYERS, BLOCKS, BLOCK)
    good = np.zeros(layout.shape(), dtype=np.uint16)
    with pytest.raises(CompatibilityError, match=r"shape is \(11, 4, 4, 10\), described as \(11, 4, 4, 12\)"):
        layout.verify((11, 4, 4, 10), good.strides, "bfloat16")
    with pytest.raises(CompatibilityError, match="element type of plane k is float16"):
        layout.verify(good.shape, good.strides, "float16")
    with pytest.raises(CompatibilityError, match="stride of axis H"):
        layout.verify(good.shape, (good.strides[0], good.strides[1] + 2, *good.strides[2:]), "bfloat16")
    with pytest.raises(CompatibilityError, match="stride of axis C"):
        layout.verify(good.shape, (*good.strides[:3], 4), "bfloat16")


@pytest.mark.parametrize(
    "change",
    [
        {"order": "LBNHC"}, {"layers": 4}, {"block_tokens": 8}, {"first_head": 4}, {"first_layer": 1},
        {"planes": kv_planes(HEADS, 6, 6, "float16")}, {"separate": ""}, {"strides": {"B": 1024}},
    ],
    ids=str,
)  # fmt: skip
def test_a_fingerprint_names_what_matters(change: dict[str, Any]) -> None:
    same = {
        "order": "LBHNC",
        "planes": KV,
        "layers": LAYERS,
        "blocks": BLOCKS,
        "block_tokens": BLOCK,
        "separate": "L",
    }
    layout, other = PagedLayout(**same), PagedLayout(**{**same, **change})
    assert layout.fingerprint != other.fingerprint
    with pytest.raises(CompatibilityError, match="not the registered one"):
        layout.check_same(other)
    layout.check_same(PagedLayout("vllm-hnd", KV, LAYERS, BLOCKS + 1, BLOCK))  # more blocks, same strides
    inner = [PagedLayout("2-blocks-block-heads-dim", KV, LAYERS, n, BLOCK).fingerprint for n in (11, 12)]
    assert inner[0] != inner[1]  # here the number of blocks moves the planes


def test_the_fingerprint_is_stable() -> None:
    layout = PagedLayout("vllm-hnd", KV, LAYERS, BLOCKS, BLOCK)
    assert layout.fingerprint == "8ad4850d5cf6cef5de57752e23e4daee"


def test_padded_strides_are_followed() -> None:
    geom = Geometry([Group(Rule.FULL, (0,), KV)])
    dense = PagedLayout("BLHNC", KV, 1, BLOCKS, BLOCK)
    padded = PagedLayout("BLHNC", KV, 1, BLOCKS, BLOCK, strides={"B": 512})
    part = Objects(geom, Split(), CHUNK)[0]
    rows = rows_of(geom, CHUNK, 2)[0]
    ids = [3, 0, 10, 7]
    (tensor,) = paged_tensors(dense, rows, ids, 2)
    memory = bytearray(padded.tensor_bytes())
    per_block = tensor[0].nbytes
    for block in range(BLOCKS):
        memory[block * 512 : block * 512 + per_block] = tensor[block].tobytes()
    out = bytearray(part.size_bytes)
    paged.plan(padded, geom.groups[0], part).gather_reference([bytes(memory)], ids, out)
    assert bytes(out) == object_bytes(geom.groups[0], rows, part)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"order": "LBHN"}, "order 'LBHN'"),
        ({"order": "LBHNDP"}, "D innermost"),
        ({"order": "LLBHNC"}, "once"),
        ({"order": "vllm"}, "or a name: .*vllm-hnd"),
        ({"order": "LBHNPD", "planes": UNEQUAL}, "planes of equal size; use C"),
        ({"separate": "B"}, "separate 'B'"),
        ({"layers": 0}, "layers of a paged layout is 0"),
        ({"blocks": -1}, "blocks of a paged layout is -1"),
        ({"block_tokens": 0}, "block_tokens is 0"),
        ({"planes": ()}, "equal head counts"),
        ({"strides": {"Q": 8}}, "names 'Q'"),
        ({"strides": {"L": 8}}, "names 'L'"),
        ({"strides": {"B": 8}}, "must not overlap"),
        ({"strides": {"B": -8}}, "is -8"),
    ],
    ids=str,
)
def test_descriptions_that_cannot_be_are_refused(change: dict[str, Any], says: str) -> None:
    same = {
        "order": "LBHNC",
        "planes": KV,
        "layers": LAYERS,
        "blocks": BLOCKS,
        "block_tokens": BLOCK,
        "separate": "L",
    }
    with pytest.raises(UsageError, match=says):
        PagedLayout(**{**same, **change})


def test_objects_that_do_not_fit_the_blocks_are_refused() -> None:
    geom = Geometry([Group(Rule.FULL, (0,), KV)])
    layout = PagedLayout("vllm-hnd", KV, 1, BLOCKS, 5)
    with pytest.raises(UsageError, match="16 tokens is not a multiple of the engine's block of 5"):
        paged.plan(layout, geom.groups[0], Objects(geom, Split(), CHUNK)[0])
    other = Geometry([Group(Rule.FULL, (0,), UNEQUAL)])
    with pytest.raises(CompatibilityError, match="keeps planes"):
        paged.plan(layout, other.groups[0], Objects(other, Split(), CHUNK)[0])
    narrow = Geometry([Group(Rule.WINDOW, (0,), KV, 3)])
    with pytest.raises(UsageError, match="window of 3 tokens is smaller than the engine's block of 4"):
        paged.plan(PagedLayout("vllm-hnd", KV, 1, 9, 4), narrow.groups[0], Objects(narrow, Split(), CHUNK)[0])
    plan = paged.plan(PagedLayout("vllm-hnd", KV, 1, 9, 4), geom.groups[0], Objects(geom, Split(), CHUNK)[0])
    with pytest.raises(UsageError, match="3 block ids for an object of 4"):
        plan.gather_reference([bytes(9999)], [0, 1, 2], bytearray(plan.object_bytes))
    with pytest.raises(InvariantError, match="leaves a buffer"):
        plan.gather_reference([bytes(10)], [0, 1, 2, 3], bytearray(plan.object_bytes))


STATE = (
    Plane("ssm", 4, 6, "float32"), Plane("conv_x", 4, 4, "bfloat16"), Plane("conv_b", 2, 8, "bfloat16"),
    Plane("conv_c", 2, 8, "bfloat16"),
)  # fmt: skip


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_states_gather_from_the_tensors_of_an_engine(tp: int) -> None:
    """Transformers' own form: one convolution tensor [x | b | c] and one recurrent tensor a layer."""
    geom = Geometry([Group(Rule.STATE, (0, 1), STATE)])
    group, rows = geom.groups[0], rows_of(geom, CHUNK, 4)[0]
    order = (("conv_x", "conv_b", "conv_c"), ("ssm",))
    layout = StateLayout(order, STATE, layers=2, slots=3)
    rng = np.random.default_rng(0)
    slot = 1
    tensors = []
    for layer in range(2):
        for number, names in enumerate(order):
            tensor = bytearray(rng.bytes(3 * layout.slot_bytes(number)))
            content = b"".join(rows[name][layer, 0].tobytes() for name in names)
            tensor[slot * len(content) : (slot + 1) * len(content)] = content
            tensors.append(tensor)
    copied = 0
    scattered = [bytearray(len(t)) for t in tensors]
    for part in Objects(geom, Split(tp=tp), CHUNK):
        plan = layout.plan(group, part)
        out = bytearray(part.size_bytes)
        plan.gather_reference(tensors, [slot], out)
        assert bytes(out) == object_bytes(group, rows, part)
        plan.scatter_reference(bytes(out), [slot], scattered)
        copied += plan.copied_bytes
    assert copied == geom.state_bytes
    for tensor, back, number in zip(tensors, scattered, (0, 1, 0, 1), strict=True):
        size = layout.slot_bytes(number)
        assert back[slot * size : (slot + 1) * size] == tensor[slot * size : (slot + 1) * size]
        assert not any(back[:size])
    with pytest.raises(UsageError, match="not paged"):
        paged.plan(PagedLayout("vllm-hnd", KV, 1, 9, 4), group, Objects(geom, Split(), CHUNK)[0])
    with pytest.raises(UsageError, match="each plane is in one tensor"):
        StateLayout((("ssm",),), STATE, layers=2, slots=3)


def test_states_that_do_not_match_are_refused() -> None:
    geom = Geometry([Group(Rule.STATE, (0,), STATE)])
    group, part = geom.groups[0], Objects(geom, Split(), CHUNK)[0]
    order = (("conv_x", "conv_b", "conv_c"), ("ssm",))
    assert states.transformers_tensors(group) == order
    wide = (Plane("ssm", 4, 7, "float32"), *STATE[1:])
    with pytest.raises(CompatibilityError, match="state layout keeps"):
        StateLayout(order, wide, 1, 1).plan(group, part)
    with pytest.raises(CompatibilityError, match="share nothing"):
        StateLayout(order, STATE, 1, 1, first_layer=1).plan(group, part)
    with pytest.raises(UsageError, match="one entry a plane"):
        StateLayout(order, STATE, 1, 1, first_heads=(0,))
    with pytest.raises(UsageError, match="slots of a state layout is 0"):
        StateLayout(order, STATE, 1, 0)
    with pytest.raises(UsageError, match="first_layer is -1"):
        StateLayout(order, STATE, 1, 1, first_layer=-1)
    with pytest.raises(UsageError, match="first_heads is -1"):
        StateLayout(order, STATE, 1, 1, first_heads=(0, -1, 0, 0))
    for field, value in (
        ("order", None),
        ("separate", 5),
        ("strides", [1]),
        ("planes", None),
        ("planes", ["k"]),
    ):
        wrong: dict[str, Any] = {"order": "vllm-hnd", "planes": KV, field: value}
        with pytest.raises(UsageError, match=rf"{field}.* is "):
            PagedLayout(layers=1, blocks=1, block_tokens=4, **wrong)
    odd = Group(Rule.STATE, (0,), (Plane("memory", 1, 4, "float32"),))
    with pytest.raises(UsageError, match=r"planes \['memory'\], which are no state Transformers keeps"):
        states.transformers_tensors(odd)
    with pytest.raises(UsageError, match="none, where separate planes differ"):
        PagedLayout("transformers", UNEQUAL, LAYERS, BLOCKS, BLOCK, strides={"H": 4096})
    spelled = PagedLayout("LBHNPD", KV, LAYERS, BLOCKS, BLOCK, separate="L")
    tensor = np.zeros(spelled.shape(), dtype=np.uint16)
    assert tensor.shape == (BLOCKS, HEADS, BLOCK, 2, 6)
    spelled.verify(tensor.shape, tensor.strides, "bfloat16")


@pytest.mark.parametrize(
    ("number", "tensor", "dtype", "said"),
    [
        (1, np.zeros((3, 4, 6), np.float64), "float64", "element type is float64, described as float32"),
        (
            1,
            np.zeros((2, 4, 6), np.float32),
            "float32",
            r"shape is \(2, 4, 6\) of float32, described as 3 slots",
        ),
        (1, np.zeros((3, 4, 7), np.float32), "float32", "shape"),
        (1, np.zeros((), np.float32), "float32", "shape"),
        (1, np.zeros((6, 4, 6), np.float32)[::2], "float32", "stride of axis 0 in bytes is 192"),
        (1, np.zeros((3, 6, 4), np.float32).transpose(0, 2, 1), "float32", "stride of axis 2 in bytes is 16"),
        (0, np.zeros((3, 48), np.uint16), "float16", "conv_x, conv_b, conv_c does not match .* float16"),
        (0, np.zeros((3, 47), np.uint16), "bfloat16", "3 slots of 96 B"),
    ],
)
def test_a_state_tensor_is_compared_with_its_layout(
    number: int, tensor: np.ndarray, dtype: str, said: str
) -> None:
    layout = StateLayout((("conv_x", "conv_b", "conv_c"), ("ssm",)), STATE, layers=2, slots=3)
    good = np.zeros((3, 48), np.uint16) if number == 0 else np.zeros((3, 1, 4, 6), np.float32)
    layout.verify(good.shape, good.strides, "float32" if number else "bfloat16", tensor=number)
    layout.verify((3, layout.slot_bytes(number)), (layout.slot_bytes(number), 1), "uint8", tensor=number)
    with pytest.raises(CompatibilityError, match=said):
        layout.verify(tensor.shape, tensor.strides, dtype, tensor=number)


def test_a_state_rank_of_another_split_takes_its_heads() -> None:
    """Written by TP 1, read by rank 1 of TP 2: half of every plane."""
    geom = Geometry([Group(Rule.STATE, (0,), STATE)])
    group, rows = geom.groups[0], rows_of(geom, CHUNK, 4)[0]
    half = tuple(Plane(p.name, p.heads // 2, p.dim, p.dtype) for p in STATE)
    layout = StateLayout(tuple((p.name,) for p in half), half, 1, 1, first_heads=tuple(p.heads for p in half))
    part = Objects(geom, Split(), CHUNK)[0]
    tensors = [bytearray(layout.slot_bytes(t)) for t in range(4)]
    layout.plan(group, part).scatter_reference(object_bytes(group, rows, part), [0], tensors)
    for tensor, plane in zip(tensors, STATE, strict=True):
        assert bytes(tensor) == rows[plane.name][0, 0, plane.heads // 2 :].tobytes()
