"""KV events over ZMQ: what a router learns, in vLLM's form, and how it gets right again after a gap.

A subscriber here is a plain set of hashes that does what events say. It must equal the set of families that are whole,
whatever happened in between.
"""

from __future__ import annotations

import random
from array import array
from typing import Any

import msgpack
import pytest

import kvd
from kvd.core import events as ev
from kvd.server.event_view import Row, View, short_hash

zmq = pytest.importorskip("zmq", reason="pyzmq is not installed")

CHUNK = 16
WAIT_MS, LOOK_MS = 10_000, 50


class Router:
    """A subscriber: `view` is what it believes to be stored; `gaps` counts sequences it did not get."""

    def __init__(self, publisher: str, replayer: str) -> None:
        self.context = zmq.Context()
        self.sub = self.context.socket(zmq.SUB)
        self.sub.connect(publisher)
        self.sub.setsockopt(zmq.SUBSCRIBE, b"kvd")
        self.dealer = self.context.socket(zmq.DEALER)
        self.dealer.connect(replayer)
        self.view: dict[int, int | None] = {}
        self.next, self.gaps, self.epoch, self.cleared = 0, 0, "", 0
        self.seen: list[dict[str, Any]] = []

    def apply(self, payload: bytes) -> None:
        stamp, events, rank, epoch = msgpack.unpackb(payload)
        assert isinstance(stamp, float)
        assert rank is None
        assert self.epoch in ("", epoch)
        self.epoch = epoch
        self.seen += events
        for event in events:
            match event["type"]:
                case "BlockStored":
                    parent = event["parent_block_hash"]
                    for one in event["block_hashes"]:
                        self.view[one], parent = parent, one
                case "BlockRemoved":
                    for one in event["block_hashes"]:
                        del self.view[one]
                case "AllBlocksCleared":
                    self.view.clear()
                    self.cleared += 1

    def take(self) -> None:
        """One batch. A gap is counted, and asked for again; so is what may have come before the subscription."""
        if not self.sub.poll(LOOK_MS):
            self.resync(self.next)
            return
        topic, sequence, payload = self.sub.recv_multipart()
        number = int.from_bytes(sequence, "big")
        assert topic == b"kvd"
        if number < self.next:
            return
        if number > self.next:
            self.gaps += 1
            self.resync(self.next)
        else:
            self.apply(payload)
            self.next = number + 1

    def resync(self, start: int) -> int:
        """Ask for everything from a sequence on; returns how many batches came."""
        self.dealer.send_multipart([b"", start.to_bytes(8, "big")])
        count = 0
        while True:
            assert self.dealer.poll(WAIT_MS), "no answer"
            _, _, sequence, payload = self.dealer.recv_multipart()
            if sequence == b"\xff" * 8:
                return count
            count += 1
            if payload.find(b"AllBlocksCleared") < 0:
                assert int.from_bytes(sequence, "big") >= start, "not asked for"
            self.apply(payload)
            self.next = int.from_bytes(sequence, "big") + 1

    def until(self, wanted: set[int]) -> None:
        for _ in range(1000):
            if set(self.view) == wanted:
                return
            self.take()
        pytest.fail(f"{len(self.view)} families after 1,000 batches, wanted {len(wanted)}")

    def close(self) -> None:
        self.context.destroy(linger=0)


@pytest.fixture
def world(daemon: Any) -> Any:
    opened: list[Any] = []

    def make(**options: Any) -> tuple[Any, kvd.Namespace, Router]:
        pool = options.pop("pool", {"size": "8MiB"})
        running = daemon(
            pool=pool,
            events={"listen": "ipc://@kvd-test-" + (name := random.randbytes(6).hex()),
                    "replay_listen": f"ipc://@kvd-test-replay-{name}", **options},
        )  # fmt: skip
        router = Router(f"ipc://@kvd-test-{name}", f"ipc://@kvd-test-replay-{name}")
        store = kvd.connect(running.socket)
        opened.extend((store, router))
        manifest = kvd.Manifest(model="m", revision="1", dtype="float32", fixed="*", tenant="", salt="")
        return running, store.namespace(manifest), router

    yield make
    for one in opened:
        one.close()


def write(namespace: kvd.Namespace, tokens: list[int], nbytes: int = 4096) -> list[int]:
    chain = namespace.chain(tokens, CHUNK)
    with namespace.reserve(chain, nbytes=nbytes) as writes:
        writes.fill([bytes(nbytes)] * len(chain))
        writes.publish()
    return [short_hash(identity) for identity in chain]


@pytest.mark.slow
def test_stored_removed_and_cleared_reach_a_subscriber(world: Any) -> None:
    running, namespace, router = world()
    first = write(namespace, list(range(5 * CHUNK)))
    router.resync(0)  # a subscription takes effect some time after connect: what came before is asked for
    router.until(set(first))
    assert [router.view[one] for one in first] == [None, *first[:-1]]
    event = router.seen[0]
    assert (event["type"], event["medium"], event["token_ids"]) == ("BlockStored", "CPU", [])
    assert event["namespace"] == namespace.manifest.short
    longer = write(namespace, list(range(5 * CHUNK)) + [7] * 2 * CHUNK)
    router.until(set(longer))
    assert router.view[longer[5]] == first[-1]
    everything = set(longer)
    for number in range(200):  # more than the pool holds
        everything |= set(write(namespace, [1000 + number] * 2 * CHUNK, 64 << 10))
        if number % 40 == 39:
            router.until(stored(running))
    assert any(event["type"] == "BlockRemoved" for event in router.seen)
    assert set(router.view) < everything
    running.call("clear")
    router.until(set())
    assert router.cleared == 1
    assert router.seen[-1] == {"type": "AllBlocksCleared"}


def stored_keys(running: Any) -> list[bytes]:
    """Families that are whole, as the daemon's own books have them."""
    keys: list[bytes] = []
    start: int | None = 0
    while start is not None:
        answer = running.call("ls", start=start, limit=1000)
        keys += [bytes.fromhex(row["key"]) for row in answer["families"] if not row["missing"]]
        start = answer["next"]
    return keys


def stored(running: Any) -> set[int]:
    return {short_hash(key) for key in stored_keys(running)}


def test_a_family_is_told_when_its_last_member_is_there(world: Any) -> None:
    """Fails if the first member of a family is enough, or an optional one is waited for."""
    _, namespace, router = world()
    chain = namespace.chain(list(range(2 * CHUNK)), CHUNK)
    for member in (1, 2, 0):
        with namespace.reserve(chain, members=[kvd.Member(member, 256)], family_members=2) as writes:
            writes.fill([bytes(256)] * 2)
            writes.publish()
        router.resync(router.next)
        if member:
            assert not router.view
    router.until({short_hash(identity) for identity in chain})


@pytest.mark.slow
def test_a_router_that_missed_events_or_came_late_gets_right_again(world: Any) -> None:
    running, namespace, router = world()
    router.resync(0)
    write(namespace, list(range(3 * CHUNK)))
    router.until(stored(running))
    router.next -= 1  # as if the last batch had been lost on the way
    write(namespace, [5] * 3 * CHUNK)
    while not router.gaps:
        router.next = 0 if router.next == 0 else router.next - 1
        write(namespace, [random.Random(router.next).randrange(1000)] * CHUNK)
        router.take()
    router.until(stored(running))
    assert router.gaps >= 1


@pytest.mark.slow
def test_a_daemon_without_a_subscriber_or_with_one_that_does_not_read_goes_on(world: Any) -> None:
    running, namespace, router = world()
    for number in range(400):
        write(namespace, [number] * 4 * CHUNK, 256)
    assert running.call("status")["counters"]["event_batches"] > 0
    router.resync(0)
    router.until(stored(running))
    assert running.call("health")["parts"]["events"]["state"] == "ok"


def test_an_address_that_cannot_be_used_is_refused_by_name(daemon: Any) -> None:
    running = daemon(events={"listen": "tcp://127.0.0.1:nonsense"}, wait=False)
    running.expected_codes = {78}
    assert running.wait() == 78
    assert "events.listen" in running.log_text()


# -- the view by itself -------------------------------------------------------------------------------------


def played(seed: int) -> tuple[View, dict[int, bytes], list[dict[str, Any]]]:
    """A view over 64 entries after random publications, evictions and walks; what is whole; all events."""
    rng = random.Random(seed)
    view, whole, told = View(64, str), dict[int, bytes](), list[dict[str, Any]]()
    half: dict[int, bytes] = {}
    for _ in range(400):
        match rng.randrange(4):
            case 0 | 1:
                entry, key = rng.randrange(64), rng.randbytes(32)
                if entry in whole:
                    continue
                if entry in half:
                    key, members = half.pop(entry), bytes([1])
                else:
                    members = rng.choice([bytes([0]), bytes([0, 1]), bytes([0, 1, 2])])
                (half if members == bytes([0]) else whole)[entry] = key
                answer = ev.Published(
                    1, bytes(len(members)), memoryview(array("I", [entry] * len(members))), b"", 0
                )
                parents = array("I", [ev.NONE] * len(members))
                effect = ev.DoPublish(
                    1, 0, key * len(members), members, 0, 2, array("I"), array("Q"), array("I"), 3, parents
                )
                told += view.published(effect, answer)
            case 2:
                gone = [entry for entry in rng.sample(range(64), 5) if entry in whole or entry in half]
                for entry in gone:
                    whole.pop(entry, None)
                    half.pop(entry, None)
                freed = memoryview(array("I", gone))
                empty = memoryview(array("I"))
                out = ev.Evicted(1, freed, empty, empty, empty, empty)
                told += view.evicted(ev.DoEvict(1, array("I", gone), ev.Reason.SPACE, withdraw=False), out)
            case _ if rng.random() < 0.1:
                told.append(view.forget())
                rows = [Row(e, k, ev.NONE, 3, 0) for e, k in whole.items()]
                rows += [Row(e, k, ev.NONE, 3, 1) for e, k in half.items()]
                told += view.walked(rows)
                told += view.walked(rows[::2])  # again: says nothing new
    return view, whole, told


def follow(events: list[dict[str, Any]]) -> set[int]:
    believed: set[int] = set()
    for event in events:
        match event["type"]:
            case "BlockStored":
                assert not believed & set(event["block_hashes"]), "told twice"
                believed |= set(event["block_hashes"])
            case "BlockRemoved":
                assert believed >= set(event["block_hashes"]), "removed what was not told"
                believed -= set(event["block_hashes"])
            case _:
                believed.clear()
    return believed


@pytest.mark.parametrize("seed", range(20))
def test_events_say_what_is_whole_whatever_happens(seed: int) -> None:
    view, whole, told = played(seed)
    expected = {short_hash(key) for key in whole.values()}
    assert follow(told) == expected
    assert follow([{"type": "AllBlocksCleared"}, *view.snapshot()]) == expected
    assert view.told == len(expected)
