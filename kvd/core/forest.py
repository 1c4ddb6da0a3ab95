"""The forest of runs: which families exist, what lies behind what, and what each of them weighs.

A run is a piece of a chain that was published, touched and will be evicted together: entries from head to
tail. Runs hang behind the tail of their parent run. Families are rows of columns, runs too; nothing per
family is a Python object.

Owned by `Core`, called in its thread only. It keeps the policy and the pins informed of every change of a
run, and counts families and bytes per namespace. Invariants: the runs partition the used entries; every
parent exists; a child is in its parent's list of children, exactly once; there are no cycles; a run that has
children or claims is not a leaf and does not leave on its own.

A claim is a live reservation that writes behind a run, or adds members to it. Claims stay with the tail part
when a run is split, so that what they protect keeps something behind it.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator
from itertools import compress, islice, pairwise, takewhile

from kvd.core.columns import Numbers, grow
from kvd.core.events import NONE
from kvd.core.pins import Pins
from kvd.core.policy import PROBATION, PROTECTED, Policy, lists_count
from kvd.errors import InvariantError

run_families_max = 1 << 14  # a run that grows by publications: to split or to cut one takes a bounded time
touch_work_max = 8192  # runs that one look at the touches of a client moves
path_runs_max = (
    1024  # a path of more runs is not moved as a whole: what that costs grows with every turn of a chat
)
held_work_max = 8192  # runs that are moved because those at their ends are held


class Forest:
    """Columns of families and runs. Sizes are the bytes of the slots that a family occupies."""

    def __init__(self, families_max: int) -> None:
        self.entries = Numbers(0, families_max)
        self.promised_count = 0  # free entries that live reservations have a right to
        # per entry
        self.run_of: array[int] = array("I")
        self.bytes_of: array[int] = array("Q")
        self.key8_of: array[int] = array("Q")
        self.home_of: array[int] = array("I")  # number of a slab it has a slot in
        self.missing_of: array[int] = array("B")  # members not yet published
        # Entries with missing members -> when the latest of those they have was published, or when they were put off;
        # the oldest first. What is written or read behind them says nothing about who completes them.
        self.partial: OrderedDict[int, int] = OrderedDict()
        # per run
        self.run_numbers = Numbers(lists_count, NONE)
        self.members: list[array[int]] = [array("I")] * lists_count
        self.parent: array[int] = array("I")
        self.first_child: array[int] = array("I")
        self.next_sibling: array[int] = array("I")
        self.previous_sibling: array[int] = array("I")
        self.namespace_of: array[int] = array("H")
        self.run_bytes: array[int] = array("Q")
        self.touched_ns: array[int] = array("Q")
        self.born_ns: array[int] = array("Q")
        self.request_of: array[int] = array("Q")
        self.classes_of: array[int] = array("H")  # which size classes it has slots of: a row of _class_sets
        self._class_sets: list[int] = [-1]  # bit c: class number c; row 0 stands for "any"
        self._class_set_rows: dict[int, int] = {-1: 0}
        self.claims: dict[int, int] = {}
        self.namespaces: dict[int, list[int]] = {}  # namespace -> [families, bytes]
        self.splits_count = 0
        self.linked: list[
            tuple[int, int]
        ] = []  # entry, what it lies behind, learned late; the core takes them
        self.orphaned: list[tuple[int, int, int]] = []  # lost key8, key8 and entry: `Leaving` takes them
        self.policy: Policy
        self.pins: Pins

    # -- reading ---------------------------------------------------------------------------------------------

    def is_used(self, entry: int) -> bool:
        """Whether this entry is a family of the forest."""
        return entry < len(self.run_of) and self.run_of[entry] != NONE

    def is_leaf(self, run: int) -> bool:
        """Nothing lies behind the run and nobody writes behind it."""
        return self.first_child[run] == NONE and run not in self.claims

    def path(self, run: int) -> Iterator[int]:
        """The run and those before it, up to the root."""
        parent = self.parent
        while run != NONE:
            yield run
            run = parent[run]

    def short_path(self, run: int) -> list[int] | None:
        """The path of the run, if it has at most `path_runs_max` runs."""
        path = list(islice(self.path(run), path_runs_max + 1))
        return path if len(path) <= path_runs_max else None

    def _tail(self, run: int) -> int:
        return NONE if run == NONE else self.members[run][-1]

    def children(self, run: int) -> Iterator[int]:
        """Runs directly behind this one."""
        child = self.first_child[run]
        while child != NONE:
            yield child
            child = self.next_sibling[child]

    def behind(self, run: int) -> list[int]:
        """All runs behind this one, farthest first, without itself."""
        found = list(self.children(run))
        for one in found:
            found.extend(self.children(one))
        found.reverse()
        return found

    def has_class(self, run: int, class_number: int) -> bool:
        """Whether the run may have slots of this class (a hint: some families of it may have none)."""
        return bool(self._class_sets[self.classes_of[run]] >> class_number & 1)

    def runs(self) -> Iterator[int]:
        """All runs (for checks and listings)."""
        returned = set(self.run_numbers.returned())
        return (run for run in range(lists_count, self.run_numbers.fresh) if run not in returned)

    # -- entries ---------------------------------------------------------------------------------------------

    @property
    def entries_free_count(self) -> int:
        """Entries that are neither used nor promised."""
        return self.entries.free_count - self.promised_count

    def take_entries(self, count: int) -> array[int]:
        """Free entries for a publication; their columns exist from now on."""
        taken = self.entries.take(count)
        fresh = self.entries.fresh
        if fresh > len(self.run_of):
            grow(self.run_of, fresh, NONE)
            for column in (self.bytes_of, self.key8_of, self.home_of, self.missing_of):
                grow(column, fresh, 0)
        return taken

    # -- growing ---------------------------------------------------------------------------------------------

    def append(
        self, behind: int, entries: array[int], key8s: array[int], family_bytes: int, *,
        missing_count: int, namespace: int, request: int, class_set: int, now_ns: int,
    ) -> int:  # fmt: skip
        """Put new families behind the entry `behind` (NONE: a root); returns their run.

        They extend the run they lie behind if the same request wrote all of it, nobody else asked for it yet
        and it is not pinned; otherwise they are a new run. The path to the root becomes the warmest; if
        it has more than `path_runs_max` runs, it stays, and a new run ranks just below the one it lies behind.
        """
        parent = NONE
        row = self.class_set_row(class_set)
        size_bytes = family_bytes * len(entries)
        run = NONE
        if behind != NONE:
            parent = self.ending_at(behind)
            if (
                self.first_child[parent] == NONE
                and self.request_of[parent] == request
                and self.policy.list_of[parent] == PROBATION
                and self.classes_of[parent] == row
                and not self.pins.is_pinned(parent)
                and len(self.members[parent]) + len(entries) <= run_families_max
            ):
                run = parent
        if run == NONE:
            run = self._new_run(parent, entries, namespace, size_bytes, request, row, now_ns)
            if self.short_path(run) is None:
                self.policy.put_below(run, parent)
        else:
            self.members[run].extend(entries)
            self.run_bytes[run] += size_bytes
            self.policy.resized(run, size_bytes)
        run_of, bytes_of, key8_of = self.run_of, self.bytes_of, self.key8_of
        for entry, key8 in zip(entries, key8s, strict=True):
            run_of[entry] = run
            bytes_of[entry] = family_bytes
            key8_of[entry] = key8
        if missing_count:
            for entry in entries:
                self.missing_of[entry] = missing_count
                self.partial[entry] = now_ns
        total = self.namespaces.get(namespace)
        if total is None:
            total = self.namespaces[namespace] = [0, 0]
        total[0] += len(entries)
        total[1] += size_bytes
        self.refresh(run, now_ns)
        return run

    def add_member(self, entry: int, slot_bytes: int, class_set: int, now_ns: int) -> None:
        """One more mandatory member of an existing family is published."""
        self.add_optional(entry, slot_bytes, class_set)
        missing = self.missing_of[entry] - 1
        if missing >= 0:
            self.missing_of[entry] = missing
            if missing:
                self.put_off(entry, now_ns)
            else:
                self.partial.pop(entry, None)

    def put_off(self, entry: int, now_ns: int) -> None:
        """This family with missing members is as if it had got its latest just now."""
        self.partial[entry] = now_ns
        self.partial.move_to_end(entry)

    def add_optional(self, entry: int, slot_bytes: int, class_set: int) -> None:
        """An optional member of an existing family is published: more bytes, as complete as before."""
        run = self.run_of[entry]
        self.bytes_of[entry] += slot_bytes
        self.run_bytes[run] += slot_bytes
        self.namespaces[self.namespace_of[run]][1] += slot_bytes
        self.policy.resized(run, slot_bytes)
        self.pins.resized(run, slot_bytes)
        have = self._class_sets[self.classes_of[run]]
        if have | class_set != have:
            self.classes_of[run] = self.class_set_row(have | class_set)

    def link(self, before: int, entry: int) -> None:
        """The family `entry` lies directly behind `before`, which the forest learns late if it came first.

        It stays where it is if what it lies behind so far would not lie before it any more: who claimed a run that is
        behind it counts on that. So it does if the path is long. Both cost a worse order of eviction, nothing else.
        """
        run = self.run_of[entry]
        members = self.members[run]
        if members[0] != entry:
            return  # the family before it is in its run already, whoever says otherwise
        left = self.parent[run]
        if self._tail(left) == before:
            return
        path = self.short_path(self.run_of[before])
        if path is None or run in path or (left != NONE and left not in path[1:]):
            return  # a client that names keys in a circle gets no circle
        self.linked.append((entry, before))
        parent = self.ending_at(before)
        self.pins.detach(run)
        self._unlink_child(run)
        self.link_child(run, parent)
        self.pins.attach(run)
        protect = self.policy.list_of[run] == PROTECTED  # a prefix is never ranked below its suffix
        for one in self.path(parent):
            if protect:
                self.policy.reused(one, self.run_bytes[one])
            else:
                self.policy.refreshed(one)

    def refresh(self, run: int, now_ns: int) -> None:
        """The run and all before it become the warmest of their lists, the root last; a long path stays."""
        path = self.short_path(run)
        if path is None:
            return
        refreshed, touched_ns = self.policy.refreshed, self.touched_ns
        for one in path:
            touched_ns[one] = now_ns
            refreshed(one)

    def keep(self, runs: list[int]) -> None:
        """These runs are held: they and what they lie behind become the warmest, as far as `held_work_max` goes."""
        work = held_work_max
        seen: set[int] = set()
        paths: list[list[int]] = []
        for run in runs:
            path = list(takewhile(lambda one: one not in seen, islice(self.path(run), work + 1)))
            if len(path) > work:
                continue
            work -= len(path)
            seen.update(path)
            paths.append(path)
        for path in reversed(paths):  # what two share is in the earlier one, and moves after both
            for one in path:
                self.policy.refreshed(one)

    def touch(self, touches: list[tuple[int, int]], now_ns: int) -> int:
        """Requests asked for the chains that end at these entries: (entry, request), the latest last.

        Each run on their paths moves once, suffixes before what they lie behind. The work is bounded: of more than
        `touch_work_max` the earliest, and chains of more runs than that, are left out. Returns how many were.
        """
        work = touch_work_max
        ends: list[tuple[int, int]] = []
        for entry, request in reversed(touches):  # all runs are split before the first one is walked from
            members = self.members[self.run_of[entry]]
            if members[-1] != entry:
                work -= len(members) >> 5
            ends.append((self.ending_at(entry), request))
            if work <= 0:
                break
        parent, request_of = self.parent, self.request_of
        reused: dict[int, bool] = {}
        paths: list[list[int]] = []
        left_out_count = len(touches) - len(ends)
        for run, request in ends:
            path: list[tuple[int, bool]] = []
            another = not request
            while run != NONE and len(path) <= work:
                # Whoever wants a suffix that another wrote wants the prefix too, even if that is its own.
                another = another or request != request_of[run]
                seen = reused.get(run)
                if seen is not None and seen >= another:
                    break
                path.append((run, another))
                run = parent[run]
            if len(path) > work:
                left_out_count += 1
                continue
            work -= len(path)
            paths.append([run for run, _ in path if run not in reused])
            reused.update(path)
        for fresh in reversed(paths):
            for run in fresh:
                self.touched_ns[run] = now_ns
                if reused[run]:
                    self.policy.reused(run, self.run_bytes[run])
                else:
                    self.policy.refreshed(run)
        return left_out_count

    # -- shrinking -------------------------------------------------------------------------------------------

    def cut(self, run: int, count: int) -> int:
        """The last `count` families of the run have left, and the run with its last; returns their bytes."""
        if self.first_child[run] != NONE:  # held, or they would have left before
            self._orphan_children(run, self.key8_of[self.members[run][-1]])
        return self._cut(run, count)

    def _cut(self, run: int, count: int) -> int:
        members = self.members[run]
        run_of = self.run_of
        if count == len(members):
            leaving = members
            size_bytes = self.run_bytes[run]
            self._remove(run)
        else:
            leaving = members[-count:]
            size_bytes = sum(map(self.bytes_of.__getitem__, leaving))
            del members[-count:]
            self._resize(run, -size_bytes)
        for entry in leaving:
            run_of[entry] = NONE
        if self.partial:
            for entry in leaving:
                if entry in self.partial:
                    del self.partial[entry]
                    self.missing_of[entry] = 0
        total = self.namespaces[self.namespace_of[run]]
        total[0] -= count
        total[1] -= size_bytes
        return size_bytes

    def cut_around(self, run: int, count: int, staying: set[int]) -> list[int]:
        """As `cut`, but these entries stay. Returns the runs they are in now, none with a hole.

        What has lost the family before it is not reachable by its prefix: it becomes a root, so that it does not keep
        those before the hole.
        """
        members = self.members[run]
        edge = len(members) - count
        stays = [at < edge or entry in staying for at, entry in enumerate(members)]
        if not any(stays[edge:]):
            self.cut(run, count)
            return []
        begins = [at for at, here in enumerate(stays) if here and not (at and stays[at - 1])]
        lost = {members[at]: self.key8_of[members[at - 1]] for at in begins if at}
        if not stays[-1]:
            self._orphan_children(run, self.key8_of[members[-1]])
        # What leaves is moved to the end, so that one cut removes it; then the pieces are split off in front.
        order: array[int] = array("I", compress(members, stays))
        lengths = [sum(stays[begin:end]) for begin, end in pairwise((*begins, len(members)))]
        order.extend(entry for entry, here in zip(members, stays, strict=True) if not here)
        self.members[run] = order
        if not all(stays):
            self._cut(run, stays.count(False))  # what lies behind the run stays behind it if its tail does
        pieces = [self.split(run, length) for length in lengths[:-1]]
        pieces.append(run)
        for piece in pieces:
            first = self.members[piece][0]
            if first in lost:
                self._orphan(piece, lost[first])
        return [piece for piece in pieces if not staying.isdisjoint(self.members[piece])]

    def split(self, run: int, count: int) -> int:
        """Make the first `count` families a new run (returned); the rest keeps number, rank and children."""
        members = self.members[run]
        if not 0 < count < len(members):
            raise InvariantError(
                f"a run of {len(members)} families cannot be split after {count}", code="split"
            )
        head_members = members[:count]
        del members[:count]
        head_bytes = sum(map(self.bytes_of.__getitem__, head_members))
        head = self.run_numbers.take_one()
        self._grow_runs()
        self._set_run(
            head, head_members, self.namespace_of[run], head_bytes, self.request_of[run],
            self.classes_of[run], self.born_ns[run], self.touched_ns[run],
        )  # fmt: skip
        self.run_bytes[run] -= head_bytes
        before = self.parent[run]
        self._unlink_child(run)
        self.link_child(head, before)
        self.link_child(run, head)
        for entry in head_members:
            self.run_of[entry] = head
        self.policy.split(run, head, head_bytes)
        self.pins.split(run, head)
        self.splits_count += 1
        return head

    def ending_at(self, entry: int) -> int:
        """The run whose tail is this entry, split off if it was in the middle."""
        run = self.run_of[entry]
        members = self.members[run]
        if members[-1] == entry:
            return run
        return self.split(run, members.index(entry) + 1)

    # -- claims ----------------------------------------------------------------------------------------------

    def claim(self, run: int) -> None:
        """A live reservation needs this run, and so everything before it, to stay."""
        self.claims[run] = self.claims.get(run, 0) + 1

    def unclaim(self, run: int) -> None:
        """That reservation is over."""
        left = self.claims[run] - 1
        if left:
            self.claims[run] = left
        else:
            del self.claims[run]

    # -- inside ----------------------------------------------------------------------------------------------

    def _new_run(
        self,
        parent: int,
        entries: array[int],
        namespace: int,
        size_bytes: int,
        request: int,
        row: int,
        now_ns: int,
    ) -> int:
        run = self.run_numbers.take_one()
        self._grow_runs()
        self._set_run(run, entries[:], namespace, size_bytes, request, row, now_ns, now_ns)
        self.link_child(run, parent)
        self.policy.added(run, size_bytes)
        return run

    def _grow_runs(self) -> None:
        rows = self.run_numbers.fresh
        if rows <= len(self.parent):
            return
        for column in (self.parent, self.first_child, self.next_sibling, self.previous_sibling):
            grow(column, rows, NONE)
        for column in (
            self.namespace_of, self.run_bytes, self.touched_ns, self.born_ns, self.request_of,
            self.classes_of,
        ):  # fmt: skip
            grow(column, rows, 0)
        self.members.extend([self.members[0]] * (len(self.parent) - len(self.members)))

    def _set_run(
        self, run: int, members: array[int], namespace: int, size_bytes: int, request: int, row: int, born_ns:
        int, touched_ns: int,
    ) -> None:  # fmt: skip
        self.members[run] = members
        self.namespace_of[run] = namespace
        self.run_bytes[run] = size_bytes
        self.request_of[run] = request
        self.classes_of[run] = row
        self.born_ns[run] = born_ns
        self.touched_ns[run] = touched_ns
        self.first_child[run] = NONE

    def _remove(self, run: int) -> None:
        self._unlink_child(run)
        self.pins.removed(run)
        self.policy.removed(run, self.run_bytes[run])
        self.claims.pop(run, None)
        self.members[run] = self.members[0]
        self.run_numbers.give_one(run)

    def _orphan_children(self, run: int, key8: int) -> None:
        for child in list(self.children(run)):
            self._orphan(child, key8)

    def _orphan(self, run: int, key8: int) -> None:
        """The family before this run, whose identity begins with `key8`, has left without it."""
        self.pins.detach(run)
        self._unlink_child(run)
        self.link_child(run, NONE)
        first = self.members[run][0]
        self.orphaned.append((key8, self.key8_of[first], first))

    def _resize(self, run: int, delta_bytes: int) -> None:
        self.run_bytes[run] += delta_bytes
        self.policy.resized(run, delta_bytes)
        self.pins.resized(run, delta_bytes)

    def link_child(self, run: int, parent: int) -> None:
        """Put a run that has no parent behind this one (NONE: it is a root)."""
        self.parent[run] = parent
        self.previous_sibling[run] = NONE
        if parent == NONE:
            self.next_sibling[run] = NONE
            return
        first = self.first_child[parent]
        self.next_sibling[run] = first
        if first != NONE:
            self.previous_sibling[first] = run
        self.first_child[parent] = run

    def _unlink_child(self, run: int) -> None:
        parent = self.parent[run]
        if parent == NONE:
            return
        before, after = self.previous_sibling[run], self.next_sibling[run]
        if before == NONE:
            self.first_child[parent] = after
        else:
            self.next_sibling[before] = after
        if after != NONE:
            self.previous_sibling[after] = before

    def class_set_row(self, class_set: int) -> int:
        """The row of `_class_sets` that holds these classes."""
        row = self._class_set_rows.get(class_set)
        if row is None:
            if len(self._class_sets) > 0xFFFF:
                return 0
            row = self._class_set_rows[class_set] = len(self._class_sets)
            self._class_sets.append(class_set)
        return row
