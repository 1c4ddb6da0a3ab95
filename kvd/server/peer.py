"""Who is at the other end of a unix socket, as the kernel says.

Owns the pidfd of a peer until `close`. Identity never comes from what the peer sends. The pidfd is that of the very
process that connected (SO_PEERPIDFD); kernels without it get pidfd_open, and a process so young that it may have
got the number of a peer that died meanwhile is asked to connect again.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvd.errors import Retry, UsageError

_SO_PEERPIDFD: Final = 77
_SO_PEERGROUPS: Final = 59
_GROUPS_MAX: Final = 1024
_YOUNG_TICKS: Final = 2
_UCRED: Final = struct.Struct("3i")


@dataclass(eq=False, slots=True)
class Peer:
    """Process, user and groups of a peer; one for each connection.

    `pid` is 0 if it lives in a pid namespace that this one cannot see.
    """

    pid: int
    uid: int
    gid: int
    groups: tuple[int, ...]
    pidfd: int | None
    start_ticks: int

    def exited(self) -> bool:
        """Whether its process is gone (without waiting)."""
        if self.pidfd is None:
            return True
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Close the pidfd."""
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None


def identify(sock: socket.socket) -> Peer:
    """The peer of a connected unix socket. Raises UsageError(gone) if its process cannot be had any more."""
    pid, uid, gid = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    pidfd = _pidfd(sock, pid)
    return Peer(pid, uid, gid, _groups(sock), pidfd, start_ticks(pid) if pid else 0)


def _pidfd(sock: socket.socket, pid: int) -> int:
    try:
        pidfd = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
        os.set_inheritable(pidfd, False)
        return pidfd
    except OSError as error:
        if error.errno not in (errno.ENOPROTOOPT, errno.EINVAL):
            raise UsageError("the process that connected is gone already", code="gone", pid=pid) from None
    if pid == 0:
        raise UsageError(
            "the client lives in a pid namespace that the daemon cannot see, and this kernel has no SO_PEERPIDFD "
            "(Linux 6.5); share the pid namespace (hostPID) or use a newer kernel",
            code="pid-namespace",
        )
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        raise UsageError("the process that connected is gone already", code="gone", pid=pid) from None
    if start_ticks(pid) + _YOUNG_TICKS > _uptime_ticks():
        os.close(pidfd)
        raise UsageError(
            "the process that connected started this very moment and cannot be told from one that reuses the number "
            "of another; connect again",
            code="young", retry=Retry.NOW, pid=pid,
        )  # fmt: skip
    return pidfd


def _groups(sock: socket.socket) -> tuple[int, ...]:
    try:
        raw = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 4 * _GROUPS_MAX)
    except OSError:
        return ()
    return struct.unpack(f"{len(raw) // 4}I", raw)


def start_ticks(pid: int | str) -> int:
    """When a process started, in clock ticks since boot (field 22 of its stat); 0 if it cannot be seen."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[19])


def _uptime_ticks() -> int:
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))


def boot_id() -> bytes:
    """16 bytes that name this boot of the machine."""
    try:
        return bytes.fromhex(Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", ""))
    except (OSError, ValueError):
        return bytes(16)
