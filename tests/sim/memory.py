"""What outlives nobody's opinion: the shared memory of a simulated host, and what may never happen in it.

`Memory` is the pool, cut in grains that are written and read one at a time, so that a reader meets half-written and
foreign bytes exactly where it would on a real host. `Meta` is one epoch's index. Neither trusts the core: they know by
themselves who owns each grain and who holds each entry, and raise `Violation` when a promise of kvd is broken.
Everything is used by one `Simulation` in one thread.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .processes import Attachment, Lease

KIB = 1 << 10
MIB = 1 << 20
GRAIN_BYTES = 256 * KIB  # what a simulated copy moves in one step
OFFSET_BITS = 48


class Violation(AssertionError):  # noqa: N818  it is a finding, not an error of the simulation
    """A promise of kvd was broken."""


class Token(NamedTuple):
    """The bytes of one grain: which family and member they belong to, and who wrote them."""

    key: bytes
    member: int
    writer: int  # serial of an attachment


class State(IntEnum):
    """State of an index entry."""

    EMPTY = 0
    WRITING = 1
    READY = 2
    EVICTING = 3


@dataclass(slots=True, eq=False)
class Record:
    """One member record and the slot it stands for."""

    number: int
    owner: int  # serial of the attachment that reserved it
    slot: int  # client slot of that attachment
    reservation: int
    member: int
    place: int
    size_bytes: int
    pending: bool = True
    checksum: int = 0
    heads_layers: tuple[int, ...] = ()

    def grains(self) -> range:
        """Numbers of the grains it covers."""
        return grains(self.place, self.size_bytes)


@dataclass(slots=True, eq=False)
class Entry:
    """One family. `sg` is generation and state, read and written as one word."""

    number: int
    sg: tuple[int, State] = (0, State.EMPTY)
    key: bytes = b""
    family_members: int = 0
    namespace: int = 0
    split: int = 0
    flags: int = 0
    members: dict[int, Record] = field(default_factory=dict)  # present bits and list of records
    unlinked: bool = False  # withdrawn: found by nobody, READY for those who hold it
    parent: int = 0xFFFFFFFF  # entry of the family before it, as far as the daemon knows
    parent_generation: int = 0
    leases: list[Lease] = field(default_factory=list)  # who reads it by right; the daemon never looks here


def grains(place: int, size_bytes: int) -> range:
    """Numbers of the grains of a slot. Places of different segments have different grains."""
    first = place // GRAIN_BYTES
    return range(first, first + size_bytes // GRAIN_BYTES)


class Memory:
    """The pool: what stands in each grain, and to which record it belongs."""

    def __init__(self, segment_bytes: list[int]) -> None:
        self.segment_bytes = segment_bytes
        self.usable: list[int] = [0] * len(segment_bytes)  # populated up to here
        self.tokens: dict[int, Token] = {}
        self.owners: dict[int, Record] = {}

    def take(self, record: Record) -> None:
        """A slot is handed to a writer. Violation: some of it belongs to somebody."""
        segment, offset = record.place >> OFFSET_BITS, record.place & ((1 << OFFSET_BITS) - 1)
        if offset % 64 or offset + record.size_bytes > self.usable[segment]:
            raise Violation(f"slot {record.place:#x} of {record.size_bytes} B leaves what may be used")
        for grain in record.grains():
            if grain in self.owners:
                other = self.owners[grain]
                raise Violation(
                    f"slot {record.place:#x} was handed out, record {other.number} owns a part of it"
                )
            self.owners[grain] = record

    def give(self, record: Record) -> None:
        """A slot is free again. What was written stays until somebody else writes."""
        for grain in record.grains():
            if self.owners.pop(grain, None) is not record:
                raise Violation(
                    f"slot {record.place:#x} was given back by record {record.number}, not its owner"
                )

    def write(self, grain: int, token: Token, reservation: int) -> None:
        """One step of a copy. Violation (late write): the grain is not this writer's to fill any more."""
        owner = self.owners.get(grain)
        if (
            owner is None
            or not owner.pending
            or (owner.owner, owner.reservation) != (token.writer, reservation)
        ):
            whose = (
                "nobody" if owner is None else f"attachment {owner.owner}, reservation {owner.reservation}"
            )
            raise Violation(
                f"late write: attachment {token.writer} filled grain {grain:#x} for its reservation {reservation}, "
                f"which belongs to {whose}{'' if owner is None or owner.pending else ', published'}"
            )
        self.tokens[grain] = token

    def whole(self, record: Record, key: bytes, member: int) -> bool:
        """Whether all of the slot is what its owner wrote for this family and member."""
        token = Token(key, member, record.owner)
        return all(self.tokens.get(grain) == token for grain in record.grains())


class Meta:
    """One epoch's index, records and hazards. Written by one daemon; a daemon that died leaves it as it was."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.index: dict[bytes, int] = {}
        self.entries: dict[int, Entry] = {}
        self.records: dict[int, Record] = {}
        self.published_at: dict[bytes, int] = {}  # for the check of suffixes
        self.clock = 0

    def entry(self, number: int) -> Entry:
        """The row of this number."""
        found = self.entries.get(number)
        if found is None:
            found = self.entries[number] = Entry(number)
        return found

    def held(self, attachments: Iterable[Attachment]) -> set[tuple[int, int]]:
        """(entry, generation) that the hazards of these name. One look at each."""
        found: set[tuple[int, int]] = set()
        for attachment in attachments:
            found.update(attachment.hazards.values())
        return found

    def bytes_of(self, *, pending: bool) -> int:
        """Bytes of slots that are being filled, or that are published."""
        return sum(record.size_bytes for record in self.records.values() if record.pending is pending)
