"""Huge pages: what the kernel is set to give, and what a mapping really got."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from kvd.probe import files


@dataclass(frozen=True, slots=True)
class HugePageFacts:
    """Settings of transparent huge pages for shared memory, and reserved huge pages of 2 MiB."""

    shmem_enabled: str | None  # never, advise, within_size, always, deny, force
    hugetlb_total_count: int
    hugetlb_free_count: int
    hugetlb_overcommit_count: int

    @property
    def thp_possible(self) -> bool:
        """Whether asking for huge pages in shared memory can have an effect."""
        return self.shmem_enabled in ("advise", "always", "within_size", "force")


def facts(root: Path = Path("/")) -> HugePageFacts:
    """What this kernel offers for shared memory."""
    mm = root / "sys/kernel/mm"
    reserved = mm / "hugepages/hugepages-2048kB"
    return HugePageFacts(
        files.chosen(mm / "transparent_hugepage/shmem_enabled"),
        files.number(reserved / "nr_hugepages") or 0,
        files.number(reserved / "free_hugepages") or 0,
        files.number(reserved / "nr_overcommit_hugepages") or 0,
    )


@dataclass(frozen=True, slots=True)
class MappingPages:
    """What one file's mappings in this process hold, from /proc/self/smaps."""

    resident_bytes: int
    huge_bytes: int  # mapped by transparent huge pages
    page_bytes: int  # the kernel's page size for this mapping: 2 MiB with hugetlb
    locked_bytes: int


def file_key(fd: int) -> tuple[str, int]:
    """Device and inode of an open file, as smaps writes them."""
    status = os.fstat(fd)
    return f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}", status.st_ino


def mapped(root: Path = Path("/")) -> dict[tuple[str, int], MappingPages]:
    """Pages of every file mapped by this process (its fullest mapping), by `file_key`.

    The kernel walks all page tables for this: milliseconds a GiB of small pages. Not for the event loop.
    """
    found: dict[tuple[str, int], MappingPages] = {}
    key: tuple[str, int] | None = None
    values: dict[str, int] = {}
    for line in (files.text(root / "proc/self/smaps") or "").splitlines():
        head = line.split(None, 5)
        if "-" in head[0] and not head[0].endswith(":") and len(head) >= 5:
            _keep(found, key, values)
            key, values = (head[3], int(head[4])), {}
        elif len(head) == 3 and head[2] == "kB":
            values[head[0]] = int(head[1]) * 1024
    _keep(found, key, values)
    return found


def _keep(
    found: dict[tuple[str, int], MappingPages], key: tuple[str, int] | None, values: dict[str, int]
) -> None:
    if key is None or key[1] == 0:
        return
    hugetlb_bytes = values.get("Shared_Hugetlb:", 0) + values.get("Private_Hugetlb:", 0)
    pages = MappingPages(
        values.get("Rss:", 0) + hugetlb_bytes,
        values.get("ShmemPmdMapped:", 0),
        values.get("KernelPageSize:", 4096),
        values.get("Locked:", 0),
    )
    if key not in found or pages.resident_bytes > found[key].resident_bytes:
        found[key] = pages
