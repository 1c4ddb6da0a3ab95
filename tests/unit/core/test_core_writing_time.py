"""`why` says how long a request wrote: from each reservation to its last publication, overlaps once."""

from __future__ import annotations

from typing import Any

from core_world import World, chain

from kvd.core.events import ReservedReply

STEP_NS = 1000  # the world's clock advances this much with every event


def writing_ns(world: World, request: int) -> Any:
    return world.core.why(request, world.now_ns)["writing_ns"]


def reserve(world: World, name: str) -> int:
    reply = world.reserve(0, chain(name, 2), request=7)
    assert isinstance(reply, ReservedReply)
    world.fill(reply.reservation)
    return reply.reservation


def test_time_between_reservation_and_publication_counts_and_no_other() -> None:
    world = World()
    first = reserve(world, "a")
    assert writing_ns(world, 7) == 0
    world.now_ns += 5_000_000
    world.publish(0, first)
    assert writing_ns(world, 7) == 5_000_000 + STEP_NS
    world.now_ns += 9_000_000_000
    second = reserve(world, "b")
    world.now_ns += 1_000_000
    world.publish(0, second)
    assert writing_ns(world, 7) == 6_000_000 + 2 * STEP_NS


def test_two_publications_of_one_reservation_are_one_span() -> None:
    world = World()
    number = reserve(world, "a")
    for first in (0, 1):
        world.now_ns += 2_000_000
        world.publish(0, number, first=first, count=1)
    assert writing_ns(world, 7) == 2 * (2_000_000 + STEP_NS)
