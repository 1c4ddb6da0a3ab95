"""META that lies: whatever a client reads there is bounded before use and never dereferenced."""

from __future__ import annotations

import mmap
import os
import signal
import struct
import time
from collections.abc import Callable

import pytest
from shm_world import EPOCH, OBJECT_BYTES, World

from kvd.shm import _native, layout

KEY = 32


def key(keys: bytes, i: int) -> bytes:
    return keys[i * KEY : (i + 1) * KEY]


def expected(number: int) -> bytes:
    return bytes([number]) * OBJECT_BYTES


def forged(world: World, keys: bytes, patch: Callable[[bytearray, dict[str, int]], None]) -> _native.Client:
    """A client of a copy of META in which `patch` changed something; it gets the tables' offsets by name."""
    at = layout.OFFSETS["MetaHeader"]
    with mmap.mmap(world.meta, 0, prot=mmap.PROT_READ) as meta:
        image = bytearray(meta[:])
    tables = {
        name: struct.unpack_from("<Q", image, at[f"{name}_offset"])[0]
        for name in ("segments", "clients", "buckets", "entries", "records")
    }
    patch(image, tables)
    fd = world.memfd("forged")
    os.write(fd, image)
    _, client_fd = world.region(3)
    return _native.Client(fd, client_fd, [world.segment], True)


@pytest.mark.parametrize(
    ("field", "code", "value", "message"),
    [
        ("magic", "<Q", 1, "magic"),
        ("version", "<I", 2, "layout_version is 2, expected 1"),
        ("families_max", "<I", 128, "META"),
        ("records_max", "<I", 1 << 31, "META"),
        ("entries_offset", "<Q", 1 << 40, "entries_offset"),
        ("meta_bytes", "<Q", 4096, "meta_bytes"),
        ("epoch", "<Q", 5, "different epochs"),
        ("segments_count", "<I", 2, "META"),
    ],
)
def test_forged_headers(world: World, keys: bytes, field: str, code: str, value: int, message: str) -> None:
    def patch(image: bytearray, _: dict[str, int]) -> None:
        struct.pack_into(code, image, layout.OFFSETS["MetaHeader"][field], value)

    with pytest.raises(RuntimeError, match=message):
        forged(world, keys, patch)


def test_forged_records_are_named_not_followed(world: World, keys: bytes) -> None:
    world.put(keys)
    record, size = layout.OFFSETS["Record"], layout.SIZES["Record"]
    entry = layout.OFFSETS["Entry"]

    def patch(image: bytearray, tables: dict[str, int]) -> None:
        def set_record(number: int, field: str, code: str, value: int) -> None:
            struct.pack_into(code, image, tables["records"] + number * size + record[field], value)

        set_record(0, "place", "<Q", 7 << 48)
        set_record(1, "place", "<Q", world.pool_bytes - 64)
        set_record(2, "size_bytes", "<Q", (1 << 64) - 1)
        set_record(3, "member", "<B", 9)
        set_record(4, "member", "<B", 9)
        set_record(4, "next", "<I", 4)  # a list that never ends
        struct.pack_into("<I", image, tables["entries"] + 5 * 64 + entry["record_first"], 1 << 30)
        struct.pack_into("<B", image, tables["entries"] + 6 * 64 + entry["members_count"], 200)

    client = forged(world, keys, patch)
    batch = client.acquire(keys)
    assert len(batch) == 6  # a count beyond 128 is never complete
    messages = [
        "record 0 lies in segment 7 of 1", "128 x 1 bytes at offset 8128 leave",
        "18446744073709551615 x 1 bytes at offset 256 leave", "no record of it", "no record of it",
        "names record 1073741824 of 64",
    ]  # fmt: skip
    for lease, message in zip(batch, messages, strict=True):
        with pytest.raises(RuntimeError, match=message):
            lease.view()
    with pytest.raises(RuntimeError, match="record 0 lies in segment 7"):
        client.fetch(key(keys, 0))
    held = client.held
    assert held == len(batch)


def test_adoption_waits_a_bounded_time_for_a_scan(world: World, keys: bytes) -> None:
    """A daemon that died between its mark and its scan leaves EVICTING: the whole batch waits once, then fails."""
    world.put(keys)

    def patch(image: bytearray, tables: dict[str, int]) -> None:
        for number in range(40):
            struct.pack_into(
                "<Q", image, tables["entries"] + 64 * number, 1 << 8 | layout.EntryState.EVICTING
            )

    client = forged(world, keys, patch)
    wire = b"".join(layout.DESCRIPTOR.pack(EPOCH, i % 40, 0, 1) for i in range(240))
    begin_ns = time.monotonic_ns()
    assert client.adopt(wire).mask == bytes(240)
    assert 2_000_000 <= time.monotonic_ns() - begin_ns < 240_000_000  # a wait for each would take twice that
    assert client.held == 0


def test_forged_buckets_only_miss(world: World, keys: bytes) -> None:
    """Slots that name entries beyond the table, or wrong ones. The second half fails in the build IDENTITY."""
    world.put(keys)

    def patch(image: bytearray, tables: dict[str, int]) -> None:
        for at in range(tables["buckets"], tables["entries"], 8):
            (slot,) = struct.unpack_from("<Q", image, at)
            if slot:
                wrong = 0xFFFFFFF0 if (slot & 1) else (slot & 0xFFFFFFFF) % 40 + 1
                struct.pack_into("<Q", image, at, slot >> 32 << 32 | wrong)

    client = forged(world, keys, patch)
    assert client.match(keys) == 0
    assert client.acquire_each(keys).mask == bytes(40)


def test_signals_interrupt_no_lookup(world: World, keys: bytes) -> None:
    """A handler that looks up while a look-up was interrupted finds the client whole."""
    _, client = world.client()
    world.put(keys)
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda *_: seen.append(len(client.acquire(keys))))
    try:
        for _ in range(20):
            batch = client.acquire(keys)
            signal.raise_signal(signal.SIGUSR1)
            assert batch.held == 40
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert seen == [40] * 20
    del batch
    assert client.held == 0
