"""The native client while other Python code runs in the middle of a call: collections, and threads that close it."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading

import pytest
from shm_world import OBJECT_BYTES, World, u64

from kvd.shm import _native


def test_frames_are_taken_once_though_a_collection_polls_in_the_middle(world: World) -> None:
    """Fails if Python objects are made while the ring is read: what a collection runs reads the same frames again."""
    region, client = world.client(0)
    for op in range(100):
        assert region.push(4, op, b"12345678")
    got: list[int] = []

    def collected(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            got.extend(op for _, op, _ in client.poll(3))

    threshold = gc.get_threshold()
    gc.callbacks.append(collected)
    gc.set_threshold(5)
    try:
        while frames := client.poll(64):
            got.extend(op for _, op, _ in frames)
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(collected)
    assert sorted(got) == list(range(100))


def test_writable_views_count_while_they_are_looked_at(world: World) -> None:
    """Fails if close counts leases alone."""
    _, client = world.client(0, writable=True)
    slot = client.writable(0, OBJECT_BYTES)
    idle = client.writable(OBJECT_BYTES, OBJECT_BYTES)
    view = slot.view
    assert not slot.retire_idle()
    assert client.close() == 1
    view[:] = bytes(OBJECT_BYTES)
    with pytest.raises(RuntimeError, match="closed"):
        _ = idle.view
    view.release()
    assert slot.retire_idle()
    assert client.close() == 0


def test_fill_checks_all_then_copies_and_hashes(world: World) -> None:
    _, client = world.client(0, writable=True)
    places, sizes, seeds = u64(0, 2 * OBJECT_BYTES), u64(OBJECT_BYTES, OBJECT_BYTES), u64(3, 4)
    sources = [b"a" * OBJECT_BYTES, bytearray(b"b" * OBJECT_BYTES)]
    for bad in ([b"a" * OBJECT_BYTES, b"b"], [b"a" * OBJECT_BYTES]):
        with pytest.raises(ValueError, match="source"):
            client.fill(places, sizes, bad, seeds)
    with pytest.raises(RuntimeError, match="leave the mapping"):
        client.fill(u64(0, 1 << 40), sizes, sources, seeds)
    assert bytes(world.table.memory(0, 0, OBJECT_BYTES)) == bytes(OBJECT_BYTES)
    checksums = client.fill(places, sizes, sources, seeds)
    assert checksums == client.checksums(places, sizes, seeds)
    assert bytes(world.table.memory(0, 2 * OBJECT_BYTES, OBJECT_BYTES)) == b"b" * OBJECT_BYTES
    assert client.counters()[10] == 2 * OBJECT_BYTES


def closed_while_hashing() -> None:
    """Close the client while another thread hashes 512 MiB of its slots, nothing else keeping them mapped."""
    world = World(families=8192)
    _, client = world.client(0, writable=True)
    count, size = 512, world.pool_bytes
    arguments = u64(*[0] * count), u64(*[size] * count), u64(*range(count))
    sys.setswitchinterval(1000)  # the other thread runs on until it lets go by itself: inside the call
    found: list[bytes] = []
    thread = threading.Thread(target=lambda: found.append(client.checksums(*arguments)))
    thread.start()
    assert client.close() == 0
    assert not found, "the call was over before the client was closed"
    thread.join()
    assert len(found[0]) == 8 * count
    os._exit(0)


def test_slots_stay_mapped_while_they_are_hashed() -> None:
    """Fails (with SIGSEGV) if the call does not hold their mappings."""
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    assert _native
    closed_while_hashing()
