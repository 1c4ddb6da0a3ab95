"""The whole vocabulary of the core: what can happen (events) and what is to be done (effects).

Owned by `kvd.core`; the server's runner, the tests and the benchmarks speak it. Everything here is a frozen
value that any thread may hold. A batch is one event. Columns are bytes-like buffers of native integers: `u32`
and `u64` columns are `array('I')` and `array('Q')` when the core makes them, and may be any buffer of that
layout when the runner does, so that what the native table returns is passed on as it is.

Rules for the runner:

* It looks up the facts of an event (`entries`, `present`) immediately before the step, in the same turn.
* It performs the effects in their order. `DoPublish` is answered by stepping `Published`, `DoEvict` by
stepping
  `Evicted`, both with the effect's token and before any other event. `DoAgain` is answered by stepping
  `Again` once clients have had a turn.
* It sends `ClientGone` only when the client's memory can no longer be written (pidfd or orderly detach, ring
  drained).
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from enum import IntEnum, IntFlag, StrEnum
from typing import NamedTuple, TypeAlias

from kvd.errors import KvdError
from kvd.types import Member

NONE = 0xFFFFFFFF  # "no entry", "no record", "no run" in a u32 column
PREVIOUS = 0xFFFFFFFE  # in DoPublish.parents: the family of the item before
NO_OP = -1  # "no operation" in DoPublish.answer_op
NO_PLACE = 0xFFFFFFFFFFFFFFFF  # "no place" in a u64 column
ADMIN = -1  # the `client` of answers to administration

Buffer: TypeAlias = "bytes | bytearray | memoryview | array[int]"


class ReserveStatus(IntEnum):
    """What became of one item of a reservation (one byte each in the reply)."""

    GRANTED = 0
    PRESENT = 1  # published already; nothing to write
    PENDING = 2  # another reservation is writing it and the caller asked to skip those


class PublishStatus(IntEnum):
    """What became of one item that was to be published (one byte each in the reply)."""

    PUBLISHED = 0
    PRESENT = 1  # another writer was first; the slot is freed
    DIFFERS = 2  # strict mode only: present with other bytes; the slot is freed
    GONE = 3  # not granted, given back or published before, or not this client's
    NO_INDEX = 4  # both buckets of the key are full; the slot is freed
    SKIPPED = 5  # `include` was 0; the item stays reserved


class TouchKind(IntEnum):
    """What a client did when it left a touch."""

    MATCH = 1
    ACQUIRE = 2
    ADOPT = 3
    FETCH = 4


class Reason(StrEnum):
    """Why families left (or, for LIMBO, why they finally could)."""

    SPACE = "space"  # slots of their size class were wanted
    WINDOW = "window"  # their frames were wanted by another size class
    ENTRIES = "entries"  # the index was full
    RECORDS = "records"  # the member table was full
    PARTIAL = "partial"  # never completed, and nobody was writing the rest
    CLEAR = "clear"
    WITHDRAW = "withdraw"
    LIMBO = "limbo"  # withdrawn before, and now no longer held


class PinKind(IntFlag):
    """How a family is pinned; the bits are the flags of its index entry."""

    NONE = 0
    SOFT = 1  # evicted after everything that is not pinned
    HARD = 2  # not evicted


class Touch(NamedTuple):
    """One record of a client's touch ring, fields in the order they have there (without the sequence)."""

    request: int  # hash of the request id, 0: not given
    started_ns: int
    deepest_entry: int  # NONE: nothing matched
    deepest_generation: int
    matched: int  # leading families found
    asked: int
    missed_key8: int  # first 8 bytes (little endian) of the first identity that missed, 0: none
    took_ns: int
    kind: int  # TouchKind
    bytes: int


# --- events ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SegmentReady:
    """[begin_bytes, end_bytes) of this segment is populated and may be used from now on.

    Both are multiples of `limits.frame_bytes`, except that `end_bytes` may be the end of the segment: what it
    has beyond its last whole frame is never used.
    """

    segment: int
    begin_bytes: int
    end_bytes: int


@dataclass(frozen=True, slots=True)
class ClientAttached:
    """A client got its region; `client` is its slot. Only writable ones may reserve."""

    client: int
    pid: int
    name: str
    writable: bool


@dataclass(frozen=True, slots=True)
class ClientGone:
    """This client can write nothing any more: all it had reserved comes back."""

    client: int


class Reserve(NamedTuple):
    """A client wants to write n families × m members."""

    client: int
    op: int
    request: int
    namespace: int
    keys: bytes  # n × 32 bytes
    parent_entry: (
        int  # fact: entry of the family before the first one, NONE if there is none or it is not there
    )
    members: tuple[Member, ...]
    split: int
    family_members: int  # members of a complete family
    skip_pending: bool
    entries: Buffer  # fact, u32 × n: the family's entry, NONE if it is not there
    present: bytes  # fact, u8 × n·m, family-major: this member is published
    parent_key8: int = (
        0  # first 8 bytes (little endian) of the parent's identity, 0: none; it may be on its way
    )


class Publish(NamedTuple):
    """Items [first, first + len(include)) of a reservation are filled; numbered family-major."""

    client: int
    op: int
    reservation: int
    first: int
    checksums: Buffer  # u64 × count
    include: bytes  # u8 × count


@dataclass(frozen=True, slots=True)
class Abort:
    """Items [first, first + count) of a reservation are given back; those published stay."""

    client: int
    op: int
    reservation: int
    first: int
    count: int


class Published(NamedTuple):
    """Answer to `DoPublish`: what the table did with each item of it, in order."""

    token: int
    statuses: bytes  # PublishStatus PUBLISHED, PRESENT or NO_INDEX
    entries: Buffer  # u32: the family's entry, new or found; NONE after NO_INDEX
    differs: bytes  # u8: PRESENT, and its checksum is another one
    entries_used: int  # the first so many of DoPublish.entries are in use now


class Evicted(NamedTuple):
    """Answer to `DoEvict`."""

    token: int
    freed: Buffer  # u32: entries that are empty now
    held: Buffer  # u32: entries a client holds: READY again, or in limbo if they were withdrawn
    records: Buffer  # u32: records of the freed entries, free now
    places: Buffer  # u64: their places, in the same order
    sizes: Buffer  # u64: their sizes in bytes, in the same order


@dataclass(frozen=True, slots=True)
class Touched:
    """What clients looked up since the last time. Recency only: it protects nothing."""

    client: int
    touches: list[Touch]


@dataclass(frozen=True, slots=True)
class Pin:
    """Pin these families and the prefixes that lead to them. All or nothing."""

    op: int
    entries: Buffer  # fact, u32
    kind: PinKind


@dataclass(frozen=True, slots=True)
class Unpin:
    """Remove pins that name these families, or a family behind them in the same run."""

    op: int
    entries: Buffer  # fact, u32


@dataclass(frozen=True, slots=True)
class Clear:
    """Evict everything of a namespace, or of all (None), that nobody leases, pins hard or writes behind."""

    op: int
    namespace: int | None


@dataclass(frozen=True, slots=True)
class Withdraw:
    """These families must not be found any more (damaged, revoked), nor what lies behind them.

    Those that are held leave the index at once and give their memory back when the last holder lets go.
    """

    op: int
    entries: Buffer  # fact, u32


@dataclass(frozen=True, slots=True)
class Again:
    """Answer to `DoAgain`: go on with a long operation."""

    token: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Once a second."""


@dataclass(frozen=True, slots=True)
class Restore:
    """What an earlier daemon left in the same memory, under the same numbers. The first event of a core, or none.

    Columns are as `kvd.shm._native.Adoption.adopt` gives them; those that name runs count from `RUNS_FROM`. Runs stand
    after their parents. Slabs are in no range that was announced as ready yet.
    """

    entries_end: int  # numbers from here on were never used
    records_end: int
    free_entries: Buffer  # u32: those below that are free
    free_records: Buffer  # u32
    run_of: Buffer  # by entry, u32, NONE: free, or in limbo
    home_of: Buffer  # by entry, u32: position in `slabs`
    bytes_of: Buffer  # by entry, u64
    key8_of: Buffer  # by entry, u64
    missing_of: Buffer  # by entry, u8
    run_sizes: Buffer  # by run, u32: families
    run_parents: Buffer  # by run, u32
    run_namespaces: Buffer  # by run, u16
    run_bytes: Buffer  # by run, u64
    run_shapes: Buffer  # by run, u32: position in `shapes`
    run_pins: Buffer  # by run, u8: PinKind
    members: Buffer  # u32: the entries of all runs, one run after the other
    shapes: list[tuple[int, ...]]  # sizes of the slots that a family has
    slabs: list[
        tuple[int, int, Buffer, Buffer, int, int]
    ]  # frame, slot bytes, owners, free places, fresh, reserved
    limbo: Buffer  # u32: withdrawn entries
    ghost_slots: Buffer  # u32 a record that an old client may still be filling: that client
    ghost_records: Buffer  # u32
    ghost_places: Buffer  # u64


Event: TypeAlias = (
    SegmentReady | ClientAttached | ClientGone | Reserve | Publish | Abort | Published | Evicted | Touched
    | Pin | Unpin | Clear | Withdraw | Again | Tick | Restore
)  # fmt: skip


# --- effects -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Gone:
    """All that this client had reserved has come back: its number may be another's. Follows each `ClientGone`."""

    client: int


class DoReserve(NamedTuple):
    """Mark these records PENDING for this client."""

    client: int
    reservation: int
    records: array[int]  # u32
    places: array[int]  # u64: segment << 48 | offset
    sizes: array[int]  # u64
    members: bytes  # u8
    ranges: array[int]  # u16 × 4 an item: heads begin, heads end, layers begin, layers end


class DoPublish(NamedTuple):
    """Publish these records under their keys; answer with `Published`."""

    token: int
    client: int
    keys: bytes  # 32 bytes an item
    members: bytes  # u8
    split: int
    family_members: int
    records: array[int]  # u32
    checksums: array[int]  # u64
    entries: array[int]  # u32: free ones it may use, from the first on
    namespace: int
    parents: array[int]  # u32 an item: entry that its family lies behind, NONE, PREVIOUS
    answer_op: int = (
        NO_OP  # not NO_OP: what the table says is the writer's answer, tell it before `Published`
    )


class DoEvict(NamedTuple):
    """Take these families out of the index unless they are held; answer with `Evicted`."""

    token: int
    entries: array[int]  # u32
    reason: Reason
    withdraw: bool  # held ones stay invisible (limbo) instead of coming back


@dataclass(frozen=True, slots=True)
class DoFreeRecords:
    """These PENDING records are free again."""

    records: array[int]  # u32


@dataclass(frozen=True, slots=True)
class DoFlags:
    """Set the flags byte of these entries."""

    entries: array[int]  # u32
    flags: int  # PinKind


@dataclass(frozen=True, slots=True)
class DoParents:
    """These families lie behind those, which came after them. For a daemon that starts over this memory."""

    entries: array[int]  # u32
    parents: array[int]  # u32


@dataclass(frozen=True, slots=True)
class DoAgain:
    """Step the core with `Again(token)` after clients have had a turn."""

    token: int


class ReservedReply(NamedTuple):
    """Answer to `Reserve`. `reservation` is 0 when nothing was granted."""

    client: int
    op: int
    reservation: int
    places: array[int]  # u64 × n·m, NO_PLACE where not granted
    statuses: bytes  # ReserveStatus × n·m


class PublishedReply(NamedTuple):
    """Answer to `Publish`."""

    client: int
    op: int
    statuses: bytes  # PublishStatus × count


@dataclass(frozen=True, slots=True)
class AbortedReply:
    """Answer to `Abort`: how many items were given back."""

    client: int
    op: int
    count: int


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """The operation did nothing, for this reason. `client` is ADMIN for administration."""

    client: int
    op: int
    error: KvdError


@dataclass(frozen=True, slots=True)
class AdminReply:
    """Answer to `Pin`, `Unpin`, `Clear` or `Withdraw`: JSON-able values."""

    op: int
    result: dict[str, object]


@dataclass(frozen=True, slots=True)
class Note:
    """Something an operator should see."""

    level: str  # "info", "warning"
    event: str
    fields: dict[str, object]


Reply: TypeAlias = ReservedReply | PublishedReply | AbortedReply | ErrorReply | AdminReply
Effect: TypeAlias = (
    DoReserve | DoPublish | DoEvict | DoFreeRecords | DoFlags | DoParents | DoAgain | Gone | Reply | Note
)  # fmt: skip
