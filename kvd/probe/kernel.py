"""What this kernel can do for kvd, found out by trying it on nothing: process descriptors, sealed memory, population.

Called by doctor. Every trial uses a descriptor or a page of its own; nothing outside this process changes.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import platform
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvd.probe import files

_SO_PEERPIDFD: Final = 77
_F_SEAL_FUTURE_WRITE: Final = 0x0010
_MADV_POPULATE_WRITE: Final = 23


@dataclass(frozen=True, slots=True)
class KernelFacts:
    """Release and features. False: this kernel, or a filter around this process, does not let us."""

    release: str
    machine: str
    pidfd: bool  # pidfd_open: death of a client is known for certain
    peer_pidfd: bool  # SO_PEERPIDFD: no race between connecting and dying, works across pid namespaces
    memfd_seals: bool  # sizes of shared files are fixed, META cannot be mapped writable
    populate: bool  # MADV_POPULATE_WRITE: fast population, out of memory is an error and no signal
    pid_visible: bool  # /proc shows this process


def facts(root: Path = Path("/")) -> KernelFacts:
    """Try everything now."""
    return KernelFacts(
        platform.release(), platform.machine(), _pidfd(), _peer_pidfd(), _memfd_seals(), _populate(),
        files.text(root / "proc/self/stat") is not None,
    )  # fmt: skip


def _pidfd() -> bool:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (OSError, AttributeError):
        return False
    return True


def _peer_pidfd() -> bool:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours, theirs:
        try:
            os.close(ours.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD))
        except OSError:
            return False
    return True


def _memfd_seals() -> bool:
    try:
        fd = os.memfd_create("kvd-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except (OSError, AttributeError):
        return False
    try:
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def _populate() -> bool:
    with contextlib.closing(mmap.mmap(-1, mmap.PAGESIZE)) as page:
        try:
            page.madvise(_MADV_POPULATE_WRITE)
        except OSError:
            return False
    return True


def overcommit_mode(root: Path = Path("/")) -> int | None:
    """vm.overcommit_memory: 2 counts every page of a pool against a fixed limit. None if unknown."""
    return files.number(root / "proc/sys/vm/overcommit_memory")


def swap_bytes(root: Path = Path("/")) -> int:
    """Swap space there is; without any, nothing can be swapped out, locked or not."""
    for line in (files.text(root / "proc/meminfo") or "").splitlines():
        words = line.split()
        if words and words[0] == "SwapTotal:":
            return int(words[1]) * 1024
    return 0
