"""Makes room: takes what is free, and says which families leave when that is not enough.

Owned by `Core`. `Space` proposes plans and allocates; what leaves is carried out by `Leaving`. A `Want` is
one reservation on its way to its slots. Each plan either frees something or finds all it named held, and what
was found held is not named again for the same want: so a want ends after a bounded number of plans.

Order, for the slots of each size class: free slots; free frames; the coldest run, if it has slots of that
class; else the cheapest window of frames around the coldest family. Entries and records are found by the
coldest runs.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from kvd.core.columns import Numbers
from kvd.core.events import NONE, Reason
from kvd.core.forest import Forest
from kvd.core.policy import HARD
from kvd.core.reservations import Reservations, Shape
from kvd.core.slots import SizeClass, Slab, Slots

# What may leave beyond what is wanted, to make fewer and larger evictions: never more than this part of all
# families.
surplus_divisor = 128
windows_tried_max = 256  # around so many slabs a window is looked for, for one want
# So many runs are passed over in one plan that have no slots of the class and around which no window is looked for any
# more: a turn stays short, whatever lies in the pool.
passed_over_max = 4096
partial_families_max = 4096  # with missing members: looked at, and leaving, in one turn
abandoned_members_max = 1 << 17  # of runs that are looked through for families to withdraw, in one turn
abandoned_cuts_max = 1024  # pieces of runs that such families fill
slabs_looked_max = 256  # slabs of the class whose families are asked one by one, for one want


@dataclass(slots=True)
class Plan:
    """Families that are to leave together, and the tail cuts of runs that this means, suffixes first."""

    entries: array[int]
    cuts: list[tuple[int, int]]  # run, how many families from its tail
    reason: Reason
    withdraw: bool = False


class Want:
    """What one reservation needs, and the places found for it so far, one column per member."""

    __slots__ = ("counts", "entries_count", "records_count", "shape", "size_bytes", "taken")

    def __init__(self, shape: Shape, entries_count: int, records_count: int, counts: list[int]) -> None:
        self.shape = shape
        self.entries_count = entries_count
        self.records_count = records_count
        self.counts = counts  # items, by member
        self.size_bytes = (
            counts[0] * shape.family_bytes
            if len(counts) == 1
            else sum(map(int.__mul__, counts, shape.slot_bytes))
        )
        self.taken: list[array[int]] = []


@dataclass(slots=True)
class Search:
    """What was tried to make room for one want, so that nothing is tried twice."""

    held: set[int] = field(default_factory=set)  # runs
    windowless: set[int] = field(default_factory=set)  # runs around which there is no window
    avoid: set[int] = field(default_factory=set)  # slabs that cannot be cleared
    hopeless: set[int] = field(default_factory=set)  # slabs around which there is no window
    barren: set[int] = field(default_factory=set)  # slabs of the class none of whose families can leave
    blocked: set[int] = field(default_factory=set)  # runs behind which something must stay
    no_partial: bool = False  # no family with missing members can leave
    passed_over: bool = False  # among the coldest runs there are none with slots of the class
    families: int = 0  # that left
    size_bytes: int = 0

    def forget(self, runs: Iterable[int]) -> None:
        """These numbers may stand for other runs from now on."""
        numbers = set(runs)
        self.held -= numbers
        self.windowless -= numbers
        self.blocked -= numbers


class Short(NamedTuple):
    """What is missing to a want."""

    reason: Reason
    size_class: SizeClass | None  # None: any will do
    missing_count: int


class Space:
    """Room for entries, records and slots."""

    def __init__(
        self, forest: Forest, slots: Slots, records: Numbers, reservations: Reservations, batch_families: int,
        partial_grace_ns: int,
    ) -> None:  # fmt: skip
        self._forest = forest
        self._slots = slots
        self._records = records
        self._reservations = reservations
        self._batch_families = batch_families
        self._partial_grace_ns = partial_grace_ns

    def take(self, want: Want) -> Short | None:
        """Take what is free. None: that is all the want needs."""
        short = want.entries_count - self._forest.entries_free_count
        if short > 0:
            return Short(Reason.ENTRIES, None, short)
        short = want.records_count - self._records.free_count
        if short > 0:
            return Short(Reason.RECORDS, None, short)
        taken = want.taken
        for at, (size_class, count) in enumerate(zip(want.shape.classes, want.counts, strict=True)):
            if at == len(taken):
                taken.append(self._slots.take(size_class, count))
            elif len(taken[at]) < count:
                taken[at].extend(self._slots.take(size_class, count - len(taken[at])))
            if len(taken[at]) < count:
                return Short(Reason.SPACE, size_class, count - len(taken[at]))
        return None

    def give_up(self, want: Want) -> None:
        """Give back what a want that cannot be satisfied had taken."""
        for places in want.taken:
            self._slots.give(places, reserved=True)
        want.taken.clear()

    def plan(self, search: Search, short: Short, now_ns: int) -> Plan | None:
        """Who leaves next, so that what is short comes free. None: nobody can."""
        reason, size_class, count = short
        forest = self._forest
        if forest.partial and not search.no_partial:
            plan = self.plan_partial(search, now_ns - self._partial_grace_ns)
            if plan is not None:
                return plan
            search.no_partial = True
        surplus = min(self._batch_families, forest.entries.used_count // surplus_divisor)
        families_wanted = max(count, surplus)
        planned: dict[int, int] = {}
        chosen: array[int] = array("I")
        passed_over_count = 0
        for run in () if search.passed_over else forest.policy.victims():
            if run in search.held or run in search.windowless or not self._may_leave(run, planned):
                continue
            if size_class is not None and not forest.has_class(run, size_class.number):
                if planned:
                    break  # first what is colder than this one
                home = self._slots.slab(forest.home_of[forest.members[run][-1]])
                exhausted = len(search.hopeless) >= windows_tried_max
                if exhausted or home.number in search.hopeless:
                    passed_over_count += 1
                    if passed_over_count >= passed_over_max or (exhausted and not size_class.published_count):
                        search.passed_over = True
                        break
                    continue
                window = self._plan_window(search, home, size_class)
                if window is not None:
                    return window
                search.windowless.add(run)
                continue
            members = forest.members[run]
            some = min(len(members), families_wanted - len(chosen))
            planned[run] = some
            chosen.extend(members[-some:])
            if len(chosen) >= families_wanted:
                break
        if not chosen:
            if size_class is None:
                return None
            return self._plan_any_window(search, size_class) or self._plan_of_class(search, size_class)
        return Plan(chosen, list(planned.items()), reason)

    def subtree(self, starts: dict[int, int], reason: Reason) -> Plan:
        """These runs from these positions on, and everything behind them."""
        forest = self._forest
        cuts = {run: len(forest.members[run]) - start for run, start in starts.items()}
        pending = list(starts)
        whole: set[int] = set()  # of those that lie behind another
        for run in pending:
            for child in forest.children(run):
                if child not in whole:
                    whole.add(child)
                    pending.append(child)
                    cuts[child] = len(forest.members[child])
        ordered = [(run, cuts[run]) for run in self._suffixes_first(cuts)]
        entries: array[int] = array("I")
        for run, count in ordered:
            entries.extend(forest.members[run][-count:])
        return Plan(entries, ordered, reason)

    def plan_partial(self, search: Search, before_ns: int) -> Plan | None:
        """A family that was never completed, that nobody is writing the rest of, and that got its latest member before
        `before_ns`; and all behind it, or the farthest of that.
        """
        forest = self._forest
        is_pending = self._reservations.is_pending
        for entry, since_ns in islice(forest.partial.items(), partial_families_max):
            if since_ns > before_ns:
                break  # the oldest stand first; a rank publishes its member a moment after another
            run = forest.run_of[entry]
            if run in search.held or run in search.blocked:
                continue
            if is_pending(forest.key8_of[entry]) or forest.policy.list_of[run] == HARD:
                continue
            plan = self.subtree({run: forest.members[run].index(entry)}, Reason.PARTIAL)
            if not self._is_blocked(search, plan):
                return _farthest(plan, partial_families_max)
            search.blocked.add(run)  # whichever of its families they begin with, plans have the same runs
        return None

    def plan_abandoned(self, before_ns: int, now_ns: int) -> Plan | None:
        """Families that got their latest member before `before_ns` and that nobody completes; to be withdrawn.

        They alone, for what lies behind them may be another's. Those that must stay are put off.
        """
        forest = self._forest
        chosen: dict[int, set[int]] = {}
        put_off: list[int] = []
        members_count = 0  # of the runs they are in, which are looked through
        for entry, since_ns in islice(forest.partial.items(), partial_families_max):
            if since_ns > before_ns:
                break
            run = forest.run_of[entry]
            if self._reservations.is_pending(forest.key8_of[entry]) or forest.policy.list_of[run] == HARD:
                put_off.append(entry)
            elif run in chosen:
                chosen[run].add(entry)
            elif members_count < abandoned_members_max:
                chosen[run] = {entry}
                members_count += len(forest.members[run])
            else:
                break
        for entry in put_off:
            forest.put_off(entry, now_ns)
        entries: array[int] = array("I")
        cuts: list[tuple[int, int]] = []
        for run, leaving in chosen.items():
            if len(cuts) >= abandoned_cuts_max:
                break  # the rest stands first the next time
            members = forest.members[run][:]
            leaves = bytes(map(leaving.__contains__, members)) + b"\0"
            end = 0
            while len(cuts) < abandoned_cuts_max and (begin := leaves.find(1, end)) >= 0:
                end = leaves.find(0, begin)
                cuts.append((forest.ending_at(members[end - 1]), end - begin))
                entries.extend(members[begin:end])
        cuts.reverse()  # a prefix is mostly the older one: what lies behind it leaves first, and is no orphan
        return Plan(entries, cuts, Reason.PARTIAL) if cuts else None

    # -- inside ----------------------------------------------------------------------------------------------

    def _may_leave(self, run: int, planned: dict[int, int]) -> bool:
        """Nothing stays behind the run: no claims, and no children but those that leave with this plan."""
        forest = self._forest
        if run in forest.claims:
            return False
        return all(planned.get(child) == len(forest.members[child]) for child in forest.children(run))

    def _is_blocked(self, search: Search, plan: Plan) -> bool:
        forest = self._forest
        list_of, claims = forest.policy.list_of, forest.claims
        return any(run in claims or run in search.held or list_of[run] == HARD for run, _ in plan.cuts)

    def _suffixes_first(self, runs: Iterable[int]) -> list[int]:
        """These runs, each after all of them that lie behind it. Looks once at each run, and at each before one."""
        parent = self._forest.parent
        depth = {NONE: 0}
        for run in runs:
            path: list[int] = []
            while run not in depth:
                path.append(run)
                run = parent[run]
            at = depth[run]
            while path:
                at += 1
                depth[path.pop()] = at
        return sorted(runs, key=lambda run: -depth[run])

    def _plan_of_class(self, search: Search, size_class: SizeClass) -> Plan | None:
        """When the coldest runs have no slots of the class: any family that has, and what lies behind it."""
        forest = self._forest
        if not size_class.published_count:
            return None
        for slab in self._slots.slabs():
            if slab.size_class is not size_class or slab.number in search.barren or not slab.published_count:
                continue
            if len(search.barren) >= slabs_looked_max:
                break
            for entry in slab.families():
                if not forest.is_used(entry):
                    continue
                run = forest.run_of[entry]
                plan = self.subtree({run: forest.members[run].index(entry)}, Reason.SPACE)
                if not self._is_blocked(search, plan):
                    return plan
            search.barren.add(slab.number)
        return None

    def _plan_any_window(self, search: Search, size_class: SizeClass) -> Plan | None:
        """The last resort: a window anywhere. A cold family may have slots elsewhere than at its home."""
        if len(search.hopeless) >= windows_tried_max:
            return None
        for home in self._slots.slabs():
            plan = self._plan_window(search, home, size_class)
            if plan is not None:
                return plan
            if len(search.hopeless) >= windows_tried_max:
                break
        return None

    def _plan_window(self, search: Search, home: Slab, size_class: SizeClass) -> Plan | None:
        """Clear the cheapest window of frames around this slab, for a slab of the class."""
        if home.number in search.hopeless or len(search.hopeless) >= windows_tried_max:
            return None
        while home.number not in search.avoid:
            slabs = self._cheapest_window(search, home, size_class.slab_frames)
            if slabs is None:
                break
            plan = self._clearing(search, slabs)
            if plan is not None:
                return plan
        search.hopeless.add(home.number)
        return None

    def _cheapest_window(self, search: Search, home: Slab, frames_count: int) -> list[Slab] | None:
        """Slabs of the window with the fewest published bytes of those around `home` that could go."""
        blocks = self._around(search, home, frames_count)
        best: list[Slab] | None = None
        best_bytes = 0
        begin, frames, size_bytes = 0, 0, 0
        for end, (_, count, slab) in enumerate(blocks):
            frames += count
            size_bytes += _published_bytes(slab)
            while frames - blocks[begin][1] >= frames_count:
                frames -= blocks[begin][1]
                size_bytes -= _published_bytes(blocks[begin][2])
                begin += 1
            if frames >= frames_count:
                window = [block[2] for block in blocks[begin : end + 1] if block[2] is not None]
                if home in window and (best is None or size_bytes < best_bytes):
                    best, best_bytes = window, size_bytes
        return best

    def _around(self, search: Search, home: Slab, frames_count: int) -> list[tuple[int, int, Slab | None]]:
        """Neighbouring blocks around `home` that could go: first frame, frames, slab (None: free)."""
        if home.reserved_count:
            return []
        frames, slab_at = self._slots.frames, self._slots.slab_at
        home_frames = home.size_class.slab_frames
        reach = frames_count - home_frames
        left: list[tuple[int, int, Slab | None]] = []
        at = home.frame
        while home.frame - at < reach:
            slab = slab_at.get(at - 1)
            count = slab.size_class.slab_frames if slab is not None else frames.ending.get(at, 0)
            if not count or (slab is not None and (slab.reserved_count or slab.number in search.avoid)):
                break
            at -= count
            left.append((at, count, slab))
        left.reverse()
        right: list[tuple[int, int, Slab | None]] = []
        at = begin = home.frame + home_frames
        while at - begin < reach:
            slab = slab_at.get(at)
            count = slab.size_class.slab_frames if slab is not None else frames.beginning.get(at, 0)
            if not count or (slab is not None and (slab.reserved_count or slab.number in search.avoid)):
                break
            right.append((at, count, slab))
            at += count
        return [*left, (home.frame, home_frames, home), *right]

    def _clearing(self, search: Search, slabs: list[Slab]) -> Plan | None:
        """All families of these slabs and what lies behind them; None (and a slab to avoid) if one must stay."""
        forest = self._forest
        starts: dict[int, int] = {}
        for slab in slabs:
            families = slab.families()
            by_run: dict[int, list[int]] = {}
            for entry in families:
                if not forest.is_used(entry):  # in limbo
                    search.avoid.add(slab.number)
                    return None
                by_run.setdefault(forest.run_of[entry], []).append(entry)
            mine: dict[int, int] = {}
            for run, entries in by_run.items():
                wanted = set(entries)
                mine[run] = next(at for at, entry in enumerate(forest.members[run]) if entry in wanted)
            if self._is_blocked(search, self.subtree(mine, Reason.WINDOW)):
                search.avoid.add(slab.number)
                return None
            for run, at in mine.items():
                starts[run] = min(at, starts.get(run, at))
        return self.subtree(starts, Reason.WINDOW)


def _published_bytes(slab: Slab | None) -> int:
    return 0 if slab is None else slab.published_count * slab.size_class.slot_bytes


def _farthest(plan: Plan, families_max: int) -> Plan:
    """The part of a plan that leaves first, if it is larger than that."""
    if len(plan.entries) <= families_max:
        return plan
    entries: array[int] = array("I")
    cuts: list[tuple[int, int]] = []
    at = 0
    for run, count in plan.cuts:
        some = min(count, families_max - len(entries))
        if not some:
            break
        cuts.append((run, some))
        at += count
        entries.extend(plan.entries[at - some : at])
    return Plan(entries, cuts, plan.reason)
