"""What an operator asks for: pin, unpin, clear, withdraw.

Called by `Core.step`. Clear goes on over many turns, so that a large namespace does not stop everybody else.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from kvd.core.books import Books, Flow
from kvd.core.columns import u32
from kvd.core.events import (
    ADMIN,
    AdminReply,
    Clear,
    DoAgain,
    ErrorReply,
    Note,
    Pin,
    PinKind,
    Reason,
    Unpin,
    Withdraw,
)
from kvd.core.leaving import Leaving
from kvd.core.policy import HARD, lists_count
from kvd.core.space import Plan, Space
from kvd.errors import CapacityError, Retry, UsageError

clear_families_per_turn = 4096


class Administration:
    """Operations without a client."""

    def __init__(self, books: Books, space: Space, leaving: Leaving) -> None:
        self._books = books
        self._space = space
        self._leaving = leaving

    def pin(self, event: Pin) -> None:
        """Pin all these prefixes or none of them."""
        books = self._books
        if event.kind not in (PinKind.SOFT, PinKind.HARD):
            error = UsageError(
                f"pin kind {event.kind!r} is not soft or hard", code="pin-kind", kind=int(event.kind)
            )
            books.effects.append(ErrorReply(ADMIN, event.op, error))
            return
        pins = books.forest.pins
        added, over_bytes = pins.pin(event.entries, event.kind, books.hard_bytes_max)
        if over_bytes:
            books.counters["pin_refusals"] += 1
            refusal = CapacityError(
                f"pinned data would be {over_bytes} B over its limit of {books.hard_bytes_max} B:"
                " unpin something, pin softly, or raise eviction.pinned_share",
                code="pins", retry=Retry.NEVER, pinned_bytes=pins.hard_bytes,
                pinned_bytes_max=books.hard_bytes_max,
            )  # fmt: skip
            books.effects.append(ErrorReply(ADMIN, event.op, refusal))
            return
        books.counters["pins"] += added
        books.effects.append(AdminReply(event.op, {"pins_added": added, "pinned_bytes": pins.hard_bytes}))

    def unpin(self, event: Unpin) -> None:
        """Remove the pins that end in the runs of these families."""
        books = self._books
        removed = books.forest.pins.unpin(event.entries)
        books.counters["unpins"] += removed
        books.effects.append(
            AdminReply(event.op, {"pins_removed": removed, "pinned_bytes": books.forest.pins.hard_bytes})
        )

    def withdraw(self, event: Withdraw) -> Flow[None]:
        """These families and all behind them are not found any more, whoever holds, pins or extends them."""
        books = self._books
        forest = books.forest
        books.counters["withdrawals"] += 1
        starts: dict[int, int] = {}
        for entry in u32(event.entries):
            if forest.is_used(entry):
                run = forest.run_of[entry]
                at = forest.members[run].index(entry)
                starts[run] = min(at, starts.get(run, at))
        families = size_bytes = held_families = held_bytes = 0
        if starts:
            plan = self._space.subtree(starts, Reason.WITHDRAW)
            left = yield from self._leaving.withdraw(plan)
            families, size_bytes = left.families, left.size_bytes
            held_families, held_bytes = left.held_families, left.held_bytes
        result: dict[str, object] = {
            "families": families, "bytes": size_bytes, "held_families": held_families, "held_bytes": held_bytes,
        }  # fmt: skip
        books.effects.append(Note("warning", "families_withdrawn", result))
        books.effects.append(AdminReply(event.op, result))

    def clear(self, event: Clear) -> Flow[None]:
        """Evict all that may leave, suffixes first; say what stays and why."""
        books = self._books
        books.counters["clears"] += 1
        began_ns = books.now_ns
        families = size_bytes = 0
        yield from self._leaving.retry_limbo()
        while True:
            stays: dict[int, str] = {}
            progress = 0
            for plan in self._clear_plans(event.namespace, began_ns, stays):
                left = yield from self._leaving.evict(plan)
                stays.update(dict.fromkeys(left.held_runs, "leased"))
                progress += left.families
                families += left.families
                size_bytes += left.size_bytes
                yield DoAgain(books.next_token())
            if not progress:
                break
        kept: dict[str, dict[str, int]] = {}
        for run, cause in stays.items():
            if self._is_run(run, event.namespace, began_ns):
                total = kept.setdefault(cause, {"families": 0, "bytes": 0})
                total["families"] += len(books.forest.members[run])
                total["bytes"] += books.forest.run_bytes[run]
        result: dict[str, object] = {
            "families": families, "bytes": size_bytes, "kept": kept, "limbo_families": len(books.limbo),
        }  # fmt: skip
        books.effects.append(Note("info", "cleared", {"namespace": event.namespace, **result}))
        books.effects.append(AdminReply(event.op, result))

    def _clear_plans(self, namespace: int | None, began_ns: int, stays: dict[int, str]) -> Iterator[Plan]:
        """One pass over the runs of the namespace; fills `stays` with what does not leave, and why."""
        forest = self._books.forest
        snapshot: array[int] = array("I")
        for in_list in range(lists_count):
            snapshot.extend(
                run for run in forest.policy.runs(in_list) if self._is_run(run, namespace, began_ns)
            )
        planned: dict[int, int] = {}
        chosen: array[int] = array("I")
        for run in snapshot:
            if not self._is_run(run, namespace, began_ns):
                continue
            cause = self._cause_to_stay(run, planned, stays)
            if cause:
                stays[run] = cause
                continue
            planned[run] = len(forest.members[run])
            chosen.extend(forest.members[run])
            if len(chosen) >= clear_families_per_turn:
                yield Plan(chosen, list(planned.items()), Reason.CLEAR)
                planned, chosen = {}, array("I")
        if chosen:
            yield Plan(chosen, list(planned.items()), Reason.CLEAR)

    def _is_run(self, run: int, namespace: int | None, began_ns: int) -> bool:
        """Whether this number is (still) a run of the namespace that was there when clearing began."""
        forest = self._books.forest
        return (
            bool(forest.members[run])
            and forest.born_ns[run] <= began_ns
            and (namespace is None or forest.namespace_of[run] == namespace)
        )

    def _cause_to_stay(self, run: int, planned: dict[int, int], stays: dict[int, str]) -> str:
        forest = self._books.forest
        if run in stays:
            return stays[run]
        if forest.policy.list_of[run] == HARD:
            return "pinned"
        if run in forest.claims:
            return "reserved"
        for child in forest.children(run):
            if child not in planned:
                return stays.get(child, "written meanwhile")
        return ""
