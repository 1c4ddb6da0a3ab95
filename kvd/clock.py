"""The clock protocol. The pure packages receive `now_ns` as an argument; only shells own a Clock."""

from __future__ import annotations

from typing import Protocol


class Clock(Protocol):
    """Monotonic nanoseconds, comparable across the processes of one host (CLOCK_MONOTONIC)."""

    def now_ns(self) -> int:
        """The present instant in nanoseconds."""
