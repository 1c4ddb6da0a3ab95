"""The fuzz target `restart`: what a daemon left, damaged in any part, and the next daemon that starts over it.

All of `kvd.server.adoption` is run, with the memory of one small daemon as it is kept by somebody: META, the list of
names, the pool's segments, and the region of a client that lives (this process). Whatever the damage, the next daemon
starts: it has adopted, or dropped with a reason. Then its core and its table agree, and it can be written and cleared.
"""

from __future__ import annotations

import os
import struct
import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / "unit" / "server")]

from test_restoring import Kept, Writer, encoded, ready, start  # noqa: E402

from kvd.core import events as ev  # noqa: E402
from kvd.server.peer import start_ticks  # noqa: E402
from kvd.shm import _native  # noqa: E402
from kvd.shm.layout import OFFSETS, SIZES  # noqa: E402

EDIT = struct.Struct("<IBQ")  # as in targets.py
CLIENT_ID, CLIENT_SLOT = 100, 2
PARTS = ("kvd-meta-1", "kvd-names-1", f"kvd-client-{CLIENT_ID}")


@dataclass(slots=True)
class Left:
    """What the first daemon left: bytes of what is damaged, descriptors of what is not."""

    images: dict[str, bytes]
    pools: dict[str, int]
    keep_alive: list[Any] = field(default_factory=list)


@cache
def left() -> Left:
    """One daemon's memory, with a client of this process that holds leases and has slots to fill."""
    kept = Kept()
    first = start(kept, 1)
    for salt in (b"one", b"two"):
        first.domain.namespaces.register(encoded(salt), "")
    ready(first)
    writer = Writer(first, Random(3))
    for _ in range(40):
        writer.turn()
    fd = os.memfd_create("client", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    region = _native.Region(
        fd, slot=CLIENT_SLOT, epoch=1, sq_bytes=4096, cq_bytes=4096, touch_records=16, hazards_max=64
    )
    table, pid = first.domain.table, os.getpid()
    table.attach(CLIENT_SLOT, region, pid, start_ticks(pid), CLIENT_ID, 5)
    client = _native.Client(
        first.domain.meta_fd, fd, [segment.read_only_fd for segment in first.domain.segments], False
    )
    rows, _ = first.domain.core.families(None, 0, 4)
    leases = [client.fetch(bytes(table.entry(row.entry)["key"])) for row in rows]
    kept.store(PARTS[2], fd)
    images = {name: os.pread(kept.stored[name], os.fstat(kept.stored[name]).st_size, 0) for name in PARTS}
    pools = {name: fd for name, fd in kept.stored.items() if "-pool-" in name}
    return Left(images, pools, [first, region, client, leases, kept])


def damaged(image: bytes, edits: bytes) -> int:
    """A copy as a descriptor. An edit beyond the end cuts it there."""
    data = bytearray(image)
    for at in range(0, len(edits) - EDIT.size + 1, EDIT.size):
        offset, width, value = EDIT.unpack_from(edits, at)
        place = offset % (len(image) + 16)
        if place >= len(image):
            del data[value % len(image) :]
        elif place < len(data):
            data[place : place + width % 8 + 1] = value.to_bytes(8, "little")[: width % 8 + 1]
    fd = os.memfd_create("damaged", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(fd, data)
    return fd


def restart(data: bytes) -> None:
    """Two bytes say where the edits of META end and those of the names, the rest are the region's."""
    if len(data) < 2:
        return
    was, edits = left(), data[2:]
    cuts = sorted(cut * len(edits) // 255 // EDIT.size * EDIT.size for cut in data[:2])
    pieces = edits[: cuts[0]], edits[cuts[0] : cuts[1]], edits[cuts[1] :]
    kept = Kept()
    for name, piece in zip(PARTS, pieces, strict=True):
        kept.stored[name] = damaged(was.images[name], piece)
    for name, fd in was.pools.items():
        kept.stored[name] = os.dup(fd)
    kept.hand_over()
    following = start(kept, 2)
    try:
        _live_on(following)
    finally:
        following.domain.close()
        for ghost in following.ghosts:
            os.close(ghost.fd)
            if ghost.pidfd is not None:
                os.close(ghost.pidfd)
        for name in list(kept.stored):
            kept.remove(name)


def _live_on(following: Any) -> None:
    domain, outcome = following.domain, following.outcome
    assert outcome.adopted != bool(outcome.dropped_reason), "it says why"
    domain.core.validate()
    rows, _ = domain.core.families(None, 0, 10_000)
    scanned = memoryview(domain.table.scan(0, domain.sizes.families_max)).cast("I")
    assert sorted(row.entry for row in rows) == sorted(scanned)
    assert len(rows) == outcome.families
    for number in (b"one", b"two"):
        domain.namespaces.register(encoded(number), "")
    ready(following)
    later: list[int] = []
    domain.performers |= {
        ev.AdminReply: lambda effect: None,
        ev.DoAgain: lambda effect: later.append(effect.token),
    }
    writer = Writer(following, Random(4))
    for _ in range(6):
        writer.turn()
    domain.core.validate()
    domain.step(ev.Clear(9, None))
    while later:
        domain.step(ev.Again(later.pop()))
    domain.core.validate()


def seeds() -> list[bytes]:
    """Nothing; then what target `adopt` does not see: segments, clients, names, the region, and files cut short."""
    was = left()
    meta, names, region = (was.images[name] for name in PARTS)
    of_meta, of_names, of_region = b"\xff\xff", b"\x00\xff", b"\x00\x00"
    found = [b"\0\0"]
    for table, structure, row in (("segments", "Segment", 1), ("clients", "ClientSlot", CLIENT_SLOT)):
        (begin,) = struct.unpack_from("<Q", meta, OFFSETS["MetaHeader"][f"{table}_offset"])
        for at in OFFSETS[structure].values():
            for width, value in ((3, 0xFFFFFFFF), (0, 2)):
                found.append(of_meta + EDIT.pack(begin + row * SIZES[structure] + at, width, value))
    found += [of_names + EDIT.pack(at, 1, 0xFFFF) for at in range(0, len(names), 37)]
    for part, image in ((of_meta, meta), (of_names, names), (of_region, region)):
        found += [part + EDIT.pack(len(image) + 1, 0, value) for value in (0, 8, len(image) - 1)]
    client = OFFSETS["ClientHeader"]
    found += [
        of_region + EDIT.pack(client[name], 7, 1 << 33) for name in ("epoch", "revoked", "hazards_high")
    ]
    return found
