"""Things with names that outlive a process unless they are removed: the socket file and named POSIX memory.

Owns the lock files that say who is responsible. A lock (flock) ends with its process, however that ends, so that the
next daemon knows for certain whether the names it finds are stale. Invariants: a name is removed only by who
holds its lock; two daemons that start at once cannot both take one socket or one set of names.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from kvd.config import Config
from kvd.errors import Retry, UnavailableError, UsageError
from kvd.probe import leftovers
from kvd.server import logs
from kvd.shm import segments

_log = logs.get("named")
DIRECTORY_MODE: Final = 0o755  # who may connect is told by the socket's own mode


def _lock(path: Path, what: str, cure: str = "create its directory for this user") -> int:
    """Take the lock file at `path`. Raises UnavailableError(in-use) with the pid that holds it."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise UsageError(
            f"{what}: {path} cannot be written: {error.strerror}; {cure}",
            code="lock-file", path=str(path),
        ) from error  # fmt: skip
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(fd, 32, 0).split(b"\n")[0].decode(errors="replace") or "unknown"
        os.close(fd)
        raise UnavailableError(
            f"{what} belongs to another daemon (pid {holder}); stop it first (kvctl stop), or configure another place",
            code="in-use", retry=Retry.NEVER, path=str(path), pid=holder,
        ) from None  # fmt: skip
    return fd


def _write(fd: int, text: str) -> None:
    os.ftruncate(fd, 0)
    os.pwrite(fd, text.encode(), 0)


def _make_directory(path: Path, cure: str) -> None:
    """Make the directory of a socket if nothing but its last part is missing. Raises UsageError(lock-file)."""
    directory = path.parent
    if directory.is_dir() or not directory.parent.is_dir():
        return  # it is there; or, so far from there, the name is more likely wrong: the lock file says so
    old_mask = os.umask(0)  # a narrow umask of the one who starts it would shut all other users out
    try:
        directory.mkdir(DIRECTORY_MODE)
    except FileExistsError:
        return
    except OSError as error:
        raise UsageError(
            f"server.socket = '{path}': its directory {directory} cannot be made: {error.strerror}; {cure}",
            code="lock-file", path=str(directory),
        ) from error  # fmt: skip
    finally:
        os.umask(old_mask)
    _log.info("directory_made", directory=str(directory), mode=f"{DIRECTORY_MODE:04o}")


def _elsewhere(env: Mapping[str, str]) -> str:
    """What to do when the place of the socket cannot be written, with a place that this user may write."""
    example = ""
    for base, name in ((env.get("XDG_RUNTIME_DIR"), "kvd"), (env.get("HOME"), ".kvd")):
        if base and os.path.isabs(base) and os.access(base, os.W_OK | os.X_OK):
            example = f", such as KVD_SOCKET={base.rstrip('/')}/{name}/kvd.sock"
            break
    return (
        "create its directory for this user, or set server.socket or KVD_SOCKET (for clients and kvctl, too) to a "
        f"place in a directory that this user may write{example}"
    )


class SocketFile:
    """The control socket's file, ours as long as `<socket>.lock` is locked. Its directory is made if it is missing."""

    def __init__(self, path: str, env: Mapping[str, str]) -> None:
        self._path = path
        cure = _elsewhere(env)
        _make_directory(Path(path), cure)
        try:
            self._fd = _lock(Path(path + ".lock"), f"server.socket = {path!r}", cure)
        except UnavailableError as error:
            pid = leftovers.daemon_pid(path)
            if not pid or os.path.lexists(path):
                raise
            raise UnavailableError(
                leftovers.socket_is_gone(path, pid), code="in-use", retry=Retry.NEVER, path=path, pid=str(pid)
            ) from error  # fmt: skip
        _write(self._fd, f"{os.getpid()}\n")
        self._inode: int | None = None

    def bound(self) -> None:
        """The file is there now; remember which one it is."""
        self._inode = os.stat(self._path).st_ino

    def remove(self) -> None:
        """Remove the socket file if it is still ours, then give up the lock."""
        with contextlib.suppress(OSError):
            if self._inode is not None and os.stat(self._path).st_ino == self._inode:
                os.unlink(self._path)
        self.release()

    def release(self) -> None:
        """Give up the lock."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class NamedMemory:
    """Named POSIX memory of the pool (pool.backing = "posix"), and what a daemon that crashed left of it."""

    def __init__(self, config: Config) -> None:
        self._directory = Path(config.server.runtime_dir)
        self._fd = -1
        self._names: list[str] = []

    def create(self, count: int) -> list[str]:
        """Names for `count` segments. Removes what an earlier daemon with this directory left behind."""
        self._fd = _lock(self._directory / "memory.lock", "server.runtime_dir")
        self._remove_stale()
        self._names = [f"/kvd-{os.getpid()}-{number}" for number in range(count)]
        _write(self._fd, f"{os.getpid()}\n{json.dumps(self._names)}\n")
        return list(self._names)

    def _remove_stale(self) -> None:
        lines = os.pread(self._fd, 1 << 20, 0).decode(errors="replace").splitlines()
        with contextlib.suppress(json.JSONDecodeError, IndexError):
            removed = [
                name
                for name in json.loads(lines[1])
                if isinstance(name, str) and name.startswith("/kvd-") and segments.unlink_named(name)
            ]
            if removed:
                _log.warning("stale_memory_removed", names=removed, left_by_pid=lines[0])

    def remove(self) -> None:
        """Remove the names (the memory goes with its last mapping), then give up the lock."""
        if self._fd < 0:
            return
        for name in self._names:
            segments.unlink_named(name)
        _write(self._fd, "")
        os.close(self._fd)
        self._fd = -1
