"""Who keeps the daemon's descriptors when the daemon is gone: the service manager, a keeper process, or nobody.

Owns the connection to whoever keeps. Event-loop thread only. `kept` is what an earlier daemon had stored, by name, when
this one started; whoever takes a descriptor out of it owns it. Invariant: `store` returns when the descriptor is on its
way and cannot be lost with this process, or, of a keeper process that is watched, when it is next in a queue that is
sent as fast as the keeper takes it: nobody waits for a keeper, and one that stays behind is told in health. What is not
stored any more is removed by name. A keeper that dies is started again and given everything anew, META last: until
then, and it is told in health, a restart begins empty.

    kvd-names-N, kvd-meta-N   of the Nth daemon over this memory; META is stored last, so that it stands for all
    kvd-pool-I                segment I
    kvd-client-ID             region of a client
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Final, Protocol

from kvd.config import Config, Sizes
from kvd.errors import UnavailableError
from kvd.probe import leftovers
from kvd.server import keeper, logs
from kvd.server.notify import KEPT_PREFIX, Notifier, stored_descriptors
from kvd.server.supervise import Guard

STORE_SPARE: Final = 4  # META and names, twice while one daemon follows another
PAUSE_MAX_S: Final = 60.0
HAND_OVER_PAUSE_S: Final = 0.01  # while it takes some
HAND_OVER_PAUSE_MAX_S: Final = 1.0  # when it takes nothing for long
BEHIND_MAX_S: Final = 1.0  # longer, and health tells
_DEAD: Final = (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN)  # everything else may be better next time
_log = logs.get("keeping")

Tell = Callable[[str, str], None]
"""tell(state, reason): how it stands with what is kept, as health shows it."""


class Keep(Protocol):
    """Whoever keeps."""

    kind: str
    kept: dict[str, int]

    def store(self, name: str, fd: int) -> None:
        """Keep this descriptor under this name from now on. Raises UnavailableError(keep)."""

    def taken(self, name: str, fd: int) -> None:
        """It is kept under this name already, by an earlier daemon; the descriptor is this daemon's now."""

    def watch(self, loop: asyncio.AbstractEventLoop, guard: Guard, tell: Tell) -> None:
        """From now on see to it that what is kept stays kept; `tell(state, reason)` when that changes."""

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
    def taken(self, name: str, fd: int) -> None: ...
    def watch(self, loop: asyncio.AbstractEventLoop, guard: Guard, tell: Tell) -> None: ...
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

    def taken(self, name: str, fd: int) -> None: ...
    def watch(self, loop: asyncio.AbstractEventLoop, guard: Guard, tell: Tell) -> None: ...

    def remove(self, name: str) -> None:
        with contextlib.suppress(OSError):
            self._notifier.hand_over(f"FDSTOREREMOVE=1\nFDNAME={name}\n", [])

    def close(self) -> None: ...


class KeeperProcess:
    """A `kvd keeper`, found by its socket in the runtime directory, started if there is none.

    Until it is watched, `store` waits for it and raises; afterwards it only queues what the keeper does not take now.
    """

    kind = "keeper"

    def __init__(self, path: str) -> None:
        self._path = path
        self._process: subprocess.Popen[bytes] | None = None
        self._stored: dict[str, int] = {}  # what it is to keep
        # What it was not told yet, in order: True, to keep it; False, to keep it no more. Bounded by what is kept and
        # what it was told, since what it was never told to keep need not be taken back.
        self._untold: OrderedDict[str, bool] = OrderedDict()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._guard: Guard = _unguarded
        self._tell: Tell = _tell_nobody
        self._retry: asyncio.TimerHandle | None = None  # the one thing to be done later
        self._pause_s = 0.0
        self._given_s: float | None = None  # when one that was started anew had everything
        self._behind_s: float | None = None  # since when it does not take all at once
        self._hand_over_pause_s = HAND_OVER_PAUSE_S
        self._told_ok = True
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
        self._stored[name] = fd
        if self._loop is None:
            try:
                keeper.send(self._sock, f"store {name}".encode(), fd)
            except OSError as error:
                raise UnavailableError(
                    f"the keeper did not take {name}: {error}", code="keep", name=name
                ) from error
        else:
            self._queue(name, True)

    def taken(self, name: str, fd: int) -> None:
        self._stored[name] = fd

    def remove(self, name: str) -> None:
        self._stored.pop(name, None)
        if self._loop is None:
            with contextlib.suppress(OSError):
                keeper.send(self._sock, f"remove {name}".encode())
        elif self._untold.get(name):
            del self._untold[name]  # it was never told
        else:
            self._queue(name, False)

    def close(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
        if self._loop is not None and self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock.fileno())
            with contextlib.suppress(OSError):
                self._send_untold()
        self._sock.close()

    # --- a keeper that is slow

    def _queue(self, name: str, keep: bool) -> None:
        if self._sock.fileno() < 0:
            return  # the next one is given all that is stored
        self._untold[name] = keep
        if len(self._untold) == 1:
            self._hand_over()

    def _send_untold(self) -> None:
        """Send what it takes now. Raises OSError when it takes no more."""
        while self._untold:
            name, keep = next(iter(self._untold.items()))
            if keep:
                keeper.send(self._sock, f"store {name}".encode(), self._stored[name])
            else:
                keeper.send(self._sock, f"remove {name}".encode())
            del self._untold[name]
            self._hand_over_pause_s = HAND_OVER_PAUSE_S

    def _hand_over(self) -> None:
        """Give it what there is as fast as it takes it, without waiting for it."""
        if self._sock.fileno() < 0:
            return
        try:
            self._send_untold()
        except OSError as error:
            if error.errno not in _DEAD:  # of the dead `_readable` is told
                self._is_behind(error)
            return
        self._behind_s = None
        if not self._told_ok:
            assert self._loop is not None
            self._given_s, self._told_ok = self._loop.time(), True
            _log.warning("keeper_has_everything_again", descriptors=len(self._stored))
            self._tell("ok", "")

    def _is_behind(self, error: OSError) -> None:
        assert self._loop is not None
        now_s = self._loop.time()
        if self._behind_s is None:
            self._behind_s = now_s
        elif now_s - self._behind_s >= BEHIND_MAX_S and self._told_ok:
            self._told_ok = False
            _log.error("keeper_is_behind", descriptors=len(self._untold), reason=str(error), path=self._path)
            self._tell(
                "degraded",
                f"the keeper takes nothing ({error}): until it has everything, a restart begins empty",
            )
        self._later(self._hand_over_pause_s, self._hand_over)
        self._hand_over_pause_s = min(2 * self._hand_over_pause_s, HAND_OVER_PAUSE_MAX_S)

    # --- a keeper that dies

    def watch(self, loop: asyncio.AbstractEventLoop, guard: Guard, tell: Tell) -> None:
        self._loop, self._guard, self._tell = loop, guard, tell
        tell("ok", "")
        self._serve()

    def _serve(self) -> None:
        assert self._loop is not None
        self._sock.setblocking(False)
        self._loop.add_reader(self._sock.fileno(), self._guard, self._readable)

    def _readable(self) -> None:
        """It says nothing unless it is asked: this is its end."""
        loop = self._loop
        assert loop is not None
        with contextlib.suppress(BlockingIOError, InterruptedError, ConnectionError):
            if self._sock.recv(256, socket.MSG_DONTWAIT):
                return
        loop.remove_reader(self._sock.fileno())
        self._sock.close()
        pid = self._process.pid if self._process is not None else None
        if self._process is not None:
            self._process.poll()  # takes note of its end
        _log.error(
            "keeper_died", pid=pid, path=self._path, hint="it is started again; killed for want of memory?"
        )
        self._told_ok = False
        self._tell("degraded", "the keeper died: until it has everything again, a restart begins empty")
        # At once, unless it died just now; one that dies again and again is started ever more seldom.
        if self._given_s is not None and loop.time() - self._given_s > PAUSE_MAX_S:
            self._pause_s = 0.0
        self._start_later()

    def _start_later(self) -> None:
        self._later(self._pause_s, self._again)
        self._pause_s = min(max(1.0, 2 * self._pause_s), PAUSE_MAX_S)

    def _later(self, seconds: float, call: Callable[[], None]) -> None:
        """Do this, and nothing else that was to be done later."""
        assert self._loop is not None
        if self._retry is not None:
            self._retry.cancel()
        self._retry = self._loop.call_later(seconds, self._guard, call)

    def _again(self) -> None:
        self._given_s = None
        try:
            self._sock = self._start()
        except (UnavailableError, OSError) as error:
            _log.error("keeper_not_started", reason=str(error), retry_s=self._pause_s)
            self._tell("degraded", f"warm restart is off, the keeper cannot be started: {error}")
            self._start_later()
            return
        self._serve()
        # META comes last, since it stands for all.
        names = sorted(self._stored, key=lambda name: name.startswith(f"{KEPT_PREFIX}meta-"))
        self._untold = OrderedDict((name, True) for name in names)
        self._behind_s, self._hand_over_pause_s = None, HAND_OVER_PAUSE_S
        self._hand_over()

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


def _unguarded(call: Callable[..., None], *args: object) -> None:
    call(*args)


def _tell_nobody(_state: str, _reason: str) -> None:
    return


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
