"""TERM and KILL in turns over one memory, with an engine attached all the time; part of `make soak`.

After each the next daemon must be warm, the engine attached again and its reads right; after all of them /dev/shm, the
descriptors and the threads of engine and daemon are what they were after the first.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from array import array
from collections.abc import Callable
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

from conftest import SERVE, Daemon  # noqa: E402

import kvd  # noqa: E402
from kvd.probe import leftovers  # noqa: E402

OPTIONS: dict[str, dict[str, object]] = {"pool": {"size": "16MiB"}, "restart": {"keep": "keeper"}}
CHUNKS, SIZE_BYTES, CHUNK_TOKENS = 8, 64 << 10, 16
WITHIN_S = 5.0
MANIFEST = kvd.Manifest(model="m", revision="r1", dtype="bfloat16", fixed="*", tenant="", salt="")


def counts(pid: int) -> tuple[int, int]:
    """(descriptors, threads) of a process."""
    proc = Path(f"/proc/{pid}")
    return len(os.listdir(proc / "fd")), len(os.listdir(proc / "task"))


def within(happened: Callable[[], bool]) -> bool:
    """Ask until it is so, for a bounded time: what is waited for happens in another process."""
    end_s = time.monotonic() + WITHIN_S
    while not happened():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.002)
    return True


class Cycles:
    """One daemon after the other, and an engine (this process) that lives through all of them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.wrong: list[str] = []
        self.worst_s = 0.0
        self.daemon = self.start()
        self.store = kvd.connect(self.daemon.socket, deadline_s=10)
        self.ns = self.store.namespace(MANIFEST)
        self.chain = self.ns.chain(array("I", range(CHUNKS * CHUNK_TOKENS)), CHUNK_TOKENS)
        with self.ns.reserve(self.chain, nbytes=SIZE_BYTES) as writes:
            writes.fill([identity * (SIZE_BYTES // 32) for identity in self.chain])
            writes.publish()

    def start(self) -> Daemon:
        with contextlib.suppress(FileNotFoundError):
            (self.directory / "notify").unlink()
        return Daemon(self.directory, OPTIONS, {}, True, SERVE)

    def cycle(self, number: int) -> None:
        epoch = self.store.native.epoch
        code = self.daemon.kill() if number % 2 else self.daemon.stop()
        if code != (-signal.SIGKILL if number % 2 else 0):
            self.wrong.append(f"cycle {number}: the daemon ended with {code}")
        self.daemon.notify.close()
        self.daemon = self.start()
        began_s = time.monotonic()
        if not within(lambda: self.ns.match(self.chain) == CHUNKS and self.store.native.epoch != epoch):
            self.wrong.append(f"cycle {number}: not attached again, or not warm, within {WITHIN_S} s")
        self.worst_s = max(self.worst_s, time.monotonic() - began_s)
        with self.ns.acquire(self.chain) as leases:
            for lease in leases:
                if bytes(lease.view) != lease.identity * (SIZE_BYTES // 32):
                    self.wrong.append(f"cycle {number}: other bytes than were written")

    def settled(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Of the engine and of the daemon, once the engine has left the memory of the last one."""
        within(lambda: bool(self.store.renew()) or not self.daemon.call("status")["restart"]["waiting_for"])
        return counts(os.getpid()), counts(self.daemon.pid)

    def no_more_than(self, before: tuple[tuple[int, int], tuple[int, int]]) -> bool:
        """A moment's socket is waited for."""
        return all(now <= then for now, then in zip(flat(self.settled()), flat(before), strict=True))

    def close(self) -> None:
        self.store.close()
        self.daemon.stop()
        self.daemon.notify.close()
        for left in leftovers.find(str(self.directory), self.daemon.socket):
            leftovers.remove(left)


def flat(both: tuple[tuple[int, int], tuple[int, int]]) -> tuple[int, ...]:
    return both[0] + both[1]


def run(count: int) -> tuple[str, list[str]]:
    """So many cycles: a line of figures, and what was wrong."""
    shm = set(os.listdir("/dev/shm"))
    directory = Path(tempfile.mkdtemp(prefix="kvd-cycles-"))
    try:
        cycles = Cycles(directory)
        try:
            cycles.cycle(0)
            before = cycles.settled()
            for number in range(1, count):
                cycles.cycle(number)
            if not within(lambda: cycles.no_more_than(before)):
                cycles.wrong.append(
                    f"(descriptors, threads) of engine and daemon: {before}, now {cycles.settled()}"
                )
            after = cycles.settled()
        finally:
            cycles.close()
        own = {name for name in set(os.listdir("/dev/shm")) - shm if name.startswith("kvd-")}
        if own:
            cycles.wrong.append(f"/dev/shm has {own}")
        left = sorted(set(os.listdir(directory)) - {"kvd.toml", "log", "notify", "kvd.sock.lock"})
        if left:
            cycles.wrong.append(f"the runtime directory has {left}")
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    line = (
        f"{count} TERM/KILL cycles: /dev/shm and runtime directory as before, (descriptors, threads) of the engine "
        f"{before[0]} -> {after[0]}, of the daemon {before[1]} -> {after[1]}; attached again and warm after "
        f"{cycles.worst_s:.2f} s at worst"
    )
    return line, cycles.wrong
