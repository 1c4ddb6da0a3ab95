"""Touching the pool's memory at start: in steps, in parallel, near its processors, while the daemon serves already.

Owns the worker threads and the mappings that they populate through; everything else happens on the event loop, to
which a worker hands each finished step. A range is announced to the core (`SegmentReady`) only when it is backed by
memory. What was really obtained is measured, not assumed: at the end the pages of 2 MiB are counted in the kernel's
map of this process. A step that finds no memory ends the population: the pool stays as large as it got, health is
degraded, and the log says so.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from kvd import limits
from kvd.config import PoolConfig, format_size
from kvd.errors import KvdError
from kvd.probe import hugepages, numa
from kvd.server import logs
from kvd.server.supervise import Guard
from kvd.shm import pool

THREADS_MAX: Final = 8
PROGRESS_SHARE: Final = 0.1
_log = logs.get("population")


@dataclass(slots=True)
class Progress:
    """How far population is; what status and metrics show."""

    total_bytes: int
    populated_bytes: int = 0
    segments_bytes: list[int] = field(default_factory=list)
    segments_node: list[int | None] = field(default_factory=list)
    huge_bytes: int = 0
    locked: bool = False
    lock_refused: str = ""
    started_s: float = 0.0
    finished_s: float | None = None
    error: KvdError | None = None

    @property
    def done(self) -> bool:
        """Whether nothing more is going to be populated."""
        return self.finished_s is not None

    def as_dict(self) -> dict[str, object]:
        """JSON-able form."""
        elapsed_s = (self.finished_s if self.finished_s is not None else time.monotonic()) - self.started_s
        return {
            "total_bytes": self.total_bytes,
            "populated_bytes": self.populated_bytes,
            "huge_bytes": self.huge_bytes,
            "done": self.done,
            "seconds": round(elapsed_s, 3),
            "gib_per_s": round(self.populated_bytes / limits.GIB / elapsed_s, 3) if elapsed_s > 0 else 0.0,
            "locked": self.locked,
            "lock_refused": self.lock_refused,
            "error": self.error.message if self.error is not None else "",
        }


@dataclass(frozen=True, slots=True)
class _Step:
    segment: int
    begin_bytes: int
    end_bytes: int


class Population:
    """Populates the segments of one pool. `on_ready(segment, begin, end)` and `on_pages` run on the event loop."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        segments: list[pool.Segment],
        config: PoolConfig,
        on_ready: Callable[[int, int, int], None],
        on_pages: Callable[[int, pool.PageKind], None],
        guard: Guard,
    ) -> None:
        self._loop = loop
        self._segments = segments
        self._config = config
        self._on_ready = on_ready
        self._on_pages = on_pages
        self._guard = guard
        self._steps: queue.SimpleQueue[_Step] = queue.SimpleQueue()
        self._mappings: list[pool.Mapping] = []
        self._left = [0] * len(segments)
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._finished = asyncio.Event()
        self._first = asyncio.Event()
        self._told_share = 0.0
        nodes = numa.nodes()
        self.nodes_count = len(nodes)
        placement: list[int | None] = [None] * len(segments)
        if len(nodes) > 1:
            placement = [nodes[number % len(nodes)].number for number in range(len(segments))]
        self.progress = Progress(
            sum(segment.size_bytes for segment in segments),
            segments_bytes=[0] * len(segments),
            segments_node=placement,
            started_s=time.monotonic(),
        )

    @property
    def threads_count(self) -> int:
        """Workers: as configured, or one for every two processors this process may use."""
        if self._config.populate_threads != "auto":
            return self._config.populate_threads
        return max(1, min(THREADS_MAX, len(os.sched_getaffinity(0)) // 2))

    def start(self) -> None:
        """Map the segments and start the workers. Raises UnavailableError, CapacityError."""
        huge = self._config.huge_pages in ("auto", "thp", "hugetlb")
        for segment in self._segments:
            mapping = pool.Mapping(segment.fd, segment.size_bytes, huge=huge)
            self._mappings.append(mapping)
            if self._config.lock != "no":
                self._lock(mapping)
        if self._config.populate == "lazy":
            self._lazily()
            return
        for segment in self._segments:
            for begin in range(0, segment.size_bytes, pool.POPULATE_STEP_BYTES):
                self._left[segment.number] += 1
                self._steps.put(
                    _Step(segment.number, begin, min(segment.size_bytes, begin + pool.POPULATE_STEP_BYTES))
                )
        for number in range(self.threads_count):
            thread = threading.Thread(target=self._work, name=f"kvd-populate-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    async def run(self) -> None:
        """Until everything is populated, or nothing more can be. A supervised task."""
        await self._finished.wait()

    async def first_ready(self) -> None:
        """Until some memory can be used. Raises what kept the very first step from that."""
        await self._first.wait()
        if self.progress.error is not None and self.progress.populated_bytes == 0:
            raise self.progress.error

    def stop(self) -> None:
        """No further steps; a step that runs takes some hundredths of a second."""
        self._stop.set()

    def _lock(self, mapping: pool.Mapping) -> None:
        refused = mapping.lock()
        if refused:
            if not self.progress.lock_refused:
                _log.warning(
                    "pool_not_locked", reason=refused, hint="raise RLIMIT_MEMLOCK (LimitMEMLOCK=infinity)"
                )
            self.progress.lock_refused = refused
        self.progress.locked = not self.progress.lock_refused

    def _lazily(self) -> None:
        for segment in self._segments:
            self._on_ready(segment.number, 0, segment.size_bytes)
        self.progress.finished_s = time.monotonic()
        self._first.set()
        self._finished.set()

    # --- worker threads

    def _work(self) -> None:
        node: int | None = None
        while not self._stop.is_set():
            try:
                step = self._steps.get_nowait()
            except queue.Empty:
                return
            wanted = self.progress.segments_node[step.segment]
            if wanted != node and pool.prefer_node(wanted):
                node = wanted
            error: Exception | None = None
            try:
                self._mappings[step.segment].populate(step.begin_bytes, step.end_bytes)
            except Exception as caught:  # noqa: BLE001 - handed to the event loop
                error = caught
                self._stop.set()
            self._tell(self._stepped, step, error)

    def _measure(self) -> None:
        """What pages the segments got; then their mappings are needed no more, unless they hold a lock."""
        found = hugepages.mapped()
        by_segment = {
            segment.number: pages
            for segment in self._segments
            if (pages := found.get(hugepages.file_key(segment.fd))) is not None
        }
        if not self.progress.locked:
            for mapping in self._mappings:
                mapping.close()
        self._tell(self._measured, by_segment)

    def _tell(self, call: Callable[..., None], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(self._guard, call, *args)
        except RuntimeError:
            self._stop.set()  # the loop is closed: the daemon is gone

    # --- event loop

    def _stepped(self, step: _Step, error: Exception | None) -> None:
        progress = self.progress
        if error is not None:
            if progress.error is None:
                progress.error = (
                    error
                    if isinstance(error, KvdError)
                    else KvdError(f"population failed: {error}", code="populate")
                )
                _log.error(
                    "population_stopped", reason=progress.error.message, usable_bytes=progress.populated_bytes,
                    wanted_bytes=progress.total_bytes,
                )  # fmt: skip
            self._end()
            return
        progress.populated_bytes += step.end_bytes - step.begin_bytes
        progress.segments_bytes[step.segment] += step.end_bytes - step.begin_bytes
        self._left[step.segment] -= 1
        self._on_ready(step.segment, step.begin_bytes, step.end_bytes)
        self._first.set()
        share = progress.populated_bytes / progress.total_bytes
        if share - self._told_share >= PROGRESS_SHARE and share < 1:
            self._told_share = share
            _log.info("populating", share=round(share, 2), populated=format_size(progress.populated_bytes))
        if not any(self._left):
            self._end()

    def _end(self) -> None:
        progress = self.progress
        self._first.set()
        if progress.finished_s is None:
            progress.finished_s = time.monotonic()
            thread = threading.Thread(target=self._measure, name="kvd-measure", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _measured(self, found: dict[int, hugepages.MappingPages]) -> None:
        progress = self.progress
        for segment in self._segments:
            kind = pool.PageKind.HUGETLB if segment.hugetlb else pool.PageKind.SMALL
            pages = found.get(segment.number)
            if segment.hugetlb:
                progress.huge_bytes += progress.segments_bytes[segment.number]
            elif pages is not None and pages.huge_bytes:
                progress.huge_bytes += pages.huge_bytes
                kind = pool.PageKind.THP if pages.huge_bytes >= segment.size_bytes // 2 else kind
            self._on_pages(segment.number, kind)
        seconds = (progress.finished_s or 0.0) - progress.started_s
        _log.info(
            "populated", bytes=progress.populated_bytes, seconds=round(seconds, 2), huge_bytes=progress.huge_bytes,
            locked=progress.locked, nodes=self.nodes_count, shmem_enabled=hugepages.facts().shmem_enabled,
        )  # fmt: skip
        self._finished.set()
