"""What a writer holds: reserved slots, filled where they lie, then published or given back.

A reservation is a batch of chunks × members. Nothing is visible before `publish` returned PUBLISHED; leaving the block
early gives everything back. The checksum is computed here, fused with the copy in `fill`. Published is what was filled
or whose writable view was taken, and nothing else: a slot that nobody touched holds what lay there before.

    open ── fill, view, gather ──▶ open, touched ── publish ──▶ sent ──▶ published | present (another writer was first)
      │                                                          ├── ring full ──▶ as before
      │                                                          └── no answer ──▶ unsure: may be published again
      └──────── abort, end of the block, death of the process ──▶ given back

Threads may fill and publish different items of one reservation at once. An item that is being filled is not published
and not given back; one that is being published cannot be looked at.
"""

from __future__ import annotations

import asyncio
import threading
from array import array
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from kvd import arguments, limits
from kvd.clientlib import caches, calls
from kvd.clientlib.native_errors import NATIVE, translate
from kvd.errors import (
    CapacityError,
    KvdError,
    LifecycleError,
    UsageError,
    ViewsAliveError,
)
from kvd.shm import compute, messages
from kvd.shm.messages import Cq, Granted, Published, Sq
from kvd.types import Member

if TYPE_CHECKING:
    from kvd.clientlib.caches import BlockIds, EngineCache
    from kvd.clientlib.calls import Calls
    from kvd.clientlib.chain import Chain
    from kvd.clientlib.families import Families
    from kvd.layout.shards import Objects
    from kvd.shm._native import Client, WritableView

_OPEN, _DONE, _FILLING, _SENT, _UNSURE = range(5)
_HASH_INLINE_BYTES = 1 << 20  # what an event loop may be held up with: about 100 microseconds
_GRANTED, _SKIPPED = int(Granted.GRANTED), int(Published.SKIPPED)
_RESULTS = tuple(Published)


class Writes(Sequence["Write"]):
    """A reservation: items are numbered chunk by chunk, `members` of each. A context manager, sync and async."""

    def __init__(
        self,
        client: Client,
        calls_: Calls,
        chain: Chain,
        members: Sequence[Member],
        deadline_s: float,
        answer: bytes,
        families: Families | None = None,
        objects: Objects | None = None,
    ) -> None:
        self._client = client
        self._calls = calls_
        self._chain = chain
        self._members = tuple(members)
        self._deadline_s = deadline_s
        self._families, self._objects = families, objects
        self.reservation, self._places, self._granted = messages.parse_reserved(answer)
        count = len(self._granted)
        self._checksums = array("Q", bytes(8 * count))
        self._filled = bytearray(count)
        self._touched = bytearray(count)  # its slot was filled, or handed out to be filled in place
        self._state = bytearray(count)
        self._before = bytearray(count)  # the state of what is being published, before
        self._views: dict[int, WritableView] = {}
        self._seeds: dict[int, memoryview] = {}
        self._claims = threading.Lock()  # held for a look at the states, never while bytes move
        self.results: list[Published | None] = [None] * count
        calls_.reservations.add(self)

    def __len__(self) -> int:
        return len(self._granted)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise IndexError(f"item {index} of a reservation of {len(self)}")
        return Write(self, position)

    def __iter__(self) -> Iterator[Write]:
        return (Write(self, i) for i in range(len(self)))

    @property
    def granted_count(self) -> int:
        """Items that are ours to fill; the others are present already or being written."""
        return self._granted.count(_GRANTED)

    def fill(self, sources: Sequence[Any]) -> None:
        """Copy one source a granted item into its slot, checksum included. A None leaves the item alone.

        Sources are contiguous buffers of the item's size, in the order of all items; all are looked at before the first
        byte is copied. One native call, without the GIL. Raises UsageError naming a source that does not fit,
        LifecycleError for an item that is over or in use by another thread.
        """
        if arguments.length("sources", sources, "give a list of buffers, one an item") != len(self):
            raise UsageError(f"{len(sources)} sources for {len(self)} items", code="sources")
        granted = self._granted
        positions = [i for i, source in enumerate(sources) if source is not None and granted[i] == _GRANTED]
        self._fill(positions, sources if len(positions) == len(sources) else [sources[i] for i in positions])

    def gather(self, cache: EngineCache, block_ids: BlockIds) -> int:
        """Fill the granted items of `cache`'s group from the engine's blocks; returns the bytes copied.

        `block_ids` holds the blocks of every chunk of this reservation in turn; of a state cache its one slot a chunk.
        One native call for each member. Only for reservations with a geometry, that of `cache`. Raises
        CompatibilityError for another geometry and naming a member of which this rank has only a piece, UsageError for
        a cache of a group or rank that is not reserved.
        """
        families, objects = self._families, self._objects
        if families is None or objects is None:
            raise UsageError("gather needs a reservation with geom= and split=", code="geometry")
        if not hasattr(cache, "check_open"):
            raise arguments.refusal(
                "cache", cache, "give what ns.register(layout, tensors, geom=...) returned"
            )
        cache.check_open()
        cache.check_geometry(families.geometry)
        copied, width, mine = 0, len(self._members), False
        for position, member in enumerate(self._members):
            copies = cache.write(families, objects, objects[member.index])
            if copies is None:
                continue
            mine = True
            rows = [
                row for row, item in enumerate(range(position, len(self), width))
                if self._granted[item] == _GRANTED and self._state[item] == _OPEN
            ]  # fmt: skip
            chosen = caches.rows_of(block_ids, copies.blocks_per_chunk, len(self) // width, rows)
            if not rows:  # all present, or being written by others
                continue
            items = [row * width + position for row in rows]
            views = [self._view(item) for item in items]
            for item in items:
                self._filled[item] = 0
            compute.gather(copies.native, views, copies.tensors(cache), chosen)
            for item in items:
                self._touched[item] = 1
            copied += copies.native.moved_bytes * len(rows)
        if not mine and width and cache.stores(objects):
            name = cache.geometry.groups[cache.group].name
            raise UsageError(
                f"none of the reserved members lies in this cache of group {name!r}, {cache.rank}: reserve that group, "
                "for that rank",
                code="group",
            )  # fmt: skip
        return copied

    def publish(self) -> list[Published]:
        """Publish every granted item that was filled, or whose writable view was taken, and is not published yet.

        Returns one result an item (`Published`). SKIPPED: was not ours, or was never touched; such an item stays
        reserved until the block ends, and can be filled and published later. PRESENT: another writer was first, which
        is as good. Raises ViewsAliveError while arrays or slices made of a writable view live, LifecycleError when the
        reservation is over, UnavailableError when there was no answer in time: then what was asked for may happen yet,
        its bytes cannot be changed any more, and publishing again is safe.
        """
        self._publish(range(len(self)))
        return [Published.SKIPPED if r is None else r for r in self.results]

    async def publish_async(self) -> list[Published]:
        """As `publish`, without blocking the loop."""
        due = self._claim_publication(range(len(self)))
        if due:
            try:
                if self._unhashed_bytes(due) > _HASH_INLINE_BYTES:
                    payload = await asyncio.to_thread(self._publication, due)
                else:
                    payload = self._publication(due)
                answer = await self._calls.call_async(Sq.PUBLISH, payload, self._deadline_s)
                self._settle(due, messages.parse_published(calls.expect(Cq.PUBLISHED, answer)))
            except BaseException as error:
                self._unsettled(due, error)
                raise
        return [Published.SKIPPED if r is None else r for r in self.results]

    def abort(self) -> None:
        """Give back every item that is not published. Does not wait for the daemon; safe to repeat.

        An item whose writable view still has arrays or slices is kept, since they could write into what would be
        somebody else's memory: ViewsAliveError says so; call again when they are gone. The end of the process gives
        back all.
        """
        alive = self.give_back()
        if alive:
            raise ViewsAliveError(
                f"{alive} items are kept: arrays or slices of their writable views are alive",
                code="views-alive",
            )

    def give_back(self) -> int:
        """As `abort`; returns how many items are kept instead of raising."""
        alive = 0
        due = []
        with self._claims:
            for position, state in enumerate(self._state):
                if state == _DONE or self._granted[position] != _GRANTED:
                    continue
                handle = self._views.get(position)
                if state == _FILLING or (handle is not None and not handle.retire_idle()):
                    alive += 1
                    continue
                self._views.pop(position, None)
                self._state[position] = _DONE
                due.append(position)
        for first, count in _stretches(due):
            self._calls.post(Sq.ABORT, messages.pack_abort(self.reservation, first, count))
        return alive

    def __del__(self) -> None:
        if getattr(self, "_state", None) is not None:
            self.give_back()

    def __enter__(self) -> Writes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.give_back() and error is None:
            self.abort()

    async def __aenter__(self) -> Writes:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.give_back() and error is None:
            self.abort()

    # -- one item -----------------------------------------------------------------------------------------

    def _member(self, position: int) -> Member:
        return self._members[position % len(self._members)]

    def _seed(self, position: int) -> int:
        member = self._member(position).index
        seeds = self._seeds.get(member)
        if seeds is None:
            seeds = self._seeds[member] = memoryview(compute.seeds(self._chain.identities, member)).cast("Q")
        return seeds[position // len(self._members)]

    def _check_open(self, position: int) -> None:
        """Raises LifecycleError unless the item is ours to write now. Call it with the claims held."""
        if self._granted[position] != _GRANTED:
            said = Granted(self._granted[position]).name.lower()
            raise LifecycleError(f"item {position} is not ours to write: it is {said}", code="not-granted")
        state = self._state[position]
        if state == _DONE:
            raise LifecycleError(f"item {position} was published or given back", code="reservation-over")
        if state != _OPEN:
            what = {
                _FILLING: "is being filled by another thread",
                _SENT: "is being published",
                _UNSURE: "was sent to be published, and nobody knows whether it was: publish again, or abort",
            }[state]
            raise LifecycleError(f"item {position} {what}; it cannot be written now", code="item-busy")

    def _view(self, position: int) -> memoryview:
        with self._claims:
            self._check_open(position)
            try:
                handle = self._views.get(position)
                if handle is None:
                    size_bytes = self._member(position).size_bytes
                    handle = self._views[position] = self._client.writable(self._places[position], size_bytes)
                return handle.view
            except NATIVE as error:
                raise translate(error) from None

    def _view_to_write(self, position: int) -> memoryview:
        view = self._view(position)
        self._touched[position], self._filled[position] = (
            1,
            0,
        )  # its checksum is computed when it is published
        return view

    def _fill(self, positions: list[int], given: Sequence[Any]) -> None:
        """Copy one source into each of these items."""
        if not positions:
            return
        with self._claims:
            for position in positions:
                self._check_open(position)
            for position in positions:
                self._state[position] = _FILLING
        try:
            places, sizes, seeds = self._columns(positions)
            found = memoryview(self._client.fill(places, sizes, given, seeds)).cast("Q")
        except (*NATIVE, BufferError) as error:
            raise self._unfit(positions, given, error) from None
        else:
            views = self._views
            for position, checksum in zip(positions, found, strict=True):
                self._checksums[position] = checksum
                self._touched[position] = 1
                # Somebody who still has a view may change it once more.
                self._filled[position] = not views or position not in views or not views[position].exports
        finally:
            for position in positions:
                self._state[position] = _OPEN

    def _unfit(self, positions: list[int], given: Sequence[Any], error: Exception) -> KvdError:
        """What is wrong with these sources, or with the client."""
        for position, source in zip(positions, given, strict=True):
            expected_bytes = self._member(position).size_bytes
            try:
                size_bytes = memoryview(source).nbytes
            except TypeError as refused:
                return UsageError(f"source for item {position}: {refused}", code="source", item=position)
            if size_bytes != expected_bytes:
                return UsageError(
                    f"source of {size_bytes} B for item {position} of {expected_bytes} B",
                    code="size", size_bytes=size_bytes, expected_bytes=expected_bytes,
                )  # fmt: skip
        if isinstance(error, BufferError):
            return UsageError(f"{error}; fill needs contiguous buffers", code="source")
        return translate(error)

    def _columns(self, positions: Sequence[int]) -> tuple[array[int], array[int], Any]:
        """Places, sizes and checksum seeds of these items."""
        if len(self._members) == 1 and len(positions) == len(self):
            size_bytes = self._members[0].size_bytes
            self._seed(0)
            seeds: Any = self._seeds[self._members[0].index]
            return self._places, array("Q", [size_bytes]) * len(self), seeds
        return (
            array("Q", [self._places[i] for i in positions]),
            array("Q", [self._member(i).size_bytes for i in positions]),
            array("Q", [self._seed(i) for i in positions]),
        )

    # -- publishing ---------------------------------------------------------------------------------------

    def _publish(self, positions: range) -> None:
        due = self._claim_publication(positions)
        if not due:
            return
        try:
            answer = self._calls.call(Sq.PUBLISH, self._publication(due), self._deadline_s)
            self._settle(due, messages.parse_published(calls.expect(Cq.PUBLISHED, answer)))
        except BaseException as error:
            self._unsettled(due, error)
            raise

    def _claim_publication(self, positions: range) -> list[int]:
        """The items to publish: from now on nobody gets a view of them. Raises ViewsAliveError."""
        granted, state, touched, views = self._granted, self._state, self._touched, self._views
        with self._claims:
            due = [
                i for i in positions
                if touched[i] and (state[i] == _OPEN or state[i] == _UNSURE) and granted[i] == _GRANTED
            ]  # fmt: skip
            for position in due if views else ():
                handle = views.get(position)
                if handle is None:
                    continue
                if not handle.retire_idle():
                    raise ViewsAliveError(
                        f"item {position}: arrays or slices of its writable view are alive and could still change it; "
                        "delete them before publish",
                        code="views-alive", item=position,
                    )  # fmt: skip
                del views[position]
            for position in due:
                self._before[position], state[position] = state[position], _SENT
        return due

    def _unhashed_bytes(self, due: list[int]) -> int:
        return sum(self._member(i).size_bytes for i in due if not self._filled[i])

    def _publication(self, due: list[int]) -> bytes:
        """The PUBLISH payload for these items; computes the checksums of what was written in place."""
        self._checksum([position for position in due if not self._filled[position]])
        first, last = due[0], due[-1] + 1
        include = bytearray(last - first)
        for position in due:
            include[position - first] = 1
        return messages.pack_publish(self.reservation, first, self._checksums[first:last], bytes(include))

    def _checksum(self, positions: list[int]) -> None:
        """Checksums of items that were written in place, in one native call."""
        if not positions:
            return
        try:
            found = memoryview(self._client.checksums(*self._columns(positions))).cast("Q")
        except NATIVE as error:
            raise translate(error) from None
        for position, checksum in zip(positions, found, strict=True):
            self._checksums[position] = checksum
            self._filled[position] = 1

    def _settle(self, due: list[int], statuses: bytes) -> None:
        results, state, first = self.results, self._state, due[0]
        for position in due:
            status = statuses[position - first]
            if status == _SKIPPED:
                state[position] = _UNSURE  # an earlier publication without an answer may have happened
            else:
                state[position] = _DONE
                results[position] = _RESULTS[status]

    def _unsettled(self, due: list[int], error: BaseException) -> None:
        """The publication failed. What the daemon may have taken all the same must not change any more."""
        unsent = isinstance(error, CapacityError) and error.code.endswith("RING-FULL")
        for position in due:
            if self._state[position] == _SENT:
                self._state[position] = self._before[position] if unsent else _UNSURE

    def _publish_one(self, position: int) -> Published:
        self._publish(range(position, position + 1))
        result = self.results[position]
        if result is None:
            raise LifecycleError(
                f"item {position} was not ours to publish, was never filled, or was given back",
                code="not-granted",
            )
        return result


class Write:
    """One item of a reservation."""

    __slots__ = ("_position", "_writes")

    def __init__(self, writes: Writes, position: int) -> None:
        self._writes = writes
        self._position = position

    @property
    def status(self) -> Granted:
        """GRANTED: fill and publish it. PRESENT: it is there. PENDING: another client is writing it."""
        return Granted(self._writes._granted[self._position])

    @property
    def view(self) -> memoryview:
        """The slot, writable. Raises LifecycleError when it is not ours (any more)."""
        return self._writes._view_to_write(self._position)

    def fill(self, source: Any) -> None:
        """Copy a contiguous buffer of exactly the slot's size, checksum included."""
        self._writes._fill([self._position], [source])

    def publish(self) -> Published:
        """Publish this item alone."""
        return self._writes._publish_one(self._position)


def _stretches(positions: list[int]) -> list[tuple[int, int]]:
    """(first, count) of each stretch of consecutive positions."""
    stretches: list[tuple[int, int]] = []
    for position in positions:
        if stretches and sum(stretches[-1]) == position:
            stretches[-1] = (stretches[-1][0], stretches[-1][1] + 1)
        else:
            stretches.append((position, 1))
    return stretches


def none_to_write() -> bytes:
    """The answer to a reservation that was not worth asking for: this rank stores nothing."""
    return messages.pack_reserved(0, array("Q"), b"")


def check_members(members: Sequence[Member] | None, nbytes: int | None) -> tuple[Member, ...]:
    """The members of a reservation: as given, or one object of `nbytes` a chunk."""
    if (members is None) == (nbytes is None):
        raise UsageError("say either nbytes= (one object a chunk) or members=", code="members")
    if nbytes is not None:
        return (Member(0, nbytes if type(nbytes) is int else arguments.size("nbytes", nbytes)),)
    if isinstance(members, str | bytes) or not isinstance(members, Sequence):
        raise arguments.refusal("members", members, "give a list of kvd.Member(index, size_bytes)", "members")
    for member in members:
        arguments.instance("members", member, Member, "each is a kvd.Member(index, size_bytes)")
    if not members or len({m.index for m in members}) != len(members):
        raise UsageError("members are one or more, each index once", code="members")
    return tuple(members)


assert limits.batch_items_max <= 0xFFFF
