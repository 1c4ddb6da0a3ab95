"""`python -m tests.sim`: run schedules for some time on all cores, or replay one seed with its trace.

    python -m tests.sim --seconds 120             as many seeds as fit, one line of figures
    python -m tests.sim --seed 4711 --tail 60     one seed, the end of its trace
    python -m tests.sim --seed 4711 --upto 130    the same, and stop after event 130
    python -m tests.sim --seed 4711 --shrink      leave out every kind of event that the failure does not need
    python -m tests.sim --plant 'hazards ignored' all of this with a fault of `planted.py` in the code

Exit status 1 if a promise was broken. Seeds are those from `--first` on; without it they begin at the time of day.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from .campaign import EVENTS_PER_SCHEDULE, Failure, Figures, run_seeds, shrink
from .planted import PLANTED
from .simulation import Simulation


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.sim", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--first", type=int, help="first seed; default: the time of day in microseconds")
    parser.add_argument("--events", type=int, default=EVENTS_PER_SCHEDULE, help="events of a schedule")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, help="replay this one")
    parser.add_argument("--upto", type=int, help="stop after this event")
    parser.add_argument("--without", default="", help="kinds of events to leave out, with commas")
    parser.add_argument("--tail", type=int, default=40, help="lines of the trace to show")
    parser.add_argument("--shrink", action="store_true")
    parser.add_argument(
        "--plant", choices=sorted(PLANTED), default="", help="plant a fault that must be found"
    )
    args = parser.parse_args()
    planted: AbstractContextManager[Any] = PLANTED[args.plant].plant() if args.plant else nullcontext()
    with planted:  # the processes of a campaign are forked from here and inherit it
        return run(args)


def run(args: argparse.Namespace) -> int:
    """What the arguments ask for."""
    without = frozenset(args.without.split(",")) - {""}
    if args.seed is None:
        return campaign(args)
    if args.shrink:
        failure = shrink(args.seed, args.events)
        if failure is None:
            print(f"seed {args.seed} breaks no promise")
            return 0
        without = failure.without
        print(f"smallest: {failure.command(args.events, args.plant)}")
    return replay(args.seed, args.events, args.upto, without, args.tail)


def campaign(args: argparse.Namespace) -> int:
    """Run seeds until the time is over; print the figures and what failed."""
    first = time.time_ns() // 1000 % 10**10 if args.first is None else args.first
    figures = Figures()
    count = max(args.processes, 1)
    with ProcessPoolExecutor(count, multiprocessing.get_context("fork")) as pool:
        jobs = [pool.submit(run_seeds, first + at, count, args.seconds, args.events) for at in range(count)]
        for job in jobs:
            figures.add(job.result())
    print(figures.line(first))
    for failure in figures.failures[:5]:
        smallest = shrink(failure.seed, args.events) or failure
        print(f"\nseed {failure.seed}, event {failure.event}: {failure.what}")
        print(f"  replay: {smallest.command(args.events, args.plant)}")
        for line in smallest.tail[-25:]:
            print(f"    {line}")
    return 1 if figures.failures else 0


def replay(seed: int, events: int, upto: int | None, without: frozenset[str], tail: int) -> int:
    """One seed, told."""
    sim = Simulation(seed, tracing=True, without=without)
    failure: Failure | None = None
    try:
        sim.run(events, upto)
    except Exception as error:  # noqa: BLE001  whatever it is, it is the finding
        failure = Failure.of(sim, error)
    for line in list(sim.trace)[-tail:]:
        print(line)
    if failure is None:
        print(f"seed {seed}: {sim.events} events, no promise broken; {sim.counts}")
        return 0
    print(f"seed {seed}, event {failure.event}: {failure.what}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
