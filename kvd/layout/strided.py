"""Strided copies: the small program that native gather, scatter and re-sharding carry out.

Pure. A `Copy` moves `run_bytes` contiguous bytes at a time, in up to four nested loops:

    for i0 in range(n0): for i1 in range(n1): ... :
        copy run_bytes from src_offset + i0*s0 + i1*s1 + ... to dst_offset + i0*d0 + i1*d1 + ...

Loops are (count, src_stride_bytes, dst_stride_bytes), outermost first. `reduce` finds the shortest form:
loops of one are dropped, loops that continue each other are joined, and what is contiguous on both sides
becomes the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from kvd.errors import InvariantError

LOOPS_MAX: Final = 4

Loop = tuple[int, int, int]
"""count, src_stride_bytes, dst_stride_bytes"""


@dataclass(frozen=True, slots=True)
class Copy:
    """One strided copy between a source and a destination, named by number (a member, a tensor)."""

    src: int
    dst: int
    src_offset: int
    dst_offset: int
    run_bytes: int
    loops: tuple[Loop, ...] = ()

    @property
    def runs_count(self) -> int:
        """How many contiguous runs it makes."""
        runs = 1
        for count, _, _ in self.loops:
            runs *= count
        return runs

    @property
    def size_bytes(self) -> int:
        """Bytes it moves."""
        return self.runs_count * self.run_bytes

    def native_arguments(self) -> tuple[int, int, int, int, int, tuple[Loop, ...]]:
        """What `kvd.shm.compute.strided_plan` takes for one copy."""
        return (self.src, self.dst, self.src_offset, self.dst_offset, self.run_bytes, self.loops)

    def runs(self) -> Iterator[tuple[int, int]]:
        """(src offset, dst offset) of every run, in order: the plain reference of the native loop."""
        yield from _walk(self.src_offset, self.dst_offset, self.loops)

    def reversed(self) -> Copy:
        """The same copy in the other direction."""
        loops = tuple((count, dst, src) for count, src, dst in self.loops)
        return Copy(self.dst, self.src, self.dst_offset, self.src_offset, self.run_bytes, loops)


def _walk(src: int, dst: int, loops: Sequence[Loop]) -> Iterator[tuple[int, int]]:
    if not loops:
        yield src, dst
        return
    count, src_stride, dst_stride = loops[0]
    for step in range(count):
        yield from _walk(src + step * src_stride, dst + step * dst_stride, loops[1:])


def reduce(axes: Iterable[Loop], unit_bytes: int) -> tuple[int, tuple[Loop, ...]]:
    """(run_bytes, loops) of a copy over `axes`, whose innermost piece is `unit_bytes` contiguous on both
    sides.

    Loops come out with the larger destination stride outside, so that a destination is written front to back.
    """
    loops = [loop for loop in axes if loop[0] > 1]
    run = unit_bytes
    grown = True
    while grown:  # what continues the run on both sides becomes part of it
        grown = False
        for loop in loops:
            if loop[1] == run and loop[2] == run:
                run *= loop[0]
                loops.remove(loop)
                grown = True
                break
    loops.sort(key=lambda loop: (-abs(loop[2]), -abs(loop[1])))
    joined: list[Loop] = []
    for loop in loops:
        if joined and joined[-1][1] == loop[0] * loop[1] and joined[-1][2] == loop[0] * loop[2]:
            joined[-1] = (joined[-1][0] * loop[0], loop[1], loop[2])
        else:
            joined.append(loop)
    return run, tuple(joined)


def copies(
    src: int, dst: int, src_offset: int, dst_offset: int, axes: Iterable[Loop], unit_bytes: int
) -> list[Copy]:
    """The copies that carry out `axes`; more than one only where more than four loops would be needed."""
    run, loops = reduce(axes, unit_bytes)
    extra = max(0, len(loops) - LOOPS_MAX)
    inner = loops[extra:]
    return [
        Copy(src, dst, src_at, dst_at, run, inner)
        for src_at, dst_at in _walk(src_offset, dst_offset, loops[:extra])
    ]


def progressions(pairs: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int, int, int, int]]:
    """Pack (src, dst, length) pieces, ascending, into (src, dst, length, count, src step, dst step)
    progressions.
    """
    packed: list[tuple[int, int, int, int, int, int]] = []
    for src, dst, length in pairs:
        if packed:
            src0, dst0, length0, count, src_step, dst_step = packed[-1]
            if length == length0:
                if count == 1:
                    packed[-1] = (src0, dst0, length, 2, src - src0, dst - dst0)
                    continue
                if src == src0 + count * src_step and dst == dst0 + count * dst_step:
                    packed[-1] = (src0, dst0, length, count + 1, src_step, dst_step)
                    continue
        packed.append((src, dst, length, 1, 0, 0))
    return packed


def run_reference(plan: Iterable[Copy], src: Callable[[int], bytes], dst: Callable[[int], bytearray]) -> int:
    """Carry out a plan over plain buffers, byte for byte; bytes moved. Slow: for tests and documents.

    Raises InvariantError if a run leaves its buffer.
    """
    moved = 0
    for copy in plan:
        source, target = src(copy.src), dst(copy.dst)
        for src_at, dst_at in copy.runs():
            src_end, dst_end = src_at + copy.run_bytes, dst_at + copy.run_bytes
            if src_at < 0 or dst_at < 0 or src_end > len(source) or dst_end > len(target):
                raise InvariantError(
                    f"a run of {copy.run_bytes} B from {src_at} to {dst_at} leaves its buffer", code="run"
                )
            target[dst_at:dst_end] = source[src_at:src_end]
            moved += copy.run_bytes
    return moved
