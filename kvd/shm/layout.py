"""Offsets and sizes of everything that lies in shared memory (docs/design/shm.md, draws the bytes).

Owns: the Python side's table of the layout. Called by: whatever reads a region from Python (state dumps, restart,
tests) and by the test that compares it with `kvd.shm._native.layout()`, which the compiler generates from offsetof.
Pure data; any process. Invariant: a changed structure changes `LAYOUT_VERSION` in the same commit.

Offsets and sizes are bytes; integers are little endian.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final

LAYOUT_VERSION: Final = 1
META_MAGIC: Final = b"KVDMETA1"
CLIENT_MAGIC: Final = b"KVDCLNT1"
HEADER_BYTES: Final = 4096
NONE32: Final = 0xFFFFFFFF  # no entry, no record
OWNER_NONE: Final = 0xFFFF  # a record that no client may publish
MEMBERS_MAX: Final = 128
BUCKET_SLOTS: Final = 8
COUNTERS_COUNT: Final = 32
FRAME_PAD: Final = 0xFFFF


class MetaState(IntEnum):
    """META header `state`."""

    STARTING = 0
    SERVING = 1
    DRAINING = 2
    CLOSED = 3


class EntryState(IntEnum):
    """Low byte of an entry's `sg`; the generation is above it."""

    EMPTY = 0
    WRITING = 1
    READY = 2
    EVICTING = 3


class RecordState(IntEnum):
    """Record `state`."""

    FREE = 0
    PENDING = 1
    PUBLISHED = 2


class ClientState(IntEnum):
    """`state` of a row of META's client table."""

    FREE = 0
    ATTACHED = 1
    DISCONNECTED = 2
    GHOST = 3  # attached to an earlier daemon; only what it holds counts


class TouchKind(IntEnum):
    """What a touch row tells of."""

    MATCH = 1
    ACQUIRE = 2
    ADOPT = 3
    FETCH = 4


class Counter(IntEnum):
    """Order of a client's counters; the rest of the 32 is reserved."""

    LOOKUPS = 0
    KEYS_ASKED = 1
    KEYS_HIT = 2
    LEASES = 3
    LEASES_RELEASED = 4
    BYTES_LEASED = 5
    FETCHES = 6
    ADOPTS = 7
    ADOPTS_FAILED = 8
    VERIFY_FAILED = 9
    BYTES_FILLED = 10


class Push(IntEnum):
    """Result of pushing a frame."""

    FULL = 0
    PUSHED = 1
    PUSHED_WAKE = 3  # the other side sleeps: send it a byte


class Wait(IntEnum):
    """Result of `Client.wait`."""

    GONE = -1
    DEADLINE = 0
    READY = 1
    INTERRUPTED = 2  # signal handlers have run
    STIRRED = 4


# request, started_ns, deepest_entry, deepest_generation, matched, asked, missed_key8, took_ns, kind, bytes, sequence
TOUCH: Final = struct.Struct("<QQIIIIQIIQQ")
FRAME: Final = struct.Struct("<IHHQ")  # payload_bytes, type, flags, op
DESCRIPTOR: Final = struct.Struct("<QIIQ")  # epoch, entry, 0, generation
PRESENT: Final = struct.Struct("<QQHBBI")  # present[2], split, members_count, ready, 0
SEGMENT: Final = struct.Struct("<QQIIQ")  # size_bytes, populated_bytes, page_kind, domain, inode
RECORD: Final = struct.Struct("<QQQIIHBBHHHHI")  # in the order of RECORD_FIELDS

SIZES: Final[dict[str, int]] = {
    "MetaHeader": HEADER_BYTES,
    "Segment": 32,
    "ClientSlot": 64,
    "Bucket": 64,
    "Entry": 64,
    "Record": 48,
    "Cold": 16,
    "ClientHeader": HEADER_BYTES,
    "Touch": 64,
    "TouchRow": 64,
    "Frame": 16,
    "Descriptor": 24,
    "PresentRow": 24,
}

OFFSETS: Final[dict[str, dict[str, int]]] = {
    "MetaHeader": {
        "magic": 0,
        "version": 8,
        "header_size": 12,
        "boot_id": 16,
        "epoch": 32,
        "daemon_pid": 40,
        "daemon_start_ticks": 48,
        "families_max": 56,
        "buckets_count": 60,
        "records_max": 64,
        "segments_count": 68,
        "clients_max": 72,
        "segments_offset": 80,
        "clients_offset": 88,
        "buckets_offset": 96,
        "entries_offset": 104,
        "records_offset": 112,
        "meta_bytes": 120,
        "bucket_seed": 128,
        "cold_offset": 136,
        "state": 192,
    },
    "Segment": {"size_bytes": 0, "populated_bytes": 8, "page_kind": 16, "domain": 20, "inode": 24},
    "ClientSlot": {
        "state": 0,
        "pid": 4,
        "start_ticks": 8,
        "client_id": 16,
        "attached_ns": 24,
        "epoch": 32,
        "region_slot": 40,
        "sq_bytes": 44,
        "cq_bytes": 48,
        "touch_records": 52,
        "hazards_max": 56,
    },
    "Bucket": {"slots": 0},
    "Entry": {
        "sg": 0,
        "identity": 8,
        "present": 40,
        "record_first": 56,
        "split": 60,
        "members_count": 62,
        "flags": 63,
    },
    "Record": {
        "place": 0,
        "size_bytes": 8,
        "checksum": 16,
        "next": 24,
        "entry": 28,
        "owner": 32,
        "member": 34,
        "state": 35,
        "heads_begin": 36,
        "heads_end": 38,
        "layers_begin": 40,
        "layers_end": 42,
        "reservation": 44,
    },
    "Cold": {"parent_entry": 0, "parent_generation": 4, "namespace_number": 8},
    "ClientHeader": {
        "magic": 0,
        "version": 8,
        "header_size": 12,
        "epoch": 16,
        "client_slot": 24,
        "revoked": 28,
        "sq_offset": 32,
        "cq_offset": 40,
        "sq_bytes": 48,
        "cq_bytes": 52,
        "touch_offset": 56,
        "touch_records": 64,
        "hazards_offset": 72,
        "hazards_max": 80,
        "hazards_high": 128,
        "sq_tail": 192,
        "sq_head": 256,
        "cq_tail": 320,
        "cq_head": 384,
        "daemon_sleeping": 448,
        "client_sleeping": 512,
        "touch_tail": 576,
        "counters": 640,
    },
    "Touch": {
        "request": 0,
        "started_ns": 8,
        "deepest_entry": 16,
        "deepest_generation": 20,
        "matched": 24,
        "asked": 28,
        "missed_key8": 32,
        "took_ns": 40,
        "kind": 44,
        "bytes": 48,
        "sequence": 56,
    },
    "Frame": {"payload_bytes": 0, "type": 4, "flags": 6, "op": 8},
    "Descriptor": {"epoch": 0, "entry": 8, "generation": 16},
    "PresentRow": {"present": 0, "split": 16, "members_count": 18, "ready": 19},
}

RECORD_FIELDS: Final = tuple(OFFSETS["Record"])


def table() -> dict[str, int]:
    """This module's layout in the form of `kvd.shm._native.layout()`: names to offsets, sizes and constants."""
    out = {f"{name}.{field}": at for name, fields in OFFSETS.items() for field, at in fields.items()}
    out.update(SIZES)
    out.update(
        layout_version=LAYOUT_VERSION,
        meta_magic=int.from_bytes(META_MAGIC, "little"),
        client_magic=int.from_bytes(CLIENT_MAGIC, "little"),
        members_max=MEMBERS_MAX,
        bucket_slots=BUCKET_SLOTS,
        counters_count=COUNTERS_COUNT,
        frame_pad=FRAME_PAD,
    )
    return out
