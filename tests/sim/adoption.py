"""A daemon that starts over the memory of one that died: the old index becomes a new one, and columns for the core.

The model's form of the native pass (docs/design/restart.md): same numbers and generations, EVICTING counts as READY, a
PENDING record stays with its writer if that lives, everything else is free. Called once, by a new `Daemon`.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvd.core import events as ev
from kvd.core.restoring import RUNS_FROM
from kvd.core.slots import slot_and_slab

from .memory import MIB, OFFSET_BITS, Entry, Memory, Meta, Record, State
from .processes import Attachment

FRAME_BYTES = 2 * MIB
FRAME_SHIFT = 21


@dataclass(slots=True)
class _Slab:
    slot_bytes: int
    owners: list[int]
    reserved: set[int] = field(default_factory=set)


def adopt(
    old: Meta,
    new: Meta,
    memory: Memory,
    ghosts: dict[int, Attachment],
    parents: Mapping[bytes, bytes | None],
) -> ev.Restore:
    """Fill `new`. `ghosts`: serial -> attachment, whose `slot` is the one it has from now on."""
    for number, row in old.entries.items():
        ready = row.sg[1] in (State.READY, State.EVICTING)
        entry = Entry(number, (row.sg[0], State.READY if ready else State.EMPTY))
        new.entries[number] = entry
        if ready:
            _copy(row, entry, old, new)
    for record in list(old.records.values()):
        if record.pending and record.owner in ghosts:
            record.slot = ghosts[record.owner].slot
            new.records[record.number] = record
        elif record.number not in new.records:
            memory.give(record)
    linked = _links(new)
    _order(new, linked, parents)
    return _columns(new, memory, linked)


def _copy(row: Entry, entry: Entry, old: Meta, new: Meta) -> None:
    entry.key, entry.family_members, entry.members = row.key, row.family_members, dict(row.members)
    entry.namespace, entry.split, entry.flags, entry.unlinked = (
        row.namespace,
        row.split,
        row.flags,
        row.unlinked,
    )
    entry.parent, entry.parent_generation, entry.leases = row.parent, row.parent_generation, row.leases
    entry.unlinked = entry.unlinked or entry.key in new.index
    for record in entry.members.values():
        new.records[record.number] = old.records[record.number]
    if not entry.unlinked:
        new.index[entry.key] = entry.number


def _links(new: Meta) -> dict[int, int]:
    """Entry -> the entry it lies behind, for all that can be found and whose parent is still that family."""
    linked: dict[int, int] = {}
    for number in new.index.values():
        entry = new.entries[number]
        parent = new.entries.get(entry.parent)
        if parent is not None and parent.sg == (entry.parent_generation, State.READY) and not parent.unlinked:
            linked[number] = entry.parent
        else:
            entry.parent, entry.parent_generation = ev.NONE, 0
    return linked


def _order(new: Meta, linked: dict[int, int], parents: Mapping[bytes, bytes | None]) -> None:
    """A time of publication for the check of suffixes: after the prefix if the daemon knows of it, else before."""
    times = new.published_at
    for key in new.index:
        path = [key]
        while (before := parents[path[-1]]) is not None and before in new.index and before not in times:
            path.append(before)
        for one in reversed(path):
            before = parents[one]
            if before is None or before not in new.index:
                times[one] = 0
            else:
                times[one] = times[before] + (1 if linked.get(new.index[one]) == new.index[before] else -1)
    low = min(times.values(), default=0)
    new.published_at = {key: time - low + 1 for key, time in times.items()}
    new.clock = max(new.published_at.values(), default=0)


def _columns(new: Meta, memory: Memory, linked: dict[int, int]) -> ev.Restore:
    used = {number: entry for number, entry in new.entries.items() if entry.sg[1] is State.READY}
    end = max(used, default=-1) + 1
    records_end = max(new.records, default=-1) + 1
    slabs = _slabs(new, memory)
    home = {
        number: at for at, slab in enumerate(slabs.values()) for number in slab.owners if number != ev.NONE
    }
    sizes = {n: sum(record.size_bytes for record in entry.members.values()) for n, entry in used.items()}
    runs = _runs(used, linked)
    shapes = sorted({_shape(entry) for entry in used.values()})
    run_of = {number: run for run, members in enumerate(runs) for number in members}
    ghosts = [record for record in new.records.values() if record.pending]
    heads = [used[members[0]] for members in runs]
    return ev.Restore(
        entries_end=end,
        records_end=records_end,
        free_entries=array("I", [number for number in range(end) if number not in used]),
        free_records=array("I", [number for number in range(records_end) if number not in new.records]),
        run_of=array("I", [run_of[n] + RUNS_FROM if n in run_of else ev.NONE for n in range(end)]),
        home_of=array("I", [home.get(number, 0) for number in range(end)]),
        bytes_of=array("Q", [sizes.get(number, 0) for number in range(end)]),
        key8_of=array(
            "Q", [int.from_bytes(used[n].key[:8], "little") if n in used else 0 for n in range(end)]
        ),
        missing_of=bytes(_missing(used[n]) if n in run_of else 0 for n in range(end)),
        run_sizes=array("I", [len(members) for members in runs]),
        run_parents=array(
            "I", [run_of[linked[m[0]]] + RUNS_FROM if m[0] in linked else ev.NONE for m in runs]
        ),
        run_namespaces=array("H", [head.namespace for head in heads]),
        run_bytes=array("Q", [sum(sizes[number] for number in members) for members in runs]),
        run_shapes=array("I", [shapes.index(_shape(head)) for head in heads]),
        run_pins=bytes(head.flags for head in heads),
        members=array("I", [number for members in runs for number in members]),
        shapes=shapes,
        slabs=[_row(place, slab) for place, slab in slabs.items()],
        limbo=array("I", [number for number, entry in used.items() if entry.unlinked]),
        ghost_slots=array("I", [record.slot for record in ghosts]),
        ghost_records=array("I", [record.number for record in ghosts]),
        ghost_places=array("Q", [record.place for record in ghosts]),
    )


def _shape(entry: Entry) -> tuple[int, ...]:
    return tuple(sorted({record.size_bytes for record in entry.members.values()}))


def _missing(entry: Entry) -> int:
    return sum(member not in entry.members for member in range(entry.family_members))


def _runs(used: dict[int, Entry], linked: dict[int, int]) -> list[list[int]]:
    """Families of one shape and one pin in a row are a run; parents stand before their children."""
    children: dict[int, list[int]] = {}
    for number, parent in linked.items():
        children.setdefault(parent, []).append(number)
    runs: list[list[int]] = []
    heads = [number for number, entry in used.items() if number not in linked and not entry.unlinked]
    for head in heads:
        run, head_entry = [head], used[head]
        while len(behind := children.get(run[-1], [])) == 1:
            entry = used[behind[0]]
            if (_shape(entry), entry.flags) != (_shape(head_entry), head_entry.flags):
                break
            run.append(behind[0])
        heads.extend(children.get(run[-1], []))
        runs.append(run)
    return runs


def _slabs(new: Meta, memory: Memory) -> dict[int, _Slab]:
    """Place of its first byte -> slab, found from the places of records."""
    slabs: dict[int, _Slab] = {}
    owner_of = {
        record.number: entry.number
        for entry in new.entries.values() if entry.sg[1] is State.READY
        for record in entry.members.values()
    }  # fmt: skip
    for record in new.records.values():
        base, frames = _base(record, memory)
        slots = frames * FRAME_BYTES // record.size_bytes
        slab = slabs.setdefault(base, _Slab(record.size_bytes, [ev.NONE] * slots))
        at = (record.place - base) // record.size_bytes
        if record.pending:
            slab.reserved.add(at)
        else:
            slab.owners[at] = owner_of[record.number]
    return slabs


def _base(record: Record, memory: Memory) -> tuple[int, int]:
    """Where the slab of this slot begins, and its frames. Sizes here leave one possibility only."""
    _, frames = slot_and_slab(record.size_bytes, memory.segment_bytes)
    segment_base = record.place >> OFFSET_BITS << OFFSET_BITS
    first = segment_base + (record.place - segment_base) // FRAME_BYTES * FRAME_BYTES
    for back in range(frames):
        base = first - back * FRAME_BYTES
        slot, rest = divmod(record.place - base, record.size_bytes)
        if not rest and slot < frames * FRAME_BYTES // record.size_bytes:
            return base, frames
    raise AssertionError(f"slot {record.place:#x} of {record.size_bytes} B lies in no slab")


def _row(base: int, slab: _Slab) -> tuple[int, int, array[int], array[int], int, int]:
    taken = [owner != ev.NONE or at in slab.reserved for at, owner in enumerate(slab.owners)]
    end = max(at for at, here in enumerate(taken) if here) + 1
    free = array("Q", [base + at * slab.slot_bytes for at in range(end) if not taken[at]])
    owners = array("I", slab.owners)
    return base >> FRAME_SHIFT, slab.slot_bytes, owners, free, len(taken) - end, len(slab.reserved)
