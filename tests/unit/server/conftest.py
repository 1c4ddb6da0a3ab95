"""One domain, its clients and their runner in this process: real memory and rings, no socket, no daemon."""

import asyncio
import contextlib
import os
import socket
from array import array

import pytest

from kvd.config import ClientsConfig, Config, ObjectsConfig, PoolConfig, resolve
from kvd.core import events as ev
from kvd.layout.manifest import Manifest
from kvd.server import domain as domains
from kvd.server.app import MonotonicClock
from kvd.server.clients import Clients
from kvd.server.peer import identify
from kvd.server.runner import Runner
from kvd.shm import _native, messages
from kvd.types import Member

MANIFEST = {"model": "m", "revision": "r1", "dtype": "bfloat16", "fixed": "*", "tenant": "", "salt": ""}


class Attached:
    """Both sides of one client."""

    def __init__(self, world, writable=True, name="c"):
        self.world = world
        ours, theirs = socket.socketpair()
        with ours, theirs:
            peer = identify(ours)
        self.client, fds, self.wake = world.clients.attach(peer, name, writable=writable)
        self.native = _native.Client(fds[0], fds[1], fds[3:], writable)
        self.ops = 0
        self.asks_first = True  # for every number that it uses

    def submit(self, kind, payload):
        self.ops += 1
        assert self.native.submit(kind, self.ops, payload), "the ring of asks is full"
        return self.ops

    def submit_or_not(self, kind):
        """Push an empty ask, if the ring (whose words may be anything) takes it."""
        with contextlib.suppress(ValueError, RuntimeError):
            self.native.submit(kind, 1, b"")

    def ask(self, kind, payload):
        """Submit, let the daemon run, take the one answer: (kind, payload)."""
        op = self.submit(kind, payload)
        self.world.serve(self)
        ((answer, answered, body),) = self.native.poll(16)
        assert answered == op
        return answer, body

    def reserve(self, keys, size=4096, members=1, **changes):
        ask = {
            "request": 0,
            "namespace": self.world.namespace,
            "split": 0,
            "family_members": members,
            "skip_pending": False,
            "parent": messages.NO_PARENT,
            "members": tuple(Member(i, size) for i in range(members)),
            "keys": b"".join(keys),
        }
        ask.update(changes)
        if self.asks_first and ask["namespace"] in self.world.domain.namespaces.by_number:
            self.world.domain.namespaces.tell(self.client.peer, ask["namespace"])
        payload = messages.pack_reserve(messages.Reserve(**ask))
        kind, body = self.ask(messages.Sq.RESERVE, payload)
        if kind == messages.Cq.ERROR:
            raise messages.parse_error(body)
        assert kind == messages.Cq.RESERVED
        return messages.parse_reserved(body)

    def publish(self, reservation, count, first=0):
        payload = messages.pack_publish(reservation, first, array("Q", [7] * count), b"\1" * count)
        kind, body = self.ask(messages.Sq.PUBLISH, payload)
        assert kind == messages.Cq.PUBLISHED
        return list(messages.parse_published(body))

    def store(self, keys, **changes):
        reservation, _, statuses = self.reserve(keys, **changes)
        return self.publish(reservation, len(statuses)) if reservation else []

    def close(self):
        self.native.close()
        self.wake.close()


class World:
    """A domain without a daemon around it."""

    def __init__(self, loop, pool, clients, objects):
        self.loop = loop
        config = Config(
            pool=PoolConfig(size="8MiB", **pool),
            clients=ClientsConfig(**{"max": 4, **clients}),
            objects=ObjectsConfig(**objects),
        )
        sizes = resolve(config, 1 << 30, "the test")
        identity = domains.ProcessIdentity(bytes(16), os.getpid(), 1, 77, 1234567)
        self.failures = []
        self.domain = domains.create("default", config, sizes, identity, MonotonicClock(), [], hugetlb=False)
        self.clients = Clients(loop, self.domain, config, self.guard)
        self.runner = Runner(
            loop, self.domain, self.clients, leased_over=config.clients.leased_over, guard=self.guard
        )
        for segment in self.domain.segments:
            self.domain.step(ev.SegmentReady(segment.number, 0, segment.size_bytes))
        self.namespace = self.domain.namespaces.register(Manifest(**MANIFEST).encode(), "").number
        self.attached = []

    def guard(self, call, *args):
        call(*args)

    def turns(self, going_on):
        """Let the loop turn while this is so."""
        for _ in range(100_000):
            if not going_on():
                return
            self.loop.run_until_complete(asyncio.sleep(0))
        raise AssertionError("it does not end")

    def serve(self, *attached):
        """The daemon takes what these clients pushed, in as many turns as it likes."""
        for one in attached:
            self.runner.drain(one.client)
        while any(one.client.draining for one in attached):
            self.loop.run_until_complete(asyncio.sleep(0))

    def attach(self, **options):
        one = Attached(self, **options)
        self.attached.append(one)
        return one

    def close(self):
        for one in self.attached:
            one.close()
        for client in list(self.clients.by_slot.values()):
            if client.attached:
                self.clients.disconnect(client, None)
            self.loop.remove_reader(client.peer.pidfd)
            client.peer.close()
        self.domain.core.validate()


@pytest.fixture
def world():
    """Factory of worlds: world(pool={...}, clients={...})."""
    loop = asyncio.new_event_loop()
    made = []

    def make(pool=None, clients=None, objects=None):
        made.append(World(loop, pool or {}, clients or {}, objects or {}))
        return made[-1]

    yield make
    for one in made:
        one.close()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()


def identities(count, seed=0):
    """`count` distinct identities."""
    return [(seed * 1_000_003 + n + 1).to_bytes(8, "little") + bytes(24) for n in range(count)]


@pytest.fixture
def keys():
    """keys(count, seed=0): distinct identities."""
    return identities
