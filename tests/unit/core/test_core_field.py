"""Faults that systems of this kind are known for, at the level of the core. Each test is named after its row."""

from __future__ import annotations

import random

import pytest
from core_world import MIB, World, chain, key8, key_of

from kvd.core import events as ev
from kvd.core.core import CoreConfig
from kvd.core.policy import policy_names
from kvd.types import Member

TWO = (Member(0, 64 * 1024), Member(1, 64 * 1024))


def test_a5_ending_a_reservation_never_publishes() -> None:
    """Fails if abort, death or a partial publication made anything visible that was not published by name."""
    world = World()
    keys = chain("a5", 4)
    for end in ("abort", "death", "partial"):
        reply = world.reserve(0, keys)
        assert isinstance(reply, ev.ReservedReply)
        if end == "abort":
            assert world.abort(0, reply.reservation) == 4
        elif end == "death":
            world.gone(0)
            world.attach(0)
        else:
            world.fill(reply.reservation)
            assert list(world.publish(0, reply.reservation, 0, 4, include=bytes([0, 0, 0, 0]))) == [5] * 4
            assert world.abort(0, reply.reservation) == 4
        assert not world.index
        assert world.publish(0, reply.reservation, 0, 4) == bytes([ev.PublishStatus.GONE]) * 4
        assert not world.index
    assert world.pool("free_bytes") == world.pool("usable_bytes")


def test_b2_ten_thousand_random_aborts_leave_nothing() -> None:
    """Fails if any way out of a reservation keeps a slot, a record, a promise, a claim or a pending key."""
    seed = 20261
    print(f"seed {seed}")
    draw = random.Random(seed)
    world = World(families_max=256, records_max=512, segments=[64 * MIB], audit=False, clients=4)
    live: list[tuple[int, int]] = []
    ended = 0
    while ended < 10_000:
        client = draw.randrange(4)
        begin = draw.randrange(40)
        keys = chain(draw.randrange(30), draw.randrange(1, 4), begin)
        parent = key_of((draw.randrange(30), begin - 1)) if begin else None
        reply = world.reserve(
            client, keys, members=TWO[: draw.randrange(1, 3)], family_members=2, parent=parent
        )
        if isinstance(reply, ev.ReservedReply) and reply.reservation:
            live.append((client, reply.reservation))
        while len(live) > draw.randrange(20):
            owner, number = live.pop(draw.randrange(len(live)))
            if draw.random() < 0.02:
                world.fill(number)
                world.publish(owner, number)
            else:
                ended += world.abort(owner, number)
        if draw.random() < 0.002:
            world.gone(client)
            world.attach(client)
            live = [one for one in live if one[0] != client]
    for owner, number in live:
        world.abort(owner, number)
    world.core.validate()
    statistics = world.core.statistics()
    assert statistics["reservations"] == statistics["families_promised"] == 0
    assert world.pool("reserved_bytes") == 0
    world.clear()
    assert world.pool("free_bytes") == world.pool("usable_bytes")


def test_b3_what_is_given_back_is_named_by_its_reservation() -> None:
    """Fails if giving back went by key: another client's reservation of the same keys must not notice."""
    world = World()
    keys = chain("b3", 3)
    mine, other = world.reserve(0, keys), world.reserve(1, keys)
    assert isinstance(mine, ev.ReservedReply)
    assert isinstance(other, ev.ReservedReply)
    assert world.abort(1, mine.reservation) == 0, "not its own"
    assert world.abort(0, mine.reservation) == 3
    assert world.abort(0, mine.reservation) == 0, "over"
    world.fill(other.reservation)
    assert list(world.publish(1, other.reservation)) == [0, 0, 0]
    world.check_content()


@pytest.mark.parametrize("policy", policy_names)
def test_b5_probing_never_protects(policy: str) -> None:
    """Fails if a match kept a family from leaving: with everything just probed, a full pool still gives room."""
    world = World(segments=[4 * MIB], config=CoreConfig(policy=policy))
    for at in range(8):
        world.write(0, chain(at, 8))
    for at in range(8):
        assert world.touch(1, chain(at, 8), request=100 + at) == 8
    assert world.pool("free_bytes") == 0
    assert world.write(0, chain("new", 32)) == [0] * 32
    assert world.core.counters["capacity_refusals"] == 0


@pytest.mark.parametrize("percent", [60, 90, 100])
@pytest.mark.parametrize("size", [3 * MIB, 7 * MIB, 16 * MIB])
def test_b7_a_large_object_finds_room(percent: int, size: int) -> None:
    """Fails if room were made by watermark, or only among slots of the same size."""
    world = World(segments=[32 * MIB, 32 * MIB], families_max=4096, records_max=8192)
    sizes = (64 * 1024, 300 * 1024, 1 * MIB)
    at = 0
    while world.pool("used_bytes") < 64 * MIB * percent // 100 and not world.core.counters["evictions"]:
        world.write(0, chain(at, 2), size=sizes[at % 3])
        at += 1
    assert world.write(0, [key_of("large")], size=size) == [0]
    assert world.has(key_of("large"))
    world.check_content()


def test_b7_room_is_found_around_held_pinned_and_reserved_slots() -> None:
    """Fails if a window were chosen without looking at what must stay in it."""
    world = World(segments=[32 * MIB], families_max=4096, records_max=8192)
    for at in range(16):
        world.write(0, chain(at, 2), size=MIB)
    world.hold(1, chain(0, 2))
    world.pin(chain(5, 2), ev.PinKind.HARD)
    assert world.write(0, [key_of("large")], size=6 * MIB) == [0]
    for key in (*chain(0, 2), *chain(5, 2)):
        assert world.has(key)
    world.check_content()


def test_b7_when_nothing_can_leave_the_refusal_says_what_holds_the_space() -> None:
    """Fails if a refusal came without its reasons, or left anything behind."""
    world = World(segments=[8 * MIB])
    for at in range(8):
        world.write(0, chain(at, 1), size=MIB)
        world.hold(1, chain(at, 1))
    reply = world.reserve(0, [key_of("more")], size=MIB)
    assert isinstance(reply, ev.ErrorReply)
    assert reply.error.fields["leased_bytes"] == 8 * MIB
    assert reply.error.retry == "after"
    assert world.pool("reserved_bytes") == 0
    world.hazards[1].clear()
    assert world.write(0, [key_of("more")], size=MIB) == [0]


@pytest.mark.parametrize("length", [32, 256, 2048])
def test_b7_the_numbers_of_a_refusal_add_up(length: int) -> None:
    """Fails if what lies before the leased end of a long chain, which nobody asks for, is not counted as leased."""
    world = World(segments=[8 * MIB], families_max=8192, records_max=16384, audit=False)
    half, quarter = length // 2, length // 4
    for at in range(8 * MIB // (4096 * length)):  # each forks half way: a run with two behind it
        prefix = chain(at, half)
        world.write(0, prefix, size=4096)
        world.hold(1, prefix)
        for branch in ("left", "right"):
            world.write(0, chain((at, branch), quarter), size=4096, parent=prefix[-1])
            world.hold(1, chain((at, branch), quarter))
    for size in (4096, MIB):
        reply = world.reserve(0, [key_of("more")], size=size)
        assert isinstance(reply, ev.ErrorReply)
        fields = reply.error.fields
        assert fields["leased_bytes"] == 8 * MIB
        parts = ("free", "leased", "pinned", "reserved", "limbo", "other")
        assert sum(int(str(fields[f"{part}_bytes"])) for part in parts) == fields["usable_bytes"]
    world.check_content()


def test_b7_pins_free_space_and_the_rest_are_in_the_sum_once() -> None:
    """Fails if bytes are counted twice: leased and pinned, or before what is leased and pinned."""
    world = World(segments=[8 * MIB])
    for at in range(6):
        world.write(0, chain(at, 1), size=MIB)
    world.pin(chain(0, 1), ev.PinKind.HARD)
    for at in range(4):
        world.hold(1, chain(at, 1))
    reply = world.reserve(0, chain("more", 5), size=MIB)
    assert isinstance(reply, ev.ErrorReply)
    fields = reply.error.fields
    assert fields["pinned_bytes"] == MIB
    assert fields["leased_bytes"] == 3 * MIB
    parts = ("free", "leased", "pinned", "reserved", "limbo", "other")
    assert sum(int(str(fields[f"{part}_bytes"])) for part in parts) == fields["usable_bytes"]
    assert all(int(str(fields[f"{part}_bytes"])) >= 0 for part in parts)


def test_b8_families_leave_as_a_whole() -> None:
    """Fails if eviction took one member of a family."""
    world = World(segments=[4 * MIB], families_max=512, records_max=1024)
    for at in range(40):
        world.write(0, chain(at, 3), members=TWO, family_members=2)
        for family in world.families.values():
            assert set(family.members) == {0, 1}
    assert world.core.counters["evictions"] > 0


def test_b8_a_family_nobody_completes_goes_first() -> None:
    """Fails if a half-written family outlived complete ones although nobody was writing the rest."""
    world = World(segments=[4 * MIB])
    world.write(0, chain("old", 8), members=TWO, family_members=2)
    world.write(0, chain("half", 4), members=TWO[:1], family_members=2)
    world.sleep(2)
    world.write(0, chain("fill", 44), size=64 * 1024)
    assert world.pool("free_bytes") == 0
    world.write(0, chain("new", 4))
    assert world.evictions[-1][0] is ev.Reason.PARTIAL
    assert not any(world.has(key) for key in chain("half", 4))
    assert all(world.has(key) for key in chain("old", 8))


def test_b8_a_rank_that_is_a_moment_behind_finds_its_families() -> None:
    """Fails if the families of the first rank left while the second was about to write its share of them."""
    world = World(segments=[4 * MIB])
    world.write(0, chain("fill", 56))
    world.write(0, chain("tp", 8), members=TWO[:1], family_members=2)
    assert world.pool("free_bytes") == 0
    assert world.write(1, chain("tp", 8), members=TWO[1:], family_members=2) == [0] * 8
    assert world.touch(0, chain("tp", 8)) == 8


def test_b9_keys_of_a_dead_writer_are_writable_at_once() -> None:
    """Fails if a key stayed blocked, or the dead writer's slots stayed taken."""
    world = World(segments=[4 * MIB])
    keys = chain("b9", 32)
    for _ in range(5):
        reply = world.reserve(0, keys)
        assert isinstance(reply, ev.ReservedReply)
        world.fill(reply.reservation)
        assert world.core.miss_cause(key8(keys[0]), world.now_ns) == "being written"
        skipped = world.reserve(1, keys, skip_pending=True)
        assert isinstance(skipped, ev.ReservedReply)
        assert set(skipped.statuses) == {ev.ReserveStatus.PENDING}
        world.gone(0)
        world.attach(0)
        assert world.pool("reserved_bytes") == 0
    assert world.write(1, keys, skip_pending=True) == [0] * 32


@pytest.mark.slow
def test_b11_unique_keys_meet_a_bound() -> None:
    """Fails if anything but what is stored grew: 50 times the index of keys that are never asked for again."""
    world = World(
        families_max=128, records_max=128, segments=[8 * MIB], audit=False, config=CoreConfig(ghosts=256)
    )
    for at in range(400):
        assert world.write(0, chain(at, 16), size=4096, request=at + 1) == [0] * 16
        if at % 50 == 0:
            world.core.validate()
    statistics = world.core.statistics()
    assert statistics["families"] == len(world.index) <= 128
    assert statistics["ghosts"] <= 512  # type: ignore[operator]
    assert statistics["requests_known"] <= 4096  # type: ignore[operator]
    books = world.core._books
    assert books.forest.entries.fresh <= 128
    assert books.records.fresh <= 128
    assert books.forest.run_numbers.fresh <= 4 + 129
    assert len(books.forest.namespaces) == 1
