"""Anonymous and named memory that is handed to other processes: creation, mode, seals, reopening read-only.

Owns how kvd's files come into being; what is in them belongs to `kvd.shm._native`. Called by the server, in one thread.
Invariants: mode 0600 from the start (a memfd is created 0777, and whoever is handed a read-only descriptor of it
could reopen it read-write); close-on-exec; a memfd allows seals, named memory cannot have any.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from dataclasses import dataclass
from typing import Final

import posix_ipc

from kvd.config import format_size
from kvd.errors import CapacityError, UnavailableError, UsageError

_MFD_NOEXEC_SEAL: Final = 0x0008
_MFD_HUGE_2MB: Final = 21 << 26
SEALS_FIXED_SIZE: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def create(name: str, *, hugetlb: bool = False) -> int:
    """A new empty memfd (mode 0600, close-on-exec, sealable). Raises UnavailableError naming what failed."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | (os.MFD_HUGETLB | _MFD_HUGE_2MB if hugetlb else 0)
    try:
        try:
            fd = os.memfd_create(name, flags | _MFD_NOEXEC_SEAL)
        except OSError as error:  # kernels before 6.3 do not know the flag
            if error.errno != errno.EINVAL:
                raise
            fd = os.memfd_create(name, flags)
        os.fchmod(fd, 0o600)
    except OSError as error:
        raise UnavailableError(
            f"memory file {name!r} cannot be created: {error.strerror}", code="memory", name=name
        ) from error
    return fd


def size(fd: int, size_bytes: int, name: str) -> None:
    """Give the file its size. Raises CapacityError when the kernel has no room for it."""
    try:
        os.ftruncate(fd, size_bytes)
    except OSError as error:
        raise CapacityError(
            f"memory file {name!r} cannot get {format_size(size_bytes)}: {error.strerror}",
            code="memory", name=name, size_bytes=size_bytes,
        ) from error  # fmt: skip


def seal_size(fd: int) -> None:
    """Nobody can shrink or grow the file any more: a peer that could would kill this process with SIGBUS."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS_FIXED_SIZE)


def is_sealed(fd: int) -> bool:
    """Whether the size of this file is fixed. Named memory cannot be sealed."""
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS_FIXED_SIZE == SEALS_FIXED_SIZE
    except OSError:
        return False


def reopen_read_only(fd: int) -> int:
    """A descriptor of the same file that cannot be mapped writable."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)


@dataclass(frozen=True, slots=True)
class Named:
    """Named POSIX memory, reachable by any process of this user until it is unlinked."""

    name: str
    fd: int


def create_named(name: str, size_bytes: int) -> Named:
    """New named memory of this size. Raises UsageError if the name exists, CapacityError without room."""
    try:
        memory = posix_ipc.SharedMemory(name, posix_ipc.O_CREX, mode=0o600, size=0)
    except posix_ipc.ExistentialError:
        raise UsageError(
            f"named memory {name} exists already; another daemon uses it, or it was left behind: remove /dev/shm{name}",
            code="named-memory", name=name,
        ) from None  # fmt: skip
    os.set_inheritable(memory.fd, False)
    try:
        size(memory.fd, size_bytes, name)
    except CapacityError:
        os.close(memory.fd)
        unlink_named(name)
        raise
    return Named(name, memory.fd)


def unlink_named(name: str) -> bool:
    """Remove a name; the memory goes with its last mapping. False: there was none."""
    with contextlib.suppress(posix_ipc.ExistentialError):
        posix_ipc.unlink_shared_memory(name)
        return True
    return False
