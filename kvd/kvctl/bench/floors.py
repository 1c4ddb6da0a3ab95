"""What the machine can do at best: copies and wake-ups. Taken in the same run as the figures they are compared with."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import signal
import socket
import statistics
import time
from collections.abc import Callable, Sequence

BLOCK_BYTES = 8 << 20


def median_ns(action: Callable[[], object], repeats: int) -> float:
    """Median duration of a call in nanoseconds."""
    times = []
    for _ in range(repeats):
        begin = time.perf_counter_ns()
        action()
        times.append(time.perf_counter_ns() - begin)
    return statistics.median(times)


class Buffers:
    """Blocks of 8 MiB, touched once, in huge pages where the host gives them.

    `shared`: a memfd, the shape of a pool. Otherwise anonymous memory, the shape of an engine's buffers.
    """

    def __init__(self, total_bytes: int, *, shared: bool) -> None:
        if shared:
            fd = os.memfd_create("kvd-bench", os.MFD_CLOEXEC)
            os.ftruncate(fd, total_bytes)
            self._map = mmap.mmap(fd, total_bytes)
            os.close(fd)
        else:
            self._map = mmap.mmap(-1, total_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._map.madvise(mmap.MADV_HUGEPAGE)
        whole = memoryview(self._map)
        self.blocks: Sequence[memoryview] = [
            whole[at : at + BLOCK_BYTES] for at in range(0, total_bytes - BLOCK_BYTES + 1, BLOCK_BYTES)
        ]
        pattern = os.urandom(1 << 20) * (BLOCK_BYTES >> 20)
        for block in self.blocks:
            block[:] = pattern


def memcpy_gb_s(sources: Buffers, destinations: Buffers, rounds: int) -> float:
    """Bandwidth of a plain memcpy of 8 MiB blocks, one thread, median over the blocks."""
    import ctypes

    def address(view: memoryview) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(view))

    pairs = [
        (address(d), address(sources.blocks[i % len(sources.blocks)]))
        for i, d in enumerate(destinations.blocks)
    ]
    times = []
    for _ in range(rounds):
        for destination, source in pairs:
            begin = time.perf_counter_ns()
            ctypes.memmove(destination, source, BLOCK_BYTES)
            times.append(time.perf_counter_ns() - begin)
    return BLOCK_BYTES / statistics.median(times)


def wake_us(own_cpu: int, other_cpu: int, repeats: int = 2000) -> float:
    """A bare wake-up there and back: one byte to a process that sleeps in read(2), and its byte back, in µs."""
    ours, theirs = socket.socketpair()
    process = multiprocessing.get_context("fork").Process(target=_echo, args=(ours, theirs, other_cpu))
    process.start()
    theirs.close()
    fd = ours.fileno()
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {own_cpu})
    try:
        os.write(fd, b"x")
        os.read(fd, 1)

        def there_and_back() -> None:
            os.write(fd, b"x")
            os.read(fd, 1)

        return median_ns(there_and_back, repeats) / 1e3
    finally:
        os.sched_setaffinity(0, before)
        ours.close()
        process.join(5)


def _echo(ours: socket.socket, theirs: socket.socket, cpu: int) -> None:
    ours.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's end closes the socket
    os.sched_setaffinity(0, {cpu})
    fd = theirs.fileno()
    while os.read(fd, 1):
        os.write(fd, b"x")
