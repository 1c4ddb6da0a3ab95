"""Reservations: who is filling which slots.

Owned by `Core`. A reservation is a batch of n families × m members, items numbered family-major. It holds one
slot and one record an item, the right to one free entry for each family that was not there (a promise), and a
claim on the runs it writes behind or adds to, so that neither leaves while it lives.

    item:  not granted            -> GONE for ever
           live --publish won-->     published       (the slot is the family's)
           live --publish lost-->    given back      (present already, or no room in the index)
           live --abort, death-->    given back

A reservation ends when none of its items is live. Invariants: `live_count` and promises match the items; a
promise is held for a family exactly as long as one of its items is live and the family was not there yet.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from itertools import chain

from kvd import limits
from kvd.core.events import NONE, Reserve
from kvd.core.slots import Slots
from kvd.errors import UsageError
from kvd.types import Member

LIVE = 1  # state of an item that may still be published or given back; everything else is 0
shapes_kept_max = 1024


class Shape:
    """What the items of a family are like: the same for all families of a batch, and for most batches of a client."""

    __slots__ = (
        "class_set", "classes", "family_bytes", "index_max", "indexes", "members", "members_count", "ranges", "sizes",
        "slot_bytes",
    )  # fmt: skip

    def __init__(self, members: tuple[Member, ...], slots: Slots) -> None:
        indexes = [member.index for member in members]
        if not members or len(set(indexes)) != len(indexes):
            raise UsageError(
                f"members {indexes}: name at least one, and each once", code="member", indexes=indexes
            )
        self.members = members
        self.members_count = len(members)
        self.indexes = bytes(indexes)
        self.index_max = max(indexes)
        self.classes = [slots.class_for(member.size_bytes) for member in members]
        self.slot_bytes = [size_class.slot_bytes for size_class in self.classes]
        self.family_bytes = sum(self.slot_bytes)
        self.class_set = 0
        for size_class in self.classes:
            self.class_set |= 1 << size_class.number
        self.sizes: array[int] = array("Q", [member.size_bytes for member in members])
        self.ranges: array[int] = array("H", chain.from_iterable((*x.heads, *x.layers) for x in members))


class Shapes:
    """Shapes by their members."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._known: dict[tuple[Member, ...], Shape] = {}
        self._dropped_count = 0

    def of(self, members: tuple[Member, ...]) -> Shape:
        """The shape of these members. UsageError, CapacityError: no size class can be had for one of them."""
        shape = self._known.get(members)
        slots = self._slots
        if shape is None or slots.classes_dropped_count != self._dropped_count:
            shape = Shape(members, slots)
            if len(self._known) >= shapes_kept_max or slots.classes_dropped_count != self._dropped_count:
                self._known.clear()
                self._dropped_count = slots.classes_dropped_count
            self._known[members] = shape
        return shape


class Reservation:
    """One batch that is being written. Columns have a row an item (n·m) or a family (n)."""

    __slots__ = (
        "awaited", "claimed", "client", "entries", "families_count", "family_members", "key8s", "keys", "live_count",
        "mandatory_count", "members_count", "namespace", "number", "parent_entry", "parent_key8", "places", "promised",
        "records", "request", "shape", "split", "states",
    )  # fmt: skip

    # filled when granted
    records: array[int]
    places: array[int]
    states: bytearray
    live_count: int

    def __init__(
        self, number: int, event: Reserve, shape: Shape, key8s: array[int], entries: array[int]
    ) -> None:
        self.number = number
        self.client = event.client
        self.request = event.request
        self.namespace = event.namespace
        self.keys = event.keys
        self.key8s = key8s
        self.families_count = len(key8s)
        self.shape = shape
        self.members_count = shape.members_count
        self.split = event.split
        self.family_members = event.family_members  # mandatory ones; a member numbered higher is optional
        self.mandatory_count = shape.members_count
        if shape.index_max >= event.family_members:
            self.mandatory_count = sum(index < event.family_members for index in shape.indexes)
        self.parent_entry = event.parent_entry  # NONE: a root, or its family is not there (yet, any more)
        self.parent_key8 = event.parent_key8
        # families as known: those that were there and those that this reservation published. All claimed, so
        # valid.
        self.entries = entries
        self.claimed: list[int] = []  # runs
        self.promised = bytearray()  # by family
        self.awaited: list[int] = []  # first 8 bytes of families of this chain that only others write

    def end_promises(self, families: Iterable[int]) -> int:
        """Families that need no entry any more, or have one; returns how many had been promised one."""
        ended = 0
        promised = self.promised
        for family in families:
            if promised[family]:
                promised[family] = 0
                ended += 1
        return ended

    def is_mandatory(self, member: int) -> bool:
        """Whether a family is incomplete without the member at this position."""
        return self.shape.indexes[member] < self.family_members

    def is_family_live(self, family: int) -> bool:
        """Whether an item of this family is still to come."""
        first = family * self.members_count
        return LIVE in self.states[first : first + self.members_count]

    def behind(self, family: int) -> int:
        """The entry of the nearest family before this one that is there; NONE if there is none."""
        entries = self.entries
        for at in range(family - 1, -1, -1):
            if entries[at] != NONE:
                return entries[at]
        return self.parent_entry


class Pending:
    """Which families are being written, by the first 8 bytes of their identity and by member.

    Two identities with the same first 8 bytes are told apart by nobody here: a writer is told to wait in vain
    once in 2^64.
    """

    def __init__(self) -> None:
        self._by_member: dict[int, dict[int, int]] = {}  # member index -> key8 -> how many items
        self._shared_count = 0  # keys with more than one item

    def add(self, member: int, key8s: Iterable[int]) -> None:
        """Items of these families are live now."""
        keys = list(key8s)
        counts = self._by_member.get(member)
        if counts is None:
            counts = self._by_member[member] = {}
        fresh = dict.fromkeys(keys, 1)
        if len(fresh) == len(keys) and counts.keys().isdisjoint(fresh):
            counts.update(fresh)
            return
        for key in keys:
            have = counts.get(key, 0)
            counts[key] = have + 1
            self._shared_count += have == 1

    def remove(self, member: int, key8s: Iterable[int]) -> None:
        """So many items of these families are not live any more."""
        counts = self._by_member[member]
        if not self._shared_count:
            for key in key8s:
                del counts[key]
            return
        for key in key8s:
            have = counts[key]
            if have == 1:
                del counts[key]
            else:
                counts[key] = have - 1
                self._shared_count -= have == 2

    def has(self, member: int, key8: int) -> bool:
        """Whether somebody writes this member of the family."""
        counts = self._by_member.get(member)
        return counts is not None and key8 in counts

    def has_any(self, key8: int) -> bool:
        """Whether somebody writes any member of the family."""
        return any(key8 in counts for counts in self._by_member.values())

    def has_one_of(self, key8s: array[int]) -> bool:
        """Whether somebody writes any member of any of these families."""
        return any(not counts.keys().isdisjoint(key8s) for counts in self._by_member.values())

    def counts(self) -> dict[tuple[int, int], int]:
        """(member, key8) -> items (for checks)."""
        return {(m, key): count for m, counts in self._by_member.items() for key, count in counts.items()}


class Reservations:
    """All live reservations."""

    def __init__(self) -> None:
        self.live: dict[int, Reservation] = {}
        self.of_client: dict[int, dict[int, None]] = {}
        self.bytes_of: dict[int, int] = {}  # by client: of the slots of its live items
        self.pending = Pending()
        self._last_number = 0

    def next_number(self) -> int:
        """A number that was never used before, from 1."""
        self._last_number += 1
        return self._last_number

    def is_pending(self, key8: int) -> bool:
        """Whether a live reservation writes a member of this family."""
        return self.pending.has_any(key8)

    def add(self, reservation: Reservation) -> None:
        """The reservation is granted."""
        self.live[reservation.number] = reservation
        self.of_client.setdefault(reservation.client, {})[reservation.number] = None
        n, m = reservation.families_count, reservation.members_count
        whole = reservation.live_count == n * m
        size_bytes = 0
        for at, index in enumerate(reservation.shape.indexes):
            keys: Iterable[int] = reservation.key8s
            live_count = n if whole else reservation.states[at::m].count(LIVE)
            size_bytes += live_count * reservation.shape.slot_bytes[at]
            if not whole:
                keys = (k for k, state in zip(keys, reservation.states[at::m], strict=True) if state)
            self.pending.add(index, keys)
        self.bytes_of[reservation.client] = self.bytes_of.get(reservation.client, 0) + size_bytes

    def end(self, reservation: Reservation) -> None:
        """No item is live any more."""
        del self.live[reservation.number]
        mine = self.of_client[reservation.client]
        del mine[reservation.number]
        if not mine:
            del self.of_client[reservation.client], self.bytes_of[reservation.client]

    def not_live(self, reservation: Reservation, items: Iterable[int]) -> None:
        """These live items are published or given back."""
        m, key8s, states = reservation.members_count, reservation.key8s, reservation.states
        if m == 1 and isinstance(items, range):
            states[items.start : items.stop] = bytes(len(items))
            keys = key8s[items.start : items.stop]
            self.pending.remove(reservation.shape.indexes[0], keys)
            reservation.live_count -= len(items)
            self.bytes_of[reservation.client] -= len(items) * reservation.shape.slot_bytes[0]
            return
        count = 0
        by_member: dict[int, list[int]] = {}
        for item in items:
            states[item] = 0
            by_member.setdefault(item % m, []).append(key8s[item // m])
            count += 1
        for at, found in by_member.items():
            self.pending.remove(reservation.shape.indexes[at], found)
            self.bytes_of[reservation.client] -= len(found) * reservation.shape.slot_bytes[at]
        reservation.live_count -= count

    def forget(self, runs: set[int], entries: set[int]) -> list[Reservation]:
        """These runs and families were withdrawn; returns the reservations that had claimed them."""
        touched: list[Reservation] = []
        for reservation in self.live.values():
            known = reservation.entries
            lost = []
            if known.count(NONE) != len(known) and not entries.isdisjoint(known):
                lost = [family for family, entry in enumerate(known) if entry in entries]
            parent_lost = reservation.parent_entry in entries
            if not lost and not parent_lost and runs.isdisjoint(reservation.claimed):
                continue
            touched.append(reservation)
            for family in lost:
                known[family] = NONE
            if parent_lost:
                reservation.parent_entry = NONE
            reservation.claimed = [run for run in reservation.claimed if run not in runs]
        return touched


def check(event: Reserve, shape: Shape) -> int:
    """How many families are asked for; UsageError if the batch is not what the protocol allows."""
    n, rest = divmod(len(event.keys), limits.identity_bytes)
    m = shape.members_count
    if rest or not n:
        raise UsageError(f"{len(event.keys)} B of keys: name at least one, 32 B each", code="batch")
    if n * m > limits.batch_items_max:
        raise UsageError(
            f"{n} families × {m} members are {n * m} items, at most {limits.batch_items_max} go at once: split it",
            code="batch", families=n, members=m, items_max=limits.batch_items_max,
        )  # fmt: skip
    if not 0 < event.family_members <= limits.members_per_family_max:
        raise UsageError(
            f"a family of {event.family_members} members; allowed: 1 … {limits.members_per_family_max}",
            code="family", family_members=event.family_members,
        )  # fmt: skip
    if not 0 <= event.namespace <= limits.namespaces_max:
        raise UsageError(
            f"namespace {event.namespace} is not known", code="namespace", namespace=event.namespace
        )
    if not 0 <= event.split <= 0xFFFF:
        raise UsageError(f"split {event.split} is outside 0 … 65535", code="split", split=event.split)
    return n
