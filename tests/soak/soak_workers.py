"""Readers and writers of the soak, forked from one nursery: engines that live through the deaths of their daemon.

Every write has a new key, without end. A payload is its identity over and over, and a reader compares every byte with
what it makes of the key itself: bytes of another object, or half of one, cannot pass. What was done is counted in a
shared file of u64 words, a row for each worker, so that the counts of a killed process are not lost.
"""

from __future__ import annotations

import inspect
import json
import os
import random
import signal
import sys
import time
from array import array
from dataclasses import dataclass

import numpy as np

import kvd
from kvd.errors import CapacityError, LifecycleError, UnavailableError

COUNTS = (
    "large", "large_bytes", "small", "small_bytes", "torn", "written", "aborts", "refused", "misses",
    "reattached", "reattach_ns", "stall_ns", "head",
)  # fmt: skip
(
    LARGE, LARGE_BYTES, SMALL, SMALL_BYTES, TORN, WRITTEN, ABORTS, REFUSED, MISSES,
    REATTACHED, REATTACH_NS, STALL_NS, HEAD,
) = range(len(COUNTS))  # fmt: skip
CHUNK_TOKENS = 16
MANIFEST = kvd.Manifest(model="m", revision="r1", dtype="bfloat16", fixed="*", tenant="", salt="")
AUTOMATIC = "reattach" in inspect.signature(kvd.connect).parameters
AWAY_S = 60.0  # a daemon that is away longer than this is a failure of the soak


@dataclass(frozen=True, slots=True)
class Kind:
    """What a writer writes: chains of `chunks` chunks, objects of one of these sizes in turn."""

    chunks: int
    sizes: tuple[int, ...]
    keep: int  # readers look at about so many of the newest chains

    def size(self, number: int) -> int:
        return self.sizes[number % len(self.sizes)]


KINDS = {"large": Kind(8, (64 << 10, 64 << 10, 256 << 10), 120), "small": Kind(64, (1 << 10, 4 << 10), 150)}
LARGE_MIN = 64 << 10


class Engine:
    """One process: its store, what it counts. `rows`: all rows; `ready_ns`: when the daemon was last ready."""

    def __init__(self, socket: str, access: str, counts: str, row: int, seed: int) -> None:
        self.socket, self.access, self.row = socket, access, row
        self.rng = random.Random(seed)
        rows = np.memmap(counts, np.uint64, "r+").reshape(-1, len(COUNTS))
        self.rows, self.counts = rows[:-1], rows[row]
        self.ready_ns = rows[-1]
        self.known_ready_ns = int(self.ready_ns[0])
        self.connect()

    def connect(self) -> None:
        """Attach; a daemon that is away is waited for, with jitter."""
        end_s = time.monotonic() + AWAY_S
        while True:
            try:
                self.store = kvd.connect(
                    self.socket, access=self.access, client=f"soak-{self.row}", deadline_s=10
                )
                self.ns = self.store.namespace(MANIFEST)
                self.epoch = self.store.native.epoch
                return
            except UnavailableError:
                if time.monotonic() > end_s:
                    raise
                time.sleep(0.005 + 0.03 * self.rng.random())

    def lost(self) -> bool:
        """Whether the daemon is away."""
        return self.store.lost is not None

    def look(self) -> None:
        """Notice another daemon: a store that attaches again by itself has done so, others are made to."""
        if AUTOMATIC:
            epoch = self.store.native.epoch
            if epoch != self.epoch:
                self.epoch = epoch
                self.attached_again()
        elif int(self.ready_ns[0]) != self.known_ready_ns:
            self.come_back()

    def attached_again(self) -> None:
        """Count it, and how long after the daemon was ready it was."""
        now_ns, ready_ns = time.monotonic_ns(), int(self.ready_ns[0])
        self.counts[REATTACHED] += 1
        if ready_ns > self.known_ready_ns:
            self.known_ready_ns = ready_ns
            self.counts[REATTACH_NS] = max(int(self.counts[REATTACH_NS]), now_ns - ready_ns)

    def come_back(self) -> None:
        """The daemon died. Until it is there again; how long that took after it was."""
        if AUTOMATIC:
            end_s = time.monotonic() + AWAY_S
            while True:
                try:
                    self.store.call("health", 1.0)
                    break
                except UnavailableError:
                    if time.monotonic() > end_s:
                        raise
                    time.sleep(0.005 + 0.03 * self.rng.random())
        else:
            self.store.close()
            self.connect()
            self.attached_again()

    def restarted(self) -> bool:
        """Whether another daemon has come since the last time that was asked."""
        before, self.known_ready_ns = self.known_ready_ns, int(self.ready_ns[0])
        return self.known_ready_ns != before or self.lost()

    def took(self, began_ns: int) -> None:
        """Remember the longest call of all."""
        self.counts[STALL_NS] = max(int(self.counts[STALL_NS]), time.monotonic_ns() - began_ns)

    def chain(self, kind: Kind, writer: int, number: int) -> kvd.Chain:
        tokens = array("I", [writer, number & 0xFFFFFFFF, *range(kind.chunks * CHUNK_TOKENS - 2)])
        return self.ns.chain(tokens, CHUNK_TOKENS)


def read(engine: Engine, kind: Kind, writer: int) -> None:
    """Lease one of the newest chains of a writer and compare every byte of it."""
    head = int(engine.rows[writer][HEAD])
    number = max(0, head - 1 - int(engine.rng.expovariate(1) * kind.keep))
    chain, size = engine.chain(kind, writer, number), kind.size(number)
    began_ns = time.monotonic_ns()
    leases = engine.ns.acquire(chain)
    engine.took(began_ns)
    with leases:
        good = 0
        for lease in leases:
            good += bytes(lease.view) == lease.identity * (size // 32)
    count = len(leases)
    which = (LARGE, LARGE_BYTES) if size >= LARGE_MIN else (SMALL, SMALL_BYTES)
    engine.counts[which[0]] += good
    engine.counts[which[1]] += good * size
    engine.counts[TORN] += count - good
    engine.counts[MISSES] += count < kind.chunks
    if not count and engine.lost():
        raise UnavailableError("the daemon is away")
    if not head:
        time.sleep(0.005)


def write(engine: Engine, kind: Kind) -> None:
    """Write the next chain under keys that nobody had before; give up at random."""
    number = int(engine.counts[HEAD])
    chain, size = engine.chain(kind, engine.row, number), kind.size(number)
    began_ns = time.monotonic_ns()
    try:
        writes = engine.ns.reserve(chain, nbytes=size)
    except CapacityError:
        engine.counts[REFUSED] += 1
        time.sleep(0.002)
        return
    engine.took(began_ns)
    with writes:
        if engine.rng.random() < 0.4:
            if writes[0].status is kvd.Granted.GRANTED:  # or a killed writer of this row was here before
                writes[0].fill(chain[0] * (size // 32))
            engine.counts[ABORTS] += 1
            return
        writes.fill([identity * (size // 32) for identity in chain])
        began_ns = time.monotonic_ns()
        results = writes.publish()
        engine.took(began_ns)
    engine.counts[WRITTEN] += results.count(kvd.Published.PUBLISHED)
    engine.counts[HEAD] = number + 1
    # Writers leave most of the machine to the readers, whose work is what counts.
    time.sleep(0.001 + 0.004 * engine.rng.random())


def work(role: str, kind: str, socket: str, counts: str, row: int, writer: int, seed: int) -> None:
    """A worker process; it ends by being killed. An end by itself is told by its exit code, and fails the soak."""
    engine = Engine(socket, "read" if role == "reader" else "write", counts, row, seed)
    while True:
        try:
            if role == "reader":
                read(engine, KINDS[kind], writer)
            else:
                write(engine, KINDS[kind])
            engine.look()
        except UnavailableError:
            engine.come_back()
        except LifecycleError:
            # A reservation ends with its daemon.
            if not engine.restarted():
                raise


def nursery(socket: str, counts: str) -> None:
    """Forks and ends workers as it is told, a JSON line each: ["start", role, kind, row, writer, seed] -> pid,
    [signal, pid] -> its exit code.
    """
    alive = set()
    for line in sys.stdin:
        match json.loads(line):
            case ["start", role, kind, row, writer, seed]:
                answer = os.fork()
                if answer == 0:
                    try:
                        work(role, kind, socket, counts, row, writer, seed)
                    finally:
                        import traceback

                        traceback.print_exc()
                        os._exit(3)
                alive.add(answer)
            case [int(number), int(pid)]:
                os.kill(pid, number)
                answer = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                alive.discard(pid)
            case other:
                raise ValueError(f"the nursery does not know {other}")
        print(json.dumps(answer), flush=True)
    for pid in alive:
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    nursery(*sys.argv[1:])
