"""Many seeds: run them, count, and make a failure small. Used by the command line and by the tests."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from .simulation import ALWAYS, WEIGHTS, Simulation

EVENTS_PER_SCHEDULE: Final = 300
TAIL_LINES: Final = 40
FAILURES_KEPT_MAX: Final = 20
NUMBERS: Final = re.compile(r"\b[0-9a-f]{8}\b|\d+")


@dataclass(slots=True)
class Failure:
    """A promise that a seed broke."""

    seed: int
    event: int  # the one that broke it, from 1 on
    what: str
    without: frozenset[str] = frozenset()
    tail: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, sim: Simulation, error: Exception) -> Failure:
        """What this simulation came to."""
        return cls(
            sim.seed,
            sim.event,
            f"{type(error).__name__}: {error}",
            sim.without,
            list(sim.trace)[-TAIL_LINES:],
        )

    @property
    def promise(self) -> str:
        """What was broken, without the numbers and names of this one case."""
        return NUMBERS.sub("#", self.what)

    def command(self, events: int, plant: str = "") -> str:
        """What replays it, with the planted fault of this name if there was one."""
        without = f" --without {','.join(sorted(self.without))}" if self.without else ""
        planted = f" --plant {shlex.quote(plant)}" if plant else ""
        return (
            f"python -m tests.sim --seed {self.seed} --events {events} --upto {self.event}{without}{planted}"
        )


@dataclass(slots=True)
class Figures:
    """Sums over schedules."""

    schedules: int = 0
    events: int = 0
    seconds: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)  # events and what came of them
    cpu_seconds: float = 0.0
    failures: list[Failure] = field(default_factory=list)
    failed: int = 0

    def add(self, other: Figures) -> None:
        """Another process's."""
        self.schedules += other.schedules
        self.events += other.events
        self.failed += other.failed
        self.cpu_seconds += other.cpu_seconds
        self.seconds = max(self.seconds, other.seconds)
        self.failures = (self.failures + other.failures)[:FAILURES_KEPT_MAX]
        for kind, count in other.counts.items():
            self.counts[kind] = self.counts.get(kind, 0) + count

    def line(self, first: int) -> str:
        """One line for people and for CI."""
        told = (
            ("leases", "leases"), ("leases adopted", "handed over"), ("held", "found held"), ("die", "client deaths"),
            ("crash", "daemon crashes"), ("adoptions of memory", "warm restarts"), ("ghosts", "ghosts"),
        )  # fmt: skip
        what = ", ".join(f"{self.counts.get(name, 0)} {label}" for name, label in told)
        return (
            f"sim: {self.schedules} schedules, {self.events} events, {self.failed} violations; {what}; "
            f"seeds from {first}, {self.seconds:.1f} s, {self.cpu_seconds:.0f} s of CPU"
        )


def run_one(
    seed: int, events: int, *, tracing: bool = False, without: frozenset[str] = frozenset()
) -> tuple[Simulation, Failure | None]:
    """One schedule to its end, or to the first broken promise."""
    sim = Simulation(seed, tracing=tracing, without=without)
    try:
        sim.run(events)
    except Exception as error:  # noqa: BLE001  InvariantError, Violation, or a plain bug of the core: all are findings
        return sim, Failure.of(sim, error)
    return sim, None


def run_seeds(first: int, stride: int, seconds: float, events: int = EVENTS_PER_SCHEDULE) -> Figures:
    """Seeds first, first + stride, … for so long."""
    figures = Figures()
    began_s, began_cpu_s = time.monotonic(), time.process_time()
    seed = first
    while (spent_s := time.monotonic() - began_s) < seconds:
        sim, failure = run_one(seed, events)
        figures.schedules += 1
        figures.events += sim.events
        for kind, count in (*sim.counts.items(), *sim.tally.items()):
            figures.counts[kind] = figures.counts.get(kind, 0) + count
        if failure is not None:
            figures.failed += 1
            if len(figures.failures) < FAILURES_KEPT_MAX:
                figures.failures.append(failure)
        seed += stride
    figures.seconds, figures.cpu_seconds = spent_s, time.process_time() - began_cpu_s
    return figures


def first_failure(seeds: Iterable[int], events: int = EVENTS_PER_SCHEDULE) -> Failure | None:
    """Of these seeds, in order."""
    for seed in seeds:
        _, failure = run_one(seed, events)
        if failure is not None:
            return failure
    return None


def shrink(seed: int, events: int) -> Failure | None:
    """The failure of this seed with as few kinds of events as it needs, and its trace. None: it does not fail.

    A schedule without a kind is another schedule: it counts only if it breaks the same promise.
    """
    _, best = run_one(seed, events)
    if best is None:
        return None
    for kind in WEIGHTS:
        if kind in ALWAYS:
            continue
        _, failure = run_one(seed, events, without=best.without | {kind})
        if failure is not None and failure.promise == best.promise:
            best = failure
    _, told = run_one(seed, events, tracing=True, without=best.without)
    return told
