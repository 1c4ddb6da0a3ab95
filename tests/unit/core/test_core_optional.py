"""Optional members (numbered at or above family_members): more bytes of a family, never a reason to call it partial."""

from __future__ import annotations

import pytest
from core_world import World, chain

from kvd.core import events as ev
from kvd.types import Member

FULL, WINDOW, STATE = Member(0, 65536), Member(1, 4096), Member(2, 8192)


def written(world: World, members: tuple[Member, ...], family_members: int = 1) -> None:
    reply = world.reserve(0, chain("a", 3), members=members, family_members=family_members)
    assert isinstance(reply, ev.ReservedReply)
    world.fill(reply.reservation)
    assert set(world.publish(0, reply.reservation)) == {ev.PublishStatus.PUBLISHED}
    world.core.validate()


def partial(world: World) -> int:
    found = world.core.statistics()["families_partial"]
    assert isinstance(found, int)
    return found


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([(FULL,)], [0]),
        ([(FULL, WINDOW, STATE)], [0]),
        ([(FULL,), (WINDOW,), (STATE,)], [0, 0, 0]),
        ([(STATE,), (WINDOW,), (FULL,)], [3, 3, 0]),
        ([(WINDOW, STATE), (FULL,)], [3, 0]),
    ],
)
def test_only_mandatory_members_make_a_family_complete(
    steps: list[tuple[Member, ...]], expected: list[int]
) -> None:
    """Fails if a published optional member is counted for a missing mandatory one."""
    world = World()
    for members, count in zip(steps, expected, strict=True):
        written(world, members)
        assert partial(world) == count


def test_two_mandatory_members_and_one_optional() -> None:
    world = World()
    written(world, (FULL, STATE), family_members=2)
    assert partial(world) == 3
    written(world, (WINDOW,), family_members=2)
    assert partial(world) == 0
