"""Structured logs: console for people, JSON lines for collectors, and the audit log.

Owns the configuration of structlog for the process. Prompts, tokens and salts never appear; keys are hashes. The
data path logs nothing per operation above debug, and asks `debug_enabled` before it builds anything.
"""

from __future__ import annotations

import logging
import sys
from typing import Any, Final, TextIO

import structlog

_LEVELS: Final = {"debug": 10, "info": 20, "warning": 30, "error": 40}
Logger = structlog.typing.FilteringBoundLogger


def configure(log_format: str, level: str, stream: TextIO = sys.stderr) -> None:
    """Set up all logs of the process. `log_format` is console, json or auto (console on a terminal)."""
    if log_format == "auto":
        log_format = "console" if stream.isatty() else "json"
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
        logger_factory=structlog.PrintLoggerFactory(_Lines(stream)),  # type: ignore[arg-type]
        cache_logger_on_first_use=False,
    )
    logging.basicConfig(stream=stream, level=logging.WARNING)


def _unchanged(_logger: object, _method: str, event: Any) -> Any:
    return event


class _Lines:
    """A stream that a vanished log reader cannot kill the daemon with."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except (OSError, ValueError):
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except (OSError, ValueError):
            return


def get(component: str) -> Logger:
    """The logger of one part of the daemon."""
    logger: Logger = structlog.get_logger(component=component)
    return logger


def audit(action: str, *, uid: int, pid: int, **fields: object) -> None:
    """Who attached, pinned, cleared, stopped: written whatever the log level, marked by audit=true."""
    everything: Logger = structlog.wrap_logger(None, wrapper_class=structlog.make_filtering_bound_logger(0))
    everything.bind(component="audit").info(action, audit=True, uid=uid, pid=pid, **fields)
