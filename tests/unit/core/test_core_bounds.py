"""What one step may cost at most: work is counted, so that no test depends on how fast the machine is."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any

import pytest
from core_world import World, chain

from kvd.core import events as ev
from kvd.core import forest as forests
from kvd.core import publishing, report, space
from kvd.core.policy import PROTECTED

KIB, MIB = 1 << 10, 1 << 20


class Counted(list[int]):
    """A column that counts how often it is read."""

    reads = 0

    def __getitem__(self, at: Any) -> Any:
        self.reads += 1
        return super().__getitem__(at)


def deep(runs_count: int) -> tuple[World, list[bytes]]:
    """A chain of runs of one family each, for each was written by another request."""
    world = World(segments=[16 * MIB], audit=False)
    keys = chain("deep", runs_count)
    for at, key in enumerate(keys):
        world.write(0, [key], size=64, request=at + 1, parent=keys[at - 1] if at else None)
    assert world.core._books.forest.run_numbers.used_count == runs_count
    return world, keys


def touches_of(world: World, keys: list[bytes], request: int, count: int = 1) -> ev.Touched:
    entry = world.index[keys[-1]]
    return ev.Touched(
        1, [ev.Touch(request, world.now_ns, entry, 1, len(keys), len(keys), 0, 0, 1, 0)] * count
    )


def test_a_look_at_many_touches_of_one_chain_moves_each_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand touches of the end of a chain of 4,000 runs took three seconds of the daemon."""
    world, keys = deep(300)
    policy = world.core._books.forest.policy
    moved: list[int] = []
    for name in ("reused", "refreshed"):
        move = getattr(policy, name)
        monkeypatch.setattr(policy, name, lambda run, *rest, move=move: (moved.append(run), move(run, *rest)))
    world.do(touches_of(world, keys, 5000, count=1024))
    assert len(set(moved)) == 300
    assert len(moved) <= 2 * 300  # `reused` of a protected run is `refreshed`
    world.core.validate()


def test_touches_of_branches_leave_every_prefix_above_its_suffixes() -> None:
    """Moved in another order than suffixes first, a shared prefix would leave before what lies behind it."""
    world = World(audit=False)
    trunk = chain("t", 4)
    world.write(0, trunk, request=1)
    branches = [chain(f"b{at}", 3) for at in range(5)]
    for at, keys in enumerate(branches):
        world.write(0, keys, request=10 + at, parent=trunk[at % 4])
    rows = []
    for at in (3, 0, 4, 0, 2):
        for key, request in ((branches[at][1], 10 + at), (trunk[at % 4], 99), (branches[at][2], 7)):
            rows.append(ev.Touch(request, world.now_ns, world.index[key], 1, 1, 1, 0, 0, 1, 0))
    world.do(ev.Touched(1, rows))
    world.core.validate()
    forest = world.core._books.forest
    assert forest.policy.list_of[forest.run_of[world.index[trunk[0]]]] == PROTECTED


def test_chains_beyond_the_work_of_a_look_are_left_out_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    world, keys = deep(60)
    monkeypatch.setattr(forests, "touch_work_max", 50)
    world.do(touches_of(world, keys, 5000, count=3))
    assert world.core.counters["touches_left_out"] == 3
    world.do(touches_of(world, keys[:40], 5000))
    assert world.core.counters["touches_left_out"] == 3
    world.core.validate()


def test_withdrawing_a_deep_chain_looks_at_each_run_a_few_times() -> None:
    """Depths counted run by run made it quadratic: 8,000 runs, 3.7 s."""
    world, keys = deep(400)
    forest = world.core._books.forest
    forest.parent = counted = Counted(forest.parent)  # type: ignore[assignment]
    world.do(ev.Withdraw(1, array("I", [world.index[keys[0]]])))
    assert not world.index
    assert counted.reads < 10 * 400
    forest.parent = array("I", counted)


def test_publishing_behind_a_long_path_moves_nothing_but_the_new_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a depth of 22,000 runs each publication took 10 ms of the daemon, from everybody."""
    monkeypatch.setattr(forests, "path_runs_max", 20)
    world, keys = deep(60)
    forest = world.core._books.forest
    moved: list[int] = []
    refreshed = forest.policy.refreshed
    monkeypatch.setattr(forest.policy, "refreshed", lambda run: (moved.append(run), refreshed(run)))
    world.write(0, chain("next", 1), size=64, request=5000, parent=keys[-1])
    assert not moved
    world.core.validate()  # it ranks below what it lies behind all the same
    world.write(0, chain("near", 1), size=64, request=5001, parent=keys[9])
    assert len(moved) == 11


def test_a_family_that_came_first_stays_a_root_if_its_prefix_is_a_long_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forests, "path_runs_max", 20)
    world, keys = deep(30)
    late = chain("late", 2)
    world.write(0, late[1:], size=64, request=7000, parent=late[0])
    world.write(0, late[:1], size=64, request=7001, parent=keys[-1])
    forest = world.core._books.forest
    assert forest.parent[forest.run_of[world.index[late[1]]]] == ev.NONE
    world.core.validate()


def test_held_families_at_the_end_of_long_paths_move_a_bounded_number_of_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Eight held ends of a chain of 300 runs moved 2,400."""
    world, keys = deep(300)
    for at in range(8):
        world.write(0, chain(f"end{at}", 1), size=64, request=9000 + at, parent=keys[-1])
    for at in range(8):
        world.hold(1, chain(f"end{at}", 1))
    forest = world.core._books.forest
    moved: list[int] = []
    refreshed = forest.policy.refreshed
    monkeypatch.setattr(forest.policy, "refreshed", lambda run: (moved.append(run), refreshed(run)))
    world.clear()
    assert len(moved) <= 300 + 8 + 8
    world.core.validate()
    moved.clear()
    monkeypatch.setattr(forests, "held_work_max", 100)
    world.clear()
    assert len(moved) <= 100
    world.core.validate()


def test_a_listing_of_a_deep_chain_walks_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    world, _ = deep(400)
    forest = world.core._books.forest
    forest.parent = counted = Counted(forest.parent)  # type: ignore[assignment]
    rows, following = report.families(world.core._books, None, 0, 1000)
    assert [row.depth for row in rows] == list(range(400))
    assert following is None
    assert counted.reads < 6 * 400
    monkeypatch.setattr(report, "listing_work_max", 50)
    rows, following = report.families(world.core._books, None, 0, 1000)
    assert 0 < len(rows) < 60
    assert following == len(rows)


def test_a_listing_counts_no_further_than_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the path is walked to its root: a step of 16 rows behind 4 million runs took a second, for anybody."""
    monkeypatch.setattr(report, "depth_runs_max", 20)
    monkeypatch.setattr(report, "listing_work_max", 50)
    world, _ = deep(400)
    books = world.core._books
    forest = books.forest
    forest.parent = counted = Counted(forest.parent)  # type: ignore[assignment]
    for start in range(0, 400, 16):
        before = counted.reads
        rows, _ = report.families(books, None, start, 16)
        assert rows
        assert counted.reads - before <= 3 * (50 + 20 + 16)
        assert {row.depth for row in rows} <= {row.entry for row in rows} | {None}
    rows, _ = report.families(books, None, 0, 400)
    assert [row.depth for row in rows] == list(range(len(rows))), "known from the rows before"
    (row,), _ = report.families(books, None, 19, 1)
    assert row.depth == 19
    (row,), _ = report.families(books, None, 20, 1)
    assert row.depth is None


def test_a_run_grows_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forests, "run_families_max", 8)
    world = World()
    keys = chain("a", 20)
    for begin in range(0, 20, 4):
        world.write(0, keys[begin : begin + 4], request=1, parent=keys[begin - 1] if begin else None)
    assert world.core._books.forest.run_numbers.used_count == 3


def crowded(monkeypatch: pytest.MonkeyPatch, *, large: bool = False) -> tuple[World, list[int]]:
    """A pool without a window: in each slab one slot stays reserved. The list counts the runs offered as victims."""
    monkeypatch.setattr(space, "windows_tried_max", 2)
    world = World(segments=[16 * MIB], audit=False)
    if (
        large
    ):  # a slab of another class: one slot reserved, one published, which nobody will find among the coldest
        assert isinstance(world.reserve(1, chain("kept", 1), size=MIB), ev.ReservedReply)
        world.write(0, chain("large", 1), size=MIB, request=1)
    slot = 64 * KIB
    number = 0
    while world.core._books.slots.frames.free_count or world.core._books.slots.class_for(slot).free_count:
        kept = world.reserve(1, chain(f"kept{number}", 1), size=slot)
        assert isinstance(kept, ev.ReservedReply)
        for at in range(31):
            world.write(0, chain(f"{number}-{at}", 1), size=slot, request=1000 * number + at + 1)
        number += 1
    if large:
        world.touch(1, chain("large", 1), request=2)
    policy = world.core._books.forest.policy
    victims = policy.victims
    offered: list[int] = []

    def counting() -> Iterator[int]:
        for run in victims():
            offered.append(run)
            yield run

    monkeypatch.setattr(policy, "victims", counting)
    return world, offered


def test_a_hopeless_reservation_does_not_look_at_every_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """With half a million runs it took 0.7 s, again and again."""
    monkeypatch.setattr(space, "passed_over_max", 8)
    world, offered = crowded(monkeypatch)
    reply = world.reserve(0, chain("large", 1), size=MIB)
    assert isinstance(reply, ev.ErrorReply)
    assert reply.error.code == "KVD-CAPACITY-FULL"
    assert len(offered) <= space.windows_tried_max + 8
    world.core.validate()


def test_families_of_the_class_behind_many_others_are_found_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Passed over for the sake of a short turn, they would make a reservation fail that can be granted."""
    monkeypatch.setattr(space, "passed_over_max", 8)
    world, offered = crowded(monkeypatch, large=True)
    assert isinstance(world.reserve(0, chain("another", 1), size=MIB), ev.ReservedReply)
    assert len(offered) <= space.windows_tried_max + 8
    assert chain("large", 1)[0] not in world.index
    world.core.validate()


def test_a_dead_client_gives_back_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A million reserved items took 0.8 s in one turn. Its number is another's only when all has come back."""
    monkeypatch.setattr(publishing, "gone_items_per_turn", 6)
    world = World()
    for at in range(4):
        world.reserve(0, chain(at, 4), request=at + 1)
    assert world.core.live_items(0) == 16
    world.hazards[0] = set()
    assert world.do(ev.ClientGone(0)) == []
    assert world.core.live_items(0) == 8
    world.write(1, chain(0, 4), request=77)
    assert world.again() == [ev.Gone(0)]
    assert world.core.live_items(0) == 0
    del world.hazards[0]
    world.core.validate()
