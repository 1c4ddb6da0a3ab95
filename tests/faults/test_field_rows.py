"""Faults that users of such systems report, each with what a correct system does: tests named after their row.

B3 is in test_mutants.py, B9 in test_kills.py and tests/ipc/test_control.py, E5 in tests/ipc/test_control.py, the golden
vectors of E1 in tests/unit/layout.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import struct
import subprocess
import sys
from array import array
from typing import Any

import pytest
from clients_of_faults import READ, WRITTEN
from faults_world import (
    BACK_WITHIN_S,
    CHUNKS,
    MANIFEST,
    SIZE,
    chain_of,
    injected,
    namespace,
    pattern,
    publish,
    space,
    until,
)

import kvd
from kvd.errors import CapacityError, UnavailableError
from kvd.shm import messages
from kvd.shm.messages import Cq, Published, Sq
from kvd.types import Member

pytestmark = pytest.mark.slow
ALL = [Published.PUBLISHED] * CHUNKS
MIB = 1 << 20


class GivenUpError(Exception):
    """What an engine raises when a request is aborted."""


def raw_publish(store: kvd.Store, reservation: int, items: int) -> list[int]:
    """PUBLISH as the ring carries it, for a reservation of whatever number."""
    payload = messages.pack_publish(reservation, 0, array("Q", [1] * items), b"\1" * items)
    kind, answer = store.calls.call(Sq.PUBLISH, payload, 5.0)
    assert kind == Cq.PUBLISHED
    return list(messages.parse_published(answer))


def test_a5_no_way_of_giving_up_makes_garbage_readable(daemon: Any) -> None:
    """Cleaning up is aborting, never finishing; what was aborted cannot be finished afterwards, by nobody."""
    running = daemon()
    with kvd.connect(running.socket) as store, kvd.connect(running.socket) as other:
        ns = namespace(store)
        chain = chain_of(ns, 1)

        def half() -> Any:
            writes = ns.reserve(chain, nbytes=SIZE)
            writes[0].fill(pattern(chain[0]))
            writes[1].view[: SIZE // 2] = b"x" * (SIZE // 2)
            return writes

        with half() as aborted:
            pass
        with pytest.raises(GivenUpError), half():
            raise GivenUpError
        half().abort()
        del aborted
        writes = half()
        number = writes.reservation
        assert raw_publish(other, number, CHUNKS) == [Published.GONE] * CHUNKS
        writes.abort()
        assert raw_publish(store, number, CHUNKS) == [Published.GONE] * CHUNKS
        assert ns.match(chain) == 0
        assert not any(store.native.present(chain.identities))
        kept = half()
        code = f"""
import kvd, sys
store = kvd.connect({running.socket!r})
ns = store.namespace(kvd.Manifest(**{MANIFEST!r}))
writes = ns.reserve(ns.chain_of(bytes.fromhex({chain_of(ns, 2).identities.hex()!r}), 16), nbytes={SIZE})
writes[0].view[:100] = b"x" * 100
"""
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
        until(lambda: space(running)["reserved"] == CHUNKS * SIZE, "only what is kept", BACK_WITHIN_S)
        assert ns.match(chain_of(ns, 2)) == 0
        del kept
        until(lambda: space(running)["reserved"] == 0, "nothing reserved", BACK_WITHIN_S)


def test_b1_engines_that_die_in_warm_up_leave_every_slot(daemon: Any, other_leaves: Any) -> None:
    """Killed right after they attached, with slots for two at a time; the next can always start."""
    running = daemon(clients={"max": 2})
    code = f"""
import os, signal, kvd
for turn in range(12):
    child = os.fork()
    if child == 0:
        store = kvd.connect({running.socket!r})
        if turn % 2:
            ns = store.namespace(kvd.Manifest(**{MANIFEST!r}))
            writes = ns.reserve(ns.chain(list(range(64)), 16), nbytes=65536)
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
"""
    before = space(running)
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    other_leaves(running, clients=0)
    assert space(running) == before
    assert running.call("status")["counters"]["clients_gone"] == 12


def abort_at_random(ns: kvd.Namespace, rng: random.Random) -> None:
    """One request that gives up somewhere between look-up and the end of its work."""
    chain = chain_of(ns, READ) if rng.random() < 0.6 else chain_of(ns, 1000 + rng.randrange(50))
    leases = ns.acquire(chain)
    match rng.randrange(5):
        case 0:
            leases.release()
        case 1:
            view = leases[0].view[10:20] if len(leases) else None
            del view
        case 2:
            with pytest.raises(GivenUpError), leases:
                raise GivenUpError
        case 3 if chain.start == 0 and len(leases) == 0:
            writes = ns.reserve(chain, nbytes=4096)
            for write in writes[: rng.randrange(len(writes) + 1)]:
                write.fill(bytes(4096))
            if rng.random() < 0.5:
                writes.abort()
        case _:
            exported = leases.export()
            if rng.random() < 0.5 and len(leases):
                del leases
                del exported


async def cancel_at_random(ns: kvd.Namespace, rng: random.Random) -> None:
    """A task that waits for its reservation is cancelled; a grant that comes too late must be given back."""
    task = asyncio.ensure_future(ns.reserve_async(chain_of(ns, 2000 + rng.randrange(50)), nbytes=4096))
    for _ in range(rng.randrange(4)):
        await asyncio.sleep(0)
    task.cancel()
    try:
        (await task).abort()
    except (asyncio.CancelledError, CapacityError):
        return  # full for the moment of what was granted to others that were cancelled


def test_b2_ten_thousand_random_aborts_leave_no_lease_and_no_reservation(daemon: Any) -> None:
    running = daemon(pool={"size": "16MiB"})
    seed = int.from_bytes(os.urandom(4), "little")
    print("seed", seed)
    rng = random.Random(seed)

    async def cancels(ns: kvd.Namespace) -> None:
        for _ in range(1000):
            await cancel_at_random(ns, rng)

    with kvd.connect(running.socket) as store:
        ns = namespace(store)
        publish(ns, chain_of(ns, READ))
        used = space(running)["used"]
        for _ in range(9000):
            abort_at_random(ns, rng)
        asyncio.run(cancels(ns))
        left = until(
            lambda: space(running)["reserved"] == 0 and space(running), "all given back", BACK_WITHIN_S
        )
        assert (left["leases"], left["reservations"]) == (0, 0)
        assert left["used"] in (used, 0)
        assert store.native.held == 0
        assert running.call("clear")["kept"] == {}
        assert publish(ns, chain_of(ns, READ)) == ALL


def test_b4_the_lease_of_a_living_client_never_expires(daemon: Any, child: Any) -> None:
    """It is stopped for what the daemon takes for days, while others need all the room."""
    running = daemon(pool={"size": "16MiB"}, env=injected(FAULTS_OMIT="rush"))
    with kvd.connect(running.socket) as store:
        ns = namespace(store)
        publish(ns, chain_of(ns, READ))
        one = child("reading", running.socket)
        one.wait_stopped()
        began_s = running.call("status")["uptime_s"]
        turns = 0
        while running.call("status")["uptime_s"] < began_s + 2.5:
            publish(ns, chain_of(ns, 100 + turns % 200))
            turns += 1
        assert turns > 100
        assert space(running)["leases"] == CHUNKS
        one.resume()
        assert one.line() == [CHUNKS, CHUNKS]
        assert one.line() == "released"


def test_b5_probing_protects_nothing(daemon: Any) -> None:
    """Full of objects that are looked for all the time, the pool still takes as much as it holds."""
    running = daemon(pool={"size": "16MiB"})
    with kvd.connect(running.socket) as store, kvd.connect(running.socket) as prober:
        ns, probes = namespace(store), namespace(prober)
        old = [chain_of(ns, seed, 16) for seed in range(16)]
        for chain in old:
            assert publish(ns, chain) == [Published.PUBLISHED] * 16
        for seed in range(100, 116):
            for chain in old:
                probes.match(chain, request=f"r{seed}")
                prober.native.present(chain.identities)
            assert publish(ns, chain_of(ns, seed, 16)) == [Published.PUBLISHED] * 16
        assert sum(ns.match(chain_of(ns, seed, 16)) for seed in range(100, 116)) > 0
        assert running.call("status")["counters"]["capacity_refusals"] == 0


def test_b6_a_task_that_dies_stops_the_daemon_for_all_to_see(daemon: Any) -> None:
    """Housekeeping that is gone would let the pool freeze: the daemon says so, ends, and the next one serves."""
    running = daemon(pool={"size": "16MiB"}, env=injected(FAULTS_OMIT="tick"))
    running.expected_codes.add(70)
    store = kvd.connect(running.socket)
    ns = namespace(store)
    chain = chain_of(ns, READ)
    publish(ns, chain)
    leases = ns.acquire(chain)
    assert running.wait() == 70
    assert "task_died" in running.log_text()
    assert "broken for a test" in running.log_text()
    running.wait_notified("EXIT_STATUS=70")
    with pytest.raises(UnavailableError):
        publish(ns, chain_of(ns, WRITTEN))
    assert [bytes(lease.view) for lease in leases] == [pattern(identity) for identity in chain]
    leases.release()
    store.close()
    with kvd.connect(daemon(directory=running.directory, pool={"size": "16MiB"}).socket) as again:
        assert publish(namespace(again), chain) == ALL


@pytest.mark.parametrize("percent", [60, 90, 100])
def test_b7_large_objects_find_room_however_full_the_pool_is(daemon: Any, percent: int) -> None:
    """Room is made when it is asked for, not at a watermark, and across size classes."""
    running = daemon(clients={"reserved_max": "100%"}, pool={"size": "64MiB"})
    with kvd.connect(running.socket) as store:
        ns = namespace(store)
        for seed in range(64 * percent // 100):
            publish(ns, chain_of(ns, seed, 16))
        assert running.call("status")["core"]["pool"]["used_bytes"] >= 63 * MIB * percent // 100 - MIB
        eleven = chain_of(ns, 5000, 11)
        assert publish(ns, eleven, 4 * MIB) == [Published.PUBLISHED] * 11
        with ns.acquire(eleven) as leases:
            assert [bytes(lease.view[:64]) for lease in leases] == [pattern(i, 64) for i in eleven]
        assert publish(ns, chain_of(ns, 6000, 1), 60 * MIB) == [Published.PUBLISHED]


def test_b8_all_members_of_a_chunk_leave_together(daemon: Any) -> None:
    """Two ranks of different sizes, in slots of different classes, one of them under pressure."""
    running = daemon(pool={"size": "32MiB"})
    ranks = [Member(0, SIZE, heads=(0, 4)), Member(1, 4 * SIZE, heads=(4, 8))]
    with kvd.connect(running.socket) as store:
        ns = namespace(store)
        chains = [chain_of(ns, seed) for seed in range(60)]
        seen = set()
        for seed, chain in enumerate(chains):
            with ns.reserve(chain, members=ranks) as writes:
                writes.fill([bytes(ranks[item % 2].size_bytes) for item in range(len(writes))])
                writes.publish()
            publish(ns, chain_of(ns, 1000 + seed, 8), SIZE)
            for each in chains[: seed + 1]:
                rows = struct.iter_unpack("<QQHBBI", store.native.present(each.identities))
                present = [row[0] for row in rows]
                seen.update(present)
                assert present == sorted(present, reverse=True), "a suffix stayed after its prefix"
        assert seen == {0b11, 0}


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def test_b10_clients_that_come_and_go_leave_no_descriptor(daemon: Any, other_leaves: Any) -> None:
    running = daemon(pool={"size": "8MiB"})
    kvd.connect(running.socket).close()
    other_leaves(running, clients=0)
    before = descriptors(running.pid)
    code = f"import os, kvd; kvd.connect({running.socket!r}); os.kill(os.getpid(), 9)"
    fork = f"import os\nfor _ in range(8):\n    p = os.fork()\n    if p == 0:\n        {code}\n    os.waitpid(p, 0)"
    subprocess.run([sys.executable, "-c", fork], check=True, timeout=60)
    for _ in range(8):
        kvd.connect(running.socket).close()
    other_leaves(running, clients=0)
    assert until(lambda: descriptors(running.pid) <= before, "descriptors", BACK_WITHIN_S)


@pytest.mark.timeout(0)
@pytest.mark.long
def test_b10_a_hundred_cycles_leave_nothing_behind(daemon: Any) -> None:
    """TERM and KILL in turns, a client attached each time; six of them run always, in tests/ipc/test_control.py."""
    shm, own, directory = set(os.listdir("/dev/shm")), descriptors(os.getpid()), None
    for turn in range(100):
        one = daemon(directory=directory, pool={"size": "8MiB"})
        directory = one.directory
        with kvd.connect(one.socket) as store:
            publish(namespace(store), chain_of(namespace(store), turn))
            assert (one.kill() if turn % 2 else one.stop()) == (-signal.SIGKILL if turn % 2 else 0)
        one.notify.close()
        left = {"kvd.toml", "log", "notify", "kvd.sock.lock"} | ({"kvd.sock"} if turn % 2 else set())
        assert set(os.listdir(directory)) <= left
    assert set(os.listdir("/dev/shm")) == shm
    assert descriptors(os.getpid()) <= own + 1


@pytest.mark.parametrize("seed", ["0", "12345"])
def test_e1_a_process_with_another_hash_seed_finds_what_was_published(daemon: Any, seed: str) -> None:
    running = daemon(pool={"size": "8MiB"})
    code = f"""
import kvd
with kvd.connect({running.socket!r}) as store:
    ns = store.namespace(kvd.Manifest(**{MANIFEST!r}))
    chain = ns.chain([READ, *range({CHUNKS * 16 - 1})], 16)
    print(ns.match(chain), bytes(chain.identities).hex())
""".replace("READ", str(READ))
    with kvd.connect(running.socket) as store:
        ns = namespace(store)
        chain = chain_of(ns, READ)
        publish(ns, chain)
        said = subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True, text=True, check=True, timeout=60,
        ).stdout.split()  # fmt: skip
        assert said == [str(CHUNKS), bytes(chain.identities).hex()]
