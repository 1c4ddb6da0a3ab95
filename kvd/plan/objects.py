"""The object ledger: how many objects the prefixes become, and what their metadata costs.

Pure functions of their arguments, any thread. An object is one chunk × one group × one shard. kvd keeps one
index entry per *family* (all the objects of a chunk), many stores keep one per object: both are shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvd.errors import UsageError
from kvd.plan import units
from kvd.plan.ledger import Answer, Step
from kvd.plan.units import check_int, counted, format_bytes, format_number

metadata_per_object_bytes_assumed = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectsPlan:
    """Objects and metadata of one copy of everything, on all hosts together.

    `members_count` is groups × shards of a chunk. `metadata_per_family_bytes` is kvd's own measured figure
    (all memory beyond payload ÷ families); None when it has not been measured, and then no figure of kvd's
    is shown. `shared_tokens` are leading tokens common to all prefixes. `state_bytes` come with each chunk of a model
    with recurrent layers that has a snapshot at its end. Raises UsageError: a
    value out of range, a chunk longer than the prefix, a chunk whose bytes are not a whole number of members.
    """

    prefixes_count: int
    prefix_tokens: int
    bytes_per_token: int
    chunk_tokens: int
    members_count: int
    metadata_per_object_bytes: int = metadata_per_object_bytes_assumed
    metadata_per_family_bytes: int | None = None
    shared_tokens: int = 0
    state_bytes: int = 0

    def __post_init__(self) -> None:
        check_int("prefixes", self.prefixes_count, 1, units.plan_count_max)
        check_int("prefix tokens", self.prefix_tokens, 1, units.plan_count_max)
        check_int("bytes per token", self.bytes_per_token, 1, units.plan_bytes_max)
        check_int("chunk tokens", self.chunk_tokens, 1, units.plan_count_max)
        check_int("members of a chunk", self.members_count, 1, units.plan_count_max)
        check_int("metadata per object", self.metadata_per_object_bytes, 0, units.plan_bytes_max)
        if self.metadata_per_family_bytes is not None:
            check_int("metadata per family", self.metadata_per_family_bytes, 0, units.plan_bytes_max)
        check_int("shared tokens", self.shared_tokens, 0, self.prefix_tokens)
        check_int("bytes of a state", self.state_bytes, 0, units.plan_bytes_max)
        if self.chunk_tokens > self.prefix_tokens:
            raise UsageError(
                f"chunk tokens = {self.chunk_tokens} is more than a prefix of {self.prefix_tokens} tokens "
                f"has: nothing would ever be stored; allowed: 1 … {self.prefix_tokens}",
                code="contradiction", chunk_tokens=self.chunk_tokens, prefix_tokens=self.prefix_tokens,
            )  # fmt: skip
        if self.chunk_bytes % self.members_count:
            raise UsageError(
                f"members of a chunk = {self.members_count} does not divide its {self.chunk_bytes} bytes; "
                f"allowed: a divisor, as equal shards are",
                code="contradiction", members=self.members_count, chunk_bytes=self.chunk_bytes,
            )  # fmt: skip

    @property
    def chunk_bytes(self) -> int:
        """All members of one chunk."""
        return self.chunk_tokens * self.bytes_per_token + self.state_bytes

    @property
    def object_bytes(self) -> int:
        """One member of one chunk."""
        return self.chunk_bytes // self.members_count

    @property
    def families_count(self) -> int:
        """Whole chunks of all prefixes; a partial chunk at the tail is not stored."""
        return self.prefixes_count * self.own_chunks_count + self.shared_chunks_count

    @property
    def shared_chunks_count(self) -> int:
        """Whole chunks that all prefixes begin with, stored once."""
        return self.shared_tokens // self.chunk_tokens

    @property
    def own_chunks_count(self) -> int:
        """Whole chunks that each prefix has for itself."""
        return self.prefix_tokens // self.chunk_tokens - self.shared_chunks_count

    @property
    def objects_count(self) -> int:
        """Families × members."""
        return self.families_count * self.members_count

    @property
    def tail_tokens(self) -> int:
        """Tokens at the end of each prefix that fill no chunk and are recomputed."""
        return self.prefix_tokens % self.chunk_tokens

    @property
    def metadata_bytes(self) -> int:
        """Metadata at the assumed cost of an object."""
        return self.objects_count * self.metadata_per_object_bytes

    @property
    def own_metadata_bytes(self) -> int | None:
        """Metadata at kvd's measured cost of a family, None if it was not measured."""
        if self.metadata_per_family_bytes is None:
            return None
        return self.families_count * self.metadata_per_family_bytes

    @property
    def answers(self) -> Mapping[str, Answer]:
        """Results under stable names."""
        return {
            "chunk_bytes": self.chunk_bytes,
            "object_bytes": self.object_bytes,
            "families_count": self.families_count,
            "objects_count": self.objects_count,
            "tail_tokens": self.tail_tokens,
            "metadata_bytes": self.metadata_bytes,
            "own_metadata_bytes": self.own_metadata_bytes,
        }

    @property
    def steps(self) -> tuple[Step, ...]:
        """The arithmetic, in order."""
        own_chunks, shared = self.own_chunks_count, self.shared_chunks_count
        families, objects = format_number(self.families_count), format_number(self.objects_count)
        own = self.own_metadata_bytes
        state = f" + a state of {format_bytes(self.state_bytes)}" if self.state_bytes else ""
        rows = [
            Step("one chunk", f"{format_number(self.chunk_tokens)} tokens × "
                 f"{format_number(self.bytes_per_token)} B{state}", self.chunk_bytes, "B"),
            Step("one object", f"{format_bytes(self.chunk_bytes)} ÷ {counted(self.members_count, 'member')}",
                 self.object_bytes, "B"),
            Step("chunks of a prefix", f"{format_number(self.prefix_tokens)} ÷ "
                 f"{format_number(self.chunk_tokens)}, whole ones", own_chunks + shared, "chunks"),
            Step("families", f"{format_number(self.prefixes_count)} prefixes × {own_chunks:,}"
                 + (f" + {shared:,} shared by all" if shared else ""), self.families_count, "families"),
            Step("objects", f"{families} × {counted(self.members_count, 'member')}",
                 self.objects_count, "objects"),
            Step("metadata", f"{objects} objects × {format_bytes(self.metadata_per_object_bytes)}",
                 self.metadata_bytes, "B"),
        ]  # fmt: skip
        if own is not None and self.metadata_per_family_bytes is not None:
            text = f"{families} families × {format_bytes(self.metadata_per_family_bytes)}"
            rows.append(Step("metadata of kvd", text, own, "B"))
        return tuple(rows)

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What the numbers take for granted."""
        own = (
            "kvd keeps one entry per family, not per object; `kvctl bench local` measures what that costs"
            if self.metadata_per_family_bytes is None
            else f"{format_bytes(self.metadata_per_family_bytes)} of a family is kvd's measured figure"
        )
        tail = (
            f"the last {format_number(self.tail_tokens)} tokens of a prefix fill no chunk and are not stored"
            if self.tail_tokens
            else "prefixes are whole chunks"
        )
        return (
            f"{format_bytes(self.metadata_per_object_bytes)} of metadata per object is an assumption",
            own,
            tail,
            "one copy is counted: multiply by the copies for all hosts together",
        )

    @property
    def conclusion(self) -> str:
        """What follows, and what does not."""
        own = self.own_metadata_bytes
        measured = f" ({format_bytes(own)} as kvd keeps it)" if own is not None else ""
        return (
            f"{format_number(self.objects_count)} objects take {format_bytes(self.metadata_bytes)} of "
            f"metadata{measured}, and a chunk of 1/8 the tokens would make it 8 times as many; this counts "
            f"memory, not the CPU time of looking them up."
        )
