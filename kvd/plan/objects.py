"""The object ledger: how many objects the prefixes become, and what their metadata costs.

Pure functions of their arguments, any thread. An object is one chunk × one group × one shard, or one
shard of a state snapshot. kvd keeps one index entry per *family* (all the objects of a chunk), many stores keep one
per object: both are shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvd.errors import UsageError
from kvd.plan import units
from kvd.plan.footprint import KeptGroup, by_group
from kvd.plan.ledger import Answer, Step
from kvd.plan.prefixes import Prefixes
from kvd.plan.units import check_int, counted, format_bytes, format_number

metadata_per_object_bytes_assumed = 512
record_bytes = 48  # in kvd's index, one for every object


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectsPlan(Prefixes):
    """Objects and metadata of one copy of everything, on all hosts together.

    A chunk and a snapshot are as many objects as their groups have members. `metadata_per_family_bytes` is kvd's own
    measured figure for families of one object (all memory beyond payload ÷ families), to which every further object
    adds its record; None when it has not been measured, and then no figure of kvd's is shown. Raises UsageError: as
    `Prefixes` does, a value out of range, a chunk whose bytes are not a whole number of members.
    """

    metadata_per_object_bytes: int = metadata_per_object_bytes_assumed
    metadata_per_family_bytes: int | None = None

    def __post_init__(self) -> None:
        Prefixes.__post_init__(self)
        check_int("--metadata", self.metadata_per_object_bytes, 0, units.plan_bytes_max)
        if self.metadata_per_family_bytes is not None:
            check_int("metadata per family", self.metadata_per_family_bytes, 0, units.plan_bytes_max)
        for group in self.footprint.groups:
            size = group.object_bytes(self.chunk_tokens)
            if group.members_alike and size.denominator != 1:
                whole = size * group.members_count
                raise UsageError(
                    f"--tp × --groups = {group.members_count} does not divide its {whole} bytes; "
                    f"allowed: a divisor, as equal shards are",
                    code="contradiction", members=group.members_count, chunk_bytes=int(whole),
                )  # fmt: skip

    @property
    def chunk_bytes(self) -> int:
        """All members of one chunk, without a snapshot."""
        return self.chunk_tokens * self.footprint.bytes_per_token

    @property
    def object_bytes(self) -> int | None:
        """One member of one chunk or snapshot, None where they differ."""
        sizes = {group.object_bytes(self.chunk_tokens) for group in self.footprint.groups}
        alike = len(sizes) == 1 and all(group.members_alike for group in self.footprint.groups)
        return int(sizes.pop()) if alike else None

    def group_objects_count(self, group: KeptGroup) -> int:
        """Objects of one group: its members of every chunk, or of every snapshot."""
        return (self.snapshots_total_count if group.is_state else self.families_count) * group.members_count

    @property
    def objects_count(self) -> int:
        """Objects of all groups."""
        return sum(self.group_objects_count(group) for group in self.footprint.groups)

    @property
    def metadata_bytes(self) -> int:
        """Metadata at the assumed cost of an object."""
        return self.objects_count * self.metadata_per_object_bytes

    @property
    def own_metadata_bytes(self) -> int | None:
        """Metadata at kvd's measured cost of a family and its further objects, None if it was not measured."""
        if self.metadata_per_family_bytes is None:
            return None
        return self.families_count * self.metadata_per_family_bytes + self._further_count * record_bytes

    @property
    def _further_count(self) -> int:
        """Objects that are not the first of their family."""
        return self.objects_count - self.families_count

    @property
    def answers(self) -> Mapping[str, Answer]:
        """Results under stable names."""
        return {
            "chunk_bytes": self.chunk_bytes,
            "object_bytes": self.object_bytes,
            "families_count": self.families_count,
            "snapshots_count": self.snapshots_total_count,
            "objects_count": self.objects_count,
            "tail_tokens": self.tail_tokens,
            "metadata_bytes": self.metadata_bytes,
            "own_metadata_bytes": self.own_metadata_bytes,
            "groups": [
                {
                    "name": group.name,
                    "members_count": group.members_count,
                    "object_bytes": group.object_bytes(self.chunk_tokens),
                    "objects_count": self.group_objects_count(group),
                }
                for group in self.footprint.groups
            ],
        }

    @property
    def steps(self) -> tuple[Step, ...]:
        """The arithmetic, in order."""
        rows = [*self._size_steps, *self._count_steps]
        objects, each = counted(self.objects_count, "object"), format_bytes(self.metadata_per_object_bytes)
        rows.append(Step("metadata", f"{objects} × {each}", self.metadata_bytes, "B"))
        own = self.own_metadata_bytes
        if own is not None and self.metadata_per_family_bytes is not None:
            families = counted(self.families_count, "family", "families")
            further = f" + {counted(self._further_count, 'further object')} × {record_bytes} B" * bool(
                self._further_count
            )
            text = f"{families} × {format_bytes(self.metadata_per_family_bytes)}{further}"
            rows.append(Step("metadata of kvd", text, own, "B"))
        return tuple(rows)

    @property
    def _size_steps(self) -> list[Step]:
        """A chunk, a snapshot, and one object of each group."""
        groups, size = self.footprint.groups, self.chunk_tokens
        rows = []
        if self.footprint.token_groups:
            text = f"{counted(size, 'token')} × {format_number(self.footprint.bytes_per_token)} B"
            rows.append(Step("one chunk", text, self.chunk_bytes, "B"))
        for group in groups:
            whole = group.snapshot_bytes or size * group.token_bytes
            if group.is_state:
                what = f"snapshot of {format_bytes(whole)}"
            elif len(self.footprint.token_groups) > 1:
                what = f"{counted(size, 'token')} × {format_number(group.token_bytes)} B"
            else:
                what = format_bytes(whole)
            mean = "" if group.members_alike else ", mean"
            text = f"{what} ÷ {counted(group.members_count, 'member')}"
            rows.append(
                Step(by_group("one object", groups, group) + mean, text, group.object_bytes(size), "B")
            )
        return rows

    @property
    def _count_steps(self) -> list[Step]:
        """Families and snapshots, and the objects that they are."""
        groups, prefixes = self.footprint.groups, counted(self.prefixes_count, "prefix", "prefixes")
        shared = self.shared_chunks_count
        rows = []
        if self.footprint.token_groups:
            chunks = (
                f"{counted(self.prefix_tokens, 'token')} ÷ {format_number(self.chunk_tokens)}, whole ones"
            )
            rows += [
                Step("chunks of a prefix", chunks, self.own_chunks_count + shared, "chunks"),
                Step("families", f"{prefixes} × {self.own_chunks_count:,}"
                     + (f" + {shared:,} shared by all" if shared else ""), self.families_count, "families"),
            ]  # fmt: skip
        if self.footprint.state_groups:
            more = f" + {self.shared_snapshots_count} shared by all" if self.shared_snapshots_count else ""
            rows.append(Step("snapshots", f"{prefixes} × {self.own_snapshots_count:,}{more}",
                             self.snapshots_total_count, "snapshots"))  # fmt: skip
        objects = [
            Step(by_group("objects", groups, group),
                 (counted(self.snapshots_total_count, "snapshot") if group.is_state
                  else counted(self.families_count, "family", "families"))
                 + f" × {counted(group.members_count, 'member')}", self.group_objects_count(group), "objects")
            for group in groups
        ]  # fmt: skip
        rows += objects
        if len(objects) > 1:
            text = " + ".join(format_number(one.value) for one in objects)
            rows.append(Step("objects", text, self.objects_count, "objects"))
        return rows

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What the numbers take for granted."""
        own = (
            "kvd keeps one entry per family, not per object; `kvctl bench local` measures what that costs"
            if self.metadata_per_family_bytes is None
            else f"{format_bytes(self.metadata_per_family_bytes)} is kvd's measured figure for a family of one object; "
            f"every further object adds a record of {record_bytes} B"
        )
        return (
            f"{format_bytes(self.metadata_per_object_bytes)} of metadata per object is an assumption",
            own,
            *(self.kept_said or ("prefixes are whole chunks",)),
            "one copy is counted: multiply by the copies for all hosts together",
        )

    @property
    def conclusion(self) -> str:
        """What follows, and what does not."""
        own = self.own_metadata_bytes
        measured = f" ({format_bytes(own)} as kvd keeps it)" if own is not None else ""
        takes = "takes" if self.objects_count == 1 else "take"
        eighth = (
            "those of chunks 8 times as many, and leave the snapshots as they are"
            if self.footprint.state_groups
            else "it 8 times as many"
        )
        scaled = (
            f", and a chunk of 1/8 the tokens would make {eighth}"
            if self.footprint.token_groups
            else ", whatever the chunk, as snapshots are counted by the prefix"
        )
        return (
            f"{counted(self.objects_count, 'object')} {takes} {format_bytes(self.metadata_bytes)} of "
            f"metadata{measured}{scaled}; this counts memory, not the CPU time of looking them up."
        )
