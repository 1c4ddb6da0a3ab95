"""The prefixes that a plan keeps: how many whole chunks and snapshots, what of them is stored once for all.

The part that the capacity and the object ledger have in common, so that both count the same chunks. Pure, any thread.
Only whole chunks are kept: what is behind the last one of a prefix is computed again, and what all prefixes begin with
is stored once as far as it fills chunks. A snapshot stands at the end of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvd.errors import UsageError
from kvd.plan import units
from kvd.plan.footprint import Footprint
from kvd.plan.units import check_int, counted, format_number


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefixes:
    """Unique prefixes of one length. `shared_tokens` are leading tokens common to all.

    `snapshots_count` is how many state snapshots each prefix has for itself: None is one where the model keeps states,
    none where it does not. Raises UsageError: a value out of range, a chunk longer than the prefix, more shared tokens
    than a prefix has, snapshots of a model without states, more snapshots than chunks.
    """

    prefixes_count: int
    prefix_tokens: int
    footprint: Footprint
    chunk_tokens: int
    shared_tokens: int = 0
    snapshots_count: int | None = None

    def __post_init__(self) -> None:
        check_int("--prefixes", self.prefixes_count, 1, units.plan_count_max)
        check_int("--prefix-tokens", self.prefix_tokens, 1, units.plan_count_max)
        check_int("--chunk-tokens", self.chunk_tokens, 1, units.plan_count_max)
        check_int("--shared-tokens", self.shared_tokens, 0, units.plan_count_max)
        if self.chunk_tokens > self.prefix_tokens:
            raise UsageError(
                f"--chunk-tokens = {self.chunk_tokens} is more than a prefix of {self.prefix_tokens} tokens "
                f"has: nothing would ever be stored; allowed: 1 … {self.prefix_tokens}",
                code="contradiction", chunk_tokens=self.chunk_tokens, prefix_tokens=self.prefix_tokens,
            )  # fmt: skip
        if self.shared_tokens > self.prefix_tokens:
            raise UsageError(
                f"--shared-tokens = {self.shared_tokens} is more than a prefix of {self.prefix_tokens} tokens "
                f"has; allowed: 0 … {self.prefix_tokens}",
                code="contradiction", shared_tokens=self.shared_tokens, prefix_tokens=self.prefix_tokens,
            )  # fmt: skip
        self._check_snapshots()

    def _check_snapshots(self) -> None:
        if self.snapshots_count is None:
            return
        if not self.footprint.state_groups:
            raise UsageError(
                f"--snapshots = {self.snapshots_count}, but no states are kept, only tokens; allowed: leave it out",
                code="contradiction", snapshots=self.snapshots_count,
            )  # fmt: skip
        check_int("--snapshots", self.snapshots_count, 1, units.plan_count_max)
        if self.snapshots_count > self.own_chunks_count:
            raise UsageError(
                f"--snapshots = {self.snapshots_count} of a prefix with {counted(self.own_chunks_count, 'chunk')} of "
                "its own: a snapshot stands at the end of a chunk; allowed: "
                + (f"1 … {self.own_chunks_count}" if self.own_chunks_count else "leave it out"),
                code="contradiction", snapshots=self.snapshots_count, chunks=self.own_chunks_count,
            )  # fmt: skip

    @property
    def shared_chunks_count(self) -> int:
        """Whole chunks that all prefixes begin with, stored once."""
        return self.shared_tokens // self.chunk_tokens

    @property
    def own_chunks_count(self) -> int:
        """Whole chunks that each prefix has for itself."""
        return self.prefix_tokens // self.chunk_tokens - self.shared_chunks_count

    @property
    def tail_tokens(self) -> int:
        """Tokens at the end of each prefix that fill no chunk and are computed again."""
        return self.prefix_tokens % self.chunk_tokens

    @property
    def own_snapshots_count(self) -> int:
        """Snapshots of one prefix, behind what it shares with the others."""
        if self.snapshots_count is not None:
            return self.snapshots_count
        return 1 if self.footprint.state_groups and self.own_chunks_count else 0

    @property
    def shared_snapshots_count(self) -> int:
        """One behind what all prefixes share, or nobody could go on from there; 0 without states."""
        return 1 if self.footprint.state_groups and self.shared_chunks_count else 0

    @property
    def snapshots_total_count(self) -> int:
        """Snapshots of all prefixes."""
        return self.prefixes_count * self.own_snapshots_count + self.shared_snapshots_count

    @property
    def families_count(self) -> int:
        """Families of all prefixes: one a chunk, or, where no tokens are kept, one a snapshot."""
        if not self.footprint.token_groups:
            return self.snapshots_total_count
        return self.prefixes_count * self.own_chunks_count + self.shared_chunks_count

    @property
    def own_bytes(self) -> int:
        """What one prefix keeps for itself."""
        return self.footprint.stored_bytes(
            self.own_chunks_count * self.chunk_tokens, self.own_snapshots_count
        )

    @property
    def shared_bytes(self) -> int:
        """What all prefixes begin with."""
        return self.footprint.stored_bytes(
            self.shared_chunks_count * self.chunk_tokens, self.shared_snapshots_count
        )

    @property
    def unique_bytes(self) -> int:
        """One copy of everything."""
        return self.prefixes_count * self.own_bytes + self.shared_bytes

    @property
    def kept_said(self) -> tuple[str, ...]:
        """What is taken for granted about chunks and snapshots."""
        said = []
        if self.tail_tokens:
            said.append(
                f"the last {counted(self.tail_tokens, 'token')} of a prefix fill no chunk of "
                f"{format_number(self.chunk_tokens)} and are not stored"
            )
        lost = self.shared_tokens % self.chunk_tokens
        if lost:
            said.append(
                f"{counted(lost, 'token')} of the {format_number(self.shared_tokens)} shared fill no chunk: every "
                "prefix stores them for itself"
            )
        if self.footprint.state_groups:
            shared = ", and one behind what all share" if self.shared_snapshots_count else ""
            said.append(
                f"{counted(self.own_snapshots_count, 'state snapshot')} a prefix{shared} (--snapshots): a prefix is "
                "reusable only where a snapshot stands"
            )
        return tuple(said)
