"""The rankings, and the forest they rank."""

from __future__ import annotations

import random
from array import array

import pytest
from core_world import MIB, World, chain, key_of

from kvd.core import events as ev
from kvd.core.core import CoreConfig
from kvd.core.policy import PROBATION, PROTECTED, Lru, Slru, Value, make, value_window_runs
from kvd.errors import ConfigError
from kvd.types import Member


def runs_of(world: World, keys: list[bytes]) -> list[int]:
    forest = world.core._books.forest
    return [forest.run_of[world.index[key]] for key in keys]


def test_lru_orders_by_last_touch() -> None:
    lru = Lru()
    for run in (4, 5, 6, 7):
        lru.added(run, 10)
    lru.refreshed(4)
    lru.reused(6, 10)
    assert list(lru.victims()) == [5, 7, 4, 6]
    lru.removed(7, 10)
    assert list(lru.victims()) == [5, 4, 6]
    assert lru.list_bytes[PROBATION] == 30


def test_slru_protects_what_another_request_asked_for_up_to_its_share() -> None:
    sizes = array("Q", [0, 0, 0, 0, 10, 10, 10, 10, 10])
    slru = Slru(0.25)
    slru.sizes_are(sizes)
    slru.capacity_bytes = 80
    for run in range(4, 9):
        slru.added(run, 10)
    slru.reused(4, 10)
    slru.reused(5, 10)
    assert list(slru.runs(PROTECTED)) == [4, 5]
    slru.reused(6, 10)
    assert list(slru.runs(PROTECTED)) == [5, 6]
    assert list(slru.victims()) == [7, 8, 4, 5, 6], (
        "the coldest of the protected falls back behind the newest"
    )
    assert slru.list_bytes[:2] == [30, 20]


def value_of(sizes: list[int], chunks: list[int], protected_share: float = 0.25) -> Value:
    """A ranking of so many runs, numbered from 4 on."""
    value = make("value", protected_share, array("Q", [0] * 4 + sizes), [()] * 4 + [range(n) for n in chunks])
    assert isinstance(value, Value)
    value.capacity_bytes = sum(sizes)
    for run, size in enumerate(sizes, start=4):
        value.added(run, size)
    return value


def test_the_bytes_that_win_least_leave_first() -> None:
    """Fails if victims come in the order of age alone: run 4 is the oldest."""
    value = value_of([10, 80, 20, 20], [1, 1, 4, 1])
    assert list(value.victims()) == [5, 7, 4, 6], (
        "a chunk in 80 B, in 20, in 10, in 5; of equals the coldest first"
    )
    assert list(value_of([10] * 4, [1] * 4).victims()) == [4, 5, 6, 7]


def test_reuse_counts_and_fades() -> None:
    value = value_of([10] * 8, [1] * 8)
    for _ in range(5):
        value.reused(4, 10)
    for run in (5, 6):
        value.reused(run, 10)
    assert list(value.runs(PROTECTED)) == [5, 6], "a quarter of 80 B: the coldest fell back"
    assert list(value.victims())[:6] == [7, 8, 9, 10, 11, 4], (
        "asked for five times: the last of probation to leave"
    )
    assert value.reuses_of[4] == 2
    value.removed(4, 10)
    value.added(4, 10)
    assert list(value.victims())[:6] == [7, 8, 9, 10, 11, 4], (
        "a new run of that number begins anew, as the warmest"
    )


def test_a_run_is_weighed_against_the_coldest_only() -> None:
    count = value_window_runs + 1
    value = value_of([10] * (count - 1) + [1000], [1] * count)
    assert next(value.victims()) == 4, "the worst of all is too warm to be looked at"
    assert list(value.victims())[-1] == count + 3


def test_what_is_split_keeps_what_is_known_of_it() -> None:
    value = value_of([10, 10], [4, 4], protected_share=1.0)
    value.reused(4, 10)
    value.split(4, 6, 5)
    assert value.reuses_of[6] == 1


@pytest.mark.slow
def test_small_chunks_are_worth_more_by_the_byte() -> None:
    """Two models, one with chunks sixteen times as large, asked for alike: the value ranking finds more chunks in the
    same bytes. Fails if sizes are left out of the value.
    """
    chunks: dict[str, int] = {}
    seed = 20261130
    print(f"seed {seed}")
    for policy in ("slru", "value"):
        draw = random.Random(seed)
        world = World(
            families_max=4096,
            records_max=8192,
            segments=[32 * MIB],
            audit=False,
            config=CoreConfig(policy=policy),
        )
        found = 0
        for request in range(2500):
            small = draw.random() < 0.5
            name = int(draw.paretovariate(0.8)) % 200
            keys = chain(f"{'small' if small else 'large'} {name}", 4)
            found += world.touch(1, keys, request=request + 1)
            world.write(0, keys, request=request + 1, members=(Member(0, 64 << 10 if small else 1 << 20),))
        chunks[policy] = found
    print(chunks)
    assert chunks["value"] > 1.05 * chunks["slru"]


def test_a_policy_that_is_not_known_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'arc' is not known: use slru, lru, value"):
        make("arc", 0.25, array("Q"), [])


@pytest.mark.parametrize(
    ("key", "value"), [("protected_share", 1.5), ("ghosts", -1), ("evict_batch_families", 0)]
)
def test_config_out_of_range_names_its_key(key: str, value: float) -> None:
    with pytest.raises(ConfigError, match=key):
        CoreConfig(**{key: value})  # type: ignore[arg-type]


def test_a_scan_does_not_wash_out_what_is_used() -> None:
    world = World(segments=[4 * MIB], audit=False)
    world.write(0, chain("hot", 8), request=1)
    world.touch(1, chain("hot", 8), request=2)
    for at in range(50):
        world.write(0, chain(at, 8), request=100 + at)
    assert world.touch(1, chain("hot", 8), request=3) == 8


def test_the_same_request_does_not_promote_itself() -> None:
    world = World()
    world.write(0, chain("a", 4), request=7)
    world.touch(0, chain("a", 4), request=7)
    books = world.core._books
    (run,) = set(runs_of(world, chain("a", 4)))
    assert books.forest.policy.list_of[run] == PROBATION
    world.touch(0, chain("a", 4), request=8)
    assert books.forest.policy.list_of[run] == PROTECTED


def test_one_request_extends_its_run_and_another_makes_a_child() -> None:
    world = World()
    keys = chain("a", 12)
    world.write(0, keys[:4], request=7)
    world.write(0, keys[4:8], request=7, parent=keys[3])
    assert len(set(runs_of(world, keys[:8]))) == 1
    world.write(0, keys[8:], request=9, parent=keys[7])
    first, second = dict.fromkeys(runs_of(world, keys))
    assert world.core._books.forest.parent[second] == first


def test_a_touch_in_the_middle_splits_and_the_rest_keeps_its_rank() -> None:
    world = World()
    keys = chain("a", 8)
    world.write(0, keys, request=1)
    world.write(0, chain("b", 2), request=1)
    world.touch(1, keys[:3], request=2)
    forest = world.core._books.forest
    head, tail = dict.fromkeys(runs_of(world, keys))
    assert forest.parent[tail] == head
    assert forest.policy.list_of[head] == PROTECTED
    assert next(forest.policy.victims()) == tail, "colder than what was written after it"
    assert world.core.counters["runs_split"] == 1


def test_a_touch_of_a_family_that_had_the_entry_before_is_ignored() -> None:
    world = World()
    world.write(0, chain("a", 2), request=1)
    stale = ev.Touch(5, world.now_ns, world.index[chain("a", 2)[1]], 1, 2, 2, 0, 0, 1, 0)
    world.clear()
    world.write(0, chain("b", 2), request=1)
    world.do(ev.Touched(1, [stale]))
    assert world.core.counters["touches_stale"] == 1
    (run,) = set(runs_of(world, chain("b", 2)))
    assert world.core._books.forest.policy.list_of[run] == PROBATION


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0), (2, 0, 1)])
@pytest.mark.parametrize("pipelined", [False, True])
def test_parts_of_a_chain_join_in_whatever_order_they_come(order: tuple[int, ...], pipelined: bool) -> None:
    """Fails if a part that was reserved or published before its prefix stayed a root for ever."""
    world = World()
    keys = chain("a", 12)
    parts = [keys[0:4], keys[4:8], keys[8:12]]
    parents = [None, keys[3], keys[7]]
    if pipelined:
        numbers = {}
        for at in range(3):
            reply = world.reserve(0, parts[at], parent=parents[at], request=at + 1)
            assert isinstance(reply, ev.ReservedReply)
            numbers[at] = reply.reservation
        for at in order:
            world.fill(numbers[at])
            assert set(world.publish(0, numbers[at])) == {0}
    else:
        for at in order:
            assert set(world.write(0, parts[at], parent=parents[at], request=at + 1)) == {0}
    forest = world.core._books.forest
    chain_of_runs = list(forest.path(runs_of(world, keys)[-1]))
    found = [entry for run in reversed(chain_of_runs) for entry in forest.members[run]]
    assert found == [world.index[key] for key in keys]


def test_a_gap_in_a_batch_is_closed_later() -> None:
    world = World()
    keys = chain("a", 3)
    reply = world.reserve(0, keys)
    assert isinstance(reply, ev.ReservedReply)
    world.fill(reply.reservation)
    world.publish(0, reply.reservation, include=bytes([1, 0, 1]))
    world.abort(0, reply.reservation)
    world.write(1, keys[1:2], parent=keys[0])
    forest = world.core._books.forest
    path = list(forest.path(runs_of(world, keys)[2]))
    assert [entry for run in reversed(path) for entry in forest.members[run]] == [
        world.index[key] for key in keys
    ]


def test_keys_named_in_a_circle_make_no_circle() -> None:
    world = World()
    a, b = key_of("a"), key_of("b")
    world.write(0, [a, b])
    reply = world.reserve(0, [b, key_of("c"), a])
    assert isinstance(reply, ev.ReservedReply)
    world.fill(reply.reservation)
    world.publish(0, reply.reservation)
    world.core.validate()
    world.clear()
    assert not world.index


def test_a_writer_does_not_evict_its_own_prefix() -> None:
    world = World(segments=[4 * MIB])
    keys = chain("long", 80)
    written = 0
    while written < 80:
        parent = keys[written - 1] if written else None
        reply = world.reserve(0, keys[written : written + 8], parent=parent, request=1)
        if isinstance(reply, ev.ErrorReply):
            break
        world.fill(reply.reservation)
        world.publish(0, reply.reservation)
        written += 8
    assert written == 64
    assert world.touch(0, keys) == 64


def test_held_families_in_the_middle_of_a_run_stay_and_become_the_warmest() -> None:
    world = World(segments=[4 * MIB])
    keys = chain("a", 64)
    world.write(0, keys)
    world.hold(1, keys[10:12])
    world.hold(1, keys[20:21])
    assert world.write(0, chain("b", 50)) == [0] * 50
    kept = [*keys[10:12], *keys[20:21]]
    assert all(world.has(key) for key in kept)
    held = set(runs_of(world, kept))
    assert len(held) == 2, "one run for each piece without a hole"
    assert world.write(0, chain("c", 61)) == [0] * 61, "what lies before the hole is not kept"
    assert all(world.has(key) for key in kept)
    assert world.core.counters["held_reverts"] >= 3
    world.hazards[1].clear()
    assert world.write(0, chain("d", 64)) == [0] * 64
    world.check_content()
