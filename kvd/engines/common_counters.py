"""Counters of an adapter: names and totals, and what was added since they were last taken. Any thread."""

from __future__ import annotations

import threading
from collections.abc import Iterable


class Counters:
    """Every counter exists from the start, at 0 (E5); an unknown name is an error."""

    def __init__(self, names: Iterable[str]) -> None:
        self._lock = threading.Lock()
        self._totals = dict.fromkeys(names, 0)
        self._taken = dict(self._totals)

    def add(self, name: str, amount: int = 1) -> None:
        """Count."""
        with self._lock:
            self._totals[name] += amount

    def totals(self) -> dict[str, int]:
        """Since the start."""
        with self._lock:
            return dict(self._totals)

    def take(self) -> dict[str, int]:
        """What was added since the last call: only the counters that changed."""
        with self._lock:
            changed = {n: v - self._taken[n] for n, v in self._totals.items() if v != self._taken[n]}
            if changed:
                self._taken = dict(self._totals)
            return changed
