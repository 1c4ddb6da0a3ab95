"""Stores that are dropped or closed with something open: what they had comes back, and nothing waits for it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
import threading
import time
import weakref
from typing import Any

import pytest
from limits_world import SIZE, WAIT_S, chain_of, namespace, reserved_bytes, stopped, until_reserved
from restart_world import until

import kvd
from kvd.errors import (
    KvdError,
    ViewsAliveError,
)


def slots_taken(running: Any) -> int:
    clients = running.call("status")["clients"]
    return int(clients["attached"] + clients["disconnected"])


def until_slots(running: Any, expected: int) -> None:
    end = time.monotonic() + WAIT_S
    while (found := slots_taken(running)) != expected:
        assert time.monotonic() < end, f"{found} slots are taken, {expected} were due"


def test_a_store_that_is_dropped_gives_its_slot_back(daemon: Any) -> None:
    """Fails if nobody says farewell: each dropped store costs a slot until the process ends, here after two."""
    running = daemon(clients={"max": 2})
    for number in range(8):
        store = kvd.connect(running.socket)
        ns = namespace(store)
        writes = ns.reserve(chain_of(ns, 2, number), nbytes=SIZE)
        writes[0].fill(bytes(SIZE))
        writes[0].publish()
        if number % 2:
            cycle: list[Any] = [store, ns, writes]
            cycle.append(cycle)
            del cycle
        del store, ns, writes
        gc.collect()
        until_slots(running, 0)
        until_reserved(running, 0)


def test_writes_outlive_a_store_that_was_dropped(daemon: Any) -> None:
    """Fails if the store's end were the end of what was made with it: `kvd.connect().namespace(m).reserve(...)`."""
    running = daemon()
    chain, writes = dropped_with_writes(running)
    gc.collect()
    assert slots_taken(running) == 1
    writes.fill([bytes(SIZE)] * 2)
    assert writes.publish() == [kvd.Published.PUBLISHED] * 2
    with kvd.connect(running.socket) as other:
        assert namespace(other).match(chain) == 2
    del writes
    gc.collect()
    until_slots(running, 0)


def dropped_with_writes(running: Any) -> tuple[kvd.Chain, Any]:
    ns = namespace(kvd.connect(running.socket))
    chain = chain_of(ns, 2)
    return chain, ns.reserve(chain, nbytes=SIZE)


def test_a_view_of_a_dropped_store_stays_what_it_is(daemon: Any) -> None:
    """A slot under a living view is nobody else's, whoever dropped the rest; the process's end gives it back."""
    running = daemon(pool={"size": "2MiB", "families_max": 64}, clients={"reserved_max": "100%"})

    def dropped() -> memoryview:
        ns = namespace(kvd.connect(running.socket))
        with contextlib.suppress(ViewsAliveError), ns.reserve(chain_of(ns, 1), nbytes=2 << 20) as writes:
            view: memoryview = writes[0].view
        return view

    view = dropped()
    gc.collect()
    until_slots(running, 1)
    view[:4] = b"mine"
    with kvd.connect(running.socket) as other:
        ns = namespace(other)
        with pytest.raises(kvd.CapacityError):
            ns.reserve(chain_of(ns, 1, 1), nbytes=2 << 20)
    assert bytes(view[:4]) == b"mine"


def test_a_store_that_was_used_on_an_event_loop_and_dropped_is_gone(daemon: Any) -> None:
    """Fails if the loop keeps what it watches: the store would live as long as the loop."""
    running = daemon(clients={"max": 2})

    async def use(seed: int) -> None:
        store = await kvd.connect_async(running.socket)
        ns = namespace(store)
        async with await ns.reserve_async(chain_of(ns, 1, seed), nbytes=SIZE) as writes:
            writes.fill([bytes(SIZE)])
            assert await writes.publish_async() == [kvd.Published.PUBLISHED]

    async def main() -> None:
        for seed in range(6):
            await use(seed)
            gc.collect()
            await asyncio.to_thread(until_slots, running, 0)

    fds = len(os.listdir("/proc/self/fd"))
    asyncio.run(main())
    until(lambda: len(os.listdir("/proc/self/fd")) <= fds, "the descriptors' closing")


def test_stores_that_are_dropped_while_their_loop_stands_still_keep_no_descriptor(daemon: Any) -> None:
    """Fails if a loop that is kept and not running is left to close them: each store would keep two till it runs again.

    The loop is none the worse for it: the numbers of what was closed are another's, and it watches that.
    """
    running = daemon(clients={"max": 5})
    loop = asyncio.new_event_loop()
    stores: list[kvd.Store] = []

    async def use() -> None:
        for seed in range(5):
            stores.append(await kvd.connect_async(running.socket))
            ns = namespace(stores[-1])
            (await ns.reserve_async(chain_of(ns, 1, seed), nbytes=SIZE)).abort()

    async def watch() -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            readable = asyncio.Event()
            asyncio.get_running_loop().add_reader(ours, readable.set)
            theirs.send(b"x")
            await asyncio.wait_for(readable.wait(), WAIT_S)
            asyncio.get_running_loop().remove_reader(ours)

    with contextlib.closing(loop):
        fds = len(os.listdir("/proc/self/fd"))
        loop.run_until_complete(use())
        assert len(os.listdir("/proc/self/fd")) >= fds + 10
        stores.clear()
        gc.collect()
        until_slots(running, 0)
        assert len(os.listdir("/proc/self/fd")) <= fds
        loop.run_until_complete(watch())


def test_a_grant_in_flight_at_close_comes_back(daemon: Any) -> None:
    """Fails if only what the client knows of is given back: what was granted meanwhile is kept until its end."""
    running = daemon(clients={"max": 2})
    store = kvd.connect(running.socket, deadline_s=WAIT_S)
    ns = namespace(store)
    ns.reserve(chain_of(ns, 1), nbytes=SIZE).abort()  # knows its namespace
    errors: list[KvdError] = []

    def reserve() -> None:
        try:
            ns.reserve(chain_of(ns, 4, 1), nbytes=SIZE)
        except KvdError as error:
            errors.append(error)

    with stopped(running):
        pushed = store.native.counters  # the ring is looked at below
        thread = threading.Thread(target=reserve)
        thread.start()
        end = time.monotonic() + WAIT_S
        while not store.calls._waiting and time.monotonic() < end:
            pushed()
        store.close()  # nobody answers: what it says is read later
        thread.join(WAIT_S)
    (error,) = errors
    assert error.code in ("KVD-USAGE-CLOSED", "KVD-UNAVAILABLE-DAEMON-GONE")
    until_slots(running, 0)
    until_reserved(running, 0)


def test_a_client_that_closes_with_open_reservations_leaves_nothing(daemon: Any) -> None:
    running = daemon(clients={"max": 1})
    for seed in range(3):
        store = kvd.connect(running.socket)
        ns = namespace(store)
        kept = ns.reserve(chain_of(ns, 3, seed), nbytes=SIZE)
        kept[0].fill(bytes(SIZE))
        store.close()
        assert slots_taken(running) == 0
        assert reserved_bytes(running) == 0
        with pytest.raises(KvdError):
            kept[1].fill(bytes(SIZE))


def test_a_child_that_drops_what_it_inherited_ends_nothing(daemon: Any) -> None:
    """Fails if the finaliser speaks for the parent: its slot would be another.s. Two things prevent that, and both
    must be left out to see it: that the finaliser looks at its process, and that the native client does.
    """
    running = daemon()
    store = kvd.connect(running.socket)
    ns = namespace(store)
    chain = chain_of(ns, 1)
    with ns.reserve(chain, nbytes=SIZE) as writes:
        writes.fill([b"\7" * SIZE])
        writes.publish()
    store.present_session.mapper.join()  # what a running thread holds is never collected in the child
    calls = weakref.ref(store.calls)
    pid = os.fork()
    if pid == 0:
        del store, ns, writes
        gc.collect()
        os._exit(0 if calls() is None else 1)
    assert os.waitpid(pid, 0)[1] == 0, "it was collected"
    assert slots_taken(running) == 1
    with ns.acquire(chain) as leases:
        assert bytes(leases[0].view) == b"\7" * SIZE
    assert ns.reserve(chain_of(ns, 1, 9), nbytes=SIZE).granted_count == 1
    store.close()
