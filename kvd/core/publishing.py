"""The second half of the write path: publish, abort, and the end of a client.

Called by `Core.step`. Publication is what makes content visible; it happens in the table, in one call, and the
first writer of a member wins. Whoever does not, or gives up, or dies, gives back slot and record, and the
promise of an entry with the last item of a family. Invariant: a slot is given back here only before its
content was published.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from kvd import limits
from kvd.core.books import Books, Flow
from kvd.core.columns import u32, u64
from kvd.core.events import (
    NO_OP,
    NONE,
    PREVIOUS,
    Abort,
    AbortedReply,
    ClientGone,
    DoAgain,
    DoFreeRecords,
    DoPublish,
    ErrorReply,
    Gone,
    Note,
    Publish,
    Published,
    PublishedReply,
    PublishStatus,
)
from kvd.core.reservations import LIVE, Reservation
from kvd.errors import InvariantError, UsageError

# Plain integers: to look up an enum member costs more than the comparison it is for.
PUBLISHED = int(PublishStatus.PUBLISHED)
PRESENT = int(PublishStatus.PRESENT)
DIFFERS = int(PublishStatus.DIFFERS)
GONE = int(PublishStatus.GONE)
NO_INDEX = int(PublishStatus.NO_INDEX)
SKIPPED = int(PublishStatus.SKIPPED)

differs_noted_max = 8
gone_items_per_turn = 4096


class Publishing:
    """Ends reservations, one way or the other."""

    def __init__(self, books: Books) -> None:
        self._books = books

    def publish(self, event: Publish) -> Flow[None]:
        """Make filled items visible; whoever was first wins."""
        books = self._books
        books.counters["publishes"] += 1
        count = len(event.include)
        reservation = self._find(event.client, event.reservation)
        if reservation is None:
            books.counters["gone"] += count
            books.effects.append(PublishedReply(event.client, event.op, bytes([GONE]) * count))
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
                    statuses[at] = SKIPPED
                elif not states[first + at]:
                    statuses[at] = GONE
            books.counters["gone"] += statuses.count(GONE)
            chosen = [at for at in range(count) if not statuses[at]]
            items = [first + at for at in chosen]
            checksums = array("Q", [checksums[at] for at in chosen])
        items, checksums = self._with_entries(reservation, items, checksums, first, statuses)
        if items:
            early = books.config.answers_early and not books.config.strict_duplicates and len(items) == count
            outcome = yield from self._publish(reservation, items, checksums, event.op if early else NO_OP)
            if early:
                return
            if len(items) == count:
                statuses = bytearray(outcome)
            else:
                for item, status in zip(items, outcome, strict=True):
                    statuses[item - first] = status
        elif not reservation.live_count:  # the last ones found no room in the index
            self._end(reservation)
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
        if m == 1 and isinstance(items, range) and promised.count(1, items.start, items.stop) == len(items):
            return items, checksums
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
            statuses[item - first] = NO_INDEX
        self._books.counters["no_index"] += len(gone)
        self._give_back(reservation, sorted(gone))
        kept = [(item, checksum) for item, checksum in zip(items, checksums, strict=True) if item not in gone]
        return [item for item, _ in kept], array("Q", [checksum for _, checksum in kept])

    def _publish(
        self, reservation: Reservation, items: Sequence[int], checksums: array[int], answer_op: int
    ) -> Flow[bytes]:
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
        indexes = reservation.shape.indexes
        answer = yield DoPublish(
            token=books.next_token(),
            client=reservation.client,
            keys=keys,
            members=bytes([indexes[item % m] for item in items]) if m > 1 else indexes * len(items),
            split=reservation.split,
            family_members=reservation.family_members,
            records=records,
            checksums=checksums,
            entries=(offered := forest.take_entries(entries_count)),
            namespace=reservation.namespace,
            parents=_parents(reservation, items),
            answer_op=answer_op,
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
            and answer.statuses.count(PUBLISHED) == count
        ):
            self._settle_new(reservation, items, entries)
        else:
            self._settle_mixed(reservation, items, answer, entries)
        record = books.journal.of(reservation.request, books.now_ns)
        if record is not None:
            record.published += answer.statuses.count(PUBLISHED)
            record.settled(books.now_ns)

    def _settle_new(self, reservation: Reservation, items: range, entries: array[int]) -> None:
        """Whole families in a row, all new: the common case, without a step per item."""
        books = self._books
        forest = books.forest
        m = reservation.members_count
        begin = items.start // m
        new = entries if m == 1 else entries[::m]
        end = begin + len(new)
        family_bytes = reservation.shape.family_bytes
        run = forest.append(
            reservation.behind(begin), new, reservation.key8s[begin:end], family_bytes,
            missing_count=reservation.family_members - reservation.mandatory_count, namespace=reservation.namespace,
            request=reservation.request, class_set=reservation.shape.class_set, now_ns=books.now_ns,
        )  # fmt: skip
        books.slots.publish(reservation.places[items.start : items.stop], entries, forest.home_of)
        reservation.entries[begin:end] = new
        reservation.promised[begin:end] = bytes(len(new))
        forest.promised_count -= len(new)
        books.reservations.not_live(reservation, items)
        self._tell_others(reservation, reservation.key8s[begin:end], new)
        if reservation.live_count:
            forest.claim(run)
            reservation.claimed.append(run)
        self._join(reservation, begin, end)
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
        grown: list[tuple[int, int]] = []  # entry, position of the member
        won: list[int] = []
        lost: list[int] = []
        won_entries: array[int] = array("I")
        for at, item in enumerate(items):
            family, member = divmod(item, m)
            if answer.statuses[at] != NO_INDEX:
                known[family] = entries[at]
            if answer.statuses[at] != PUBLISHED:
                lost.append(item)
                continue
            won.append(item)
            won_entries.append(entries[at])
            if forest.is_used(entries[at]) or family in new:
                grown.append((entries[at], member))
            else:
                new[family] = member
        self._append_new(reservation, new)
        for entry, member in grown:
            slot_bytes, class_set = reservation.shape.slot_bytes[member], reservation.shape.class_set
            if reservation.is_mandatory(member):
                forest.add_member(entry, slot_bytes, class_set, books.now_ns)
            else:
                forest.add_optional(entry, slot_bytes, class_set)
        places = array("Q", [reservation.places[item] for item in won])
        books.slots.publish(places, won_entries, forest.home_of)
        books.reservations.not_live(reservation, won)
        families = dict.fromkeys(item // m for item in items)
        self._end_promises(reservation, (family for family in families if known[family] != NONE))
        self._give_back(reservation, lost)
        if new:
            key8s = array("Q", [reservation.key8s[family] for family in new])
            self._tell_others(reservation, key8s, array("I", [known[family] for family in new]))
        if reservation.live_count:
            for run in {forest.run_of[known[family]] for family in families if known[family] != NONE}:
                forest.claim(run)
                reservation.claimed.append(run)
        counters = books.counters
        counters["published"] += len(won)
        counters["families_published"] += len(new)
        counters["published_bytes"] += sum(reservation.shape.slot_bytes[item % m] for item in won)
        counters["duplicates"] += answer.statuses.count(PRESENT)
        counters["differs"] += answer.differs.count(1)
        counters["no_index"] += answer.statuses.count(NO_INDEX)

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
                reservation.shape.slot_bytes[new[begin]],
                missing_count=reservation.family_members - reservation.is_mandatory(new[begin]),
                namespace=reservation.namespace, request=reservation.request,
                class_set=reservation.shape.class_set, now_ns=self._books.now_ns,
            )  # fmt: skip
            self._join(reservation, begin, end)

    def _tell_others(self, reservation: Reservation, key8s: array[int], entries: array[int]) -> None:
        """Who writes these families too learns that they are there: what it publishes next lies behind them."""
        reservations = self._books.reservations
        if len(reservations.live) < 2 or not reservations.pending.has_one_of(key8s):
            return
        new = dict(zip(key8s, entries, strict=True))
        for other in reservations.live.values():
            if other is not reservation and not new.keys().isdisjoint(other.key8s):
                self._learn(other, new)

    def _learn(self, other: Reservation, new: dict[int, int]) -> None:
        """These families (key8 -> entry), which this reservation lies behind or also writes, are there now."""
        books = self._books
        forest = books.forest
        known = other.entries
        runs: list[int] = []
        if other.parent_entry == NONE and other.parent_key8 in new:
            other.parent_entry = new[other.parent_key8]
            runs.append(forest.run_of[other.parent_entry])
        for family, key8 in enumerate(other.key8s):
            entry = new.get(key8, NONE)
            if entry == NONE or known[family] != NONE:
                continue
            if forest.namespace_of[forest.run_of[entry]] != other.namespace:
                continue  # a client that names the keys of another namespace
            known[family] = entry
            self._end_promises(other, (family,))
            behind = known[family + 1] if family + 1 < other.families_count else NONE
            if behind != NONE and forest.is_used(behind):
                forest.link(entry, behind)
            runs.append(forest.run_of[entry])
        for run in runs:
            forest.claim(run)
        other.claimed.extend(runs)

    def _join(self, reservation: Reservation, begin: int, end: int) -> None:
        """Families [begin, end) are new: join them to what lies before and behind them, if that came out of order."""
        books = self._books
        forest, known = books.forest, reservation.entries
        if begin:
            before, before_key8 = known[begin - 1], reservation.key8s[begin - 1]
        else:
            before, before_key8 = reservation.parent_entry, reservation.parent_key8
        if before == NONE and before_key8:
            books.orphans.add_family(before_key8, reservation.key8s[begin], known[begin])
        if end < reservation.families_count and known[end] != NONE and forest.is_used(known[end]):
            forest.link(known[end - 1], known[end])
        for at in books.orphans.awaited(reservation.key8s[begin:end]):
            entry = known[begin + at]
            children, waiting = books.orphans.take(reservation.key8s[begin + at])
            for key8, child in children.items():
                if forest.is_used(child) and forest.key8_of[child] == key8:
                    forest.link(entry, child)
            for number in waiting:
                self._learn(books.reservations.live[number], {reservation.key8s[begin + at]: entry})

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
            outcome[at] = DIFFERS
        for at in found[:differs_noted_max]:
            member = reservation.shape.indexes[items[at] % m]
            fields: dict[str, object] = {
                "client": reservation.client, "key8": f"{reservation.key8s[items[at] // m]:016x}", "member": member,
                "entry": entries[at], "offered_checksum": f"{checksums[at]:016x}", "differing_items": len(found),
            }  # fmt: skip
            books.effects.append(Note("warning", "duplicate_differs", fields))
        return bytes(outcome)

    # -- the end ---------------------------------------------------------------------------------------------

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

    def client_gone(self, event: ClientGone) -> Flow[None]:
        """Everything the client had reserved comes back, in turns, and then its number.

        Its keys are writable again as their reservations end.
        """
        books = self._books
        client = event.client
        if client in books.clients:
            mine = books.reservations.of_client.get(client, {})
            turn = 0
            while mine:
                reservation = books.reservations.live[next(iter(mine))]
                items = [item for item, state in enumerate(reservation.states) if state]
                self._give_back(reservation, items)
                self._end(reservation)
                books.counters["orphaned"] += len(items)
                turn += len(items)
                if mine and turn >= gone_items_per_turn:
                    yield DoAgain(books.next_token())
                    turn = 0
            del books.clients[client]
            books.counters["clients_gone"] += 1
        elif client in books.quarantine:
            yield from self._end_quarantine(client)
        books.effects.append(Gone(client))

    def _end_quarantine(self, client: int) -> Flow[None]:
        books = self._books
        records, places = books.quarantine[client]
        while records:
            some, there = records[-gone_items_per_turn:], places[-gone_items_per_turn:]
            del records[-gone_items_per_turn:], places[-gone_items_per_turn:]
            books.effects.append(DoFreeRecords(some))
            books.records.give(some)
            books.slots.give(there, reserved=True)
            books.counters["orphaned"] += len(some)
            if records:
                yield DoAgain(books.next_token())
        del books.quarantine[client]

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
        over = [f for f in dict.fromkeys(item // m for item in items) if not reservation.is_family_live(f)]
        self._end_promises(reservation, over)
        if reservation.live_count:
            for family in over:
                if reservation.entries[family] == NONE:
                    books.orphans.await_family(reservation, family)

    def _end_promises(self, reservation: Reservation, families: Iterable[int]) -> None:
        self._books.forest.promised_count -= reservation.end_promises(families)

    def _end(self, reservation: Reservation) -> None:
        for run in reservation.claimed:
            self._books.forest.unclaim(run)
        self._books.reservations.end(reservation)
        if reservation.parent_key8:
            self._books.orphans.end_reservation(reservation.parent_key8, reservation.number)
        for key8 in reservation.awaited:
            self._books.orphans.end_reservation(key8, reservation.number)


def _parents(reservation: Reservation, items: Sequence[int]) -> array[int]:
    """What the family of each item lies behind, as far as it is known before the table has spoken."""
    m, known = reservation.members_count, reservation.entries
    parents = array("I", [PREVIOUS]) * len(items)
    parents[0] = reservation.behind(items[0] // m)
    if isinstance(items, range):
        return parents
    last = items[0] // m
    for at, item in enumerate(items):
        family = item // m
        for between in range(family - 1, last, -1):
            if known[between] != NONE:
                parents[at] = known[between]
                break
        last = family
    return parents
