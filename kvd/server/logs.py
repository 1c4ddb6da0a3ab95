"""Structured logs: console for people, JSON lines for collectors, and the audit log.

Owns the configuration of structlog for the process. Prompts, tokens and salts never appear; keys are hashes. The
data path logs nothing per operation above debug, and asks `debug_enabled` before it builds anything.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections import deque
from typing import Any, Final, TextIO

import structlog

_LEVELS: Final = {"debug": 10, "info": 20, "warning": 30, "error": 40}
LINES_MAX: Final = 4096  # that wait for their reader
DRAIN_S: Final = 1.0
Logger = structlog.typing.FilteringBoundLogger


def configure(log_format: str, level: str, stream: TextIO = sys.stderr) -> None:
    """Set up all logs of the process. `log_format` is console, json or auto (console on a terminal)."""
    if log_format == "auto":
        log_format = "console" if stream.isatty() else "json"
    lines = Lines(stream)
    _lines[:] = [lines]
    renderer: Any = (
        structlog.dev.ConsoleRenderer(colors=stream.isatty())
        if log_format == "console"
        else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info if log_format == "json" else _unchanged,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=structlog.WriteLoggerFactory(lines),  # type: ignore[arg-type]
        cache_logger_on_first_use=False,
    )
    logging.basicConfig(stream=lines, level=logging.WARNING)


def _unchanged(_logger: object, _method: str, event: Any) -> Any:
    return event


class Lines:
    """The stream behind all logs: a thread writes, so that a reader that does not read, or is gone, holds nobody up.

    What is said while LINES_MAX lines wait is dropped and counted; once the reader reads again, the log says how many.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.dropped_count = 0
        self._told_count = 0
        self._lines: deque[str] = deque()
        self._changed = threading.Condition()
        self._writing = False
        threading.Thread(target=self._run, name="kvd-log", daemon=True).start()

    def write(self, text: str) -> int:
        with self._changed:
            if len(self._lines) < LINES_MAX:
                self._lines.append(text)
                self._changed.notify_all()
            else:
                self.dropped_count += 1
        return len(text)

    def flush(self) -> None:
        """Nothing waits for the reader."""

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything is written. False: the reader did not take it in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._lines and not self._writing, timeout_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._lines)
                some = list(self._lines)
                self._lines.clear()
                self._writing = True
            try:
                self.stream.write("".join(some))
                self.stream.flush()
            except (OSError, ValueError):
                continue  # nobody reads any more
            self._tell_dropped()

    def _tell_dropped(self) -> None:
        dropped_count = self.dropped_count
        if dropped_count != self._told_count:
            count, self._told_count = dropped_count - self._told_count, dropped_count
            get("logs").warning("log_lines_dropped", count=count, total=dropped_count)


_lines: list[Lines] = []  # of this process, once configured


def dropped_count() -> int:
    """Lines that nobody will read, because the reader of the logs did not keep up."""
    return sum(lines.dropped_count for lines in _lines)


def drain(timeout_s: float = DRAIN_S) -> bool:
    """At the end of the process: give the reader a moment to take what waits. False: it did not."""
    return all(lines.drain(timeout_s) for lines in _lines)


def get(component: str) -> Logger:
    """The logger of one part of the daemon."""
    logger: Logger = structlog.get_logger(component=component)
    return logger


def audit(action: str, *, uid: int, pid: int, **fields: object) -> None:
    """Who attached, pinned, cleared, stopped: written whatever the log level, marked by audit=true."""
    everything: Logger = structlog.wrap_logger(None, wrapper_class=structlog.make_filtering_bound_logger(0))
    everything.bind(component="audit").info(action, audit=True, uid=uid, pid=pid, **fields)
