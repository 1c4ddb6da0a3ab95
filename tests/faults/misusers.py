"""Clients that misuse what they were given: HOW SOCKET. Say "on" once they do, and go on until they are killed.

flood    asks without pause, and takes the answers
deaf     asks without pause, and takes no answer
hoard    leases everything there is, once, and keeps it
reserve  reserves everything there is, and publishes nothing
"""

from __future__ import annotations

import json
import os
import sys
from array import array
from collections.abc import Callable
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))

from faults_world import CHUNK_TOKENS, SIZE, chain_of, namespace

import kvd
from kvd.errors import CapacityError
from kvd.shm.messages import Sq


def on() -> None:
    os.write(1, b"on\n")


def forever() -> None:
    while True:
        os.read(0, 1) or os._exit(0)


def wake(store: kvd.Store) -> None:
    store._session._wake.send(b"\1")


def flood(store: kvd.Store) -> None:
    """As many PINGs as the ring takes, all the time."""
    native, op = store.native, 0
    on()
    while True:
        while native.submit(Sq.PING, op, b""):
            op += 1
        try:
            wake(store)
        except BlockingIOError:
            continue
        native.poll(4096)


def deaf(store: kvd.Store) -> None:
    """As many as the ring takes, and again when there is room: there will be none once the answers are stuck."""
    native, op, stuck = store.native, 0, 0
    while True:
        if native.submit(Sq.PING, op, b""):
            op += 1
            stuck = 0
            continue
        wake(store)
        stuck += 1
        if stuck == 200:
            on()
            forever()


def hoard(store: kvd.Store) -> None:
    ns = namespace(store)
    kept = []
    for number in range(100):
        chain = ns.chain(array("I", [number, *range(1000 * CHUNK_TOKENS - 1)]), CHUNK_TOKENS)
        kept.append(ns.acquire(chain))
    on()
    forever()


def reserve(store: kvd.Store) -> None:
    ns = namespace(store)
    kept = []
    number = 0
    while True:
        try:
            kept.append(ns.reserve(chain_of(ns, 5000 + number), nbytes=SIZE))
            number += 1
        except CapacityError:
            on()
            forever()


WAYS: dict[str, Callable[[kvd.Store], None]] = {
    "deaf": deaf, "flood": flood, "hoard": hoard, "reserve": reserve,
}  # fmt: skip

if __name__ == "__main__":
    if sys.argv[1] == "list":
        print(json.dumps(sorted(WAYS)))
    else:
        WAYS[sys.argv[1]](kvd.connect(sys.argv[2], client=f"misuser-{sys.argv[1]}"))
