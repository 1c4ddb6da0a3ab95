"""The write path: reserve, publish, abort, and the end of a client.

Called by `Core.step`. Each operation either does all of what its reply says or nothing; what it takes it
gives back on every way out. A reservation claims what it lies behind before room is made for it, so that it
never evicts its own prefix.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import chain, compress

from kvd import limits
from kvd.core.books import Books, Flow
from kvd.core.columns import u32, u64
from kvd.core.events import (
    NO_PLACE,
    NONE,
    Abort,
    AbortedReply,
    DoFreeRecords,
    DoPublish,
    DoReserve,
    ErrorReply,
    Note,
    Publish,
    Published,
    PublishedReply,
    PublishStatus,
    Reserve,
    ReservedReply,
    ReserveStatus,
)
from kvd.core.leaving import Leaving
from kvd.core.reservations import LIVE, Reservation, check
from kvd.core.slots import SizeClass
from kvd.core.space import Space, Want
from kvd.errors import CapacityError, InvariantError, KvdError, Retry, UsageError

differs_noted_max = 8
_live = bytes([LIVE])
_granted_mask = bytes([1]) + bytes(255)  # translate table: GRANTED -> 1, everything else -> 0
_present_mask = bytes([0]) + bytes([1]) * 255


class Writing:
    """Reservations from their beginning to their end."""

    def __init__(self, books: Books, space: Space, leaving: Leaving) -> None:
        self._books = books
        self._space = space
        self._leaving = leaving

    # -- reserve
    # -------------------------------------------------------------------------------------------------------

    def reserve(self, event: Reserve) -> Flow[None]:
        """Grant what is not there yet, making room for it."""
        books = self._books
        books.counters["reserves"] += 1
        try:
            yield from self._reserve(event)
        except UsageError as error:
            books.counters["usage_refusals"] += 1
            self._refuse(event, error)
        except CapacityError as error:
            books.counters["capacity_refusals"] += 1
            self._refuse(event, error)

    def _refuse(self, event: Reserve, error: KvdError) -> None:
        books = self._books
        books.journal.failed(event.request, error.message, books.now_ns)
        books.effects.append(ErrorReply(event.client, event.op, error))

    def _reserve(self, event: Reserve) -> Flow[None]:
        books = self._books
        n = check(event)
        m = len(event.members)
        client = books.clients.get(event.client)
        if client is None:
            raise InvariantError(f"client {event.client} is not attached", code="client", client=event.client)
        if not client.writable:
            raise UsageError(
                f"client '{client.name}' is attached read-only: attach with writable=True to reserve",
                code="read-only",
            )
        key8s: array[int] = array("Q", event.keys)[::4]
        statuses = bytearray(event.present).translate(_present_mask)
        if len(statuses) != n * m or len(u32(event.entries)) != n:
            raise InvariantError(f"facts of another size than {n} families × {m} members", code="facts")
        if event.skip_pending:
            self._mark_pending(event, key8s, statuses)
        granted = statuses.count(ReserveStatus.GRANTED)
        present = statuses.count(ReserveStatus.PRESENT)
        classes = [books.slots.class_for(member.size_bytes) for member in event.members]
        number, places, evicted = 0, array("Q", [NO_PLACE]) * (0 if granted else n * m), (0, 0)
        if granted:
            reservation = Reservation(
                books.reservations.next_number(), event, key8s, [c.slot_bytes for c in classes], books.now_ns
            )
            want = self._want(reservation, statuses, granted, classes)
            self._claim(reservation)
            try:
                yield from self._make_room(want)
            except CapacityError:
                self._space.give_up(want)
                self._unclaim(reservation)
                raise
            self._grant(reservation, want, statuses, granted)
            number, places = reservation.number, reservation.places
            evicted = want.evicted_families, want.evicted_bytes
        self._count_reserve(event, classes, statuses, granted, present, evicted)
        books.effects.append(ReservedReply(event.client, event.op, number, places, bytes(statuses)))

    def _mark_pending(self, event: Reserve, key8s: array[int], statuses: bytearray) -> None:
        has = self._books.reservations.pending.has
        m = len(event.members)
        for at, member in enumerate(event.members):
            for family, key8 in enumerate(key8s):
                if not statuses[family * m + at] and has(member.index, key8):
                    statuses[family * m + at] = ReserveStatus.PENDING

    def _want(
        self, reservation: Reservation, statuses: bytearray, granted: int, classes: list[SizeClass]
    ) -> Want:
        n, m = reservation.families_count, reservation.members_count
        whole = granted == n * m
        if whole and reservation.entries.count(NONE) == n:
            reservation.promised = bytearray(_live) * n
        else:
            reservation.promised = bytearray(
                entry == NONE and ReserveStatus.GRANTED in statuses[family * m : family * m + m]
                for family, entry in enumerate(reservation.entries)
            )
        for size_class in classes:
            reservation.class_set |= 1 << size_class.number
        counts = [n if whole else statuses[at::m].count(ReserveStatus.GRANTED) for at in range(m)]
        return Want(
            entries_count=reservation.promised.count(1),
            records_count=granted,
            classes=list(zip(classes, counts, strict=True)),
        )

    def _claim(self, reservation: Reservation) -> None:
        """Hold the run it lies behind, and those of its families that are there."""
        forest = self._books.forest
        parent = reservation.parent_entry
        if parent != NONE and not forest.is_used(parent):
            parent = reservation.parent_entry = NONE
        runs: set[int] = set()
        for entry in reservation.entries:
            if entry != NONE:
                if not forest.is_used(entry):
                    raise InvariantError(
                        f"the table knows a family {entry} that the core does not", code="facts"
                    )
                runs.add(forest.run_of[entry])
        if parent != NONE:
            run = forest.run_of[parent]
            if forest.namespace_of[run] != reservation.namespace:
                raise UsageError(
                    f"the parent family is of namespace {forest.namespace_of[run]}, the reservation of"
                    f" {reservation.namespace}: a prefix never crosses namespaces",
                    code="namespace",
                )  # fmt: skip
            runs.add(run)
        reservation.claimed = sorted(runs)
        for run in reservation.claimed:
            forest.claim(run)

    def _unclaim(self, reservation: Reservation) -> None:
        for run in reservation.claimed:
            self._books.forest.unclaim(run)
        reservation.claimed = []

    def _make_room(self, want: Want) -> Flow[None]:
        """Take all the want needs, evicting as long as that helps; CapacityError if it does not."""
        space = self._space
        self._refuse_impossible(want)
        while (short := space.take(want)) is not None:
            reason, size_class, count = short
            if not want.limbo_tried:
                want.limbo_tried = True
                if (yield from self._leaving.retry_limbo()):
                    continue
            plan = space.plan(want, reason, size_class, count, self._books.now_ns)
            if plan is None:
                raise self._no_room(
                    want, f"nothing more can leave to make room ({reason.value})", Retry.AFTER
                )
            left = yield from self._leaving.evict(plan)
            want.evicted_families += left.families
            want.evicted_bytes += left.size_bytes
            want.held_bytes += left.held_bytes
            want.tried.difference_update(
                run for run, _ in plan.cuts
            )  # numbers of runs that are gone are used again
            want.tried.update(left.held_runs)

    def _refuse_impossible(self, want: Want) -> None:
        """Refuse before anything is evicted in vain."""
        books = self._books
        slots = books.slots
        if want.entries_count > books.families_max or want.records_count > books.records_max:
            raise self._no_room(want, "the index is smaller than this batch", Retry.NEVER)
        wanted_bytes = 0
        for size_class, count in want.classes:
            wanted_bytes += size_class.slot_bytes * count
            if count > slots.slots_max(size_class):
                raise self._no_room(want, "the pool is smaller than this batch", Retry.NEVER)
        if wanted_bytes > sum(slots.segment_bytes):
            raise self._no_room(want, "the pool is smaller than this batch", Retry.NEVER)
        if wanted_bytes * 64 > slots.usable_bytes:  # small ones are not worth the sum below
            stuck = books.reserved_bytes + books.forest.pins.hard_bytes + books.limbo_bytes
            if wanted_bytes > slots.usable_bytes - stuck and not books.limbo:
                raise self._no_room(want, "what may leave is less than this batch needs", Retry.AFTER)

    def _no_room(self, want: Want, why: str, retry: Retry) -> CapacityError:
        books = self._books
        fields: dict[str, object] = {
            "wanted_bytes": sum(size_class.slot_bytes * count for size_class, count in want.classes),
            "wanted_families": want.entries_count,
            "usable_bytes": books.slots.usable_bytes,
            "leased_bytes": want.held_bytes,
            "pinned_bytes": books.forest.pins.hard_bytes,
            "reserved_bytes": books.reserved_bytes,
            "limbo_bytes": books.limbo_bytes,
        }
        numbers = ", ".join(f"{name} {value}" for name, value in fields.items())
        cure = (
            "use a larger pool or a smaller batch"
            if retry is Retry.NEVER
            else "release leases or pins, or retry later"
        )
        return CapacityError(f"{why}: {numbers}; {cure}", code="full", retry=retry, **fields)

    def _grant(self, reservation: Reservation, want: Want, statuses: bytearray, granted: int) -> None:
        books = self._books
        n, m = reservation.families_count, reservation.members_count
        items = n * m
        records = books.records.take(granted)
        sizes: array[int] = array("Q", [member.size_bytes for member in reservation.members]) * n
        members = bytes([member.index for member in reservation.members]) * n
        ranges: array[int] = (
            array("H", chain.from_iterable((*x.heads, *x.layers) for x in reservation.members)) * n
        )
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
            members = bytes(compress(members, mask))
            ranges = array("H", compress(ranges, chain.from_iterable((x, x, x, x) for x in mask)))
        reservation.live_count = granted
        books.forest.promised_count += want.entries_count
        books.reservations.add(reservation)
        books.effects.append(
            DoReserve(reservation.client, reservation.number, records, places, sizes, members, ranges)
        )

    def _count_reserve(
        self, event: Reserve, classes: list[SizeClass], statuses: bytearray, granted: int, present: int,
        evicted: tuple[int, int],
    ) -> None:  # fmt: skip
        books = self._books
        counters = books.counters
        counters["granted"] += granted
        counters["present"] += present
        counters["pending"] += len(statuses) - granted - present
        record = books.journal.of(event.request, books.now_ns)
        if record is not None:
            m = len(classes)
            record.granted += granted
            record.present += present
            record.pending += len(statuses) - granted - present
            record.reserved_bytes += sum(
                c.slot_bytes * statuses[at::m].count(0) for at, c in enumerate(classes)
            )
            record.evicted_families += evicted[0]
            record.evicted_bytes += evicted[1]

    # -- publish
    # -------------------------------------------------------------------------------------------------------

    def publish(self, event: Publish) -> Flow[None]:
        """Make filled items visible; whoever was first wins."""
        books = self._books
        books.counters["publishes"] += 1
        count = len(event.include)
        reservation = self._find(event.client, event.reservation)
        if reservation is None:
            books.counters["gone"] += count
            books.effects.append(PublishedReply(event.client, event.op, bytes([PublishStatus.GONE]) * count))
            return
        checksums = u64(event.checksums)
        if not self._is_range(event, reservation, count) or len(checksums) != count:
            return
        first = event.first
        items: Sequence[int] = range(first, first + count)
        statuses = bytearray(count)
        if event.include.count(0) or reservation.states.count(LIVE, first, first + count) != count:
            states = reservation.states
            for at, included in enumerate(event.include):
                if not included:
                    statuses[at] = PublishStatus.SKIPPED
                elif not states[first + at]:
                    statuses[at] = PublishStatus.GONE
            books.counters["gone"] += statuses.count(PublishStatus.GONE)
            chosen = [at for at in range(count) if not statuses[at]]
            items = [first + at for at in chosen]
            checksums = array("Q", [checksums[at] for at in chosen])
        items, checksums = self._with_entries(reservation, items, checksums, first, statuses)
        if items:
            outcome = yield from self._publish(reservation, items, checksums)
            if len(items) == count:
                statuses = bytearray(outcome)
            else:
                for item, status in zip(items, outcome, strict=True):
                    statuses[item - first] = status
        books.effects.append(PublishedReply(event.client, event.op, bytes(statuses)))

    def _find(self, client: int, number: int) -> Reservation | None:
        """The client's own live reservation. Another's is as unknown to it as one that is over."""
        reservation = self._books.reservations.live.get(number)
        return reservation if reservation is not None and reservation.client == client else None

    def _is_range(self, event: Publish | Abort, reservation: Reservation, count: int) -> bool:
        items = len(reservation.states)
        if 0 <= event.first <= event.first + count <= items:
            return True
        books = self._books
        books.counters["usage_refusals"] += 1
        error = UsageError(
            f"items [{event.first}, {event.first + count}) are not within the {items} of {event.reservation}",
            code="items", first=event.first, count=count, items=items,
        )  # fmt: skip
        books.effects.append(ErrorReply(event.client, event.op, error))
        return False

    def _with_entries(
        self,
        reservation: Reservation,
        items: Sequence[int],
        checksums: array[int],
        first: int,
        statuses: bytearray,
    ) -> tuple[Sequence[int], array[int]]:
        """Only the items that are sure of an entry.

        All are, unless a family that was there when it was reserved has been withdrawn since: then a free
        entry is promised to it now, or there is no room for it in the index.
        """
        m, promised, known = reservation.members_count, reservation.promised, reservation.entries
        forest = self._books.forest
        lost: list[int] = []
        for family in dict.fromkeys(item // m for item in items) if m > 1 else items:
            if not promised[family] and known[family] == NONE:
                if forest.entries_free_count > 0:
                    promised[family] = 1
                    forest.promised_count += 1
                else:
                    lost.append(family)
        if not lost:
            return items, checksums
        gone = {item for item in items if item // m in lost}
        for item in gone:
            statuses[item - first] = PublishStatus.NO_INDEX
        self._books.counters["no_index"] += len(gone)
        self._give_back(reservation, sorted(gone))
        kept = [(item, checksum) for item, checksum in zip(items, checksums, strict=True) if item not in gone]
        return [item for item, _ in kept], array("Q", [checksum for _, checksum in kept])

    def _publish(self, reservation: Reservation, items: Sequence[int], checksums: array[int]) -> Flow[bytes]:
        books = self._books
        forest = books.forest
        m = reservation.members_count
        promised = reservation.promised
        if isinstance(items, range):
            begin, end = items.start // m, (items.stop - 1) // m + 1
            entries_count = promised.count(1, begin, end)
            records = reservation.records[items.start : items.stop]
            keys = reservation.keys[begin * limits.identity_bytes : end * limits.identity_bytes]
        else:
            entries_count = sum(promised[family] for family in {item // m for item in items})
            records = array("I", [reservation.records[item] for item in items])
            keys = b""
        if m > 1 or not keys:
            width, all_keys = limits.identity_bytes, reservation.keys
            keys = b"".join([all_keys[item // m * width : item // m * width + width] for item in items])
        indexes = [member.index for member in reservation.members]
        answer = yield DoPublish(
            token=books.next_token(),
            client=reservation.client,
            keys=keys,
            members=bytes([indexes[item % m] for item in items]) if m > 1 else bytes(indexes) * len(items),
            split=reservation.split,
            family_members=reservation.family_members,
            records=records,
            checksums=checksums,
            entries=(offered := forest.take_entries(entries_count)),
        )
        if not isinstance(answer, Published) or len(answer.statuses) != len(items):
            raise InvariantError("a publication was answered by something else", code="answer")
        used = answer.entries_used
        if used < entries_count:
            forest.entries.give(offered[used:])
        self._settle(reservation, items, answer)
        outcome = self._tell_differences(reservation, items, checksums, answer)
        if not reservation.live_count:
            self._end(reservation)
        return outcome

    def _settle(self, reservation: Reservation, items: Sequence[int], answer: Published) -> None:
        """Enter what the table did in the books."""
        books = self._books
        m, count = reservation.members_count, len(items)
        entries = u32(answer.entries)
        if (
            isinstance(items, range)
            and items.start % m == 0
            and answer.entries_used * m == count
            and answer.statuses.count(PublishStatus.PUBLISHED) == count
        ):
            self._settle_new(reservation, items, entries)
        else:
            self._settle_mixed(reservation, items, answer, entries)
        record = books.journal.of(reservation.request, books.now_ns)
        if record is not None:
            record.published += answer.statuses.count(PublishStatus.PUBLISHED)

    def _settle_new(self, reservation: Reservation, items: range, entries: array[int]) -> None:
        """Whole families in a row, all new: the common case, without a step per item."""
        books = self._books
        forest = books.forest
        m = reservation.members_count
        begin = items.start // m
        new = entries if m == 1 else entries[::m]
        end = begin + len(new)
        family_bytes = sum(reservation.member_bytes)
        run = forest.append(
            reservation.behind(begin), new, reservation.key8s[begin:end], family_bytes,
            missing_count=reservation.family_members - m, namespace=reservation.namespace,
            request=reservation.request, class_set=reservation.class_set, now_ns=books.now_ns,
        )  # fmt: skip
        books.slots.publish(reservation.places[items.start : items.stop], entries, forest.home_of)
        reservation.entries[begin:end] = new
        reservation.promised[begin:end] = bytes(len(new))
        forest.promised_count -= len(new)
        books.reservations.not_live(reservation, items)
        if reservation.live_count:
            forest.claim(run)
            reservation.claimed.append(run)
        if end < reservation.families_count and reservation.entries[end] != NONE:
            forest.link(new[-1], reservation.entries[end])
        counters = books.counters
        counters["published"] += len(items)
        counters["families_published"] += len(new)
        counters["published_bytes"] += family_bytes * len(new)

    def _settle_mixed(
        self, reservation: Reservation, items: Sequence[int], answer: Published, entries: array[int]
    ) -> None:
        """Some families are new, some are there already, some items lost their race."""
        books = self._books
        forest = books.forest
        m, known = reservation.members_count, reservation.entries
        new: dict[int, int] = {}  # family -> position of the first member published
        grown: list[tuple[int, int]] = []  # entry, bytes
        won: list[int] = []
        lost: list[int] = []
        won_entries: array[int] = array("I")
        for at, item in enumerate(items):
            family, member = divmod(item, m)
            if answer.statuses[at] != PublishStatus.NO_INDEX:
                known[family] = entries[at]
            if answer.statuses[at] != PublishStatus.PUBLISHED:
                lost.append(item)
                continue
            won.append(item)
            won_entries.append(entries[at])
            if forest.is_used(entries[at]) or family in new:
                grown.append((entries[at], reservation.member_bytes[member]))
            else:
                new[family] = member
        self._append_new(reservation, new)
        for entry, slot_bytes in grown:
            forest.add_member(entry, slot_bytes, reservation.class_set)
        places = array("Q", [reservation.places[item] for item in won])
        books.slots.publish(places, won_entries, forest.home_of)
        books.reservations.not_live(reservation, won)
        families = dict.fromkeys(item // m for item in items)
        self._end_promises(reservation, (family for family in families if known[family] != NONE))
        self._give_back(reservation, lost)
        if reservation.live_count:
            for run in {forest.run_of[known[family]] for family in families if known[family] != NONE}:
                forest.claim(run)
                reservation.claimed.append(run)
        counters = books.counters
        counters["published"] += len(won)
        counters["families_published"] += len(new)
        counters["published_bytes"] += sum(reservation.member_bytes[item % m] for item in won)
        counters["duplicates"] += answer.statuses.count(PublishStatus.PRESENT)
        counters["differs"] += answer.differs.count(1)
        counters["no_index"] += answer.statuses.count(PublishStatus.NO_INDEX)

    def _append_new(self, reservation: Reservation, new: dict[int, int]) -> None:
        """New families become runs, one for each row of neighbours that begin with the same member."""
        forest = self._books.forest
        known = reservation.entries
        rows: list[list[int]] = []
        for family, member in new.items():
            if rows and rows[-1][-1] == family - 1 and new[family - 1] == member:
                rows[-1].append(family)
            else:
                rows.append([family])
        for row in rows:
            begin, end = row[0], row[-1] + 1
            forest.append(
                reservation.behind(begin), known[begin:end], reservation.key8s[begin:end],
                reservation.member_bytes[new[begin]], missing_count=reservation.family_members - 1,
                namespace=reservation.namespace, request=reservation.request,
                class_set=reservation.class_set, now_ns=self._books.now_ns,
            )  # fmt: skip
            if end < reservation.families_count and end not in new and known[end] != NONE:
                forest.link(known[end - 1], known[end])

    def _tell_differences(
        self, reservation: Reservation, items: Sequence[int], checksums: array[int], answer: Published
    ) -> bytes:
        """The statuses for the writer; in strict mode with those that met other bytes, which are noted."""
        books = self._books
        if not books.config.strict_duplicates or not any(answer.differs):
            return answer.statuses
        m = reservation.members_count
        entries = u32(answer.entries)
        found = [at for at, differs in enumerate(answer.differs) if differs]
        outcome = bytearray(answer.statuses)
        for at in found:
            outcome[at] = PublishStatus.DIFFERS
        for at in found[:differs_noted_max]:
            member = reservation.members[items[at] % m].index
            fields: dict[str, object] = {
                "client": reservation.client, "key8": f"{reservation.key8s[items[at] // m]:016x}", "member": member,
                "entry": entries[at], "offered_checksum": f"{checksums[at]:016x}", "differing_items": len(found),
            }  # fmt: skip
            books.effects.append(Note("warning", "duplicate_differs", fields))
        return bytes(outcome)

    # -- the end
    # -------------------------------------------------------------------------------------------------------

    def abort(self, event: Abort) -> None:
        """Give items back. What is published stays; what was given back already is not counted."""
        books = self._books
        books.counters["aborts"] += 1
        reservation = self._find(event.client, event.reservation)
        if reservation is None:
            books.effects.append(AbortedReply(event.client, event.op, 0))
            return
        if event.count < 0 or not self._is_range(event, reservation, event.count):
            return
        states = reservation.states
        items = [item for item in range(event.first, event.first + event.count) if states[item]]
        self._give_back(reservation, items)
        if not reservation.live_count:
            self._end(reservation)
        books.counters["aborted"] += len(items)
        record = books.journal.of(reservation.request, books.now_ns)
        if record is not None:
            record.aborted += len(items)
        books.effects.append(AbortedReply(event.client, event.op, len(items)))

    def client_gone(self, client: int) -> None:
        """Everything the client had reserved comes back, and its keys are writable again at once."""
        books = self._books
        for number in list(books.reservations.of_client.get(client, ())):
            reservation = books.reservations.live[number]
            items = [item for item, state in enumerate(reservation.states) if state]
            self._give_back(reservation, items)
            self._end(reservation)
            books.counters["orphaned"] += len(items)

    def _give_back(self, reservation: Reservation, items: Sequence[int]) -> None:
        """Live items end unpublished: slot, record and, with the last item of a family, its promise."""
        if not items:
            return
        books = self._books
        records: array[int] = array("I", [reservation.records[item] for item in items])
        places: array[int] = array("Q", [reservation.places[item] for item in items])
        books.effects.append(DoFreeRecords(records))
        books.records.give(records)
        books.slots.give(places, reserved=True)
        books.reservations.not_live(reservation, items)
        m = reservation.members_count
        families = dict.fromkeys(item // m for item in items)
        self._end_promises(
            reservation, (family for family in families if not reservation.is_family_live(family))
        )

    def _end_promises(self, reservation: Reservation, families: Iterable[int]) -> None:
        self._books.forest.promised_count -= reservation.end_promises(families)

    def _end(self, reservation: Reservation) -> None:
        self._unclaim(reservation)
        self._books.reservations.end(reservation)
