"""Real processes stopped and killed at every named step of the protocol (docs/design/shm.md, "Protocol").

After each: all space is back within row B1's time, the keys can be written at once, nothing half-written was ever to be
seen, the slot takes the next client. What makes which test fail is in test_mutants.py, where it is left out.
"""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from clients_of_faults import READ, WRITTEN
from faults_world import (
    BACK_WITHIN_S,
    CHUNKS,
    SIZE,
    STUCK_S,
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

pytestmark = pytest.mark.slow
ALL = [kvd.Published.PUBLISHED] * CHUNKS
OTHER_SALT = 0x55


@pytest.fixture
def world(daemon: Any) -> Any:
    """(daemon, namespace of an observer): room for two clients, READ is published."""
    running = daemon(pool={"size": "16MiB"}, clients={"max": 2})
    with kvd.connect(running.socket, client="observer") as store:
        ns = namespace(store)
        assert publish(ns, chain_of(ns, READ)) == ALL
        yield running, ns


def held_now(running: Any) -> int:
    """Clear what nobody holds; how many families of READ somebody holds."""
    answer = running.call("clear")
    assert answer["families"] + answer["kept"].get("leased", {"families": 0})["families"] <= CHUNKS
    return CHUNKS - int(answer["families"])


def check_all_back(running: Any, ns: kvd.Namespace, before: dict[str, int], other_leaves: Any) -> None:
    """The slot is free, nothing is reserved or leased, and a new client may take the slot."""
    other_leaves(running)
    assert space(running) == before
    with kvd.connect(running.socket, client="next") as store:
        assert store.slot in (0, 1)
        theirs = namespace(store)
        chain = chain_of(theirs, 77)
        assert publish(theirs, chain) == ALL
        assert ns.match(chain) == CHUNKS


READER_STEPS = [  # role, step, how many of the four leases the daemon must respect there
    ("reader", "lease.found", 0),
    ("reader", "lease.hazard", CHUNKS),
    ("reader", "lease.fenced", CHUNKS),
    ("reading", "", CHUNKS),
    ("reader", "release.held", CHUNKS),
    ("reader", "release.cleared", CHUNKS - 1),
]


@pytest.mark.parametrize(("role", "step", "held"), READER_STEPS)
def test_a_reader_killed_at_any_step_leaves_nothing(
    world: Any, child: Any, other_leaves: Any, role: str, step: str, held: int
) -> None:
    running, ns = world
    one = child(role, running.socket, stop_at=step)
    one.wait_stopped()
    assert held_now(running) == held
    # What the reader does not hold is written anew beside it; what it holds stays as it is.
    publish(ns, chain_of(ns, READ))
    one.kill()
    other_leaves(running)
    assert space(running)["leases"] == 0
    assert running.call("clear")["families"] == CHUNKS
    check_all_back(running, ns, space(running), other_leaves)


@pytest.mark.parametrize(("role", "step", "held"), READER_STEPS)
def test_a_reader_that_was_stopped_goes_on_with_its_own_bytes_or_a_miss(
    world: Any, child: Any, role: str, step: str, held: int
) -> None:
    """While it is stopped everything that may leave leaves, and all memory is written with other keys."""
    running, ns = world
    one = child(role, running.socket, stop_at=step)
    one.wait_stopped()
    assert held_now(running) == held
    for seed in range(100, 160):
        publish(ns, chain_of(ns, seed))
    one.resume()
    if not step.startswith("release"):
        assert one.line() == ([CHUNKS, CHUNKS] if held else [0, 0])
    else:
        assert one.line() == [CHUNKS, CHUNKS]
    assert one.line() == "released"
    assert space(running)["leases"] == 0


WRITER_STEPS = [  # role, step, bytes reserved while it stands there (None: the daemon need not have looked), published
    ("writer", "push.written:1", 0, False),
    ("writer", "push.visible:1", None, False),
    ("unread", "", CHUNKS * SIZE, False),
    ("half", "", CHUNKS * SIZE, False),
    ("writer", "push.written:2", CHUNKS * SIZE, False),
    ("writer", "push.visible:2", None, True),
]


def at_step(running: Any, child: Any, role: str, step: str, reserved: int | None) -> Any:
    one = child(role, running.socket, stop_at=step)
    one.wait_stopped()
    if reserved is not None:
        until(lambda: space(running)["reserved"] == reserved, f"{reserved} B reserved")
    return one


@pytest.mark.parametrize(("role", "step", "reserved", "published"), WRITER_STEPS)
def test_a_writer_killed_at_any_step_leaves_all_or_nothing(
    world: Any, child: Any, other_leaves: Any, role: str, step: str, reserved: int | None, published: bool
) -> None:
    """B9. What it had pushed as published before it died is valid; all else is as if it had never been."""
    running, ns = world
    before = space(running)
    chain = chain_of(ns, WRITTEN)
    one = at_step(running, child, role, step, reserved)
    if reserved is not None:
        assert ns.match(chain) == 0
    one.kill()
    other_leaves(running)
    assert ns.match(chain) == (CHUNKS if published else 0)
    after = space(running)
    assert after["reserved"] == after["reservations"] == after["partial"] == 0
    assert after["used"] == before["used"] + (CHUNKS * SIZE if published else 0)
    salt = 0 if published else OTHER_SALT
    with ns.reserve(chain, nbytes=SIZE) as writes:
        expected = kvd.Granted.PRESENT if published else kvd.Granted.GRANTED
        assert [write.status for write in writes] == [expected] * CHUNKS
        writes.fill([pattern(identity, salt=salt) for identity in chain])
        writes.publish()
    with ns.acquire(chain) as leases:
        assert [bytes(lease.view) for lease in leases] == [pattern(i, salt=salt) for i in chain]
    check_all_back(running, ns, space(running), other_leaves)


@pytest.mark.parametrize(("role", "step", "reserved", "published"), WRITER_STEPS)
def test_a_writer_that_was_stopped_goes_on(
    world: Any, child: Any, role: str, step: str, reserved: int | None, published: bool
) -> None:
    """No timer took its slots: others wrote all they could meanwhile, and what it publishes is right."""
    running, ns = world
    chain = chain_of(ns, WRITTEN)
    one = at_step(running, child, role, step, reserved)
    for seed in range(100, 160):
        publish(ns, chain_of(ns, seed))
    one.resume()
    assert one.line() == ["PUBLISHED"] * CHUNKS
    with ns.acquire(chain) as leases:
        assert [bytes(lease.view) for lease in leases] == [pattern(identity) for identity in chain]
    assert published or space(running)["leases"] == 0


def test_what_was_pushed_counts_although_the_sockets_were_closed_first(
    world: Any, child: Any, other_leaves: Any
) -> None:
    """The kernel closes a dying process's sockets before it says that the process is gone: nothing is lost between."""
    running, ns = world
    one = child("pushed", running.socket)
    one.wait_stopped()
    until(lambda: any(row["state"] == "disconnected" for row in running.call("clients")), "seen as left")
    one.kill()
    other_leaves(running)
    chain = chain_of(ns, WRITTEN)
    assert ns.match(chain) == CHUNKS
    with ns.acquire(chain) as leases:
        assert [bytes(lease.view) for lease in leases] == [pattern(identity) for identity in chain]
    assert space(running)["reserved"] == 0


def test_a_client_that_dies_asleep_leaves_nothing(world: Any, child: Any, other_leaves: Any) -> None:
    """It waits for an answer of a daemon that is stopped; its reservation is granted only after its death."""
    running, ns = world
    before = space(running)
    one = child("asleep", running.socket)
    assert one.line() == "asks"
    running.process.send_signal(signal.SIGSTOP)
    os.waitpid(running.pid, os.WUNTRACED)
    one.tell()
    until(lambda: _sleeps_in_poll(Path(f"/proc/{one.pid}")), "asleep")
    one.kill()
    running.process.send_signal(signal.SIGCONT)
    other_leaves(running)
    assert ns.match(chain_of(ns, WRITTEN)) == 0
    check_all_back(running, ns, before, other_leaves)


def _sleeps_in_poll(process: Path) -> bool:
    """Whether it sleeps, and inside ppoll where the kernel tells."""
    if (process / "stat").read_text().rpartition(")")[2].split()[0] != "S":
        return False
    try:
        number = (process / "syscall").read_text().split()[0]
    except OSError:
        return True
    return number in ("271", "73")  # x86-64, aarch64


def test_a_grandchild_that_keeps_the_sockets_delays_nothing(
    world: Any, child: Any, other_leaves: Any
) -> None:
    """B1. The pidfd tells of the death; the socket, which a forked child holds open, does not."""
    running, ns = world
    before = space(running)
    one = child("parent", running.socket)
    grandchild = one.line()
    try:
        assert space(running)["reserved"] == CHUNKS * SIZE
        assert space(running)["leases"] == CHUNKS
        one.kill()
        other_leaves(running)
        os.kill(grandchild, 0)
        check_all_back(running, ns, before, other_leaves)
    finally:
        os.kill(grandchild, signal.SIGKILL)


def test_a_stopped_writers_slots_are_its_own_while_its_process_lives(
    world: Any, child: Any, other_leaves: Any
) -> None:
    """Its sockets are closed, it is stopped, others fill the pool; then it writes, and hits nobody."""
    running, ns = world
    one = child("unplugged", running.socket)
    assert one.line() == "unplugged"
    one.wait_stopped()
    until(lambda: any(row["state"] == "disconnected" for row in running.call("clients")), "seen as left")
    assert space(running)["reserved"] == CHUNKS * SIZE
    chain = chain_of(ns, 300, 256)
    with pytest.raises(CapacityError):
        publish(ns, chain)
    chains = [chain_of(ns, seed) for seed in range(400, 463)]
    kept = []
    for each in chains:
        publish(ns, each)
        kept.append(ns.acquire(each))
    one.resume()
    assert one.line() == "written"
    for leases in kept:
        for lease in leases:
            assert bytes(lease.view) == pattern(lease.identity)
        leases.release()
    one.kill()
    other_leaves(running)
    assert space(running)["reserved"] == 0
    check_all_back(running, ns, space(running), other_leaves)


def in_thread(call: Any) -> tuple[threading.Thread, list[BaseException | None]]:
    """Run a call that is expected to raise; the list gets what it raised."""
    raised: list[BaseException | None] = []

    def run() -> None:
        try:
            call()
            raised.append(None)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, raised


@pytest.mark.parametrize(
    "step", ["evict.marked", "evict.scanned", "publish.writing:5", "publish.linked:5", "publish.ready:5"]
)
def test_a_daemon_killed_at_any_step_leaves_views_unchanged(daemon: Any, library: Path, step: str) -> None:
    """Readers keep their bytes, callers are told at once, nobody finds what was not finished, a new daemon serves.

    :5 is the first chunk of the second batch.
    """
    env = injected(FAULTS_LIBRARY=str(library), KVD_STOP_AT=step)
    running = daemon(pool={"size": "16MiB"}, env=env)
    store, other = kvd.connect(running.socket), kvd.connect(running.socket)
    ns, theirs = namespace(store), namespace(other)
    chain, next_chain = chain_of(ns, READ), chain_of(ns, WRITTEN)
    publish(ns, chain)
    leases = ns.acquire(chain)
    views = [lease.view for lease in leases]
    evicting = step.startswith("evict")
    thread, raised = in_thread(lambda: running.call("clear") if evicting else publish(theirs, next_chain))
    assert os.WIFSTOPPED(os.waitpid(running.pid, os.WUNTRACED)[1])
    assert [bytes(view) for view in views] == [pattern(identity) for identity in chain]
    assert ns.match(next_chain) == 0
    running.kill()
    thread.join(STUCK_S)
    assert isinstance(raised[0], UnavailableError)
    assert [bytes(view) for view in views] == [pattern(identity) for identity in chain]
    with pytest.raises(UnavailableError):
        publish(ns, chain_of(ns, 9))
    after = daemon(directory=running.directory, pool={"size": "16MiB"})
    with kvd.connect(after.socket) as again:
        fresh = namespace(again)
        assert fresh.match(chain) == 0
        assert publish(fresh, chain) == ALL
    assert [bytes(view) for view in views] == [pattern(identity) for identity in chain]
    del views
    leases.release()
    store.close()
    other.close()


def test_a_daemon_that_was_stopped_goes_on(world: Any) -> None:
    """C11. Callers get a deadline, not a hang; nothing is lost when it goes on. The grant that came too late is given
    back although the client does nothing more.
    """
    running, ns = world
    running.process.send_signal(signal.SIGSTOP)
    os.waitpid(running.pid, os.WUNTRACED)
    chain = chain_of(ns, WRITTEN)
    assert ns.match(chain_of(ns, READ)) == CHUNKS
    with pytest.raises(UnavailableError) as caught:
        ns.reserve(chain, nbytes=SIZE, deadline_s=0.2)
    assert caught.value.code == "KVD-UNAVAILABLE-DEADLINE"
    running.process.send_signal(signal.SIGCONT)
    granted = running.call("status")["counters"]["granted"]
    until(lambda: space(running)["reserved"] == 0, "the late grant", BACK_WITHIN_S)
    counters = running.call("status")["counters"]
    assert counters["granted"] == counters["aborted"] + counters["published"] >= granted
    assert publish(ns, chain) == ALL
