"""What the simulation found in the core, each as small as it could be made.

Chains that several clients write at once: whoever comes later, a suffix lies behind its prefix.

A family that another writer published between a reservation and its publication was
unknown to the reservation, so that what it wrote behind it became a root and outlived its own prefix.
"""

import pytest
from core_world import MIB, World, chain, key8

from kvd.core import events as ev
from kvd.core.core import CoreConfig
from kvd.types import Member

KEYS = chain("shared", 4)


def depth_of(world, key):
    """How many families lie before this one, by the core's listing."""
    rows, _ = world.core.families(None, 0, 100)
    return next(row.depth for row in rows if row.entry == world.index[key])


def statuses(reply):
    assert isinstance(reply, ev.ReservedReply)
    return list(reply.statuses)


def test_prefix_published_by_another_who_writes_it_too():
    """Fails without `Publishing._tell_others`: depths are 0, 0, 1, 2."""
    world = World()
    mine = world.reserve(0, KEYS)
    theirs = world.reserve(1, KEYS[:1])
    for reservation in (mine.reservation, theirs.reservation):
        world.fill(reservation)
    world.publish(1, theirs.reservation)
    world.publish(0, mine.reservation, 1, 3)
    assert [depth_of(world, key) for key in KEYS] == [0, 1, 2, 3]


def test_middle_published_by_another():
    world = World()
    mine = world.reserve(0, KEYS)
    theirs = world.reserve(1, KEYS[1:2], parent=KEYS[0])
    for reservation in (mine.reservation, theirs.reservation):
        world.fill(reservation)
    world.publish(0, mine.reservation, 2, 2)
    world.publish(1, theirs.reservation)
    world.publish(0, mine.reservation, 0, 1)
    assert [depth_of(world, key) for key in KEYS] == [0, 1, 2, 3]


@pytest.mark.parametrize("prefix_first", [True, False])
def test_prefix_that_was_skipped_because_another_writes_it(prefix_first):
    """Fails without `Reserving._await_others` if the prefix comes first."""
    world = World()
    theirs = world.reserve(1, KEYS[:2])
    mine = world.reserve(0, KEYS, skip_pending=True)
    assert statuses(mine) == [ev.ReserveStatus.PENDING] * 2 + [ev.ReserveStatus.GRANTED] * 2
    for reservation in (mine.reservation, theirs.reservation):
        world.fill(reservation)
    steps = [lambda: world.publish(1, theirs.reservation), lambda: world.publish(0, mine.reservation, 2, 2)]
    for step in steps if prefix_first else reversed(steps):
        step()
    assert [depth_of(world, key) for key in KEYS] == [0, 1, 2, 3]


@pytest.mark.parametrize("how", ["aborted", "withdrawn"])
def test_prefix_that_only_another_can_still_write(how):
    """Fails without `Orphans.await_family` in `_give_back` and in `_claim_again`."""
    world = World()
    mine = world.reserve(0, KEYS)
    world.fill(mine.reservation)
    if how == "aborted":
        world.abort(0, mine.reservation, 0, 1)
    else:
        world.publish(0, mine.reservation, 0, 1)
        world.withdraw(KEYS[:1])
    world.write(1, KEYS[:1])
    world.publish(0, mine.reservation, 1, 3)
    assert [depth_of(world, key) for key in KEYS] == [0, 1, 2, 3]
    assert not world.core._books.orphans._reservations


def test_nothing_is_waited_for_after_the_reservation_is_over():
    world = World()
    theirs = world.reserve(1, KEYS[:2])
    mine = world.reserve(0, KEYS, skip_pending=True)
    world.abort(0, mine.reservation)
    world.fill(theirs.reservation)
    world.publish(1, theirs.reservation)
    assert not world.core._books.orphans._reservations
    assert not world.core._books.forest.claims


def test_what_is_held_behind_a_hole_stays_together():
    """Fails if what is cut out of a run orphans its children: C, behind B, would be a root, and B leave before it."""
    world = World()
    world.write(0, KEYS[:2], request=1)
    world.write(0, KEYS[2:3], parent=KEYS[1], request=2)
    world.hold(1, KEYS[1:3])
    assert world.clear()["families"] == 1
    assert [depth_of(world, key) for key in KEYS[1:3]] == [0, 1]


def test_a_reservation_whose_last_items_find_no_room_is_over():
    """Fails if `publish` ends a reservation only after a publication: it would claim its prefix for ever."""
    world = World(families_max=2)
    world.write(0, KEYS[:1], members=(Member(0, MIB),), family_members=2)
    rest = world.reserve(1, KEYS[:1], members=(Member(1, MIB),), family_members=2)
    world.fill(rest.reservation)
    world.withdraw(KEYS[:1])
    others = world.reserve(0, chain("others", 2))
    assert statuses(others) == [ev.ReserveStatus.GRANTED] * 2
    assert list(world.publish(1, rest.reservation)) == [ev.PublishStatus.NO_INDEX]
    assert world.core.statistics()["reservations"] == 1


def test_clear_after_the_clock_went_back():
    """Fails if `Core.step` takes every time it is given: families that are born later than now are not cleared."""
    world = World(config=CoreConfig(), segments=[8 * MIB])
    world.write(0, KEYS)
    world.sleep(-60)
    assert world.clear()["families"] == len(KEYS)
    world.touch(0, KEYS)
    assert world.core.miss_cause(key8(KEYS[0]), world.now_ns).startswith("evicted (clear, just now")
