"""What the core says about itself: statistics, listings, why a request missed. Changes nothing."""

from __future__ import annotations

from itertools import islice, takewhile
from typing import NamedTuple

from kvd.core.books import Books
from kvd.core.events import NONE
from kvd.core.forest import Forest
from kvd.core.journal import age_text
from kvd.core.policy import list_names

# What one call looks at: entries, and families and runs to say where in its chain a family is. The last row may take
# `depth_runs_max` and `run_families_max` more: about a millisecond in all.
listing_scan_max = 16_384
listing_work_max = 2048
depth_runs_max = (
    1024  # a chain of that many requests is one that was made so: nobody counts it for everybody to wait
)


class FamilyRow(NamedTuple):
    """One family of a listing."""

    entry: int
    namespace: int
    depth: int | None  # families before it in its chain; None: behind too many runs to count them
    bytes: int  # of the slots it occupies
    touched_ns: int  # when its run was touched last
    pinned: int  # PinKind
    missing: int  # members not published


def statistics(books: Books) -> dict[str, object]:
    """Pool, tables, classes and namespaces, JSON-able. Bytes are those of slots."""
    forest, slots = books.forest, books.slots
    free_bytes = slots.frames.free_count << 21
    slack_bytes = sum(c.free_count * c.slot_bytes for c in slots.classes.values())
    limbo_bytes = books.limbo_bytes
    policy_bytes = dict(zip(list_names, forest.policy.list_bytes, strict=True))
    return {
        "pool": {
            "total_bytes": slots.total_bytes,
            "usable_bytes": slots.usable_bytes,
            "used_bytes": books.published_bytes - limbo_bytes,
            "reserved_bytes": books.reserved_bytes,
            "limbo_bytes": limbo_bytes,
            "pinned_bytes": forest.pins.hard_bytes,
            "soft_pinned_bytes": policy_bytes["soft"],
            "free_bytes": free_bytes + slack_bytes,
            "free_frames_bytes": free_bytes,
            "largest_free_bytes": slots.frames.largest() << 21,
        },
        "families": forest.entries.used_count - len(books.limbo),
        "families_max": books.families_max,
        "families_promised": forest.promised_count,
        "families_limbo": len(books.limbo),
        "families_partial": len(forest.partial),
        "records": books.records.used_count,
        "records_max": books.records_max,
        "runs": forest.run_numbers.used_count,
        "runs_split": forest.splits_count,
        "reservations": len(books.reservations.live),
        "requests_known": len(books.journal),
        "ghosts": len(books.ghosts),
        "policy_bytes": policy_bytes,
        "classes": [
            {
                "slot_bytes": c.slot_bytes, "slabs": c.slabs_count, "slots": c.slabs_count * c.slab_slots,
                "published": c.published_count, "reserved": c.reserved_count, "free": c.free_count,
                "slab_bytes": c.slab_frames << 21,
            }
            for c in sorted(slots.classes.values(), key=lambda c: c.slot_bytes) if c.slabs_count
        ],
        "namespaces": {
            namespace: {"families": families, "bytes": size_bytes}
            for namespace, (families, size_bytes) in sorted(forest.namespaces.items())
        },
    }  # fmt: skip


def miss_cause(books: Books, key8: int, now_ns: int) -> str:
    """Why a family that was looked for is not there, for people."""
    if books.reservations.is_pending(key8):
        return "being written"
    ghost = books.ghosts.find(key8)
    if ghost is not None:
        reason, when_ns = ghost
        return f"evicted ({reason.value}, {age_text(now_ns - when_ns)})"
    return "never stored here"


def families(
    books: Books, namespace: int | None, start: int, limit: int, entries_max: int = listing_scan_max
) -> tuple[list[FamilyRow], int | None]:
    """Up to `limit` families from entry `start` on, and where to go on (None: that was all).

    Looks at a bounded number of entries, so that a page may have fewer rows than asked for, or none.
    """
    forest = books.forest
    end = min(start + entries_max, forest.entries.fresh)
    rows: list[FamilyRow] = []
    depths: dict[int, int | None] = {NONE: 0}  # families up to the end of a run
    places: dict[int, dict[int, int]] = {}
    work = listing_work_max
    for entry in range(start, end):
        if not forest.is_used(entry):
            continue
        run = forest.run_of[entry]
        if namespace is not None and forest.namespace_of[run] != namespace:
            continue
        if len(rows) == limit or work <= 0:
            return rows, entry
        if run not in places:
            members = forest.members[run]
            work -= len(members) + _learn_depth(forest, run, depths)
            places[run] = {member: at for at, member in enumerate(members)}
        before = _known_depth(forest, run, depths)
        rows.append(
            FamilyRow(
                entry, forest.namespace_of[run], None if before is None else before + places[run][entry],
                forest.bytes_of[entry], forest.touched_ns[run], int(forest.pins.kind(run)),
                forest.missing_of[entry],
            )
        )  # fmt: skip
    return rows, end if end < forest.entries.fresh else None


def _known_depth(forest: Forest, run: int, depths: dict[int, int | None]) -> int | None:
    """How many families there are before this run, whose depth was learnt."""
    end = depths[run]
    return None if end is None else end - len(forest.members[run])


def _learn_depth(forest: Forest, run: int, depths: dict[int, int | None]) -> int:
    """Enter how many families there are up to the end of this run and of those before it, or None for this run if there
    are too many to look at; how many runs that took.
    """
    unknown = takewhile(lambda one: one not in depths, forest.path(run))
    path = list(islice(unknown, depth_runs_max + 1))
    if len(path) > depth_runs_max:
        depths[run] = None
    else:
        for one in reversed(path):
            before = depths[forest.parent[one]]
            depths[one] = None if before is None else before + len(forest.members[one])
    return len(path)
