"""Takes over what an earlier daemon left in the same memory: entries, records, slots and runs under their old numbers.

Called by `Core.step` for `Restore`, once, before anything else. The columns come from the native pass that built the
new index; here they become the core's own, so that a million families cost no step each. Recency is not known any more:
all runs are equally cold, a prefix warmer than what lies behind it. What a client of the earlier daemon may still be
filling is reserved under that client until it is gone.

Invariant: afterwards every family that the index shows is known here, so that nothing has to wait for it.
"""

from __future__ import annotations

from array import array
from itertools import accumulate, pairwise

from kvd.core.books import Books
from kvd.core.columns import grow, u32, u64
from kvd.core.events import NONE, PinKind, Restore
from kvd.core.policy import lists_count
from kvd.errors import InvariantError

RUNS_FROM = lists_count  # number of the first run


def restore(books: Books, event: Restore) -> None:
    """Fill empty books. InvariantError: they are not empty, or the columns do not fit."""
    forest, slots = books.forest, books.slots
    if forest.entries.fresh or books.records.fresh or slots.usable_bytes or books.clients:
        raise InvariantError("a core is restored before anything else happens to it", code="restore")
    if event.entries_end > books.families_max or event.records_end > books.records_max:
        raise InvariantError("more is to be restored than the tables hold", code="restore")
    slots.restore(event.slabs)
    forest.entries.restore(event.entries_end, u32(event.free_entries)[:])
    books.records.restore(event.records_end, u32(event.free_records)[:])
    _entries(books, event)
    _runs(books, event)
    for entry in u32(event.limbo):
        books.limbo[entry] = forest.bytes_of[entry]
    for client, record, place in zip(
        u32(event.ghost_slots), u32(event.ghost_records), u64(event.ghost_places), strict=True
    ):
        records, places = books.quarantine.setdefault(client, (array("I"), array("Q")))
        records.append(record)
        places.append(place)
    forest.policy.capacity_bytes = slots.usable_bytes


def _entries(books: Books, event: Restore) -> None:
    forest = books.forest
    forest.run_of = u32(event.run_of)[:]
    forest.bytes_of = u64(event.bytes_of)[:]
    forest.key8_of = u64(event.key8_of)[:]
    forest.home_of = u32(event.home_of)[:]
    missing = bytes(event.missing_of)
    forest.missing_of = array("B", missing)
    columns = (forest.run_of, forest.bytes_of, forest.key8_of, forest.home_of, forest.missing_of)
    if any(len(column) != event.entries_end for column in columns):
        raise InvariantError(f"columns are not of {event.entries_end} entries", code="restore")
    if missing.count(0) != len(missing):
        forest.partial.update((entry, books.now_ns) for entry, count in enumerate(missing) if count)


def _runs(books: Books, event: Restore) -> None:
    forest = books.forest
    sizes, parents = u32(event.run_sizes), u32(event.run_parents)
    count = len(sizes)
    end = RUNS_FROM + count
    forest.run_numbers.restore(end, array("I"))
    for column in (forest.parent, forest.first_child, forest.next_sibling, forest.previous_sibling):
        grow(column, end, NONE)
    for column in (
        forest.namespace_of, forest.run_bytes, forest.touched_ns, forest.born_ns, forest.request_of, forest.classes_of,
    ):  # fmt: skip
        grow(column, end, 0)
    forest.namespace_of[RUNS_FROM:end] = array("H", bytes(event.run_namespaces))
    forest.run_bytes[RUNS_FROM:end] = u64(event.run_bytes)
    now = array("Q", [books.now_ns]) * count
    forest.touched_ns[RUNS_FROM:end] = now
    forest.born_ns[RUNS_FROM:end] = now
    rows = [forest.class_set_row(_class_set(books, shape)) for shape in event.shapes]
    if len(rows) == 1:
        forest.classes_of[RUNS_FROM:end] = array("H", rows) * count
    else:
        forest.classes_of[RUNS_FROM:end] = array("H", map(rows.__getitem__, u32(event.run_shapes)))
    _members(books, u32(event.members), sizes)
    if parents.count(NONE) != count:
        for run, parent in enumerate(parents, RUNS_FROM):
            if parent != NONE:
                forest.link_child(run, parent)
    forest.policy.restored(count, sum(u64(event.run_bytes)))
    forest.policy.capacity_bytes = books.slots.usable_bytes
    pins = bytes(event.run_pins)
    for kind in (PinKind.HARD, PinKind.SOFT):
        if kind in pins:
            tails = [forest.members[run][-1] for run, pin in enumerate(pins, RUNS_FROM) if pin & 3 == kind]
            forest.pins.pin(array("I", tails), kind, books.slots.total_bytes)


def _class_set(books: Books, shape: tuple[int, ...]) -> int:
    class_set = 0
    for slot_bytes in shape:
        class_set |= 1 << books.slots.class_for(slot_bytes).number
    return class_set


def _members(books: Books, members: array[int], sizes: array[int]) -> None:
    forest = books.forest
    end = RUNS_FROM + len(sizes)
    empty = forest.members[0]
    ends = [0, *accumulate(sizes)]
    rows = [empty] * RUNS_FROM
    rows.extend([members[begin:stop] for begin, stop in pairwise(ends)])
    rows.extend([empty] * (len(forest.parent) - end))
    forest.members[:] = rows  # in place: the policy reads it too
    if ends[-1] != len(members):
        raise InvariantError(f"runs of {ends[-1]} families, {len(members)} are named", code="restore")
    totals = forest.namespaces
    namespaces, run_bytes = forest.namespace_of[RUNS_FROM:end], forest.run_bytes[RUNS_FROM:end]
    if len(sizes) and namespaces.count(namespaces[0]) == len(sizes):
        totals[namespaces[0]] = [len(members), sum(run_bytes)]
        return
    for namespace, size, size_bytes in zip(namespaces, sizes, run_bytes, strict=True):
        total = totals.get(namespace)
        if total is None:
            total = totals[namespace] = [0, 0]
        total[0] += size
        total[1] += size_bytes
