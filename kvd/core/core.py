"""The core of one domain: `step(now_ns, event) -> effects`.

Pure and single-threaded: it knows no clock, no file and nobody else's memory. It only dispatches and
composes; what happens is in `reserving`, `publishing`, `administration`, `leaving` and `space`. An operation
that needs an answer is a generator: it stands still at its `DoPublish`, `DoEvict` or `DoAgain` until the runner
steps the core with the answer. Invariant: at most one operation waits for a `Published` or `Evicted`, and
nothing else may happen until it comes.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from typing import Any

from kvd.core import audit, report, restoring
from kvd.core.administration import Administration
from kvd.core.books import Answer, Ask, Books, ClientBook, CoreConfig, Flow
from kvd.core.events import (
    NONE,
    Abort,
    Again,
    Clear,
    ClientAttached,
    ClientGone,
    DoAgain,
    DoFlags,
    DoParents,
    Effect,
    Event,
    Evicted,
    Pin,
    Publish,
    Published,
    Reserve,
    Restore,
    SegmentReady,
    Tick,
    Touch,
    Touched,
    Unpin,
    Withdraw,
)
from kvd.core.leaving import Leaving
from kvd.core.publishing import Publishing
from kvd.core.reserving import Reserving
from kvd.core.space import Space
from kvd.errors import InvariantError

__all__ = ["Core", "CoreConfig"]


class Core:
    """Decides what is kept, where, and what leaves.

    `families_max` and `records_max` are the sizes of the shared tables, `segment_bytes` those of the pool's
    segments. After an InvariantError the core must not be used any more.
    """

    def __init__(
        self, config: CoreConfig, families_max: int, records_max: int, segment_bytes: list[int]
    ) -> None:
        self._compose(Books(config, families_max, records_max, segment_bytes))

    @classmethod
    def over(cls, books: Books) -> Core:
        """A core that goes on with these books, which no operation is in the middle of (`kvd.core.trace`)."""
        core = cls.__new__(cls)
        core._compose(books)
        return core

    def _compose(self, books: Books) -> None:
        self.config = config = books.config
        self._books = books
        space = Space(
            books.forest, books.slots, books.records, books.reservations, config.evict_batch_families,
            config.partial_grace_ns,
        )  # fmt: skip
        self._leaving = Leaving(books)
        self._publishing = Publishing(books)
        reserving = Reserving(books, space, self._leaving)
        self._administration = Administration(books, space, self._leaving)
        self._waiting: tuple[int, Flow[Any]] | None = None  # for Published or Evicted: token, operation
        self._later: dict[int, Flow[Any]] = {}  # for Again
        self._flows: dict[type[object], Callable[[Any], Flow[Any] | None]] = {
            Reserve: reserving.reserve,
            Publish: self._publishing.publish,
            Clear: self._administration.clear,
            Withdraw: self._administration.withdraw,
            Tick: reserving.tick,
            ClientGone: self._publishing.client_gone,
        }
        self._calls: dict[type[object], Callable[[Any], None]] = {
            Abort: self._publishing.abort,
            Touched: self._touched,
            SegmentReady: self._segment_ready,
            ClientAttached: self._client_attached,
            Pin: self._administration.pin,
            Unpin: self._administration.unpin,
            Restore: lambda event: restoring.restore(books, event),
        }

    # -- stepping --------------------------------------------------------------------------------------------

    def step(self, now_ns: int, event: Event) -> list[Effect]:
        """Take one event and say what is to be done. InvariantError: the books disagree, stop the daemon."""
        books = self._books
        if now_ns > books.now_ns:  # a clock that goes back stands still: nothing new is older than what was
            books.now_ns = now_ns
        effects: list[Effect] = []
        books.effects = effects
        kind = type(event)
        if kind is Published or kind is Evicted:
            self._answer(event)
        elif self._waiting is not None:
            raise InvariantError(
                f"{kind.__name__} came while an answer was waited for", code="turn", event=kind.__name__
            )
        elif kind is Again:
            flow = self._later.pop(event.token, None)  # type: ignore[union-attr]
            if flow is not None:
                self._run(flow, event)  # type: ignore[arg-type]
        elif (start := self._flows.get(kind)) is not None:
            flow = start(event)
            if flow is not None:
                self._run(flow, None)
        else:
            self._calls[kind](event)
        # First of all effects: who is told that something was done finds it done, even after a restart.
        flags = books.forest.pins.flag_changes
        if flags:
            effects[:0] = [DoFlags(entries, int(pinned)) for entries, pinned in flags]
            flags.clear()
        linked = books.forest.linked
        if linked:
            entries, parents = (array("I", column) for column in zip(*linked, strict=True))
            effects.insert(0, DoParents(entries, parents))
            linked.clear()
        return effects

    def _answer(self, event: Any) -> None:
        waiting = self._waiting
        if waiting is None or waiting[0] != event.token:
            raise InvariantError(f"an answer to {event.token} came that nobody waits for", code="turn")
        self._waiting = None
        self._run(waiting[1], event)

    def _run(self, flow: Flow[Any], answer: Answer | None) -> None:
        try:
            ask: Ask = next(flow) if answer is None else flow.send(answer)
        except StopIteration:
            return
        if type(ask) is DoAgain:
            self._later[ask.token] = flow
        else:
            self._waiting = (ask.token, flow)
        self._books.effects.append(ask)

    # -- small events ----------------------------------------------------------------------------------------

    def _segment_ready(self, event: SegmentReady) -> None:
        books = self._books
        books.slots.ready(event.segment, event.begin_bytes, event.end_bytes)
        books.forest.policy.capacity_bytes = books.slots.usable_bytes

    def _client_attached(self, event: ClientAttached) -> None:
        books = self._books
        if event.client in books.clients:
            raise InvariantError(
                f"client {event.client} is attached already", code="client", client=event.client
            )
        books.clients[event.client] = ClientBook(event.pid, event.name, event.writable, books.now_ns)
        books.counters["clients_attached"] += 1

    def _touched(self, event: Touched) -> None:
        """Recency only. A touch older than the run it names is about a family that had the entry before."""
        books = self._books
        forest, counters = books.forest, books.counters
        counters["touches"] += len(event.touches)
        current: list[tuple[int, int]] = []
        for touch in event.touches:
            miss = ""
            if touch.missed_key8:
                miss = self._miss(touch)
            books.journal.touched(touch, miss, books.now_ns)
            entry = touch.deepest_entry
            if entry == NONE or not touch.matched:
                continue
            if not forest.is_used(entry) or touch.started_ns < forest.born_ns[forest.run_of[entry]]:
                counters["touches_stale"] += 1
                continue
            current.append((entry, touch.request))
        if current:
            counters["touches_left_out"] += forest.touch(current, books.now_ns)

    def _miss(self, touch: Touch) -> str:
        books = self._books
        cause = report.miss_cause(books, touch.missed_key8, books.now_ns)
        name = {"b": "misses_pending", "e": "misses_evicted"}.get(cause[0], "misses_never")
        books.counters[name] += 1
        return cause

    # -- asking ----------------------------------------------------------------------------------------------

    def live_items(self, client: int) -> int:
        """How many items this client has reserved and neither published nor given back."""
        reservations = self._books.reservations
        return sum(reservations.live[number].live_count for number in reservations.of_client.get(client, ()))

    @property
    def counters(self) -> dict[str, int]:
        """Every counter by name, all there from the start; they never fall."""
        counters = self._books.counters
        counters["runs_split"] = self._books.forest.splits_count
        return counters

    def statistics(self) -> dict[str, object]:
        """Pool, tables, classes and namespaces, JSON-able."""
        return report.statistics(self._books)

    def why(self, request_hash: int, now_ns: int) -> dict[str, object]:
        """What this request matched, missed (and why), reserved and published, JSON-able."""
        return self._books.journal.explain(request_hash, now_ns)

    def miss_cause(self, key8: int, now_ns: int) -> str:
        """Why the family whose identity begins with these 8 bytes (little endian) is not there."""
        return report.miss_cause(self._books, key8, now_ns)

    def families(
        self, namespace: int | None, start: int, limit: int, entries_max: int = report.listing_scan_max
    ) -> tuple[list[report.FamilyRow], int | None]:
        """A page of families from entry `start` on, and where the next page begins (None: that was all).

        Looks at `entries_max` entries at most.
        """
        return report.families(self._books, namespace, start, limit, entries_max)

    def namespace_of(self, entry: int) -> int | None:
        """The namespace of a family, None if there is none in this entry (or it is in limbo)."""
        forest = self._books.forest
        return forest.namespace_of[forest.run_of[entry]] if forest.is_used(entry) else None

    def namespace_is_used(self, namespace: int) -> bool:
        """Whether there are families of this namespace."""
        return self._books.forest.namespaces.get(namespace, (0, 0))[0] > 0

    def beginning_with(self, entries: Iterable[int], key8: int, mask: int) -> list[int]:
        """Those of these entries whose identities begin like this (8 bytes, little endian, as far as the mask says)."""
        key8_of = self._books.forest.key8_of
        return [entry for entry in entries if (key8_of[entry] ^ key8) & mask == 0]

    def validate(self) -> None:
        """Check every invariant. InvariantError says which one is broken. For tests: reads everything."""
        audit.validate(self._books)
