"""The client when things go wrong: closed while in use, a full ring, a daemon that stands still, loops that end.

Daemons are stopped with SIGSTOP: they answer nothing until SIGCONT, whatever the machine's load.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import threading
import time
from typing import Any

import pytest
from limits_world import SIZE, WAIT_S, chain_of, namespace, reserved_bytes, stopped, until_reserved

import kvd
from kvd.errors import (
    CorruptionError,
    KvdError,
    LifecycleError,
    UnavailableError,
    UsageError,
    ViewsAliveError,
)
from kvd.shm.messages import Sq
from kvd.types import Member


def test_a_store_that_closes_under_a_writable_view_gives_its_slot_to_nobody(daemon: Any) -> None:
    """Fails if close counts leases alone: the slot is freed, and the view writes into another client's object."""
    running = daemon(pool={"size": "2MiB", "families_max": 64}, clients={"reserved_max": "100%"})
    store = kvd.connect(running.socket)
    ns = namespace(store)
    writes = ns.reserve(chain_of(ns, 1), nbytes=2 << 20)
    view = writes[0].view
    store.close()
    view[:4] = b"mine"  # still memory of this process
    with kvd.connect(running.socket) as other:
        theirs = namespace(other)
        with pytest.raises(kvd.CapacityError):
            theirs.reserve(chain_of(theirs, 1, 1), nbytes=2 << 20)
    with pytest.raises(UsageError, match="closed"):
        writes[0].view  # noqa: B018
    view.release()


def test_a_store_that_closes_with_a_reservation_nobody_looks_at_gives_it_back(daemon: Any) -> None:
    """Fails if close leaves it to the daemon, which keeps what a living process may be writing."""
    running = daemon()
    store = kvd.connect(running.socket)
    ns = namespace(store)
    writes = ns.reserve(chain_of(ns, 2), nbytes=SIZE)
    writes[0].view[:2] = b"ab"
    writes.fill([None, b"x" * SIZE])
    store.close()
    until_reserved(running, 0)
    with pytest.raises(LifecycleError, match="given back"):
        writes[0].view  # noqa: B018
    with pytest.raises(LifecycleError, match="given back"):
        writes.fill([b"x" * SIZE] * 2)


def test_what_was_never_filled_is_skipped_and_stays_reserved(daemon: Any) -> None:
    """Fails if publish takes every granted item: the slot shows what its memory held before, of another tenant."""
    running = daemon(pool={"size": "2MiB", "families_max": 64}, clients={"reserved_max": "100%"})
    with kvd.connect(running.socket) as store:
        secret = namespace(store, tenant="a", salt="a")
        chunks = (2 << 20) // (64 << 10)
        with secret.reserve(chain_of(secret, chunks), nbytes=64 << 10) as writes:
            writes.fill([b"s" * (64 << 10)] * chunks)
            writes.publish()
        ns = namespace(store, tenant="b")
        chain = chain_of(ns, 4)
        with ns.reserve(chain, nbytes=64 << 10) as writes:
            writes.fill([b"x" * (64 << 10), None, None, None])
            writes[2].view[:] = b"y" * (64 << 10)
            expected = [kvd.Published.PUBLISHED, kvd.Published.SKIPPED] * 2
            assert writes.publish() == expected
            assert ns.match(chain) == 1
            assert reserved_bytes(running) == 2 * (64 << 10)
            with pytest.raises(LifecycleError, match="never filled"):
                writes[1].publish()
            writes[1].fill(b"z" * (64 << 10))
            assert writes.publish() == [kvd.Published.PUBLISHED] * 3 + [kvd.Published.SKIPPED]
        assert ns.match(chain) == 3
        until_reserved(running, 0)


def test_an_item_written_in_place_after_it_was_filled_has_the_checksum_of_what_it_holds(daemon: Any) -> None:
    """Fails if a view does not undo the checksum that fill computed."""
    with kvd.connect(daemon().socket, verify_reads=True) as store:
        ns = namespace(store)
        chain = chain_of(ns, 2)
        with ns.reserve(chain, nbytes=SIZE) as writes:
            early = writes[1].view
            writes.fill([b"a" * SIZE] * 2)
            writes[0].view[:1] = b"b"
            early[:1] = b"c"
            with pytest.raises(ViewsAliveError):
                writes.publish()
            early.release()
            writes.publish()
        with ns.acquire(chain) as leases:
            assert [bytes(lease.view[:2]) for lease in leases] == [b"ba", b"ca"]


def test_what_may_have_been_published_cannot_be_written_again(daemon: Any) -> None:
    """Fails if a publication without an answer leaves its items open: a later view writes into a published object."""
    running = daemon()
    with kvd.connect(running.socket) as store:
        ns = namespace(store)
        chain = chain_of(ns, 2)
        with ns.reserve(chain, nbytes=SIZE, deadline_s=0.2) as writes:
            writes.fill([b"a" * SIZE] * 2)
            with stopped(running):
                with pytest.raises(UnavailableError, match="PUBLISH"):
                    writes.publish()
                with pytest.raises(LifecycleError, match="nobody knows"):
                    writes[0].view  # noqa: B018
                with pytest.raises(LifecycleError, match="nobody knows"):
                    writes.fill([b"b" * SIZE] * 2)
            writes._deadline_s = WAIT_S
            with contextlib.suppress(LifecycleError):  # whichever: both publications may be in the ring
                writes.publish()
        assert ns.match(chain) == 2
        with ns.acquire(chain) as leases:
            assert bytes(leases[0].view) == b"a" * SIZE


def test_fill_looks_at_all_sources_before_it_copies_one(daemon: Any) -> None:
    with kvd.connect(daemon().socket) as store:
        ns = namespace(store)
        with ns.reserve(chain_of(ns, 3), nbytes=SIZE) as writes:
            for wrong, what in ((b"short", "5 B for item 2 of 4096 B"), (7, "item 2")):
                with pytest.raises(UsageError, match=what):
                    writes.fill([b"a" * SIZE, None, wrong])
            with pytest.raises(UsageError, match="contiguous"):
                writes.fill([b"a" * SIZE, None, memoryview(bytes(2 * SIZE))[::2]])
            assert writes.publish() == [kvd.Published.SKIPPED] * 3
            writes.fill([b"a" * SIZE] * 3)
            assert writes.publish() == [kvd.Published.PUBLISHED] * 3
        assert store.stats()["bytes_filled"] == 3 * SIZE


# --- what is read


def test_verify_reads_looks_at_every_member_once_whichever_way_it_is_read(daemon: Any) -> None:
    """Fails if member 0 alone, or acquire alone, is verified; and if each look computes the checksum again."""
    running = daemon(objects={"verify_sample": 0})
    with kvd.connect(running.socket) as store, kvd.connect(running.socket, verify_reads=True) as careful:
        ns, theirs = namespace(store), namespace(careful)
        chain = chain_of(ns, 3)
        writes = ns.reserve(chain, members=[Member(0, SIZE), Member(1, SIZE)])
        writes.fill([b"a" * SIZE] * 6)
        writes.publish()
        places = [int(place) for place in writes._places]

        def spoil(item: int) -> None:
            store.native.writable(places[item], SIZE).view[7] ^= 1

        spoil(1)
        with theirs.acquire(chain) as leases:
            assert bytes(leases[0].view) == b"a" * SIZE, "member 0 is as it was"
            with pytest.raises(CorruptionError, match="member 1"):
                leases[0].member_view(1)
            with pytest.raises(CorruptionError, match="member 1"):
                leases.copy_to([bytearray(SIZE)], member=1)
            assert bytes(leases[1].view) == b"a" * SIZE
            spoil(2)
            assert bytes(leases[1].view) != b"a" * SIZE, "verified once under this lease"
        spoil(4)
        lease = careful.fetch(chain[2])
        if lease is not None:  # withdrawn with its prefix, it is a miss
            with pytest.raises(CorruptionError, match="member 0"):
                lease.view  # noqa: B018


def test_fetch_verifies(daemon: Any) -> None:
    """Fails if fetch makes its lease without the flag."""
    running = daemon(objects={"verify_sample": 0})
    with kvd.connect(running.socket) as store, kvd.connect(running.socket, verify_reads=True) as careful:
        ns = namespace(store)
        chain = chain_of(ns, 1)
        writes = ns.reserve(chain, nbytes=SIZE)
        writes.fill([b"a" * SIZE])
        writes.publish()
        store.native.writable(int(writes._places[0]), SIZE).view[7] ^= 1
        lease = careful.fetch(chain[0])
        assert lease is not None
        with pytest.raises(CorruptionError, match="member 0"):
            lease.view  # noqa: B018


def test_a_lease_that_is_over_says_so_in_its_own_words(daemon: Any) -> None:
    with kvd.connect(daemon().socket) as store:
        ns = namespace(store)
        chain = chain_of(ns, 1)
        with ns.reserve(chain, nbytes=SIZE) as writes:
            writes.fill([b"a" * SIZE])
            writes.publish()
        leases = ns.acquire(chain)
        lease = leases[0]
        assert lease.size() == SIZE
        with pytest.raises(UsageError, match="no member 5"):
            lease.size(5)
        with pytest.raises(UsageError, match="no member 5"):
            lease.verify(5)
        leases.release()
        for use in (leases.export, lease.size, lease.verify, lambda: lease.view):
            with pytest.raises(LifecycleError, match="over"):
                use()


# --- a daemon that stands still


@pytest.mark.slow
def test_threads_before_a_full_ring_are_all_served_when_the_daemon_goes_on(daemon: Any) -> None:
    """Fails if one that waits for room sleeps on the wake socket beside the leader: it takes the leader's wake-up."""
    running = daemon(pool={"families_max": 8192})
    with kvd.connect(running.socket) as store:
        ns = namespace(store)
        chains = [ns.chain(list(range(k * 10**6, k * 10**6 + 900)), 1) for k in range(6)]
        for _ in range(3):
            results: list[str] = []

            def one(chain: kvd.Chain, results: list[str] = results) -> None:
                try:
                    ns.reserve(chain, nbytes=64, deadline_s=WAIT_S).abort()
                    results.append("ok")
                except KvdError as error:
                    results.append(str(error))

            with stopped(running):
                while store.native.submit(Sq.PING, 1 << 40, b""):
                    pass
                threads = [threading.Thread(target=one, args=(chain,)) for chain in chains]
                for thread in threads:
                    thread.start()
                store.calls.wake_daemon()
            begin = time.monotonic()
            for thread in threads:
                thread.join()
            assert results == ["ok"] * len(chains)
            assert time.monotonic() - begin < WAIT_S / 2, "one of them slept until its deadline"
        until_reserved(running, 0)


def test_an_abort_that_finds_the_ring_full_is_sent_later(daemon: Any) -> None:
    """Fails if abort drops what the ring has no room for: the slots come back when the process ends."""
    running = daemon()
    with kvd.connect(running.socket) as store:
        ns = namespace(store)
        writes = ns.reserve(chain_of(ns, 4), nbytes=SIZE)
        with stopped(running):
            while store.native.submit(Sq.PING, 1 << 40, b""):
                pass
            writes.abort()
            store.calls.wake_daemon()
        until_reserved(running, 0)  # nobody calls anything


def test_an_abort_is_done_though_answers_nobody_reads_fill_the_ring(daemon: Any) -> None:
    """Fails if the client takes no more answers once the abort is sent: the daemon, which finds no room for the answer
    to what lies before it, reads no further until somebody calls.
    """
    running = daemon()
    with kvd.connect(running.socket) as store:
        ns = namespace(store)
        writes = ns.reserve(chain_of(ns, 4), nbytes=SIZE)
        while not running.call("status")["counters"]["answers_deferred"]:
            while store.native.submit(Sq.PING, 1 << 40, b""):
                pass
            store.calls.wake_daemon()
        while store.native.submit(Sq.PING, 1 << 40, b""):
            pass
        writes.abort()
        until_reserved(running, 0)  # nobody calls anything


def test_what_is_sent_without_waiting_is_done_though_all_of_it_found_room(daemon: Any) -> None:
    """Fails if only what is due starts the taking of answers: they fill their ring, and the abort lies behind them."""
    running = daemon(clients={"sq_size": "4MiB", "cq_size": "512KiB"})
    with kvd.connect(running.socket) as store:
        ns = namespace(store)
        writes = ns.reserve(chain_of(ns, 4), nbytes=SIZE)
        for _ in range(40_000):  # 16 B each way
            store.calls.post(Sq.PING, b"")
        writes.abort()
        until_reserved(running, 0)  # nobody calls anything


def test_a_reservation_keeps_its_deadline_though_its_namespace_is_new(daemon: Any) -> None:
    """Fails if the registration waits by the store's own deadline, or for another thread's turn without one."""
    running = daemon()
    with kvd.connect(running.socket, deadline_s=WAIT_S) as store:
        ns = namespace(store)
        errors: list[float] = []

        def ask() -> None:
            begin = time.monotonic()
            with pytest.raises(UnavailableError):
                ns.reserve(chain_of(ns, 1), nbytes=SIZE, deadline_s=0.2)
            errors.append(time.monotonic() - begin)

        with stopped(running):
            threads = [threading.Thread(target=ask) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert len(errors) == 4
        assert max(errors) < WAIT_S / 4


def test_leaving_an_async_block_does_not_hold_the_loop(daemon: Any) -> None:
    """Fails if the block closes on the loop: the daemon does not answer, and nothing else runs for a second."""
    running = daemon()

    async def main() -> float:
        worst = 0.0

        async def beat() -> None:
            nonlocal worst
            while True:
                begin = time.monotonic()
                await asyncio.sleep(0.005)
                worst = max(worst, time.monotonic() - begin)

        async with await kvd.connect_async(running.socket):
            beating = asyncio.ensure_future(beat())
            await asyncio.sleep(0)
            os.kill(running.pid, signal.SIGSTOP)
        await asyncio.sleep(0)
        beating.cancel()
        return worst

    try:
        assert asyncio.run(main()) < 0.6
    finally:
        os.kill(running.pid, signal.SIGCONT)


# --- closing while others wait


def test_close_waits_until_nobody_looks_at_the_wake_socket(daemon: Any) -> None:
    """Fails if close does not wait for the leader: it polls what is another socket by now, and eats its bytes."""
    running = daemon()
    store = kvd.connect(running.socket)
    ns = namespace(store)
    ns.reserve(chain_of(ns, 1), nbytes=SIZE).abort()
    number = store.present_session._wake.fileno()
    results: list[KvdError] = []

    def ask() -> None:
        try:
            ns.reserve(chain_of(ns, 1), nbytes=SIZE, deadline_s=WAIT_S)
        except KvdError as error:
            results.append(error)

    with stopped(running):
        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        while len(store.calls._waiting) < 3 or not store.calls._asleep:
            pass
        store.close()
        ours, theirs = socket.socketpair()
        with ours, theirs:
            reused = os.dup2(ours.fileno(), number)
            theirs.sendall(b"engine data")
            for thread in threads:
                thread.join()
            with socket.socket(fileno=reused) as engine:
                engine.settimeout(WAIT_S)
                assert engine.recv(100) == b"engine data"
    assert [error.code for error in results] == ["KVD-USAGE-CLOSED"] * 3


async def test_close_from_a_thread_leaves_the_loop_before_the_socket_is_closed(daemon: Any) -> None:
    running = daemon()
    store = await kvd.connect_async(running.socket)
    ns = namespace(store)
    (await ns.reserve_async(chain_of(ns, 1), nbytes=SIZE)).abort()
    wake = store.present_session._wake
    number = wake.fileno()
    closing = threading.Thread(target=store.close)
    closing.start()
    closing.join()  # the loop cannot turn meanwhile
    assert wake.fileno() == number, "closed while a loop still watched its number"
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert wake.fileno() == -1
    assert not asyncio.get_running_loop().remove_reader(number)


def test_a_loop_that_ended_takes_nobody_elses_answer(daemon: Any) -> None:
    """Fails if handing an answer to a closed loop raises: the answers behind it in the ring are lost."""
    running = daemon()
    with kvd.connect(running.socket) as store:
        ns = namespace(store)
        chain = chain_of(ns, 4)

        async def one() -> None:
            (await ns.reserve_async(chain, nbytes=SIZE)).abort()

        for _ in range(5):
            asyncio.run(one())
        assert len(store.calls._loops) == 1, "ended loops are forgotten"
        results: list[str] = []

        def ask() -> None:
            try:
                ns.reserve(chain, nbytes=SIZE, deadline_s=WAIT_S).abort()
                results.append("ok")
            except KvdError as error:
                results.append(str(error))

        with stopped(running):
            loop = asyncio.new_event_loop()
            pending = loop.create_task(ns.reserve_async(chain, nbytes=SIZE))
            while not store.calls._waiting:
                loop.run_until_complete(asyncio.sleep(0))
            loop.close()
            threads = [threading.Thread(target=ask) for _ in range(2)]
            for thread in threads:
                thread.start()
            while len(store.calls._waiting) < 3:
                pass
        for thread in threads:
            thread.join(WAIT_S)
        assert results == ["ok", "ok"]
        until_reserved(running, 0)  # what was granted to the closed loop was given back
        pending._log_destroy_pending = False  # type: ignore[attr-defined]
        del pending
        gc.collect()


# --- smaller


def test_equal_geometries_are_one(daemon: Any) -> None:
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "hidden_size": 64, "torch_dtype": "bfloat16",
    }  # fmt: skip
    with kvd.connect(daemon().socket) as store:
        ns = namespace(store)
        chain = chain_of(ns, 4)
        for _ in range(5):
            ns.match(chain, kvd.Geometry.from_hf_config(config, dtype="bfloat16"))
        assert len(ns._families) == 1


def test_a_forked_child_cannot_use_its_parents_connection(daemon: Any) -> None:
    """Fails if the child may ask: parent and child read each other's answers."""
    with kvd.connect(daemon().socket) as store:
        control = store.present_session._control
        child = os.fork()
        if child == 0:
            try:
                from kvd.wire import messages as wire

                control.request(wire.Call("health", {}), wire.Result, deadline_s=1)
            except UsageError as error:
                os._exit(7 if error.code == "KVD-USAGE-FORKED" else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert store.call("health")["state"] == "ok"


def test_a_batch_that_is_too_large_says_how_to_split_it(daemon: Any) -> None:
    with kvd.connect(daemon().socket) as store:
        ns = namespace(store)
        with pytest.raises(UsageError, match=r"at most 2048 chunks: chain\[:2048\], then chain\[2048:4096\]"):
            ns.reserve(chain_of(ns, 3000), members=[Member(0, 64), Member(1, 64)])


def test_a_message_that_the_ring_cannot_take_is_refused_by_name(daemon: Any) -> None:
    """Fails if what the native client raises is passed on: a ValueError, and a waiter that nobody answers."""
    with kvd.connect(daemon().socket) as store:
        too_large = bytes(store.native.payload_bytes_max + 1)
        with pytest.raises(UsageError, match=r"sq_size"):
            store.calls.call(Sq.PING, too_large, 1.0)
        assert not store.calls._waiting


# --- stores that nobody closes
