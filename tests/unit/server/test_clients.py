"""The life of a client. The peer is this very process, so that death is played by calling what the pidfd would call."""

import contextlib

import pytest

from kvd.errors import CapacityError, ProtocolError
from kvd.server.clients import State
from kvd.shm.messages import Published, Sq


def gone(world, one):
    """What happens when the process is gone."""
    world.clients._on_exit(one.client)


def test_slots_run_out_by_name_and_come_back(world):
    here = world(clients={"max": 2})
    first, _ = here.attach(), here.attach()
    with pytest.raises(CapacityError, match="all 2 client slots") as caught:
        here.attach()
    assert caught.value.code == "KVD-CAPACITY-CLIENTS"
    first.native.close()
    assert here.clients.detach(first.client) == 0
    assert here.attach().client.slot == first.client.slot


def test_detach_gives_reservations_back(world, keys):
    here = world()
    one = here.attach()
    one.reserve(keys(3))
    assert here.domain.core.statistics()["pool"]["reserved_bytes"] > 0
    here.clients.detach(one.client)
    assert here.domain.core.statistics()["pool"]["reserved_bytes"] == 0
    assert one.client.state is State.GONE


def test_detach_with_leases_keeps_them(world, keys):
    """Freed at detach, the memory would be reused under a view that lives."""
    here = world()
    one = here.attach()
    one.store(keys(2))
    leases = one.native.acquire(b"".join(keys(2)))
    assert here.clients.detach(one.client) == 2
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
    from array import array

    from kvd.shm import messages

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
        here.clients.detach(one.client)
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
