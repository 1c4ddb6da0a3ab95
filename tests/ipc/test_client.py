"""The client against a real daemon: what a user of the README sees, sync and async, over threads and processes."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
from array import array
from typing import Any

import numpy as np
import pytest

import kvd
from kvd.errors import (
    CapacityError,
    CorruptionError,
    LifecycleError,
    UnavailableError,
    UsageError,
    ViewsAliveError,
)
from kvd.types import Member

CHUNK = 16
SIZE = 64 << 10


@pytest.fixture
def store(daemon: Any) -> Any:
    with kvd.connect(daemon().socket, client="test") as opened:
        yield opened


def manifest(**changes: Any) -> kvd.Manifest:
    fields = {"model": "m", "revision": "r1", "dtype": "bfloat16", "tenant": "", "salt": "", "fixed": "*"}
    return kvd.Manifest(**{**fields, **changes})


def tokens(chunks: int, seed: int = 1) -> array[int]:
    return array(
        "I", np.random.default_rng(seed).integers(0, 50_000, chunks * CHUNK, dtype=np.uint32).tobytes()
    )


def payloads(count: int, seed: int = 1, size: int = SIZE) -> list[bytes]:
    rng = np.random.default_rng(seed + 100)
    return [rng.bytes(size) for _ in range(count)]


def publish(ns: kvd.Namespace, chain: kvd.Chain, data: list[bytes]) -> list[kvd.Published]:
    with ns.reserve(chain, nbytes=len(data[0])) as writes:
        writes.fill(data)
        return writes.publish()


def test_published_chunks_are_found_and_read_back_exactly(store: kvd.Store) -> None:
    ns = store.namespace(manifest())
    chain = ns.chain(tokens(8), CHUNK)
    assert ns.match(chain) == 0
    data = payloads(8)
    assert publish(ns, chain, data) == [kvd.Published.PUBLISHED] * 8
    assert ns.match(chain) == 8
    with ns.acquire(chain) as leases:
        assert len(leases) == 8
        for lease, expected in zip(leases, data, strict=True):
            with lease.view as view:
                assert view.readonly
                assert view == expected
            lease.verify()


def test_a_prefix_is_matched_up_to_the_first_chunk_that_is_missing(store: kvd.Store) -> None:
    ns = store.namespace(manifest())
    chain = ns.chain(tokens(8), CHUNK)
    publish(ns, chain[:3], payloads(3))
    publish(ns, chain[5:], payloads(3, 2))
    assert ns.match(chain) == 3
    assert ns.match(chain[5:]) == 3
    with ns.acquire(chain) as leases:
        assert len(leases) == 3
        assert leases.tokens_count == 3 * CHUNK


def test_other_prefix_other_salt_other_revision_are_other_objects(store: kvd.Store) -> None:
    ns = store.namespace(manifest())
    chain = ns.chain(tokens(2), CHUNK)
    publish(ns, chain, payloads(2))
    moved = ns.chain(tokens(1, 9) + tokens(2), CHUNK)
    assert ns.match(moved[1:]) == 0
    for other in (manifest(salt="s"), manifest(revision="r2"), manifest(dtype="float16")):
        theirs = store.namespace(other)
        assert theirs.match(theirs.chain(tokens(2), CHUNK)) == 0


def test_extending_a_chain_gives_the_identities_of_the_whole(store: kvd.Store) -> None:
    ns = store.namespace(manifest())
    whole = ns.chain(tokens(7), CHUNK)
    grown = ns.chain(tokens(7)[:5], CHUNK)
    for begin, end in ((5, 40), (40, 41), (41, 112)):
        grown.extend(tokens(7)[begin:end])
    assert bytes(grown.identities) == bytes(whole.identities)
    assert grown.tokens_count == whole.tokens_count == 7 * CHUNK
    assert grown.usable_chunks == 6


def test_writing_in_place_and_publishing_one_by_one(store: kvd.Store) -> None:
    ns = store.namespace(manifest())
    chain = ns.chain(tokens(2), CHUNK)
    data = payloads(2)
    with ns.reserve(chain, nbytes=SIZE) as writes:
        writes[1].view[:] = data[1]
        assert writes[1].publish() is kvd.Published.PUBLISHED
        assert ns.match(chain) == 0
        assert ns.match(chain[1:]) == 1
        writes[0].view[:] = data[0]
        writes[0].publish()
        assert ns.match(chain) == 2
        with pytest.raises(LifecycleError, match="published"):
            writes[0].view  # noqa: B018
    with ns.acquire(chain) as leases:
        assert bytes(leases[0].view) == data[0]


def test_leaving_the_block_early_publishes_nothing_and_returns_the_space(store: kvd.Store) -> None:
    ns = store.namespace(manifest())
    chain = ns.chain(tokens(4), CHUNK)
    before = store.status()["core"]["pool"]["used_bytes"]
    with pytest.raises(RuntimeError, match="engine"), ns.reserve(chain, nbytes=SIZE) as writes:
        writes[0].fill(payloads(1)[0])
        raise RuntimeError("engine")
    assert ns.match(chain) == 0
    assert publish(ns, chain, payloads(4)) == [kvd.Published.PUBLISHED] * 4
    assert store.status()["core"]["pool"]["used_bytes"] >= before + 4 * SIZE


def test_the_first_of_two_writers_wins_and_both_are_told(daemon: Any) -> None:
    running = daemon()
    with kvd.connect(running.socket, client="a") as a, kvd.connect(running.socket, client="b") as b:
        na, nb = a.namespace(manifest()), b.namespace(manifest())
        chain = na.chain(tokens(1), CHUNK)
        wa, wb = na.reserve(chain, nbytes=SIZE), nb.reserve(chain, nbytes=SIZE)
        assert wa[0].status is wb[0].status is kvd.Granted.GRANTED
        skipped = nb.reserve(chain, nbytes=SIZE, skip_pending=True)
        assert skipped[0].status is kvd.Granted.PENDING
        wb.fill(payloads(1, 2))
        wa.fill(payloads(1, 1))
        assert wb.publish() == [kvd.Published.PUBLISHED]
        assert wa.publish() == [kvd.Published.PRESENT]
        with na.acquire(chain) as leases:
            assert bytes(leases[0].view) == payloads(1, 2)[0]
        again = na.reserve(chain, nbytes=SIZE)
        assert again[0].status is kvd.Granted.PRESENT
        assert again.granted_count == 0


def test_families_of_several_members_are_found_when_whole(store: kvd.Store) -> None:
    ns = store.namespace(manifest())
    chain = ns.chain(tokens(3), CHUNK)
    first, second = Member(0, SIZE, heads=(0, 4)), Member(1, 2 * SIZE, heads=(4, 8))
    with ns.reserve(chain, members=[first], family_members=2) as writes:
        writes.fill(payloads(3, 1))
        writes.publish()
    assert ns.match(chain) == 0
    with ns.reserve(chain, members=[first, second]) as writes:
        assert [w.status for w in writes] == [kvd.Granted.PRESENT, kvd.Granted.GRANTED] * 3
        big = payloads(3, 2, 2 * SIZE)
        writes.fill([None, big[0], None, big[1], None, big[2]])
        writes.publish()
    assert ns.match(chain) == 3
    with ns.acquire(chain) as leases:
        assert bytes(leases[1].member_view(1)) == big[1]
        assert bytes(leases[1].view) == payloads(3, 1)[1]
        with pytest.raises(UsageError, match="no member 7"):
            leases[0].member_view(7)


def test_views_keep_the_lease_and_an_early_release_says_so(store: kvd.Store) -> None:
    ns = store.namespace(manifest())
    chain = ns.chain(tokens(1), CHUNK)
    data = payloads(1)
    publish(ns, chain, data)
    leases = ns.acquire(chain)
    values = leases[0].array(np.uint8, (SIZE,))
    with pytest.raises(ViewsAliveError, match="alive"):
        leases.release()
    assert values.tobytes() == data[0]
    with pytest.raises(ValueError, match="read-only"):
        values[0] = 1
    assert store.stats()["leases_released"] == 0
    del values, leases
    gc.collect()
    assert store.stats()["leases_released"] == 1


def test_a_lease_used_after_release_is_refused(store: kvd.Store) -> None:
    ns = store.namespace(manifest())
    chain = ns.chain(tokens(1), CHUNK)
    publish(ns, chain, payloads(1))
    leases = ns.acquire(chain)
    lease = leases[0]
    leases.release()
    leases.release()
    with pytest.raises(LifecycleError, match="over"):
        lease.view  # noqa: B018


def test_publishing_while_an_array_of_the_slot_lives_is_refused(store: kvd.Store) -> None:
    ns = store.namespace(manifest())
    chain = ns.chain(tokens(1), CHUNK)
    with ns.reserve(chain, nbytes=SIZE) as writes:
        values = np.frombuffer(writes[0].view, dtype=np.uint8)
        values[:] = 7
        with pytest.raises(ViewsAliveError, match="writable view"):
            writes.publish()
        del values
        assert writes.publish() == [kvd.Published.PUBLISHED]
    with ns.acquire(chain) as leases:
        assert bytes(leases[0].view) == b"\7" * SIZE


def test_fetch_by_identity(store: kvd.Store) -> None:
    ns = store.namespace(manifest())
    chain = ns.chain(tokens(2), CHUNK)
    assert store.fetch(chain[0]) is None
    data = payloads(2)
    publish(ns, chain, data)
    lease = store.fetch(chain[1])
    assert lease is not None
    assert lease.size() == SIZE
    assert bytes(lease.view) == data[1]


def test_another_process_adopts_exported_leases(daemon: Any) -> None:
    running = daemon()
    with kvd.connect(running.socket) as scheduler, kvd.connect(running.socket, access="read") as worker:
        ns = scheduler.namespace(manifest())
        chain = ns.chain(tokens(4), CHUNK)
        data = payloads(4)
        publish(ns, chain, data)
        leases = ns.acquire(chain)
        exported = leases.export()
        theirs = worker.namespace(manifest())
        adopted = theirs.adopt(exported, theirs.chain_of(bytes(chain.identities), CHUNK))
        for other, said in (
            (chain[1:], "4 adopted leases"),
            (ns.chain(tokens(4, seed=9), CHUNK), "not of this chain"),
        ):
            with pytest.raises(LifecycleError, match=said):
                theirs.adopt(exported, other)
        leases.release()
        scheduler.call("clear")
        assert [bytes(lease.view) for lease in adopted] == data
        adopted.release()
        scheduler.call("clear")
        with pytest.raises(LifecycleError, match="chunk 0"):
            theirs.adopt(exported, theirs.chain_of(bytes(chain.identities), CHUNK))
        with pytest.raises(UsageError, match=r"read-only|reader"):
            theirs.reserve(chain, nbytes=SIZE)


def test_a_pool_full_of_leases_says_so_and_recovers(daemon: Any) -> None:
    running = daemon(pool={"size": "16MiB"}, clients={"reserved_max": "100%"})
    with kvd.connect(running.socket) as store:
        ns = store.namespace(manifest())
        size = 1 << 20
        chain = ns.chain(tokens(12), CHUNK)
        data = payloads(1, 1, size) * 12
        publish(ns, chain, data)
        leases = ns.acquire(chain)
        assert len(leases) == 12
        other = ns.chain(tokens(12, 2), CHUNK)
        with pytest.raises(CapacityError) as caught:
            ns.reserve(other, nbytes=size)
        assert caught.value.fields["leased_bytes"] >= 8 * size
        leases.release()
        assert publish(ns, other, data) == [kvd.Published.PUBLISHED] * 12
        assert ns.match(chain) < 12


def test_an_object_larger_than_a_segment_is_refused_by_size(daemon: Any) -> None:
    running = daemon(pool={"size": "16MiB"})
    with kvd.connect(running.socket) as store:
        ns = store.namespace(manifest())
        with pytest.raises(UsageError, match="largest segment") as caught:
            ns.reserve(ns.chain(tokens(1), CHUNK), nbytes=64 << 20)
        assert caught.value.retry is kvd.Retry.NEVER


def test_spoiled_bytes_are_found_by_verification(daemon: Any) -> None:
    running = daemon()
    with kvd.connect(running.socket) as store, kvd.connect(running.socket, verify_reads=True) as careful:
        ns = store.namespace(manifest())
        chain = ns.chain(tokens(1), CHUNK)
        with ns.reserve(chain, nbytes=SIZE) as writes:
            writes.fill(payloads(1))
            place = writes._places[0]
            writes.publish()
        # A client with a writable pool can do this; nothing in the API does.
        store.native.writable(place, SIZE).view[5] ^= 1
        with pytest.raises(CorruptionError, match="checksum"):
            _ = careful.namespace(manifest()).acquire(chain)[0].view


async def test_the_asyncio_twin_publishes_and_many_tasks_share_one_store(daemon: Any) -> None:
    running = daemon()
    async with await kvd.connect_async(running.socket) as store:
        ns = store.namespace(manifest())

        async def one(seed: int) -> int:
            chain = ns.chain(tokens(3, seed), CHUNK)
            async with await ns.reserve_async(chain, nbytes=SIZE) as writes:
                writes.fill(payloads(3, seed))
                results = await writes.publish_async()
            assert results == [kvd.Published.PUBLISHED] * 3
            with ns.acquire(chain) as leases:
                out = [bytearray(SIZE) for _ in range(3)]
                assert await leases.copy_to_async(out) == 3 * SIZE
                assert [bytes(o) for o in out] == payloads(3, seed)
                return len(leases)

        assert await asyncio.gather(*(one(seed) for seed in range(20))) == [3] * 20


def test_threads_share_one_store(store: kvd.Store) -> None:
    ns = store.namespace(manifest())
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for turn in range(10):
                chain = ns.chain(tokens(2, seed * 1000 + turn), CHUNK)
                data = payloads(2, seed * 1000 + turn)
                assert publish(ns, chain, data) == [kvd.Published.PUBLISHED] * 2
                with ns.acquire(chain) as leases:
                    assert [bytes(lease.view) for lease in leases] == data
        except BaseException as error:  # noqa: BLE001 - reported by the main thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert not any(thread.is_alive() for thread in threads)


def test_threads_and_an_event_loop_share_one_store(store: kvd.Store) -> None:
    ns = store.namespace(manifest())

    async def tasks(base: int) -> None:
        for turn in range(20):
            chain = ns.chain(tokens(1, base + turn), CHUNK)
            async with await ns.reserve_async(chain, nbytes=SIZE) as writes:
                writes.fill(payloads(1))
                assert await writes.publish_async() == [kvd.Published.PUBLISHED]

    async def main() -> None:
        def blocking() -> None:
            for turn in range(20):
                publish(ns, ns.chain(tokens(1, 70_000 + turn), CHUNK), payloads(1))

        await asyncio.wait_for(
            asyncio.gather(asyncio.to_thread(blocking), tasks(80_000), tasks(90_000)), timeout=60
        )

    asyncio.run(main())


def test_a_killed_daemon_leaves_leases_readable_and_says_what_to_do(daemon: Any) -> None:
    running = daemon()
    store = kvd.connect(running.socket)
    ns = store.namespace(manifest())
    chain = ns.chain(tokens(2), CHUNK)
    data = payloads(2)
    publish(ns, chain, data)
    leases = ns.acquire(chain)
    running.kill()
    assert [bytes(lease.view) for lease in leases] == data
    with pytest.raises(UnavailableError) as caught:
        ns.reserve(ns.chain(tokens(1, 5), CHUNK), nbytes=SIZE, deadline_s=5)
    assert caught.value.retry is kvd.Retry.REATTACH
    assert store.lost is not None
    leases.release()
    store.close()


def test_a_forked_child_is_told_to_connect_for_itself(store: kvd.Store) -> None:
    ns = store.namespace(manifest())
    chain = ns.chain(tokens(1), CHUNK)
    publish(ns, chain, payloads(1))
    leases = ns.acquire(chain)

    def leave() -> None:
        with leases:
            pass

    def fail() -> None:
        with leases:
            raise KeyError("of the block")

    one = leases[0]
    child = os.fork()
    if child == 0:
        code = 0
        for number, call in enumerate((lambda: ns.match(chain), leases.release, one.release, leave)):
            try:
                call()
            except UsageError as error:
                told = error.code == "KVD-USAGE-FORKED" and "connect again in the child" in str(error)
                code |= 0 if told else 1 << number
            except BaseException:  # noqa: BLE001 - the exit code tells
                code |= 1 << number
            else:
                code |= 1 << number
        try:
            fail()
        except KeyError:
            pass
        except BaseException:  # noqa: BLE001 - the exit code tells
            code |= 16
        del leases, one
        gc.collect()
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(leases) == 1
    assert ns.match(chain) == 1
    leases.release()


@pytest.mark.slow
def test_torch_tensors_share_the_memory_and_keep_the_lease(store: kvd.Store) -> None:
    torch = pytest.importorskip("torch")
    ns = store.namespace(manifest())
    chain = ns.chain(tokens(1), CHUNK)
    data = payloads(1)
    publish(ns, chain, data)
    leases = ns.acquire(chain)
    tensor = leases[0].tensor(torch.float16, (SIZE // 2,))
    part = tensor[10:20]
    del tensor, leases
    gc.collect()
    assert store.stats()["leases_released"] == 0
    assert part.numpy().tobytes() == data[0][20:40]
    del part
    gc.collect()
    assert store.stats()["leases_released"] == 1


@pytest.mark.slow
def test_importing_kvd_needs_neither_numpy_nor_torch() -> None:
    script = (
        "import sys; sys.modules['numpy'] = sys.modules['torch'] = None\n"
        "import kvd, kvd.clientlib.store, kvd.clientlib.paged\n"
        "assert kvd.connect and kvd.Manifest"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
