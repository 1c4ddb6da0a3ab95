"""Clients that misuse what they were given: HOW SOCKET. Say "on" once they do, and go on until they are killed.

flood    asks without pause, and takes the answers
deaf     asks without pause, and takes no answer
hoard    leases everything there is, once, and keeps it
look     looks at the whole index over many connections, as often as it can
reserve  reserves everything there is, and publishes nothing
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import sys
from array import array
from collections.abc import Callable
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))

from faults_world import CHUNK_TOKENS, SIZE, chain_of, namespace

import kvd
from kvd.errors import CapacityError
from kvd.shm.messages import Sq
from kvd.wire import frames
from kvd.wire import messages as wire

CONNECTIONS = 48
ASKS_WAITING = 8


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


def look(store: kvd.Store) -> None:
    """Listings that find nothing, keys that are not there, statuses: each connection asks again at each answer."""
    ready = selectors.DefaultSelector()
    calls = (
        wire.Call("ls", {"namespace": 4000, "limit": 1000}),
        wire.Call("inspect", {"key": "00000000"}),
        wire.Call("ls", {"limit": 1000}),
        wire.Call("status", {}),
    )
    for number in range(CONNECTIONS):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect(store.socket)
        sock.sendall(frames.encode(wire.Hello((1, 1), "0.1.0", 1, "look", "admin").to_map(1)))
        for ask in range(ASKS_WAITING):
            sock.sendall(frames.encode(calls[ask % len(calls)].to_map(ask + 2)))
        ready.register(sock, selectors.EVENT_READ, (frames.Decoder(), calls[number % len(calls)]))
    on()
    while True:
        for key, _ in ready.select():
            decoder, call = key.data
            for answer in decoder.feed(key.fileobj.recv(1 << 20)):
                if answer["t"] == "error" and "PARAMS" in answer["error"]["code"]:
                    os._exit(1)
                key.fileobj.sendall(frames.encode(call.to_map(2)))


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
    "deaf": deaf, "flood": flood, "hoard": hoard, "look": look, "reserve": reserve,
}  # fmt: skip

if __name__ == "__main__":
    if sys.argv[1] == "list":
        print(json.dumps(sorted(WAYS)))
    else:
        WAYS[sys.argv[1]](kvd.connect(sys.argv[2], client=f"misuser-{sys.argv[1]}"))
