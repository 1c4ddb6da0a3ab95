"""Put on PYTHONPATH of a daemon by the fault tests: runs before anything of kvd is imported.

FAULTS_LIBRARY names a testing build that takes the place of the native extension (KVD_MUTANT and KVD_STOP_AT then
work in the daemon); FAULTS_OMIT names a mechanism of the daemon's Python code that is left out or broken.
"""

import os
import sys
from pathlib import Path

if library := os.environ.get("FAULTS_LIBRARY"):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
    import native_build

    native_build._load(library)
    del sys.path[0]


def _omit_drain() -> None:
    """The ring of a dead client is not read before what it held is given back."""
    from kvd.server.clients import Clients

    for name in ("_on_exit", "disconnect"):

        def without(self, *args, take=getattr(Clients, name)):
            self.drain_rest = lambda client: [then() for then in client.leaving]
            take(self, *args)

        setattr(Clients, name, without)


def _omit_reclaim() -> None:
    """The core is not told that a client is gone: what it was writing stays reserved."""
    from kvd.core import events
    from kvd.server.domain import Domain

    step = Domain.step

    def without(self, event):
        if isinstance(event, events.ClientGone):
            self.performers[events.Gone](events.Gone(event.client))
        else:
            step(self, event)

    Domain.step = without


def _omit_pidfd() -> None:
    """A closed socket is taken for a dead process."""
    from kvd.server.clients import Clients

    disconnect = Clients.disconnect

    def at_once(self, client, error):
        disconnect(self, client, error)
        self._on_exit(client)

    Clients.disconnect = at_once


def _break_tick() -> None:
    """The task that runs once a second dies at its third turn."""
    from kvd.server.runner import Runner

    tick = Runner.tick
    turns = []

    def failing(self):
        turns.append(None)
        if len(turns) == 3:
            raise RuntimeError("broken for a test")
        tick(self)

    Runner.tick = failing


def _rush() -> None:
    """A second is a day for all that the daemon decides by the clock."""
    import time

    from kvd.server.app import MonotonicClock

    MonotonicClock.now_ns = staticmethod(lambda: time.monotonic_ns() * 86_400)


if name := os.environ.get("FAULTS_OMIT"):
    {
        "rush": _rush,
        "drain": _omit_drain,
        "reclaim": _omit_reclaim,
        "pidfd": _omit_pidfd,
        "tick": _break_tick,
    }[name]()
