"""What META does not say and a later daemon must know: namespaces by their numbers, layout version, boot.

Owns one memory file of records that are only ever appended: `u32 payload_bytes, u32 crc32, payload (msgpack)`. The
first is the header; each other one adds a namespace or says that one is forgotten. A daemon that died while it appended
leaves a last record that does not check out and is ignored; no number of it was told to anybody. The form of the header
never changes, so that any version can say what it found. A file that is mostly about what is forgotten is followed by
another one (`renew_some`), which is written in steps while this one goes on: until the last step both say the same.
Invariant: of two files that somebody may still keep, one at most can be read and is written to no more (`retire`).

Event-loop thread only. Never handed to clients.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import msgpack

from kvd import limits
from kvd.errors import CapacityError, CompatibilityError
from kvd.shm import segments

MAGIC: Final = b"KVDNAMES"
_HEAD: Final = struct.Struct("<II")
_RECORD_BYTES_MAX: Final = 256 * limits.KIB
FORGOTTEN_BYTES_MIN: Final = 4 * limits.MIB  # less is not worth another file
RENEWED_BYTES_STEP: Final = 256 * limits.KIB  # copied at once: some hundred microseconds


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
        self._places: dict[int, tuple[int, int]] = {}  # by number: where its record is, and how long
        self._live_bytes = 0
        self._following: Names | None = None  # what is being written
        self._to_copy: list[int] = []
        self._renew_from_bytes = FORGOTTEN_BYTES_MIN
        os.pwrite(self.fd, MAGIC, 0)
        self._append({"layout": layout, "epoch": epoch, "boot": boot_id, "version": version})

    def add_namespace(self, number: int, manifest: bytes, label: str) -> None:
        """Before its number is told to anybody. Raises CapacityError."""
        record = _packed({"n": number, "m": manifest, "l": label})
        self._add(number, record)
        if self._following is not None:
            self._also(lambda following: following._add(number, record))

    def forget_namespace(self, number: int) -> None:
        """Before its number is given to another one. Raises CapacityError."""
        self._append({"x": number})
        self._live_bytes -= self._places.pop(number, (0, 0))[1]
        if self._following is not None and number in self._following._places:
            self._also(lambda following: following.forget_namespace(number))

    def renew_some(self) -> Names | None:
        """Write some of another file that says the same in fewer bytes, if that is worth while; the file when it is
        whole. This one stays as it is: whoever goes on with the other one retires it. Raises CapacityError, after
        which nothing of the other one is left, and it is not tried again before more is forgotten.
        """
        if self._following is None:
            if self._end <= max(self._renew_from_bytes, 2 * self._live_bytes):
                return None
            try:
                self._following = Names(*self._header)
            except (OSError, CapacityError) as error:
                self.put_off()
                raise CapacityError(f"no memory for another list of names: {error}", code="memory") from error
            self._to_copy = list(self._places)
        try:
            self._copy_some(self._following)
        except CapacityError:
            self.put_off()
            raise
        if self._to_copy:
            return None
        following, self._following = self._following, None
        return following

    def put_off(self) -> None:
        """Write no other file before more is forgotten."""
        self._renew_from_bytes = self._end + FORGOTTEN_BYTES_MIN
        if self._following is not None:
            self._following.retire()
            self._following = None

    def retire(self) -> None:
        """Write no more, and let nobody read what is here: it is said elsewhere, and goes on there."""
        os.ftruncate(self.fd, 0)
        os.close(self.fd)

    def _also(self, write: Callable[[Names], None]) -> None:
        assert self._following is not None
        try:
            write(self._following)
        except CapacityError:
            self.put_off()  # this file has it

    def _copy_some(self, following: Names) -> None:
        copied_bytes = 0
        while self._to_copy and copied_bytes < RENEWED_BYTES_STEP:
            number = self._to_copy[-1]
            if number in self._places and number not in following._places:
                at, size = self._places[number]
                following._add(number, os.pread(self.fd, size, at))
                copied_bytes += size
            self._to_copy.pop()

    def _add(self, number: int, record: bytes) -> None:
        at = self._end
        self._write(record)
        self._live_bytes += len(record) - self._places.get(number, (0, 0))[1]
        self._places[number] = (at, len(record))

    def _append(self, record: dict[str, Any]) -> None:
        self._write(_packed(record))

    def _write(self, data: bytes) -> None:
        try:
            written = os.pwrite(self.fd, data, self._end)
        except OSError as error:
            raise CapacityError(f"no memory for a name: {error.strerror}", code="memory") from error
        if written != len(data):
            raise CapacityError("no memory for a name", code="memory")
        self._end += len(data)


def _packed(record: dict[str, Any]) -> bytes:
    payload: bytes = msgpack.packb(record, use_bin_type=True)
    return _HEAD.pack(len(payload), zlib.crc32(payload)) + payload


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
