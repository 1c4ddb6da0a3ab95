"""The publisher of KV events on a domain without a daemon: overflow, what was there before, a thread that dies."""

from __future__ import annotations

import asyncio

import msgpack
import pytest

from kvd.config import EventsConfig
from kvd.server.event_view import View, short_hash
from kvd.server.supervise import Supervisor

zmq = pytest.importorskip("zmq", reason="pyzmq is not installed")

from kvd.server import events  # noqa: E402


@pytest.fixture
def publisher(world, tmp_path):
    """publisher(here, **config) -> Events of that world, not started."""
    made = []

    def make(here, **config):
        supervisor = Supervisor(lambda error: here.failures.append(error))
        where = f"ipc://{tmp_path}/events"
        section = EventsConfig(listen=where, replay_listen=f"{where}-replay", **config)
        made.append(events.Events(here.loop, here.domain, section, supervisor))
        return made[-1], supervisor

    yield make
    for one in made:
        one.close()


def asked(publisher, start=0):
    """What a subscriber that asks from `start` on believes to be stored, and the batches it got."""
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.connect(publisher.replay_address)
    dealer.send_multipart([b"", start.to_bytes(8, "big")])
    believed, batches = set(), 0
    try:
        while dealer.poll(10_000):
            _, _, sequence, payload = dealer.recv_multipart()
            if sequence == b"\xff" * 8:
                return believed, batches
            batches += 1
            for event in msgpack.unpackb(payload)[1]:
                match event["type"]:
                    case "BlockStored":
                        believed |= set(event["block_hashes"])
                    case "BlockRemoved":
                        believed -= set(event["block_hashes"])
                    case _:
                        believed.clear()
        pytest.fail("no answer")
    finally:
        context.destroy(linger=0)


def settled(here, publisher):
    """Let the loop walk to the end and the thread take what waits."""
    for _ in range(10_000):
        if publisher._walk_from is None and not publisher._queue:
            return asked(publisher)
        here.loop.run_until_complete(asyncio.sleep(0.001))
    pytest.fail("the queue does not empty")


def test_what_overflows_is_not_lost(world, keys, publisher):
    """Fails if the queue drops instead of walking the index, or if it grows beyond its bound."""
    here = world(pool={"families_max": 4096})
    told, _ = publisher(here, queue_max=16)
    one = here.attach()
    everything = []
    for number in range(120):  # nobody takes them: the thread does not run yet
        chain = keys(3, seed=number)
        one.store(chain)
        everything += chain
        assert len(told._queue) <= 16
    assert told.counters["event_overflows"] > 0
    told.start()
    assert settled(here, told)[0] == {short_hash(key) for key in everything}
    assert told.counters["event_walks"] >= 2


def test_what_was_there_before_is_told_first(world, keys, publisher):
    here = world(pool={"families_max": 4096})
    chain = keys(200)
    here.attach().store(chain)
    told, _ = publisher(here)
    told.start()
    believed, batches = settled(here, told)
    assert believed == {short_hash(key) for key in chain}
    assert batches >= 1


def test_a_sequence_that_is_kept_no_more_is_answered_by_everything(world, keys, publisher, monkeypatch):
    """Fails if a subscriber that missed more than is kept gets only what is."""
    monkeypatch.setattr(events, "BATCHES_KEPT", 2)
    here = world(pool={"families_max": 4096})
    told, _ = publisher(here)
    told.start()
    one, everything = here.attach(), []
    for number in range(30):
        chain = keys(2, seed=number)
        one.store(chain)
        everything += chain
        assert settled(here, told)[0] == {short_hash(key) for key in everything}
    assert asked(told, told._sequence)[1] == 0
    assert asked(told, told._sequence - 1)[1] == 1


def test_a_thread_that_dies_ends_events_and_nothing_else(world, keys, publisher, monkeypatch):
    def broken(*_):
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(View, "published", broken)
    here = world()
    told, supervisor = publisher(here)
    told.start()
    one = here.attach()
    one.store(keys(2))
    told._thread.join(10)
    here.loop.run_until_complete(asyncio.sleep(0))
    assert supervisor.health["events"].state == "failed"
    assert "broken on purpose" in supervisor.health["events"].reason
    assert here.failures == []
    one.store(keys(2, seed=1))
    assert not told._queue
