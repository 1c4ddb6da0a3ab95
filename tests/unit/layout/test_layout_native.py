"""Plans made here, carried out by the native copies: byte for byte what the slow numpy reference says.

Row A11: 1 to 1,024 chunks in one call; every named layout, splits with and without re-sharding, states.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from reference import object_bytes, paged_tensors, rows_of
from test_layout_shards import CHUNK as SHARD_CHUNK
from test_layout_shards import HYBRID, LATENT, built

from kvd.layout import paged, shards
from kvd.layout.geometry import Geometry, Group, Plane, Rule, kv_planes
from kvd.layout.paged import NAMED, PagedLayout
from kvd.layout.shards import Objects, Split
from kvd.layout.states import StateLayout

compute = pytest.importorskip("kvd.shm.compute", reason="the native extension is not built")

LAYERS, HEADS, BLOCK, CHUNK = 2, 2, 2, 4
KV = kv_planes(HEADS, 6, 6, "bfloat16")
UNEQUAL = kv_planes(HEADS, 6, 4, "bfloat16", "int8")


def many(layout_name: str, planes: tuple[Plane, ...], chunks: int, seed: int) -> None:
    """Gather and scatter `chunks` objects in one call, over shuffled blocks with noise between them."""
    blocks = chunks * CHUNK // BLOCK + 3
    geom = Geometry([Group(Rule.FULL, tuple(range(LAYERS)), planes)])
    layout = PagedLayout(layout_name, planes, LAYERS, blocks, BLOCK)
    group, part = geom.groups[0], Objects(geom, Split(), CHUNK)[0]
    rows = rows_of(geom, chunks * CHUNK, seed)[0]
    ids = [int(i) for i in np.random.default_rng(seed).permutation(blocks)[: chunks * CHUNK // BLOCK]]
    tensors = paged_tensors(layout, rows, ids, seed)
    pieces = [
        {name: data[:, chunk * CHUNK : (chunk + 1) * CHUNK] for name, data in rows.items()}
        for chunk in range(chunks)
    ]
    expected = [object_bytes(group, piece, part) for piece in pieces]
    plan = compute.paged_plan(*paged.plan(layout, group, part).native_arguments())
    objects = [bytearray(part.size_bytes) for _ in range(chunks)]
    compute.gather(plan, objects, tensors, ids)
    assert [bytes(data) for data in objects] == expected
    back = [np.random.default_rng(9).integers(0, 256, t.shape, dtype=np.uint8) for t in tensors]
    untouched = [tensor.copy() for tensor in back]
    compute.scatter(plan, expected, back, ids)
    again = [bytearray(part.size_bytes) for _ in range(chunks)]
    compute.gather(plan, again, back, ids)
    assert [bytes(data) for data in again] == expected
    spare = sorted(set(range(blocks)) - set(ids))
    if spare:
        axis = [a for a in layout.axes if a not in layout.separate_axes].index("B")
        if (
            "P" not in layout.separate_axes
            and layout.axes.endswith("PD")
            and layout.axes.index("P") < layout.axes.index("B")
        ):
            axis -= 1
        for tensor, before in zip(back, untouched, strict=True):
            assert np.array_equal(np.take(tensor, spare, axis), np.take(before, spare, axis))


@pytest.mark.parametrize("name", sorted(NAMED))
def test_named_layouts(name: str) -> None:
    many(name, KV, 3, 1)
    order, separate = NAMED[name]
    if "C" in order or "P" in separate:
        many(name, UNEQUAL, 2, 2)


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [1, 2, 63, 114, 128, 129, 512, 1024])
@pytest.mark.parametrize("name", ["vllm-hnd", "transformers", "sglang-page-first"])
def test_many_chunks_in_one_call(name: str, chunks: int) -> None:
    many(name, KV, chunks, chunks)


SPLITS = [
    Split(),
    Split(tp=2),
    Split(tp=4),
    Split(tp=8, pp=2),
    Split(pp=3, cp=2),
    Split(cp=4, cp_interleave_tokens=1),
]


@pytest.mark.parametrize("wanted", SPLITS, ids=lambda s: s.name)
@pytest.mark.parametrize("written", SPLITS, ids=lambda s: s.name)
@pytest.mark.parametrize("geom", [HYBRID, LATENT], ids=["hybrid", "latent"])
def test_resharding(geom: Geometry, written: Split, wanted: Split) -> None:
    source, expected = built(geom, written), built(geom, wanted)
    plan = shards.reshard(Objects(geom, written, SHARD_CHUNK), Objects(geom, wanted, SHARD_CHUNK))
    native = compute.strided_plan([copy.native_arguments() for copy in plan])
    made = [bytearray(len(expected[index])) for index in sorted(expected)]
    compute.strided_copy(native, [source[index] for index in sorted(source)], made)
    assert [bytes(data) for data in made] == [expected[index] for index in sorted(expected)]
    assert native.moved_bytes == geom.stored_bytes(SHARD_CHUNK)


def test_another_split_scatters_straight_into_blocks() -> None:
    """Written by TP 4, read by rank 1 of TP 2: two members, each half of the rank's heads, no copy between."""
    planes = kv_planes(4, 6, 6, "bfloat16")
    geom = Geometry([Group(Rule.FULL, tuple(range(LAYERS)), planes)])
    mine: tuple[Plane, ...] = tuple(Plane(p.name, 2, p.dim, p.dtype) for p in planes)
    layout = PagedLayout("vllm-hnd", mine, LAYERS, 5, BLOCK, first_head=2)
    rows = rows_of(geom, CHUNK, 6)[0]
    own = {name: data[:, :, 2:] for name, data in rows.items()}
    full = paged_tensors(layout, own, [4, 1], 6)
    tensors = [
        np.where(np.isin(np.arange(5), [4, 1])[:, None, None, None], 0, t).astype(np.uint8) for t in full
    ]
    for part in list(Objects(geom, Split(tp=4), CHUNK))[2:]:
        made = paged.plan(layout, geom.groups[0], part)
        plan = compute.paged_plan(*made.native_arguments())
        assert made.whole
        compute.scatter(plan, [object_bytes(geom.groups[0], rows, part)], tensors, [4, 1])
    assert all(np.array_equal(a, b) for a, b in zip(tensors, full, strict=True))


def test_states() -> None:
    group = HYBRID.groups[2]
    layout = StateLayout((("conv_x", "conv_b", "conv_c"), ("ssm",)), group.planes, len(group.layers), slots=2)
    rows = rows_of(HYBRID, SHARD_CHUNK, 8)[2]
    part = next(p for p in Objects(HYBRID, Split(), SHARD_CHUNK) if p.group == 2)
    data = object_bytes(group, rows, part)
    tensors: list[Any] = [bytearray(2 * layout.slot_bytes(t % 2)) for t in range(2 * len(group.layers))]
    plan = compute.paged_plan(*layout.plan(group, part).native_arguments())
    compute.scatter(plan, [data], tensors, [1])
    back = bytearray(len(data))
    compute.gather(plan, [back], tensors, [1])
    assert bytes(back) == data
    ssm = rows["ssm"][0, 0].tobytes()
    assert bytes(tensors[1][layout.slot_bytes(1) :]) == ssm
    assert not any(tensors[1][: layout.slot_bytes(1)])
