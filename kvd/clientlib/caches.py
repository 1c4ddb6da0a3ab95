"""An engine's KV tensors, registered: how they are laid out, where they are, and the copies to and from objects.

Owns the buffers of one group of one engine rank and the native plans made for them. The layout belongs to this
registration, never to the namespace: engines with different layouts share objects. May be used from any thread; the
engine sees to it that blocks are not used while they are copied.

    register ──▶ open ── gather, scatter ──▶ open ── close ──▶ closed: the tensors are let go
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm
from typing import TYPE_CHECKING, Any

from kvd import arguments
from kvd.errors import CompatibilityError, LifecycleError, UsageError
from kvd.layout import paged, shards
from kvd.layout.geometry import Geometry, Group, Rule
from kvd.layout.paged import PagedLayout, PagedPlan
from kvd.layout.shards import Objects, Part, Rank, Split
from kvd.layout.states import StateLayout
from kvd.shm import compute

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Buffer

    from kvd.clientlib.families import Families, FamilyLeases

    BlockIds = Buffer | Sequence[int]


class EngineCache:
    """Tensors of one group, as `Namespace.register` took them. `fingerprint` names their layout."""

    def __init__(
        self, geometry: Geometry, group: int, layout: PagedLayout | StateLayout, tensors: Sequence[Any],
        split: Split, rank: Rank, forget: Callable[[EngineCache], None],
    ) -> None:  # fmt: skip
        self.geometry = geometry
        self.group = group
        self.layout = layout
        self.split = split
        self.rank = rank
        self.fingerprint = layout.fingerprint
        _check_fits(geometry.groups[group], layout)
        self._check_rank()
        self.buffers = _buffers(layout, tensors)
        self._forget = forget
        self._writes: dict[tuple[int, int, int], Copies | None] = {}
        self._reads: dict[tuple[int, int], list[Read]] = {}

    def close(self) -> None:
        """Let go of the tensors. The next registration may have another layout."""
        self.buffers = []
        self._forget(self)

    def check_open(self) -> None:
        """Raises LifecycleError after `close`."""
        if not self.buffers:
            raise LifecycleError(
                "this cache was closed: its tensors are let go; register them again", code="cache"
            )

    def check_geometry(self, geometry: Geometry) -> None:
        """Raises CompatibilityError for another geometry than these tensors were registered with.

        Groups go by their number: of another geometry it may name other layers with the same planes.
        """
        mine = self.geometry
        if geometry is mine or (geometry.groups, geometry.layers_count) == (mine.groups, mine.layers_count):
            return
        raise CompatibilityError(
            f"this cache was registered with geometry {mine.fingerprint}, these objects are of {geometry.fingerprint}; "
            "register it with the geometry of the objects",
            code="geometry", registered=mine.fingerprint, given=geometry.fingerprint,
        )  # fmt: skip

    def write(self, families: Families, objects: Objects, part: Part) -> Copies | None:
        """The plan that fills `part` from these tensors, None if this rank holds nothing of it.

        Raises CompatibilityError if it holds only a piece: an object is gathered whole or not at all.
        """
        key = (families.chunk_tokens, objects.split.code, part.index)
        if key not in self._writes:
            self._writes[key] = self._plan_write(objects, part)
        return self._writes[key]

    def _plan_write(self, objects: Objects, part: Part) -> Copies | None:
        if part.group != self.group or not self._overlaps(part) or not self._same_tokens(objects.split, part):
            return None
        plan = self._plan(part)
        if not plan.whole:
            raise CompatibilityError(
                f"this rank holds {plan.copied_bytes} of the {plan.object_bytes} B of member {part.index} "
                f"(layers {part.layers}, heads {part.heads}); reserve with the split of the engine that writes",
                code="paged", member=part.index,
            )  # fmt: skip
        return Copies(part, plan)

    def stores(self, objects: Objects) -> bool:
        """Whether the rank of this cache stores members of its group. A replica does not; nor is it known of a cache
        that was registered without the split of `objects`.
        """
        rank = self.rank
        return self.split == objects.split and any(
            part.group == self.group
            for part in objects.writes(tp_rank=rank.tp, pp_rank=rank.pp, cp_rank=rank.cp)
        )

    def reads(self, families: Families, code: int) -> list[Read]:
        """What has to be copied out of a family of that split, for one chunk."""
        key = (families.chunk_tokens, code)
        found = self._reads.get(key)
        if found is None:
            found = self._plan_reads(families, families.objects(code))
            moved, wanted = sum(read.copies.native.moved_bytes for read in found), self._chunk_bytes(families)
            if moved != wanted:
                raise CompatibilityError(
                    f"objects of {Split.from_code(code).name} give {moved} of the {wanted} B that this cache keeps of "
                    "a chunk: they cannot be put together here",
                    code="reshard", split=code,
                )  # fmt: skip
            self._reads[key] = found
        return found

    def _chunk_bytes(self, families: Families) -> int:
        """What this cache keeps of one chunk."""
        rows = 1 if isinstance(self.layout, StateLayout) else families.chunk_tokens // self.split.cp
        return self.layout.layers * rows * sum(plane.size_bytes for plane in self.layout.planes)

    def _plan_reads(self, families: Families, written: Objects) -> list[Read]:
        mine = [part for part in written if part.group == self.group and self._overlaps(part)]
        if not self._tokens_differ(written.split):
            direct = [part for part in mine if self._same_tokens(written.split, part)]
            return [Read(Copies(part, self._plan(part)), (part,), None) for part in direct]
        # Another context split: tokens of a chunk lie in other objects. They are put together first.
        wanted = families.objects(self.split)
        reads: list[Read] = []
        for part in wanted.for_rank(tp_rank=self.rank.tp, pp_rank=self.rank.pp, cp_rank=self.rank.cp):
            if part.group == self.group:
                copies = shards.reshard(written, wanted, [part.index])
                sources = sorted({copy.src for copy in copies})
                rows = [
                    (sources.index(c.src), 0, c.src_offset, c.dst_offset, c.run_bytes, c.loops) for c in copies
                ]  # fmt: skip
                reads.append(
                    Read(
                        Copies(part, self._plan(part)),
                        tuple(written[n] for n in sources),
                        compute.strided_plan(rows),
                    )
                )
        return reads

    def _tokens_differ(self, written: Split) -> bool:
        if self.geometry.groups[self.group].rule is Rule.STATE:
            return False
        return (written.cp, written.cp_interleave_tokens) != (self.split.cp, self.split.cp_interleave_tokens)

    def _same_tokens(self, written: Split, part: Part) -> bool:
        """Whether the part's tokens are those that this rank keeps of a chunk."""
        if self.geometry.groups[self.group].rule is Rule.STATE:
            return True
        return not self._tokens_differ(written) and part.context_rank == self.rank.cp

    def _overlaps(self, part: Part) -> bool:
        layout = self.layout
        if part.layers[0] >= layout.first_layer + layout.layers or part.layers[1] <= layout.first_layer:
            return False
        if isinstance(layout, StateLayout):
            return _states_overlap(self.geometry.groups[self.group], layout, part)
        return part.heads[0] < layout.first_head + layout.heads and part.heads[1] > layout.first_head

    def _plan(self, part: Part) -> PagedPlan:
        group = self.geometry.groups[self.group]
        if isinstance(self.layout, StateLayout):
            return self.layout.plan(group, part)
        return paged.plan(self.layout, group, part)

    def _check_rank(self) -> None:
        """A cache that a rank registers holds what that rank of that split reads."""
        if self.split == Split():
            return  # the layout alone says what this rank holds
        block = 1 if isinstance(self.layout, StateLayout) else self.layout.block_tokens
        run = lcm(self.split.cp_interleave_tokens or 1, block)  # the shortest chunk that this rank can have
        objects = Objects(self.geometry, self.split, run * self.split.cp)
        ranks = {"tp_rank": self.rank.tp, "pp_rank": self.rank.pp, "cp_rank": self.rank.cp}
        for part in objects.for_rank(**ranks):
            if part.group == self.group and not (self._overlaps(part) and self._holds(part)):
                raise CompatibilityError(
                    f"the layout holds layers from {self.layout.first_layer}, {self.rank} of {self.split.name} keeps "
                    f"layers {part.layers} and heads {part.heads} of group {self.geometry.groups[self.group].name}: "
                    "describe first_layer, first_head and extents of this rank",
                    code="paged", member=part.index,
                )  # fmt: skip

    def _holds(self, part: Part) -> bool:
        layout = self.layout
        if part.layers[0] < layout.first_layer or part.layers[1] > layout.first_layer + layout.layers:
            return False
        if isinstance(layout, StateLayout):
            return True
        return part.heads[0] >= layout.first_head and part.heads[1] <= layout.first_head + layout.heads


class Copies:
    """One native plan between blocks and the objects of one part."""

    __slots__ = ("blocks_per_chunk", "native", "part")

    def __init__(self, part: Part, plan: PagedPlan) -> None:
        self.part = part
        self.native = compute.paged_plan(*plan.native_arguments())
        self.blocks_per_chunk = plan.blocks_per_object

    def tensors(self, cache: EngineCache) -> list[Any]:
        """The buffers that the plan names: those up to the last that it touches."""
        return cache.buffers[: len(self.native.tensor_bytes_min)]


@dataclass(frozen=True, slots=True)
class Read:
    """How one object reaches the blocks: straight from a member, or put together from several first."""

    copies: Copies
    sources: tuple[Part, ...]
    together: compute.StridedPlan | None

    def views(self, leases: FamilyLeases, numbers: list[int]) -> list[tuple[memoryview, ...]]:
        """The sources of these chunks. Raises CompatibilityError for one that is not of the geometry."""
        columns = [leases.member_views(numbers, part.index, part.size_bytes) for part in self.sources]
        return list(zip(*columns, strict=True))

    def scatter(self, cache: EngineCache, views: list[tuple[memoryview, ...]], ids: BlockIds) -> int:
        """Copy the chunks whose sources are given, into these blocks; returns the bytes that reached them."""
        objects: list[Any] = [sources[0] for sources in views]
        if self.together is not None:
            objects = [bytearray(self.copies.part.size_bytes) for _ in views]
            for sources, built in zip(views, objects, strict=True):
                compute.strided_copy(self.together, sources, [built])
        compute.scatter(self.copies.native, objects, self.copies.tensors(cache), ids)
        return self.copies.native.moved_bytes * len(views)


def rows_of(block_ids: Any, per_chunk: int, chunks: int, chosen: Sequence[int]) -> Any:
    """The block ids of some chunks, out of `per_chunk` for each of `chunks`. Raises UsageError(block-ids)."""
    try:
        if hasattr(block_ids, "data_ptr"):
            block_ids = block_ids.numpy()
        view = memoryview(array("q", block_ids) if isinstance(block_ids, list | tuple | range) else block_ids)
        if view.ndim != 1:
            flat: Any = view.cast("B")
            view = flat.cast(view.format)
        code = {"l": "q", "L": "Q"}.get(view.format.lstrip("@<="), view.format.lstrip("@<="))
        if code not in tuple("iIqQ"):
            raise TypeError(f"elements of format {view.format!r}")
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise UsageError(
            f"block_ids: {error}; allowed: 32- or 64-bit integers, contiguous, on the CPU", code="block-ids"
        ) from None
    if len(view) != per_chunk * chunks:
        what = f"{chunks} chunk{'s' * (chunks != 1)} of {per_chunk} block{'s' * (per_chunk != 1)}"
        raise UsageError(
            f"{len(view)} block id{'s' * (len(view) != 1)} for {what}; allowed: {per_chunk * chunks}, the "
            "blocks of each chunk in turn",
            code="block-ids", given=len(view), expected=per_chunk * chunks,
        )  # fmt: skip
    if len(chosen) == chunks:
        return view
    taken = array(code)
    for row in chosen:
        taken.frombytes(view[row * per_chunk : (row + 1) * per_chunk].tobytes())
    return taken


def check_each_once(ids: Any, limit: int) -> None:
    """What the native code checks of the ids of one call, for those of several. Raises UsageError(block-ids)."""
    first: dict[int, int] = {}
    for at, block in enumerate(ids):
        if not 0 <= block < limit:
            raise UsageError(f"block_ids[{at}] = {block}: must be 0 … {limit - 1}", code="block-ids")
        if first.setdefault(block, at) != at:
            raise UsageError(
                f"block_ids[{at}] = {block}: stands at block_ids[{first[block]}] too; each can be written once",
                code="block-ids",
            )


def _check_fits(group: Group, layout: PagedLayout | StateLayout) -> None:
    """Refuse a layout that is not of this group: other planes, or layers and heads beyond it."""
    if (group.rule is Rule.STATE) != isinstance(layout, StateLayout):
        raise CompatibilityError(
            f"group {group.name} is described by a {'StateLayout' if group.rule is Rule.STATE else 'PagedLayout'}, "
            f"not by a {type(layout).__name__}",
            code="paged",
        )  # fmt: skip
    if layout.first_layer + layout.layers > len(group.layers):
        raise CompatibilityError(
            f"the layout keeps layers {layout.first_layer} … {layout.first_layer + layout.layers - 1}, group "
            f"{group.name} has {len(group.layers)}",
            code="paged", field="layers",
        )  # fmt: skip
    mine = [(plane.name, plane.dim, plane.dtype) for plane in layout.planes]
    theirs = [(plane.name, plane.dim, plane.dtype) for plane in group.planes]
    if mine != theirs:
        raise CompatibilityError(
            f"the layout keeps planes {mine}, group {group.name} of the geometry has {theirs}",
            code="paged", field="planes",
        )  # fmt: skip
    firsts = (
        layout.first_heads if isinstance(layout, StateLayout) else (layout.first_head,) * len(layout.planes)
    )
    for first, kept, described in zip(firsts, layout.planes, group.planes, strict=True):
        if first + kept.heads > described.heads:
            raise CompatibilityError(
                f"the layout keeps heads {first} … {first + kept.heads - 1} of plane {kept.name}, group {group.name} "
                f"has {described.heads}",
                code="paged", field="heads",
            )  # fmt: skip
    if isinstance(layout, PagedLayout):
        group.check_block(layout.block_tokens)


def _states_overlap(group: Group, layout: StateLayout, part: Part) -> bool:
    for number, band in enumerate(group.bands):
        begin, end = part.band_heads[number]
        for plane in band.planes:
            at = next(i for i, mine in enumerate(layout.planes) if mine.name == plane.name)
            first = layout.first_heads[at]
            if begin < first + layout.planes[at].heads and end > first:
                return True
    return False


def _buffers(layout: PagedLayout | StateLayout, tensors: Sequence[Any]) -> list[Any]:
    """The tensors as plain bytes, each verified against the layout where it says what it is."""
    if isinstance(layout, StateLayout):
        kinds = list(range(len(layout.tensors))) * layout.layers  # which tensor of its layer
        sizes = [layout.slot_bytes(kind) * layout.slots for kind in kinds]
    else:
        kinds = [plane for _, plane in paged.block_slots(layout)]
        sizes = [layout.tensor_bytes(plane) for plane in kinds]
    if len(tensors) != len(kinds):
        raise CompatibilityError(
            f"{len(tensors)} tensors for a layout of {len(kinds)}; register them in the order of its letters",
            code="paged", field="tensors",
        )  # fmt: skip
    _check_apart(tensors)
    buffers: list[Any] = []
    for number, (tensor, size_bytes) in enumerate(zip(tensors, sizes, strict=True)):
        _verify(layout, tensor, kinds[number])
        buffer = _bytes_of(tensor, size_bytes)
        way = "give a torch tensor, a numpy array or a flat buffer"
        held = arguments.buffer(f"tensors[{number}]", buffer, way).nbytes
        if held < size_bytes:
            raise CompatibilityError(
                f"tensor {number} has {held} B, its layout reaches {size_bytes}",
                code="paged",
                field="tensors",
            )
        buffers.append(buffer)
    return buffers


def _check_apart(tensors: Sequence[Any]) -> None:
    """Refuse memory that is given twice: what is scattered into one tensor would be lost to another."""
    known: dict[object, int] = {}
    for number, tensor in enumerate(tensors):
        start: object = ("object", id(tensor))
        if hasattr(tensor, "data_ptr"):
            start = tensor.data_ptr()
        elif hasattr(tensor, "__array_interface__"):
            start = tensor.__array_interface__["data"][0]
        if known.setdefault(start, number) != number:
            raise CompatibilityError(
                f"tensors {known[start]} and {number} are the same memory; register each tensor of the layout once",
                code="paged", field="tensors",
            )  # fmt: skip


def _verify(layout: PagedLayout | StateLayout, tensor: Any, kind: int) -> None:
    """Compare a tensor that says what it is with its layout; `kind`: its plane, or which of its layer's states."""
    if hasattr(tensor, "data_ptr"):
        element = tensor.element_size()
        strides = [stride * element for stride in tensor.stride()]
        dtype = str(tensor.dtype).removeprefix("torch.")
    elif hasattr(tensor, "__array_interface__"):
        strides, dtype = list(tensor.strides), str(tensor.dtype)
        if dtype == "uint16" and layout.types(kind) == {"bfloat16"}:
            dtype = "bfloat16"  # which numpy has no type of
    else:
        return  # plain bytes
    if isinstance(layout, StateLayout):
        layout.verify(tuple(tensor.shape), strides, dtype, tensor=kind)
    else:
        layout.verify(tuple(tensor.shape), strides, dtype, plane=kind)


def _bytes_of(tensor: Any, size_bytes: int) -> Any:
    """A flat byte buffer over a tensor's memory, from its first element on; it keeps the tensor."""
    if hasattr(tensor, "data_ptr"):
        if tensor.device.type != "cpu":
            raise UsageError(
                f"tensors on {tensor.device} cannot be registered here: they are not in this process's memory",
                code="device", device=str(tensor.device),
            )  # fmt: skip
        import torch

        flat = torch.empty(0, dtype=torch.uint8)
        offset = tensor.storage_offset() * tensor.element_size()
        storage = tensor.untyped_storage()
        span = min(size_bytes, storage.nbytes() - offset)
        return flat.set_(storage, offset, (span,)).numpy()
    if hasattr(tensor, "__array_interface__"):
        import numpy

        flat_bytes = tensor.view(numpy.uint8)
        return numpy.lib.stride_tricks.as_strided(flat_bytes, (min(size_bytes, _span(flat_bytes)),), (1,))
    return tensor


def _span(array_: Any) -> int:
    """Bytes from the first to the last element of a numpy array of bytes."""
    return int(
        1 + sum((extent - 1) * stride for extent, stride in zip(array_.shape, array_.strides, strict=True))
    )
