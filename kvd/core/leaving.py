"""Carries out plans: what leaves the index, what was held and stays, what comes back later from limbo.

Used by every operation that makes families leave. One plan is one `DoEvict` and one `Evicted`, in one turn.
Invariant: a slot comes back only when the table said that nobody holds its family.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from kvd.core.books import Books, Flow
from kvd.core.columns import u32, u64
from kvd.core.events import NONE, DoEvict, Evicted, Reason
from kvd.core.reservations import Reservation
from kvd.core.space import Plan
from kvd.errors import InvariantError


@dataclass(slots=True)
class Left:
    """What became of a plan."""

    families: int = 0
    size_bytes: int = 0
    held_families: int = 0
    held_bytes: int = 0
    held_runs: list[int] = field(default_factory=list)


class Leaving:
    """The only place where families leave."""

    def __init__(self, books: Books) -> None:
        self._books = books

    def evict(self, plan: Plan) -> Flow[Left]:
        """Ask for the plan to be carried out and enter the outcome in the books."""
        books = self._books
        answer = yield DoEvict(books.next_token(), plan.entries, plan.reason, plan.withdraw)
        if not isinstance(answer, Evicted):
            raise InvariantError("an eviction was answered by something else", code="answer")
        freed, held = u32(answer.freed), u32(answer.held)
        if len(freed) + len(held) != len(plan.entries):
            raise InvariantError(
                f"{len(plan.entries)} families were to leave, {len(freed)} left and {len(held)} are held",
                code="answer",
            )
        self._take_back(freed, answer)
        books.ghosts.add(map(books.forest.key8_of.__getitem__, freed), plan.reason, books.now_ns)
        left = Left(families=len(freed))
        if not held:
            cut = books.forest.cut
            for run, count in plan.cuts:
                left.size_bytes += cut(run, count)
        elif plan.withdraw:
            self._withdraw_held(plan, held, left)
        else:
            self._keep_held(plan, held, left)
        self._remember_orphans()
        counters = books.counters
        counters["evictions"] += 1
        counters["evicted_bytes"] += left.size_bytes
        counters[f"evicted_{plan.reason.value}"] += left.families
        return left

    def withdraw(self, plan: Plan) -> Flow[Left]:
        """Carry the plan out whoever holds or extends what is in it; reservations lose what they knew of it."""
        books = self._books
        members = books.forest.members
        plan.withdraw = True
        gone = {run for run, count in plan.cuts if count == len(members[run])}
        left = yield from self.evict(plan)
        for reservation in books.reservations.forget(gone, set(plan.entries)):
            self._claim_again(reservation)
        return left

    def _claim_again(self, reservation: Reservation) -> None:
        """Claim what is left to a reservation after some of what it lies behind was withdrawn."""
        books = self._books
        forest = books.forest
        for run in reservation.claimed:
            forest.unclaim(run)
        entries = [entry for entry in (*reservation.entries, reservation.parent_entry) if entry != NONE]
        reservation.claimed = list({forest.run_of[entry] for entry in entries})
        for run in reservation.claimed:
            forest.claim(run)
        for family, entry in enumerate(reservation.entries):
            if entry == NONE and not reservation.is_family_live(family):
                books.orphans.await_family(reservation, family)
        if reservation.parent_entry == NONE and reservation.parent_key8:
            books.orphans.add_reservation(reservation.parent_key8, reservation.number)

    def retry_limbo(self) -> Flow[int]:
        """Try again for all withdrawn families that were held; returns how many came back."""
        books = self._books
        limbo = books.limbo
        if not limbo:
            return 0
        answer = yield DoEvict(books.next_token(), array("I", limbo), Reason.LIMBO, True)
        if not isinstance(answer, Evicted):
            raise InvariantError("an eviction was answered by something else", code="answer")
        freed = u32(answer.freed)
        for entry in freed:
            del limbo[entry]
        self._take_back(freed, answer)
        books.counters["limbo_freed"] += len(freed)
        return len(freed)

    def _remember_orphans(self) -> None:
        """What stays behind a family that left will lie behind it again when that comes back."""
        orphaned = self._books.forest.orphaned
        for lost_key8, key8, entry in orphaned:
            self._books.orphans.add_family(lost_key8, key8, entry)
        orphaned.clear()

    def _take_back(self, freed: array[int], answer: Evicted) -> None:
        books = self._books
        books.forest.entries.give(freed)
        books.records.give(u32(answer.records))
        books.slots.give(u64(answer.places), reserved=False)

    def _withdraw_held(self, plan: Plan, held: array[int], left: Left) -> None:
        """All leave the forest; those that are held keep entry and slots until they are let go."""
        books = self._books
        forest = books.forest
        for entry in held:
            books.limbo[entry] = forest.bytes_of[entry]
            left.held_bytes += forest.bytes_of[entry]
        books.ghosts.add(map(forest.key8_of.__getitem__, held), plan.reason, books.now_ns)
        for run, count in plan.cuts:
            left.size_bytes += forest.cut(run, count)
        left.size_bytes -= left.held_bytes
        left.held_families = len(held)
        books.counters["limbo_entered"] += len(held)

    def _keep_held(self, plan: Plan, held: array[int], left: Left) -> None:
        """Held families stay: their runs, in as many pieces as that takes, become the warmest."""
        books = self._books
        forest = books.forest
        staying = set(held)
        left.held_bytes = sum(map(forest.bytes_of.__getitem__, held))
        left.size_bytes = sum(map(forest.bytes_of.__getitem__, plan.entries)) - left.held_bytes
        for run, count in plan.cuts:
            left.held_runs.extend(forest.cut_around(run, count, staying))
        forest.keep(left.held_runs)
        left.held_families = len(held)
        books.counters["held_reverts"] += len(held)
