"""One client misuses its rings and leases as hard as it can: it is bounded and named, and the others hardly notice.

Each test measures how long the others' writes and reads take meanwhile and prints it beside the same without the
misuse. The bounds are wide, since the machine is shared: what is asserted is that nobody waits for the misuser.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from faults_world import CHUNK_TOKENS, CHUNKS, SIZE, chain_of, namespace, pattern, publish, until

import kvd
from kvd.errors import CapacityError

pytestmark = pytest.mark.slow
HERE = Path(__file__).resolve().parent
ROUNDS = 400
P99_S_MAX = 0.05
LEASES = 100_000


@contextmanager
def misuser(running: Any, how: str) -> Iterator[subprocess.Popen[str]]:
    """A process that does it; it says "on" when it does."""
    process = subprocess.Popen(
        [sys.executable, str(HERE / "misusers.py"), how, running.socket],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "on\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def p99_s(ns: kvd.Namespace, begin: int) -> tuple[float, float]:
    """99th percentile of a write of four chunks, and of a read of them, in seconds."""
    writes, reads = [], []
    for number in range(begin, begin + ROUNDS):
        chain = chain_of(ns, number)
        started_s = time.perf_counter()
        publish(ns, chain)
        written_s = time.perf_counter()
        with ns.acquire(chain) as leases:
            assert bytes(leases[0].view) == pattern(chain[0])
        writes.append(written_s - started_s)
        reads.append(time.perf_counter() - written_s)
    last = int(0.99 * ROUNDS)
    return sorted(writes)[last], sorted(reads)[last]


def compare(
    running: Any,
    how: str,
    capsys: Any,
    look: Callable[[Any], None],
    *,
    prepare: Callable[[], None] = lambda: None,
    bound_s: float = P99_S_MAX,
) -> None:
    """Others' times without and with the misuse; `look` is given the misuser's row meanwhile."""
    with kvd.connect(running.socket, client="other") as store:
        ns = namespace(store)
        alone = p99_s(ns, 1_000_000)
        prepare()
        with misuser(running, how) as process:
            beside = p99_s(ns, 2_000_000)
            rows = [row for row in running.call("clients") if row["pid"] == process.pid]
            look(rows[0] if rows else None)
            assert process.poll() is None, "the misuser still lives"
        with capsys.disabled():
            print(
                f"\n{how}: others' p99 write {alone[0] * 1e6:,.0f} -> {beside[0] * 1e6:,.0f} us, "
                f"read {alone[1] * 1e6:,.0f} -> {beside[1] * 1e6:,.0f} us"
            )
        assert max(beside) < bound_s
    assert running.call("health")["state"] == "ok"


def test_a_client_that_floods_its_ring_costs_the_others_a_turn(daemon: Any, capsys: Any) -> None:
    """Without the end of a turn (TURN_NS) the daemon would never come to anybody else."""
    running = daemon()
    frames = []

    def look(row: Any) -> None:
        frames.append(row["frames"])
        assert row["name"] == "misuser-flood"

    compare(running, "flood", capsys, look)
    assert frames[0] > 10 * ROUNDS, "it was served all the same"


def test_a_client_that_takes_no_answers_is_not_answered(daemon: Any, capsys: Any) -> None:
    """Its asks wait in its own ring; the daemon keeps at most one turn of answers. Shown by `answers_waiting`."""
    running = daemon(clients={"cq_size": 524288})
    before = running.call("status")["private_bytes"]

    def look(row: Any) -> None:
        assert 0 < row["answers_waiting"] <= 64
        assert running.call("status")["private_bytes"] < before + (16 << 20)

    compare(running, "deaf", capsys, look)


def test_a_hundred_thousand_leases_that_are_never_released(daemon: Any, capsys: Any) -> None:
    """Counted, named with the time, over its limit for all to see, and refused more; then it is killed."""
    running = daemon(
        pool={"size": "96MiB", "families_max": 120_000},
        clients={"leased_max": "4MiB", "leased_over": "refuse"},
    )

    def look(row: Any) -> None:
        assert row["leases"] == LEASES
        assert row["over_lease_limit"]
        named = until(lambda: _row(running, row["pid"])["blocks_reclaim_s"] is not None, "named as blocker")
        assert named

    # Reading is never refused, and what is not leased still leaves: the others go on in what is left of the pool.
    compare(running, "hoard", capsys, look, prepare=lambda: fill(running), bound_s=0.25)
    until(lambda: not any(row["leases"] for row in running.call("clients")), "leases of the dead")
    until(lambda: "client_over_lease_limit" in running.log_text(), "the log line of the hoarder")
    assert running.call("clear")["kept"] == {}


def fill(running: Any) -> None:
    """As many tiny chunks as the hoarder takes."""
    with kvd.connect(running.socket, client="filler") as store:
        ns = namespace(store)
        for number in range(LEASES // 1000):
            chain = ns.chain(array("I", [number, *range(1000 * CHUNK_TOKENS - 1)]), CHUNK_TOKENS)
            with ns.reserve(chain, nbytes=64) as writes:
                writes.fill([identity * 2 for identity in chain])
                writes.publish()


def test_those_who_look_at_everything_all_the_time_cost_the_others_little(daemon: Any, capsys: Any) -> None:
    """Without turns each of hundreds of listings and searches is a stall of its own: writes took seconds."""
    running = daemon(pool={"size": "96MiB", "families_max": 120_000})
    fill(running)

    def look(row: Any) -> None:
        assert row["name"] == "misuser-look"
        assert running.call("status")["counters"]["control_connections"] > 48

    compare(running, "look", capsys, look, bound_s=0.25)


def _row(running: Any, pid: int) -> Any:
    return next(row for row in running.call("clients") if row["pid"] == pid)


def test_reservations_that_are_never_published_leave_room_for_others(daemon: Any) -> None:
    """It gets all it is allowed, others are refused by name, and its end gives everything back."""
    running = daemon(pool={"size": "16MiB"}, clients={"reserved_max": "100%"})
    with misuser(running, "reserve") as process, kvd.connect(running.socket) as store:
        ns = namespace(store)
        with pytest.raises(CapacityError) as caught:
            ns.reserve(chain_of(ns, 1), nbytes=SIZE)
        assert caught.value.fields["reserved_bytes"] > 12 << 20
        process.kill()
        process.wait()
        until(lambda: running.call("status")["core"]["reservations"] == 0, "the reservations of the dead", 5)
        assert publish(ns, chain_of(ns, 1)) == [kvd.Published.PUBLISHED] * CHUNKS


def test_the_misusers_do_what_they_say() -> None:
    """A misuser that stopped misusing would make these tests pass for nothing."""
    done = subprocess.run([sys.executable, str(HERE / "misusers.py"), "list"], capture_output=True, text=True)
    assert json.loads(done.stdout) == ["deaf", "flood", "hoard", "look", "reserve"]
    assert os.path.exists(HERE / "misusers.py")
