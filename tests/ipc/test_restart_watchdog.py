"""A daemon that does not turn any more is killed by its watchdog and started again over the memory it had.

The test is the service manager: it keeps descriptors (`Series`), counts the time since the last WATCHDOG=1, and does
what systemd does when that is too long: SIGABRT, and SIGKILL for one that does not even die of that.
"""

from __future__ import annotations

import resource
import select
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from restart_world import Child, Series, chain_of, manifest, payload, put, read, until

import kvd

pytestmark = pytest.mark.slow

WATCHDOG_S = 1.0
STALL = Path(__file__).parent / "inject_stall"
BOUND_S = 20.0


@pytest.fixture
def series(daemon: Any) -> Iterator[Callable[..., Series]]:
    made: list[Series] = []

    def make(**env: str) -> Series:
        class Watched(Series):
            """Every daemon of it has a watchdog."""

            def start(self, **options: Any) -> Any:
                self.env = {"WATCHDOG_USEC": str(int(WATCHDOG_S * 1e6)), **env}
                running = super().start(**options)
                resource.prlimit(running.pid, resource.RLIMIT_CORE, (0, 0))
                return running

        made.append(Watched(daemon, manager=True))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def child() -> Iterator[Callable[[Series], Child]]:
    made: list[Child] = []

    def start(series: Series) -> Child:
        made.append(Child(series.running.socket))
        return made[-1]

    yield start
    for one in made:
        one.close()


def petted(series: Series, within_s: float) -> bool:
    """Take what the daemon says until it pets, at most so long."""
    end = time.monotonic() + within_s
    notify = series.running.notify
    while (left_s := end - time.monotonic()) > 0:
        if not select.select([notify], [], [], left_s)[0]:
            return False
        notify.settimeout(0)
        series.take()
        if "WATCHDOG=1" in series.running.notifications[-1]:
            return True
    return False


def until_missed(series: Series) -> None:
    """As the service manager waits: until no pet came for the time that the daemon was told."""
    end = time.monotonic() + BOUND_S
    while petted(series, WATCHDOG_S):
        assert time.monotonic() < end, "a daemon that stands still pets its watchdog"


def kill_by_watchdog(series: Series, number: signal.Signals) -> None:
    running = series.running
    running.expected_codes.add(-number)
    running.process.send_signal(number)
    assert running.wait() == -number
    series.settle()


@pytest.mark.parametrize(
    ("stall", "kill"),
    [(signal.SIGUSR1, signal.SIGABRT), (signal.SIGSTOP, signal.SIGKILL)],
    ids=["the loop stands still", "the process is stopped"],
)
def test_a_daemon_that_missed_its_watchdog_is_followed_by_a_warm_one(
    series: Any, child: Any, stall: signal.Signals, kill: signal.Signals
) -> None:
    """Fails if the petting thread does not ask the loop, or if a daemon's death lets its descriptors go."""
    one = series(PYTHONPATH=str(STALL))
    assert petted(one, BOUND_S), "the watchdog is not petted at all"
    other = child(one)
    assert other.say("put", 2, 4) == "done"
    assert other.say("lease", 2, 4) == "4"
    with kvd.connect(one.running.socket) as store:
        ns = store.namespace(manifest())
        chain = put(ns, 1, 8)
        leases = ns.acquire(chain[:3])
        views = [lease.view for lease in leases]
        whole = [payload(1, at) for at in range(3)]
        before, pid = store.native.epoch, one.running.pid

        one.running.process.send_signal(stall)
        until_missed(one)
        assert one.running.process.poll() is None, "it ended by itself"
        assert [bytes(view) for view in views] == whole
        assert ns.match(chain) == 8, "the index is in shared memory: a daemon that stands still hides nothing"
        assert other.say("check", 2) == "True"

        kill_by_watchdog(one, kill)
        assert [bytes(view) for view in views] == whole
        assert other.say("check", 2) == "True"

        one.start()
        assert one.running.pid != pid
        began = time.monotonic()
        until(lambda: ns.match(chain) == 8 and store.native.epoch != before, "attaching again")
        assert time.monotonic() - began < 1.0
        restart = one.restart()
        assert (restart["adopted"], restart["families"], restart["dropped_damaged"]) == (True, 12, 0)
        assert petted(one, BOUND_S), "the next daemon's watchdog is not petted"
        assert read(ns, chain) == [payload(1, at) for at in range(8)]
        assert [bytes(view) for view in views] == whole
        assert other.say("check", 2) == "True"
        assert other.say("release") == "done"
        assert other.say("put", 3, 2) == "done"
        assert read(ns, chain_of(ns, 3, 2)) == [payload(3, at) for at in range(2)]
        for view in views:
            view.release()
        del view, views
        leases.release()
        until(lambda: store.renew() or not one.restart()["waiting_for"], "leaving the old memory")
    one.stop()


def test_a_busy_worker_is_no_reason_to_be_killed(series: Any) -> None:
    """The loop turns and is petted, whatever else is slow. Fails if petting follows anything but the loop."""
    one = series()
    with kvd.connect(one.running.socket) as store:
        ns = store.namespace(manifest())
        for name in range(1, 60):
            put(ns, name, 16)
        one.running.call("verify", rate=1 << 20)  # a walk that takes its time
        for _ in range(6):
            assert petted(one, WATCHDOG_S), "a daemon that works was not petted in time"
        one.running.call("verify_stop")
    one.stop()
