"""One schedule: a host drawn from a seed, and so many events on it, drawn from the same seed.

`Shape` says what the host is like (a pool far too small for what is written) and, as swarm testing does, which kinds of
events are frequent in this schedule and which are absent. `Simulation.run` draws events until there were `events_max`,
then lets everybody finish, kills all clients and demands that everything came back. Virtual time; no thread, no clock,
no other source of chance than `Random(seed)`: the same seed tells the same story.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable
from functools import cache
from itertools import accumulate
from random import Random
from typing import Final
from unittest.mock import patch

from kvd.core import administration, publishing
from kvd.core import events as ev
from kvd.core.core import CoreConfig
from kvd.core.policy import policy_names
from kvd.types import Member

from .daemon import Crashed, Daemon
from .memory import MIB, Memory, Violation
from .processes import Ask, Attachment, Process

CHAINS: Final = 5
CHAIN_LENGTH: Final = 8
SIZES: Final = (MIB // 2, MIB, 2 * MIB, 3 * MIB)
TRACE_LINES_MAX: Final = 4000
SECOND_NS: Final = 10**9
IDLE_DRAWS_MAX: Final = 100_000  # in a row: who is stopped stays so where nothing drawn continues it

# Kind of event -> how often, relative to the others. Those in ALWAYS are in every schedule.
WEIGHTS: Final[dict[str, float]] = {
    "step": 220, "serve": 40, "read": 16, "write": 9, "arrive": 5, "notice": 3, "again": 4, "tick": 1.5, "clock": 1,
    "die": 0.7, "stop": 0.8, "continue": 1.5, "disconnect": 0.3, "detach": 0.5, "stray": 1, "populate": 1, "pin": 0.5,
    "unpin": 0.3, "withdraw": 0.4, "clear": 0.15, "buckets": 0.3, "crash": 0.1, "left": 12,
}  # fmt: skip
ALWAYS: Final = frozenset({"step", "serve", "read", "write", "arrive", "notice", "again"})


@cache
def key_of(chain: int, at: int) -> bytes:
    """Identity of a family."""
    return hashlib.sha256(f"chain {chain}, family {at}".encode()).digest()


PARENTS: Final = {
    key_of(chain, at): key_of(chain, at - 1) if at else None
    for chain in range(CHAINS)
    for at in range(CHAIN_LENGTH)
}
NAMESPACES: Final = {
    key_of(chain, at): 1 + (chain > 2) for chain in range(CHAINS) for at in range(CHAIN_LENGTH)
}


class Shape:
    """What one schedule is like, drawn from its seed."""

    def __init__(self, rng: Random, without: frozenset[str]) -> None:
        self.segments = rng.choice(([8 * MIB], [6 * MIB, 5 * MIB], [16 * MIB], [4 * MIB, 12 * MIB]))
        self.families_max = rng.choice((10, 20, 40))
        self.records_max = rng.choice((14, 30, 60))
        self.clients_max = rng.choice((3, 5))
        self.processes_max = rng.choice((2, 3, 5))
        self.config = CoreConfig(
            policy=rng.choice(policy_names), protected_share=rng.choice((0.25, 0.7)),
            evict_batch_families=rng.choice((1, 4, 64)), hard_pin_share=rng.choice((0.2, 0.5)),
            strict_duplicates=rng.random() < 0.5, journal_requests=3, ghosts=16,
            partial_grace_ns=rng.choice((0, SECOND_NS)), partial_idle_ns=rng.choice((0, SECOND_NS, 60 * SECOND_NS)),
            answers_early=rng.random() < 0.5,
        )  # fmt: skip
        sizes = list(SIZES)
        rng.shuffle(sizes)
        self.sizes = sizes[: rng.choice((1, 2, 3))]
        self.impatience = rng.choice((0.0, 0.02, 0.2))
        self.adoption = rng.choice((0.0, 0.3, 0.7))
        self.interleaving = rng.choice((0.0, 0.1, 0.5))
        self.populated = rng.random() < 0.7
        self.prefilled = rng.random() < 0.6
        self.death_in_turn = rng.choice((0.0003, 0.0003, 0.005))  # of the daemon, between two effects
        self.warm_restarts = rng.choice((0.0, 0.7, 1.0, 1.0))
        self.ring_frames = rng.choice((1, 2, 8))
        self.turn_items = rng.choice((1, 3, 4096))  # of long operations
        self.weights: dict[str, float] = {}
        for kind, weight in WEIGHTS.items():
            absent = kind not in ALWAYS and rng.random() < 0.35
            scale = rng.choice((0.3, 1.0, 1.0, 3.0))
            self.weights[kind] = 0.0 if absent or kind in without else weight * scale


class Simulation:
    """One seed's host."""

    def __init__(self, seed: int, *, tracing: bool = False, without: frozenset[str] = frozenset()) -> None:
        self.seed = seed
        self.without = without
        self.rng = Random(seed)
        self.shape = Shape(self.rng, without)
        self.tracing = tracing
        self.trace: deque[str] = deque(maxlen=TRACE_LINES_MAX)
        self.events = 0
        self.events_max = 0  # of the run
        self.counts: dict[str, int] = {}
        self.tally: dict[str, int] = {}  # what came of the events
        self.now_ns = 10**12
        self.parents = PARENTS
        self.processes: list[Process] = []
        self.reservations: deque[tuple[int, int, int, int]] = deque(maxlen=16)
        self.unnoticed: list[Attachment] = []  # their process is dead and no pidfd fired yet
        self._serial = self._epoch = self._pid = 0
        self._breathless = False
        self.daemon = self._new_daemon(Memory(self.shape.segments))
        self._usable()
        self._handlers: dict[str, Callable[[], bool]] = {
            kind: getattr(self, f"_{kind}") for kind in self.shape.weights
        }

    # -- numbers -------------------------------------------------------------------------------------------------

    def next_serial(self) -> int:
        """Of an attachment."""
        self._serial += 1
        return self._serial

    def next_epoch(self) -> int:
        """Of a daemon."""
        self._epoch += 1
        return self._epoch

    def namespace_of(self, key: bytes) -> int:
        """The namespace that this family is always written in."""
        return NAMESPACES[key]

    def count(self, what: str, count: int = 1) -> None:
        """Something happened that the figures should show."""
        self.tally[what] = self.tally.get(what, 0) + count

    @property
    def event(self) -> int:
        """Number of the event that is being performed, from 1 on; the last one's during the end."""
        return min(self.events + 1, self.events_max)

    def say(self, what: str) -> None:
        """A line of the trace."""
        self.trace.append(f"{self.event:6} {what}")

    # -- running -------------------------------------------------------------------------------------------------

    def run(self, events_max: int, upto: int | None = None) -> None:
        """Draw so many events, then end in order. Raises Violation or InvariantError. `upto`: stop there instead."""
        shape = self.shape
        self.events_max = events_max
        with (
            patch.object(publishing, "gone_items_per_turn", shape.turn_items),
            patch.object(administration, "clear_families_per_turn", shape.turn_items),
        ):
            self._run(events_max, upto)

    def _run(self, events_max: int, upto: int | None) -> None:
        kinds = list(self.shape.weights)
        totals = list(accumulate(self.shape.weights.values()))
        choices, handlers, counts, rng = self.rng.choices, self._handlers, self.counts, self.rng
        self._arrive()
        if self.shape.prefilled:
            self._prefill()
        idle_draws = 0
        while self.events < events_max and idle_draws < IDLE_DRAWS_MAX:
            idle_draws += 64
            for kind in choices(kinds, cum_weights=totals, k=64):
                self.now_ns += rng.randrange(1, 200_000)
                if self._performed(kind, handlers[kind]):
                    idle_draws = 0
                    counts[kind] = counts.get(kind, 0) + 1
                    self.events += 1
                    if self.events == upto and upto < events_max:
                        return
                    if self.events >= events_max:
                        break
        self._finish()

    def _performed(self, kind: str, handler: Callable[[], bool]) -> bool:
        if self.tracing and kind not in ("step", "serve"):
            self.say(f"event {kind}")
        try:
            return handler()
        except Crashed:
            self._restart()
            return True

    def breathe(self) -> None:
        """Between two effects of the daemon: clients run, or it is killed."""
        shape = self.shape
        if self._breathless or not shape.interleaving:
            return
        while self.rng.random() < shape.interleaving:
            self._step()
        if self.rng.random() < shape.death_in_turn and shape.weights["crash"]:
            raise Crashed

    def _prefill(self) -> None:
        """Begin with a pool that is full, or nearly."""
        process = self.processes[0]
        at = process.attachment
        assert at is not None
        self._breathless = True
        for chain in range(CHAINS):
            ask = self._ask(chain, 0, CHAIN_LENGTH // 2)
            process.spawn(at, process.write(at, ask))
            for _ in range(WAIT):
                if not process.step():
                    break
                self._serve_all()
        self._breathless = False

    def _serve_all(self) -> None:
        for attachment in list(self.daemon.by_slot.values()):
            self.daemon.serve(attachment, 8)

    # -- events: clients -----------------------------------------------------------------------------------------

    def _some(self) -> Process | None:
        """A process that runs."""
        running = [one for one in self.processes if one.alive and not one.stopped]
        return self.rng.choice(running) if running else None

    def _step(self) -> bool:
        process = self._some()
        return process is not None and process.step()

    def _served(self) -> list[Attachment]:
        return [one for one in self.daemon.by_slot.values() if one.served]

    def _serve(self) -> bool:
        waiting = [one for one in self._served() if one.asks or one.owed or one.touches]
        if not waiting:
            return False
        attachment = self.rng.choice(waiting)
        self.daemon.serve(attachment, self.rng.randint(1, self.shape.ring_frames))
        return True

    def _arrive(self) -> bool:
        """A new process attaches, or one that lost its daemon attaches again."""
        lost = [
            one for one in self.processes
            if one.alive and not one.stopped and (one.attachment is None or not one.attachment.served)
        ]  # fmt: skip
        if lost:
            process = self.rng.choice(lost)
        elif sum(one.alive for one in self.processes) < self.shape.processes_max:
            self._pid += 1
            process = Process(self, self._pid)
            self.processes.append(process)
        else:
            return False
        process.attachment = self.daemon.attach(process, self.rng.random() < 0.9)
        if self.tracing:
            self.say(f"{process} attaches: {process.attachment}")
        return True

    def _ready(self) -> Attachment | None:
        """Of a process that may begin something."""
        process = self._some()
        if process is None or len(process.tasks) > 4:
            return None
        at = process.attachment
        return None if at is None or at.leaving else at

    def _read(self) -> bool:
        at = self._ready()
        if at is None:
            return False
        known = [chain for chain in range(CHAINS) if key_of(chain, 0) in at.meta.index]
        chain = self.rng.choice(known) if known and self.rng.random() < 0.8 else self.rng.randrange(CHAINS)
        count = self.rng.randint(1, CHAIN_LENGTH)
        keys = [key_of(chain, family) for family in range(count)]
        at.process.spawn(at, at.process.read(at, keys, self.rng.choice((0, 1, 4))))
        return True

    def _write(self) -> bool:
        at = self._ready()
        if at is None:
            return False
        chain, begin = self.rng.randrange(CHAINS), self.rng.choice((0, 0, self.rng.randrange(CHAIN_LENGTH)))
        at.process.spawn(at, at.process.write(at, self._ask(chain, begin, self.rng.randint(1, 4))))
        return True

    def _ask(self, chain: int, begin: int, count: int) -> Ask:
        keys = [key_of(chain, at) for at in range(begin, min(begin + count, CHAIN_LENGTH))]
        return Ask(
            "reserve", 0, keys=keys, members=self._members(chain), family_members=1 if chain < 3 else 2,
            parent=key_of(chain, begin - 1) if begin else None, request=self.rng.randrange(4),
            namespace=self.namespace_of(keys[0]), skip_pending=self.rng.random() < 0.3,
        )  # fmt: skip

    def _members(self, chain: int) -> tuple[Member, ...]:
        """Chains 0 … 2 have families of one member, the others of two, and chain 4 an optional third."""
        sizes = self.shape.sizes
        if chain < 3:
            return (Member(0, sizes[chain % len(sizes)]),)
        both = (Member(0, sizes[0]), Member(1, sizes[-1]))
        if chain == 4 and self.rng.random() < 0.2:
            return (Member(7, sizes[0]),)
        return self.rng.choice((both, both, both[:1], both[1:]))

    def _stray(self) -> bool:
        at = self._ready()
        if at is None:
            return False
        foreign = [one for one in self.reservations if one[0] == at.meta.epoch and one[1] != at.serial]
        if not foreign:
            return False
        _, _, reservation, items = self.rng.choice(foreign)
        at.process.spawn(
            at, at.process.stray(at, reservation, items, self.rng.choice(("publish", "publish", "abort")))
        )
        return True

    def _die(self) -> bool:
        living = [one for one in self.processes if one.alive]
        if not living:
            return False
        self._kill(self.rng.choice(living))
        return True

    def _kill(self, process: Process) -> None:
        """SIGKILL: it does nothing any more; what it pushed stands in its ring, answers are lost."""
        process.alive = False
        process.tasks.clear()
        process.attachment = None
        self.processes.remove(process)
        mine = (one for one in self.daemon.by_slot.values() if one.process is process and not one.gone)
        self.unnoticed.extend(mine)

    def _notice(self) -> bool:
        """A pidfd fires."""
        if not self.unnoticed:
            return False
        attachment = self.unnoticed.pop(self.rng.randrange(len(self.unnoticed)))
        self.daemon.exited(attachment)
        return True

    def _stop(self) -> bool:
        process = self._some()
        if process is None:
            return False
        process.stopped = True
        return True

    def _continue(self) -> bool:
        stopped = [one for one in self.processes if one.stopped]
        if not stopped:
            return False
        self.rng.choice(stopped).stopped = False
        return True

    def _disconnect(self) -> bool:
        """The connection breaks and the process lives on, perhaps stopped: it may read and write for long."""
        served = [one for one in self._served() if one.process.alive]
        if not served:
            return False
        attachment = self.rng.choice(served)
        self.daemon.disconnect(attachment)
        return True

    def _detach(self) -> bool:
        """A process leaves in order: it begins nothing new, and goes when all it does is done."""
        candidates = [one for one in self._served() if one.process.alive and not one.process.stopped]
        if not candidates:
            return False
        attachment = self.rng.choice(candidates)
        attachment.leaving = True
        if attachment.process.runs(attachment) or attachment.unanswered:
            return True
        attachment.process.attachment = None
        self.daemon.detach(attachment)
        return True

    # -- events: the host ----------------------------------------------------------------------------------------

    def _again(self) -> bool:
        if not self.daemon.later:
            return False
        self.daemon.turn(ev.Again(self.daemon.later.popleft()))
        return True

    def _tick(self) -> bool:
        self.now_ns += SECOND_NS
        self.daemon.turn(ev.Tick())
        return True

    def _clock(self) -> bool:
        """The clock jumps: a suspended host, or a broken one."""
        self.now_ns = max(10**11, self.now_ns + self.rng.choice((-10, 60, 3_600, 10**7)) * SECOND_NS)
        self.daemon.turn(ev.Tick())
        return True

    def _populate(self) -> bool:
        """One more frame of a segment may be used."""
        return self.daemon.populate()

    def _usable(self) -> None:
        """A daemon begins to serve with the first frames, or with all."""
        was, self._breathless = self._breathless, True
        while self._populate() and self.shape.populated:
            pass
        self._breathless = was

    def _pin(self) -> bool:
        daemon = self.daemon
        if not daemon.meta.index:
            return False
        key = self.rng.choice(list(daemon.meta.index))
        hard = self.rng.random() < 0.5
        before = daemon.core.counters["pin_refusals"]
        entries = daemon.meta.index[key].to_bytes(4, "little")
        daemon.administrate("pin", ev.Pin, entries, ev.PinKind.HARD if hard else ev.PinKind.SOFT)
        if hard and daemon.core.counters["pin_refusals"] == before:
            daemon.pinned.append(key)
        return True

    def _unpin(self) -> bool:
        """All pins."""
        daemon = self.daemon
        entries = b"".join(entry.to_bytes(4, "little") for entry in daemon.meta.index.values())
        daemon.administrate("unpin", ev.Unpin, entries)
        daemon.pinned.clear()
        return True

    def _withdraw(self) -> bool:
        daemon = self.daemon
        if not daemon.meta.index:
            return False
        key = self.rng.choice(list(daemon.meta.index))
        daemon.administrate("withdraw", ev.Withdraw, daemon.meta.index[key].to_bytes(4, "little"))
        if key in daemon.meta.index:
            raise Violation(f"family {key[:4].hex()} was withdrawn and can still be found")
        daemon.pinned = [one for one in daemon.pinned if one in daemon.meta.index]
        return True

    def _clear(self) -> bool:
        self.daemon.administrate("clear", ev.Clear, self.rng.choice((None, 1, 2)))
        return True

    def _buckets(self) -> bool:
        """Both buckets of some keys are full, or have room again."""
        full = self.daemon.no_room
        key = key_of(self.rng.randrange(CHAINS), self.rng.randrange(CHAIN_LENGTH))
        if key in full:
            full.remove(key)
        else:
            full.add(key)
        return True

    # -- events: the daemon dies ---------------------------------------------------------------------------------

    def _new_daemon(self, memory: Memory) -> Daemon:
        shape = self.shape
        daemon = Daemon(self, memory, shape.config, shape.families_max, shape.records_max)
        self.daemon = daemon
        return daemon

    def _crash(self) -> bool:
        self._restart()
        return True

    def _restart(self) -> None:
        """The daemon is dead and another starts, over the same memory or over new. Clients keep their mappings."""
        dead = self.daemon
        warm = self.rng.random() < self.shape.warm_restarts
        if self.tracing:
            self.say(f"the daemon is killed, another starts over {'the same' if warm else 'new'} memory")
        for attachment in dead.by_slot.values():
            attachment.served = False  # and its process reads on in the old index until it notices
        self.unnoticed.clear()
        was, self._breathless = self._breathless, True
        if warm:
            self.count("adoptions of memory")
            living = [one for one in dead.by_slot.values() if one.process.alive]
            self._new_daemon(dead.memory).take_over(dead, living)
        else:
            self._new_daemon(Memory(self.shape.segments))
        self._breathless = was
        self._usable()

    def _left(self) -> bool:
        """A process that attached anew holds nothing of an earlier daemon's memory any more, and says so."""
        for ghost in list(self.daemon.by_slot.values()):
            process = ghost.process
            anew = process.attachment is not None and process.attachment.served
            if (
                ghost.revoked
                and not ghost.gone
                and anew
                and process.alive
                and not process.stopped
                and not process.uses(ghost)
            ):
                self.count("ghosts that left")
                self.daemon.forget(ghost)
                return True
        return False

    # -- the end -------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        """Everybody is answered; then everybody goes, and nothing is left."""
        self._breathless = True
        if self.tracing:
            self.say("the end: all rings are served, all clients die, everything is cleared")
        daemon = self.daemon
        for _ in range(64):
            for attachment in list(daemon.by_slot.values()):
                daemon.serve(attachment, 8)
                if attachment.process.alive:
                    while attachment.answers:
                        attachment.poll()
        for attachment in daemon.by_slot.values():
            if attachment.served and attachment.process.alive and (attachment.unanswered or attachment.owed):
                raise Violation(f"{attachment} waits for {attachment.unanswered} for ever")
        self._finish_later()
        for process in list(self.processes):
            self._kill(process)
        while self.unnoticed:
            daemon.exited(self.unnoticed.pop())
        self._finish_later()
        self._unpin()
        daemon.administrate("clear", ev.Clear, None)
        self._finish_later()
        daemon.turn(ev.Tick())
        self._check_empty()

    def _finish_later(self) -> None:
        while self.daemon.later:
            self.daemon.turn(ev.Again(self.daemon.later.popleft()))

    def _check_empty(self) -> None:
        daemon = self.daemon
        statistics = daemon.core.statistics()
        pool = statistics["pool"]
        names = (
            "families", "families_promised", "families_limbo", "families_partial", "records", "runs", "reservations",
        )  # fmt: skip
        left = {name: value for name in names if (value := statistics[name])}
        assert isinstance(pool, dict)
        if pool["free_frames_bytes"] != pool["usable_bytes"]:
            left["pool"] = pool
        for name, found in (
            ("index", daemon.meta.index), ("records", daemon.meta.records), ("slots", daemon.memory.owners),
            ("clients", daemon.by_slot), ("administration", daemon.admin_asked),
        ):  # fmt: skip
            if found:
                left[f"{name} in memory"] = found
        if left:
            raise Violation(f"all clients are gone, all was cleared, and this is left: {left}")


WAIT: Final = 200
