"""Segments of the pool: files, huge-page advice, population, locking, placement.

Owns the mapping through which pages are first touched. The server creates segments in its thread; `populate` runs
in worker threads (the kernel is entered without the GIL) and may be called for different ranges of one segment at
once. Invariants: a range that `populate` returned for is backed by memory; a range that cannot be backed raises
CapacityError, and does not kill the process with SIGBUS.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from kvd import limits
from kvd.config import format_size
from kvd.errors import CapacityError, UnavailableError
from kvd.shm import segments

POPULATE_STEP_BYTES: Final = 64 * limits.MIB

_PROT_READ_WRITE: Final = 3
_PROT_NONE: Final = 0
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS, _MAP_NORESERVE = 0x01, 0x02, 0x10, 0x20, 0x4000
_MADV_DONTFORK, _MADV_HUGEPAGE, _MADV_NOHUGEPAGE, _MADV_POPULATE_WRITE = 10, 14, 15, 23
_MLOCK_ONFAULT: Final = 1
_MPOL_DEFAULT, _MPOL_PREFERRED = 0, 1
_SYS_SET_MEMPOLICY: Final = {"x86_64": 238, "aarch64": 237}

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MAP_FAILED: Final = ctypes.c_void_p(-1).value


class PageKind(IntEnum):
    """What a segment's memory consists of (META says so to clients)."""

    SMALL = 0
    THP = 1
    HUGETLB = 2


class Mapping:
    """A writable mapping of a whole file, aligned to 2 MiB so that huge pages can be mapped as such."""

    __slots__ = ("_address", "_reserved", "size_bytes")

    def __init__(self, fd: int, size_bytes: int, *, huge: bool) -> None:
        self.size_bytes = size_bytes
        span = size_bytes + limits.frame_bytes
        start = _map(None, span, _PROT_NONE, _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE, -1)
        aligned = -(-start // limits.frame_bytes) * limits.frame_bytes
        self._reserved = (start, span)
        try:
            self._address = _map(aligned, size_bytes, _PROT_READ_WRITE, _MAP_SHARED | _MAP_FIXED, fd)
        except UnavailableError:
            _libc.munmap(start, span)
            raise
        _libc.madvise(aligned, size_bytes, _MADV_DONTFORK)
        _libc.madvise(aligned, size_bytes, _MADV_HUGEPAGE if huge else _MADV_NOHUGEPAGE)

    def populate(self, begin_bytes: int, end_bytes: int) -> None:
        """Back [begin, end) with memory. Raises CapacityError when there is none."""
        while _libc.madvise(self._address + begin_bytes, end_bytes - begin_bytes, _MADV_POPULATE_WRITE) != 0:
            number = ctypes.get_errno()
            if number == errno.EINTR:
                continue
            if number == errno.EINVAL:  # kernels before 5.14
                _touch(self._address, begin_bytes, end_bytes)
                return
            raise CapacityError(
                f"no memory for {format_size(end_bytes - begin_bytes)} of the pool: {os.strerror(number)}; make "
                "pool.size smaller, or reserve enough huge pages (vm.nr_hugepages) for pool.huge_pages = \"hugetlb\"",
                code="populate", size_bytes=end_bytes - begin_bytes,
            )  # fmt: skip

    def lock(self) -> str:
        """Keep populated pages from being swapped. Empty if that is so now, else why not."""
        if (
            _libc.mlock2(ctypes.c_void_p(self._address), ctypes.c_size_t(self.size_bytes), _MLOCK_ONFAULT)
            == 0
        ):
            return ""
        return os.strerror(ctypes.get_errno())

    def close(self) -> None:
        """Unmap (also ends a lock)."""
        start, span = self._reserved
        if span:
            _libc.munmap(start, span)
            self._reserved = (0, 0)


def _map(address: int | None, size_bytes: int, protection: int, flags: int, fd: int) -> int:
    mapped = _libc.mmap(address, size_bytes, protection, flags, fd, 0)
    if mapped is None or mapped == _MAP_FAILED:
        reason = os.strerror(ctypes.get_errno())
        raise UnavailableError(
            f"{format_size(size_bytes)} cannot be mapped: {reason}", code="memory", size_bytes=size_bytes
        )
    return int(mapped)


def _touch(address: int, begin_bytes: int, end_bytes: int) -> None:
    """Write one byte a page (a no-op on contents: nothing is published yet)."""
    for offset in range(begin_bytes, end_bytes, limits.page_bytes):
        ctypes.memset(address + offset, 0, 1)


def prefer_node(node: int | None) -> bool:
    """New pages of the calling thread come from this NUMA node if it has any (None: the default again)."""
    number = _SYS_SET_MEMPOLICY.get(platform.machine())
    if number is None:
        return False
    if node is None:
        return bool(_libc.syscall(number, _MPOL_DEFAULT, None, ctypes.c_ulong(0)) == 0)
    words = (ctypes.c_ulong * (node // 64 + 1))()
    words[node // 64] = 1 << node % 64
    return bool(_libc.syscall(number, _MPOL_PREFERRED, words, ctypes.c_ulong(64 * len(words) + 1)) == 0)


@dataclass(slots=True)
class Segment:
    """One segment of the pool and its descriptors, open as long as the daemon lives."""

    number: int
    size_bytes: int
    fd: int
    read_only_fd: int
    sealed: bool
    name: str  # of named memory, empty for a memfd
    hugetlb: bool

    @property
    def inode(self) -> int:
        """Identifies the file across processes."""
        return os.fstat(self.fd).st_ino


def adopt_segment(number: int, fd: int, *, hugetlb: bool) -> Segment:
    """A segment of an earlier daemon, by its descriptor, which belongs to the segment from now on."""
    size_bytes = os.fstat(fd).st_size
    return Segment(number, size_bytes, fd, segments.reopen_read_only(fd), segments.is_sealed(fd), "", hugetlb)


def create_segment(number: int, size_bytes: int, *, hugetlb: bool, posix_name: str = "") -> Segment:
    """A new segment: a sealed memfd, or named memory under `posix_name`. Raises CapacityError, UnavailableError."""
    if posix_name:
        named = segments.create_named(posix_name, size_bytes)
        fd = named.fd
    else:
        fd = segments.create(f"kvd-pool-{number}", hugetlb=hugetlb)
        try:
            segments.size(fd, size_bytes, f"kvd-pool-{number}")
            segments.seal_size(fd)
        except (CapacityError, OSError):
            os.close(fd)
            raise
    return Segment(
        number,
        size_bytes,
        fd,
        segments.reopen_read_only(fd),
        not posix_name,
        posix_name,
        hugetlb and not posix_name,
    )
