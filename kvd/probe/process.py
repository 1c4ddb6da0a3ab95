"""Limits of a process, this one or the daemon's, from /proc."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvd.probe import files

_CAP_IPC_LOCK = 14
_STATES = {
    "R": "running", "S": "sleeping", "D": "waiting for a device", "T": "stopped", "t": "held by a debugger",
    "Z": "ended, not reaped", "I": "idle", "X": "ended",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ProcessLimits:
    """Limits that kvd meets. None: unlimited."""

    memlock_soft_bytes: int | None
    memlock_hard_bytes: int | None
    open_files_soft: int | None
    open_files_hard: int | None
    may_lock: bool  # CAP_IPC_LOCK: the memlock limit does not apply


def limits(pid: int | str = "self", root: Path = Path("/")) -> ProcessLimits | None:
    """Of the process `pid`; None if it is gone or belongs to somebody else."""
    text = files.text(root / f"proc/{pid}/limits")
    if text is None:
        return None
    rows: dict[str, tuple[int | None, int | None]] = {}
    for line in text.splitlines():
        # "Max open files            1024                 524288               files": names have 25 columns.
        words = line[25:].split()
        if len(words) >= 2:
            rows[line[:25].strip()] = (_bound(words[0]), _bound(words[1]))
    memlock, open_files = (
        rows.get("Max locked memory", (None, None)),
        rows.get("Max open files", (None, None)),
    )
    return ProcessLimits(*memlock, *open_files, _may_lock(files.text(root / f"proc/{pid}/status") or ""))


def private_bytes(pid: int | str = "self", root: Path = Path("/")) -> int | None:
    """Resident memory that is this process's own: heap and stacks, no shared memory, no code."""
    for line in (files.text(root / f"proc/{pid}/status") or "").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    return None


def state(pid: int, root: Path = Path("/")) -> str:
    """What a process does now, as its letter and in words: "T: stopped". Empty if it is gone or cannot be seen."""
    words = (files.text(root / f"proc/{pid}/stat") or "").rpartition(")")[2].split()
    return f"{words[0]}: {_STATES.get(words[0], 'see man 5 proc')}" if words else ""


def _bound(word: str) -> int | None:
    return int(word) if word.isdigit() else None


def _may_lock(status: str) -> bool:
    for line in status.splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> _CAP_IPC_LOCK & 1)
    return False
