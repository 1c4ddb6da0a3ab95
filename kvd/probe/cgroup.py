"""The memory limit of the control group this process is in, versions 1 and 2.

In a container the mounted hierarchy often begins at the container's own group, while /proc/self/cgroup names the
path on the host: both places are looked at, and every ancestor counts, because the least limit is the one that kills.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvd.probe import files

# Version 1 says "no limit" with a number close to 2^63.
_NO_LIMIT_BYTES: Final = 1 << 60


@dataclass(frozen=True, slots=True)
class CgroupLimit:
    """The least memory limit on the way to the root, and the file that says so."""

    limit_bytes: int
    usage_bytes: int
    path: str


def memory_limit(root: Path = Path("/")) -> CgroupLimit | None:
    """The effective limit, or None without one."""
    found = [
        limit for directory, names in _directories(root) if (limit := _limit(directory, *names)) is not None
    ]
    return min(found, key=lambda limit: limit.limit_bytes, default=None)


_V2: Final = ("memory.max", "memory.current")
_V1: Final = ("memory.limit_in_bytes", "memory.usage_in_bytes")


def _directories(root: Path) -> list[tuple[Path, tuple[str, str]]]:
    """Every directory whose limit applies, with the names of its limit and usage files."""
    mount = root / "sys/fs/cgroup"
    directories: list[tuple[Path, tuple[str, str]]] = []
    for line in (files.text(root / "proc/self/cgroup") or "").splitlines():
        hierarchy, controllers, path = (*line.split(":", 2), "", "")[:3]
        if hierarchy == "0" and controllers == "":
            base, names = mount, _V2
        elif "memory" in controllers.split(","):
            base, names = mount / "memory", _V1
        else:
            continue
        inner = base / path.lstrip("/")
        chain = [inner, *inner.parents]
        directories += [(place, names) for place in chain if place.is_relative_to(base)]
    return directories


def _limit(directory: Path, limit_name: str, usage_name: str) -> CgroupLimit | None:
    limit_bytes = files.number(directory / limit_name)
    if limit_bytes is None or limit_bytes >= _NO_LIMIT_BYTES:
        return None
    return CgroupLimit(limit_bytes, files.number(directory / usage_name) or 0, str(directory / limit_name))
