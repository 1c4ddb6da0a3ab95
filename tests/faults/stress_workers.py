"""Readers and writers of the stress test, forked from one nursery: they run until they are killed.

What they did is counted in a shared file of u64 words, a row for each worker, so that the counts of a killed process
are not lost. A chunk's payload is its identity over and over: bytes of any other object, or half of one, do not look
like it.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from array import array

import numpy as np

import kvd
from kvd.errors import CapacityError, ViewsAliveError

COUNTS = ("verified", "torn", "lookups", "rewritten", "refused", "views_kept", "broken")
VERIFIED, TORN, LOOKUPS, REWRITTEN, REFUSED, VIEWS_KEPT, BROKEN = range(len(COUNTS))
CHUNK_TOKENS, CHUNKS = 16, 8
CHAINS = 120
SIZES = (4 << 10, 16 << 10, 64 << 10)
MANIFEST = kvd.Manifest(model="m", revision="r1", dtype="bfloat16", fixed="*", tenant="", salt="")


class World:
    """All chains, by number. Chains of one third have one size."""

    def __init__(self, socket: str, access: str, counts_path: str, row: int) -> None:
        self.store = kvd.connect(socket, access=access, client=f"stress-{row}", deadline_s=60)
        self.ns = self.store.namespace(MANIFEST)
        self.chains = [
            self.ns.chain(array("I", [number, *range(CHUNKS * CHUNK_TOKENS - 1)]), CHUNK_TOKENS)
            for number in range(CHAINS)
        ]
        self.words = [
            np.frombuffer(bytes(chain.identities), np.uint64).reshape(CHUNKS, 4) for chain in self.chains
        ]
        self.counts = np.memmap(counts_path, np.uint64, "r+").reshape(-1, len(COUNTS))[row]

    def size(self, number: int) -> int:
        return SIZES[number % len(SIZES)]


def work(role: str, socket: str, counts_path: str, row: int, seed: int) -> None:
    """A worker process. What it does not expect is counted as broken, and told."""
    world = World(socket, "read" if role == "reader" else "write", counts_path, row)
    rng = random.Random(seed)
    try:
        while True:
            (read if role == "reader" else write)(world, rng)
    except BaseException:
        world.counts[BROKEN] += 1
        raise


def read(world: World, rng: random.Random) -> None:
    """Lease a random chain, compare every byte, sometimes again; sometimes go on reading a view after the release."""
    number, first = rng.randrange(CHAINS), rng.randrange(3)
    leases = world.ns.acquire(world.chains[number][first:])
    world.counts[LOOKUPS] += 1
    for _ in range(1 + (rng.random() < 0.2)):
        for position, lease in enumerate(leases):
            check(world, lease.array(np.uint64, (-1, 4)), number, first + position)
    if not len(leases) or rng.random() > 0.1:
        leases.release()
        return
    kept = leases[0].array(np.uint64, (-1, 4))
    try:
        leases.release()
    except ViewsAliveError:
        world.counts[VIEWS_KEPT] += 1
    pause(rng)
    check(world, kept, number, first)


def check(world: World, values: np.ndarray, number: int, position: int) -> None:
    right = values.nbytes == world.size(number) and bool((values == world.words[number][position]).all())
    world.counts[VERIFIED if right else TORN] += 1


def write(world: World, rng: random.Random) -> None:
    """Write a random chain where it is missing, slowly now and then; sometimes give up half-way."""
    number = rng.randrange(CHAINS)
    chain, size = world.chains[number], world.size(number)
    try:
        writes = world.ns.reserve(chain, nbytes=size, skip_pending=rng.random() < 0.5)
    except CapacityError:
        world.counts[REFUSED] += 1
        return
    with writes:
        for position, one in enumerate(writes):
            if one.status is kvd.Granted.GRANTED:
                if rng.random() < 0.02:
                    pause(rng)
                one.fill(world.words[number][position].tobytes() * (size // 32))
        if rng.random() < 0.05:
            return
        if rng.random() < 0.05:
            pause(rng)
        results = writes.publish()
    world.counts[REWRITTEN] += results.count(kvd.Published.PUBLISHED)


def pause(rng: random.Random) -> None:
    time.sleep(rng.random() * 0.02)


def nursery(socket: str, counts_path: str) -> None:
    """Forks and ends workers as it is told, a JSON line each: ["start", role, row, seed] -> pid, [signal, pid] -> null
    or, for SIGKILL, the exit code. It is one process that has imported everything: a worker starts in a moment.
    """
    alive = set()
    for line in sys.stdin:
        answer = None
        match json.loads(line):
            case ["start", role, row, seed]:
                answer = os.fork()
                if answer == 0:
                    work(role, socket, counts_path, row, seed)
                alive.add(answer)
            case [int(number), int(pid)]:
                os.kill(pid, number)
                if number == signal.SIGKILL:
                    answer = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    alive.discard(pid)
        print(json.dumps(answer), flush=True)
    for pid in alive:
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    nursery(*sys.argv[1:])
