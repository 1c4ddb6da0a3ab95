"""Completeness: which prefixes of a prompt can be loaded, given the members that are present of each chunk.

Pure. A family holds all objects of one chunk. A prefix of k chunks (P = k x chunk tokens) is usable if every group
finds what its rule needs to go on at token P, and nothing less will do for any of them:

    full      chunks 0 … k-1
    window w  the chunks that hold tokens P-(w-1) … P-1
    chunked w the chunks that hold tokens floor(P/w) w … P-1; none if P is a multiple of w
    state     chunk k-1: the snapshot taken exactly at P, none older, none newer

"Chunk present" means every member that the chunk's own split has for that group, so that chunks written by different
splits mix. Never a column-wise AND: a model that only slides needs no early chunk at all, a hybrid without its newest
snapshot is no hit however complete its attention is. A prompt of S tokens uses at most S-1 of them, rounded down to
a chunk (`chain.usable_chunks`).

There is one answer per request: whoever looks (a scheduler) decides for all ranks from one set of bitmaps. Where ranks
see different daemons, each computes `usable_lengths` and `one_answer` takes the longest length that all of them share;
the smallest of their answers would not do, because a hybrid can be usable at 5 chunks and not at 3.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from kvd.errors import UsageError
from kvd.layout import chain
from kvd.layout.geometry import Geometry, Rule
from kvd.layout.shards import Objects, Split

RULE_NUMBERS: Final = {Rule.FULL: 0, Rule.WINDOW: 1, Rule.CHUNKED: 2, Rule.STATE: 3}
"""How the native matcher names a rule."""


class Completeness:
    """The rule of one geometry at one chunk size. Immutable but for a cache of the splits it has met."""

    def __init__(self, geometry: Geometry, chunk_tokens: int) -> None:
        self.geometry = geometry
        self.chunk_tokens = chain.check_chunk_tokens(chunk_tokens)
        self._masks: dict[int, tuple[int, ...] | None] = {}

    def group_masks(self, split_code: int) -> tuple[int, ...] | None:
        """For each group the bits of its members under a split; None if no split of this model has that code."""
        if split_code not in self._masks:
            try:
                masks = Objects(self.geometry, Split.from_code(split_code), self.chunk_tokens).group_masks
            except UsageError:
                masks = None  # what cannot be read is not there: a miss
            self._masks[split_code] = masks
        return self._masks[split_code]

    def first_chunk(self, group: int, chunks: int) -> int:
        """The first chunk that `group` needs for a prefix of `chunks`; it needs all from there on (none: `chunks`)."""
        described = self.geometry.groups[group]
        tokens = chunks * self.chunk_tokens
        match described.rule:
            case Rule.FULL:
                return 0
            case Rule.WINDOW:
                first = max(0, tokens - (described.window - 1))
            case Rule.CHUNKED:
                first = tokens // described.window * described.window
            case Rule.STATE:
                return max(0, chunks - 1)
        return chunks if first >= tokens else first // self.chunk_tokens

    def first_needed(self, chunks: int) -> int:
        """The first chunk that any group needs for a prefix of `chunks`."""
        return min(self.first_chunk(group, chunks) for group in range(len(self.geometry.groups)))

    def usable_lengths(self, present: Sequence[int], splits: Sequence[int] | int) -> int:
        """All usable prefixes as bits: bit k is set if the first k chunks can be loaded. Bit 0 always is.

        `present` holds the present bitmap of each chunk's family in order (0: no family), `splits` the split code
        that each family records, or one for all.
        """
        codes = [splits] * len(present) if isinstance(splits, int) else splits
        if len(codes) != len(present):
            raise UsageError(f"{len(present)} bitmaps, but {len(codes)} splits", code="family")
        lengths = (2 << len(present)) - 1
        for group in range(len(self.geometry.groups)):
            lengths &= self._lengths_of(group, self._whole(group, present, codes), len(present))
        return lengths

    def _whole(self, group: int, present: Sequence[int], codes: Sequence[int]) -> int:
        """Bit i is set if chunk i has every member of `group` that its split has."""
        whole = 0
        bit = 1
        for bitmap, code in zip(present, codes, strict=True):
            if bitmap:
                masks = self.group_masks(code)
                if masks is not None and bitmap & masks[group] == masks[group]:
                    whole |= bit
            bit <<= 1
        return whole

    def _lengths_of(self, group: int, whole: int, chunks: int) -> int:
        """Lengths that one group allows, as bits 0 … chunks, given its whole chunks."""
        described = self.geometry.groups[group]
        match described.rule:
            case Rule.FULL:
                leading = (~whole & (whole + 1)).bit_length() - 1  # the lowest missing chunk
                return (2 << leading) - 1
            case Rule.STATE:
                return whole << 1 | 1
            case Rule.WINDOW:
                # Always as many chunks back; those before the first count as there. `ends` has a bit where `run`
                # whole chunks in a row end; two runs side by side make one of both lengths.
                back = min(-(-(described.window - 1) // self.chunk_tokens), chunks)
                if not back:
                    return (2 << chunks) - 1
                ends, run = whole << back | ((1 << back) - 1), 1
                while run < back:
                    step = min(run, back - run)
                    ends &= ends << step
                    run += step
                return ends >> back << 1 | 1
            case Rule.CHUNKED:
                lengths = 1
                for length in range(1, chunks + 1):
                    first = self.first_chunk(group, length)
                    wanted = (1 << length) - (1 << first)
                    lengths |= (whole & wanted == wanted) << length
                return lengths

    def usable_chunks(
        self, present: Sequence[int], splits: Sequence[int] | int, *, prompt_tokens: int | None = None
    ) -> int:
        """The longest usable prefix in chunks, cut by the last-token rule if `prompt_tokens` is given."""
        most = len(present)
        if prompt_tokens is not None:
            most = min(most, chain.usable_chunks(prompt_tokens, self.chunk_tokens))
        return longest(
            self.usable_lengths(present[:most], splits if isinstance(splits, int) else splits[:most])
        )

    def required(self, chunks: int, splits: Sequence[int] | int) -> list[int]:
        """For each of the first `chunks` chunks the bits of the members that a prefix of that length needs.

        A chunk of which nothing is needed has 0: it need not be leased, loaded or even present.
        """
        codes = [splits] * chunks if isinstance(splits, int) else splits
        needed = [0] * chunks
        for group in range(len(self.geometry.groups)):
            for number in range(self.first_chunk(group, chunks), chunks):
                masks = self.group_masks(codes[number])
                if masks is None:
                    raise UsageError(
                        f"chunk {number} was written by split code {codes[number]}, which this model cannot have",
                        code="split", chunk=number,
                    )  # fmt: skip
                needed[number] |= masks[group]
        return needed


def longest(lengths: int) -> int:
    """The longest of the usable lengths that `usable_lengths` gave as bits."""
    return lengths.bit_length() - 1


def one_answer(lengths: Iterable[int]) -> int:
    """The longest prefix, in chunks, that every one of several observers finds usable."""
    common = -1
    for bits in lengths:
        common &= bits
    if common == -1:
        raise UsageError("one_answer of no observers", code="family")
    return longest(common)
