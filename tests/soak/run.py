"""The soak: everything at once for minutes, and one line of figures. `make soak MINUTES=5`, or `run.py --minutes 5`.

Unique keys without end into a pool that is too small, readers that compare every byte, aborts, clients killed at
random, the daemon killed and stopped in turns while its pool is full, walks of `kvctl verify` all the time. In the last
third the daemon lives: then its memory must stay flat. After it, a hundred times (in short runs: fewer) TERM and KILL
in turns with an engine attached (`cycles.py`). Exit status 1 when something was torn, leaked or ended by itself, or
when less was done than a run of this length must show.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import cycles  # noqa: E402
from conftest import SERVE, Daemon  # noqa: E402
from soak_workers import COUNTS, REATTACH_NS, STALL_NS  # noqa: E402

from kvd.errors import KvdError  # noqa: E402
from kvd.probe import leftovers  # noqa: E402

POOL = {"size": "128MiB", "families_max": 1 << 16}
WORKERS = (  # role, kind, the row of the writer whose chains it reads
    ("writer", "large", 0), ("writer", "small", 1),
    ("reader", "large", 0), ("reader", "large", 0), ("reader", "small", 1),
)  # fmt: skip
ANSWER_S = 60.0
BACK_WITHIN_S = 5.0
FULL_MIN = 0.8
CALM_SHARE = 1 / 3  # of the time, at the end, in which the daemon is left alive
DAEMON_LIFE_S = 3.6
CLIENT_LIFE_S = 0.37
VERIFY_RATE = 256 << 20
# What five minutes on two cores must show.
LARGE_READS_PER_S, READS_PER_S, CLIENT_KILLS_PER_S, DAEMON_KILLS_PER_S, ABORTS_PER_S = (
    amount / 300 for amount in (1e6, 1e7, 500, 20, 1e4)
)
CYCLES, CYCLES_LEAST, CYCLES_PER_S = 100, 4, 100 / 300
SLOPE_BYTES_PER_MIN_MAX = 1 << 20
SLOPE_SECONDS_MIN = 60.0  # of a daemon's life before its memory says anything
TOTALS = ("large", "large_bytes", "small", "small_bytes", "torn", "written", "aborts", "reattached")


@dataclass(slots=True)
class Seen:
    """What the soak saw that the workers cannot count."""

    client_kills: int = 0
    daemon_kills: int = 0
    daemon_stops: int = 0
    ended: list[int] = field(default_factory=list)  # exit codes of workers that ended by themselves
    full_least: float = 1.0
    warm_families: int = 0  # with which later daemons started
    leaked: list[str] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)  # of the last daemon
    walks: int = 0
    walked_objects: int = 0
    damaged: int = 0
    fds: tuple[int, int] = (0, 0)
    threads: tuple[int, int] = (0, 0)


class Nursery:
    """The workers, by row."""

    def __init__(self, socket: str, counts: Path, rng: random.Random) -> None:
        np.zeros((len(WORKERS) + 1, len(COUNTS)), np.uint64).tofile(counts)
        self.counts = np.memmap(counts, np.uint64, "r+").reshape(-1, len(COUNTS))
        self.rng = rng
        self.pids: dict[int, int] = {}
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "soak_workers.py"), socket, str(counts)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
        )  # fmt: skip

    def ask(self, *what: object) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        ready, _, _ = select.select([self.process.stdout], [], [], ANSWER_S)
        if not ready:
            raise RuntimeError(f"the nursery does not answer {what}")
        return json.loads(self.process.stdout.readline())

    def start(self, row: int) -> None:
        role, kind, writer = WORKERS[row]
        self.pids[row] = self.ask("start", role, kind, row, writer, self.rng.getrandbits(32))

    def kill(self, row: int) -> int:
        """The exit code: −SIGKILL, or what it ended with before."""
        return int(self.ask(int(signal.SIGKILL), self.pids.pop(row)))

    def daemon_ready(self) -> None:
        self.counts[-1, 0] = time.monotonic_ns()

    def total(self, name: str) -> int:
        return int(self.counts[:-1, COUNTS.index(name)].sum())

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(ANSWER_S)


class Soak:
    """One run."""

    def __init__(
        self, seconds: float, seed: int, directory: Path, options: dict[str, dict[str, object]]
    ) -> None:
        self.seconds = seconds
        self.rng = random.Random(seed)
        self.directory = directory
        self.options = options
        self.seen = Seen()
        self.daemon = self.start_daemon()
        self.nursery = Nursery(self.daemon.socket, directory / "counts", self.rng)
        self.before = self.of_process()

    def start_daemon(self) -> Daemon:
        with contextlib.suppress(FileNotFoundError):
            (self.directory / "notify").unlink()
        return Daemon(self.directory, {"pool": POOL, **self.options}, {}, True, SERVE)

    def of_process(self) -> tuple[int, int]:
        """(descriptors, threads) of the daemon."""
        proc = Path(f"/proc/{self.daemon.pid}")
        return len(os.listdir(proc / "fd")), len(os.listdir(proc / "task"))

    # --- the torment

    def torment(self) -> None:
        """Kill clients and daemons at random moments until the time is over."""
        for row in range(len(WORKERS)):
            self.nursery.start(row)
        self.nursery.daemon_ready()
        begin_s = time.monotonic()
        calm_s = begin_s + self.seconds * (1 - CALM_SHARE)
        next_client_s = next_look_s = begin_s
        next_daemon_s = due_s = begin_s + DAEMON_LIFE_S / 2
        while (now_s := time.monotonic()) < begin_s + self.seconds:
            if now_s >= next_look_s:
                self.look(now_s)
                next_look_s = now_s + 1
            if now_s >= next_client_s:
                self.kill_client()
                next_client_s = now_s + CLIENT_LIFE_S * 2 * self.rng.random()
            if next_daemon_s <= now_s < calm_s:
                next_daemon_s = now_s + 0.2
                if self.is_full(now_s - due_s):
                    self.end_daemon()
                    next_daemon_s = due_s = time.monotonic() + DAEMON_LIFE_S * (0.5 + 0.9 * self.rng.random())
            # The moments are the point: nothing is waited for.
            time.sleep(0.02)

    def kill_client(self) -> None:
        row = self.rng.randrange(len(WORKERS))
        code = self.nursery.kill(row)
        if code != -signal.SIGKILL:
            self.seen.ended.append(code)
        self.seen.client_kills += 1
        self.nursery.start(row)

    def is_full(self, waited_s: float) -> bool:
        """Whether the pool is as full as a daemon that dies should be; after ten seconds it is taken as it is."""
        pool = self.daemon.call("status")["core"]["pool"]
        share = pool["used_bytes"] / pool["total_bytes"]
        if share < FULL_MIN and waited_s < 10:
            return False
        self.seen.full_least = min(self.seen.full_least, share)
        return True

    def end_daemon(self) -> None:
        """KILL twice, TERM once, in whatever the daemon is doing, and the next one at once."""
        self.check_log()
        if self.seen.daemon_kills >= 2 * (self.seen.daemon_stops + 1):
            self.seen.daemon_stops += 1
            code, wanted = self.daemon.stop(), 0
        else:
            self.seen.daemon_kills += 1
            code, wanted = self.daemon.kill(), -signal.SIGKILL
        if code != wanted:
            self.seen.leaked.append(f"a daemon ended with {code}:\n{self.daemon.log_text()[-2000:]}")
        self.daemon.notify.close()
        self.daemon = self.start_daemon()
        self.nursery.daemon_ready()
        self.seen.warm_families += self.daemon.call("status")["core"]["families"]
        self.seen.memory.clear()

    def look(self, now_s: float) -> None:
        """Once a second: memory, health, and the next walk over the pool."""
        with contextlib.suppress(KvdError):
            status = self.daemon.call("status")
            self.seen.memory.append((now_s, status["private_bytes"]))
            if status["health"]["state"] not in ("ok", "starting"):
                self.seen.leaked.append(f"health {status['health']}")
            if status["verify"]["running"] is None:
                if (last := status["verify"]["last"]) is not None:
                    self.seen.walks += 1
                    self.seen.walked_objects += last["objects"]
                self.daemon.call("verify", rate=VERIFY_RATE)

    def check_log(self) -> None:
        """Damage that anyone found, and errors, of this daemon."""
        for line in self.daemon.log_text().splitlines():
            if '"object_damaged"' in line:
                self.seen.damaged += 1
                self.seen.leaked.append(line)
            elif '"level": "error"' in line:
                self.seen.leaked.append(line)
        self.daemon.log.write_text("")

    # --- the end

    def settle(self) -> None:
        """All clients gone: nothing may be held, and everything must be free again."""
        for row in list(self.nursery.pids):
            code = self.nursery.kill(row)
            if code != -signal.SIGKILL:
                self.seen.ended.append(code)
        end_s = time.monotonic() + BACK_WITHIN_S
        while self.daemon.call("clients") and time.monotonic() < end_s:
            time.sleep(0.01)
        self.daemon.call("verify_stop")
        self.check_log()
        left = [row["name"] for row in self.daemon.call("clients")]
        kept = self.daemon.call("clear")["kept"]
        core = self.daemon.call("status")["core"]
        pool = core["pool"]
        facts = {
            "clients": len(left), "kept": kept, "reservations": core["reservations"], "limbo": pool["limbo_bytes"],
            "reserved": pool["reserved_bytes"], "used": pool["used_bytes"],
            "not free": pool["usable_bytes"] - pool["free_bytes"], "families": core["families"],
        }  # fmt: skip
        self.seen.leaked += [f"{name}: {value}" for name, value in facts.items() if value]
        while (after := self.of_process())[0] > self.before[0] and time.monotonic() < end_s:
            time.sleep(0.01)
        self.seen.fds, self.seen.threads = (self.before[0], after[0]), (self.before[1], after[1])
        # The verifier's worker is the one thread that the daemon starts late.
        if after[0] > self.before[0] + 1 or after[1] > self.before[1] + 1:
            self.seen.leaked.append(f"(descriptors, threads) were {self.before}, are {after}")

    def slope_bytes_per_min(self) -> float:
        """How fast the last daemon's own memory grows, its first third (filling its tables) left out."""
        samples = self.seen.memory[len(self.seen.memory) // 3 :]
        if len(samples) < 3:
            return 0.0
        seconds, sizes = np.array(samples, np.float64).T
        return float(np.polyfit(seconds - seconds[0], sizes, 1)[0] * 60)

    def close(self) -> None:
        self.nursery.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.daemon.stop()
        self.daemon.notify.close()
        for left in leftovers.find(str(self.directory), self.daemon.socket):
            leftovers.remove(left)


def figures(soak: Soak, total: dict[str, int], stall_s: float, reattach_s: float) -> str:
    """The line that the soak prints."""
    seen = soak.seen
    return (
        f"soak {soak.seconds:.0f} s: {total['large'] + total['small']:,} reads verified, every byte of "
        f"{(total['large_bytes'] + total['small_bytes']) / 1e9:.1f} GB ({total['large']:,} of 64 KiB and more), "
        f"{total['torn']} torn; {total['written']:,} objects written, {total['aborts']:,} writes given up; "
        f"{seen.client_kills} clients killed, {seen.daemon_kills} daemons killed and {seen.daemon_stops} stopped "
        f"(pool {seen.full_least:.0%} full or more), "
        f"{total['reattached']} times attached again, {seen.warm_families:,} families taken over; "
        f"{seen.walks} walks over {seen.walked_objects:,} objects, {seen.damaged} damaged; "
        f"{len(seen.leaked)} leaked (slots, leases, reservations, descriptors, threads, files), "
        f"{'all engines alive' if not seen.ended else f'{len(seen.ended)} engines ended by themselves'}; "
        f"worst stall {stall_s:.2f} s, worst re-attach {reattach_s:.2f} s; daemon memory "
        f"{soak.slope_bytes_per_min() / 1024:+.0f} KiB/min, descriptors {seen.fds[0]} -> {seen.fds[1]}, threads "
        f"{seen.threads[0]} -> {seen.threads[1]}"
    )


def problems(soak: Soak, total: dict[str, int], reattach_s: float, share: float) -> Iterator[str]:
    """What a soak must not show, or shows too little of."""
    seen, seconds = soak.seen, soak.seconds
    if total["torn"]:
        yield f"{total['torn']} torn reads"
    yield from seen.leaked
    if seen.ended:
        yield f"workers ended by themselves: {seen.ended}"
    if reattach_s > BACK_WITHIN_S:
        yield f"worst re-attach {reattach_s:.2f} s, at most {BACK_WITHIN_S} s"
    lived_s = seen.memory[-1][0] - seen.memory[0][0] if seen.memory else 0.0
    if lived_s >= SLOPE_SECONDS_MIN and soak.slope_bytes_per_min() > SLOPE_BYTES_PER_MIN_MAX:
        yield f"the daemon's memory grows by {soak.slope_bytes_per_min():,.0f} B a minute"
    for name, done, per_s in (
        ("reads of 64 KiB and more", total["large"], LARGE_READS_PER_S),
        ("reads", total["large"] + total["small"], READS_PER_S),
        ("client kills", seen.client_kills, CLIENT_KILLS_PER_S),
        ("daemon kills", seen.daemon_kills, DAEMON_KILLS_PER_S),
        ("writes given up", total["aborts"], ABORTS_PER_S),
    ):
        if done < (least := max(1, int(share * per_s * seconds))):
            yield f"only {done:,} {name}, {least:,} were to be shown"


def run(
    seconds: float, seed: int, options: dict[str, dict[str, object]] | None = None, share: float = 1.0
) -> tuple[str, list[str]]:
    """One soak: its line of figures, and what was wrong. `share`: how much of what it should show it must show."""
    shm = set(os.listdir("/dev/shm"))
    directory = Path(tempfile.mkdtemp(prefix="kvd-soak-"))
    try:
        soak = Soak(seconds, seed, directory, options or {})
        try:
            soak.torment()
            soak.settle()
        except KvdError as error:
            end = soak.daemon.log_text()[-1500:]
            soak.seen.leaked.append(
                f"a daemon ended by itself ({soak.daemon.process.poll()}): {error}\n{end}"
            )
        finally:
            soak.close()
        if left := {name for name in set(os.listdir("/dev/shm")) - shm if name.startswith("kvd")}:
            soak.seen.leaked.append(f"/dev/shm has {left}")
        total = {name: soak.nursery.total(name) for name in TOTALS}
        worst = soak.nursery.counts[:-1].max(axis=0)
        reattach_s = float(worst[REATTACH_NS]) / 1e9
        line = figures(soak, total, float(worst[STALL_NS]) / 1e9, reattach_s)
        return line, list(problems(soak, total, reattach_s, share))
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument(
        "--keep", choices=["keeper", "off"], default="keeper", help="the memory of a dead daemon"
    )
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "little"))
    parser.add_argument(
        "--least", type=float, default=None, metavar="SHARE",
        help="of the work that a run of this length must show (1 from five minutes on, 0.25 below)",
    )  # fmt: skip
    arguments = parser.parse_args()
    share = arguments.least if arguments.least is not None else 1.0 if arguments.minutes >= 5 else 0.25
    print(f"seed {arguments.seed}", flush=True)
    line, wrong = run(arguments.minutes * 60, arguments.seed, {"restart": {"keep": arguments.keep}}, share)
    print(line, flush=True)
    count = min(CYCLES, max(CYCLES_LEAST, round(CYCLES_PER_S * arguments.minutes * 60)))
    line, more = cycles.run(count)
    print(line)
    wrong += more
    for problem in wrong:
        print("WRONG:", problem)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
