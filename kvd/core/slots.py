"""Slots: segments cut into frames, frames into slabs of one size class, slabs into slots.

Owned by `Core`; called by reservations, publication and eviction in the core's thread. A place is `segment <<
48 | offset`. Invariants: a slot is free, reserved or published (limbo counts as published: its bytes are
still there), exactly once; a slab whose slots are all free is no slab any more; `owners` of a published slot
is the entry of its family.

    free --take--> reserved --publish--> published
      ^---give(reserved)---'                 |
      '------------give(published)-----------'
"""

from __future__ import annotations

from array import array
from bisect import bisect_left

from kvd import limits
from kvd.core.columns import Numbers, u32, u64
from kvd.core.events import NONE, Buffer
from kvd.core.frames import Frames, frame_shift
from kvd.errors import CapacityError, InvariantError, Retry, UsageError

slab_waste_share_max = 1 / 16


class SizeClass:
    """All slots of one size, and the slabs they are in."""

    __slots__ = (
        "free_count", "number", "partial", "reserved_count", "slab_frames", "slab_slots", "slabs_count",
        "slot_bytes", "slots_max",
    )  # fmt: skip

    def __init__(self, number: int, slot_bytes: int, slab_frames: int, slabs_max: int) -> None:
        self.number = number
        self.slot_bytes = slot_bytes
        self.slab_frames = slab_frames
        self.slab_slots = slab_frames * limits.frame_bytes // slot_bytes
        self.slots_max = slabs_max * self.slab_slots  # in an otherwise empty pool with all its segments
        self.partial: dict[Slab, None] = {}  # slabs with free slots; the last one is used next
        self.slabs_count = 0
        self.free_count = 0
        self.reserved_count = 0

    @property
    def published_count(self) -> int:
        """Slots with published bytes, those in limbo included."""
        return self.slabs_count * self.slab_slots - self.free_count - self.reserved_count


class Slab:
    """Neighbouring frames that hold slots of one class."""

    __slots__ = (
        "base",
        "end",
        "frame",
        "free",
        "fresh_count",
        "number",
        "owners",
        "reserved_count",
        "size_class",
    )

    def __init__(self, number: int, size_class: SizeClass, frame: int) -> None:
        self.number = number
        self.size_class = size_class
        self.frame = frame
        self.base = frame << frame_shift
        self.end = self.base + size_class.slab_slots * size_class.slot_bytes
        self.free: array[int] = array("Q")  # places that were given back
        self.fresh_count = size_class.slab_slots  # the last so many slots were never taken
        self.reserved_count = 0
        self.owners: array[int] = array("I", [NONE]) * size_class.slab_slots

    @property
    def free_count(self) -> int:
        """Slots that can be taken."""
        return len(self.free) + self.fresh_count

    @property
    def published_count(self) -> int:
        """Slots that are neither free nor reserved."""
        return self.size_class.slab_slots - len(self.free) - self.fresh_count - self.reserved_count

    def families(self) -> set[int]:
        """Entries that have published slots here. Only for slabs without reserved slots."""
        size, base = self.size_class.slot_bytes, self.base
        owners = self.owners[: len(self.owners) - self.fresh_count]
        for place in self.free:
            owners[(place - base) // size] = NONE
        found = set(owners)
        found.discard(NONE)
        return found


class Slots:
    """Hands out places by size and takes them back."""

    def __init__(self, segment_bytes: list[int]) -> None:
        self.segment_bytes = segment_bytes
        self.segment_frames = [size >> frame_shift for size in segment_bytes]
        self.total_bytes = sum(segment_bytes)
        self.usable_bytes = 0
        self.frames = Frames()
        self.classes: dict[int, SizeClass] = {}  # by slot size
        self.classes_dropped_count = 0  # whoever keeps a class looks whether this has changed
        self.slab_at: dict[int, Slab] = {}  # by each of its frames
        self._ready: list[list[tuple[int, int]]] = [[] for _ in segment_bytes]
        self._restored: list[
            tuple[int, int]
        ] = []  # frame, count: extents that were in use before they were ready
        self._slabs: dict[int, Slab] = {}
        self._slab_numbers = Numbers(0, NONE)
        self._class_numbers = Numbers(0, limits.size_classes_max)

    # -- segments --------------------------------------------------------------------------------------------

    def ready(self, segment: int, begin_bytes: int, end_bytes: int) -> None:
        """[begin, end) of the segment may be used from now on. InvariantError: it was already, or is not in it."""
        size = self.segment_bytes[segment] if 0 <= segment < len(self.segment_bytes) else -1
        whole = begin_bytes % limits.frame_bytes == 0 and (
            end_bytes % limits.frame_bytes == 0 or end_bytes == size
        )
        overlaps = size >= 0 and any(begin_bytes < e and b < end_bytes for b, e in self._ready[segment])
        if not 0 <= begin_bytes < end_bytes <= size or not whole or overlaps:
            raise InvariantError(
                f"range [{begin_bytes}, {end_bytes}) of segment {segment} ({size} B) is not a new range of frames",
                code="segment", segment=segment, begin_bytes=begin_bytes, end_bytes=end_bytes,
            )  # fmt: skip
        self._ready[segment].append((begin_bytes, end_bytes))
        frame = (segment << 48 | begin_bytes) >> frame_shift
        end = frame + ((end_bytes - begin_bytes) >> frame_shift)
        restored = self._restored
        at = bisect_left(restored, (frame, 0))
        if at and sum(restored[at - 1]) > frame:
            at -= 1
        while frame < end:
            used, count = restored[at] if at < len(restored) else (end, 0)
            gap = min(used, end) - frame
            if gap > 0:
                self.usable_bytes += gap << frame_shift
                self.frames.give(frame, gap)
            frame = used + count
            at += 1

    def restore(self, rows: list[tuple[int, int, Buffer, Buffer, int, int]]) -> None:
        """Slabs that an earlier daemon left, before anything else: frame, slot bytes, owners (u32 a slot), free places
        (u64), how many slots at the end are fresh, how many are reserved. They are numbered in this order.
        """
        for frame, slot_bytes, owners, free, fresh_count, reserved_count in rows:
            size_class = self.class_for(slot_bytes)
            slab = Slab(self._slab_numbers.take_one(), size_class, frame)
            slab.owners, slab.free = u32(owners), u64(free)
            slab.fresh_count, slab.reserved_count = fresh_count, reserved_count
            if len(slab.owners) != size_class.slab_slots:
                raise InvariantError(f"slab {slab.number} has {len(slab.owners)} slots", code="restore")
            self._place_slab(slab)
            size_class.free_count += slab.free_count
            size_class.reserved_count += reserved_count
            if slab.free_count:
                size_class.partial[slab] = None
            self._restored.append((frame, size_class.slab_frames))
            self.usable_bytes += size_class.slab_frames << frame_shift
        self._restored.sort()

    # -- classes ---------------------------------------------------------------------------------------------

    def class_for(self, size_bytes: int) -> SizeClass:
        """The class of objects of this size.

        UsageError: larger than the largest segment, or more different sizes in use than
        `limits.size_classes_max`.
        """
        slot_bytes = _slot_bytes(size_bytes)
        found = self.classes.get(slot_bytes)
        return found if found is not None else self._new_class(slot_bytes)

    def _new_class(self, slot_bytes: int) -> SizeClass:
        frames_max = max(self.segment_frames, default=0)
        if slot_bytes > frames_max << frame_shift:
            raise UsageError(
                f"an object of {slot_bytes} B does not fit the largest segment, {frames_max << frame_shift} B in whole"
                " frames: configure larger segments or use smaller chunks",
                code="object-too-large", size_bytes=slot_bytes, segment_bytes=frames_max << frame_shift,
            )  # fmt: skip
        if not self._class_numbers.free_count:
            unused = next((c for c in self.classes.values() if not c.slabs_count), None)
            if unused is None:
                raise CapacityError(
                    f"{limits.size_classes_max} object sizes are in use: use fewer chunk sizes, or clear a namespace",
                    code="size-classes", retry=Retry.AFTER, size_classes_max=limits.size_classes_max,
                )  # fmt: skip
            del self.classes[unused.slot_bytes]
            self.classes_dropped_count += 1
            self._class_numbers.give_one(unused.number)
        frames = _slab_frames(slot_bytes, frames_max)
        slabs_max = sum(segment // frames for segment in self.segment_frames)
        size_class = SizeClass(self._class_numbers.take_one(), slot_bytes, frames, slabs_max)
        self.classes[slot_bytes] = size_class
        return size_class

    # -- slots -----------------------------------------------------------------------------------------------

    def take(self, size_class: SizeClass, count: int) -> array[int]:
        """Up to `count` places, reserved from now on: free slots first, then slabs made of free frames."""
        taken: array[int] = array("Q")
        partial = size_class.partial
        while count:
            if not partial and not self._new_slab(size_class):
                break
            slab = next(reversed(partial))
            free = slab.free
            if free:
                some = min(count, len(free))
                taken.extend(free[-some:])
                del free[-some:]
            else:
                some = min(count, slab.fresh_count)
                first = slab.end - slab.fresh_count * size_class.slot_bytes
                taken.extend(range(first, first + some * size_class.slot_bytes, size_class.slot_bytes))
                slab.fresh_count -= some
            slab.reserved_count += some
            size_class.reserved_count += some
            size_class.free_count -= some
            count -= some
            if not free and not slab.fresh_count:
                del partial[slab]
        return taken

    def publish(self, places: array[int], entries: array[int], home_of: array[int]) -> None:
        """Reserved places belong to these families now; `home_of[entry]` becomes a slab it has a slot in."""
        slab: Slab | None = None
        base = end = count = number = 0
        size = 1
        owners: array[int] = array("I")
        for place, entry in zip(places, entries, strict=True):
            if not base <= place < end:
                if slab is not None:
                    slab.reserved_count -= count
                    slab.size_class.reserved_count -= count
                    count = 0
                slab = self.slab_at[place >> frame_shift]
                base, end, number, owners = slab.base, slab.end, slab.number, slab.owners
                size = slab.size_class.slot_bytes
            owners[(place - base) // size] = entry
            home_of[entry] = number
            count += 1
        if slab is not None:
            slab.reserved_count -= count
            slab.size_class.reserved_count -= count

    def give(self, places: array[int], *, reserved: bool) -> None:
        """Places are free again; they were reserved, or published."""
        ordered = sorted(places)
        begin, count = 0, len(ordered)
        while begin < count:
            slab = self.slab_at[ordered[begin] >> frame_shift]
            stop = bisect_left(ordered, slab.end, begin)
            size_class = slab.size_class
            slab.free.extend(ordered[begin:stop])
            size_class.free_count += stop - begin
            if reserved:
                slab.reserved_count -= stop - begin
                size_class.reserved_count -= stop - begin
            if slab.free_count >= size_class.slab_slots:
                self._drop_slab(slab)
            else:
                size_class.partial[slab] = None
            begin = stop

    def slab(self, number: int) -> Slab:
        """The slab of this number."""
        return self._slabs[number]

    def slabs(self) -> list[Slab]:
        """All slabs (for checks)."""
        return list(self._slabs.values())

    def _new_slab(self, size_class: SizeClass) -> bool:
        frame = self.frames.take(size_class.slab_frames)
        if frame is None:
            return False
        slab = Slab(self._slab_numbers.take_one(), size_class, frame)
        self._place_slab(slab)
        size_class.partial[slab] = None
        size_class.free_count += size_class.slab_slots
        return True

    def _place_slab(self, slab: Slab) -> None:
        self._slabs[slab.number] = slab
        for at in range(slab.frame, slab.frame + slab.size_class.slab_frames):
            if at in self.slab_at:
                raise InvariantError(f"frame {at} is in two slabs", code="slot")
            self.slab_at[at] = slab
        slab.size_class.slabs_count += 1

    def _drop_slab(self, slab: Slab) -> None:
        size_class = slab.size_class
        if slab.free_count != size_class.slab_slots or slab.reserved_count:
            raise InvariantError(f"a slot of slab {slab.number} was given back twice", code="slot")
        size_class.partial.pop(slab, None)
        size_class.slabs_count -= 1
        size_class.free_count -= size_class.slab_slots
        for at in range(slab.frame, slab.frame + size_class.slab_frames):
            del self.slab_at[at]
        del self._slabs[slab.number]
        self._slab_numbers.give_one(slab.number)
        self.frames.give(slab.frame, size_class.slab_frames)


def slot_and_slab(size_bytes: int, segment_bytes: list[int]) -> tuple[int, int]:
    """(bytes of the slot, frames of the slab) that an object of this size takes in such a pool; (0, 0): none fits."""
    slot_bytes = _slot_bytes(size_bytes)
    frames_max = max((size >> frame_shift for size in segment_bytes), default=0)
    if not 0 < slot_bytes <= frames_max << frame_shift:
        return 0, 0
    return slot_bytes, _slab_frames(slot_bytes, frames_max)


def _slot_bytes(size_bytes: int) -> int:
    align = limits.slot_align_bytes if size_bytes < limits.page_bytes else limits.page_bytes
    return -(-size_bytes // align) * align


def _slab_frames(slot_bytes: int, frames_max: int) -> int:
    """The fewest frames of which at most a sixteenth is wasted; the least wasteful if segments are small."""
    least = -(-slot_bytes // limits.frame_bytes)
    best, best_waste = least, 1.0
    for frames in range(least, frames_max + 1):
        waste = (frames * limits.frame_bytes) % slot_bytes / (frames * limits.frame_bytes)
        if waste <= slab_waste_share_max:
            return frames
        if waste < best_waste:
            best, best_waste = frames, waste
    return best
