"""Whose call is next: administration takes turns, so that what many ask for costs everybody else little.

Owns the work that asks on the control socket caused and that is not done yet; event-loop thread only. Work is done in
steps of some hundred microseconds, a millisecond at worst. Users take turns, connections of one user take turns, and
what one connection asks is done in its order. Who asks while nobody waits is served at once. All together take SHARE of
the loop's time once the first CREDIT_NS are used up; the rings are served in between. What a step costs is the
processor time that it took; a process that was stopped in its middle has not used that time, and pays CREDIT_NS for it
at most.

Invariant: between two steps that together took TURN_NS the loop goes round.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Hashable
from typing import Final

from kvd.server.supervise import Guard

TURN_NS: Final = 250_000
SHARE: Final = 0.25
CREDIT_NS: Final = 50_000_000

Step = Callable[[], bool]
"""Does a little; True: that was the last of it."""


class Turns:
    """See the module."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        guard: Guard,
        now_ns: Callable[[], int] = time.monotonic_ns,
        used_ns: Callable[[], int] = time.thread_time_ns,
    ) -> None:
        self._loop = loop
        self._now_ns = now_ns
        self._used_ns = used_ns  # by this thread
        self._guard = guard
        self._users: deque[int] = deque()  # who has work, the next one first
        self._connections: dict[int, deque[Hashable]] = {}  # of each user, the next one first
        self._work: dict[tuple[int, Hashable], deque[Step]] = {}
        self._scheduled = False
        self._credit_ns = CREDIT_NS
        self._counted_ns = now_ns()

    @property
    def waiting_count(self) -> int:
        """How many asks are not done."""
        return sum(map(len, self._work.values()))

    def submit(self, user: int, connection: Hashable, step: Step) -> None:
        """Run `step` until it is done: at once if nobody waits, else when it is its turn."""
        work = self._work.get((user, connection))
        if work is not None:
            work.append(step)
        else:
            self._work[user, connection] = deque([step])
            connections = self._connections.get(user)
            if connections is None:
                self._connections[user] = deque([connection])
                self._users.append(user)
            else:
                connections.append(connection)
        if not self._scheduled:
            self._run()

    def _run(self) -> None:
        """One turn; the next one comes when the loop went round, or later if more than the share was used."""
        self._scheduled = True
        began_ns = now_ns = self._now_ns()
        used_ns = self._used_ns()
        self._credit_ns = min(CREDIT_NS, self._credit_ns + int((began_ns - self._counted_ns) * SHARE))
        while self._users and now_ns - began_ns < TURN_NS:
            self._step()
            now_ns = self._now_ns()
        self._credit_ns -= max(self._used_ns() - used_ns, min(now_ns - began_ns, CREDIT_NS))
        self._counted_ns = began_ns
        if self._credit_ns >= 0:
            self._loop.call_soon(self._guard, self._again)
        else:
            self._loop.call_later(-self._credit_ns / SHARE / 1e9, self._guard, self._again)

    def _again(self) -> None:
        self._scheduled = False
        if self._users:
            self._run()

    def _step(self) -> None:
        user = self._users[0]
        connection = self._connections[user][0]
        work = self._work[user, connection]
        step = work[0]
        if step():
            work.popleft()
        self._users.rotate(-1)
        self._connections[user].rotate(-1)
        if not work:
            del self._work[user, connection]
            self._connections[user].remove(connection)
            if not self._connections[user]:
                del self._connections[user]
                self._users.remove(user)
