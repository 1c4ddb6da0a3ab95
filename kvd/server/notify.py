"""What systemd is told and what it hands over: readiness, status, watchdog, listening sockets.

Owns the notification socket and the watchdog thread. The thread is liveness's own path: it pets only while the
event loop proves by `beat` that it turns, so that a stuck loop is restarted and a busy worker is not. Without the
variables of a service manager every call does nothing.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Mapping
from typing import Final

from kvd.errors import UsageError

LISTEN_FDS_START: Final = 3
KEPT_PREFIX: Final = "kvd-"  # names of descriptors that an earlier daemon had stored
STORE_TIMEOUT_S: Final = 1


class Notifier:
    """Messages to the service manager (sd_notify)."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._sock: socket.socket | None = None
        path = env.get("NOTIFY_SOCKET", "")
        if path[:1] in ("/", "@"):
            self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._sock.setblocking(False)
            self._path = "\0" + path[1:] if path.startswith("@") else path

    @property
    def active(self) -> bool:
        """Whether a service manager listens."""
        return self._sock is not None

    def send(self, **fields: str) -> None:
        """One message; a manager that does not read loses it, the daemon never waits."""
        if self._sock is not None:
            body = "\n".join(f"{name}={value.replace(chr(10), ' ')}" for name, value in fields.items())
            with contextlib.suppress(OSError):
                self._sock.sendto(body.encode(), self._path)

    def hand_over(self, text: str, fds: list[int]) -> None:
        """A message with descriptors for the manager's store, waited for: it must not be lost. Raises OSError."""
        if self._sock is None:
            raise OSError("there is no service manager")
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", STORE_TIMEOUT_S, 0))
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            sock.sendmsg([text.encode()], rights, 0, self._path)

    def ready(self, status: str) -> None:
        """The daemon serves."""
        self.send(READY="1", MAINPID=str(os.getpid()), STATUS=status)

    def status(self, text: str) -> None:
        """One line for `systemctl status`."""
        self.send(STATUS=text)

    def stopping(self) -> None:
        """The daemon is on its way out."""
        self.send(STOPPING="1", STATUS="stopping")


class Watchdog:
    """Pets the service manager's watchdog as long as `beat` is called often enough."""

    def __init__(self, notifier: Notifier, env: Mapping[str, str]) -> None:
        self._notifier = notifier
        self._beat_s = time.monotonic()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.interval_s = _watchdog_interval_s(env)

    def beat(self) -> None:
        """The event loop turns (called once a second)."""
        self._beat_s = time.monotonic()

    def start(self) -> None:
        """Begin to pet, if the service manager asked for it."""
        if self.interval_s is not None and self._notifier.active:
            self._thread = threading.Thread(target=self._run, name="kvd-watchdog", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """No more petting."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=1.0)

    def _run(self) -> None:
        interval_s = self.interval_s or 0.0
        while True:
            if time.monotonic() - self._beat_s < max(interval_s / 2, 2.0):
                self._notifier.send(WATCHDOG="1")
            if self._stop.wait(interval_s / 3):
                return


def _watchdog_interval_s(env: Mapping[str, str]) -> float | None:
    text, pid = env.get("WATCHDOG_USEC", ""), env.get("WATCHDOG_PID", "")
    if not text.isdigit() or int(text) == 0 or (pid and pid != str(os.getpid())):
        return None
    return int(text) / 1e6


def _passed(env: Mapping[str, str]) -> list[tuple[str, int]]:
    """(name, descriptor) of all that the service manager passed to this process."""
    if env.get("LISTEN_PID") != str(os.getpid()) or not env.get("LISTEN_FDS", "").isdigit():
        return []
    count = int(env["LISTEN_FDS"])
    names = env.get("LISTEN_FDNAMES", "").split(":")
    names += [""] * (count - len(names))
    fds = range(LISTEN_FDS_START, LISTEN_FDS_START + count)
    for fd in fds:
        os.set_inheritable(fd, False)
    return list(zip(names, fds, strict=False))


def stored_descriptors(env: Mapping[str, str]) -> dict[str, int]:
    """What an earlier daemon had put into the service manager's store, by name."""
    stored: dict[str, int] = {}
    for name, fd in _passed(env):
        if name.startswith(KEPT_PREFIX):
            if name in stored:
                os.close(fd)
            else:
                stored[name] = fd
    return stored


def listening_socket(env: Mapping[str, str]) -> socket.socket | None:
    """The unix socket that the service manager passed (LISTEN_FDS), None if it passed none to this process.

    Raises UsageError if what it passed is not one listening unix stream socket.
    """
    sockets = [(name, fd) for name, fd in _passed(env) if not name.startswith(KEPT_PREFIX)]
    count = len(sockets)
    if count == 0:
        return None
    ours = [fd for name, fd in sockets if count == 1 or name == "kvd.socket"]
    if len(ours) != 1:
        raise UsageError(
            f"the service manager passed {count} sockets; kvd takes one, or the one named kvd.socket",
            code="listen-fds", count=count,
        )  # fmt: skip
    fd = ours[0]
    if not stat.S_ISSOCK(os.fstat(fd).st_mode):
        raise UsageError(
            f"the service manager passed descriptor {fd}, which is not a socket", code="listen-fds"
        )
    sock = socket.socket(fileno=fd)
    listening = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    if sock.family != socket.AF_UNIX or sock.type != socket.SOCK_STREAM or not listening:
        sock.detach()
        raise UsageError(
            f"the service manager passed descriptor {fd}, which is not a listening unix stream socket "
            "(ListenStream=/run/kvd/kvd.sock)",
            code="listen-fds",
        )
    sock.setblocking(False)
    return sock
