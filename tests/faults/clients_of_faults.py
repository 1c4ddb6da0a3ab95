"""Client processes that are stopped and killed: ROLE SOCKET. They say what they did, one JSON value a line.

Run on the testing build, so that KVD_STOP_AT can stop them inside the native code; where the step lies between two
calls they stop themselves.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))

from faults_world import CHUNKS, SIZE, chain_of, namespace, pattern

import kvd
from kvd.shm import messages
from kvd.shm.messages import Sq
from kvd.types import Member

READ, WRITTEN = 1, 2  # seeds of the chains


def say(value: object) -> None:
    os.write(1, json.dumps(value).encode() + b"\n")


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def wait() -> None:
    """Until the test says something (or is gone)."""
    os.read(0, 100)


def right(leases: kvd.Leases) -> int:
    """How many of the leased chunks have exactly their bytes."""
    return sum(bytes(lease.view) == pattern(lease.identity) for lease in leases)


def reader(store: kvd.Store, *, pause: bool = False) -> None:
    ns = namespace(store)
    leases = ns.acquire(chain_of(ns, READ))
    if pause:
        view = leases[0].view
        half = bytes(view[: SIZE // 2])
        stop()
        assert half + bytes(view[SIZE // 2 :]) == pattern(leases[0].identity)
        view.release()
    say([len(leases), right(leases)])
    leases.release()
    say("released")
    wait()


def writer(store: kvd.Store, *, unread: bool = False, half: bool = False, pause: bool = False) -> None:
    ns = namespace(store)
    chain = chain_of(ns, WRITTEN)
    if unread:
        number = store.namespace_number(ns)
        ask = messages.Reserve(
            0, number, 0, 1, False, messages.NO_PARENT, (Member(0, SIZE),), bytes(chain.identities)
        )
        store.calls.post(Sq.RESERVE, messages.pack_reserve(ask))
        stop()
    writes = ns.reserve(chain, nbytes=SIZE)
    for position, identity in enumerate(chain):
        if half and position == CHUNKS // 2:
            writes[position].view[: SIZE // 2] = pattern(identity)[: SIZE // 2]
            stop()
        writes[position].fill(pattern(identity))
    if pause:
        stop()
    say([result.name for result in writes.publish()])
    wait()


def pushed(store: kvd.Store) -> None:
    """Pushes what it wrote as published, closes its sockets, stops."""
    ns = namespace(store)
    writes = ns.reserve(chain_of(ns, WRITTEN), nbytes=SIZE)
    writes.fill([pattern(identity) for identity in chain_of(ns, WRITTEN)])
    payload = writes._publication(writes._claim_publication(range(CHUNKS)))
    store.native.submit(Sq.PUBLISH, 1 << 20, payload)
    unplug()
    stop()


def asleep(store: kvd.Store) -> None:
    """The daemon is stopped by the test: the answer to the reservation does not come."""
    ns = namespace(store)
    store.namespace_number(ns)
    say("asks")
    wait()
    ns.reserve(chain_of(ns, WRITTEN), nbytes=SIZE, deadline_s=600)
    say("answered")


def parent(store: kvd.Store) -> None:
    """Holds leases and reservations; a forked child, which outlives it, keeps all its sockets open."""
    ns = namespace(store)
    leases = ns.acquire(chain_of(ns, READ))
    writes = ns.reserve(chain_of(ns, WRITTEN), nbytes=SIZE)
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    say(child)
    wait()
    del leases, writes


def unplug() -> None:
    """Close every socket in the sense that counts: the other side sees the end."""
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        try:
            is_socket = os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
        except FileNotFoundError:
            continue
        if is_socket:
            with socket.socket(fileno=os.dup(fd)) as one:
                one.shutdown(socket.SHUT_RDWR)


def unplugged(store: kvd.Store) -> None:
    """Reserves, closes its sockets, stops; goes on to write into its slots, which must still be its own."""
    ns = namespace(store)
    chain = chain_of(ns, WRITTEN)
    writes = ns.reserve(chain, nbytes=SIZE)
    unplug()
    say("unplugged")
    stop()
    for write, identity in zip(writes, chain, strict=True):
        write.fill(pattern(identity, salt=0xFF))
    say("written")
    wait()


ROLES = {
    "reader": reader,
    "reading": lambda store: reader(store, pause=True),
    "writer": writer,
    "unread": lambda store: writer(store, unread=True),
    "filled": lambda store: writer(store, pause=True),
    "pushed": pushed,
    "half": lambda store: writer(store, half=True),
    "asleep": asleep,
    "parent": parent,
    "unplugged": unplugged,
}

if __name__ == "__main__":
    ROLES[sys.argv[1]](kvd.connect(sys.argv[2], client=sys.argv[1]))
