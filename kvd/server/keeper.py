"""The keeper: a process that holds the daemon's descriptors and does nothing else, so that memory outlives the daemon.

Owns the descriptors that were stored, and its listening socket, which the daemon made and handed to it. A process of
its own, in a session of its own, one thread; it ends when it is told to, and never by itself. One connection at a time:
a second daemon waits until the first one is gone. Only its own user and root are listened to.

    b"store NAME" + descriptor    keep it under this name (an older one of that name is closed)
    b"remove NAME"                close it
    b"list"                       each as b"NAME" + descriptor, then b"." alone
    b"end"                        close all and end

It imports nothing of kvd but this file: what it holds must survive any upgrade of the rest.
"""

from __future__ import annotations

import array
import contextlib
import os
import resource
import signal
import socket
import stat
import struct
import sys
from typing import Final

NAME_CHARS_MAX: Final = 64
NAMES_MAX: Final = 8192
LISTED: Final = b"."
_MESSAGE_BYTES: Final = 256


class Keeper:
    """What is kept, and the messages about it."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._kept: dict[bytes, int] = {}

    def run(self) -> None:
        """Until somebody says end."""
        while True:
            connection, _ = self._listener.accept()
            with connection:
                if _trusted(connection) and self._serve(connection):
                    self._end()  # before the connection does: who said end finds nobody here afterwards
                    return

    def _end(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self._listener.getsockname())
        self._listener.close()
        for name in list(self._kept):
            self._close(name)

    def _serve(self, connection: socket.socket) -> bool:
        """One daemon, until it is gone. True: it said end."""
        while True:
            try:
                data, fds = receive(connection)
            except OSError:
                return False
            verb, _, name = data.partition(b" ")
            if verb == b"store" and len(fds) == 1 and self._may_keep(name, fds[0]):
                self._close(name)
                self._kept[name] = fds.pop()
            for fd in fds:
                os.close(fd)
            if not data:
                return False
            if verb == b"end":
                return True
            if verb == b"remove":
                self._close(name)
            elif verb == b"list":
                with contextlib.suppress(OSError):
                    for one, fd in self._kept.items():
                        send(connection, one, fd)
                    send(connection, LISTED)

    def _may_keep(self, name: bytes, fd: int) -> bool:
        short = 0 < len(name) <= NAME_CHARS_MAX and (name in self._kept or len(self._kept) < NAMES_MAX)
        return short and stat.S_ISREG(os.fstat(fd).st_mode)

    def _close(self, name: bytes) -> None:
        fd = self._kept.pop(name, None)
        if fd is not None:
            os.close(fd)


def _trusted(connection: socket.socket) -> bool:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    _, uid, _ = struct.unpack("3i", credentials)
    return uid in (0, os.getuid())


def receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    """One message and the descriptors that came with it; empty at the end. Raises OSError."""
    fd_bytes = array.array("i").itemsize
    data, ancillary, _, _ = connection.recvmsg(
        _MESSAGE_BYTES, socket.CMSG_SPACE(fd_bytes), socket.MSG_CMSG_CLOEXEC
    )
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fd_bytes])
    return data, list(fds)


def send(connection: socket.socket, data: bytes, fd: int | None = None) -> None:
    """One message, with a descriptor if there is one. Raises OSError."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))] if fd is not None else []
    connection.sendmsg([data], rights, socket.MSG_NOSIGNAL)


def main(listener_fd: int) -> None:
    """Keep for whoever connects to this listening socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with socket.socket(fileno=listener_fd) as listener:
        Keeper(listener).run()


if __name__ == "__main__":
    main(int(sys.argv[1]))
