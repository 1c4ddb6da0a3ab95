"""What META does not say and a later daemon must know: namespaces by their numbers, layout version, boot.

Owns one memory file of records that are only ever appended: `u32 payload_bytes, u32 crc32, payload (msgpack)`. The
first is the header; each other one adds a namespace or says that one is forgotten. A daemon that died while it appended
leaves a last record that does not check out and is ignored; no number of it was told to anybody. The form of the header
never changes, so that any version can say what it found. A file that is mostly about what is forgotten is followed by
another one (`renewed`).

Event-loop thread only. Never handed to clients.
"""

from __future__ import annotations

import os
import struct
import zlib
from dataclasses import dataclass, field
from typing import Any, Final

import msgpack

from kvd import limits
from kvd.errors import CapacityError, CompatibilityError
from kvd.shm import segments

MAGIC: Final = b"KVDNAMES"
_HEAD: Final = struct.Struct("<II")
_RECORD_BYTES_MAX: Final = 4 * limits.manifest_bytes_max
FORGOTTEN_BYTES_MIN: Final = 4 * limits.MIB  # less is not worth another file


@dataclass(slots=True)
class Known:
    """What a file says."""

    layout: int
    epoch: int
    boot_id: bytes
    version: str
    namespaces: list[tuple[int, bytes, str]] = field(default_factory=list)  # number, manifest, label


class Names:
    """A file that is being written."""

    def __init__(self, layout: int, epoch: int, boot_id: bytes, version: str) -> None:
        self.fd = segments.create("kvd-names")
        self._header = (layout, epoch, boot_id, version)
        self._end = len(MAGIC)
        self._bytes_of: dict[int, int] = {}  # by number: what its record takes
        os.pwrite(self.fd, MAGIC, 0)
        self._append({"layout": layout, "epoch": epoch, "boot": boot_id, "version": version})

    def add_namespace(self, number: int, manifest: bytes, label: str) -> None:
        """Before its number is told to anybody. Raises CapacityError."""
        self._bytes_of[number] = self._append({"n": number, "m": manifest, "l": label})

    def forget_namespace(self, number: int) -> None:
        """Before its number is given to another one. Raises CapacityError."""
        self._append({"x": number})
        self._bytes_of.pop(number, None)

    @property
    def is_mostly_forgotten(self) -> bool:
        """Whether another file is worth while."""
        live_bytes = sum(self._bytes_of.values()) if self._end > FORGOTTEN_BYTES_MIN else 0
        return self._end > max(FORGOTTEN_BYTES_MIN, 2 * live_bytes)

    def renewed(self) -> Names:
        """Another file that says the same in fewer bytes; this one stays as it is. Raises CapacityError."""
        following = Names(*self._header)
        for number, manifest, label in read(self.fd).namespaces:
            following.add_namespace(number, manifest, label)
        return following

    def close(self) -> None:
        """Write no more. The file lives as long as somebody keeps it."""
        os.close(self.fd)

    def _append(self, record: dict[str, Any]) -> int:
        payload = msgpack.packb(record, use_bin_type=True)
        data = _HEAD.pack(len(payload), zlib.crc32(payload)) + payload
        try:
            written = os.pwrite(self.fd, data, self._end)
        except OSError as error:
            raise CapacityError(f"no memory for a name: {error.strerror}", code="memory") from error
        if written != len(data):
            raise CapacityError("no memory for a name", code="memory")
        self._end += len(data)
        return len(data)


def read(fd: int) -> Known:
    """What a file says, up to the first record that is torn. Raises CompatibilityError if it is not such a file."""
    size = os.fstat(fd).st_size
    data = os.pread(fd, size, 0)
    records = list(_records(data)) if data.startswith(MAGIC) else []
    try:
        header, *rest = records
        known = Known(
            int(header["layout"]), int(header["epoch"]), bytes(header["boot"]), str(header["version"])
        )
        found: dict[int, tuple[int, bytes, str]] = {}
        for record in rest:
            if "n" in record:
                found[int(record["n"])] = (int(record["n"]), bytes(record["m"]), str(record["l"]))
            elif "x" in record:
                found.pop(int(record["x"]), None)
        known.namespaces = [found[number] for number in sorted(found)]
    except (KeyError, TypeError, ValueError):
        raise CompatibilityError("the kept list of names cannot be read", code="names") from None
    return known


def _records(data: bytes) -> Any:
    at = len(MAGIC)
    while at + _HEAD.size <= len(data):
        size, crc = _HEAD.unpack_from(data, at)
        payload = data[at + _HEAD.size : at + _HEAD.size + size]
        if len(payload) != size or size > _RECORD_BYTES_MAX or zlib.crc32(payload) != crc:
            return
        yield msgpack.unpackb(payload, strict_map_key=False)
        at += _HEAD.size + size
