"""Clients that ask for nothing see their daemon go all the same, and attach to the next one.

All of these fail if no thread watches the connections: what such a client finds is in memory that is still mapped.
"""

from __future__ import annotations

import gc
import os
import threading
import time
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


def test_an_idle_client_says_when_it_has_let_go_of_the_last_daemons_memory(daemon: Any) -> None:
    """Fails if only a call of the client tells: the daemon would wait for an idle one as long as it lives."""
    one = Series(daemon)
    try:
        with kvd.connect(one.running.socket) as store:
            ns = store.namespace(manifest())
            leases, before = ns.acquire(put(ns, 1, 4)), store.native.epoch
            one.kill()
            one.start()
            until(lambda: store.native.epoch != before, "attaching again")
            until(
                lambda: [row["leases"] for row in one.restart()["waiting_for"]] == [4],
                "waiting for the leases",
            )
            leases.release()
            until(lambda: not one.restart()["waiting_for"], "the word that they are over")
    finally:
        one.close()


def test_a_store_that_shall_not_attach_again_only_learns_of_it(cold: Any) -> None:
    one = cold()
    with kvd.connect(one.running.socket, reattach=False) as store:
        one.kill()
        until(lambda: store.lost is not None, "noticing")
        one.start()
        assert one.status()["clients"]["attached"] == 0


def test_the_thread_ends_with_the_last_store(cold: Any) -> None:
    one = cold()
    assert not watchers()
    with kvd.connect(one.running.socket):
        with kvd.connect(one.running.socket):
            assert watchers() == 1
        assert watchers() == 1
    assert not watchers()
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


def ends(action: Callable[[], object]) -> bool:
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    thread.join(10)
    return not thread.is_alive()


def test_a_finaliser_may_close_a_store_in_the_middle_of_everything(cold: Any) -> None:
    """A collection runs where it likes. Fails if a lock that is held there cannot be taken again."""
    one = cold()
    first, second = kvd.connect(one.running.socket), kvd.connect(one.running.socket)

    def in_the_watch() -> None:
        with watching.watch._lock:
            first.close()

    def in_a_renewal() -> None:
        with second._renewing:
            second.close()

    assert ends(in_the_watch)
    assert ends(in_a_renewal)
    until(lambda: one.status()["clients"]["attached"] == 0, "both leaving")
    assert not watchers()


def test_a_store_that_is_closed_while_it_attaches_stays_closed(
    cold: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = cold()
    store = kvd.connect(one.running.socket)
    attach = store._attach
    done = threading.Event()

    def closing(hello_s: float) -> Any:
        following = attach(hello_s)
        store.close()
        done.set()
        return following

    monkeypatch.setattr(store, "_attach", closing)
    one.kill()
    one.start()
    assert done.wait(10)
    until(lambda: one.status()["clients"]["attached"] == 0, "leaving again")
    until(lambda: not watchers(), "the end of the thread")


def test_who_cannot_go_on_without_a_daemon_does_not_wait_for_the_pause_of_others(cold: Any) -> None:
    one = cold()
    with kvd.connect(one.running.socket) as store:
        one.kill()
        until(lambda: store.lost is not None, "noticing")
        store._look_ns += 60 * 10**9  # as after a long outage, and more
        one.start()
        until(lambda: time.monotonic_ns() > store._eager_ns, "20 ms")
        assert store.status()["clients"]["attached"] == 1


def test_without_a_thread_to_watch_a_client_works_all_the_same(
    cold: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one = cold()
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name == "kvd-watch":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
    before = len(os.listdir("/proc/self/fd"))
    with kvd.connect(one.running.socket) as store:
        chain = put(store.namespace(manifest()), 1, 4)
        assert store.namespace(manifest()).match(chain) == 4
    assert len(os.listdir("/proc/self/fd")) == before
    assert "noticed only where" in caplog.text
    monkeypatch.undo()
    with kvd.connect(one.running.socket):
        assert watchers() == 1
