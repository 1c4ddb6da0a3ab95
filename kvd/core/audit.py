"""Every invariant of the core, checked over all of its books. Its cost grows with what is stored."""

from __future__ import annotations

from collections import Counter

from kvd.core.books import Books
from kvd.core.events import NONE, PinKind
from kvd.core.forest import Forest
from kvd.core.policy import HARD, PROBATION, PROTECTED, SOFT, lists_count
from kvd.core.reservations import LIVE
from kvd.errors import InvariantError


def validate(books: Books) -> None:
    """InvariantError names the first invariant that does not hold."""
    _numbers(books)
    _slots(books)
    _runs(books)
    _policy(books)
    _pins(books)
    _reservations(books)


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise InvariantError(f"the core's books disagree: {what}", code="audit")


def _numbers(books: Books) -> None:
    forest = books.forest
    for name, numbers in (
        ("entries", forest.entries),
        ("records", books.records),
        ("runs", forest.run_numbers),
    ):
        returned = numbers.returned()
        _require(len(set(returned)) == len(returned), f"a number of {name} is free twice")
        free_count = numbers.end - numbers.fresh + len(returned)
        _require(free_count == numbers.free_count, f"free {name} are counted wrong")
        _require(
            all(numbers.begin <= one < numbers.fresh for one in returned),
            f"a number of {name} is out of range",
        )
    free = set(forest.entries.returned())
    used = {entry for entry in range(forest.entries.fresh) if forest.is_used(entry)}
    _require(not used & free, "a used entry is free")
    _require(not used & books.limbo.keys(), "a used entry is in limbo")
    _require(not free & books.limbo.keys(), "a free entry is in limbo")
    _require(
        len(used) + len(books.limbo) == forest.entries.used_count,
        "an entry is neither free, used nor in limbo",
    )
    _require(
        0 <= forest.promised_count <= forest.entries.free_count, "more entries are promised than are free"
    )


def _slots(books: Books) -> None:
    slots, forest = books.slots, books.forest
    reserved = [
        place
        for r in books.reservations.live.values()
        for place, s in zip(r.places, r.states, strict=True)
        if s
    ]
    for _, quarantined in books.quarantine.values():
        reserved.extend(quarantined)
    reserved_set = set(reserved)
    _require(len(reserved_set) == len(reserved), "a slot is reserved twice")
    by_entry: Counter[int] = Counter()
    frames = slots.frames.free_count
    totals: dict[int, list[int]] = {}
    found_reserved = 0
    for slab in slots.slabs():
        c = slab.size_class
        frames += c.slab_frames
        free = set(slab.free)
        _require(len(free) == len(slab.free), "a slot is free twice")
        places = range(slab.base, slab.end, c.slot_bytes)
        fresh = set(places[len(places) - slab.fresh_count :])
        _require(not free & fresh and free <= set(places), "a free slot is not one of its slab")
        mine = {place for place in places if place in reserved_set}
        found_reserved += len(mine)
        _require(not mine & (free | fresh), "a reserved slot is free")
        _require(len(mine) == slab.reserved_count, "reserved slots of a slab are counted wrong")
        for place in set(places) - free - fresh - mine:
            owner = slab.owners[(place - slab.base) // c.slot_bytes]
            _require(
                forest.is_used(owner) or owner in books.limbo,
                "a slot is neither free, reserved nor published",
            )
            by_entry[owner] += c.slot_bytes
        _require((slab in c.partial) == bool(slab.free_count), "a slab with free slots is not listed")
        _require(slab.free_count < c.slab_slots, "a slab without a used slot was kept")
        total = totals.setdefault(c.number, [0, 0, 0])
        total[0] += 1
        total[1] += slab.free_count
        total[2] += slab.reserved_count
    _require(found_reserved == len(reserved), "a reserved slot is in no slab")
    _require(frames << 21 == slots.usable_bytes, "frames are lost")
    for c in slots.classes.values():
        _require(
            totals.get(c.number, [0, 0, 0]) == [c.slabs_count, c.free_count, c.reserved_count],
            "class counts are wrong",
        )
    for entry in range(forest.entries.fresh):
        if forest.is_used(entry):
            _require(by_entry.pop(entry, 0) == forest.bytes_of[entry], f"bytes of family {entry} are wrong")
    for entry, size_bytes in books.limbo.items():
        _require(by_entry.pop(entry, 0) == size_bytes, "bytes in limbo are wrong")
    _require(not by_entry, "a slot belongs to a family that is not there")


def _runs(books: Books) -> None:
    forest = books.forest
    seen: set[int] = set()
    totals: dict[int, list[int]] = {}
    runs = set(forest.runs())
    for run in runs:
        members = forest.members[run]
        _require(len(members) > 0, f"run {run} is empty")
        _require(not seen & set(members) and len(set(members)) == len(members), "a family is in two runs")
        seen.update(members)
        _require(all(forest.run_of[entry] == run for entry in members), "a family names another run")
        size_bytes = sum(forest.bytes_of[entry] for entry in members)
        _require(size_bytes == forest.run_bytes[run], f"bytes of run {run} are wrong")
        total = totals.setdefault(forest.namespace_of[run], [0, 0])
        total[0] += len(members)
        total[1] += size_bytes
        parent = forest.parent[run]
        if parent != NONE:
            _require(parent in runs, f"the parent of run {run} is gone")
            _require(list(forest.children(parent)).count(run) == 1, f"run {run} is not a child of its parent")
        for child in forest.children(run):
            _require(child in runs and forest.parent[child] == run, f"run {run} has a child that is gone")
        for length, _ in enumerate(forest.path(run)):
            _require(length < len(runs), "runs form a circle")
    used = {entry for entry in range(forest.entries.fresh) if forest.is_used(entry)}
    _require(seen == used, "runs do not partition the used entries")
    have = {namespace: total for namespace, total in forest.namespaces.items() if total != [0, 0]}
    _require(have == totals, "bytes or families of a namespace are wrong")
    missing = {entry for entry in used if forest.missing_of[entry]}
    _require(missing == set(forest.partial), "partial families are listed wrong")


def _policy(books: Books) -> None:
    forest = books.forest
    policy = forest.policy
    listed: Counter[int] = Counter()
    for in_list in range(lists_count):
        size_bytes = 0
        for run in policy.runs(in_list):
            listed[run] += 1
            size_bytes += forest.run_bytes[run]
            _require(policy.list_of[run] == in_list, f"run {run} is in another list than it says")
        _require(size_bytes == policy.list_bytes[in_list], "bytes of a list are wrong")
    _require(listed == Counter(forest.runs()), "a run is missing in the policy, or there twice")
    warmth = {run: (policy.list_of[run], at) for at, run in enumerate(listed)}
    for run in forest.runs():
        parent = forest.parent[run]
        _require(parent == NONE or warmth[parent] > warmth[run], "a prefix ranks below its suffix")


def _pins(books: Books) -> None:
    forest, pins = books.forest, books.forest.pins
    counts: dict[int, list[int]] = {}
    for run, kind in pins.explicit.items():
        _require(run in set(forest.runs()), "a pin ends at a run that is gone")
        for one in forest.path(run):
            total = counts.setdefault(one, [0, 0])
            total[0] += bool(kind & PinKind.SOFT)
            total[1] += bool(kind & PinKind.HARD)
    _require(counts == pins.counts, "pins are counted wrong")
    hard_bytes = sum(forest.run_bytes[run] for run, total in counts.items() if total[1])
    _require(hard_bytes == pins.hard_bytes, "bytes pinned hard are wrong")
    for run in forest.runs():
        expected = {PinKind.HARD: {HARD}, PinKind.SOFT: {SOFT}, PinKind.NONE: {PROBATION, PROTECTED}}[
            pins.kind(run)
        ]
        _require(forest.policy.list_of[run] in expected, "a run is in a list that its pins do not call for")


def _reservations(books: Books) -> None:
    forest = books.forest
    claims: Counter[int] = Counter()
    bytes_of: Counter[int] = Counter()
    pending: Counter[tuple[int, int]] = Counter()
    promised = records = 0
    taken: set[int] = set()
    for reservation in books.reservations.live.values():
        m = reservation.members_count
        live = [item for item, state in enumerate(reservation.states) if state == LIVE]
        _require(len(live) == reservation.live_count > 0, "live items are counted wrong")
        _require(reservation.client in books.clients, "a reservation outlives its client")
        _require(
            reservation.number in books.reservations.of_client[reservation.client],
            "a client lost a reservation",
        )
        claims.update(reservation.claimed)
        for item in live:
            pending[reservation.shape.indexes[item % m], reservation.key8s[item // m]] += 1
            taken.add(reservation.records[item])
            bytes_of[reservation.client] += reservation.shape.slot_bytes[item % m]
        records += len(live)
        for family, promise in enumerate(reservation.promised):
            promised += promise
            _require(not promise or reservation.is_family_live(family), "an entry is promised to nobody")
            known = reservation.entries[family]
            _require(known == NONE or forest.is_used(known), "a reservation names a family that left")
            if known != NONE:
                claimed = any(
                    run in reservation.claimed for run in _at_or_behind(forest, forest.run_of[known])
                )
                _require(claimed, "a reservation's family is not claimed")
        parent = reservation.parent_entry
        _require(parent == NONE or forest.is_used(parent), "a reservation's parent left")
    for client, (quarantined, places) in books.quarantine.items():
        _require(client not in books.clients, "a client is in quarantine")
        _require(len(quarantined) == len(places) > 0, "records and slots in quarantine differ")
        taken.update(quarantined)
        records += len(quarantined)
    _require(dict(claims) == forest.claims, "claims are counted wrong")
    _require(set(claims) <= set(forest.runs()), "a run that is gone is claimed")
    _require(dict(pending) == books.reservations.pending.counts(), "pending items are counted wrong")
    _require(
        dict(bytes_of) == books.reservations.bytes_of, "bytes of a client's live items are counted wrong"
    )
    _require(promised == forest.promised_count, "promised entries are counted wrong")
    _require(
        len(taken) == records and not taken & set(books.records.returned()), "a record is given out twice"
    )


def _at_or_behind(forest: Forest, run: int) -> list[int]:
    return [run, *forest.behind(run)]
