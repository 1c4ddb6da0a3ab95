"""Free frames of all segments: the 2 MiB units that slabs are made of.

Owned by `Slots`. A frame's number is `place >> 21`, so that frames of one segment are neighbours and frames
of two segments never are. Invariant: extents are maximal (two that touch are one) and disjoint.
"""

from __future__ import annotations

from bisect import bisect_left, insort

frame_shift = 21


class Frames:
    """Extents of free frames, found by length (best fit) and by either end (coalescing, windows)."""

    __slots__ = ("_by_length", "_lengths", "beginning", "ending", "free_count")

    def __init__(self) -> None:
        self.beginning: dict[int, int] = {}  # first frame of an extent -> its length
        self.ending: dict[int, int] = {}  # frame after an extent -> its length
        self._by_length: dict[int, dict[int, None]] = {}
        self._lengths: list[int] = []  # keys of _by_length, ascending
        self.free_count = 0

    def give(self, frame: int, count: int) -> None:
        """These frames are free now."""
        self.free_count += count
        before = self.ending.get(frame)
        if before is not None:
            self._remove(frame - before, before)
            frame -= before
            count += before
        after = self.beginning.get(frame + count)
        if after is not None:
            self._remove(frame + count, after)
            count += after
        self._insert(frame, count)

    def take(self, count: int) -> int | None:
        """The first of `count` neighbouring frames, out of the smallest extent that has them, or None."""
        at = bisect_left(self._lengths, count)
        if at == len(self._lengths):
            return None
        length = self._lengths[at]
        frame = next(reversed(self._by_length[length]))
        self._remove(frame, length)
        if length > count:
            self._insert(frame + count, length - count)
        self.free_count -= count
        return frame

    def largest(self) -> int:
        """Length of the longest extent."""
        return self._lengths[-1] if self._lengths else 0

    def _insert(self, frame: int, count: int) -> None:
        self.beginning[frame] = count
        self.ending[frame + count] = count
        same = self._by_length.get(count)
        if same is None:
            same = self._by_length[count] = {}
            insort(self._lengths, count)
        same[frame] = None

    def _remove(self, frame: int, count: int) -> None:
        del self.beginning[frame]
        del self.ending[frame + count]
        same = self._by_length[count]
        del same[frame]
        if not same:
            del self._by_length[count]
            del self._lengths[bisect_left(self._lengths, count)]
