"""Who keeps the daemon's descriptors when the daemon is gone: the service manager, a keeper process, or nobody.

Owns the connection to whoever keeps. Event-loop thread only. `kept` is what an earlier daemon had stored, by name, when
this one started; whoever takes a descriptor out of it owns it. Invariant: `store` returns only when the descriptor is
on its way and cannot be lost with this process; what is not stored any more is removed by name.

    kvd-names-N, kvd-meta-N   of the Nth daemon over this memory; META is stored last, so that it stands for all
    kvd-pool-I                segment I
    kvd-client-ID             region of a client
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Final, Protocol

from kvd.config import Config, Sizes
from kvd.errors import UnavailableError
from kvd.probe import leftovers
from kvd.server import keeper, logs
from kvd.server.notify import KEPT_PREFIX, Notifier, stored_descriptors

STORE_SPARE: Final = 4  # META and names, twice while one daemon follows another
_log = logs.get("keeping")


class Keep(Protocol):
    """Whoever keeps."""

    kind: str
    kept: dict[str, int]

    def store(self, name: str, fd: int) -> None:
        """Keep this descriptor under this name from now on. Raises UnavailableError(keep)."""

    def remove(self, name: str) -> None:
        """Keep it no more. Never raises: what is left too long is sorted out by the next daemon."""

    def close(self) -> None:
        """This daemon is going; what is kept stays."""


class Nobody:
    """Nothing outlives this daemon."""

    kind = "off"

    def __init__(self) -> None:
        self.kept: dict[str, int] = {}

    def store(self, name: str, fd: int) -> None: ...
    def remove(self, name: str) -> None: ...
    def close(self) -> None: ...


class ServiceManager:
    """The descriptor store of systemd (FileDescriptorStoreMax=)."""

    kind = "service-manager"

    def __init__(self, notifier: Notifier, kept: dict[str, int]) -> None:
        self._notifier = notifier
        self.kept = kept

    def store(self, name: str, fd: int) -> None:
        try:
            self._notifier.hand_over(f"FDSTORE=1\nFDNAME={name}\nFDPOLL=0\n", [fd])
        except OSError as error:
            raise UnavailableError(
                f"the service manager did not take {name}: {error.strerror or error}", code="keep", name=name
            ) from error

    def remove(self, name: str) -> None:
        with contextlib.suppress(OSError):
            self._notifier.hand_over(f"FDSTOREREMOVE=1\nFDNAME={name}\n", [])

    def close(self) -> None: ...


class KeeperProcess:
    """A `kvd keeper`, found by its socket in the runtime directory, started if there is none."""

    kind = "keeper"

    def __init__(self, path: str) -> None:
        self._path = path
        self._process: subprocess.Popen[bytes] | None = None
        self.kept: dict[str, int] = {}
        sock = leftovers.dial_keeper(path)
        if sock is not None:
            try:
                self.kept = fetch(sock)
            except OSError as error:
                sock.close()
                raise UnavailableError(
                    f"the keeper at {path} does not answer ({error}); end it with kvctl purge",
                    code="keep",
                    path=path,
                ) from error
        self._sock = sock if sock is not None else self._start()

    def store(self, name: str, fd: int) -> None:
        try:
            keeper.send(self._sock, f"store {name}".encode(), fd)
        except OSError as error:
            raise UnavailableError(
                f"the keeper did not take {name}: {error}", code="keep", name=name
            ) from error

    def remove(self, name: str) -> None:
        with contextlib.suppress(OSError):
            keeper.send(self._sock, f"remove {name}".encode())

    def close(self) -> None:
        self._sock.close()

    def _start(self) -> socket.socket:
        """A new keeper on a socket that this process binds, so that there is nothing to wait for."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        with listener:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)
            before = os.umask(0o177)
            try:
                listener.bind(self._path)
                listener.listen(8)
            except OSError as error:
                raise UnavailableError(
                    f"the keeper's socket {self._path} cannot be made: {error.strerror}; set server.runtime_dir",
                    code="keep", path=self._path,
                ) from error  # fmt: skip
            finally:
                os.umask(before)
            self._process = subprocess.Popen(
                [sys.executable, keeper.__file__, str(listener.fileno())], pass_fds=[listener.fileno()],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
                cwd="/", env={"PATH": os.environ.get("PATH", "/usr/bin:/bin")},
            )  # fmt: skip
        sock = leftovers.dial_keeper(self._path)
        if sock is None:
            raise UnavailableError(f"the keeper at {self._path} did not start", code="keep", path=self._path)
        _log.info("keeper_started", pid=self._process.pid, path=self._path)
        return sock


def fetch(sock: socket.socket) -> dict[str, int]:
    """All that a keeper keeps. Raises OSError."""
    keeper.send(sock, b"list")
    kept: dict[str, int] = {}
    while True:
        data, fds = keeper.receive(sock)
        if data == keeper.LISTED:
            return kept
        if not data or len(fds) != 1:
            raise ConnectionError("it ended in the middle of its list")
        kept[data.decode()] = fds[0]


def choose(config: Config, sizes: Sizes, env: Mapping[str, str], notifier: Notifier) -> Keep:
    """Who keeps for this daemon; what an earlier one left with somebody else is let go. Raises UnavailableError."""
    wanted = config.restart.keep
    stored = stored_descriptors(env)
    path = leftovers.keeper_path(config.server.runtime_dir)
    if wanted == "auto":
        room = env.get("FDSTORE", "")
        needed = len(sizes.segments_bytes) + STORE_SPARE + config.clients.max
        fits = notifier.active and (bool(stored) or (room.isdigit() and int(room) >= needed))
        if notifier.active and room.isdigit() and not fits:
            _log.warning("memory_not_kept", reason=f"FileDescriptorStoreMax is {room}, {needed} are needed")
        wanted = "service-manager" if fits else "off"
    if wanted == "service-manager":
        if not notifier.active:
            raise UnavailableError(
                "restart.keep = \"service-manager\", but no service manager listens (NOTIFY_SOCKET); use "
                "restart.keep = \"keeper\" or \"off\"",
                code="keep",
            )  # fmt: skip
        return ServiceManager(notifier, stored)
    _let_go(notifier, stored)
    if wanted == "keeper":
        return KeeperProcess(path)
    ended = leftovers.dial_keeper(path)
    if ended is not None:
        with ended:
            ended.send(leftovers.END)
        _log.warning("kept_memory_dropped", reason="restart.keep is off now", keeper=path)
    return Nobody()


def _let_go(notifier: Notifier, stored: dict[str, int]) -> None:
    if not stored:
        return
    manager = ServiceManager(notifier, stored)
    for name, fd in stored.items():
        os.close(fd)
        manager.remove(name)
    _log.warning("kept_memory_dropped", reason="restart.keep is another now", descriptors=len(stored))


def numbered(kept: Mapping[str, int], what: str) -> dict[int, str]:
    """Number -> name of the kept descriptors of one sort ("pool", "client", "meta", "names")."""
    prefix = f"{KEPT_PREFIX}{what}-"
    return {
        int(name.removeprefix(prefix)): name
        for name in kept
        if name.startswith(prefix) and name.removeprefix(prefix).isdigit()
    }
