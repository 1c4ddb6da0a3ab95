"""Pins: families that leave last (soft) or not at all (hard).

A pin names the last run of a prefix and reaches from there to the root, since a suffix is of no use without
its prefix. Every run counts the pins at or behind it, so that what two pins share stays pinned until both are
gone. A pin is neither durability nor a lease: a withdrawn family leaves in spite of it.

Owned by `Core`, told by `Forest` when runs change. Invariants: a run's counts are its own pins plus those of
its children; the policy keeps it in the list its counts call for; `hard_bytes` is the sum of the runs pinned
hard.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from kvd.core.columns import u32
from kvd.core.events import Buffer, PinKind
from kvd.core.policy import HARD, SOFT

if TYPE_CHECKING:
    from kvd.core.forest import Forest


class Pins:
    """Which runs are pinned, and how strongly."""

    def __init__(self, forest: Forest) -> None:
        self._forest = forest
        self.explicit: dict[int, PinKind] = {}  # run -> the pins that end there
        self.counts: dict[int, list[int]] = {}  # run -> [soft, hard] pins that end there or behind
        self.hard_bytes = 0
        self.flag_changes: list[
            tuple[array[int], PinKind]
        ] = []  # for the runner; the core takes them after each step

    def is_pinned(self, run: int) -> bool:
        """Whether any pin reaches this run."""
        return run in self.counts

    def kind(self, run: int) -> PinKind:
        """The strongest pin that reaches this run."""
        counts = self.counts.get(run)
        if counts is None:
            return PinKind.NONE
        return PinKind.HARD if counts[1] else PinKind.SOFT

    def pin(self, entries: Buffer, kind: PinKind, hard_bytes_max: int) -> tuple[int, int]:
        """Pin the prefixes that end at these families, all or none.

        Returns how many pins there are more, and how many bytes pinned hard there would be beyond the limit:
        if that is not 0, nothing was pinned.
        """
        forest = self._forest
        reached: dict[int, None] = {}
        ends: list[int] = []
        for entry in reversed(u32(entries)):
            if not forest.is_used(entry):
                continue
            if forest.run_of[entry] in reached:
                continue  # a pin that ends behind it holds it, and came with it
            run = forest.ending_at(entry)
            ends.append(run)
            reached.update(dict.fromkeys(forest.path(run)))
        if kind is PinKind.HARD:
            more = sum(forest.run_bytes[run] for run in reached if self.kind(run) is not PinKind.HARD)
            if self.hard_bytes + more > hard_bytes_max:
                return 0, self.hard_bytes + more - hard_bytes_max
        added = 0
        for run in ends:
            if not self.explicit.get(run, PinKind.NONE) & kind:
                self.explicit[run] = self.explicit.get(run, PinKind.NONE) | kind
                self._add(run, int(bool(kind & PinKind.SOFT)), int(bool(kind & PinKind.HARD)))
                added += 1
        return added, 0

    def unpin(self, entries: Buffer) -> int:
        """Remove the pins that end in the runs of these families; returns how many."""
        removed = 0
        for entry in u32(entries):
            if self._forest.is_used(entry):
                run = self._forest.run_of[entry]
                pinned = self.explicit.pop(run, PinKind.NONE)
                if pinned:
                    removed += 1
                    self._add(run, -int(bool(pinned & PinKind.SOFT)), -int(bool(pinned & PinKind.HARD)))
        return removed

    # -- told by the forest ----------------------------------------------------------------------------------

    def resized(self, run: int, delta_bytes: int) -> None:
        """The run has so many bytes more."""
        if run in self.counts and self.counts[run][1]:
            self.hard_bytes += delta_bytes

    def split(self, run: int, head: int) -> None:
        """`head` is a new run before `run`: whatever reaches `run` reaches it."""
        counts = self.counts.get(run)
        if counts is not None:
            self.counts[head] = counts[:]

    def removed(self, run: int) -> None:
        """The run is leaving, still linked to its parent: pins that end there are over."""
        if run not in self.counts:
            return
        pinned = self.explicit.pop(run, PinKind.NONE)
        if pinned:
            self._add(run, -int(bool(pinned & PinKind.SOFT)), -int(bool(pinned & PinKind.HARD)))
        if self.counts.pop(run, [0, 0])[1]:  # only where something pinned behind it is held and stays
            self.hard_bytes -= self._forest.run_bytes[run]

    def detach(self, run: int) -> None:
        """The run will get another parent: those before it lose its pins."""
        counts = self.counts.get(run)
        if counts is not None:
            for before in list(self._forest.path(self._forest.parent[run])):
                self._change(before, -counts[0], -counts[1])

    def attach(self, run: int) -> None:
        """The run has its new parent."""
        counts = self.counts.get(run)
        if counts is not None:
            for before in list(self._forest.path(self._forest.parent[run])):
                self._change(before, counts[0], counts[1])

    # -- inside ----------------------------------------------------------------------------------------------

    def _add(self, run: int, soft: int, hard: int) -> None:
        for one in list(self._forest.path(run)):
            self._change(one, soft, hard)
            self._forest.policy.refreshed(one)  # those before it are the warmer ones again

    def _change(self, run: int, soft: int, hard: int) -> None:
        before = self.kind(run)
        counts = self.counts.setdefault(run, [0, 0])
        counts[0] += soft
        counts[1] += hard
        if counts == [0, 0]:
            del self.counts[run]
        after = self.kind(run)
        if before is after:
            return
        forest = self._forest
        size_bytes = forest.run_bytes[run]
        if before is PinKind.HARD:
            self.hard_bytes -= size_bytes
        if after is PinKind.HARD:
            self.hard_bytes += size_bytes
        if after is PinKind.NONE:
            forest.policy.unpinned(run, size_bytes)
        else:
            forest.policy.pinned(run, size_bytes, HARD if after is PinKind.HARD else SOFT)
        self.flag_changes.append((forest.members[run][:], after))
