"""Recording the core's events in a file, for `kvctl trace`.

Owns the file and the thread that writes it; the rest runs on the event-loop thread, which never waits for that thread.
While nothing is recorded the domain has its plain core and pays nothing. While something is, each step is packed on the
loop and put in a queue that is bounded in bytes: a disk that cannot keep up, an error of the disk and the limit of the
file all end the recording, with a reason in the file and in `status`, and never slow down or stop the daemon.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
from dataclasses import dataclass, field
from typing import Final

from kvd.core.trace import TracedCore
from kvd.errors import CapacityError, UsageError
from kvd.server import logs
from kvd.server.domain import Domain

QUEUED_BYTES_MAX: Final = 64 << 20
LIMIT_BYTES: Final = 1 << 30
LIMIT_BYTES_MIN: Final = 1 << 16
LIMIT_BYTES_MAX: Final = 1 << 40
RUNS_MAX: Final = 200_000  # the state at the start is packed on the loop, about 3 us a run
JOIN_S: Final = 5.0
_log = logs.get("trace")


@dataclass(slots=True)
class _Recording:
    """One file. `pushed_bytes` is the loop's, `written_bytes` and `error` the writer's."""

    path: str
    fd: int
    limit_bytes: int
    started_ns: int
    todo: queue.SimpleQueue[bytes | None] = field(default_factory=queue.SimpleQueue)
    pushed_bytes: int = 0
    written_bytes: int = 0
    error: str = ""
    full: str = ""  # why it takes no more
    thread: threading.Thread | None = None

    def push(self, record: bytes) -> bool:
        """Take a record; False: it takes none any more."""
        size_bytes = len(record)
        if self.error:
            self.full = self.full or f"the file cannot be written: {self.error}"
        elif self.pushed_bytes + size_bytes > self.limit_bytes:
            self.full = self.full or f"the limit of {self.limit_bytes} B is reached"
        elif self.pushed_bytes and self.pushed_bytes - self.written_bytes + size_bytes > QUEUED_BYTES_MAX:
            self.full = self.full or f"the disk is behind by {QUEUED_BYTES_MAX} B"
        if self.full:
            return False
        self.pushed_bytes += size_bytes
        self.todo.put(record)
        return True

    def write(self) -> None:
        """The writer's thread, until it is told to end."""
        while (record := self.todo.get()) is not None:
            if not self.error:
                try:
                    view = memoryview(record)
                    while view:
                        view = view[os.write(self.fd, view) :]
                except OSError as error:
                    self.error = error.strerror or str(error)
            self.written_bytes += len(record)
        os.close(self.fd)


class Tracer:
    """At most one recording of one domain."""

    def __init__(self, domain: Domain) -> None:
        self._domain = domain
        self._core = domain.core
        self._traced: TracedCore | None = None
        self._recording: _Recording | None = None
        self._last: tuple[_Recording, TracedCore, str] | None = None

    def start(self, path: str, limit_bytes: int | None = None) -> dict[str, object]:
        """Begin a recording in a new file. Raises UsageError, CapacityError, UnavailableError(busy)."""
        limit = LIMIT_BYTES if limit_bytes is None else limit_bytes
        self._check(path, limit)
        runs = self._domain.core.statistics()["runs"]
        if isinstance(runs, int) and runs > RUNS_MAX:
            raise CapacityError(
                f"the core has {runs} runs; to write their state would stop the daemon for long, at most {RUNS_MAX} "
                "can be recorded: record after a restart or a clear",
                code="trace", runs=runs, runs_max=RUNS_MAX,
            )  # fmt: skip
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o640)
        except OSError as error:
            raise UsageError(
                f"the daemon cannot make {path}: {error.strerror}; give a new file in a directory that its user (uid "
                f"{os.getuid()}) may write",
                code="trace-file", path=path,
            ) from None  # fmt: skip
        now_ns = self._domain.clock.now_ns()
        recording = _Recording(path, fd, limit, now_ns)
        try:
            traced = TracedCore(self._domain.core, self._sink, self._domain.name, now_ns, recording.push)
        except BaseException:
            os.close(fd)
            os.unlink(path)
            raise
        recording.thread = threading.Thread(target=recording.write, name="kvd-trace", daemon=True)
        recording.thread.start()
        self._core, self._traced, self._recording = self._domain.core, traced, recording
        self._domain.core = traced
        atexit.unregister(self.close)
        atexit.register(self.close)
        _log.info("trace_started", path=path, limit_bytes=limit)
        return self.status()

    def _check(self, path: str, limit_bytes: int) -> None:
        if self._recording is not None:
            raise UsageError(f"a trace is recorded already, in {self._recording.path}", code="trace-running")
        if not os.path.isabs(path) or "\0" in path:
            raise UsageError(f"trace: {path!r} is no absolute path", code="trace-file", path=path)
        if not LIMIT_BYTES_MIN <= limit_bytes <= LIMIT_BYTES_MAX:
            raise UsageError(
                f"trace: limit_bytes is {LIMIT_BYTES_MIN} … {LIMIT_BYTES_MAX}, not {limit_bytes}", code="params",
                limit_bytes=limit_bytes,
            )  # fmt: skip

    def _sink(self, record: bytes) -> bool:
        recording = self._recording
        if recording is None:
            return False
        if recording.push(record):
            return True
        self._end(recording.full, compare=False)
        return False

    def stop(self) -> dict[str, object]:
        """End the recording; `status` tells when all is written. Raises UsageError: there is none."""
        if self._recording is None:
            raise UsageError("no trace is recorded", code="trace-none")
        self._end("stopped", compare=True)
        return self.status()

    def close(self) -> None:
        """The process ends: what is on its way is written first, for so long."""
        if self._recording is not None:
            self._end("the daemon ended", compare=True)
        if self._last is not None and self._last[0].thread is not None:
            self._last[0].thread.join(JOIN_S)

    def _end(self, why: str, *, compare: bool) -> None:
        traced, recording = self._traced, self._recording
        if traced is None or recording is None:
            return
        self._domain.core = self._core
        self._recording = self._traced = None
        recording.limit_bytes += 1 << 16  # the last record says why, and has room
        recording.full = ""
        traced.end(why, recording.push, compare=compare)
        recording.todo.put(None)
        self._last = (recording, traced, why)
        _log.info("trace_ended", path=recording.path, events=traced.traced_events, reason=why)

    def status(self) -> dict[str, object]:
        """What is being recorded, or what was recorded last."""
        if self._recording is not None and self._traced is not None:
            return {"recording": True, **self._numbers(self._recording, self._traced)}
        if self._last is None:
            return {"recording": False}
        recording, traced, why = self._last
        written = recording.thread is not None and not recording.thread.is_alive()
        return {"recording": False, **self._numbers(recording, traced), "ended": why, "written": written}

    def _numbers(self, recording: _Recording, traced: TracedCore) -> dict[str, object]:
        return {
            "path": recording.path,
            "events": traced.traced_events,
            "bytes": recording.pushed_bytes,
            "limit_bytes": recording.limit_bytes,
            "seconds": round((self._domain.clock.now_ns() - recording.started_ns) / 1e9, 3),
            "error": recording.error,
        }
