"""Simulated client processes: what an engine with the client library does, one memory access or message at a time.

A `Process` runs tasks (generators); each `next` is one step, and between any two of them anything else may happen: the
daemon serves, evicts or dies, the process is stopped or killed. An `Attachment` is a process's connection to one life
of the daemon: rings, hazards, touches. Tasks follow the protocol of `docs/design/lease-protocol.md`; what they find in
memory under a lease they compare with what must stand there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, TypeAlias

from kvd.core import events as ev
from kvd.types import Member

from .memory import Entry, Memory, Meta, State, Token, Violation, grains

if TYPE_CHECKING:
    from .simulation import Simulation

Steps: TypeAlias = Generator[None, None, None]
Reply: TypeAlias = ev.ReservedReply | ev.PublishedReply | ev.AbortedReply | ev.ErrorReply
WAIT_STEPS_MAX = 400


@dataclass(slots=True)
class Ask:
    """One message of a client's ring. Fields that its kind does not use stay empty."""

    kind: str  # reserve, publish, abort
    op: int
    reservation: int = 0
    first: int = 0
    count: int = 0
    include: bytes = b""
    checksum: int = 0
    keys: list[bytes] = field(default_factory=list)
    members: tuple[Member, ...] = ()
    family_members: int = 1
    parent: bytes | None = None
    request: int = 0
    namespace: int = 0
    skip_pending: bool = False

    def __str__(self) -> str:
        rest = (
            f"{[key[:4].hex() for key in self.keys]}" if self.keys else f"of reservation {self.reservation}"
        )
        items = f" items {self.first}+{self.count or len(self.include)}" if not self.keys else ""
        return f"{self.kind} {rest}{items} (op {self.op})"


@dataclass(slots=True, eq=False)
class Attachment:
    """One connection of one process to one life of the daemon."""

    serial: int  # never used twice
    slot: int
    process: Process
    meta: Meta
    memory: Memory
    writable: bool
    asks_max: int = 4
    answers_max: int = 4
    asks: deque[Ask] = field(default_factory=deque)  # in shared memory: they outlive the process
    answers: deque[Reply] = field(default_factory=deque)
    owed: deque[Reply] = field(default_factory=deque)  # answers that found the ring full
    unanswered: dict[int, str] = field(
        default_factory=dict
    )  # asked, and the core has not answered: op -> kind
    arrived: dict[int, Reply | None] = field(default_factory=dict)  # op -> answer; None: still waited for
    abandoned: dict[int, int] = field(default_factory=dict)  # op -> items, of calls whose caller gave up
    hazards: dict[int, tuple[int, int]] = field(default_factory=dict)
    touches: list[ev.Touch] = field(default_factory=list)
    served: bool = True  # by the daemon
    gone: bool = False  # the daemon gave the slot back
    revoked: bool = False  # a later daemon took over: no new leases on the index of the earlier one
    leaving: bool = False  # the process detaches in order
    words: int = 0
    ops: int = 0

    def __str__(self) -> str:
        return f"attachment {self.serial} (slot {self.slot}, {self.process})"

    def flush(self) -> bool:
        """Put owed answers in the ring; whether all found room."""
        while self.owed and len(self.answers) < self.answers_max:
            self.answers.append(self.owed.popleft())
        return not self.owed

    def push(self, ask: Ask) -> bool:
        """Put an ask in the ring; False if it is full or nobody serves it any more."""
        if not self.served or len(self.asks) >= self.asks_max:
            return False
        self.asks.append(ask)
        self.unanswered[ask.op] = ask.kind
        self.arrived[ask.op] = None
        return True

    def poll(self) -> None:
        """Take an answer from the ring. Violation: nobody waits for it."""
        if not self.answers:
            return
        answer = self.answers.popleft()
        if self.arrived.get(answer.op, answer) is not None:
            raise Violation(f"{self} got an answer to op {answer.op} that nobody waits for")
        given_up = self.abandoned.pop(answer.op, None)
        if given_up is None:
            self.arrived[answer.op] = answer
            return
        del self.arrived[answer.op]
        if isinstance(answer, ev.ReservedReply) and answer.reservation:
            self.process.spawn(self, self.process.give_back(self, answer.reservation, 0, given_up))

    def protect(self, number: int, generation: int) -> int:
        """Write a hazard; returns its word."""
        self.words += 1
        self.hazards[self.words] = (number, generation)
        return self.words


@dataclass(slots=True, eq=False)
class Lease:
    """A lease that was taken and validated."""

    process: Process
    attachment: Attachment
    entry: Entry
    generation: int
    key: bytes
    word: int

    def end(self) -> None:
        """Let go."""
        self.entry.leases.remove(self)
        self.process.leases.remove(self)
        self.attachment.hazards.pop(self.word, None)


@dataclass(slots=True, eq=False)
class Export:
    """A lease on its way from a scheduler to a worker."""

    lease: Lease
    scheduler: Process
    worker: Process
    answered: bool = False


@dataclass(slots=True, eq=False)
class Copy:
    """A copy into reserved slots, which goes on whatever its caller does."""

    todo: deque[tuple[int, Token]]
    cancelled: bool = False
    running: bool = True


class Process:
    """One client process."""

    def __init__(self, sim: Simulation, pid: int) -> None:
        self.sim = sim
        self.pid = pid
        self.rng: Random = sim.rng
        self.alive = True
        self.stopped = False
        self.tasks: list[tuple[Steps, Attachment]] = []  # and what they work with
        self.leases: list[Lease] = []
        self.attachment: Attachment | None = None

    def __str__(self) -> str:
        return f"process {self.pid}"

    def spawn(self, at: Attachment, task: Steps) -> None:
        """Begin a task that works with this attachment."""
        self.tasks.append((task, at))

    def runs(self, at: Attachment) -> bool:
        """Whether a task works with this attachment."""
        return any(one is at for _, one in self.tasks)

    def uses(self, at: Attachment) -> bool:
        """Whether anything of this attachment is still read, written or about to be."""
        return self.runs(at) or any(lease.attachment is at for lease in self.leases)

    def step(self) -> bool:
        """One step of one task, and a look at the answers. False: there is nothing to do."""
        attachment = self.attachment
        if attachment is not None and attachment.answers:
            attachment.poll()
        if not self.tasks:
            return False
        at = self.rng.randrange(len(self.tasks)) if len(self.tasks) > 1 else 0
        entry = self.tasks[at]
        try:
            next(entry[0])
        except StopIteration:
            self.tasks.remove(entry)
        return True

    # -- asking --------------------------------------------------------------------------------------------------

    def ask(self, at: Attachment, ask: Ask) -> Generator[None, None, bool]:
        """Put it in the ring when there is room; False: the daemon does not serve us any more."""
        at.ops += 1
        ask.op = at.ops
        while not at.push(ask):
            if not at.served:
                return False
            yield
        return True

    def answer(self, at: Attachment, op: int, items: int = 0) -> Generator[None, None, Reply | None]:
        """Wait for an answer. None: the caller's deadline passed, or the daemon is gone."""
        impatient = self.rng.random() < self.sim.shape.impatience
        for waited in range(WAIT_STEPS_MAX):
            reply = at.arrived.get(op)
            if reply is not None:
                del at.arrived[op]
                return reply
            if not at.served and not at.answers and not at.owed:
                return None
            if impatient and waited > 2:
                break
            yield
        at.abandoned[op] = items
        return None

    def give_back(self, at: Attachment, reservation: int, first: int, count: int) -> Steps:
        """Abort items and see that they came back."""
        ask = Ask("abort", 0, reservation, first, count)
        if (yield from self.ask(at, ask)):
            yield from self.answer(at, ask.op)

    # -- reading -------------------------------------------------------------------------------------------------

    def lease(self, at: Attachment, key: bytes) -> Generator[None, None, Lease | None]:
        """Steps L1 … L6."""
        meta = at.meta
        number = meta.index.get(key)
        yield
        if number is None:
            return None
        entry = meta.entries[number]
        generation, state = entry.sg
        if state is not State.READY or entry.key != key:
            return None
        yield
        word = at.protect(number, generation)
        yield
        return self.validated(at, entry, generation, key, word)

    def validated(self, at: Attachment, entry: Entry, generation: int, key: bytes, word: int) -> Lease | None:
        """The second look, after the hazard: the lease, or None (the hazard is gone then)."""
        if entry.sg != (generation, State.READY) or at.revoked:
            at.hazards.pop(word, None)
            self.sim.count("leases backed off")
            return None
        self.sim.count("leases")
        lease = Lease(self, at, entry, generation, key, word)
        entry.leases.append(lease)
        self.leases.append(lease)
        return lease

    def look(self, lease: Lease) -> Steps:
        """Read every grain of every member. Violation: something else stands there."""
        entry, tokens = lease.entry, lease.attachment.memory.tokens
        if entry.key != lease.key:
            raise Violation(f"entry {entry.number} has another key under the lease of {self}")
        for member, record in list(entry.members.items()):
            for grain in record.grains():
                token = tokens.get(grain)
                if token is None or token[0] != lease.key or token[1] != member:
                    found = "nothing" if token is None else f"{token.key[:4].hex()}:{token.member}"
                    raise Violation(
                        f"{self} reads {found} under its lease of {lease.key[:4].hex()}:{member} "
                        f"(entry {entry.number}, now {entry.sg[0]} {entry.sg[1].name}, leased {lease.generation})"
                    )
                if self.rng.random() < 0.4:
                    yield
        if entry.sg[0] != lease.generation:
            raise Violation(f"entry {entry.number} has another generation under the lease of {self}")

    def read(self, at: Attachment, keys: list[bytes], looks: int) -> Steps:
        """Match and lease a prefix, read it some times, perhaps let a worker adopt it, let go."""
        started_ns = self.sim.now_ns
        leases: list[Lease] = []
        for key in keys:
            lease = yield from self.lease(at, key)
            if lease is None:
                break
            leases.append(lease)
        self.touch(at, keys, leases, started_ns)
        for lease in leases:
            yield from self.look(lease)
        if leases and self.rng.random() < self.sim.shape.adoption:
            yield from self.export(self.rng.choice(leases))
            leases = [
                lease for lease in leases if lease in lease.entry.leases
            ]  # one may be the worker's alone now
        for _ in range(looks):
            for lease in leases:
                yield from self.look(lease)
            yield
        if self.rng.random() < 0.03:
            return  # forgotten: held until the process ends
        for lease in leases:
            if lease in lease.entry.leases:
                lease.end()
                yield

    def touch(self, at: Attachment, keys: list[bytes], leases: list[Lease], started_ns: int) -> None:
        """The trail that a read leaves. The ring is lossy."""
        if len(at.touches) >= 8:
            return
        matched = len(leases)
        missed = int.from_bytes(keys[matched][:8], "little") if matched < len(keys) else 0
        deepest = leases[-1].entry.number if leases else ev.NONE
        request = self.rng.randrange(4)
        at.touches.append(
            ev.Touch(
                request, started_ns, deepest, 0, matched, len(keys), missed, 900, ev.TouchKind.ACQUIRE, 0
            )
        )

    def export(self, lease: Lease) -> Steps:
        """Let another process adopt this lease; hold it until that has answered or is dead."""
        meta = lease.attachment.meta
        workers = [
            at for one in self.sim.processes
            if one is not self and one.alive and (at := one.attachment) is not None and at.meta is meta
            and not at.leaving and at.served
        ]  # fmt: skip
        if not workers:
            return
        at = self.rng.choice(workers)
        export = Export(lease, self, at.process)
        at.process.spawn(at, at.process.adopt(at, export))
        yield from self.handed_over(export)

    def handed_over(self, export: Export) -> Steps:
        """The scheduler's side: A6."""
        while not export.answered and export.worker.alive and export.worker.attachment is not None:
            yield
        if self.rng.random() < 0.5:
            export.lease.end()

    def adopt(self, at: Attachment, export: Export) -> Steps:
        """The worker's side: A1 … A5. Violation: it fails although the scheduler holds on."""
        source = export.lease
        if at.meta is not source.attachment.meta or not at.served:
            export.answered = True
            return
        yield
        word = at.protect(source.entry.number, source.generation)
        yield
        while source.entry.sg == (source.generation, State.EVICTING) and export.scheduler.alive:
            yield
        lease = self.validated(at, source.entry, source.generation, source.key, word)
        if lease is None:
            if export.scheduler.alive and at.served and source.attachment.served:
                raise Violation(
                    f"{self} could not adopt entry {source.entry.number}, which {export.scheduler} holds"
                )
            export.answered = True
            return
        yield
        self.sim.count("leases adopted")
        export.answered = True
        yield from self.look(lease)
        for _ in range(self.rng.randrange(6)):
            yield
        yield from self.look(lease)
        lease.end()

    # -- writing -------------------------------------------------------------------------------------------------

    def write(self, at: Attachment, ask: Ask) -> Steps:
        """Reserve, fill, publish in pieces or give back. Its caller may lose patience at any step."""
        if not (yield from self.ask(at, ask)):
            return
        items = len(ask.keys) * len(ask.members)
        reply = yield from self.answer(at, ask.op, items)
        if not isinstance(reply, ev.ReservedReply) or not reply.reservation:
            return
        self.sim.reservations.append((at.meta.epoch, at.serial, reply.reservation, items))
        m = len(ask.members)
        granted = [item for item in range(items) if reply.places[item] != ev.NO_PLACE]
        copy = Copy(deque())
        for item in granted:
            token = Token(ask.keys[item // m], ask.members[item % m].index, at.serial)
            for grain in grains(reply.places[item], ask.members[item % m].size_bytes):
                copy.todo.append((grain, token))
        self.spawn(at, self.copying(at, copy, reply.reservation))
        impatient = self.rng.random() < self.sim.shape.impatience
        waited = 0
        while copy.running:
            yield
            waited += 1
            if impatient and waited > 3:
                copy.cancelled = True
                yield from self.quiesced(copy)
                yield from self.give_back(at, reply.reservation, 0, items)
                return
        if at.served:
            yield from self.publish(at, reply.reservation, items, set(granted))

    def copying(self, at: Attachment, copy: Copy, reservation: int) -> Steps:
        """The copy itself, as a device would do it: a few grains a step, until it is done or was really stopped."""
        todo = copy.todo
        while todo and not copy.cancelled:
            for _ in range(min(len(todo), self.rng.choice((1, 1, 2, 6)))):
                grain, token = todo.popleft()
                at.memory.write(grain, token, reservation)
            yield
        copy.running = False

    def quiesced(self, copy: Copy) -> Steps:
        """Until nothing is written any more: only then may slots be given back."""
        while copy.running:
            yield

    def publish(self, at: Attachment, reservation: int, items: int, live: set[int]) -> Steps:
        """Publish ranges of items until none is left, or give the rest back, or forget it until death."""
        ways = self.rng.random()
        while live:
            first = min(live) if ways < 0.7 else self.rng.randrange(items)
            count = min(items - first, self.rng.choice((1, 2, items)))
            include = bytes(self.rng.random() < 0.9 for _ in range(count))
            if ways > 0.9:
                yield from self.give_back(at, reservation, first, count)
                live -= set(range(first, first + count))
                continue
            ask = Ask("publish", 0, reservation, first, 0, include, self.rng.randrange(3))
            if not (yield from self.ask(at, ask)):
                return
            reply = yield from self.answer(at, ask.op)
            if reply is None:
                if at.served and self.rng.random() < 0.5:
                    yield from self.give_back(at, reservation, 0, items)
                return
            if not isinstance(reply, ev.PublishedReply):
                raise Violation(f"{at} may publish items {first}+{count} of {reservation} and got {reply!r}")
            self.settle(at, first, include, reply.statuses, live)

    def settle(self, at: Attachment, first: int, include: bytes, statuses: bytes, live: set[int]) -> None:
        """Every item got the answer that it must get."""
        for item, (wanted, status) in enumerate(zip(include, statuses, strict=True), first):
            expected = (
                status == ev.PublishStatus.SKIPPED if not wanted
                else status == ev.PublishStatus.GONE if item not in live
                else status not in (ev.PublishStatus.SKIPPED, ev.PublishStatus.GONE)
            )  # fmt: skip
            if not expected:
                raise Violation(
                    f"{at} published item {item} ({wanted}, live {item in live}) and was told {status}"
                )
            if wanted:
                live.discard(item)

    def stray(self, at: Attachment, reservation: int, items: int, kind: str) -> Steps:
        """Publish or abort what belongs to somebody else, or is long over: nothing may come of it."""
        ask = Ask(kind, 0, reservation, 0, items, bytes([1]) * items, 0)
        if not (yield from self.ask(at, ask)):
            return
        reply = yield from self.answer(at, ask.op)
        if isinstance(reply, ev.PublishedReply) and set(reply.statuses) != {ev.PublishStatus.GONE}:
            raise Violation(
                f"{at} published {list(reply.statuses)} of reservation {reservation}, not its own"
            )
        if isinstance(reply, ev.AbortedReply) and reply.count:
            raise Violation(f"{at} gave back {reply.count} items of reservation {reservation}, not its own")
