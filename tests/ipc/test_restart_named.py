"""Warm restarts with named POSIX memory (pool.backing = "posix"): kept by its descriptor, and no name is left behind.

A name in /dev/shm belongs to the daemon that made it: it goes when that daemon stops, or with the next one. The memory
goes on without a name as long as somebody keeps its descriptor.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from restart_world import Child, Series, chain_of, manifest, payload, put, read, until
from typer.testing import CliRunner

import kvd
from kvd.kvctl.main import app
from kvd.probe import leftovers
from kvd.server import keeping

pytestmark = pytest.mark.slow

POOL = {"size": "16MiB", "segment_size": "8MiB", "backing": "posix"}


@pytest.fixture
def series(daemon: Any) -> Iterator[Callable[..., Series]]:
    made: list[Series] = []

    def make(**options: Any) -> Series:
        made.append(Series(daemon, pool=POOL, **options))
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


class Names:
    """Names in /dev/shm that daemons of one series made; others on this host have their own."""

    def __init__(self) -> None:
        self.pids: list[int] = []

    def there(self, series: Series) -> set[str]:
        self.pids.append(series.running.pid)
        made = tuple(f"kvd-{pid}-" for pid in self.pids)
        return {name for name in os.listdir("/dev/shm") if name.startswith(made)}


@pytest.fixture
def names() -> Names:
    return Names()


@pytest.mark.parametrize("manager", [False, True], ids=["keeper", "service manager"])
@pytest.mark.parametrize("end", ["stop", "kill"])
def test_named_memory_is_taken_over_warm(
    series: Any, child: Any, manager: bool, end: str, names: Names
) -> None:
    """By its descriptor: the name is gone. Fails if a next daemon does not remove the names of a killed one."""
    one = series(manager=manager)
    made = names.there(one)
    assert len(made) == 2
    old = child(one)
    assert old.say("put", 2, 4) == "done"
    assert old.say("lease", 2, 4) == "4"
    with kvd.connect(one.running.socket) as store:
        ns = store.namespace(manifest())
        chain = put(ns, 1, 8)
        lease = ns.acquire(chain[:1])
        view = lease[0].view
        was = store.native.epoch
        getattr(one, end)()
        assert names.there(one) == (set() if end == "stop" else made)
        assert bytes(view) == payload(1, 0)
        one.start()
        until(lambda: ns.match(chain) == 8 and store.native.epoch != was, "attaching again")
        restart = one.restart()
        assert (restart["adopted"], restart["families"], restart["dropped_segment"]) == (True, 12, 0)
        assert not names.there(one) & made, "the next daemon removes the names of one that was killed"
        assert bytes(view) == payload(1, 0)
        assert old.say("check", 2) == "True"
        assert read(ns, chain) == [payload(1, at) for at in range(8)]
        for name in range(3, 40):
            put(ns, name, 16)  # twice the pool: what is leased is not given away
        assert bytes(view) == payload(1, 0)
        assert old.say("check", 2) == "True"
        view.release()
        del view
        lease.release()
    old.close()
    one.stop()
    assert names.there(one) == set()


def test_a_killed_daemon_leaves_names_that_purge_removes(series: Any, names: Names) -> None:
    one = series()
    with kvd.connect(one.running.socket) as store:
        put(store.namespace(manifest()), 1, 4)
    one.kill()
    left = names.there(one)
    assert len(left) == 2
    found = leftovers.find(str(one.directory), one.running.socket)
    assert {item.kind for item in found} == {"keeper", "socket", "memory"}
    done = CliRunner().invoke(app, ["purge", "--config", str(one.running.config), "--yes"])
    assert done.exit_code == 0, done.output
    assert all(name in done.output for name in left)
    assert names.there(one) == set()
    assert leftovers.find(str(one.directory), one.running.socket) == []
    one.start()
    assert not one.restart()["adopted"]
    with kvd.connect(one.running.socket) as store:
        ns = store.namespace(manifest())
        assert ns.match(chain_of(ns, 1, 4)) == 0
        assert read(ns, put(ns, 1, 4)) == [payload(1, at) for at in range(4)]
    one.stop()
    assert names.there(one) == set()


def test_twenty_cycles_leave_dev_shm_as_it_was(series: Any, names: Names) -> None:
    """Stop and kill in turns over the same memory: no name and no descriptor more than before, and still warm."""
    one = series()
    with kvd.connect(one.running.socket) as store:
        put(store.namespace(manifest()), 1, 8)
    names.there(one)
    fds = descriptors(one)
    for turn in range(20):
        (one.kill if turn % 2 else one.stop)()
        one.start()
        assert one.restart()["families"] == 8, turn
        assert len(names.there(one)) <= 2
    until(lambda: descriptors(one) <= fds, "the end of what the daemon opens for a moment")
    one.running.stop()
    keeper = leftovers.dial_keeper(leftovers.keeper_path(str(one.directory)))
    assert keeper is not None
    with keeper:
        kept = keeping.fetch(keeper)
    for fd in kept.values():
        os.close(fd)
    assert sorted(kept) == ["kvd-meta-21", "kvd-names-21", "kvd-pool-0", "kvd-pool-1"]
    one.close()
    assert names.there(one) == set()


def descriptors(series: Series) -> int:
    return len(os.listdir(f"/proc/{series.running.pid}/fd"))
