"""A world made of dictionaries, to try a Core in: an index, records, memory, clients and their hazards.

It performs the core's effects as the native table does, and checks on its own what must hold whatever the
core thinks: a slot is handed out to one holder at a time, no slot of a held family is touched, records and
entries are used once.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import deque
from dataclasses import dataclass, field

from kvd import limits
from kvd.core import events as ev
from kvd.core.core import Core, CoreConfig
from kvd.types import Member

MIB = 1 << 20
FRAME = limits.frame_bytes


def key_of(name: object) -> bytes:
    """A 32-byte identity for anything that prints."""
    return hashlib.sha256(repr(name).encode()).digest()


def chain(name: object, count: int, begin: int = 0) -> list[bytes]:
    """Identities begin … begin + count - 1 of the chain of this name."""
    return [key_of((name, at)) for at in range(begin, begin + count)]


def key8(key: bytes) -> int:
    return int.from_bytes(key[:8], "little")


@dataclass
class Record:
    owner: int
    reservation: int
    place: int
    size: int
    member: int
    checksum: int = 0


@dataclass
class Family:
    key: bytes
    family_members: int
    generation: int
    parent: bytes | None
    members: dict[int, int] = field(default_factory=dict)  # member -> record
    limbo: bool = False


class World:
    """One Core and everything around it. Everything is performed within `do`."""

    def __init__(
        self, *, families_max: int = 1024, records_max: int = 4096, segments: list[int] | None = None,
        config: CoreConfig | None = None, ready: bool = True, clients: int = 2, audit: bool = True,
    ) -> None:  # fmt: skip
        self.segments = [16 * MIB] if segments is None else segments
        self.core = Core(config or CoreConfig(), families_max, records_max, self.segments)
        self.audit = audit
        self.now_ns = 10**12
        self.index: dict[bytes, int] = {}
        self.families: dict[int, Family] = {}  # by entry, those in limbo too
        self.generations: dict[int, int] = {}
        self.pending: dict[int, Record] = {}
        self.records: dict[int, Record] = {}
        self.memory: dict[int, object] = {}  # place -> what a writer put there
        self.slots: dict[int, int] = {}  # place -> bytes, of slots that are in use
        self.hazards: dict[int, set[int]] = {}
        self.reservations: dict[int, tuple[list[bytes], tuple[Member, ...], array, bytes | None]] = {}
        self.parents: dict[bytes, bytes | None] = {}  # as writers said
        self.no_index: set[bytes] = set()
        self.evictions: list[tuple[ev.Reason, list[bytes]]] = []
        self.notes: list[ev.Note] = []
        self.flags: dict[int, int] = {}
        self.learned: dict[int, int] = {}  # entry -> the entry it lies behind, as the core said late
        self.later: deque[int] = deque()
        self.op = 0
        if ready:
            for segment, size in enumerate(self.segments):
                self.do(ev.SegmentReady(segment, 0, size))
        for client in range(clients):
            self.attach(client)

    # -- performing
    # ------------------------------------------------------------------------------------------------

    def do(self, event: ev.Event) -> list[ev.Effect]:
        """Step the core and perform all that follows in the same turn; returns the replies."""
        replies: list[ev.Effect] = []
        self.now_ns += 1000
        todo = deque(self.core.step(self.now_ns, event))
        while todo:
            effect = todo.popleft()
            match effect:
                case ev.DoReserve():
                    self._do_reserve(effect)
                case ev.DoPublish():
                    todo.extendleft(reversed(self.core.step(self.now_ns, self._do_publish(effect))))
                case ev.DoEvict():
                    todo.extendleft(reversed(self.core.step(self.now_ns, self._do_evict(effect))))
                case ev.DoFreeRecords():
                    for record in effect.records:
                        self._free_slot(self.pending.pop(record))
                case ev.DoFlags():
                    self.flags.update(dict.fromkeys(effect.entries, effect.flags))
                case ev.DoParents():
                    self.learned.update(zip(effect.entries, effect.parents, strict=True))
                case ev.DoAgain():
                    self.later.append(effect.token)
                case ev.Note():
                    self.notes.append(effect)
                case _:
                    replies.append(effect)
        if self.audit:
            self.core.validate()
        return replies

    def again(self) -> list[ev.Effect]:
        """Let long operations go on to their end."""
        replies: list[ev.Effect] = []
        while self.later:
            replies.extend(self.do(ev.Again(self.later.popleft())))
        return replies

    def _do_reserve(self, effect: ev.DoReserve) -> None:
        columns = zip(effect.records, effect.places, effect.sizes, effect.members, strict=True)
        assert len(effect.ranges) == 4 * len(effect.records)
        for record, place, size, member in columns:
            assert record not in self.pending, "a record was given out twice"
            assert record not in self.records, "a record in use was given out"
            self._take_slot(place, size)
            self.pending[record] = Record(effect.client, effect.reservation, place, size, member)

    def _take_slot(self, place: int, size: int) -> None:
        segment, offset = place >> 48, place & ((1 << 48) - 1)
        assert offset % limits.slot_align_bytes == 0
        assert offset + size <= self.segments[segment], "a slot leaves its segment"
        for other, other_size in self.slots.items():
            assert place + size <= other or other + other_size <= place, "two slots overlap"
        self.slots[place] = size

    def _free_slot(self, record: Record) -> None:
        del self.slots[record.place]
        self.memory.pop(record.place, None)

    def _do_publish(self, effect: ev.DoPublish) -> ev.Published:
        count = len(effect.records)
        assert len(effect.keys) == 32 * count
        assert len(effect.members) == len(effect.checksums) == count
        statuses, entries, differs = bytearray(count), array("I"), bytearray(count)
        used = 0
        for at, record_number in enumerate(effect.records):
            key = effect.keys[32 * at : 32 * at + 32]
            record = self.pending[record_number]
            assert record.owner == effect.client
            assert record.member == effect.members[at]
            entry = self.index.get(key)
            if entry is None:
                if key in self.no_index:
                    statuses[at] = ev.PublishStatus.NO_INDEX
                    entries.append(ev.NONE)
                    continue
                entry = effect.entries[used]
                used += 1
                assert entry not in self.families, "an entry in use was offered"
                generation = self.generations[entry] = self.generations.get(entry, 0) + 1
                self.families[entry] = Family(key, effect.family_members, generation, self.parents.get(key))
                self.index[key] = entry
                self.flags[entry] = 0
            entries.append(entry)
            family = self.families[entry]
            if record.member in family.members:
                statuses[at] = ev.PublishStatus.PRESENT
                differs[at] = self.records[family.members[record.member]].checksum != effect.checksums[at]
                continue
            record.checksum = effect.checksums[at]
            family.members[record.member] = record_number
            self.records[record_number] = self.pending.pop(record_number)
        return ev.Published(effect.token, bytes(statuses), entries.tobytes(), bytes(differs), used)

    def _do_evict(self, effect: ev.DoEvict) -> ev.Evicted:
        freed, held, records = array("I"), array("I"), array("I")
        places, sizes = array("Q"), array("Q")
        names: list[bytes] = []
        assert len(set(effect.entries)) == len(effect.entries), "a family was to leave twice"
        for entry in effect.entries:
            family = self.families[entry]
            if any(entry in hazards for hazards in self.hazards.values()):
                held.append(entry)
                if effect.withdraw and not family.limbo:
                    family.limbo = True
                    del self.index[family.key]
                continue
            freed.append(entry)
            names.append(family.key)
            for number in family.members.values():
                record = self.records.pop(number)
                records.append(number)
                places.append(record.place)
                sizes.append(record.size)
                self._free_slot(record)
            if not family.limbo:
                del self.index[family.key]
            del self.families[entry]
        self.evictions.append((effect.reason, names))
        return ev.Evicted(
            effect.token,
            freed.tobytes(),
            held.tobytes(),
            records.tobytes(),
            places.tobytes(),
            sizes.tobytes(),
        )

    # -- what clients and operators do
    # -------------------------------------------------------------------------------

    def attach(self, client: int, writable: bool = True) -> None:
        self.hazards[client] = set()
        self.do(ev.ClientAttached(client, 1000 + client, f"client {client}", writable))

    def gone(self, client: int) -> None:
        """The process is dead: its hazards count no more."""
        self.hazards[client] = set()
        self.do(ev.ClientGone(client))
        self.again()
        del self.hazards[client]

    def reserve(
        self, client: int, keys: list[bytes], *, size: int = 64 * 1024, members: tuple[Member, ...] | None =
        None, parent: bytes | None = None, family_members: int | None = None, request: int = 0, namespace: int
        = 0, skip_pending: bool = False,
    ) -> ev.ReservedReply | ev.ErrorReply:  # fmt: skip
        members = (Member(0, size),) if members is None else members
        entries = array("I", [self.index.get(key, ev.NONE) for key in keys])
        mandatory = len(members) if family_members is None else family_members
        present = bytes(
            entry != ev.NONE and (
                self.families[entry].family_members != mandatory  # cut otherwise: no place for these members
                or member.index in self.families[entry].members
            )
            for entry in entries for member in members
        )  # fmt: skip
        previous = parent
        for key in keys:
            self.parents.setdefault(key, previous)
            previous = key
        self.op += 1
        parent_entry = self.index.get(parent, ev.NONE) if parent is not None else ev.NONE
        replies = self.do(
            ev.Reserve(
                client, self.op, request, namespace, b"".join(keys), parent_entry, members, 0, mandatory, skip_pending,
                entries.tobytes(), present, key8(parent) if parent is not None else 0,
            )
        )  # fmt: skip
        (reply,) = replies
        assert isinstance(reply, ev.ReservedReply | ev.ErrorReply)
        assert (reply.client, reply.op) == (client, self.op)
        if isinstance(reply, ev.ReservedReply) and reply.reservation:
            self.reservations[reply.reservation] = (keys, members, reply.places, parent)
        return reply

    def fill(self, reservation: int, value: object = None) -> None:
        """The writer writes; what it writes says which family and member it is."""
        keys, members, places, _ = self.reservations[reservation]
        for item, place in enumerate(places):
            if place in self.slots:
                self.memory[place] = (keys[item // len(members)], members[item % len(members)].index, value)

    def publish(
        self, client: int, reservation: int, first: int = 0, count: int | None = None, *, include: bytes |
        None = None, checksum: int = 7,
    ) -> bytes:  # fmt: skip
        if count is None:
            known = self.reservations.get(reservation)
            count = len(known[2]) - first if known else 1
        self.op += 1
        include = bytes([1]) * count if include is None else include
        checksums = array("Q", [checksum]) * len(include)
        (reply,) = self.do(ev.Publish(client, self.op, reservation, first, checksums, include))
        assert isinstance(reply, ev.PublishedReply), reply
        assert (reply.client, reply.op) == (client, self.op)
        return reply.statuses

    def abort(self, client: int, reservation: int, first: int = 0, count: int | None = None) -> int:
        if count is None:
            known = self.reservations.get(reservation)
            count = len(known[2]) - first if known else 1
        self.op += 1
        (reply,) = self.do(ev.Abort(client, self.op, reservation, first, count))
        assert isinstance(reply, ev.AbortedReply), reply
        return reply.count

    def write(self, client: int, keys: list[bytes], **options: object) -> list[int]:
        """Reserve, fill and publish; returns the statuses. Fails the test if there is no room."""
        reply = self.reserve(client, keys, **options)  # type: ignore[arg-type]
        assert isinstance(reply, ev.ReservedReply), reply.error
        if not reply.reservation:
            return []
        self.fill(reply.reservation)
        return list(self.publish(client, reply.reservation))

    def touch(self, client: int, keys: list[bytes], request: int = 0, kind: int = ev.TouchKind.MATCH) -> int:
        """Look up a chain and leave a touch; returns the leading complete families."""
        matched = 0
        for key in keys:
            entry = self.index.get(key)
            if entry is None or not self.is_complete(entry):
                break
            matched += 1
        deepest = self.index[keys[matched - 1]] if matched else ev.NONE
        missed = key8(keys[matched]) if matched < len(keys) else 0
        touch = ev.Touch(request, self.now_ns, deepest, 0, matched, len(keys), missed, 900, kind, 0)
        self.do(ev.Touched(client, [touch]))
        return matched

    def is_complete(self, entry: int) -> bool:
        """All mandatory members are there; those numbered higher are optional."""
        family = self.families[entry]
        return all(member in family.members for member in range(family.family_members))

    def hold(self, client: int, keys: list[bytes]) -> int:
        """Acquire leases on the leading families."""
        held = 0
        for key in keys:
            if key not in self.index:
                break
            self.hazards[client].add(self.index[key])
            held += 1
        return held

    def clear(self, namespace: int | None = None) -> dict[str, object]:
        self.op += 1
        replies = self.do(ev.Clear(self.op, namespace)) + self.again()
        (reply,) = replies
        assert isinstance(reply, ev.AdminReply)
        return reply.result

    def pin(self, keys: list[bytes], kind: ev.PinKind) -> ev.Effect:
        self.op += 1
        (reply,) = self.do(ev.Pin(self.op, array("I", [self.index[key] for key in keys]), kind))
        return reply

    def unpin(self, keys: list[bytes]) -> ev.Effect:
        self.op += 1
        (reply,) = self.do(ev.Unpin(self.op, array("I", [self.index[key] for key in keys])))
        return reply

    def withdraw(self, keys: list[bytes]) -> dict[str, object]:
        self.op += 1
        (reply,) = self.do(ev.Withdraw(self.op, array("I", [self.index[key] for key in keys])))
        assert isinstance(reply, ev.AdminReply)
        return reply.result

    def tick(self) -> None:
        self.do(ev.Tick())

    def sleep(self, seconds: float) -> None:
        """Time passes; nobody waits for it."""
        self.now_ns += int(seconds * 10**9)

    # -- looking
    # -------------------------------------------------------------------------------------------------------

    def has(self, key: bytes) -> bool:
        return key in self.index

    def pool(self, name: str) -> int:
        pool = self.core.statistics()["pool"]
        assert isinstance(pool, dict)
        return int(pool[name])

    def check_content(self) -> None:
        """Every published member reads as what was written under its key."""
        for family in self.families.values():
            for member, number in family.members.items():
                value = self.memory[self.records[number].place]
                assert isinstance(value, tuple)
                assert value[:2] == (family.key, member), "a family has another family's bytes"
