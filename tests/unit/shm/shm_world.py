"""A domain in miniature: META, one pool segment and client regions, all in this process, without a daemon."""

from __future__ import annotations

import os
from array import array
from dataclasses import dataclass, field

from kvd.shm import _native

EPOCH = 0xE90C
OBJECT_BYTES = 128
SEED = 20240613


def u8(*values: int) -> bytes:
    return bytes(values)


def u32(*values: int) -> bytes:
    return array("I", values).tobytes()


def u64(*values: int) -> bytes:
    return array("Q", values).tobytes()


def numbers(column: bytes) -> list[int]:
    """The u32 numbers of a column."""
    return list(memoryview(column).cast("I"))


@dataclass
class World:
    """A table of `families` families and as many objects of OBJECT_BYTES, each filled with its number."""

    families: int = 64
    clients: int = 4
    hazards: int = 256
    fds: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pool_bytes = max(4096, self.families * OBJECT_BYTES)
        self.meta, self.segment = self.memfd("meta"), self.memfd("segment")
        os.ftruncate(self.segment, self.pool_bytes)
        self.table = _native.Table(
            self.meta, families_max=self.families, records_max=self.families, segment_bytes=[self.pool_bytes],
            clients_max=self.clients, epoch=EPOCH, boot_id=bytes(16), bucket_seed=0x5EED, pid=os.getpid(),
            start_ticks=1,
        )  # fmt: skip
        self.table.map_segment(0, self.segment)
        self.table.set_segment(0, self.pool_bytes, 0, os.fstat(self.segment).st_ino)
        self.table.set_state(1)

    def memfd(self, name: str) -> int:
        self.fds.append(os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        return self.fds[-1]

    def region(self, slot: int = 0) -> tuple[_native.Region, int]:
        fd = self.memfd(f"client{slot}")
        region = _native.Region(
            fd,
            slot=slot,
            epoch=EPOCH,
            sq_bytes=4096,
            cq_bytes=4096,
            touch_records=16,
            hazards_max=self.hazards,
        )
        self.table.attach(slot, region, os.getpid(), 1, 100 + slot, 5)
        return region, fd

    def client(self, slot: int = 0, *, writable: bool = False) -> tuple[_native.Region, _native.Client]:
        region, fd = self.region(slot)
        return region, _native.Client(self.meta, fd, [self.segment], writable)

    def reserve(self, records: list[int], members: bytes | None = None, owner: int = 0) -> None:
        count = len(records)
        for record in records:
            self.table.memory(0, record * OBJECT_BYTES, OBJECT_BYTES)[:] = (
                bytes([record % 256]) * OBJECT_BYTES
            )
        self.table.reserve(
            owner, 1, u32(*records), u64(*(r * OBJECT_BYTES for r in records)), u64(*[OBJECT_BYTES] * count),
            bytes(count) if members is None else members, array("H", [0, 8, 4, 36] * count).tobytes(),
        )  # fmt: skip

    def put(self, keys: bytes, first: int = 0) -> None:
        """Publish complete families of one member; key i gets record and entry `first` + i."""
        own = list(range(first, first + len(keys) // 32))
        self.reserve(own)
        checksums = u64(*(1000 + number for number in own))
        status, entries, _, used = self.table.publish(
            0, keys, bytes(len(own)), 3, 1, u32(*own), checksums, u32(*own)
        )
        assert (status, numbers(entries), used) == (bytes(len(own)), own, len(own))

    def evict(self, *entries: int, withdraw: bool = False) -> tuple[list[int], list[int]]:
        out = self.table.evict(u32(*entries), withdraw)
        return numbers(out.freed), numbers(out.held)

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)
