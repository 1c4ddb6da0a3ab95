"""The first half of the write path: reserve. And what a tick brings, since it makes room by the same plans.

Called by `Core.step`. A reservation is granted as a whole or refused as a whole; what was taken for one that
is refused goes back. It claims what it lies behind before room is made for it, so that it never evicts its
own prefix.
"""

from __future__ import annotations

from array import array
from itertools import chain, compress

from kvd.core.books import Books, Flow
from kvd.core.columns import u32
from kvd.core.events import NO_PLACE, NONE, DoReserve, ErrorReply, Reserve, ReservedReply, ReserveStatus, Tick
from kvd.core.leaving import Leaving
from kvd.core.policy import HARD
from kvd.core.reservations import LIVE, Reservation, check
from kvd.core.space import Search, Short, Space, Want
from kvd.errors import CapacityError, InvariantError, KvdError, Retry, UsageError

# Plain integers: to look up an enum member costs more than the comparison it is for.
GRANTED = int(ReserveStatus.GRANTED)
PRESENT = int(ReserveStatus.PRESENT)
PENDING = int(ReserveStatus.PENDING)

leased_runs_max = 8192  # looked at to say what leases keep

_live = bytes([LIVE])
_granted_mask = bytes([1]) + bytes(255)  # translate table: GRANTED -> 1, everything else -> 0
_present_mask = bytes([0]) + bytes([1]) * 255


class Reserving:
    """Grants reservations."""

    def __init__(self, books: Books, space: Space, leaving: Leaving) -> None:
        self._books = books
        self._space = space
        self._leaving = leaving

    def reserve(self, event: Reserve) -> Flow[None] | None:
        """Grant what is not there yet. The rest of the operation, if room has to be made for it first."""
        self._books.counters["reserves"] += 1
        try:
            return self._reserve(event)
        except UsageError as error:
            self._refuse(event, error, "usage_refusals")
        except CapacityError as error:
            self._refuse(event, error, "capacity_refusals")
        return None

    def _refuse(self, event: Reserve, error: KvdError, counter: str) -> None:
        books = self._books
        books.counters[counter] += 1
        books.journal.failed(event.request, error.message, books.now_ns)
        books.effects.append(ErrorReply(event.client, event.op, error))

    def _reserve(self, event: Reserve) -> Flow[None] | None:
        books = self._books
        client = books.clients.get(event.client)
        if client is None:
            raise InvariantError(f"client {event.client} is not attached", code="client", client=event.client)
        if not client.writable:
            raise UsageError(
                f"client '{client.name}' is attached read-only: connect with access=\"write\" to reserve",
                code="read-only",
            )
        shape = books.shapes.of(event.members)
        families = check(event, shape)
        items = families * shape.members_count
        key8s: array[int] = array("Q", event.keys)[::4]
        entries = u32(event.entries)
        if len(event.present) != items or len(entries) != families:
            raise InvariantError(
                f"facts of another size than {families} families, {items} items", code="facts"
            )
        if event.present.count(0) == items:
            statuses = bytearray(items)
        else:
            statuses = bytearray(event.present.translate(_present_mask))
        if event.skip_pending:
            self._mark_pending(event, key8s, statuses)
        granted = statuses.count(GRANTED)
        if not granted:
            places: array[int] = array("Q", [NO_PLACE]) * items
            self._count(event, statuses, 0, 0, None)
            books.effects.append(ReservedReply(event.client, event.op, 0, places, bytes(statuses)))
            return None
        if entries is event.entries:
            entries = entries[:]
        reservation = Reservation(books.reservations.next_number(), event, shape, key8s, entries)
        want = self._want(reservation, statuses, granted)
        self._refuse_impossible(want)
        self._refuse_over_share(event.client, want)
        self._claim(reservation)
        short = self._space.take(want)
        if short is not None:
            return self._after_making_room(event, reservation, want, short, statuses)
        self._grant(event, reservation, want, statuses, None)
        return None

    def _after_making_room(
        self, event: Reserve, reservation: Reservation, want: Want, short: Short, statuses: bytearray
    ) -> Flow[None]:
        search = Search()
        try:
            yield from self._make_room(want, short, search)
        except CapacityError as error:
            self._space.give_up(want)
            for run in reservation.claimed:
                self._books.forest.unclaim(run)
            self._refuse(event, error, "capacity_refusals")
        else:
            self._grant(event, reservation, want, statuses, search)

    def _mark_pending(self, event: Reserve, key8s: array[int], statuses: bytearray) -> None:
        has = self._books.reservations.pending.has
        m = len(event.members)
        for at, member in enumerate(event.members):
            for family, key8 in enumerate(key8s):
                if not statuses[family * m + at] and has(member.index, key8):
                    statuses[family * m + at] = PENDING

    def _want(self, reservation: Reservation, statuses: bytearray, granted: int) -> Want:
        n, m = reservation.families_count, reservation.members_count
        if granted == n * m and reservation.entries.count(NONE) == n:
            reservation.promised = bytearray(_live) * n
            return Want(reservation.shape, n, granted, [n] * m)
        reservation.promised = bytearray(
            entry == NONE and GRANTED in statuses[family * m : family * m + m]
            for family, entry in enumerate(reservation.entries)
        )
        counts = [statuses[at::m].count(GRANTED) for at in range(m)]
        return Want(reservation.shape, reservation.promised.count(1), granted, counts)

    def _claim(self, reservation: Reservation) -> None:
        """Hold the run it lies behind, and those of its families that are there."""
        forest = self._books.forest
        parent = reservation.parent_entry
        runs: set[int] = set()
        if reservation.entries.count(NONE) != reservation.families_count:
            for entry in reservation.entries:
                if entry != NONE:
                    if not forest.is_used(entry):
                        raise InvariantError(
                            f"the table knows a family {entry} that the core does not", code="facts"
                        )
                    runs.add(forest.run_of[entry])
        if parent != NONE:
            if not forest.is_used(parent):
                raise InvariantError(
                    f"the table knows a family {parent} that the core does not", code="facts"
                )
            run = forest.run_of[parent]
            if forest.namespace_of[run] != reservation.namespace:
                raise UsageError(
                    f"the parent family is of namespace {forest.namespace_of[run]}, the reservation of"
                    f" {reservation.namespace}: a prefix never crosses namespaces",
                    code="namespace",
                )
            runs.add(run)
        if runs:
            reservation.claimed = list(runs)
            for run in runs:
                forest.claim(run)

    def _make_room(self, want: Want, short: Short, search: Search) -> Flow[None]:
        """Evict until the want is satisfied; CapacityError if nothing more can leave."""
        space = self._space
        missing: Short | None = short
        if (yield from self._leaving.retry_limbo()):
            missing = space.take(want)
        while missing is not None:
            plan = space.plan(search, missing, self._books.now_ns)
            if plan is None:
                why = f"nothing more can leave to make room ({missing.reason.value})"
                raise self._no_room(want, why, Retry.AFTER, self._leased_bytes(search))
            left = yield from self._leaving.evict(plan)
            search.families += left.families
            search.size_bytes += left.size_bytes
            search.forget(run for run, _ in plan.cuts)  # their numbers are used again
            search.held.update(left.held_runs)
            missing = space.take(want)

    def tick(self, _event: Tick) -> Flow[None]:
        """What time alone brings: families in limbo come back, and halves that nobody goes on with leave."""
        books, space = self._books, self._space
        yield from self._leaving.retry_limbo()
        plan = space.plan_abandoned(books.now_ns - books.config.partial_idle_ns, books.now_ns)
        if plan is not None:
            yield from self._leaving.withdraw(plan)

    def _refuse_impossible(self, want: Want) -> None:
        """Refuse before anything is evicted in vain."""
        books = self._books
        slots = books.slots
        if want.entries_count > books.families_max or want.records_count > books.records_max:
            raise self._no_room(want, "the index is smaller than this batch", Retry.NEVER)
        for size_class, count in zip(want.shape.classes, want.counts, strict=True):
            if count > size_class.slots_max:
                raise self._no_room(want, "the pool is smaller than this batch", Retry.NEVER)
        if want.size_bytes * 64 <= slots.usable_bytes:
            return  # small ones are not worth the sums below
        if want.size_bytes > slots.total_bytes:
            raise self._no_room(want, "the pool is smaller than this batch", Retry.NEVER)
        if want.size_bytes > slots.usable_bytes - books.reserved_bytes - books.forest.pins.hard_bytes:
            raise self._no_room(want, "what may leave is less than this batch needs", Retry.AFTER)

    def _refuse_over_share(self, client: int, want: Want) -> None:
        """One client does not get everything: what it writes and never finishes, nobody else can use."""
        limit_bytes = self._books.config.client_reserved_bytes_max
        reserved_bytes = self._books.reservations.bytes_of.get(client, 0)
        if reserved_bytes + want.size_bytes <= limit_bytes:
            return
        cure = "publish or abort some first"
        if want.size_bytes > limit_bytes:
            cure = "use smaller batches, a larger pool, or a larger clients.reserved_max"
        raise CapacityError(
            f"this client is writing {reserved_bytes} B and asks for {want.size_bytes} B more; clients.reserved_max "
            f"allows {limit_bytes} B: {cure}",
            code="reserved", retry=Retry.NEVER if want.size_bytes > limit_bytes else Retry.AFTER,
            reserved_bytes=reserved_bytes, wanted_bytes=want.size_bytes, limit_bytes=limit_bytes,
        )  # fmt: skip

    def _leased_bytes(self, search: Search) -> int:
        """What leases keep: what was found held, and all that lies before it, which was not even asked for.

        Pins are counted elsewhere. At most `leased_runs_max` runs are looked at: a refusal, too, is a short turn.
        """
        forest = self._books.forest
        list_of, parent, run_bytes = forest.policy.list_of, forest.parent, forest.run_bytes
        seen: set[int] = set()
        leased_bytes = 0
        for run in search.held:
            while run != NONE and run not in seen and len(seen) < leased_runs_max:
                seen.add(run)
                if list_of[run] != HARD:
                    leased_bytes += run_bytes[run]
                run = parent[run]
        return leased_bytes

    def _no_room(self, want: Want, why: str, retry: Retry, leased_bytes: int = 0) -> CapacityError:
        """The error with the sum: usable is free, leased, pinned, reserved, in limbo, and other. Other is published and
        none of these: not looked at, or before what is pinned or being written.
        """
        books = self._books
        taken = sum(
            len(places) * slot_bytes
            for places, slot_bytes in zip(want.taken, want.shape.slot_bytes, strict=False)
        )
        published_bytes, reserved_bytes = books.published_bytes, books.reserved_bytes - taken
        pinned_bytes, limbo_bytes = books.forest.pins.hard_bytes, books.limbo_bytes
        fields: dict[str, object] = {
            "wanted_bytes": want.size_bytes,
            "wanted_families": want.entries_count,
            "usable_bytes": books.slots.usable_bytes,
            "free_bytes": books.slots.usable_bytes - published_bytes - reserved_bytes,
            "leased_bytes": leased_bytes,
            "pinned_bytes": pinned_bytes,
            "reserved_bytes": reserved_bytes,
            "limbo_bytes": limbo_bytes,
            "other_bytes": published_bytes - limbo_bytes - pinned_bytes - leased_bytes,
        }
        numbers = ", ".join(f"{name} {value}" for name, value in fields.items())
        cure = "release leases or pins, or retry later"
        if retry is Retry.NEVER:
            cure = "use a larger pool or a smaller batch"
        return CapacityError(f"{why}: {numbers}; {cure}", code="full", retry=retry, **fields)

    def _grant(
        self, event: Reserve, reservation: Reservation, want: Want, statuses: bytearray, search: Search | None
    ) -> None:
        books = self._books
        shape = reservation.shape
        n, m = reservation.families_count, reservation.members_count
        items, granted = n * m, want.records_count
        records = books.records.take(granted)
        sizes, indexes, ranges = shape.sizes * n, shape.indexes * n, shape.ranges * n
        if granted == items:
            reservation.states = bytearray(_live) * items
            reservation.records = records
            if m == 1:
                reservation.places = want.taken[0]
            else:
                reservation.places = array("Q", bytes(8 * items))
                for at, column in enumerate(want.taken):
                    reservation.places[at::m] = column
            places = reservation.places
        else:
            mask = reservation.states = statuses.translate(_granted_mask)
            reservation.records = array("I", [NONE]) * items
            reservation.places = array("Q", [NO_PLACE]) * items
            columns = [iter(column) for column in want.taken]
            for item, record in zip(compress(range(items), mask), records, strict=True):
                reservation.records[item] = record
                reservation.places[item] = next(columns[item % m])
            places = array("Q", compress(reservation.places, mask))
            sizes = array("Q", compress(sizes, mask))
            indexes = bytes(compress(indexes, mask))
            ranges = array("H", compress(ranges, chain.from_iterable((x, x, x, x) for x in mask)))
        reservation.live_count = granted
        if reservation.parent_entry == NONE and reservation.parent_key8:
            books.orphans.add_reservation(reservation.parent_key8, reservation.number)
        if PENDING in statuses:
            self._await_others(reservation, statuses)
        books.forest.promised_count += want.entries_count
        books.reservations.add(reservation)
        self._count(event, statuses, granted, want.size_bytes, search)
        books.effects.append(
            DoReserve(event.client, reservation.number, records, places, sizes, indexes, ranges)
        )
        books.effects.append(
            ReservedReply(event.client, event.op, reservation.number, reservation.places, bytes(statuses))
        )

    def _await_others(self, reservation: Reservation, statuses: bytearray) -> None:
        """What is skipped because another writes it will have a place in this chain once it is there."""
        m = reservation.members_count
        for family, entry in enumerate(reservation.entries):
            if entry == NONE and PENDING in statuses[family * m : family * m + m]:
                self._books.orphans.await_family(reservation, family)

    def _count(
        self, event: Reserve, statuses: bytearray, granted: int, wanted_bytes: int, search: Search | None
    ) -> None:
        books = self._books
        counters = books.counters
        counters["granted"] += granted
        record = books.journal.of(event.request, books.now_ns)
        if record is not None:
            record.granted += granted
            record.writing_since_ns = books.now_ns
            record.reserved_bytes += wanted_bytes
            if search is not None:
                record.evicted_families += search.families
                record.evicted_bytes += search.size_bytes
        if granted != len(statuses):
            present, pending = statuses.count(PRESENT), statuses.count(PENDING)
            counters["present"] += present
            counters["pending"] += pending
            if record is not None:
                record.present += present
                record.pending += pending
