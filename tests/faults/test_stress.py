"""Readers verify every byte beside writers that rewrite a pool too small for them, while both are killed and stopped.

Counts what a user must never see (torn reads, leaked slots and leases) and what shows that the test did something. With
the hazard scan left out of the daemon the same test must count torn reads.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faults_world import BACK_WITHIN_S, STUCK_S, injected, space, until
from stress_workers import COUNTS

HERE = Path(__file__).resolve().parent
SECONDS_CI = 60.0
READERS, WRITERS = 3, 2
GRACE_S = 60.0  # of building up and looking after, beyond the stress itself


class Nursery:
    """The workers of one run, by row."""

    def __init__(self, socket: str, counts: Path, rng: random.Random) -> None:
        np.zeros((READERS + WRITERS, len(COUNTS)), np.uint64).tofile(counts)
        self.counts = np.memmap(counts, np.uint64, "r").reshape(-1, len(COUNTS))
        self.rng = rng
        self.pids: dict[int, int] = {}
        self.ended_count = 0  # workers that had ended by themselves
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "stress_workers.py"), socket, str(counts)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
        )  # fmt: skip

    def ask(self, *what: object) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()
        ready, _, _ = select.select([self.process.stdout], [], [], STUCK_S)
        assert ready, f"the nursery does not answer {what}"
        return json.loads(self.process.stdout.readline())

    def start(self, row: int) -> None:
        role = "reader" if row < READERS else "writer"
        self.pids[row] = self.ask("start", role, row, self.rng.getrandbits(32))

    def kill(self, row: int) -> None:
        code = self.ask(signal.SIGKILL, self.pids.pop(row))
        self.ended_count += code != -signal.SIGKILL

    def total(self, name: str) -> int:
        return int(self.counts[:, COUNTS.index(name)].sum())

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(STUCK_S)
        self.process.stdout.close()


def torment(nursery: Nursery, rng: random.Random, seconds: float) -> tuple[int, int]:
    """Kill and replace, stop and continue workers at random moments; how many (kills, stops)."""
    kills = stops = 0
    stopped: dict[int, float] = {}
    end_s = time.monotonic() + seconds
    while (now_s := time.monotonic()) < end_s:
        # The moments are the point here: nothing is waited for.
        time.sleep(rng.random() * 0.15)
        for row in [row for row, until_s in stopped.items() if until_s < now_s]:
            nursery.ask(signal.SIGCONT, nursery.pids[row])
            del stopped[row]
        row = rng.randrange(READERS + WRITERS)
        if row in stopped:
            continue
        if rng.random() < 0.25:
            nursery.ask(signal.SIGSTOP, nursery.pids[row])
            stopped[row] = now_s + rng.random()
            stops += 1
        else:
            nursery.kill(row)
            nursery.start(row)
            kills += 1
    for row in stopped:
        nursery.ask(signal.SIGCONT, nursery.pids[row])
    return kills, stops


def run(
    daemon: Any, tmp_path: Path, seconds: float, env: dict[str, str] | None = None
) -> tuple[Any, dict[str, int]]:
    """One stress run; the daemon and what was counted."""
    seed = int.from_bytes(os.urandom(4), "little")
    print(f"seed {seed}")
    rng = random.Random(seed)
    running = daemon(pool={"size": "16MiB"}, env=env)
    nursery = Nursery(running.socket, tmp_path / "counts", rng)
    try:
        for row in range(READERS + WRITERS):
            nursery.start(row)
        until(lambda: nursery.total("rewritten") > 500, "the first objects", GRACE_S)
        kills, stops = torment(nursery, rng, seconds)
        for row in list(nursery.pids):
            nursery.kill(row)
    finally:
        nursery.close()
    counted = {name: nursery.total(name) for name in COUNTS}
    return running, {**counted, "kills": kills, "stops": stops, "ended": nursery.ended_count}


def figures(running: Any, seconds: float, counted: dict[str, int]) -> str:
    counters = running.call("status")["counters"]
    evicted = sum(
        counters[f"evicted_{reason}"] for reason in ("space", "window", "entries", "records", "partial")
    )
    return (
        f"{seconds:.0f} s: {counted['verified']:,} objects verified, {counted['torn']} torn; "
        f"{counted['rewritten']:,} rewritten, {evicted:,} families evicted, {counters['held_reverts']:,} held; "
        f"{counted['kills']} killed, {counted['stops']} stopped, {counters['orphaned']:,} slots orphaned, 0 leaked"
    )


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_no_torn_read_and_no_leak_while_workers_are_killed(
    daemon: Any, tmp_path: Path, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    long = request.config.getoption("--long")
    seconds = request.config.getoption("--seconds") if long else SECONDS_CI
    running, counted = run(daemon, tmp_path, seconds)
    until(lambda: running.call("clients") == [], "the slots of the dead", BACK_WITHIN_S)
    line = figures(running, seconds, counted)
    assert counted["torn"] == counted["broken"] == counted["ended"] == 0, line
    left = space(running)
    assert (left["leases"], left["reserved"], left["reservations"], left["limbo"]) == (0, 0, 0, 0)
    assert running.call("clear")["kept"] == {}
    assert space(running) == dict.fromkeys(left, 0)
    pool = running.call("status")["core"]["pool"]
    assert pool["free_bytes"] == pool["usable_bytes"]
    with capsys.disabled():
        print("\n" + line)
    assert counted["verified"] > 100 * seconds
    assert counted["kills"] > 0
    assert running.call("status")["counters"]["client_protocol_errors"] == 0


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_without_the_hazard_scan_torn_reads_are_counted(daemon: Any, tmp_path: Path, library: Path) -> None:
    """The stress can fail: the daemon reuses what readers hold, and they see it."""
    env = injected(FAULTS_LIBRARY=str(library), KVD_MUTANT="HAZARD_SCAN")
    _, counted = run(daemon, tmp_path, 3.0, env)
    print(counted)
    assert counted["torn"] > 0
