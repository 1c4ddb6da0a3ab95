"""The simulated daemon: the real core, and a shell around it that does what `kvd.server` does.

One `Daemon` is one life: it owns a `Core`, an epoch's `Meta` and the attachments it made, and it dies by `Crashed`
between any two effects. It takes asks from rings, looks up facts, steps the core and performs the effects, letting
clients run between all of them (`breathe`). After each turn it compares the core's books with what the world knows.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from kvd.core import events as ev
from kvd.core.core import Core, CoreConfig

from . import adoption
from .memory import Entry, Memory, Meta, Record, State, Violation
from .processes import Ask, Attachment, Process

if TYPE_CHECKING:
    from .simulation import Simulation

POLICY_REASONS = frozenset(
    (ev.Reason.SPACE, ev.Reason.WINDOW, ev.Reason.ENTRIES, ev.Reason.RECORDS, ev.Reason.PARTIAL)
)
ADMIN_OPS_FROM = 1_000_000


class Crashed(Exception):  # noqa: N818  it is not an error of the simulation
    """The daemon was killed in the middle of a turn."""


class Daemon:
    """One life of the daemon."""

    def __init__(
        self, sim: Simulation, memory: Memory, config: CoreConfig, families_max: int, records_max: int
    ) -> None:
        self.sim = sim
        self.memory = memory
        self.meta = Meta(sim.next_epoch())
        self.announced = [0] * len(memory.segment_bytes)  # bytes of each segment that the core may use
        self.core = Core(config, families_max, records_max, memory.segment_bytes)
        self.clients_max = sim.shape.clients_max
        self.by_slot: dict[int, Attachment] = {}
        self.later: deque[int] = deque()
        self.no_room: set[bytes] = set()  # keys whose buckets are full
        self.pinned: list[bytes] = []  # keys up to which something is pinned hard
        self.admin_asked: dict[int, str] = {}
        self.admin_op = ADMIN_OPS_FROM
        self.event: ev.Event = ev.Tick()

    def populate(self) -> bool:
        """Announce one more frame of a segment; False if there is none."""
        memory = self.memory
        for segment, size in enumerate(memory.segment_bytes):
            begin = self.announced[segment]
            if begin < size:
                end = self.announced[segment] = min(begin + adoption.FRAME_BYTES, size)
                memory.usable[segment] = max(memory.usable[segment], end)
                self.turn(ev.SegmentReady(segment, begin, end))
                return True
        return False

    def take_over(self, dead: Daemon, living: list[Attachment]) -> None:
        """Start over the memory of another, whose clients that live are ghosts of this one from now on."""
        for slot, ghost in enumerate(living, self.clients_max):
            ghost.revoked, ghost.gone = True, False
            self.sim.count("ghosts")
            ghost.slot = slot
            self.by_slot[slot] = ghost
        by_serial = {ghost.serial: ghost for ghost in living}
        restore = adoption.adopt(dead.meta, self.meta, self.memory, by_serial, self.sim.parents)
        for ghost in living:
            for lease in ghost.process.leases:
                if lease.attachment is ghost and self.meta.entry(lease.entry.number).sg != (
                    lease.generation,
                    State.READY,
                ):
                    raise Violation(
                        f"entry {lease.entry.number} is lost at the restart, under the lease of {lease.process}"
                    )
        self.pinned = [key for key, number in self.meta.index.items() if self.meta.entries[number].flags & 2]
        self.turn(restore)

    # -- clients -------------------------------------------------------------------------------------------------

    def attach(self, process: Process, writable: bool) -> Attachment | None:
        """A slot for this process; None if all are taken."""
        slot = next((one for one in range(self.clients_max) if one not in self.by_slot), None)
        if slot is None:
            return None
        attachment = Attachment(self.sim.next_serial(), slot, process, self.meta, self.memory, writable)
        self.by_slot[slot] = attachment
        self.turn(ev.ClientAttached(slot, process.pid, f"client {process.pid}", writable))
        return attachment

    def serve(self, attachment: Attachment, frames_max: int) -> None:
        """One turn of a client: its answers first, then its asks while there is room for the answers."""
        for _ in range(frames_max):
            if not attachment.served or not attachment.flush() or not attachment.asks:
                break
            self._handle(attachment, attachment.asks.popleft())
        self.touched(attachment)

    def drain(self, attachment: Attachment) -> None:
        """All that is in the ring, whether its answers find room or not (the client leaves)."""
        while attachment.served and attachment.asks:
            self._handle(attachment, attachment.asks.popleft())
        self.touched(attachment)

    def touched(self, attachment: Attachment) -> None:
        """Take what the client left in its touch ring."""
        if attachment.touches:
            touches, attachment.touches = attachment.touches, []
            self.turn(ev.Touched(attachment.slot, touches))

    def detach(self, attachment: Attachment) -> None:
        """The client leaves in order: what it still holds keeps its slot until its process is gone."""
        self.drain(attachment)
        if attachment.hazards or self.core.live_items(attachment.slot):
            self.disconnect(attachment)
        else:
            self.forget(attachment)

    def disconnect(self, attachment: Attachment) -> None:
        """EOF, or a ring that cannot be right. The process may live, read and write: nothing comes back."""
        attachment.served = False

    def exited(self, attachment: Attachment) -> None:
        """The pidfd says that the process is gone. What it pushed before is valid and comes first."""
        if attachment.served:
            self.drain(attachment)
        self.forget(attachment)

    def forget(self, attachment: Attachment) -> None:
        """Nothing can be written by this client any more."""
        if attachment.served and attachment.unanswered:
            raise Violation(
                f"attachment {attachment.serial} ended, {attachment.unanswered} was never answered"
            )
        attachment.served = False
        attachment.gone = True
        self.turn(ev.ClientGone(attachment.slot))

    # -- asks ----------------------------------------------------------------------------------------------------

    def _handle(self, attachment: Attachment, ask: Ask) -> None:
        """One frame of a ring."""
        slot = attachment.slot
        if self.sim.tracing:
            self.sim.say(f"daemon takes {ask} of {attachment}")
        match ask.kind:
            case "reserve":
                self._reserve(attachment, ask)
            case "publish":
                columns = array("Q", [ask.checksum]) * len(ask.include)
                self.turn(ev.Publish(slot, ask.op, ask.reservation, ask.first, columns, ask.include))
            case _:
                self.turn(ev.Abort(slot, ask.op, ask.reservation, ask.first, ask.count))

    def _reserve(self, attachment: Attachment, ask: Ask) -> None:
        for one in list(self.by_slot.values()):
            self.touched(one)
        meta = self.meta
        entries = array("I", [meta.index.get(key, ev.NONE) for key in ask.keys])
        present = bytes(
            entry != ev.NONE and member.index in meta.entries[entry].members
            for entry in entries
            for member in ask.members
        )
        parent_entry, parent_key8 = ev.NONE, 0
        if ask.parent is not None:
            parent_entry = meta.index.get(ask.parent, ev.NONE)
            parent_key8 = int.from_bytes(ask.parent[:8], "little")
        keys = b"".join(ask.keys)
        self.turn(
            ev.Reserve(
                attachment.slot, ask.op, ask.request, ask.namespace, keys, parent_entry, ask.members, 0,
                ask.family_members, ask.skip_pending, entries.tobytes(), present, parent_key8,
            )
        )  # fmt: skip

    def administrate(self, what: str, make: type, *args: object) -> None:
        """Pin, unpin, clear or withdraw."""
        self.admin_op += 1
        self.admin_asked[self.admin_op] = what
        self.turn(make(self.admin_op, *args))

    # -- a turn --------------------------------------------------------------------------------------------------

    def turn(self, event: ev.Event) -> None:
        """Step the core and perform, in order, all that follows; then everything must add up."""
        now_ns = self.sim.now_ns
        self.event = event
        if self.sim.tracing and type(event) is not ev.Touched:
            self.sim.say(f"core <- {type(event).__name__}")
        todo: deque[ev.Effect] = deque(self.core.step(now_ns, event))
        while todo:
            effect = todo.popleft()
            if self.sim.tracing:
                self.sim.say(f"core -> {describe(effect)}")
            answer = self._perform(effect)
            if answer is not None:
                todo.extendleft(reversed(self.core.step(now_ns, answer)))
            self.sim.breathe()
        self.check()

    def _perform(self, effect: ev.Effect) -> ev.Published | ev.Evicted | None:
        match effect:
            case ev.DoReserve():
                self._do_reserve(effect)
            case ev.DoPublish():
                return self._do_publish(effect)
            case ev.DoEvict():
                return self._do_evict(effect)
            case ev.DoFreeRecords():
                for number in effect.records:
                    record = self.meta.records.pop(number)
                    if not record.pending:
                        raise Violation(f"record {number} is published and was freed as if it were not")
                    self.memory.give(record)
            case ev.DoFlags():
                for entry in effect.entries:
                    self.meta.entries[entry].flags = effect.flags
            case ev.DoParents():
                for number, parent in zip(effect.entries, effect.parents, strict=True):
                    self._set_parent(self.meta.entries[number], parent)
            case ev.DoAgain():
                self.later.append(effect.token)
            case ev.Gone():
                self.by_slot.pop(effect.client).hazards.clear()
            case ev.Note():
                pass
            case ev.AdminReply():
                self._administrated(effect.op)
            case ev.ErrorReply() if effect.client == ev.ADMIN:
                self._administrated(effect.op)
            case _:
                self._reply(effect)
        return None

    def _administrated(self, op: int) -> None:
        if self.admin_asked.pop(op, None) is None:
            raise Violation(f"administration {op} was answered twice, or was never asked")

    def _reply(self, reply: ev.ReservedReply | ev.PublishedReply | ev.AbortedReply | ev.ErrorReply) -> None:
        attachment = self.by_slot[reply.client]
        kind = attachment.unanswered.pop(reply.op, None)
        wanted = {"reserve": ev.ReservedReply, "publish": ev.PublishedReply, "abort": ev.AbortedReply}.get(
            kind or ""
        )
        if wanted is None or not isinstance(reply, wanted | ev.ErrorReply):
            raise Violation(f"{reply!r} answers no ask of {attachment}")
        self.sim.count(type(reply).__name__)
        attachment.owed.append(reply)
        if attachment.served:
            attachment.flush()

    def _do_reserve(self, effect: ev.DoReserve) -> None:
        attachment = self.by_slot[effect.client]
        columns = zip(effect.records, effect.places, effect.sizes, effect.members, strict=True)
        for number, place, size_bytes, member in columns:
            if number in self.meta.records:
                raise Violation(f"record {number} was given out twice")
            record = Record(
                number, attachment.serial, effect.client, effect.reservation, member, place, size_bytes
            )
            self.memory.take(record)
            self.meta.records[number] = record

    # -- publishing ----------------------------------------------------------------------------------------------

    def _do_publish(self, effect: ev.DoPublish) -> ev.Published:
        event = self.event
        if not isinstance(event, ev.Publish) or event.client != effect.client:
            raise Violation("something is published that nobody asked to publish")
        statuses, entries, differs = bytearray(), array("I"), bytearray()
        used = 0
        behind = family = ev.NONE  # of the item before: what its family lies behind, and its entry
        for at, number in enumerate(effect.records):
            key = effect.keys[32 * at : 32 * at + 32]
            record = self._publishable(number, key, effect, event.reservation)
            found = self.meta.index.get(key, ev.NONE)
            if not at or key != effect.keys[32 * at - 32 : 32 * at]:
                if effect.parents[at] != ev.PREVIOUS:
                    behind = effect.parents[at]
                elif family != ev.NONE:
                    behind = family
                family = found
            status, differ = ev.PublishStatus.PUBLISHED, False
            if found == ev.NONE and key in self.no_room:
                status = ev.PublishStatus.NO_INDEX
            elif found == ev.NONE:
                record.checksum = effect.checksums[at]
                family = found = effect.entries[used]
                used += 1
                self._new_family(found, key, record, effect, behind)
            elif (other := self.meta.entries[found].members.get(record.member)) is not None:
                status, differ = ev.PublishStatus.PRESENT, other.checksum != effect.checksums[at]
            else:
                record.pending, record.checksum = False, effect.checksums[at]
                self.meta.entries[found].members[record.member] = record
            statuses.append(status)
            differs.append(differ)
            entries.append(found)
            self.sim.breathe()
        if effect.answer_op != ev.NO_OP:  # the writer may go on before the core has written its books
            self._reply(ev.PublishedReply(effect.client, effect.answer_op, bytes(statuses)))
            self.sim.breathe()
        return ev.Published(effect.token, bytes(statuses), entries.tobytes(), bytes(differs), used)

    def _publishable(self, number: int, key: bytes, effect: ev.DoPublish, reservation: int) -> Record:
        """The record, which its own writer asked to publish and has filled to the last byte."""
        record = self.meta.records[number]
        owner = self.by_slot[effect.client].serial
        if not record.pending or record.owner != owner or record.reservation != reservation:
            raise Violation(
                f"record {number} of attachment {record.owner}, reservation {record.reservation}"
                f"{'' if record.pending else ', published already,'} is published by {owner} for {reservation}"
            )
        if not self.memory.whole(record, key, record.member):
            raise Violation(
                f"record {number} becomes READY and is not filled with {key[:4].hex()}:{record.member}"
            )
        return record

    def _new_family(self, number: int, key: bytes, record: Record, effect: ev.DoPublish, parent: int) -> None:
        entry = self.meta.entry(number)
        generation, state = entry.sg
        if state is not State.EMPTY:
            raise Violation(f"entry {entry.number} is {state.name} and was offered for a new family")
        entry.sg = (generation + 1, State.WRITING)
        self.sim.breathe()
        entry.key, entry.family_members, entry.members = key, effect.family_members, {record.member: record}
        entry.flags, entry.unlinked, entry.split = 0, False, effect.split
        entry.namespace = effect.namespace
        self._set_parent(entry, parent)
        # Pending must be over before the family can be seen: a daemon that starts over this memory believes READY.
        record.pending = False
        entry.sg = (generation + 1, State.READY)
        self.sim.breathe()
        self.meta.index[key] = entry.number
        self.meta.clock += 1
        self.meta.published_at[key] = self.meta.clock

    def _set_parent(self, entry: Entry, parent: int) -> None:
        entry.parent = parent
        entry.parent_generation = 0 if parent == ev.NONE else self.meta.entries[parent].sg[0]

    # -- evicting ------------------------------------------------------------------------------------------------

    def _do_evict(self, effect: ev.DoEvict) -> ev.Evicted:
        """Mark all, look at the hazards of one client after the other, free what nobody holds."""
        meta = self.meta
        chosen = [meta.entries[number] for number in effect.entries]
        if len(set(effect.entries)) != len(chosen):
            raise Violation("a family was to leave twice")
        for entry in chosen:
            if entry.sg[1] is not State.READY:
                raise Violation(f"entry {entry.number} is {entry.sg[1].name} and was to leave")
            entry.sg = (entry.sg[0], State.EVICTING)
            self.sim.breathe()
        held_now = self.scan()
        freed: list[Entry] = []
        held: list[Entry] = []
        for entry in chosen:
            if (entry.number, entry.sg[0]) in held_now:
                held.append(entry)
            else:
                freed.append(entry)
        gone_at = {e.key: meta.published_at[e.key] for e in chosen if not e.unlinked and e not in held}
        for entry in held:
            if effect.withdraw:
                self._unlink(entry, gone_at)
            entry.sg = (entry.sg[0], State.READY)
        self.sim.count(f"left: {effect.reason.value}", len(freed))
        self.sim.count("held", len(held))
        records = self._free(freed)
        self._check_reason(effect, gone_at, held)
        return ev.Evicted(
            effect.token,
            array("I", [entry.number for entry in freed]).tobytes(),
            array("I", [entry.number for entry in held]).tobytes(),
            array("I", [record.number for record in records]).tobytes(),
            array("Q", [record.place for record in records]).tobytes(),
            array("Q", [record.size_bytes for record in records]).tobytes(),
        )

    def scan(self) -> set[tuple[int, int]]:
        """What the hazards of all clients name. Clients run on between the looks at each of them."""
        found: set[tuple[int, int]] = set()
        for attachment in list(self.by_slot.values()):
            found |= self.meta.held((attachment,))
            self.sim.breathe()
        return found

    def _unlink(self, entry: Entry, gone_at: dict[bytes, int]) -> None:
        if not entry.unlinked:
            entry.unlinked = True
            del self.meta.index[entry.key]
            gone_at[entry.key] = self.meta.published_at.pop(entry.key)

    def _free(self, freed: Sequence[Entry]) -> list[Record]:
        records: list[Record] = []
        for entry in freed:
            readers = [lease for lease in entry.leases if lease.process.alive]
            if readers:
                raise Violation(f"entry {entry.number} is freed under the lease of {readers[0].process}")
            if not entry.unlinked:
                del self.meta.index[entry.key]
                del self.meta.published_at[entry.key]
            entry.sg = (entry.sg[0], State.EMPTY)
            entry.leases = []
            for record in entry.members.values():
                records.append(self.meta.records.pop(record.number))
                self.memory.give(record)
        return records

    def _check_reason(self, effect: ev.DoEvict, gone_at: dict[bytes, int], held: Iterable[Entry]) -> None:
        """What is pinned hard does not leave; by policy no prefix leaves before its suffix, unless it was abandoned."""
        reason = effect.reason
        if reason is ev.Reason.WITHDRAW or reason is ev.Reason.LIMBO:
            return
        for key in self.pinned:
            if key in gone_at:
                raise Violation(f"family {key[:4].hex()} is pinned hard and left ({reason.value})")
        if reason not in POLICY_REASONS or effect.withdraw or not gone_at:
            return
        spared = {entry.key for entry in held}
        published_at, parents = self.meta.published_at, self.sim.parents
        for one, at in published_at.items():
            if one in spared:
                continue
            key = one
            while (parent := parents.get(key)) is not None:
                parent_at = gone_at.get(parent) or published_at.get(parent)
                if parent_at is None or parent_at > at:
                    break
                if parent in gone_at:
                    raise Violation(
                        f"{reason.value}: prefix {parent[:4].hex()} left before its suffix {one[:4].hex()}"
                    )
                at, key = parent_at, parent

    # -- always --------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """The core's books are right in themselves, and say what the memory says."""
        self.core.validate()
        books, meta = self.core._books, self.meta
        if books.records.used_count != len(meta.records):
            raise Violation(
                f"the core counts {books.records.used_count} records, there are {len(meta.records)}"
            )
        if books.forest.entries.used_count != sum(e.sg[1] is State.READY for e in meta.entries.values()):
            raise Violation("core and index disagree on how many families there are")
        for name, mine, theirs in (
            ("reserved", meta.bytes_of(pending=True), books.reserved_bytes),
            ("published", meta.bytes_of(pending=False), books.published_bytes),
        ):
            if mine != theirs:
                raise Violation(f"{theirs} B are {name} by the core's books, {mine} B in memory")


def describe(effect: ev.Effect) -> str:
    """An effect in a line of the trace."""
    match effect:
        case ev.DoReserve():
            return f"DoReserve reservation {effect.reservation}, records {list(effect.records)}"
        case ev.DoPublish():
            return f"DoPublish records {list(effect.records)} of client {effect.client}"
        case ev.DoEvict():
            return f"DoEvict {effect.reason.value} entries {list(effect.entries)}"
        case ev.DoFreeRecords():
            return f"DoFreeRecords {list(effect.records)}"
        case ev.ErrorReply():
            return f"ErrorReply {effect.error.code} to op {effect.op}"
        case ev.ReservedReply():
            return f"ReservedReply {effect.reservation}, statuses {list(effect.statuses)}"
        case ev.PublishedReply():
            return f"PublishedReply {list(effect.statuses)}"
        case _:
            return type(effect).__name__
