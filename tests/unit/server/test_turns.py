"""Whose call is next: users in turn, connections in turn, asks in order; and how much of the loop they get together."""

import asyncio

import pytest

from kvd.server import turns as module
from kvd.server.turns import CREDIT_NS, SHARE, TURN_NS, Turns


class Clock:
    """A clock that goes on when it is told, and the processor time used meanwhile."""

    def __init__(self):
        self.ns = self.used_ns = 0

    def __call__(self):
        return self.ns


class Loop:
    """Callbacks that wait, and the time at which they are due."""

    def __init__(self, clock):
        self.clock, self.due = clock, []

    def call_soon(self, call, *args):
        self.due.append((self.clock.ns, call, args))

    def call_later(self, seconds, call, *args):
        self.due.append((self.clock.ns + int(seconds * 1e9), call, args))

    def turn(self):
        """The next callback, at its time."""
        at_ns, call, args = self.due.pop(0)
        self.clock.ns = max(self.clock.ns, at_ns)
        call(*args)


@pytest.fixture
def made():
    clock = Clock()
    loop = Loop(clock)
    return Turns(loop, lambda call, *args: call(*args), clock, lambda: clock.used_ns), loop, clock


def step(clock, done, name, *, steps=1, ns=TURN_NS, used_ns=None):
    left = steps

    def one():
        nonlocal left
        clock.ns += ns
        clock.used_ns += ns if used_ns is None else used_ns
        left -= 1
        done.append(name)
        return not left

    return one


def test_who_asks_while_nobody_waits_is_served_at_once(made):
    turns, _, clock = made
    done = []
    turns.submit(1, "a", step(clock, done, "a"))
    assert done == ["a"]
    assert turns.waiting_count == 0


def test_users_take_turns_then_connections_then_asks(made):
    """Fails if all wait in one queue: who asks much, over many connections, is served first."""
    turns, loop, clock = made
    done = []
    turns.submit(1, "first", step(clock, done, "first", steps=2))
    for connection in ("x", "y"):
        for number in range(3):
            turns.submit(1, connection, step(clock, done, f"{connection}{number}"))
    turns.submit(2, "z", step(clock, done, "z0"))
    turns.submit(2, "z", step(clock, done, "z1"))
    while turns.waiting_count:
        loop.turn()
    assert done == ["first", "first", "z0", "x0", "z1", "y0", "x1", "y1", "x2", "y2"]


def test_the_loop_goes_round_between_turns_and_gets_most_of_the_time(made):
    """Fails without the end of a turn, or without the credit: the rings would wait for everything that is asked."""
    turns, loop, clock = made
    done = []
    turns.submit(1, "a", step(clock, done, "a", steps=4000))
    assert len(done) == 1
    for _ in range(3000):
        before = len(done)
        loop.turn()
        assert len(done) - before <= 1
    used_ns = len(done) * TURN_NS
    assert used_ns <= CREDIT_NS + SHARE * clock.ns + TURN_NS
    assert used_ns >= SHARE * clock.ns


def test_a_step_during_which_the_process_was_stopped_stops_nobody_for_long(made):
    """Fails if all of that time were to be paid back: an hour of SIGSTOP would end administration for three."""
    turns, loop, clock = made
    done = []
    turns.submit(1, "a", step(clock, done, "a", ns=3600 * 10**9, used_ns=TURN_NS))
    stopped_until_ns = clock.ns
    turns.submit(1, "a", step(clock, done, "b"))
    while turns.waiting_count:
        loop.turn()
    assert clock.ns - stopped_until_ns <= CREDIT_NS / SHARE + TURN_NS


def test_a_step_that_takes_long_is_paid_in_full(made):
    """Fails if what a turn costs is bounded: steps of a second had 83 % of the loop."""
    turns, loop, clock = made
    done = []
    turns.submit(1, "a", step(clock, done, "a", steps=10, ns=10**9))
    while turns.waiting_count:
        loop.turn()
    turns.submit(1, "a", step(clock, done, "b"))
    while turns.waiting_count:
        loop.turn()
    assert CREDIT_NS + SHARE * clock.ns >= 10 * 10**9


def test_it_runs_on_a_real_loop():
    async def main():
        turns = Turns(asyncio.get_running_loop(), lambda call, *args: call(*args))
        done = []
        ends = asyncio.Event()
        turns.submit(1, "a", lambda: done.append("a") or len(done) > 2)
        turns.submit(1, "a", lambda: ends.set() or True)
        await asyncio.wait_for(ends.wait(), 10)
        assert done == ["a"] * 3

    asyncio.run(main())
    assert module.TURN_NS < module.CREDIT_NS
