"""Payloads of the ring messages, packed and parsed in one place for both ends.

Owns: the byte layouts of docs/design/shm.md, "Rings and waking". Used by clientlib (packs SQ, parses CQ) and
by the server (parses SQ, packs CQ). Pure functions; no state. Parsers trust nothing: a payload whose length or
numbers cannot be right raises ProtocolError, and the connection it came on ends.
"""

from __future__ import annotations

import struct
import sys
from array import array
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

import msgpack

from kvd import errors, limits
from kvd.errors import KvdError, ProtocolError
from kvd.types import Member

if sys.byteorder != "little":
    raise ImportError("kvd's shared memory is little endian")

NO_PLACE = 0xFFFF_FFFF_FFFF_FFFF
NO_ENTRY = 0xFFFF_FFFF
NO_PARENT = bytes(limits.identity_bytes)


class Sq(IntEnum):
    """Messages from a client to the daemon."""

    RESERVE = 1
    PUBLISH = 2
    ABORT = 3
    PING = 4


class Cq(IntEnum):
    """Answers of the daemon."""

    RESERVED = 1
    PUBLISHED = 2
    ABORTED = 3
    PONG = 4
    ERROR = 15


class Granted(IntEnum):
    """What a reservation says of one item."""

    GRANTED = 0
    PRESENT = 1
    PENDING = 2


class Published(IntEnum):
    """What became of one item that was to be published."""

    PUBLISHED = 0
    PRESENT = 1
    DIFFERS = 2
    GONE = 3
    NO_INDEX = 4
    SKIPPED = 5


SKIP_PENDING = 1

_RESERVE = struct.Struct("<QIHHHBBI32s")
_MEMBER = struct.Struct("<QHHHHH6x")
_PUBLISH = struct.Struct("<QII")
_RESERVED = struct.Struct("<QII")
_COUNT = struct.Struct("<II")
assert _RESERVE.size == 56
assert _MEMBER.size == 24


@dataclass(frozen=True, slots=True)
class Reserve:
    """RESERVE, parsed: n families (`keys` is n × 32 bytes) × m members.

    `family_members` make a family complete: those numbered below it. Members with a higher number are optional.
    """

    request: int
    namespace: int
    split: int
    family_members: int
    skip_pending: bool
    parent: bytes
    members: tuple[Member, ...]
    keys: bytes

    @property
    def families_count(self) -> int:
        return len(self.keys) // limits.identity_bytes


@dataclass(frozen=True, slots=True)
class Publish:
    """PUBLISH, parsed: items from `first` on of a reservation; a u64 checksum and a 0/1 flag an item."""

    reservation: int
    first: int
    checksums: array[int]
    include: bytes


@dataclass(frozen=True, slots=True)
class Abort:
    """ABORT, parsed: items [first, first + count) of a reservation are given back."""

    reservation: int
    first: int
    count: int


def pack_reserve(message: Reserve) -> bytes:
    """RESERVE payload. Sizes and ranges were checked by `Member`; counts fit by `limits.batch_items_max`."""
    head = _RESERVE.pack(
        message.request, message.namespace, message.families_count, len(message.members), message.split,
        message.family_members, SKIP_PENDING if message.skip_pending else 0, 0, message.parent,
    )  # fmt: skip
    rows = b"".join(_MEMBER.pack(m.size_bytes, m.index, *m.heads, *m.layers) for m in message.members)
    return head + rows + message.keys


def parse_reserve(payload: bytes) -> Reserve:
    """Parse RESERVE. Raises ProtocolError when lengths or counts cannot be right."""
    if len(payload) < _RESERVE.size:
        raise _malformed("RESERVE", "shorter than its head", len(payload))
    request, namespace, families, members, split, complete, flags, reserved, parent = _RESERVE.unpack_from(
        payload
    )
    keys_at = _RESERVE.size + members * _MEMBER.size
    if len(payload) != keys_at + families * limits.identity_bytes:
        raise _malformed("RESERVE", "length does not match its counts", len(payload))
    if not 0 < families * members <= limits.batch_items_max:
        raise _malformed("RESERVE", f"{families} families × {members} members", len(payload))
    if reserved or flags & ~SKIP_PENDING or not 0 < complete <= limits.members_per_family_max:
        raise _malformed("RESERVE", "reserved bits or member count", len(payload))
    parsed = _members(payload[_RESERVE.size : keys_at], complete, len(payload))
    return Reserve(
        request, namespace, split, complete, bool(flags & SKIP_PENDING), parent, parsed, payload[keys_at:]
    )


@lru_cache(maxsize=1024)
def _members(rows: bytes, complete: int, size: int) -> tuple[Member, ...]:
    """The members part of RESERVE. A writer sends the same one with every chunk, so it is checked once."""
    try:
        parsed = tuple(
            Member(index, size_bytes, (h0, h1), (l0, l1))
            for size_bytes, index, h0, h1, l0, l1 in _MEMBER.iter_unpack(rows)
        )
    except KvdError as error:
        raise _malformed("RESERVE", error.message, size) from None
    if len({m.index for m in parsed}) != len(parsed):  # an index of `complete` or more is an optional member
        raise _malformed("RESERVE", "members repeat", size)
    return parsed


def pack_publish(reservation: int, first: int, checksums: array[int], include: bytes) -> bytes:
    """PUBLISH payload; `checksums` is an array of typecode Q, `include` one byte an item."""
    return _PUBLISH.pack(reservation, first, len(include)) + checksums.tobytes() + include


def parse_publish(payload: bytes) -> Publish:
    """Parse PUBLISH. Raises ProtocolError when lengths or flags cannot be right."""
    if len(payload) < _PUBLISH.size:
        raise _malformed("PUBLISH", "shorter than its head", len(payload))
    reservation, first, count = _PUBLISH.unpack_from(payload)
    if not 0 < count <= limits.batch_items_max or len(payload) != _PUBLISH.size + 9 * count:
        raise _malformed("PUBLISH", "length does not match its count", len(payload))
    include_at = _PUBLISH.size + 8 * count
    include = payload[include_at:]
    if include.strip(b"\0\1"):
        raise _malformed("PUBLISH", "include flags are 0 or 1", len(payload))
    return Publish(reservation, first, array("Q", payload[_PUBLISH.size : include_at]), include)


def pack_abort(reservation: int, first: int, count: int) -> bytes:
    """ABORT payload."""
    return _PUBLISH.pack(reservation, first, count)


def parse_abort(payload: bytes) -> Abort:
    """Parse ABORT."""
    if len(payload) != _PUBLISH.size:
        raise _malformed("ABORT", "wrong length", len(payload))
    return Abort(*_PUBLISH.unpack(payload))


def pack_reserved(reservation: int, places: array[int], statuses: bytes) -> bytes:
    """RESERVED payload; `places` is an array of typecode Q, NO_PLACE where nothing was granted."""
    return _RESERVED.pack(reservation, len(statuses), 0) + places.tobytes() + statuses


def parse_reserved(payload: bytes) -> tuple[int, array[int], bytes]:
    """(reservation, places, statuses) of RESERVED."""
    if len(payload) < _RESERVED.size:
        raise _malformed("RESERVED", "shorter than its head", len(payload))
    reservation, count, _ = _RESERVED.unpack_from(payload)
    if len(payload) != _RESERVED.size + 9 * count:
        raise _malformed("RESERVED", "length does not match its count", len(payload))
    statuses_at = _RESERVED.size + 8 * count
    return reservation, array("Q", payload[_RESERVED.size : statuses_at]), payload[statuses_at:]


def pack_published(statuses: bytes) -> bytes:
    """PUBLISHED payload."""
    return _COUNT.pack(len(statuses), 0) + statuses


def parse_published(payload: bytes) -> bytes:
    """Statuses of PUBLISHED, one byte (`Published`) an item."""
    if len(payload) < _COUNT.size:
        raise _malformed("PUBLISHED", "shorter than its head", len(payload))
    count, _ = _COUNT.unpack_from(payload)
    if len(payload) != _COUNT.size + count:
        raise _malformed("PUBLISHED", "length does not match its count", len(payload))
    return payload[_COUNT.size :]


def pack_aborted(count: int) -> bytes:
    """ABORTED payload."""
    return _COUNT.pack(count, 0)


def pack_error(error: KvdError) -> bytes:
    """ERROR payload."""
    return bytes(msgpack.packb(errors.to_dict(error)))


def parse_error(payload: bytes) -> KvdError:
    """The error that an ERROR payload carries. Raises ProtocolError(ring) if it carries none."""
    try:
        found = msgpack.unpackb(payload)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise _malformed("ERROR", str(error) or type(error).__name__, len(payload)) from None
    if not isinstance(found, dict):
        raise _malformed("ERROR", f"it is a {type(found).__name__}", len(payload))
    return errors.from_dict(found)


def _malformed(kind: str, what: str, size: int) -> ProtocolError:
    return ProtocolError(f"malformed {kind} of {size} bytes: {what}", code="ring", kind=kind, size_bytes=size)
