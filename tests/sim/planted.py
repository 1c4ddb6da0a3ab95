"""Faults that the simulation must find: each takes one step of a protocol away, or does it at the wrong moment.

`PLANTED` maps the name of a fault to what is left out, where the promise breaks (a part of the message) and a patch to
apply. `docs/design/sim.md` lists them; `test_planted.py` applies each and demands that it is found within `SEEDS_MAX`
schedules, by the promise that it breaks and not by chance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final
from unittest.mock import patch

from kvd.core.leaving import Leaving
from kvd.core.publishing import Publishing
from kvd.core.reservations import LIVE, Reservation, Reservations
from kvd.core.space import Space

from . import adoption
from .daemon import Daemon
from .memory import State
from .processes import Attachment, Copy, Export, Lease, Process, Steps
from .simulation import SECOND_NS, Simulation

SEEDS_MAX: Final = 3000


@dataclass(frozen=True, slots=True)
class Fault:
    """One planted fault."""

    what: str
    found: tuple[str, ...]  # one of these is in the message
    plant: Callable[[], AbstractContextManager[Any]]


def _ring_not_drained(self: Daemon, attachment: Attachment) -> None:
    self.forget(attachment)


def _held_ignored(self: Daemon) -> set[tuple[int, int]]:
    return set()


def _disconnect_frees(self: Daemon, attachment: Attachment) -> None:
    """As if EOF were death, for what the client was writing."""
    attachment.unanswered.clear()
    self.forget(attachment)


def _any_client(self: Publishing, client: int, number: int) -> Reservation | None:
    return self._books.reservations.live.get(number)


@contextmanager
def _published_twice() -> Iterator[None]:
    """What was published stays as if it were to be published."""
    not_live = Reservations.not_live

    def keeps(self: Reservations, reservation: Reservation, items: Any) -> None:
        items = list(items)
        not_live(self, reservation, items)
        if len(items) == 1 and reservation.live_count:
            reservation.states[items[0]] = LIVE

    with patch.object(Reservations, "not_live", keeps), patch.object(Daemon, "check", lambda self: None):
        yield


@contextmanager
def _leases_expire() -> Iterator[None]:
    """A lease counts for a minute, by a clock that jumps."""
    scan, protect = Daemon.scan, Attachment.protect
    written: dict[tuple[int, int], int] = {}

    def stamped(self: Attachment, number: int, generation: int) -> int:
        word = protect(self, number, generation)
        written[self.serial, word] = self.process.sim.now_ns
        return word

    def young(self: Daemon) -> set[tuple[int, int]]:
        for attachment in self.by_slot.values():
            for word in list(attachment.hazards):
                if self.sim.now_ns - written[attachment.serial, word] > 60 * SECOND_NS:
                    del attachment.hazards[word]
        return scan(self)

    with patch.object(Attachment, "protect", stamped), patch.object(Daemon, "scan", young):
        yield


def _hands_over_at_once(self: Process, export: Export) -> Steps:
    export.lease.end()
    yield


def _adopts_blindly(
    self: Process, at: Attachment, entry: Any, generation: int, key: bytes, word: int
) -> Lease | None:
    lease = Lease(self, at, entry, generation, key, word)
    entry.leases.append(lease)
    self.leases.append(lease)
    return lease


def _not_quiesced(self: Process, copy: Copy) -> Steps:
    """Give slots back while the copy still runs."""
    copy.cancelled = False
    yield


@contextmanager
def _ghost_forgotten() -> Iterator[None]:
    """A restarted daemon looks at no hazard and keeps no slot of the clients it had before."""
    take_over = Daemon.take_over

    def forgetful(self: Daemon, dead: Daemon, living: list[Attachment]) -> None:
        take_over(self, dead, [])
        for attachment in living:
            attachment.revoked = True

    with patch.object(Daemon, "take_over", forgetful):
        yield


@contextmanager
def _not_revoked() -> Iterator[None]:
    """A restarted daemon does not tell old clients that their index is over."""
    take_over = Daemon.take_over

    def quiet(self: Daemon, dead: Daemon, living: list[Attachment]) -> None:
        take_over(self, dead, living)
        for attachment in living:
            attachment.revoked = False

    with patch.object(Daemon, "take_over", quiet):
        yield


@contextmanager
def _evicting_is_free() -> Iterator[None]:
    """What was marked EVICTING when the daemon died counts as gone, whoever holds it."""
    adopt = adoption.adopt

    def drops(old: Any, *args: Any) -> Any:
        for entry in old.entries.values():
            if entry.sg[1] is State.EVICTING:
                for record in entry.members.values():
                    del old.records[record.number]
                    args[1].give(record)
                entry.sg = (entry.sg[0], State.EMPTY)
        return adopt(old, *args)

    with patch.object(adoption, "adopt", drops):
        yield


def _prefix_may_leave(self: Space, run: int, planned: dict[int, int]) -> bool:
    return run not in self._forest.claims


@contextmanager
def _kept_is_lost() -> Iterator[None]:
    """Families that were found held are taken for gone."""
    keep_held = Leaving._keep_held

    def forgets(self: Leaving, plan: Any, held: Any, left: Any) -> None:
        keep_held(self, plan, held, left)
        self._books.counters["held_reverts"] += 0
        for run in left.held_runs[:1]:
            left.size_bytes += self._books.forest.cut(run, len(self._books.forest.members[run]))

    with patch.object(Leaving, "_keep_held", forgets):
        yield


@contextmanager
def _answer_lost() -> Iterator[None]:
    """An answer that finds its ring full is thrown away."""

    def drops(self: Attachment) -> bool:
        while self.owed:
            answer = self.owed.popleft()
            if len(self.answers) < 1:
                self.answers.append(answer)
            else:
                self.unanswered[answer.op] = "lost"
        return True

    with patch.object(Attachment, "flush", drops):
        yield


def _on(owner: Any, name: str, instead: Any) -> Callable[[], AbstractContextManager[Any]]:
    return lambda: patch.object(owner, name, instead)


def _freed_at_eof() -> AbstractContextManager[Any]:
    stack = ExitStack()
    stack.enter_context(patch.object(Daemon, "disconnect", _disconnect_frees))
    return stack


PLANTED: Final[dict[str, Fault]] = {
    "ring not drained before death": Fault(
        "`ClientGone` comes although the dead client's ring holds asks", ("was never answered",),
        _on(Daemon, "exited", _ring_not_drained),
    ),
    "hazards ignored": Fault(
        "eviction frees whatever it marked", ("is freed under the lease", "reads "), _on(Daemon, "scan", _held_ignored)
    ),
    "held families forgotten": Fault(
        "the core takes what is held for gone", ("disagree",), _kept_is_lost
    ),
    "PENDING freed at EOF": Fault(
        "a closed connection counts as death", ("late write", "is freed under the lease"), _freed_at_eof
    ),
    "publication by another client": Fault(
        "a reservation's number is enough to publish or abort it",
        ("not its own", "late write", "is published by", "not filled", "no ask"), _on(Publishing, "_find", _any_client),
    ),
    "publication twice": Fault(
        "an item that was published stays live", ("KeyError", "is published by", "out twice", "published already"),
        _published_twice,
    ),
    "clock jump expires leases": Fault(
        "a lease ends a minute after it was taken", ("is freed under the lease", "reads "), _leases_expire
    ),
    "adoption after release": Fault(
        "the scheduler lets go before the worker has answered", ("could not adopt",),
        _on(Process, "handed_over", _hands_over_at_once),
    ),
    "no second look": Fault(
        "a reader does not look at `sg` again after its hazard",
        ("reads ", "another key", "another generation", "is freed under"),
        _on(Process, "validated", _adopts_blindly),
    ),
    "abort while the copy runs": Fault(
        "a writer whose deadline passed gives back what its copy still fills", ("late write",),
        _on(Process, "quiesced", _not_quiesced),
    ),
    "restart forgets a ghost": Fault(
        "a restarted daemon ignores the clients of its predecessor",
        ("late write", "reads ", "is freed under the lease"), _ghost_forgotten,
    ),
    "old index not revoked": Fault(
        "an old client leases on the index of a dead daemon after the new one evicted", ("reads ",), _not_revoked
    ),
    "EVICTING counts as gone at restart": Fault(
        "a daemon died between mark and scan, and the next one gives the memory away",
        ("reads ", "is freed under the lease", "is lost at the restart"), _evicting_is_free,
    ),
    "prefix before suffix": Fault(
        "a run may leave although others lie behind it", ("left before its suffix", "disagree"),
        _on(Space, "_may_leave", _prefix_may_leave),
    ),
    "answer lost when the ring is full": Fault(
        "an answer that finds no room is dropped", ("for ever", "never answered"), _answer_lost
    ),
}  # fmt: skip

__all__ = ["PLANTED", "SEEDS_MAX", "Fault", "Simulation"]
