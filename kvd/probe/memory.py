"""How much memory there is for a pool, how much of it may be locked, and what a file system for it holds."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path

from kvd.probe import cgroup, files


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """Bytes of the machine and of what a pool may be measured against."""

    total_bytes: int
    available_bytes: int
    bound_bytes: int  # the machine's memory or the least cgroup limit, whichever is less
    bound_source: str


@dataclass(frozen=True, slots=True)
class LockLimit:
    """RLIMIT_MEMLOCK of this process; None: no limit."""

    soft_bytes: int | None
    hard_bytes: int | None
    privileged: bool  # CAP_IPC_LOCK: the limit does not apply


def memory(root: Path = Path("/")) -> MemoryFacts:
    """Memory of the machine and the bound that applies to this process."""
    values: dict[str, int] = {}
    for line in (files.text(root / "proc/meminfo") or "").splitlines():
        name, _, rest = line.partition(":")
        digits = rest.split()
        if digits and digits[0].isdigit():
            values[name] = int(digits[0]) * (1024 if digits[-1] == "kB" else 1)
    total_bytes = values.get("MemTotal") or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = cgroup.memory_limit(root)
    bound_bytes, source = total_bytes, "this machine"
    if limit is not None and limit.limit_bytes < total_bytes:
        bound_bytes, source = limit.limit_bytes, f"this control group ({limit.path})"
    return MemoryFacts(total_bytes, values.get("MemAvailable", total_bytes), bound_bytes, source)


def lock_limit(root: Path = Path("/")) -> LockLimit:
    """How much this process may lock."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return LockLimit(
        None if soft == resource.RLIM_INFINITY else soft,
        None if hard == resource.RLIM_INFINITY else hard,
        _has_capability(root, 14),  # CAP_IPC_LOCK
    )


def _has_capability(root: Path, number: int) -> bool:
    for line in (files.text(root / "proc/self/status") or "").splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> number & 1)
    return False


def file_system_free_bytes(path: str = "/dev/shm") -> int | None:
    """Bytes free where named POSIX memory lives; None if there is no such mount. memfd does not depend on it."""
    try:
        status = os.statvfs(path)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize
