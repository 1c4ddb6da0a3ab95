"""The file of a unix socket: is it there, whose is it, may this user open it. Connects to nobody."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What is at a path."""

    SOCKET = "socket"
    OTHER = "other"  # a file, a directory, a dangling link
    ABSENT = "absent"
    NO_DIRECTORY = "no directory"
    HIDDEN = "hidden"  # a directory on the way cannot be searched by this user


@dataclass(frozen=True, slots=True)
class SocketFacts:
    """What this user sees of it. `mode`, `uid` and `gid` are those of the socket file, 0 if it is not seen."""

    path: str
    kind: Kind
    mode: int = 0
    uid: int = 0
    gid: int = 0
    may_connect: bool = False  # write permission, which is what connect needs


def facts(path: str) -> SocketFacts:
    """Look at the file."""
    try:
        found = os.stat(path)
    except PermissionError:
        return SocketFacts(path, Kind.HIDDEN)
    except OSError:
        if os.path.lexists(path):
            return SocketFacts(path, Kind.OTHER)
        directory = os.path.dirname(path) or "."
        return SocketFacts(path, Kind.ABSENT if os.path.isdir(directory) else Kind.NO_DIRECTORY)
    kind = Kind.SOCKET if stat.S_ISSOCK(found.st_mode) else Kind.OTHER
    return SocketFacts(
        path, kind, stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid, os.access(path, os.W_OK)
    )
