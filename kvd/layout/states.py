"""State layouts: how an engine keeps recurrent states, and the copies to and from snapshots.

Pure. A snapshot is taken exactly at a chunk boundary and is one object a shard; there are no blocks, but slots: one a
sequence. The plan has the same form as that of a paged layout, with one block, the slot.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

from kvd.errors import CompatibilityError, UsageError
from kvd.layout import encoding, strided
from kvd.layout.dtypes import dtype_bits
from kvd.layout.geometry import HEADS_MAX, LAYERS_MAX, Group, Plane, Rule, count
from kvd.layout.paged import BLOCKS_MAX, Entry, PagedPlan, loops_product
from kvd.layout.shards import Part, band_layouts

_TRANSFORMERS: Final = (
    (("conv_x", "conv_b", "conv_c"), ("ssm",)),
    (("conv",), ("ssm",)),
    (("conv_q", "conv_k", "conv_v"), ("recurrent",)),
    (("state",),),
)


def transformers_tensors(group: Group) -> tuple[tuple[str, ...], ...]:
    """The tensors in which Transformers keeps the states of one layer: convolution inputs, then the recurrent.

    Raises UsageError(paged) for a group whose planes are not those of a known architecture.
    """
    names = sorted(plane.name for plane in group.planes)
    for tensors in _TRANSFORMERS:
        if group.rule is Rule.STATE and sorted(name for tensor in tensors for name in tensor) == names:
            return tensors
    raise UsageError(
        f"group {group.name} has planes {names}, which are no state Transformers keeps; name the tensors by hand",
        code="paged", field="tensors",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class StateLayout:
    """How one engine rank keeps recurrent states: `tensors` for each layer, each [slots, planes one after
    another].

    A plane is [heads of this rank, row], dense. Transformers: (("conv_x", "conv_b", "conv_c"), ("ssm",)).
    `planes` are those of the group with the heads this rank holds; tensors are numbered layer by layer.
    `first_layer` says where this rank's layers begin within the group, `first_heads` the same for the heads
    of each plane.
    """

    tensors: tuple[tuple[str, ...], ...]
    planes: tuple[Plane, ...]
    layers: int
    slots: int
    first_layer: int = 0
    first_heads: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        named = [name for tensor in self.tensors for name in tensor]
        if sorted(named) != sorted(plane.name for plane in self.planes):
            raise UsageError(
                f"state layout: tensors name {named}, planes are {[p.name for p in self.planes]}; each plane is in "
                "one tensor",
                code="paged", field="tensors",
            )  # fmt: skip
        count("layers of a state layout", self.layers, LAYERS_MAX)
        count("slots of a state layout", self.slots, BLOCKS_MAX)
        count("first_layer", self.first_layer, LAYERS_MAX, least=0)
        if not self.first_heads:
            object.__setattr__(self, "first_heads", (0,) * len(self.planes))
        if len(self.first_heads) != len(self.planes):
            raise UsageError(
                "state layout: first_heads has one entry a plane", code="paged", field="first_heads"
            )
        for first in self.first_heads:
            count("first_heads", first, HEADS_MAX, least=0)

    @property
    def fingerprint(self) -> str:
        """32 hex digits that name tensors, planes and where this rank's layers and heads begin."""
        described = {
            "tensors": [list(names) for names in self.tensors], "layers": self.layers, "first_layer": self.first_layer,
            "first_heads": list(self.first_heads), "planes": [[p.name, p.heads, p.dim, p.dtype] for p in self.planes],
        }  # fmt: skip
        return hashlib.sha256(b"kvd-states-v1\0" + encoding.encode(described)).hexdigest()[:32]

    def check_same(self, other: StateLayout) -> None:
        """Refuse a layout that is not the registered one, naming the fields that differ."""
        if self.fingerprint == other.fingerprint:
            return
        names = ("tensors", "planes", "layers", "first_layer", "first_heads")
        differ = [
            f"{name}: {getattr(self, name)!r} registered, {getattr(other, name)!r} now"
            for name in names if getattr(self, name) != getattr(other, name)
        ]  # fmt: skip
        raise CompatibilityError(
            f"this state layout is not the registered one ({'; '.join(differ)}); register again under the new layout",
            code="paged", registered=self.fingerprint, found=other.fingerprint,
        )  # fmt: skip

    def slot_bytes(self, tensor: int) -> int:
        """Bytes of one slot of a tensor (0-based within a layer)."""
        return sum(plane.size_bytes for plane in self.planes if plane.name in self.tensors[tensor])

    def types(self, tensor: int) -> set[str]:
        """Element types that lie in a tensor (0-based within a layer)."""
        return {plane.dtype for plane in self.planes if plane.name in self.tensors[tensor]}

    def verify(
        self, shape: Sequence[int], strides_bytes: Sequence[int], dtype: str, *, tensor: int = 0
    ) -> None:
        """Refuse a tensor that is not [slots, …], dense, with the bytes and the type of its planes in each slot.

        `tensor` is its number within a layer, `dtype` as torch names it. A tensor of raw bytes ("uint8") may hold any
        planes; planes of different types in one tensor can only be verified so. Raises CompatibilityError(paged).
        """
        kinds = self.types(tensor)
        if dtype != "uint8" and kinds != {dtype}:
            raise self._mismatch(tensor, "element type", dtype, " and ".join(sorted(kinds)))
        element = dtype_bits(dtype) // 8
        size_bytes = self.slots * self.slot_bytes(tensor)
        if not shape or shape[0] != self.slots or prod(shape) * element != size_bytes:
            held = f"{self.slots} slots of {self.slot_bytes(tensor)} B"
            raise self._mismatch(tensor, "shape", f"{tuple(shape)} of {dtype}", held)
        expected = element
        for axis in reversed(range(len(shape))):
            if shape[axis] > 1 and strides_bytes[axis] != expected:
                raise self._mismatch(
                    tensor, f"stride of axis {axis} in bytes", strides_bytes[axis], f"{expected}, dense"
                )
            expected *= shape[axis]

    def _mismatch(self, tensor: int, what: str, found: object, described: object) -> CompatibilityError:
        return CompatibilityError(
            f"the tensor of {', '.join(self.tensors[tensor])} does not match its state layout: {what} is {found}, "
            f"described as {described}; describe the layout the engine really has",
            code="paged", found=str(found), described=str(described),
        )  # fmt: skip

    def plan(self, group: Group, part: Part) -> PagedPlan:
        """Copies between one slot and the snapshot `part`; what both hold. Errors as
        `kvd.layout.paged.plan`.
        """
        if [(p.name, p.row_bytes) for p in self.planes] != [(p.name, p.row_bytes) for p in group.planes]:
            raise CompatibilityError(
                f"the state layout keeps {[(p.name, p.row_bytes) for p in self.planes]}, objects of group "
                f"{group.name} have {[(p.name, p.row_bytes) for p in group.planes]}",
                code="paged",
            )
        begin = max(part.layers[0], self.first_layer)
        end = min(part.layers[1], self.first_layer + self.layers)
        entries = [entry for layer in range(begin, end) for entry in self._entries(group, part, layer)]
        if not entries:
            raise CompatibilityError(f"snapshot {part.index} and this rank share nothing", code="paged")
        copied = sum(entry.run_bytes * loops_product(entry.loops) for entry in entries)
        return PagedPlan(
            tuple(entries), self.slots, 1, 0, part.size_bytes, copied, self.layers * len(self.tensors)
        )

    def _entries(self, group: Group, part: Part, layer: int) -> list[Entry]:
        entries: list[Entry] = []
        layouts = band_layouts(group, part)
        for number, (band, described) in enumerate(zip(layouts, group.bands, strict=True)):
            held = part.band_heads[number]
            for k, plane in enumerate(described.planes):
                at = next(i for i, mine in enumerate(self.planes) if mine.name == plane.name)
                mine, first = self.planes[at], self.first_heads[at]
                heads = (max(held[0], first), min(held[1], first + mine.heads))
                if heads[0] >= heads[1]:
                    continue
                tensor = next(t for t, names in enumerate(self.tensors) if plane.name in names)
                names = self.tensors[tensor]
                before = sum(p.size_bytes for p in self.planes if p.name in names[: names.index(plane.name)])
                target = (layer - part.layers[0]) * band.layer_stride + band.offset + band.plane_offsets[k]
                target += (heads[0] - held[0]) * band.head_stride
                axes = [(heads[1] - heads[0], mine.row_bytes, band.head_stride)]
                run, loops = strided.reduce(axes, mine.row_bytes)
                entries.append(
                    Entry(
                        (layer - self.first_layer) * len(self.tensors) + tensor,
                        before + (heads[0] - first) * mine.row_bytes,
                        self.slot_bytes(tensor), target, 0, run, loops,
                    )
                )  # fmt: skip
        return entries
