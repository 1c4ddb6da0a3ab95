"""Clients that ask for nothing see their daemon go all the same, and attach to the next one.

All of these fail if no thread watches the connections: what such a client finds is in memory that is still mapped.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from restart_world import Series, chain_of, manifest, put, until

import kvd
from kvd.clientlib import watch as watching

pytestmark = pytest.mark.slow


@pytest.fixture
def cold(daemon: Any) -> Iterator[Callable[..., Series]]:
    """Daemons that keep nothing for the next one."""
    made: list[Series] = []

    def make() -> Series:
        made.append(Series(daemon, restart={"keep": "off"}))
        return made[-1]

    yield make
    for one in made:
        one.close()


def watchers() -> int:
    return sum(thread.name == "kvd-watch" for thread in threading.enumerate())


def pools_mapped() -> int:
    with open("/proc/self/maps", encoding="ascii") as maps:
        return sum("kvd-pool" in line for line in maps)


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_an_idle_client_lets_go_of_the_old_pool_and_attaches_to_the_next_daemon(cold: Any, end: str) -> None:
    one = cold()
    with kvd.connect(one.running.socket) as store:
        put(store.namespace(manifest()), 1, 4)
        mapped, before = pools_mapped(), store.native.epoch
        getattr(one, end)()
        one.start()
        until(lambda: store.native.epoch != before, "attaching again, without a call")
        until(lambda: pools_mapped() <= mapped, "the old pool's leaving")
        assert one.status()["clients"]["attached"] == 1
        assert store.lost is None


def test_a_client_that_finds_everything_misses_once_its_daemon_is_gone(cold: Any) -> None:
    one = cold()
    with kvd.connect(one.running.socket) as store:
        ns = store.namespace(manifest())
        chain = put(ns, 1, 4)
        held = ns.acquire(chain)
        before = [bytes(lease.view) for lease in held]
        one.kill()
        until(lambda: ns.match(chain_of(ns, 1, 4)) == 0, "a miss")
        one.start()
        until(lambda: store.lost is None, "attaching again")
        assert ns.match(chain) == 0
        assert [bytes(lease.view) for lease in held] == before
        put(ns, 1, 4)
        assert ns.match(chain) == 4
        held.release()


def test_a_store_that_shall_not_attach_again_only_learns_of_it(cold: Any) -> None:
    one = cold()
    with kvd.connect(one.running.socket, reattach=False) as store:
        one.kill()
        until(lambda: store.lost is not None, "noticing")
        one.start()
        assert one.status()["clients"]["attached"] == 0


def test_the_thread_ends_with_the_last_store(cold: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one = cold()
    assert not watchers()
    with kvd.connect(one.running.socket):
        with kvd.connect(one.running.socket):
            assert watchers() == 1
        assert watchers() == 1
    assert not watchers()
    monkeypatch.setattr(watching, "_DROPPED_LOOK_S", 0.02)
    dropped = kvd.connect(one.running.socket)
    assert watchers() == 1
    del dropped
    gc.collect()
    until(lambda: not watchers(), "the end of the thread of a store that was dropped")


def test_a_forked_child_watches_for_itself(cold: Any) -> None:
    one = cold()
    with kvd.connect(one.running.socket) as store:
        before = store.native.epoch
        told, tells = os.pipe()
        pid = os.fork()
        if not pid:
            code = 1
            try:
                with kvd.connect(one.running.socket) as own:
                    first = own.native.epoch
                    os.write(tells, b"1")
                    until(lambda: own.native.epoch != first, "attaching again in the child")
                    code = 0
            finally:
                os._exit(code)
        assert os.read(told, 1) == b"1"
        one.kill()
        one.start()
        until(lambda: store.native.epoch != before, "attaching again in the parent")
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        os.close(told)
        os.close(tells)
