"""Paged layouts: how an engine keeps KV in blocks, described and checked, and the copies to and from objects.

Pure. A layout belongs to the registration of one engine rank, never to a namespace: objects have one
canonical format, so that engines with different layouts share them. Axes, written outermost first:

    L layer    B block    P plane (K, V, scales …)    H head    N token in block    D element
    C = PD: the planes side by side

    "LBHNC"   vLLM, one [blocks, heads, block, K|V] tensor a layer       separate="L"
    "LBNHC"   vLLM on GPUs                                               separate="L"
    "BLHNC"   vLLM, blocks outermost: a block is contiguous across layers
    "LBPHND"  [blocks, 2, heads, block, dim]                             separate="L"
    "LPBNHD"  [2, blocks, block, heads, dim]                             separate="L"
    "PLBNHD"  SGLang layer_first, "PBNLHD" page_first, "PBLNHD" page_first_direct, "PBHNLD" page_head; for latent
              caches "LBNHC", "BNLHC", "BLNHC"
    "LPHBND"  Transformers: K and V [heads, tokens, dim] of each layer   separate="LP"
              ("block" b is the b-th stretch of block_tokens tokens)

Axes in `separate` are not in the memory at all: each of their values has a tensor of its own, numbered in
the order of the letters. Strides are those of a dense array unless given. Block tables, copy-on-write and
reference counts are the engine's; kvd is handed block ids.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Final

from kvd.errors import CompatibilityError, InvariantError, UsageError
from kvd.layout import encoding, strided
from kvd.layout.dtypes import dtype_bits
from kvd.layout.geometry import HEADS_MAX, LAYERS_MAX, Group, Plane, Rule, count, items
from kvd.layout.shards import BandLayout, Part, band_layouts

AXES: Final = frozenset("LBPHND")
BLOCKS_MAX: Final = 1 << 31
BLOCK_TOKENS_MAX: Final = 1 << 20
NativeRun = tuple[int, int, int, int, int, int, tuple[strided.Loop, ...]]
"""tensor, run_bytes, memory_offset, object_offset, block_stride, slot_stride, loops"""

NAMED: Final[Mapping[str, tuple[str, str]]] = {
    "vllm-hnd": ("LBHNC", "L"),
    "vllm-nhd": ("LBNHC", "L"),
    "vllm-block-first": ("BLHNC", ""),
    "blocks-2-heads-block-dim": ("LBPHND", "L"),
    "2-blocks-block-heads-dim": ("LPBNHD", "L"),
    "sglang-layer-first": ("PLBNHD", ""),
    "sglang-page-first": ("PBNLHD", ""),
    "sglang-page-first-direct": ("PBLNHD", ""),
    "sglang-page-head": ("PBHNLD", ""),
    "sglang-mla-layer-first": ("LBNHC", ""),
    "sglang-mla-page-first": ("BNLHC", ""),
    "sglang-mla-page-first-direct": ("BLNHC", ""),
    "transformers": ("LPHBND", "LP"),
}
"""Names of common layouts: (order, separate)."""


@dataclass(frozen=True, slots=True)
class PagedLayout:
    """How one engine rank keeps the tokens of one group.

    `order` is a name of `NAMED` or axis letters, `planes` those of the group, with the heads this rank holds;
    `layers`, `blocks`, `block_tokens` the other extents. `first_layer` and `first_head` say where this
    rank's layers and heads begin within the group. `strides` overrides strides in bytes, by axis letter.
    Raises UsageError(paged) naming what is wrong; `verify` and `check_same` raise CompatibilityError(paged).
    """

    order: str
    planes: tuple[Plane, ...]
    layers: int
    blocks: int
    block_tokens: int
    separate: str | None = None
    first_layer: int = 0
    first_head: int = 0
    strides: Mapping[str, int] = field(default_factory=dict)
    _strides: Mapping[str, int] = field(init=False, repr=False, compare=False)
    _inside: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, text in (("order", self.order), ("separate", self.separate or "")):
            if not isinstance(text, str):
                raise self._bad(name, f"is {text!r}", "axis letters, or a name")
        if not isinstance(self.strides, Mapping):
            raise self._bad("strides", f"is {self.strides!r}", "bytes by axis letter, like {'B': 4096}")
        order, separate = NAMED.get(self.order, (self.order, None))
        if self.separate is not None:
            separate = self.separate
        _set(self, "order", order)
        _set(self, "separate", separate or "")
        _set(self, "planes", items("planes of a paged layout", self.planes, Plane))
        _set(self, "strides", dict(self.strides))
        self._check_axes()
        count("layers of a paged layout", self.layers, LAYERS_MAX)
        count("blocks of a paged layout", self.blocks, BLOCKS_MAX)
        count("block_tokens", self.block_tokens, BLOCK_TOKENS_MAX)
        count("first_layer", self.first_layer, LAYERS_MAX, least=0)
        count("first_head", self.first_head, HEADS_MAX, least=0)
        if not self.planes or len({plane.heads for plane in self.planes}) != 1:
            raise self._bad(
                "planes", f"{[(p.name, p.heads) for p in self.planes]}", "planes with equal head counts"
            )
        _set(self, "_inside", "P" not in self.separate_axes and self.axes.endswith("PD"))
        stacked = "P" in self.order and "P" not in self.separate_axes  # C may hold planes of any size
        if stacked and len({plane.row_bytes for plane in self.planes}) != 1:
            raise self._bad(
                "order",
                self.order,
                "a plane axis of its own only for planes of equal size; use C or separate='P'",
            )
        _set(self, "_strides", self._dense() | self._given())

    def _bad(self, name: str, value: str, allowed: str) -> UsageError:
        return UsageError(f"paged layout: {name} {value}; allowed: {allowed}", code="paged", field=name)

    def _check_axes(self) -> None:
        axes = self.axes
        if sorted(axes) != sorted(AXES) or not axes.endswith("D"):
            known = ", ".join(NAMED)
            raise self._bad(
                "order",
                repr(self.order),
                f"each of L B P H N D once, D innermost, C for PD; or a name: {known}",
            )
        separate = self.separate_axes
        if not set(separate) <= {"L", "P"} or len(set(separate)) != len(separate):
            raise self._bad("separate", repr(separate), "L, P, LP or PL")

    @property
    def axes(self) -> str:
        """`order` with C written out."""
        return self.order.replace("C", "PD")

    @property
    def separate_axes(self) -> str:
        """The axes that are tensors of their own."""
        return self.separate or ""

    @property
    def heads(self) -> int:
        """KV heads that this rank holds."""
        return self.planes[0].heads

    @property
    def tensors_count(self) -> int:
        """Tensors that the engine registers."""
        return self._separate_extent("L") * self._separate_extent("P")

    def _separate_extent(self, axis: str) -> int:
        if axis not in self.separate_axes:
            return 1
        return self.layers if axis == "L" else len(self.planes)

    def tensor_of(self, layer: int, plane: int) -> int:
        """Number of the tensor that holds a plane of a layer of this rank."""
        number = 0
        for axis in self.separate_axes:
            number = number * self._separate_extent(axis) + (layer if axis == "L" else plane)
        return number

    def _extents(self) -> dict[str, int]:
        return {
            "L": self.layers, "B": self.blocks, "P": len(self.planes), "H": self.heads, "N": self.block_tokens,
        }  # fmt: skip

    def _row_bytes(self) -> int:
        """Bytes of the innermost piece: one row, or the rows of all planes side by side."""
        if self._inside:
            return sum(plane.row_bytes for plane in self.planes)
        return max(plane.row_bytes for plane in self.planes)

    def _dense(self) -> dict[str, int]:
        extents = self._extents()
        stride = self._row_bytes()
        strides: dict[str, int] = {}
        for axis in reversed(self.axes):
            if axis == "D" or axis in self.separate_axes or (axis == "P" and self._inside):
                continue
            strides[axis] = stride
            stride *= extents[axis]
        return strides

    def _given(self) -> dict[str, int]:
        dense = self._dense()
        for axis, stride in self.strides.items():
            if axis not in dense:
                raise self._bad("strides", f"names {axis!r}", ", ".join(sorted(dense)))
            if "P" in self.separate_axes and len({p.row_bytes for p in self.planes}) != 1:
                raise self._bad("strides", f"{axis!r}", "none, where separate planes differ in size")
            count(f"stride of {axis} in bytes", stride, 1 << 50)
        merged = dense | dict(self.strides)
        spans = sorted((stride, self._extents()[axis], axis) for axis, stride in merged.items())
        reach = self._row_bytes()
        for stride, extent, axis in spans:
            if extent > 1 and stride < reach:
                raise self._bad(
                    "strides", f"of {axis} is {stride} B", f"at least {reach}: blocks must not overlap"
                )
            reach = max(reach, stride * (extent - 1) + reach)
        return dict(self.strides)

    def stride(self, axis: str, plane: int = 0) -> int:
        """Bytes from one value of an axis to the next, within the tensor that holds `plane`."""
        stride = self._strides[axis]
        if "P" in self.separate_axes:  # tensors of separate planes are dense in their own row size
            return stride * self.planes[plane].row_bytes // self._row_bytes()
        return stride

    def plane_offset(self, plane: int) -> int:
        """Offset of a plane in its tensor, at block, layer, head and token 0."""
        if "P" in self.separate_axes:
            return 0
        if self._inside:
            return sum(p.row_bytes for p in self.planes[:plane])
        return plane * self._strides["P"]

    def tensor_bytes(self, plane: int = 0) -> int:
        """Bytes from the first to the last element of the tensor that holds `plane`."""
        row = self.planes[plane].row_bytes if "P" in self.separate_axes else self._row_bytes()
        return row + sum((self._extents()[axis] - 1) * self.stride(axis, plane) for axis in self._strides)

    @property
    def fingerprint(self) -> str:
        """32 hex digits that name order, extents, types and strides. The number of blocks counts only by its
        strides.
        """
        described = {
            "order": self.axes, "separate": self.separate_axes, "layers": self.layers,
            "block_tokens": self.block_tokens, "first_layer": self.first_layer, "first_head": self.first_head,
            "planes": [[p.name, p.heads, p.dim, p.dtype] for p in self.planes],
            "strides": {axis: stride for axis, stride in self._strides.items() if self._extents()[axis] > 1},
        }  # fmt: skip
        return hashlib.sha256(b"kvd-paged-v1\0" + encoding.encode(described)).hexdigest()[:32]

    def check_same(self, other: PagedLayout) -> None:
        """Refuse a layout that is not the registered one, naming the fields that differ."""
        if self.fingerprint == other.fingerprint:
            return
        names = (
            "axes",
            "separate_axes",
            "layers",
            "block_tokens",
            "first_layer",
            "first_head",
            "planes",
            "_strides",
        )
        differ = [
            f"{name.strip('_')}: {getattr(self, name)!r} registered, {getattr(other, name)!r} now"
            for name in names if getattr(self, name) != getattr(other, name)
        ]  # fmt: skip
        raise CompatibilityError(
            f"this paged layout is not the registered one ({'; '.join(differ)}); register again under the new layout",
            code="paged", registered=self.fingerprint, found=other.fingerprint,
        )  # fmt: skip

    def shape(self, plane: int = 0) -> tuple[int, ...]:
        """Shape of the tensor that holds `plane`, in elements, with C as one axis where the order says so."""
        extents = self._extents()
        shape: list[int] = []
        for axis in self.order:
            if axis in self.separate_axes:
                continue
            if axis == "D":
                shape.append(self.planes[plane].dim)
            elif axis == "C":
                merged = "P" not in self.separate_axes
                shape.append(sum(p.dim for p in self.planes) if merged else self.planes[plane].dim)
            else:
                shape.append(extents[axis])
        return tuple(shape)

    def types(self, plane: int = 0) -> set[str]:
        """Element types that lie in a tensor; `plane`: which one, where each has tensors of its own."""
        return {described.dtype for described in self._planes_in(plane)}

    def _planes_in(self, plane: int) -> list[Plane]:
        return [self.planes[plane]] if "P" in self.separate_axes else list(self.planes)

    def verify(
        self, shape: Sequence[int], strides_bytes: Sequence[int], dtype: str, *, plane: int = 0
    ) -> None:
        """Refuse a tensor that is not what this layout describes. `dtype` as torch names it, without "torch.".

        A tensor of raw bytes ("uint8") may hold any planes: its last axis then counts bytes. Planes of different
        types in one tensor, or of types smaller than a byte, can only be verified so.
        """
        wanted = self.shape(plane)
        planes = self._planes_in(plane)
        if dtype == "uint8" and any(described.dtype != "uint8" for described in planes):
            row = self._row_bytes() if len(planes) > 1 and self.order.endswith("C") else planes[0].row_bytes
            wanted = (*wanted[:-1], row)
            planes = []
        if tuple(shape) != wanted:
            raise self._mismatch("shape", tuple(shape), wanted)
        for described in planes:
            if dtype != described.dtype:
                raise self._mismatch(f"element type of plane {described.name}", dtype, described.dtype)
        element = dtype_bits(dtype) // 8
        axes = [axis for axis in self.order if axis not in self.separate_axes]
        for axis, extent, stride in zip(axes, shape, strides_bytes, strict=True):
            if axis in "DC":
                expected = element
            elif axis == "P" and self._inside:
                expected = self.planes[0].row_bytes
            else:
                expected = self.stride(axis, plane)
            if extent > 1 and stride != expected:
                raise self._mismatch(f"stride of axis {axis} in bytes", stride, expected)

    @staticmethod
    def _mismatch(what: str, found: object, described: object) -> CompatibilityError:
        return CompatibilityError(
            f"the tensor does not match its paged layout: {what} is {found}, described as {described}; "
            "describe the layout the engine really has",
            code="paged", found=str(found), described=str(described),
        )  # fmt: skip


def _set(layout: PagedLayout, name: str, value: object) -> None:
    object.__setattr__(layout, name, value)


@dataclass(frozen=True, slots=True)
class Entry:
    """Strided copies between block `ids[j]` of a tensor and slot `j` of an object, for every block slot j:

    memory at memory_offset + ids[j] * block_stride, object at object_offset + j * slot_stride, then up to
    four loops (count, memory stride, object stride) of runs of run_bytes. All in bytes.
    """

    tensor: int
    memory_offset: int
    block_stride: int
    object_offset: int
    slot_stride: int
    run_bytes: int
    loops: tuple[strided.Loop, ...]


@dataclass(frozen=True, slots=True)
class PagedPlan:
    """All copies between the blocks of one chunk and one object. The same plan serves gather and scatter."""

    entries: tuple[Entry, ...]
    blocks_count: int
    blocks_per_object: int
    block_tokens: int
    object_bytes: int
    copied_bytes: int
    tensors_count: int

    @property
    def run_bytes_min(self) -> int:
        """The shortest contiguous run."""
        return min(entry.run_bytes for entry in self.entries)

    @property
    def whole(self) -> bool:
        """Whether the blocks hold all of the object: only then can it be gathered; scattering may take a part."""
        return self.copied_bytes == self.object_bytes

    def native_arguments(self) -> tuple[int, int, int, list[NativeRun]]:
        """What `kvd.shm.compute.paged_plan` takes: object bytes, blocks, blocks an object, runs."""
        runs = [
            (e.tensor, e.run_bytes, e.memory_offset, e.object_offset, e.block_stride, e.slot_stride, e.loops)
            for e in self.entries
        ]
        return self.object_bytes, self.blocks_count, self.blocks_per_object, runs

    def gather_reference(
        self, tensors: Sequence[bytes | bytearray | memoryview], ids: Sequence[int], out: bytearray
    ) -> None:
        """Blocks to object, one run at a time: the plain meaning of a plan, for tests and documents."""
        for memory_at, object_at, tensor, size in self._runs(ids):
            out[object_at : object_at + size] = _slice(tensors[tensor], memory_at, size)

    def scatter_reference(self, source: bytes, ids: Sequence[int], tensors: Sequence[bytearray]) -> None:
        """Object to blocks, one run at a time."""
        for memory_at, object_at, tensor, size in self._runs(ids):
            _slice(tensors[tensor], memory_at, size)
            tensors[tensor][memory_at : memory_at + size] = _slice(source, object_at, size)

    def _runs(self, ids: Sequence[int]) -> list[tuple[int, int, int, int]]:
        if len(ids) != self.blocks_per_object:
            raise UsageError(
                f"{len(ids)} block ids for an object of {self.blocks_per_object} blocks",
                code="paged",
                field="ids",
            )
        runs: list[tuple[int, int, int, int]] = []
        for entry in self.entries:
            for slot, block in enumerate(ids):
                copy = strided.Copy(
                    0, 0, entry.memory_offset + block * entry.block_stride,
                    entry.object_offset + slot * entry.slot_stride, entry.run_bytes, entry.loops,
                )  # fmt: skip
                runs += [(src, dst, entry.tensor, entry.run_bytes) for src, dst in copy.runs()]
        return runs


def _slice(buffer: bytes | bytearray | memoryview, at: int, size: int) -> bytes:
    if at < 0 or at + size > len(buffer):
        raise InvariantError(f"a run of {size} B at {at} leaves a buffer of {len(buffer)} B", code="run")
    return bytes(buffer[at : at + size])


def plan(layout: PagedLayout, group: Group, part: Part) -> PagedPlan:
    """Copies between `layout` and the object `part` of `group`.

    The object may hold more or fewer layers and heads than the rank: what both hold is copied, so that
    objects of another TP scatter straight into blocks. Raises CompatibilityError(paged) if planes differ or
    they share nothing, UsageError if the object is not whole blocks.
    """
    if group.rule is Rule.STATE:
        raise UsageError(
            "a state is not paged; describe it as a StateLayout (kvd.layout.states)",
            code="paged",
            field="group",
        )
    mine = [(plane.name, plane.dim, plane.dtype) for plane in layout.planes]
    theirs = [(plane.name, plane.dim, plane.dtype) for plane in group.planes]
    if mine != theirs:
        raise CompatibilityError(
            f"the layout keeps planes {mine}, objects of group {group.name} have {theirs}", code="paged"
        )
    if part.tokens_count % layout.block_tokens:
        raise UsageError(
            f"an object of {part.tokens_count} tokens is not a multiple of the engine's block of "
            f"{layout.block_tokens} tokens; choose a chunk size that is",
            code="chunk", block_tokens=layout.block_tokens,
        )  # fmt: skip
    group.check_block(layout.block_tokens)
    (band,) = band_layouts(group, part)
    layers = (
        max(part.layers[0], layout.first_layer),
        min(part.layers[1], layout.first_layer + layout.layers),
    )
    heads = (max(part.heads[0], layout.first_head), min(part.heads[1], layout.first_head + layout.heads))
    if layers[0] >= layers[1] or heads[0] >= heads[1]:
        raise CompatibilityError(
            f"object {part.index} holds layers {part.layers} and heads {part.heads} of group {group.name}, this rank "
            f"layers from {layout.first_layer} and heads from {layout.first_head}: they share nothing",
            code="paged", member=part.index,
        )  # fmt: skip
    entries = [
        entry
        for layer in (range(*layers) if "L" in layout.separate_axes else (layers[0],))
        for entry in _layer_entries(layout, part, band, layer, layers, heads)
    ]
    slots = part.tokens_count // layout.block_tokens
    copied = sum(e.run_bytes * loops_product(e.loops) for e in entries) * slots
    return PagedPlan(
        tuple(entries),
        layout.blocks,
        slots,
        layout.block_tokens,
        part.size_bytes,
        copied,
        layout.tensors_count,
    )


def loops_product(loops: Sequence[strided.Loop]) -> int:
    """Runs that nested loops make."""
    result = 1
    for loop in loops:
        result *= loop[0]
    return result


def _layer_entries(
    layout: PagedLayout,
    part: Part,
    band: BandLayout,
    layer: int,
    layers: tuple[int, int],
    heads: tuple[int, int],
) -> list[Entry]:
    """Entries of one layer (a tensor of its own), or of all from `layer` on (one loop over them)."""
    lone = "L" in layout.separate_axes
    together = _planes_as_loop(layout, band)
    entries: list[Entry] = []
    for number, plane in enumerate(layout.planes):
        if together is not None and number:
            break
        row = plane.row_bytes
        local_layer, local_head = layer - layout.first_layer, heads[0] - layout.first_head
        memory = layout.plane_offset(number) + local_head * layout.stride("H", number)
        memory += 0 if lone else local_layer * layout.stride("L", number)
        target = (layer - part.layers[0]) * band.layer_stride + (heads[0] - part.heads[0]) * band.head_stride
        axes: list[strided.Loop] = [
            (heads[1] - heads[0], layout.stride("H", number), band.head_stride),
            (layout.block_tokens, layout.stride("N", number), row),
        ]
        if not lone:
            axes.append((layers[1] - layers[0], layout.stride("L", number), band.layer_stride))
        if together is not None:
            axes.append((len(layout.planes), *together))
        run, loops = strided.reduce(axes, row)
        entries.append(
            Entry(
                layout.tensor_of(local_layer, number), memory, layout.stride("B", number),
                target + band.plane_offsets[number], layout.block_tokens * row, run, loops,
            )
        )  # fmt: skip
    return entries


def _planes_as_loop(layout: PagedLayout, band: BandLayout) -> tuple[int, int] | None:
    """(memory stride, object stride) from plane to plane if both are regular, so that planes are one more
    loop.
    """
    planes = len(layout.planes)
    if "P" in layout.separate_axes or planes == 1 or len({plane.row_bytes for plane in layout.planes}) != 1:
        return None
    memory = {layout.plane_offset(k + 1) - layout.plane_offset(k) for k in range(planes - 1)}
    target = {band.plane_offsets[k + 1] - band.plane_offsets[k] for k in range(planes - 1)}
    return (memory.pop(), target.pop()) if len(memory) == len(target) == 1 else None


def block_slots(layout: PagedLayout) -> Sequence[tuple[int, int]]:
    """(layer, plane) of every tensor, in the order of their numbers: what an engine registers."""
    pairs = product(range(layout.layers), range(len(layout.planes)))
    slots: dict[int, tuple[int, int]] = {}
    for layer, plane in pairs:
        slots.setdefault(layout.tensor_of(layer, plane), (layer, plane))
    return [slots[number] for number in sorted(slots)]
