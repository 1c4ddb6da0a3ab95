"""Which runs will be missed least: rankings of runs that propose victims and never free anything.

A policy sees runs only. It keeps each run in one of four lists, coldest first:

    PROBATION   new, or fallen back
    PROTECTED   asked for by another request than the one that wrote it (Slru only)
    SOFT        pinned softly: proposed after all others
    HARD        pinned hard: never proposed

Called by `Forest`, `Pins` and `Space` in the core's thread. Invariants: every run is in exactly one list;
`list_bytes` adds up. A prefix is moved after its suffix whenever a path is touched, so that within a list it
is the warmer of the two, and the coldest run of a list is one that nothing lies behind, but for runs that
something protects.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final, Protocol

from kvd.core.columns import grow
from kvd.errors import ConfigError
from kvd.plan.value import value_per_byte

PROBATION: Final = 0
PROTECTED: Final = 1
SOFT: Final = 2
HARD: Final = 3
lists_count: Final = 4
list_names: Final = ("probation", "protected", "soft", "hard")
policy_names: Final = ("slru", "lru", "value")

value_window_runs: Final = 64  # so many of the coldest are weighed against each other
reuses_unseen: Final = 0.25  # expected of a run that nobody asked for yet: most are asked for never
reuses_counted_max: Final = 65_535


class Policy(Protocol):
    """What the core asks of a ranking. Runs are numbered from `lists_count` on."""

    list_of: array[int]
    list_bytes: list[int]
    capacity_bytes: int  # of the whole pool; the core sets it as segments become ready

    def added(self, run: int, size_bytes: int) -> None:
        """A new run, the warmest of those that nobody asked for yet."""

    def put_below(self, run: int, parent: int) -> None:
        """A new run ranks just below the one it lies behind, if they are in one list."""

    def restored(self, runs_count: int, size_bytes: int) -> None:
        """The first runs, so many, all as warm as each other but for their order: who comes later is colder."""

    def resized(self, run: int, delta_bytes: int) -> None:
        """The run has so many bytes more (or fewer, if negative)."""

    def split(self, run: int, head: int, head_bytes: int) -> None:
        """The first `head_bytes` of `run` are a run `head` now, just warmer than the rest."""

    def removed(self, run: int, size_bytes: int) -> None:
        """The run is gone."""

    def refreshed(self, run: int) -> None:
        """The run becomes the warmest of its list: written behind, held, or asked for by its own request."""

    def reused(self, run: int, size_bytes: int) -> None:
        """Another request asked for the run."""

    def pinned(self, run: int, size_bytes: int, to_list: int) -> None:
        """The run goes to SOFT or HARD."""

    def unpinned(self, run: int, size_bytes: int) -> None:
        """The run is not pinned any more; it ranks no lower than what lies behind it."""

    def victims(self) -> Iterator[int]:
        """All runs but those pinned hard, coldest first. Not to be used on after a change."""

    def runs(self, in_list: int) -> Iterator[int]:
        """The runs of one list, coldest first."""


class Lru:
    """The run that was not asked for longest leaves first."""

    _unpinned_list = PROBATION

    def __init__(self, capacity_bytes: int = 0) -> None:
        self.capacity_bytes = capacity_bytes
        self.list_bytes = [0] * lists_count
        # A circle per list through its head (rows 0 … 3): warmer[head] is the coldest run, colder[head] the
        # warmest.
        self.warmer: array[int] = array("I", range(lists_count))
        self.colder: array[int] = array("I", range(lists_count))
        self.list_of: array[int] = array("B", range(lists_count))

    def added(self, run: int, size_bytes: int) -> None:
        if run >= len(self.warmer):
            for column in (self.warmer, self.colder, self.list_of):
                grow(column, run + 1, 0)
        self.list_of[run] = PROBATION
        self.list_bytes[PROBATION] += size_bytes
        self._insert(run, self.colder[PROBATION])

    def put_below(self, run: int, parent: int) -> None:
        if self.list_of[run] == self.list_of[parent]:
            self._unlink(run)
            self._insert(run, self.colder[parent])

    def restored(self, runs_count: int, size_bytes: int) -> None:
        first, end = lists_count, lists_count + runs_count
        if not runs_count:
            return
        # first is the warmest, the last one the coldest: columns, since there may be a million of them.
        self.warmer[first:end] = array("I", [PROBATION]) + array("I", range(first, end - 1))
        self.colder[first:end] = array("I", range(first + 1, end)) + array("I", [PROBATION])
        self.list_of[first:end] = array("B", bytes([PROBATION])) * runs_count
        self.warmer[PROBATION], self.colder[PROBATION] = end - 1, first
        self.list_bytes[PROBATION] = size_bytes

    def resized(self, run: int, delta_bytes: int) -> None:
        self.list_bytes[self.list_of[run]] += delta_bytes

    def split(self, run: int, head: int, head_bytes: int) -> None:
        self.added(head, 0)
        self._unlink(head)
        self.list_of[head] = self.list_of[run]
        self._insert(head, run)

    def removed(self, run: int, size_bytes: int) -> None:
        self.list_bytes[self.list_of[run]] -= size_bytes
        self._unlink(run)

    def refreshed(self, run: int) -> None:
        # Inlined: this runs once for every run on a path, on every touch and publication.
        warmer, colder = self.warmer, self.colder
        head = self.list_of[run]
        up, down = warmer[run], colder[run]
        warmer[down] = up
        colder[up] = down
        last = colder[head]
        warmer[last] = run
        colder[run] = last
        warmer[run] = head
        colder[head] = run

    def reused(self, run: int, size_bytes: int) -> None:
        self.refreshed(run)

    def pinned(self, run: int, size_bytes: int, to_list: int) -> None:
        self._move(run, size_bytes, to_list)

    def unpinned(self, run: int, size_bytes: int) -> None:
        self._move(run, size_bytes, self._unpinned_list)

    def victims(self) -> Iterator[int]:
        for head in (PROBATION, PROTECTED, SOFT):
            yield from self.runs(head)

    def runs(self, in_list: int) -> Iterator[int]:
        warmer = self.warmer
        run = warmer[in_list]
        while run != in_list:
            yield run
            run = warmer[run]

    def _move(self, run: int, size_bytes: int, to_list: int) -> None:
        self._unlink(run)
        self.list_bytes[self.list_of[run]] -= size_bytes
        self.list_bytes[to_list] += size_bytes
        self.list_of[run] = to_list
        self._insert(run, self.colder[to_list])

    def _insert(self, run: int, after: int) -> None:
        up = self.warmer[after]
        self.warmer[after] = run
        self.colder[run] = after
        self.warmer[run] = up
        self.colder[up] = run

    def _unlink(self, run: int) -> None:
        up, down = self.warmer[run], self.colder[run]
        self.warmer[down] = up
        self.colder[up] = down


class Slru(Lru):
    """Runs that another request asked for are protected, up to a share of the pool; the coldest fall back.

    Written once and never asked for again is the common case: such runs leave from probation and do not wash
    out the rest.
    """

    _unpinned_list = PROTECTED

    def __init__(self, protected_share: float, capacity_bytes: int = 0) -> None:
        super().__init__(capacity_bytes)
        self.protected_share = protected_share
        self._size_of: array[int] | None = None

    def sizes_are(self, bytes_of_run: array[int]) -> None:
        """Where to read the size of a run that falls back (the forest's own column)."""
        self._size_of = bytes_of_run

    def reused(self, run: int, size_bytes: int) -> None:
        if self.list_of[run] != PROBATION:
            self.refreshed(run)
            return
        self._move(run, size_bytes, PROTECTED)
        limit = self.capacity_bytes * self.protected_share
        sizes = self._size_of
        while self.list_bytes[PROTECTED] > limit and sizes is not None:
            coldest = self.warmer[PROTECTED]
            self._move(coldest, sizes[coldest], PROBATION)
            self._fell_back(coldest)

    def _fell_back(self, run: int) -> None:
        """The run is in PROBATION again."""


class Value(Slru):
    """As Slru, but of so many coldest runs of a list the one whose bytes win least leaves first.

    A heuristic (`kvd.plan.value`). What a run wins is `expected reuses x chunks`: a chunk is taken to cost the same
    compute whatever its model, since the core knows no times; so a model whose chunks are small is worth more by the
    byte. Reuses to come are guessed from those that were, which count half each time the run falls back.
    """

    def __init__(self, protected_share: float, capacity_bytes: int = 0) -> None:
        super().__init__(protected_share, capacity_bytes)
        self.reuses_of: array[int] = array("H", bytes(2 * lists_count))
        self._members_of: Sequence[Sequence[int]] = ()

    def members_are(self, members_of_run: Sequence[Sequence[int]]) -> None:
        """Where to read the families of a run (the forest's own column)."""
        self._members_of = members_of_run

    def added(self, run: int, size_bytes: int) -> None:
        super().added(run, size_bytes)
        if run >= len(self.reuses_of):
            grow(self.reuses_of, run + 1, 0)
        self.reuses_of[run] = 0

    def restored(self, runs_count: int, size_bytes: int) -> None:
        super().restored(runs_count, size_bytes)
        grow(self.reuses_of, lists_count + runs_count, 0)

    def split(self, run: int, head: int, head_bytes: int) -> None:
        super().split(run, head, head_bytes)
        self.reuses_of[head] = self.reuses_of[run]

    def reused(self, run: int, size_bytes: int) -> None:
        self.reuses_of[run] = min(self.reuses_of[run] + 1, reuses_counted_max)
        super().reused(run, size_bytes)

    def _fell_back(self, run: int) -> None:
        self.reuses_of[run] //= 2

    def victims(self) -> Iterator[int]:
        for head in (PROBATION, PROTECTED, SOFT):
            colder_first = self.runs(head)
            while window := list(islice(colder_first, value_window_runs)):
                yield from sorted(window, key=self._value)  # stable: of equals the coldest

    def _value(self, run: int) -> float:
        assert self._size_of is not None
        size_bytes, chunks = self._size_of[run], len(self._members_of[run])
        return value_per_byte(max(size_bytes, 1), self.reuses_of[run] + reuses_unseen, chunks)


def make(
    name: str, protected_share: float, bytes_of_run: array[int], members_of_run: Sequence[Sequence[int]]
) -> Policy:
    """The policy of this name; ConfigError if there is none."""
    match name:
        case "lru":
            return Lru()
        case "slru":
            slru = Slru(protected_share)
            slru.sizes_are(bytes_of_run)
            return slru
        case "value":
            value = Value(protected_share)
            value.sizes_are(bytes_of_run)
            value.members_are(members_of_run)
            return value
    raise ConfigError(
        f"policy '{name}' is not known: use {', '.join(policy_names)}", code="policy", policy=name
    )
