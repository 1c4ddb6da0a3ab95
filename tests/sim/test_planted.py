"""Planted faults are found by the promise they break, and the command that a failure prints replays it.

Every fault of `planted.py` must be found within so many schedules: a simulation that cannot find them proves nothing.
What it found is then made small, and the printed command is run as people run it, in a process of its own and with
another hash seed: it must end in the very same failure, and without the fault in none.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .campaign import EVENTS_PER_SCHEDULE, Failure, first_failure, shrink
from .planted import PLANTED, SEEDS_MAX

ROOT = Path(__file__).resolve().parents[2]
DESIGN = ROOT / "docs" / "design" / "sim.md"
PREFIX = "python -m tests.sim "


def told(*arguments: str, seconds: float = 120) -> subprocess.CompletedProcess[str]:
    """The command line, in a process with a hash seed of its own."""
    return subprocess.run(
        [sys.executable, "-m", "tests.sim", *arguments], cwd=ROOT, capture_output=True, text=True,
        timeout=seconds, env={**os.environ, "PYTHONHASHSEED": "4711"},
    )  # fmt: skip


def found(name: str) -> Failure:
    """The first schedule that breaks a promise because of this fault."""
    for seed in range(SEEDS_MAX):
        failure = first_failure([seed])
        if failure is not None and any(part in failure.what for part in PLANTED[name].found):
            return failure
    pytest.fail(f"{name} was not found in {SEEDS_MAX} schedules")


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTED)
def test_planted_fault_is_found_and_replayed(name: str) -> None:
    """Fails if the event that broke the promise is not the one counted, or if a kind left out shifts the others."""
    began_s = time.process_time()
    with PLANTED[name].plant():
        failure = found(name)
        smallest = shrink(failure.seed, EVENTS_PER_SCHEDULE)
    print(f"{name}: schedule {failure.seed}, {time.process_time() - began_s:.2f} s of CPU: {failure.what}")
    assert smallest is not None
    assert smallest.promise == failure.promise
    command = smallest.command(EVENTS_PER_SCHEDULE, name)
    print(command)
    assert command.startswith(PREFIX)
    replayed = told(*shlex.split(command.removeprefix(PREFIX)))
    assert replayed.returncode == 1, replayed.stdout + replayed.stderr
    last = f"seed {smallest.seed}, event {smallest.event}: {smallest.what}"
    assert replayed.stdout.splitlines()[-1] == last
    assert first_failure([failure.seed]) is None, "the seed fails without the fault as well"


@pytest.mark.slow
def test_a_campaign_names_the_command_that_replays_what_it_found() -> None:
    """The command line as people use it: a violation in the figures, a command, and the same violation from it."""
    ran = told("--seconds", "3", "--first", "0", "--processes", "1", "--plant", "hazards ignored")
    assert ran.returncode == 1, ran.stdout + ran.stderr
    command = next(line for line in ran.stdout.splitlines() if "replay: " in line).split(PREFIX)[1]
    replayed = told(*shlex.split(command))
    assert replayed.returncode == 1
    assert "is freed under the lease" in replayed.stdout.splitlines()[-1]
    honest = told(*shlex.split(command.split(" --plant ")[0]))
    assert honest.returncode == 0, honest.stdout


def test_the_design_page_lists_every_planted_fault() -> None:
    rows = re.findall(
        r"^\| ([^|]+?) \|", DESIGN.read_text().split("## Planted faults")[1].split("\n## ")[0], re.M
    )
    assert rows == ["fault", *PLANTED]
