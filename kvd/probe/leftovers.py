"""What a daemon that is gone may have left on a host: a keeper with its memory, a socket file, named memory.

Owns nothing; looks, and on request removes. Used by kvctl (purge, doctor) and by the server (to find its keeper). A
thing counts as left only when nobody answers for it: the lock files of a daemon that lives are held.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

KEEPER_SOCKET: Final = "keeper.sock"
KEEPER_TIMEOUT_S: Final = 5.0
END: Final = b"end"
_DEV_SHM: Final = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Leftover:
    """One thing: "keeper", "socket" or "memory", where it is, and what it holds."""

    kind: str
    path: str
    what: str


def keeper_path(runtime_dir: str) -> str:
    """Where the keeper of a daemon with this runtime directory listens."""
    return str(Path(runtime_dir) / KEEPER_SOCKET)


def dial_keeper(path: str) -> socket.socket | None:
    """A connection to the keeper, None if there is none."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    sock.settimeout(KEEPER_TIMEOUT_S)
    try:
        sock.connect(path)
    except OSError:
        sock.close()
        return None
    return sock


def daemon_pid(socket_path: str) -> int | None:
    """The pid of the daemon that owns this socket, None if no daemon does."""
    return _holder(Path(socket_path + ".lock"))


def socket_is_gone(socket_path: str, pid: int) -> str:
    """What to say when the daemon `pid` holds the lock of a socket at which it cannot be reached any more."""
    return (
        f"pid {pid} runs but its socket file {socket_path} is gone: kill -TERM {pid}, then start the daemon"
    )


def _holder(path: Path) -> int | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        text = os.pread(fd, 32, 0).split(b"\n")[0]
        return int(text) if text.isdigit() else 0
    finally:
        os.close(fd)
    return None


def find(runtime_dir: str, socket_path: str) -> list[Leftover]:
    """What nobody answers for. Empty while a daemon owns the socket: then it is that daemon's."""
    if daemon_pid(socket_path) is not None:
        return []
    found: list[Leftover] = []
    keeper = dial_keeper(keeper_path(runtime_dir))
    if keeper is not None:
        keeper.close()
        found.append(
            Leftover("keeper", keeper_path(runtime_dir), "a process that keeps the memory of a daemon")
        )
    if _is_socket(socket_path) and not _answers(socket_path):
        found.append(Leftover("socket", socket_path, "a socket file that nobody listens on"))
    for name in _named(Path(runtime_dir) / "memory.lock"):
        size_bytes = (_DEV_SHM / name.lstrip("/")).stat().st_size
        found.append(Leftover("memory", name, f"named memory of {size_bytes} B"))
    return found


def other_keepers(runtime_dir: str, table: Path = Path("/proc/net/unix")) -> list[str]:
    """Sockets of keepers that listen in other directories than this one: of daemons that run, or that are gone."""
    try:
        lines = table.read_text(errors="replace").splitlines()[1:]
    except OSError:
        return []
    # Num RefCount Protocol Flags Type St Inode Path; a socket that listens has __SO_ACCEPTCON (0x10000) in its flags.
    rows = [line.split(maxsplit=7) for line in lines]
    paths = {row[7] for row in rows if len(row) == 8 and int(row[3], 16) & 0x10000 and row[7].startswith("/")}
    return sorted(
        path for path in paths if Path(path).name == KEEPER_SOCKET and path != keeper_path(runtime_dir)
    )


def remove(leftover: Leftover) -> bool:
    """Remove one thing that `find` named. False: it is gone already. Raises OSError if it may not be removed."""
    match leftover.kind:
        case "keeper":
            keeper = dial_keeper(leftover.path)
            if keeper is None:
                return False
            with keeper:
                keeper.send(END)
                with contextlib.suppress(ConnectionError):
                    keeper.recv(16)  # EOF: it has ended
            return True
        case "socket":
            path = Path(leftover.path)
        case _:
            path = _DEV_SHM / leftover.path.lstrip("/")
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    return True


def _is_socket(path: str) -> bool:
    try:
        return stat.S_ISSOCK(os.lstat(path).st_mode)
    except OSError:
        return False


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return False
        except OSError:
            return True  # full, or not ours to ask: somebody may be there
    return True


def _named(lock: Path) -> list[str]:
    """Names of memory that a daemon wrote down and whose lock nobody holds."""
    if _holder(lock) is not None:
        return []
    try:
        names = json.loads(lock.read_text().splitlines()[1])
    except (OSError, IndexError, json.JSONDecodeError):
        return []
    return [
        name
        for name in names
        if isinstance(name, str) and name.startswith("/kvd-") and (_DEV_SHM / name.lstrip("/")).exists()
    ]
