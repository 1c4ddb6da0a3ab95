"""The verifier with a real domain in this process: what is judged, what is not, and that it sleeps without work."""

from __future__ import annotations

import asyncio
from array import array
from typing import Any

import pytest

from kvd.config import ObjectsConfig
from kvd.core import events as ev
from kvd.errors import InvariantError, LifecycleError
from kvd.server import verifier as module
from kvd.server.verifier import REPORTS_MAX, Verifier
from kvd.shm import compute

SIZE = 4096


@pytest.fixture
def rig(world: Any, keys: Any) -> Any:
    """(world, verifier, attached, key of one object with its right checksum)."""
    made = world()
    verifier = Verifier(
        made.loop, made.domain, made.clients.by_slot.get, made.runner.withdraw, ObjectsConfig(verify_sample=0)
    )
    attached = made.attach()
    yield made, verifier, attached, keys
    verifier.close()


def store(attached: Any, key: bytes, data: bytes) -> int:
    """Publish one object; its place."""
    from kvd.shm import messages

    reservation, places, _ = attached.reserve([key], size=len(data))
    attached.native.writable(places[0], len(data)).view[:] = data
    seed = int.from_bytes(compute.seeds(key, 0), "little")
    payload = messages.pack_publish(reservation, 0, array("Q", [compute.checksum(data, seed)]), b"\1")
    kind, _ = attached.ask(messages.Sq.PUBLISH, payload)
    assert kind == messages.Cq.PUBLISHED
    return int(places[0])


def entry_of(made: Any, key: bytes) -> int:
    return int.from_bytes(made.domain.table.probe(key, b"")[0], "little")


def test_a_slot_that_was_reused_while_it_was_looked_at_is_not_judged(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The object leaves and its slot is filled with another one between its facts and its checksum."""
    made, verifier, attached, keys = rig
    old, new = keys(2)
    place = store(attached, old, b"o" * SIZE)
    entry = entry_of(made, old)
    items = verifier._items(entry)

    def reused(items: Any, views: Any) -> list[int]:
        return [0 for _ in items]

    made.runner.withdraw(entry)
    assert store(attached, new, b"n" * SIZE) == place, "the slot was reused"
    monkeypatch.setattr(module, "_checksums", reused)
    assert made.loop.run_until_complete(verifier._check(items, "sweep")) == []
    assert verifier.counters["verify_left"] == 1
    assert entry_of(made, new) != ev.NONE
    # Without that look at the entry the new object would be taken out for what the old one was.
    monkeypatch.setattr(verifier, "_is_as_it_was", lambda _item: True)
    assert made.loop.run_until_complete(verifier._check(items, "sweep")) == items


def test_damage_is_withdrawn_once_and_the_writer_is_named(rig: Any) -> None:
    made, verifier, attached, keys = rig
    (key,) = keys(1)
    place = store(attached, key, b"o" * SIZE)
    entry = entry_of(made, key)
    items = verifier._items(entry)
    assert verifier.writers.of(items[0].record)["writer_client"] == attached.client.client_id
    assert made.loop.run_until_complete(verifier._check(items, "sweep")) == []
    attached.native.writable(place, SIZE).view[7] ^= 1
    lease = attached.native.fetch(key)
    assert made.loop.run_until_complete(verifier._check(items, "sweep")) == items
    assert attached.native.match(key) == 0
    assert made.loop.run_until_complete(verifier._check(items, "sweep")) == items, (
        "held: still there, in limbo"
    )
    assert made.domain.core.counters["withdrawals"] == 1
    assert verifier._items(entry) == [], "what was withdrawn is not looked at again"
    lease.release()


def test_what_waits_is_bounded_and_nothing_wakes_an_idle_verifier(rig: Any) -> None:
    made, verifier, _, _ = rig
    for _ in range(REPORTS_MAX):
        verifier.report(0, 0, lambda _answer: None)
    with pytest.raises(LifecycleError, match="reports of damage are waiting"):
        verifier.report(0, 0, lambda _answer: None)

    async def work() -> None:
        task = asyncio.create_task(verifier.run())
        while verifier._reports:  # noqa: ASYNC110 - lets the task run, waits for nothing else
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not verifier._wanted.is_set()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    made.loop.run_until_complete(work())


def test_a_record_that_points_nowhere_is_a_broken_index(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """InvariantError ends the daemon (tests/ipc/test_integrity.py has the whole of it)."""
    made, verifier, attached, keys = rig
    (key,) = keys(1)
    store(attached, key, b"o" * SIZE)
    (item,) = verifier._items(entry_of(made, key))
    wrong = module.Item(item.entry, item.generation, key, 0, item.record, 99 << 48, SIZE, item.checksum)
    with pytest.raises(InvariantError, match="outside the pool"):
        made.loop.run_until_complete(verifier._check([wrong], "sweep"))
