"""What a writer holds: reserved slots, filled where they lie, then published or given back.

A reservation is a batch of chunks × members. Nothing is visible before `publish` returned PUBLISHED; leaving the block
early gives everything back. The checksum is computed here, fused with the copy in `fill`.

    reserved ── fill ──▶ filled ── publish ──▶ published | present (another writer was first)
        └──────── abort, end of the block, death of the process ──▶ given back
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from kvd import limits
from kvd.clientlib import caches, calls
from kvd.clientlib.native_errors import NATIVE, translate
from kvd.errors import LifecycleError, UsageError, ViewsAliveError
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

_OPEN, _DONE = 0, 1
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
        self._views: dict[int, WritableView] = {}
        self._seeds: dict[int, memoryview] = {}
        self.results: list[Published | None] = [None] * count

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

        Sources are contiguous buffers of the item's size, in the order of all items.
        """
        if len(sources) != len(self):
            raise UsageError(f"{len(sources)} sources for {len(self)} items", code="sources")
        for position, source in enumerate(sources):
            if source is not None and self._granted[position] == _GRANTED:
                self._fill(position, source)

    def gather(self, cache: EngineCache, block_ids: BlockIds) -> int:
        """Fill the granted items of `cache`'s group from the engine's blocks; returns the bytes copied.

        `block_ids` holds the blocks of every chunk of this reservation in turn; of a state cache its one slot a chunk.
        One native call for each member. Only for reservations with a geometry. Raises CompatibilityError naming a
        member of which this rank has only a piece.
        """
        families, objects = self._families, self._objects
        if families is None or objects is None:
            raise UsageError("gather needs a reservation with geom= and split=", code="geometry")
        cache.check_open()
        copied, width = 0, len(self._members)
        for position, member in enumerate(self._members):
            copies = cache.write(families, objects, objects[member.index])
            if copies is None:
                continue
            rows = [
                row for row, item in enumerate(range(position, len(self), width))
                if self._granted[item] == _GRANTED and self._state[item] == _OPEN
            ]  # fmt: skip
            chosen = caches.rows_of(block_ids, copies.blocks_per_chunk, len(self) // width, rows)
            if not rows:  # all present, or being written by others
                continue
            items = [row * width + position for row in rows]
            views = [self._view(item) for item in items]
            compute.gather(copies.native, views, copies.tensors(cache), chosen)
            for item in items:
                self._touched[item] = 1
            copied += copies.native.moved_bytes * len(rows)
        return copied

    def publish(self) -> list[Published]:
        """Publish every granted item that is not published yet; returns one result an item (`Published`).

        SKIPPED: was not ours; with a geometry also: was never filled, and stays reserved. PRESENT: another writer was
        first, which is as good. Raises ViewsAliveError while arrays or slices made of a writable view live,
        LifecycleError when the reservation is over.
        """
        payloads = self._publications(range(len(self)))
        for first, payload in payloads:
            answer = self._calls.call(Sq.PUBLISH, payload, self._deadline_s)
            self._settle(first, messages.parse_published(calls.expect(Cq.PUBLISHED, answer)))
        return [Published.SKIPPED if r is None else r for r in self.results]

    async def publish_async(self) -> list[Published]:
        """As `publish`, without blocking the loop."""
        for first, payload in self._publications(range(len(self))):
            answer = await self._calls.call_async(Sq.PUBLISH, payload, self._deadline_s)
            self._settle(first, messages.parse_published(calls.expect(Cq.PUBLISHED, answer)))
        return [Published.SKIPPED if r is None else r for r in self.results]

    def abort(self) -> None:
        """Give back every item that is not published. Does not wait for the daemon; safe to repeat.

        An item whose writable view still has arrays or slices is kept, since they could write into what would be
        somebody else's memory: ViewsAliveError says so; call again when they are gone. The end of the process gives
        back all.
        """
        alive = self._abort()
        if alive:
            raise ViewsAliveError(
                f"{alive} items are kept: arrays or slices of their writable views are alive",
                code="views-alive",
            )

    def _abort(self) -> int:
        alive = 0
        due = []
        for position, state in enumerate(self._state):
            if state == _DONE or self._granted[position] != _GRANTED:
                continue
            handle = self._views.get(position)
            if handle is not None and handle.exports:
                alive += 1
                continue
            self._retire(position)
            self._state[position] = _DONE
            due.append(position)
        for first, count in _stretches(due):
            self._calls.post(Sq.ABORT, messages.pack_abort(self.reservation, first, count))
        return alive

    def __del__(self) -> None:
        if getattr(self, "_state", None) is not None:
            self._abort()

    def __enter__(self) -> Writes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._abort() and error is None:
            self.abort()

    async def __aenter__(self) -> Writes:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._abort() and error is None:
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

    def _view(self, position: int) -> memoryview:
        if self._granted[position] != _GRANTED:
            said = Granted(self._granted[position]).name.lower()
            raise LifecycleError(f"item {position} is not ours to write: it is {said}", code="not-granted")
        if self._state[position] == _DONE:
            raise LifecycleError(f"item {position} was published or given back", code="reservation-over")
        handle = self._views.get(position)
        if handle is None:
            try:
                handle = self._client.writable(self._places[position], self._member(position).size_bytes)
            except NATIVE as error:
                raise translate(error) from None
            self._views[position] = handle
        return handle.view

    def _fill(self, position: int, source: Any) -> None:
        view = self._view(position)
        given = memoryview(source)
        if given.nbytes != view.nbytes:
            raise UsageError(
                f"source of {given.nbytes} B for item {position} of {view.nbytes} B",
                code="size", size_bytes=given.nbytes, expected_bytes=view.nbytes,
            )  # fmt: skip
        self._checksums[position] = compute.copy_checksum(view, source, self._seed(position))
        self._filled[position] = self._touched[position] = 1

    def _retire(self, position: int) -> None:
        handle = self._views.pop(position, None)
        if handle is not None:
            handle.retire()

    def _publications(self, positions: range) -> list[tuple[int, bytes]]:
        """PUBLISH payloads for the granted, open items among `positions`; computes missing checksums."""
        granted, state = self._granted, self._state
        due = [i for i in positions if granted[i] == _GRANTED and state[i] == _OPEN]
        if self._objects is not None:  # what a rank did not fill holds whatever lay there before
            due = [i for i in due if self._touched[i]]
        for position in due if self._views else ():
            handle = self._views.get(position)
            if handle is not None and handle.exports:
                raise ViewsAliveError(
                    f"item {position}: arrays or slices of its writable view are alive and could still change it; "
                    "delete them before publish",
                    code="views-alive", item=position,
                )  # fmt: skip
        self._checksum([position for position in due if not self._filled[position]])
        for position in due if self._views else ():
            self._retire(position)
        if not due:
            return []
        first, last = due[0], due[-1] + 1
        include = bytearray(last - first)
        for position in due:
            include[position - first] = 1
        return [
            (
                first,
                messages.pack_publish(self.reservation, first, self._checksums[first:last], bytes(include)),
            )
        ]

    def _checksum(self, positions: list[int]) -> None:
        """Checksums of items that were written in place, in one native call."""
        if not positions:
            return
        places = array("Q", [self._places[i] for i in positions])
        sizes = array("Q", [self._member(i).size_bytes for i in positions])
        seeds = array("Q", [self._seed(i) for i in positions])
        try:
            found = memoryview(self._client.checksums(places, sizes, seeds)).cast("Q")
        except NATIVE as error:
            raise translate(error) from None
        for position, checksum in zip(positions, found, strict=True):
            self._checksums[position] = checksum

    def _settle(self, first: int, statuses: bytes) -> None:
        results, state = self.results, self._state
        for position, status in enumerate(statuses, first):
            if status != _SKIPPED:
                state[position] = _DONE
                results[position] = _RESULTS[status]

    def _publish_one(self, position: int) -> Published:
        for first, payload in self._publications(range(position, position + 1)):
            answer = self._calls.call(Sq.PUBLISH, payload, self._deadline_s)
            self._settle(first, messages.parse_published(calls.expect(Cq.PUBLISHED, answer)))
        result = self.results[position]
        if result is None:
            raise LifecycleError(
                f"item {position} was not ours to publish, or was given back", code="not-granted"
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
        view = self._writes._view(self._position)
        self._writes._touched[self._position] = 1
        return view

    def fill(self, source: Any) -> None:
        """Copy a contiguous buffer of exactly the slot's size, checksum included."""
        self._writes._fill(self._position, source)

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
        return (Member(0, nbytes),)
    assert members is not None
    if not members or len({m.index for m in members}) != len(members):
        raise UsageError("members are one or more, each index once", code="members")
    return tuple(members)


assert limits.batch_items_max <= 0xFFFF
