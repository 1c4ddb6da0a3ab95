"""Every counter of the core by name, at 0 from the start: no series is missing before its first event.

Owned by `Core`, changed by its parts in the core's own thread. Counters never fall.
"""

from __future__ import annotations

from typing import Final

from kvd.core.events import Reason

names: Final[tuple[str, ...]] = (
    "clients_attached",
    "clients_gone",
    "reserves",  # batches asked for
    "granted",  # items
    "present",  # items found published at reservation
    "pending",  # items skipped because another was writing them
    "publishes",  # batches
    "published",  # items that became visible
    "published_bytes",
    "families_published",  # new families
    "duplicates",  # items published by another first
    "differs",  # duplicates with other bytes
    "gone",  # items of reservations that are over, were not granted, or belong to another client
    "no_index",  # items whose buckets were full
    "aborts",  # batches
    "aborted",  # items given back by their writer
    "orphaned",  # items given back because their writer was gone
    "usage_refusals",  # operations refused as wrong in themselves
    "capacity_refusals",  # reservations that found no room
    "touches",
    "touches_left_out",  # of chains of too many runs, or too many at one look
    "touches_stale",  # for a family that had left by then
    "misses_pending",  # touches that missed a family which was being written
    "misses_evicted",
    "misses_never",  # the rest
    "evictions",  # batches
    "evicted_bytes",
    "held_reverts",  # families that were to leave and were held
    "limbo_entered",
    "limbo_freed",
    "runs_split",
    "pins",
    "unpins",
    "pin_refusals",
    "clears",
    "withdrawals",
    *(f"evicted_{reason.value}" for reason in Reason if reason is not Reason.LIMBO),  # families by reason
)


def new() -> dict[str, int]:
    """All counters at 0."""
    return dict.fromkeys(names, 0)
