"""Columns of native integers, and free lists of the numbers that index them.

Used by every part of the core; pure, single-threaded. A `Numbers` invariant: each number below its maximum is
either free or given out, exactly once; fresh numbers are given out in order, so that columns grow only as far
as they are used.
"""

from __future__ import annotations

from array import array

from kvd.core.events import Buffer

grow_rows_min = 1024


def u32(buffer: Buffer) -> array[int]:
    """The buffer as `array('I')`: itself if it is one already, a copy otherwise."""
    return _column("I", buffer)


def u64(buffer: Buffer) -> array[int]:
    """The buffer as `array('Q')`: itself if it is one already, a copy otherwise."""
    return _column("Q", buffer)


def _column(code: str, buffer: Buffer) -> array[int]:
    if isinstance(buffer, array) and buffer.typecode == code:
        return buffer
    column: array[int] = array(code)
    column.frombytes(buffer if isinstance(buffer, bytes) else memoryview(buffer).cast("B"))
    return column


def grow(column: array[int], rows_count: int, fill: int) -> None:
    """Extend a column to at least `rows_count` rows of `fill`, an eighth more than asked for at least."""
    missing = rows_count - len(column)
    if missing > 0:
        column.extend(array(column.typecode, [fill]) * max(missing, len(column) // 8, grow_rows_min))


class Numbers:
    """Numbers `begin` … `end - 1`, each free or given out. What came back last is handed out first."""

    __slots__ = ("_returned", "begin", "end", "free_count", "fresh")

    def __init__(self, begin: int, end: int) -> None:
        self.begin = begin
        self.end = end
        self.fresh = begin  # everything from here on was never given out
        self.free_count = end - begin
        self._returned: array[int] = array("I")

    @property
    def used_count(self) -> int:
        """How many are given out."""
        return self.end - self.begin - self.free_count

    def take(self, count: int) -> array[int]:
        """Take `count` numbers; the caller has checked that there are so many."""
        returned = self._returned
        self.free_count -= count
        cut = len(returned) - count
        if cut >= 0:
            taken = returned[cut:]
            del returned[cut:]
            return taken
        self._returned = array("I")
        first = self.fresh
        self.fresh = first - cut
        returned.extend(range(first, self.fresh))
        return returned

    def take_one(self) -> int:
        """Take one number."""
        self.free_count -= 1
        if self._returned:
            return self._returned.pop()
        self.fresh += 1
        return self.fresh - 1

    def restore(self, fresh: int, returned: array[int]) -> None:
        """Numbers below `fresh` are given out, but for those that were returned. Before the first `take`."""
        self.fresh = fresh
        self._returned = returned
        self.free_count = self.end - fresh + len(returned)

    def give(self, numbers: array[int]) -> None:
        """Give numbers back."""
        self.free_count += len(numbers)
        self._returned.extend(numbers)

    def give_one(self, number: int) -> None:
        """Give one number back."""
        self.free_count += 1
        self._returned.append(number)

    def returned(self) -> array[int]:
        """The numbers that were given back and not taken again (for checks)."""
        return self._returned
