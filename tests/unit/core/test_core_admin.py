"""Pins, clear, withdraw, limbo; and what the core says about itself."""

from __future__ import annotations

import json

import pytest
from core_world import MIB, World, chain, key8

from kvd.core import administration, counters
from kvd.core import events as ev
from kvd.core.core import CoreConfig


def test_hard_pins_stay_and_soft_pins_leave_last() -> None:
    world = World(segments=[4 * MIB])
    for name in ("hard", "soft", "free"):
        world.write(0, chain(name, 16))
    world.pin(chain("hard", 16), ev.PinKind.HARD)
    world.pin(chain("soft", 16), ev.PinKind.SOFT)
    world.write(0, chain("new", 32))
    assert not any(world.has(key) for key in chain("free", 16))
    assert all(world.has(key) for key in (*chain("soft", 16), *chain("hard", 16)))
    assert world.write(0, chain("newer", 48)) == [0] * 48
    assert not any(world.has(key) for key in chain("soft", 16))
    assert all(world.has(key) for key in chain("hard", 16))
    assert isinstance(world.reserve(0, chain("newest", 49)), ev.ErrorReply)


def test_a_pin_reaches_to_the_root_and_what_two_pins_share_stays_until_both_are_gone() -> None:
    world = World()
    stem, one, two = chain("stem", 8), chain("one", 4), chain("two", 4)
    world.write(0, stem, request=1)
    world.write(0, one, parent=stem[3], request=2)
    world.write(0, two, parent=stem[3], request=3)
    world.pin([one[1]], ev.PinKind.HARD)
    world.pin([two[3]], ev.PinKind.HARD)
    assert world.pool("pinned_bytes") == (4 + 2 + 4) * 64 * 1024
    pinned = {world.families[entry].key for entry, flags in world.flags.items() if flags & ev.PinKind.HARD}
    assert pinned == {*stem[:4], *one[:2], *two}
    world.unpin([two[3]])
    assert world.pool("pinned_bytes") == 6 * 64 * 1024
    world.unpin(one)
    assert world.pool("pinned_bytes") == 0
    assert not any(world.flags.values())


def test_a_pin_is_kept_where_a_longer_one_reached_already() -> None:
    """Fails if a pin that a longer one covers is not entered: it would be over with that one."""
    world = World()
    world.write(0, chain("a", 6))
    assert world.pin(chain("a", 6), ev.PinKind.HARD).result["pins_added"] == 1
    assert world.pin(chain("a", 3), ev.PinKind.HARD).result["pins_added"] == 1
    assert world.pin(chain("a", 3), ev.PinKind.HARD).result["pins_added"] == 0, "it is there"
    world.withdraw(chain("a", 1, 3))
    world.clear()
    assert [world.has(key) for key in chain("a", 6)] == [True] * 3 + [False] * 3
    assert world.unpin(chain("a", 3)).result == {"pins_removed": 1, "pinned_bytes": 0}
    world.clear()
    assert not world.index


def test_pins_have_a_cap_and_are_all_or_nothing() -> None:
    world = World(segments=[4 * MIB], config=CoreConfig(hard_pin_share=0.25))
    world.write(0, chain("a", 16))
    world.write(0, chain("b", 16))
    assert isinstance(world.pin(chain("a", 16), ev.PinKind.HARD), ev.AdminReply)
    reply = world.pin(chain("b", 1), ev.PinKind.HARD)
    assert isinstance(reply, ev.ErrorReply)
    assert "65536 B over its limit of 1048576 B" in reply.error.message
    assert world.pool("pinned_bytes") == MIB
    assert isinstance(world.pin(chain("b", 16), ev.PinKind.SOFT), ev.AdminReply)
    assert isinstance(world.pin(chain("b", 1), ev.PinKind(0)), ev.ErrorReply)


def test_clear_says_what_it_could_not_drop_and_why() -> None:
    world = World()
    for name in ("free", "leased", "pinned", "parent"):
        world.write(0, chain(name, 4), namespace=1)
    world.write(0, chain("other", 4), namespace=2)
    world.hold(1, chain("leased", 2))
    world.pin(chain("pinned", 3), ev.PinKind.HARD)
    reply = world.reserve(0, chain("child", 2), parent=chain("parent", 4)[3], namespace=1)
    assert isinstance(reply, ev.ReservedReply)
    result = world.clear(1)
    size = 64 * 1024
    assert result["families"] == 4 + 2 + 1
    assert result["bytes"] == 7 * size
    assert result["kept"] == {
        "leased": {"families": 2, "bytes": 2 * size},
        "pinned": {"families": 3, "bytes": 3 * size},
        "reserved": {"families": 4, "bytes": 4 * size},
    }
    assert all(world.has(key) for key in chain("other", 4))
    world.hazards[1].clear()
    world.unpin(chain("pinned", 3))
    world.abort(0, reply.reservation)
    assert world.clear(None)["kept"] == {}
    assert not world.index


def test_clear_lets_others_in_between_and_spares_what_is_written_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(administration, "clear_families_per_turn", 8)
    world = World()
    for at in range(6):
        world.write(0, chain(at, 8))
    assert world.do(ev.Clear(99, None)) == []
    assert len(world.index) == 40, "one part a turn"
    world.touch(1, chain(3, 2), request=5)  # splits a run that is still to go
    world.write(0, chain("new", 8))
    (reply,) = world.again()
    assert isinstance(reply, ev.AdminReply)
    assert reply.result["families"] == 48
    assert set(world.index) == set(chain("new", 8))


def test_withdraw_takes_along_what_lies_behind_and_keeps_held_memory() -> None:
    world = World()
    keys = chain("a", 8)
    world.write(0, keys, request=1)
    world.write(0, chain("b", 4), parent=keys[5], request=2)
    world.pin(keys, ev.PinKind.HARD)
    world.hold(1, keys[5:7])
    result = world.withdraw([keys[4]])
    assert result == {"families": 6, "bytes": 6 * 65536, "held_families": 2, "held_bytes": 2 * 65536}
    assert set(world.index) == set(keys[:4])
    assert world.pool("limbo_bytes") == 2 * 65536
    world.tick()
    assert world.pool("limbo_bytes") == 2 * 65536, "still held"
    world.hazards[1].clear()
    world.tick()
    assert world.pool("limbo_bytes") == 0
    assert world.core.counters["limbo_entered"] == world.core.counters["limbo_freed"] == 2


def test_limbo_is_tried_again_when_room_is_short() -> None:
    world = World(segments=[4 * MIB])
    world.write(0, chain("a", 64))
    world.hold(1, chain("a", 64))
    world.withdraw(chain("a", 1))
    assert isinstance(world.reserve(0, chain("b", 1)), ev.ErrorReply)
    world.hazards[1].clear()
    assert world.write(0, chain("b", 64)) == [0] * 64


def test_withdrawing_what_somebody_writes_behind_lets_the_writer_finish() -> None:
    world = World()
    stem = chain("a", 4)
    world.write(0, stem)
    reply = world.reserve(0, chain("a", 4, 4), parent=stem[3])
    assert isinstance(reply, ev.ReservedReply)
    world.withdraw([stem[2]])
    world.fill(reply.reservation)
    assert list(world.publish(0, reply.reservation)) == [0] * 4
    assert world.write(1, stem) == [3, 3, 0, 0], "two were still there"
    forest = world.core._books.forest
    run = forest.run_of[world.index[chain("a", 8)[7]]]
    path = list(forest.path(run))
    order = [world.families[entry].key for one in reversed(path) for entry in forest.members[one]]
    assert order == chain("a", 8), "joined again"


def test_counters_are_all_there_from_the_start_at_zero() -> None:
    world = World(clients=0)
    assert set(world.core.counters) == set(counters.names)
    assert set(world.core.counters.values()) == {0}
    for reason in ev.Reason:
        if reason is not ev.Reason.LIMBO:
            assert f"evicted_{reason.value}" in counters.names


def test_statistics_are_plain_values_and_add_up() -> None:
    world = World(segments=[4 * MIB, 4 * MIB])
    world.write(0, chain("a", 4), namespace=3, size=100_000)
    world.reserve(0, chain("b", 2), namespace=4)
    statistics = json.loads(json.dumps(world.core.statistics()))
    pool = statistics["pool"]
    assert pool["used_bytes"] == 4 * 102_400
    assert pool["reserved_bytes"] == 2 * 65_536
    assert pool["total_bytes"] == pool["usable_bytes"] == 8 * MIB
    assert statistics["namespaces"] == {"3": {"families": 4, "bytes": 409_600}}
    assert [c["slot_bytes"] for c in statistics["classes"]] == [65_536, 102_400]
    assert statistics["families_promised"] == 2


def test_why_tells_what_a_request_matched_missed_and_cost() -> None:
    world = World(segments=[4 * MIB])
    keys = chain("a", 64)
    world.write(0, keys, request=77)
    world.write(0, chain("b", 8), request=78)
    world.sleep(3)
    assert world.touch(1, keys, request=79) == 56
    told = json.loads(json.dumps(world.core.why(79, world.now_ns)))
    (touch,) = told["touches"]
    assert (touch["asked"], touch["matched"], touch["kind"]) == (64, 56, "match")
    assert touch["missed_because"] == "evicted (space, 3.0 s ago)"
    assert world.core.why(78, world.now_ns)["evicted_families"] == 8
    assert world.core.why(77, world.now_ns)["published"] == 64
    assert world.core.why(1, world.now_ns) == {"known": False, "requests_kept_max": 4096}
    assert world.core.miss_cause(key8(keys[60]), world.now_ns).startswith("evicted (space")
    assert world.core.miss_cause(12345, world.now_ns) == "never stored here"
    assert world.core.counters["misses_evicted"] == 1


def test_the_journal_keeps_the_last_requests() -> None:
    world = World(config=CoreConfig(journal_requests=3))
    for request in range(1, 6):
        world.touch(0, chain(request, 1), request=request)
    known = [world.core.why(request, world.now_ns)["known"] for request in range(1, 6)]
    assert known == [False, False, True, True, True]


def test_listing_goes_page_by_page() -> None:
    world = World()
    world.write(0, chain("a", 5), namespace=1, request=1)
    world.write(0, chain("a", 5, 5), namespace=1, parent=chain("a", 5)[4], request=2)
    world.write(0, chain("b", 5), namespace=2)
    world.pin(chain("a", 2), ev.PinKind.SOFT)
    rows, start = [], 0
    while start is not None:
        page, start = world.core.families(1, start, 3)
        assert len(page) <= 3
        rows.extend(page)
    by_key = {world.families[row.entry].key: row for row in rows}
    assert set(by_key) == set(chain("a", 10))
    assert [by_key[key].depth for key in chain("a", 10)] == list(range(10))
    assert [by_key[key].pinned for key in chain("a", 10)] == [1, 1] + [0] * 8
    everything, rest = world.core.families(None, 0, 100)
    assert len(everything) == 15
    assert rest is None
