"""Shards: how a chunk is cut into objects for one split, and how a reader with another split puts them
together.

Pure. A split (TP, PP, context parallel) is recorded with a family, as the u16 of `Split.code` and the ranges
of its member records; it is never part of an identity. An *object* (member) is chunk x group x shard, and
its bytes are the canonical format, version 1 (docs/design/layout.md):

    [layer of the group in range][band][head in range][plane][token in range][row]       no padding
                                                       (a state: no token axis)

A head range of one layer is one contiguous run, and so is a layer: re-sharding along heads copies one run a
layer, loading layer by layer one run a layer.

Members of a family are numbered densely in the order group, pipeline stage, context rank, head shard; full
attention comes first, so that the members that make a family complete have the lowest numbers. A
group with fewer heads than ranks (MQA, MLA, GQA at high TP) is stored once and read by several ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from kvd import limits
from kvd.errors import CompatibilityError, UsageError
from kvd.layout import strided
from kvd.layout.geometry import Band, Geometry, Group, Rule, count
from kvd.layout.strided import Copy
from kvd.types import Member

TP_MAX: Final = 64
PP_MAX: Final = 16
CP_ALLOWED: Final = (1, 2, 4, 8)
CONTIGUOUS: Final = 0
CP_INTERLEAVES: Final = (CONTIGUOUS, 1, 16, 64)
PP_RULES: Final = ("even", "inner", "front", "ceil")

Range = tuple[int, int]
"""[begin, end)"""


@dataclass(frozen=True, slots=True)
class Split:
    """How the ranks of one engine divide the model. Raises UsageError(split) naming field, value and what is
    allowed.

    `tp` cuts heads, `pp` cuts layers into stages by `pp_rule`, `cp` cuts the tokens of each chunk over
    context ranks: in runs of `cp_interleave_tokens` dealt out in turn, or, 0, in one stretch a rank. Rules
    for L layers: even: stage s begins at floor(L s / pp); inner: floor(L / pp) each, the rest one by one
    from the last stage but one backwards; front: the rest to the first stages; ceil: ceil(L / pp) each, the
    last stage what is left.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    cp_interleave_tokens: int = CONTIGUOUS
    pp_rule: str = "even"

    def __post_init__(self) -> None:
        for name, value, most in (("tp", self.tp, TP_MAX), ("pp", self.pp, PP_MAX)):
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                raise self._refused(name, value, f"1 … {most}")
        if isinstance(self.cp, bool | float) or self.cp not in CP_ALLOWED:  # 1.0 and True equal 1
            raise self._refused("cp", self.cp, ", ".join(map(str, CP_ALLOWED)))
        interleave = self.cp_interleave_tokens
        if isinstance(interleave, bool | float) or interleave not in CP_INTERLEAVES:
            allowed = ", ".join(map(str, CP_INTERLEAVES))
            raise self._refused("cp_interleave_tokens", interleave, f"{allowed} (0: contiguous)")
        if self.pp_rule not in PP_RULES:
            raise self._refused("pp_rule", self.pp_rule, ", ".join(PP_RULES))
        if self.cp == 1 and self.cp_interleave_tokens:
            object.__setattr__(self, "cp_interleave_tokens", CONTIGUOUS)  # says nothing with one context rank
        if self.pp == 1 and self.pp_rule != "even":
            object.__setattr__(self, "pp_rule", "even")

    @staticmethod
    def _refused(name: str, value: object, allowed: str) -> UsageError:
        return UsageError(f"split: {name} is {value!r}; allowed: {allowed}", code="split", field=name)

    @property
    def code(self) -> int:
        """The split as a u16: tp - 1 in bits 0-5, pp - 1 in 6-9, log2 cp in 10-11, interleave in 12-13, rule
        in 14-15.
        """
        return (
            (self.tp - 1)
            | (self.pp - 1) << 6
            | CP_ALLOWED.index(self.cp) << 10
            | CP_INTERLEAVES.index(self.cp_interleave_tokens) << 12
            | PP_RULES.index(self.pp_rule) << 14
        )

    @classmethod
    def from_code(cls, code: int) -> Split:
        """The split that a family records. Raises UsageError(split) for a code that no split has."""
        if isinstance(code, bool) or not isinstance(code, int) or not 0 <= code <= 0xFFFF:
            raise cls._refused("code", code, "0 … 65535")
        split = cls(
            tp=(code & 63) + 1,
            pp=(code >> 6 & 15) + 1,
            cp=CP_ALLOWED[code >> 10 & 3],
            cp_interleave_tokens=CP_INTERLEAVES[code >> 12 & 3],
            pp_rule=PP_RULES[code >> 14 & 3],
        )
        if split.code != code:
            raise cls._refused("code", code, f"the canonical {split.code}")
        return split

    @property
    def name(self) -> str:
        """For messages: "TP 4", "TP 2 x PP 2", "CP 2 by 16"."""
        parts = [f"TP {self.tp}"] if self.tp > 1 or (self.pp == self.cp == 1) else []
        if self.pp > 1:
            parts.append(f"PP {self.pp}" + ("" if self.pp_rule == "even" else f" {self.pp_rule}"))
        if self.cp > 1:
            dealt = f" by {self.cp_interleave_tokens}" if self.cp_interleave_tokens else ""
            parts.append(f"CP {self.cp}{dealt}")
        return " x ".join(parts)

    def stages(self, layers_count: int) -> tuple[Range, ...]:
        """Model layers of each pipeline stage."""
        if self.pp > layers_count:
            raise self._refused("pp", self.pp, f"at most the {layers_count} layers of the model")
        each, rest = divmod(layers_count, self.pp)
        match self.pp_rule:
            case "even":
                return tuple(
                    (layers_count * s // self.pp, layers_count * (s + 1) // self.pp) for s in range(self.pp)
                )
            case "inner":
                sizes = [each] * self.pp
                for extra in range(rest):
                    sizes[-(2 + extra) % self.pp] += 1
            case "front":
                sizes = [each + (stage < rest) for stage in range(self.pp)]
            case _:
                size = -(-layers_count // self.pp)
                sizes = [max(0, min(size, layers_count - size * stage)) for stage in range(self.pp)]
        begins = [sum(sizes[:stage]) for stage in range(self.pp)]
        return tuple((begin, begin + size) for begin, size in zip(begins, sizes, strict=True))

    def tokens(self, rank: int, chunk_tokens: int) -> tuple[Range, ...]:
        """Token ranges within a chunk that context rank `rank` holds, ascending; in an object they follow
        each other.
        """
        if self.cp == 1:
            return ((0, chunk_tokens),)
        run = self.cp_interleave_tokens or chunk_tokens // self.cp
        if not run or chunk_tokens % (run * self.cp):
            raise UsageError(
                f"chunk_tokens {chunk_tokens} cannot be dealt out to {self.cp} context ranks in runs of {run or 1}; "
                f"allowed: multiples of {(run or 1) * self.cp}",
                code="split", chunk_tokens=chunk_tokens, cp=self.cp,
            )  # fmt: skip
        return tuple((at, at + run) for at in range(rank * run, chunk_tokens, run * self.cp))


@dataclass(frozen=True, slots=True)
class Rank:
    """Which rank of a split: tensor, pipeline and context rank, each from 0."""

    tp: int = 0
    pp: int = 0
    cp: int = 0


@dataclass(frozen=True, slots=True)
class Part:
    """One object of a family: the bytes of one group that one shard holds.

    `layers` are [begin, end) of the group's own layers, `model_layers` the numbers they have in the model,
    `heads` [begin, end) of the first band, `band_heads` of every band (empty where another part holds it),
    `tokens` the token ranges within the chunk (none for a state), `ranks` the tensor ranks that read it.
    """

    index: int
    group: int
    stage: int
    context_rank: int
    layers: Range
    model_layers: tuple[int, ...]
    heads: Range
    band_heads: tuple[Range, ...]
    tokens: tuple[Range, ...]
    ranks: tuple[int, ...]
    size_bytes: int

    @property
    def tokens_count(self) -> int:
        """Tokens of a chunk that it holds; 0 for a state."""
        return sum(end - begin for begin, end in self.tokens)

    @property
    def member(self) -> Member:
        """As the index records it."""
        return Member(self.index, self.size_bytes, self.heads, self.layers)


def head_shards(heads: int, tp: int, what: str) -> int:
    """Into how many shards `heads` are cut for `tp` ranks: tp, or one a head where there are fewer heads
    than ranks.

    Raises UsageError(split) where neither divides the other.
    """
    if heads % tp == 0:
        return tp
    if tp % heads == 0:
        return heads
    near = [n for n in range(1, TP_MAX + 1) if heads % n == 0 or n % heads == 0]
    raise UsageError(
        f"{heads} heads of {what} can be neither divided over nor repeated on tp={tp} ranks; allowed: "
        f"{', '.join(map(str, near))}",
        code="split", field="tp", heads=heads, tp=tp,
    )  # fmt: skip


class Objects:
    """All objects of one chunk under one split: iterate for the parts; `members_count` of a complete family.

    Raises UsageError(split) where the model cannot be cut so, or a family would have more than 128 members.
    """

    def __init__(self, geometry: Geometry, split: Split, chunk_tokens: int) -> None:
        self.geometry = geometry
        self.split = split
        self.chunk_tokens = chunk_tokens
        parts: list[Part] = []
        for number in range(len(geometry.groups)):
            parts.extend(self._parts(number, len(parts)))
        if len(parts) > limits.members_per_family_max:
            raise UsageError(
                f"{split.name} cuts a chunk into {len(parts)} objects; at most {limits.members_per_family_max} make a "
                "family: use fewer pipeline stages or context ranks in one namespace",
                code="split", members=len(parts),
            )  # fmt: skip
        self.parts: tuple[Part, ...] = tuple(parts)

    def _parts(self, number: int, first: int) -> Iterator[Part]:
        group, split = self.geometry.groups[number], self.split
        shards_of = [head_shards(band.heads, split.tp, _what(group, band)) for band in group.bands]
        shards = max(shards_of)
        index = first
        for stage, (begin, end) in enumerate(split.stages(self.geometry.layers_count)):
            local = [n for n, layer in enumerate(group.layers) if begin <= layer < end]
            if not local:
                continue
            layers = (local[0], local[-1] + 1)
            for context_rank in range(1 if group.rule is Rule.STATE else split.cp):
                tokens = () if group.rule is Rule.STATE else split.tokens(context_rank, self.chunk_tokens)
                for shard in range(shards):
                    band_heads = tuple(
                        _share(band.heads, cut, shard, shards)
                        for band, cut in zip(group.bands, shards_of, strict=True)
                    )
                    size = part_bytes(group, layers, band_heads, tokens)
                    each = split.tp // shards
                    yield Part(
                        index, number, stage, context_rank, layers, group.layers[layers[0] : layers[1]],
                        band_heads[0], band_heads, tokens, tuple(range(shard * each, (shard + 1) * each)), size,
                    )  # fmt: skip
                    index += 1

    def __iter__(self) -> Iterator[Part]:
        return iter(self.parts)

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, index: int) -> Part:
        return self.parts[index]

    def __repr__(self) -> str:
        sizes = ", ".join(f"{part.size_bytes} B" for part in self.parts[:4]) + (
            ", …" if len(self) > 4 else ""
        )
        return f"Objects({self.split.name}, {self.chunk_tokens} tokens: {len(self)} objects of {sizes})"

    @property
    def members_count(self) -> int:
        """Members of a family that has everything."""
        return len(self.parts)

    @cached_property
    def mandatory_count(self) -> int:
        """Members that make a family complete, numbered first: those of the full-attention groups, or, where none is
        full, of the first group.

        The others are optional: windows and states, which the rules of `kvd.layout.family` ask for where needed.
        """
        groups = self.geometry.groups
        full = [number for number, group in enumerate(groups) if group.rule is Rule.FULL] or [0]
        return sum(part.group in full for part in self.parts)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of all objects of one chunk, a state snapshot included if the model has one."""
        return sum(part.size_bytes for part in self.parts)

    @cached_property
    def group_masks(self) -> tuple[int, ...]:
        """For each group the bits of its members in a family's present bitmap."""
        masks = [0] * len(self.geometry.groups)
        for part in self.parts:
            masks[part.group] |= 1 << part.index
        return tuple(masks)

    def for_rank(self, *, tp_rank: int = 0, pp_rank: int = 0, cp_rank: int = 0) -> list[Part]:
        """The parts that one rank reads; of those it shares with other ranks, `writes` says who stores them."""
        self._check_rank(tp_rank, pp_rank, cp_rank)
        return [
            part for part in self.parts
            if part.stage == pp_rank and tp_rank in part.ranks
            and (self.geometry.groups[part.group].rule is Rule.STATE or part.context_rank == cp_rank)
        ]  # fmt: skip

    def writes(self, *, tp_rank: int = 0, pp_rank: int = 0, cp_rank: int = 0) -> list[Part]:
        """The parts that one rank stores: of ranks that hold the same bytes only the first does.

        A state belongs to the last context rank, which has seen all tokens of the chunk.
        """
        return [
            part for part in self.for_rank(tp_rank=tp_rank, pp_rank=pp_rank, cp_rank=cp_rank)
            if part.ranks[0] == tp_rank
            and (self.geometry.groups[part.group].rule is not Rule.STATE or cp_rank == self.split.cp - 1)
        ]  # fmt: skip

    def _check_rank(self, tp_rank: int, pp_rank: int, cp_rank: int) -> None:
        for name, rank, ranks in (
            ("tp_rank", tp_rank, self.split.tp),
            ("pp_rank", pp_rank, self.split.pp),
            ("cp_rank", cp_rank, self.split.cp),
        ):
            count(name, rank, ranks - 1, least=0)


def _what(group: Group, band: Band) -> str:
    return f"group {group.name} ({', '.join(plane.name for plane in band.planes)})"


def _share(heads: int, cut: int, shard: int, shards: int) -> Range:
    """Heads of a band, cut into `cut`, that shard `shard` of `shards` stores; (0, 0) if an earlier one does."""
    repeat = shards // cut
    if shard % repeat:
        return (0, 0)
    each = heads // cut
    return (shard // repeat * each, (shard // repeat + 1) * each)


def part_bytes(group: Group, layers: Range, band_heads: Sequence[Range], tokens: Sequence[Range]) -> int:
    """Size of an object in bytes."""
    per_layer = sum(
        (end - begin) * band.head_bytes for band, (begin, end) in zip(group.bands, band_heads, strict=True)
    )
    rows = 1 if group.rule is Rule.STATE else sum(end - begin for begin, end in tokens)
    return per_layer * rows * (layers[1] - layers[0])


@dataclass(frozen=True, slots=True)
class BandLayout:
    """Where one band of one object lies: offsets and strides in bytes, from its first layer, head and token."""

    offset: int
    layer_stride: int
    head_stride: int
    plane_offsets: tuple[int, ...]


def band_layouts(group: Group, part: Part) -> tuple[BandLayout, ...]:
    """The canonical format as numbers, one entry for each band of the group."""
    rows = part.tokens_count if group.rule is not Rule.STATE else 1
    held = [end - begin for begin, end in part.band_heads]
    layer_stride = sum(n * band.head_bytes for n, band in zip(held, group.bands, strict=True)) * rows
    layouts: list[BandLayout] = []
    offset = 0
    for n, band in zip(held, group.bands, strict=True):
        before = [sum(p.row_bytes for p in band.planes[:k]) * rows for k in range(len(band.planes))]
        layouts.append(BandLayout(offset, layer_stride, band.head_bytes * rows, tuple(before)))
        offset += n * band.head_bytes * rows
    return tuple(layouts)


def reshard(written: Objects, wanted: Objects, wanted_parts: Sequence[int] | None = None) -> list[Copy]:
    """Copies that build objects of the split `wanted` out of those of the split `written`.

    `src` is a member of the written family, `dst` one of the wanted split; only `wanted_parts`, if given
    (those of one rank). Every wanted byte is copied exactly once, nothing else is touched. Raises
    CompatibilityError(reshard) naming what does not fit: another geometry or another chunk size.
    """
    if written.geometry.groups != wanted.geometry.groups:
        mine = [group.name for group in written.geometry.groups]
        theirs = [group.name for group in wanted.geometry.groups]
        raise CompatibilityError(
            f"objects of another geometry cannot be re-sharded: written with groups {mine}, wanted {theirs}",
            code="reshard",
        )
    if written.chunk_tokens != wanted.chunk_tokens:
        raise CompatibilityError(
            f"objects of {written.chunk_tokens} tokens cannot be re-sharded into objects of {wanted.chunk_tokens}: "
            "the chunk size is part of the identity; use the chunk size they were written with",
            code="reshard",
        )
    plan: list[Copy] = []
    for index in range(len(wanted)) if wanted_parts is None else wanted_parts:
        target = wanted[index]
        for source in written:
            if source.group == target.group:
                plan += _between(written.geometry.groups[target.group], source, target)
    return plan


def _overlap(a: Range, b: Range) -> Range:
    begin, end = max(a[0], b[0]), min(a[1], b[1])
    return (begin, max(begin, end))


def _token_pieces(source: Part, target: Part) -> list[tuple[int, int, int, int, int, int]]:
    """Common tokens as progressions of (row in source, row in target, rows, count, source step, target
    step).
    """
    if not target.tokens:
        return [(0, 0, 1, 1, 0, 0)]
    pieces: list[tuple[int, int, int]] = []
    src_row, src_at = 0, 0
    dst_row, dst_at = 0, 0
    while src_at < len(source.tokens) and dst_at < len(target.tokens):
        src, dst = source.tokens[src_at], target.tokens[dst_at]
        begin, end = _overlap(src, dst)
        if end > begin:
            pieces.append((src_row + begin - src[0], dst_row + begin - dst[0], end - begin))
        if src[1] <= dst[1]:
            src_row, src_at = src_row + src[1] - src[0], src_at + 1
        else:
            dst_row, dst_at = dst_row + dst[1] - dst[0], dst_at + 1
    merged: list[tuple[int, int, int]] = []
    for piece in pieces:
        if merged and merged[-1][0] + merged[-1][2] == piece[0] and merged[-1][1] + merged[-1][2] == piece[1]:
            merged[-1] = (merged[-1][0], merged[-1][1], merged[-1][2] + piece[2])
        else:
            merged.append(piece)
    return strided.progressions(merged)


def _between(group: Group, source: Part, target: Part) -> list[Copy]:
    first, last = _overlap(source.layers, target.layers)
    if first == last:
        return []
    pieces = _token_pieces(source, target)
    src_bands, dst_bands = band_layouts(group, source), band_layouts(group, target)
    plan: list[Copy] = []
    for number, band in enumerate(group.bands):
        src, dst = src_bands[number], dst_bands[number]
        src_heads, dst_heads = source.band_heads[number], target.band_heads[number]
        begin, end = _overlap(src_heads, dst_heads)
        if begin == end:
            continue
        src_base = (
            src.offset
            + (first - source.layers[0]) * src.layer_stride
            + (begin - src_heads[0]) * src.head_stride
        )
        dst_base = (
            dst.offset
            + (first - target.layers[0]) * dst.layer_stride
            + (begin - dst_heads[0]) * dst.head_stride
        )
        outer = [
            (last - first, src.layer_stride, dst.layer_stride),
            (end - begin, src.head_stride, dst.head_stride),
        ]
        whole = (
            pieces == [(0, 0, source.tokens_count, 1, 0, 0)] and source.tokens_count == target.tokens_count
        )
        if whole or not target.tokens:
            plan += strided.copies(source.index, target.index, src_base, dst_base, outer, src.head_stride)
            continue
        for k, plane in enumerate(band.planes):
            row = plane.row_bytes
            for src_row, dst_row, rows, repeat, src_step, dst_step in pieces:
                axes = [*outer, (repeat, src_step * row, dst_step * row)]
                plan += strided.copies(
                    source.index, target.index,
                    src_base + src.plane_offsets[k] + src_row * row,
                    dst_base + dst.plane_offsets[k] + dst_row * row,
                    axes, rows * row,
                )  # fmt: skip
    return plan


def parts_needed(plan: Sequence[Copy]) -> Mapping[int, int]:
    """Members of the written family that a plan reads, and how many bytes of each."""
    needed: dict[int, int] = {}
    for copy in plan:
        needed[copy.src] = needed.get(copy.src, 0) + copy.size_bytes
    return needed
