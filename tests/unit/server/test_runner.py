"""Rings to events to answers: every field checked, facts looked up, turns bounded, clients apart."""

import random
import struct
from array import array

import pytest

from kvd.errors import CapacityError, UsageError
from kvd.server import runner as runners
from kvd.shm import messages
from kvd.shm.messages import Cq, Granted, Published, Sq


def test_reserve_publish_and_match(world, keys):
    one = world().attach()
    chain = keys(4)
    reservation, places, statuses = one.reserve(chain)
    assert set(statuses) == {Granted.GRANTED}
    assert len(set(places)) == 4
    assert one.publish(reservation, 4) == [Published.PUBLISHED] * 4
    assert one.native.match(b"".join(chain)) == 4


def test_facts_are_looked_up_for_each_item(world, keys):
    """Without the probe's `present`, what is there would be granted again."""
    one = world().attach()
    chain = keys(3)
    one.store(chain[:2])
    reservation, _, statuses = one.reserve(chain)
    assert list(statuses) == [Granted.PRESENT, Granted.PRESENT, Granted.GRANTED]
    assert one.publish(reservation, 1, first=2) == [Published.PUBLISHED]


def test_the_parent_is_found(world, keys):
    """A family reserved behind a parent that is here ends in the parent's run; its facts are not the parent's."""
    here = world()
    one = here.attach()
    chain = keys(2)
    one.store(chain[:1])
    reservation, _, statuses = one.reserve(chain[1:], parent=chain[0])
    assert list(statuses) == [Granted.GRANTED]
    one.publish(reservation, 1)
    rows, _ = here.domain.core.families(None, 0, 10)
    assert sorted(row.depth for row in rows) == [0, 1]


@pytest.mark.parametrize("size", [0, 1, 3])
def test_ping(world, size):
    one = world().attach()
    if size == 0:
        assert one.ask(Sq.PING, b"") == (Cq.PONG, b"")
    else:
        one.submit(Sq.PING, b"x" * size)
        one.world.runner.drain(one.client)
        assert not one.client.attached


@pytest.mark.parametrize(
    ("kind", "payload"),
    [
        (9, b""),
        (Sq.RESERVE, b""),
        (Sq.RESERVE, bytes(56)),
        (Sq.PUBLISH, bytes(15)),
        (Sq.PUBLISH, struct.pack("<QII", 1, 0, 2) + bytes(17)),
        (Sq.PUBLISH, struct.pack("<QII", 1, 0, 1) + bytes(8) + b"\2"),
        (Sq.ABORT, bytes(15)),
    ],
)
def test_a_malformed_payload_disconnects_this_client_only(world, keys, kind, payload):
    here = world()
    bad, good = here.attach(name="bad"), here.attach(name="good")
    bad.submit(kind, payload)
    here.serve(bad, good)
    assert not bad.client.attached
    assert bad.client.hostile
    assert good.store(keys(1)) == [Published.PUBLISHED]
    assert here.clients.protocol_errors == 1


@pytest.mark.slow
def test_random_payloads_never_reach_the_books(world, keys):
    """Whatever bytes come, the daemon answers or disconnects, and the books stay right."""
    seed = 20240817
    print("seed", seed)
    random.seed(seed)
    here = world(clients={"max": 64})
    for _ in range(60):
        one = here.attach()
        one.store(keys(2, seed=random.randrange(1000)))
        valid = [
            messages.pack_publish(random.randrange(4), random.randrange(4), array("Q", [1] * 3), b"\1\0\1"),
            messages.pack_abort(random.randrange(4), random.randrange(4), random.randrange(9)),
            messages.pack_reserve(
                messages.Reserve(
                    random.getrandbits(64), random.randrange(3), random.randrange(3), 1, random.random() < 0.5,
                    random.choice([messages.NO_PARENT, bytes(31) + b"\7"]),
                    (messages.Member(0, random.choice([1, 64, 4096, 1 << 37])),), b"".join(keys(3)),
                )
            ),
        ]  # fmt: skip
        kinds = [Sq.PUBLISH, Sq.ABORT, Sq.RESERVE]
        for _ in range(20):
            if not one.client.attached:
                break
            which = random.randrange(3)
            payload = bytearray(valid[which])
            if random.random() < 0.5:
                payload[random.randrange(len(payload))] ^= 1 << random.randrange(8)
            one.submit(kinds[which], bytes(payload))
            here.serve(one)
            one.native.poll(64)
        here.domain.core.validate()


def test_a_hostile_tail_disconnects_before_anything_is_read(world, keys):
    here = world()
    bad, good = here.attach(), here.attach()
    with open(f"/proc/self/fd/{bad.client.region_fd}", "r+b", buffering=0) as region:
        region.seek(192)  # sq_tail
        region.write(struct.pack("<Q", 1 << 40))
    here.serve(bad, good)
    assert not bad.client.attached
    assert good.store(keys(1)) == [Published.PUBLISHED]


@pytest.mark.slow
def test_a_scribbled_region_harms_its_owner_only(world, keys):
    """Random words over header, rings, touches and hazards: others are served, the books stay right."""
    seed = 77001
    print("seed", seed)
    random.seed(seed)
    here = world(
        clients={"max": 200, "hazards_max": 64, "touch_records": 64, "sq_size": "512KiB", "cq_size": "512KiB"}
    )
    good = here.attach(name="good")
    for round_number in range(60):
        bad = here.attach(name="bad")
        bad.store(keys(2, seed=round_number))
        with open(f"/proc/self/fd/{bad.client.region_fd}", "r+b", buffering=0) as region:
            size = region.seek(0, 2)
            for _ in range(20):
                # Cursors, sleeping words and marks by name, the rings' first frames, anything.
                somewhere = random.choice(
                    [4096, 4096 + 16 * random.randrange(64), random.randrange(size - 8) & ~7]
                )
                region.seek(
                    random.choice([128, 192, 192, 256, 320, 384, 448, 512, 576, somewhere, somewhere])
                )
                word = random.choice([0, 8 * random.randrange(1 << 13), 0xFFFFFFFF, random.getrandbits(64)])
                region.write(struct.pack("<Q", word))
                here.serve(bad, good)
                here.runner.tick()
                # Its answers are pushed into what it scribbled, too.
                if bad.client.attached:
                    bad.submit_or_not(Sq.PING)
                    here.serve(bad)
        assert good.store(keys(1, seed=1000 + round_number)) == [Published.PUBLISHED]
        here.domain.core.validate()
    assert here.clients.protocol_errors > 10


def test_usage_errors_answer_and_keep_the_client(world, keys):
    one = world().attach()
    with pytest.raises(UsageError, match="namespace 99 is not registered"):
        one.reserve(keys(1), namespace=99)
    with pytest.raises(UsageError, match="code is 4096; allowed: the canonical 0"):
        one.reserve(keys(1), split=1 << 12)  # dealt out over one context rank: no split is written so
    assert one.store(keys(1)) == [Published.PUBLISHED]


def test_an_object_larger_than_a_segment_is_refused_by_name(world, keys):
    one = world().attach()
    with pytest.raises((UsageError, CapacityError), match=str(9 << 20)):
        one.reserve(keys(1), size=9 << 20)
    assert one.client.attached


def test_a_read_only_client_cannot_reserve(world, keys):
    one = world().attach(writable=False)
    with pytest.raises(UsageError):
        one.reserve(keys(1))


def test_a_busy_client_does_not_keep_others_waiting(world, monkeypatch):
    """A turn ends after its time; the rest of the ring waits until the loop went round."""
    monkeypatch.setattr(runners, "TURN_NS", 0)
    here = world()
    busy = here.attach()
    for _ in range(100):
        busy.submit(Sq.PING, b"")
    here.runner.drain(busy.client)
    assert busy.client.draining
    assert here.runner.frames == 1
    here.serve(busy)
    assert here.runner.frames == 100
    assert len(busy.native.poll(1000)) == 100


def test_a_full_ring_of_answers_holds_the_asks_back(world):
    """Answers wait in order, nothing is dropped, the daemon's queue is bounded by what one look at the ring took."""
    here = world(clients={"cq_size": "512KiB"})
    one = here.attach()
    asked = 0
    answers = []
    while not one.client.replies:
        one.submit(Sq.PING, b"")
        asked += 1
        here.serve(one)
    for _ in range(100):
        one.submit(Sq.PING, b"")
        asked += 1
    here.serve(one)
    assert len(one.client.replies) == 1
    assert len(one.client.inbox) < runners.POP_FRAMES
    while True:
        got = one.native.poll(64)
        answers += [op for _, op, _ in got]
        if not got and not one.client.replies:
            break
        here.serve(one)
    assert answers == list(range(1, asked + 1))


def test_touches_of_impossible_entries_are_dropped(world, keys):
    here = world()
    one = here.attach()
    one.store(keys(2))
    one.native.match(b"".join(keys(2)), 5)
    with open(f"/proc/self/fd/{one.client.region_fd}", "r+b", buffering=0) as region:
        region.seek(56)
        (touch_offset,) = struct.unpack("<Q", region.read(8))
        region.seek(touch_offset + 16)
        region.write(struct.pack("<I", 0xFFFFFFF0))
    here.runner.tick()
    here.domain.core.validate()
    assert here.domain.core.counters["touches"] == 0
    one.native.match(b"".join(keys(2)), 5)
    here.runner.tick()
    assert here.domain.core.counters["touches"] == 1


def lease_limited(world, keys, over):
    here = world(clients={"leased_max": "4KiB", "leased_over": over})
    one = here.attach()
    one.store(keys(2))
    return here, one, one.native.acquire(b"".join(keys(2)))


def test_leases_over_the_limit_are_reported(world, keys):
    here, one, leases = lease_limited(world, keys, "report")
    here.runner.tick()
    assert one.client.over_leased
    assert one.client.leased_bytes == 8192
    assert one.store(keys(1, seed=9)) == [Published.PUBLISHED]
    leases.release()
    here.runner.tick()
    assert not one.client.over_leased


def test_leases_over_the_limit_refuse_reservations_until_released(world, keys):
    here, one, leases = lease_limited(world, keys, "refuse")
    here.runner.tick()
    with pytest.raises(CapacityError, match="8192 B, more than its limit of 4096 B"):
        one.reserve(keys(1, seed=9))
    leases.release()
    assert one.store(keys(1, seed=9)) == [Published.PUBLISHED]
    assert here.runner.lease_refusals == 1


def test_clear_answers_with_what_it_could_not_drop(world, keys):
    here = world()
    one = here.attach()
    one.store(keys(3))
    leases = one.native.acquire(b"".join(keys(1)))
    done = []
    from kvd.core import events as ev

    here.runner.administrate(lambda op: ev.Clear(op, None), done.append)
    while not done:
        here.serve(one)
        here.loop.run_until_complete(_turn())
    assert done[0].result["families"] == 2
    leases.release()


async def _turn():
    return None
