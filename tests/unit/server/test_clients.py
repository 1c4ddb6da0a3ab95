"""The life of a client. The peer is this very process, so that death is played by calling what the pidfd would call."""

import contextlib
import errno
import gc
import os
import weakref
from array import array

import pytest

from kvd import limits
from kvd.core import publishing
from kvd.errors import CapacityError, ProtocolError, UnavailableError, UsageError
from kvd.layout.manifest import Manifest
from kvd.server import clients as clients_module
from kvd.server import runner as runners
from kvd.server.clients import Held, State
from kvd.server.keeping import Nobody
from kvd.server.namespaces import Namespaces
from kvd.shm import messages
from kvd.shm.messages import Published, Sq


def gone(world, one):
    """What happens when the process is gone."""
    world.clients._on_exit(one.client)


def detach(world, one):
    """Detach and let the loop turn until it is answered."""
    answers = []
    world.clients.detach(one.client, answers.append)
    world.turns(lambda: not answers)
    if isinstance(answers[0], ProtocolError):
        raise answers[0]
    return answers[0]


def test_slots_run_out_by_name_and_come_back(world):
    here = world(clients={"max": 2})
    first, _ = here.attach(), here.attach()
    with pytest.raises(CapacityError, match="all 2 client slots") as caught:
        here.attach()
    assert caught.value.code == "KVD-CAPACITY-CLIENTS"
    first.native.close()
    assert detach(here, first) == Held(0, 0)
    assert here.attach().client.slot == first.client.slot


def test_detach_with_reservations_keeps_them(world, keys):
    """Given back at detach, a writable view that lives would point into somebody else's object."""
    here = world()
    one, other = here.attach(), here.attach()
    one.reserve(keys(3))
    assert detach(here, one) == Held(0, 3)
    assert one.client.state is State.DISCONNECTED
    assert here.domain.core.statistics()["pool"]["reserved_bytes"] == 3 * 4096
    assert other.store(keys(3)) == [Published.PUBLISHED] * 3
    gone(here, one)
    assert here.domain.core.statistics()["pool"]["reserved_bytes"] == 0
    assert one.client.state is State.GONE


def test_detach_after_the_last_abort_frees_the_slot(world, keys):
    here = world()
    one = here.attach()
    reservation, _, _ = one.reserve(keys(3))
    one.submit(Sq.ABORT, messages.pack_abort(reservation, 0, 3))
    assert detach(here, one) == Held(0, 0)
    assert one.client.state is State.GONE
    assert here.domain.core.statistics()["pool"]["reserved_bytes"] == 0


def test_detach_with_leases_keeps_them(world, keys):
    """Freed at detach, the memory would be reused under a view that lives."""
    here = world()
    one = here.attach()
    one.store(keys(2))
    leases = one.native.acquire(b"".join(keys(2)))
    assert detach(here, one) == Held(2, 0)
    assert one.client.state is State.DISCONNECTED
    assert here.domain.table.held(one.client.slot) == (2, 8192)
    gone(here, one)
    assert one.client.state is State.GONE
    leases.release()


def test_disconnect_keeps_leases_and_reservations_until_the_process_is_gone(world, keys):
    """Given back at EOF, a stopped writer would write into somebody else's slot."""
    here = world()
    one, other = here.attach(), here.attach()
    one.store(keys(1))
    lease = one.native.acquire(keys(1)[0])
    one.reserve(keys(2, seed=3))
    here.clients.disconnect(one.client, None)
    pool = here.domain.core.statistics()["pool"]
    assert pool["reserved_bytes"] == 8192
    assert here.domain.table.held(one.client.slot)[0] == 1
    assert other.store(keys(2, seed=3)) == [Published.PUBLISHED] * 2
    gone(here, one)
    assert here.domain.core.statistics()["pool"]["reserved_bytes"] == 0
    lease.release()


def test_what_was_pushed_before_death_is_valid(world, keys):
    """Without draining first, an object whose publish was pushed would be lost and its slot reused."""
    here = world()
    one, other = here.attach(), here.attach()
    reservation, _, _ = one.reserve(keys(1))
    one.submit(Sq.PUBLISH, messages.pack_publish(reservation, 0, array("Q", [7]), b"\1"))
    gone(here, one)
    assert other.native.match(keys(1)[0]) == 1


def test_a_dead_hostile_client_leaves_nothing(world, keys):
    here = world()
    one = here.attach()
    one.reserve(keys(1))
    one.submit(9, b"")
    gone(here, one)
    assert one.client.state is State.GONE
    assert here.domain.core.statistics()["pool"]["reserved_bytes"] == 0
    assert here.clients.by_slot == {}


def test_a_malformed_rest_is_no_orderly_detach(world, keys):
    here = world()
    one = here.attach()
    one.reserve(keys(1))
    one.submit(9, b"")
    with pytest.raises(ProtocolError):
        detach(here, one)
    assert here.domain.core.statistics()["pool"]["reserved_bytes"] > 0


def test_wake_end_closed_disconnects(world):
    here = world()
    one = here.attach()
    one.wake.close()
    here.clients._on_wake(one.client)
    assert one.client.state is State.DISCONNECTED


def test_a_full_wake_socket_is_no_error(world):
    here = world()
    one = here.attach()
    one.client.wake.setsockopt(1, 7, 1)  # SOL_SOCKET, SO_SNDBUF: as small as the kernel allows
    with contextlib.suppress(BlockingIOError):
        for _ in range(100_000):
            one.client.wake.send(b"\1", 0x40)
    here.clients.wake(one.client)
    assert one.client.attached


def test_a_killed_clients_answers_are_not_sent_to_its_successor(world, keys):
    here = world(clients={"max": 1})
    one = here.attach()
    one.submit(Sq.PING, b"")
    gone(here, one)
    two = here.attach()
    assert two.client.slot == one.client.slot
    assert two.native.poll(10) == []
    assert two.store(keys(1)) == [Published.PUBLISHED]


def flood(world, one, count):
    """Fill the ring with pings; returns how many."""
    return sum(one.native.submit(Sq.PING, at, b"") != 0 for at in range(count))


def test_a_leaving_client_that_goes_on_pushing_holds_nobody_up(world, monkeypatch):
    """What was there when it left is handled, in turns; read to the end, a ring that is filled meanwhile has none."""
    monkeypatch.setattr(runners, "TURN_NS", 0)
    here = world()
    bad = here.attach()
    before = flood(here, bad, 300)
    handle = here.runner._handle

    def pushing(client, frame):
        handle(client, frame)
        flood(here, bad, 2)

    monkeypatch.setattr(here.runner, "_handle", pushing)
    here.clients.disconnect(bad.client, None)
    assert here.runner.frames == 1, "a turn went on after its time"
    here.turns(lambda: bad.client.attached)
    assert here.runner.frames == before
    assert bad.client.state is State.DISCONNECTED


def test_a_process_that_ends_while_it_is_drained_is_forgotten_after_that(world, keys, monkeypatch):
    monkeypatch.setattr(runners, "TURN_NS", 0)
    here = world()
    one = here.attach()
    reservation, _, _ = one.reserve(keys(2))
    flood(here, one, 10)
    one.submit(Sq.PUBLISH, messages.pack_publish(reservation, 0, array("Q", [7] * 2), b"\1\1"))
    here.clients.disconnect(one.client, None)
    assert one.client.attached
    gone(here, one)
    assert one.client.attached, "forgotten before what it had pushed was handled"
    here.turns(lambda: one.client.slot in here.clients.by_slot)
    assert one.client.state is State.GONE
    assert here.domain.core.statistics()["families"] == 2


def test_a_slot_is_free_when_all_that_was_reserved_has_come_back(world, keys, monkeypatch):
    """In one turn, a client with a million reserved items would stop the daemon for most of a second when it dies."""
    monkeypatch.setattr(publishing, "gone_items_per_turn", 2)
    here = world(clients={"max": 1})
    one = here.attach()
    for seed in range(3):
        one.reserve(keys(2, seed=seed))
    gone(here, one)
    assert here.domain.core.live_items(one.client.slot) == 4
    with pytest.raises(CapacityError, match="all 1 client slots"):
        here.attach()
    here.turns(lambda: one.client.slot in here.clients.by_slot)
    assert here.domain.core.statistics()["pool"]["reserved_bytes"] == 0
    assert here.attach().store(keys(2)) == [Published.PUBLISHED] * 2


def test_attach_without_descriptors_is_a_capacity_error(world, monkeypatch):
    """Untranslated, it was an exception of the loop, which ends the daemon."""
    here = world()
    good = here.attach()

    def none_left(_name):
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(clients_module.segments, "create", none_left)
        with pytest.raises(CapacityError, match="Too many open files") as caught:
            here.attach()
    assert caught.value.code == "KVD-CAPACITY-ATTACH"
    assert good.client.attached
    assert here.attach().client.slot == 1


def test_attach_whose_region_is_not_kept_leaves_nothing(world, monkeypatch):
    """Fails if the region is not closed: each attach leaked a descriptor and its memory."""
    here = world()
    peer = here.attach().client.peer
    removed = []

    class Full(Nobody):
        def store(self, name, fd):
            raise UnavailableError(f"nobody took {name}", code="keep", name=name)

        def remove(self, name):
            removed.append(name)

    with monkeypatch.context() as patched:
        patched.setattr(here.clients, "_keep", Full())
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            with pytest.raises(UnavailableError, match="nobody took"):
                here.clients.attach(peer, "c", writable=True)
        gc.collect()
        assert len(os.listdir("/proc/self/fd")) == before
    assert removed == ["kvd-client-2", "kvd-client-3", "kvd-client-4"]
    assert here.attach().client.client_id == 5


def test_one_client_gets_its_share_of_what_is_being_written(world, keys):
    """The whole pool could be reserved, and never published, by one client."""
    here = world()  # 8 MiB, half of it for one
    one, other = here.attach(), here.attach()
    reservation, _, _ = one.reserve(keys(3), size=1 << 20)
    with pytest.raises(CapacityError, match=r"clients\.reserved_max") as caught:
        one.reserve(keys(2, seed=1), size=1 << 20)
    assert caught.value.code == "KVD-CAPACITY-RESERVED"
    assert other.store(keys(3, seed=2), size=1 << 20) == [Published.PUBLISHED] * 3
    one.publish(reservation, 3)
    assert one.store(keys(2, seed=1), size=1 << 20) == [Published.PUBLISHED] * 2


def manifest_of(number, **changes):
    fields = {"model": "m", "revision": "r", "dtype": "bfloat16", "fixed": "*", "salt": "", **changes}
    return Manifest(**{"tenant": str(number), **fields}).encode()


def test_one_process_gets_its_share_of_namespaces(world):
    spaces = world().domain.namespaces
    for number in range(limits.namespaces_per_process_max):
        spaces.register(manifest_of(number), "", (1, 1), "connection 1")
    with pytest.raises(CapacityError, match="brought up 1024 namespaces"):
        spaces.register(manifest_of(-1), "", (1, 1), "connection 1")
    assert spaces.register(manifest_of(5), "", (1, 1), "connection 1"), "what is known is no new one"
    assert spaces.register(manifest_of(-1), "", (1, 2), "connection 2")
    spaces.let_go("connection 1")
    spaces.register(manifest_of(-2), "", (1, 1), "connection 3")
    assert spaces.forgotten_count, "its own that nobody uses any more make room"


@pytest.mark.slow
def test_one_user_gets_half_of_the_namespaces(world):
    """Fails without a count by user: four processes of one that stay connected left no new one to anybody."""
    spaces = world().domain.namespaces
    for number in range(limits.namespaces_per_uid_max):
        process = (number // 1000, 1)
        spaces.register(manifest_of(number), "", process, f"connection {process}", uid=1001)
    with pytest.raises(CapacityError, match="user 1001 brought up 2048 namespaces that are in use") as caught:
        spaces.register(manifest_of("more"), "", (9, 1), "connection 9", uid=1001)
    assert caught.value.code == "KVD-CAPACITY-NAMESPACES"
    assert spaces.register(manifest_of(5), "", (9, 1), "connection 9", uid=1001), (
        "what is known is no new one"
    )
    assert spaces.register(manifest_of("victim"), "", (10, 1), "connection 10", uid=1002)
    spaces.let_go("connection (1, 1)")
    spaces.register(manifest_of("more"), "", (9, 1), "connection 9", uid=1001)
    assert spaces.forgotten_count, "its own that nobody uses any more make room"
    for number in range(limits.namespaces_per_uid_max):
        spaces.register(manifest_of(f"own {number}"), "", None, "root")


@pytest.mark.slow
def test_what_was_known_before_a_restart_is_on_the_account_of_who_asks_for_it():
    """Fails if a restart forgets who has how many: one user would get half of them with each."""
    fresh = Namespaces(lambda number: False)
    fresh.restore([(n, manifest_of(n), "") for n in range(1, limits.namespaces_per_uid_max + 1)])
    for number in range(1, limits.namespaces_per_uid_max + 1):
        fresh.register(manifest_of(number), "", (number // 1000, 1), "connection", uid=1001)
    with pytest.raises(CapacityError, match="user 1001"):
        fresh.register(manifest_of("more"), "", (9, 1), "connection", uid=1001)


def test_only_who_was_told_a_number_writes_under_it(world, keys):
    """Fails if any number that exists will do: it may be another namespace's by the time that this is published."""
    here = world()
    one, other = here.attach(), here.attach()
    one.asks_first = other.asks_first = False
    number = here.domain.namespaces.register(manifest_of("mine"), "", None, one.client.peer).number
    assert one.store(keys(1), namespace=number) == [Published.PUBLISHED]
    with pytest.raises(UsageError, match="not registered by this client") as caught:
        other.reserve(keys(1, seed=1), namespace=number)
    assert caught.value.code == "KVD-USAGE-NAMESPACE"
    assert here.domain.namespaces.register(manifest_of("mine"), "", None, other.client.peer).number == number
    assert other.store(keys(1, seed=1), namespace=number) == [Published.PUBLISHED]


def test_the_last_namespace_number_can_be_used(world, keys):
    """It was registered and then, at the first reservation, not known."""
    here = world()
    number = 0
    while number < limits.namespaces_max:
        number = here.domain.namespaces.register(manifest_of(number), "").number
    assert here.attach().store(keys(1), namespace=number) == [Published.PUBLISHED]


def test_a_namespace_that_is_used_is_not_forgotten(world, keys):
    """Fails if what is stored, or who was told a number, is left out: its number is another one's then."""
    here = world()
    spaces = here.domain.namespaces
    spaces.register(manifest_of("first"), "")  # by nobody
    told = spaces.register(manifest_of("told"), "", None, "somebody").number
    stored = spaces.register(manifest_of("stored"), "").number
    assert here.attach().store(keys(1), namespace=stored) == [Published.PUBLISHED]
    for number in range(2 * limits.namespaces_max):
        given = spaces.register(manifest_of(number), "").number
        assert 1 <= given <= limits.namespaces_max
        assert given not in (told, stored)
    assert len(spaces) <= limits.namespaces_max
    assert spaces.forgotten_count >= limits.namespaces_max
    assert spaces.by_number[told].tenant == "told"
    assert spaces.by_number[stored].tenant == "stored"
    assert [record.tenant for record in spaces.by_root.values()][:3] != ["first", "told", "stored"], (
        "oldest first"
    )


def test_namespaces_that_are_all_in_use_are_refused_by_name(world):
    spaces = world().domain.namespaces
    for number in range(limits.namespaces_max - len(spaces)):
        spaces.register(manifest_of(number), "", None, "somebody")
    spaces.register(manifest_of("m"), "", None, "somebody")  # in place of the world's own
    with pytest.raises(CapacityError, match="kvctl clear") as caught:
        spaces.register(manifest_of("one more"), "", None, "somebody")
    assert caught.value.code == "KVD-CAPACITY-NAMESPACES"


def test_what_a_client_calls_itself_can_be_shown(world):
    """Fails if strings are kept as they come: an escape sequence would steer the operator's terminal."""
    spaces = world().domain.namespaces
    record = spaces.register(manifest_of("\x1b]0;owned\x07\u202e\x9b31m", model="m" * 6_000), "a\nb\x1b[2J")
    assert record.tenant == "?]0;owned???31m"
    assert record.label == "a?b?[2J"
    assert len(record.model) == 96


def test_strict_mode_and_another_split_leave_the_daemon_alive(world, keys):
    """A member that the family does not have differs from nothing; looked for all the same, it ended the daemon."""
    here = world(objects={"strict_duplicates": True})
    one, other = here.attach(), here.attach()
    reservation, _, statuses = other.reserve(keys(1), members=4)  # before there is a family
    assert one.store(keys(1), members=2) == [Published.PUBLISHED] * 2
    assert other.publish(reservation, len(statuses)) == [Published.PRESENT] * 4
    assert other.reserve(keys(1), members=4)[0] == 0, "afterwards it is told at once"
    assert one.client.attached
    assert other.client.attached


def test_a_client_that_is_gone_leaves_no_mapping(world):
    """Held by a circle of references, its region would stay mapped until the collector comes by, which is seldom."""
    here = world()
    gc.collect()
    gc.disable()
    try:
        one = here.attach()
        region = weakref.ref(one.client)
        one.native.close()
        assert detach(here, one) == Held(0, 0)
        here.attached.remove(one)
        one.wake.close()
        del one
        assert region() is None
    finally:
        gc.enable()
