"""What a model keeps of a prefix, and how much of that a reader needs: more than its bytes per token.

A footprint is a tuple of groups: layers that follow one rule. A group keeps bytes for every token, or one snapshot of a
fixed size; a reader needs all of its tokens or only the last ones; a chunk (a snapshot) of it is so many objects. Who
plans for a real model makes the footprint of its geometry (`kvd.kvctl.plan_options`); nothing here imports
`kvd.layout`, whose rule of what a prefix needs (`family.Completeness.required`) is what `needed_bytes` must agree with.

Pure, any thread. Chunks are whole: a window is loaded from the chunk on in which it begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from kvd.errors import UsageError
from kvd.plan import units
from kvd.plan.ledger import Step
from kvd.plan.units import check_int, counted, format_bytes, format_number

groups_max = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptGroup:
    """Layers with one rule: bytes of each token, or bytes of one snapshot, never both.

    `last_tokens` is how many of the last tokens a reader needs at the most (None: all of them); `last_is_bound` says
    that it often needs fewer. `members_count` objects make a chunk (a snapshot) of this group, of one size if
    `members_alike`. Raises UsageError for values out of range.
    """

    name: str
    token_bytes: int = 0
    snapshot_bytes: int = 0
    last_tokens: int | None = None
    last_is_bound: bool = False
    members_count: int = 1
    members_alike: bool = True

    def __post_init__(self) -> None:
        check_int("bytes per token", self.token_bytes, 0 if self.snapshot_bytes else 1, units.plan_bytes_max)
        check_int("bytes of a snapshot", self.snapshot_bytes, 0, units.plan_bytes_max)
        check_int("members of a chunk", self.members_count, 1, units.plan_count_max)
        if self.last_tokens is not None:
            check_int("last tokens needed", self.last_tokens, 0, units.plan_count_max)
        if self.snapshot_bytes and (self.token_bytes or self.last_tokens is not None):
            raise UsageError(
                f"group {self.name} keeps {self.token_bytes} B a token and a snapshot of {self.snapshot_bytes} B; "
                "allowed: one of them, and no window for a snapshot",
                code="contradiction", field=self.name,
            )  # fmt: skip

    @property
    def is_state(self) -> bool:
        """Whether it keeps snapshots instead of tokens."""
        return self.snapshot_bytes > 0

    def needed_chunks(self, tokens: int, chunk_tokens: int) -> int:
        """Chunks that hold what a reader needs of this group to go on at `tokens`; 0 for a state."""
        last = 0 if self.is_state else tokens if self.last_tokens is None else min(self.last_tokens, tokens)
        return -(-tokens // chunk_tokens) - (tokens - last) // chunk_tokens if last else 0

    def needed_bytes(self, tokens: int, chunk_tokens: int) -> int:
        """Bytes of those chunks; of a state, one snapshot as soon as there is a chunk that it can stand behind."""
        if self.is_state:
            return self.snapshot_bytes if tokens >= chunk_tokens else 0
        return self.needed_chunks(tokens, chunk_tokens) * chunk_tokens * self.token_bytes

    def object_bytes(self, chunk_tokens: int) -> Fraction:
        """One member of a chunk, or of a snapshot; the mean where they are not alike."""
        return Fraction(self.snapshot_bytes or self.token_bytes * chunk_tokens, self.members_count)


@dataclass(frozen=True, slots=True)
class Footprint:
    """All groups of a model, those that keep tokens first. Raises UsageError: none, or names given twice."""

    groups: tuple[KeptGroup, ...]

    def __post_init__(self) -> None:
        check_int("groups", len(self.groups), 1, groups_max)
        names = [group.name for group in self.groups]
        if len(set(names)) < len(names):
            raise UsageError(f"groups {', '.join(names)}: a name is given twice", code="contradiction")
        object.__setattr__(self, "groups", tuple(sorted(self.groups, key=lambda group: group.is_state)))

    @classmethod
    def by_hand(cls, bytes_per_token: int, members_count: int = 1) -> Footprint:
        """Of a model known by its bytes per token alone: every token is needed, all members are alike."""
        return cls((KeptGroup(name="tokens", token_bytes=bytes_per_token, members_count=members_count),))

    @property
    def token_groups(self) -> tuple[KeptGroup, ...]:
        """Groups that keep tokens."""
        return tuple(group for group in self.groups if not group.is_state)

    @property
    def state_groups(self) -> tuple[KeptGroup, ...]:
        """Groups that keep snapshots."""
        return tuple(group for group in self.groups if group.is_state)

    @property
    def bytes_per_token(self) -> int:
        """What one more token adds; 0 for a model that keeps states only."""
        return sum(group.token_bytes for group in self.groups)

    @property
    def snapshot_bytes(self) -> int:
        """One snapshot of all states; 0 for a model without."""
        return sum(group.snapshot_bytes for group in self.groups)

    @property
    def chunk_members_count(self) -> int:
        """Objects of a chunk, snapshots not counted."""
        return sum(group.members_count for group in self.token_groups)

    def stored_bytes(self, tokens: int, snapshots: int) -> int:
        """All objects of so many tokens of one prefix, with so many snapshots."""
        return self.bytes_per_token * tokens + self.snapshot_bytes * snapshots

    def needed_bytes(self, tokens: int, chunk_tokens: int = 1) -> int:
        """What kvd loads so that a reader can go on at `tokens`: every group's needed chunks, and one snapshot.

        On multiples of the chunk it is concave in the length, plus a constant: a full group grows in proportion, a
        window as the smaller of the length and the window, a snapshot not at all.
        """
        return sum(group.needed_bytes(tokens, chunk_tokens) for group in self.groups)

    @property
    def windows_said(self) -> str:
        """Which groups are read only in their last tokens; '' if none is."""
        windowed = [group for group in self.groups if group.last_tokens is not None]
        said = ", ".join(
            f"{group.name}: {'at most ' if group.last_is_bound else ''}"
            f"{counted(group.last_tokens or 0, 'token')}"
            for group in windowed
        )
        if not windowed:
            return ""
        bound = (
            "; what a chunked group needs depends on where its stretch begins, and the most is taken"
            if any(group.last_is_bound for group in windowed)
            else ""
        )
        return f"all chunks are stored, but of a window only the last are read ({said}){bound}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixRead:
    """Reading one prefix: `tokens` of it, in whole chunks of `chunk_tokens` (1: windows to the token).

    Raises UsageError: a length that is not a whole number of chunks, since only whole chunks are kept.
    """

    footprint: Footprint
    tokens: int
    chunk_tokens: int = 1

    def __post_init__(self) -> None:
        check_int("--prefix-tokens", self.tokens, 1, units.plan_count_max)
        check_int("--chunk-tokens", self.chunk_tokens, 1, units.plan_count_max)
        if self.tokens % self.chunk_tokens:
            below = self.tokens // self.chunk_tokens * self.chunk_tokens
            near = f"{below} or {below + self.chunk_tokens}" if below else f"{self.chunk_tokens}"
            raise UsageError(
                f"--prefix-tokens = {self.tokens} with --chunk-tokens = {self.chunk_tokens}: kvd keeps whole chunks, "
                f"the rest is computed; allowed: {near}",
                code="contradiction", prefix_tokens=self.tokens, chunk_tokens=self.chunk_tokens,
            )  # fmt: skip

    @property
    def size_bytes(self) -> int:
        """What is loaded."""
        return self.footprint.needed_bytes(self.tokens, self.chunk_tokens)

    @property
    def steps(self) -> tuple[Step, ...]:
        """The arithmetic: one line a group, and their sum where there are several."""
        groups = self.footprint.groups
        rows = [
            self._step(group, f"read, {group.name}" if len(groups) > 1 else "to load") for group in groups
        ]
        if len(rows) > 1:
            rows.append(Step("to load", " + ".join(row.text for row in rows), self.size_bytes, "B"))
        return tuple(rows)

    def _step(self, group: KeptGroup, label: str) -> Step:
        size = group.needed_bytes(self.tokens, self.chunk_tokens)
        if group.is_state:
            return Step(label, f"1 snapshot of {format_bytes(group.snapshot_bytes)}", size, "B")
        chunks = group.needed_chunks(self.tokens, self.chunk_tokens)
        each = f"{format_number(group.token_bytes)} B"
        last = "last " if chunks * self.chunk_tokens < self.tokens else ""
        if self.chunk_tokens == 1:
            return Step(label, f"{last}{counted(chunks, 'token')} × {each}", size, "B")
        tokens = f"{counted(chunks, 'chunk')} × {counted(self.chunk_tokens, 'token')}"
        return Step(label, f"{last}{tokens} × {each}", size, "B")

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What the size takes for granted."""
        windows = self.footprint.windows_said
        rounded = (
            ""
            if self.chunk_tokens > 1
            else "; windows are not rounded up to chunks (--chunk-tokens says how long these are)"
        )
        states = (
            (f"one snapshot is read, taken exactly behind token {format_number(self.tokens)}",)
            if self.footprint.state_groups
            else ()
        )
        return ((windows + rounded,) if windows else ()) + states


def by_group(label: str, groups: Sequence[KeptGroup], group: KeptGroup) -> str:
    """'label' where there is one group, 'label, name' where there are several."""
    return f"{label}, {group.name}" if len(groups) > 1 else label
