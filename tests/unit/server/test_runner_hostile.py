"""Found by fuzzing: what a client writes into the words that the daemon reads when it answers."""

from __future__ import annotations

import mmap
from typing import Any

import pytest

from kvd.shm import messages
from kvd.shm.layout import OFFSETS

AHEAD = 1 << 40


@pytest.mark.parametrize("waiting", [False, True])
def test_a_client_that_lies_about_what_it_has_read_is_disconnected(world: Any, waiting: bool) -> None:
    """The daemon's push finds a cursor that cannot be. It was an exception of the loop, which ends the daemon."""
    made = world(clients={"cq_size": 524288})
    one, other = made.attach(), made.attach()
    if waiting:  # an answer that found no room is pushed later, by another path
        for _ in range(40_000):
            one.submit(messages.Sq.PING, b"")
        made.serve(one)
        assert one.client.replies
    with mmap.mmap(one.client.region_fd, 0) as region:
        at = OFFSETS["ClientHeader"]["cq_head"]
        region[at : at + 8] = AHEAD.to_bytes(8, "little")
    if waiting:
        made.runner._retry(one.client)
    else:
        one.submit(messages.Sq.PING, b"")
        made.serve(one)
    assert not one.client.attached
    assert made.clients.protocol_errors == 1
    assert other.ask(messages.Sq.PING, b"")[0] == messages.Cq.PONG
