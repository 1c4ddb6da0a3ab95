"""Huge pages: what the kernel is set to give, and what a mapping really got."""

from __future__ import annotations

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


def mapped(inode: int, root: Path = Path("/")) -> MappingPages | None:
    """Pages of the mapping of the file with `inode` (the fullest, if there are several); None: not mapped."""
    best: MappingPages | None = None
    values: dict[str, int] | None = None
    for line in (files.text(root / "proc/self/smaps") or "").splitlines():
        head = line.split(None, 5)
        if "-" in head[0] and not head[0].endswith(":"):
            best = _larger(best, values)
            values = {} if len(head) >= 5 and head[4] == str(inode) else None
        elif values is not None and len(head) == 3 and head[2] == "kB":
            values[head[0]] = int(head[1]) * 1024
    return _larger(best, values)


def _larger(best: MappingPages | None, values: dict[str, int] | None) -> MappingPages | None:
    if values is None:
        return best
    hugetlb_bytes = values.get("Shared_Hugetlb:", 0) + values.get("Private_Hugetlb:", 0)
    pages = MappingPages(
        values.get("Rss:", 0) + hugetlb_bytes,
        values.get("ShmemPmdMapped:", 0),
        values.get("KernelPageSize:", 4096),
        values.get("Locked:", 0),
    )
    return pages if best is None or pages.resident_bytes > best.resident_bytes else best
