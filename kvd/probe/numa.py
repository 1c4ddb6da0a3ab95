"""NUMA nodes: which have memory and processors, and how much."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvd.probe import files


@dataclass(frozen=True, slots=True)
class Node:
    """One node with memory."""

    number: int
    memory_bytes: int
    cpus: tuple[int, ...]


def nodes(root: Path = Path("/")) -> tuple[Node, ...]:
    """All nodes that have memory, by number. One node (or none known) means there is nothing to place."""
    found = []
    for directory in sorted((root / "sys/devices/system/node").glob("node[0-9]*")):
        memory_bytes = 0
        for line in (files.text(directory / "meminfo") or "").splitlines():
            words = line.split()
            if len(words) >= 4 and words[2] == "MemTotal:":
                memory_bytes = int(words[3]) * 1024
        if memory_bytes:
            cpus = parse_list(files.text(directory / "cpulist") or "")
            found.append(Node(int(directory.name.removeprefix("node")), memory_bytes, cpus))
    return tuple(sorted(found, key=lambda node: node.number))


def parse_list(text: str) -> tuple[int, ...]:
    """(0, 1, 2, 8) of the kernel's "0-2,8"."""
    numbers: list[int] = []
    for part in text.split(","):
        low, dash, high = part.strip().partition("-")
        if low:
            numbers += range(int(low), int(high if dash else low) + 1)
    return tuple(numbers)
