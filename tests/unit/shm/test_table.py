"""The native table and clients through Python: layout, look-ups, leases, views, eviction, forks, hostile META.

Where a test guards a safety mechanism it names the build (`KVD_MUTANT=x`, tests/native_build.py) in which it fails.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import mmap
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from shm_world import EPOCH, OBJECT_BYTES, World, numbers, u32, u64

from kvd.shm import _native, layout

KEY = 32


def key(keys: bytes, i: int) -> bytes:
    return keys[i * KEY : (i + 1) * KEY]


def expected(number: int) -> bytes:
    return bytes([number]) * OBJECT_BYTES


# --- layout and files


def test_layout_is_the_same_in_both_languages() -> None:
    assert _native.layout() == layout.table()


def test_a_build_for_use_leaves_nothing_out() -> None:
    assert _native.mutants == ()


def test_meta_header_and_seals(world: World) -> None:
    at = layout.OFFSETS["MetaHeader"]
    with mmap.mmap(world.meta, 0, prot=mmap.PROT_READ) as meta:
        assert meta[:8] == layout.META_MAGIC
        assert struct.unpack_from("<Q", meta, at["epoch"]) == (EPOCH,)
        assert struct.unpack_from("<I", meta, at["state"]) == (layout.MetaState.SERVING,)
        assert struct.unpack_from("<Q", meta, at["meta_bytes"]) == (len(meta),)
        (segments,) = struct.unpack_from("<Q", meta, at["segments_offset"])
        size, populated, kind, _, inode = layout.SEGMENT.unpack_from(meta, segments)
    assert (size, populated, kind, inode) == (
        world.pool_bytes, world.pool_bytes, 0, os.fstat(world.segment).st_ino,
    )  # fmt: skip
    assert world.table.meta_bytes == _native.Table.bytes_for(world.families, world.families, 1, world.clients)
    assert os.fstat(world.meta).st_mode & 0o777 == 0o600
    with pytest.raises(PermissionError):  # FUTURE_WRITE: no client can make META writable
        mmap.mmap(world.meta, 4096)
    for fd in (world.meta, world.segment):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)
        with pytest.raises(PermissionError):
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, 0)


def test_bad_shapes_are_refused_by_name(world: World) -> None:
    with pytest.raises(ValueError, match="families_max = 0"):
        _native.Table.bytes_for(0, 1, 1, 1)
    with pytest.raises(ValueError, match="an empty memfd is needed"):
        _native.Table(
            world.segment, families_max=8, records_max=8, segment_bytes=[4096], clients_max=1, epoch=1,
            boot_id=bytes(16), bucket_seed=1, pid=1, start_ticks=1,
        )  # fmt: skip
    with pytest.raises(ValueError, match="sq_bytes = 5000"):
        _native.Region(
            world.memfd("c"), slot=0, epoch=1, sq_bytes=5000, cq_bytes=4096, touch_records=16, hazards_max=8
        )
    with pytest.raises(ValueError, match="sizes has 2 elements, 1 are needed"):
        world.table.reserve(0, 1, u32(0), u64(0), u64(1, 1), b"\0", bytes(8))
    with pytest.raises(ValueError, match="item 0: member 0, 128 bytes at 8128"):
        world.table.reserve(0, 1, u32(0), u64(world.pool_bytes - 64), u64(128), b"\0", bytes(8))
    with pytest.raises(OSError, match="META: fstat of descriptor -1") as caught:
        _native.Client(-1, -1, [], False)
    assert caught.value.errno == errno.EBADF


# --- looking up


def test_match_counts_leading_complete_families(world: World, keys: bytes) -> None:
    region, client = world.client()
    assert client.match(keys) == 0
    world.put(keys[: 20 * KEY])
    assert client.match(keys) == 20
    assert client.match(keys[20 * KEY :]) == 0
    assert client.match(b"") == 0
    world.evict(7)
    assert client.match(keys) == 7
    assert client.match(memoryview(keys)[8 * KEY :]) == 12
    counters = region.counters()
    assert counters[layout.Counter.LOOKUPS] == 6
    assert counters[layout.Counter.KEYS_HIT] == 20 + 7 + 12
    with pytest.raises(ValueError, match="keys has 33 bytes"):
        client.match(bytes(33))


def test_partial_families_are_present_but_no_match(world: World, keys: bytes) -> None:
    _, client = world.client()
    world.reserve([0, 1], b"\0\2")
    two = key(keys, 0) * 2
    world.table.publish(0, two, b"\0\2", 9, 3, u32(0, 1), u64(5, 6), u32(4, 5))
    rows = list(layout.PRESENT.iter_unpack(client.present(keys[: 2 * KEY])))
    assert rows == [(0b101, 0, 9, 3, 1, 0), (0, 0, 0, 0, 0, 0)]
    assert client.match(keys) == 0
    assert len(client.acquire(keys)) == 0
    assert len(client.acquire_each(keys)) == 0
    lease = client.fetch(key(keys, 0), 2)  # a member can be had before its family is complete
    assert lease is not None
    assert [bytes(lease.view()), bytes(lease.view(0)), bytes(memoryview(lease))] == [
        expected(1), expected(0), expected(1),
    ]  # fmt: skip
    assert client.fetch(key(keys, 0), 1) is None
    entries, present = world.table.probe(keys[: 2 * KEY], b"\0\1\2")
    assert numbers(entries) == [4, layout.NONE32]
    assert present == bytes([1, 0, 1, 0, 0, 0])
    described = world.table.entry(4)
    assert described["key"] == key(keys, 0)
    assert [m["member"] for m in described["members"]] == [2, 0]
    assert (described["members"][0]["heads"], described["members"][0]["layers"]) == ((0, 8), (4, 36))


def test_publish_outcomes(world: World, keys: bytes) -> None:
    world.put(keys[:KEY])
    world.reserve([1, 2, 3, 4])
    four = key(keys, 0) * 2 + key(keys, 1) + key(keys, 2)
    status, entries, differs, used = world.table.publish(
        0, four, bytes(4), 3, 1, u32(1, 2, 3, 4), u64(1000, 999, 5, 5), u32(9)
    )
    assert (status, differs, used) == (bytes([1, 1, 0, 4]), bytes([0, 1, 0, 0]), 1)
    assert numbers(entries) == [0, 0, 9, layout.NONE32]
    world.table.free_records(u32(1, 2, 4))
    with pytest.raises(RuntimeError, match="record 3 is in state 2, not 1"):
        world.table.free_records(u32(3))


def test_publish_of_foreign_or_finished_records_is_refused(world: World, keys: bytes) -> None:
    """I5. Fails in the build OWNER_CHECK."""
    world.reserve([0], owner=1)
    for owner, members in ((0, b"\0"), (1, b"\1")):
        with pytest.raises(RuntimeError, match="record 0 is in state 1 of owner 1 for member 0"):
            world.table.publish(owner, key(keys, 0), members, 3, 2, u32(0), u64(1), u32(0))
    world.table.publish(1, key(keys, 0), b"\0", 3, 1, u32(0), u64(1), u32(0))
    with pytest.raises(RuntimeError, match="record 0 is in state 2"):
        world.table.publish(1, key(keys, 1), b"\0", 3, 1, u32(0), u64(1), u32(1))
    assert numbers(world.table.scan(0, 64)) == [0]


# --- leases and views


def test_views_show_the_bytes_and_cannot_write(world: World, keys: bytes) -> None:
    _, client = world.client()
    world.put(keys)
    batch = client.acquire(keys)
    assert (len(batch), batch.held, client.held) == (40, 40, 40)
    assert [bytes(lease.view()) for lease in batch] == [expected(i) for i in range(40)]
    lease = batch[-1]
    assert (lease.size(), lease.checksum(), lease.heads(), lease.layers()) == (
        OBJECT_BYTES, 1039, (0, 8), (4, 36),
    )  # fmt: skip
    view = lease.view()
    assert view.readonly
    with pytest.raises(TypeError):
        view[0] = 1
    addresses, sizes, checksums = batch.columns()
    assert set(memoryview(sizes).cast("Q")) == {OBJECT_BYTES}
    assert list(memoryview(checksums).cast("Q")) == [1000 + i for i in range(40)]
    first, second = memoryview(addresses).cast("Q")[:2]
    assert second - first == OBJECT_BYTES
    with pytest.raises(IndexError, match="member 1 is not in this family"):
        lease.view(1)
    with pytest.raises(IndexError, match="lease 40 of 40"):
        batch[40]
    with pytest.raises(ValueError, match="member 128"):
        client.fetch(key(keys, 0), 128)


def test_leases_hold_what_is_evicted(world: World, keys: bytes) -> None:
    """Fails in the build HAZARD_SCAN."""
    _, client = world.client()
    world.put(keys)
    batch = client.acquire(keys[: 3 * KEY])
    assert world.table.held(0) == (3, 3 * OBJECT_BYTES)
    again = client.fetch(key(keys, 0))
    assert world.table.held(0) == (4, 3 * OBJECT_BYTES)
    assert world.table.holders(0) == [0]
    assert world.evict(0, 1, 2, 3) == ([3], [0, 1, 2])
    assert client.match(keys) == 3
    batch.release()
    assert world.evict(0, 1, 2) == ([1, 2], [0])
    del again
    assert world.evict(0) == ([0], [])
    assert world.table.held(0) == (0, 0)


def test_release_waits_for_the_last_view(world: World, keys: bytes) -> None:
    """Fails in the build EXPORTS."""
    np = pytest.importorskip("numpy")
    region, client = world.client()
    world.put(keys)
    batch = client.acquire(keys[: 4 * KEY])
    array = np.frombuffer(batch[2].view()[16:32], dtype=np.uint8)
    assert (batch.exports, batch[2].exports) == (1, 1)
    with pytest.raises(BufferError, match="1 of these leases"):
        batch.release()
    assert (batch.held, client.held, batch[2].released, batch[1].released) == (1, 1, True, True)
    with pytest.raises(RuntimeError, match="lease 2 was released"):
        batch[2].view()
    assert world.evict(0, 1, 2, 3) == ([0, 1, 3], [2])
    assert array.tolist() == [2] * 16
    part = array[3:5]
    del array
    assert client.held == 1
    del part
    assert (batch.held, batch.exports, client.held) == (0, 0, 0)
    assert world.evict(2) == ([2], [])
    assert region.counters()[layout.Counter.LEASES_RELEASED] == 4
    batch.release()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_tensors_keep_their_lease(world: World, keys: bytes) -> None:
    torch = pytest.importorskip("torch")
    _, client = world.client()
    world.put(keys)
    lease = client.fetch(key(keys, 6))
    assert lease is not None
    tensor = torch.frombuffer(lease.view(), dtype=torch.uint8)[4:8]
    del lease
    gc.collect()
    assert world.evict(6) == ([], [6])
    assert tensor.tolist() == [6] * 4
    del tensor
    assert world.evict(6) == ([6], [])


def test_dropped_leases_are_released_at_once(world: World, keys: bytes) -> None:
    _, client = world.client()
    world.put(keys)
    batch = client.acquire(keys)
    lease = batch[3]
    del batch
    assert client.held == 40  # the lease shares the batch's control block
    lease.release()
    assert client.held == 39
    del lease
    assert client.held == 0
    view = client.acquire(keys)[5].view()
    assert (client.held, bytes(view)) == (40, expected(5))
    del view
    assert client.held == 0


def test_context_manager_releases_and_hides_no_error(world: World, keys: bytes) -> None:
    _, client = world.client()
    world.put(keys)
    with client.acquire(keys) as batch:
        assert batch.held == 40
    assert client.held == 0
    with pytest.raises(BufferError), client.acquire(keys) as batch:
        view = batch[0].view()
    with pytest.raises(KeyError), client.acquire(keys) as batch:
        other = batch[0].view()
        raise KeyError
    assert client.held == 2
    del view, other
    assert client.held == 0


def test_acquire_each_masks_what_is_missing(world: World, keys: bytes) -> None:
    _, client = world.client()
    world.put(keys[: 6 * KEY])
    world.evict(1, 4)
    batch = client.acquire_each(keys[: 8 * KEY])
    assert batch.mask == bytes([1, 0, 1, 1, 0, 1, 0, 0])
    assert [lease.entry for lease in batch] == [0, 2, 3, 5]
    assert client.acquire(keys[: 8 * KEY]).mask == bytes([1] + [0] * 7)


def test_hazards_run_out_by_name(make_world: Callable[..., World], keys: bytes) -> None:
    world = make_world(hazards=8)
    _, client = world.client()
    world.put(keys)
    with pytest.raises(_native.HazardsExhausted, match="all 8 hazard words"):
        client.acquire(keys[: 9 * KEY])
    assert client.held == 0
    batch = client.acquire(keys[: 8 * KEY])
    with pytest.raises(RuntimeError):
        client.fetch(key(keys, 0))
    batch[0].release()
    assert client.fetch(key(keys, 9)) is not None


def test_leases_cross_to_another_client(world: World, keys: bytes) -> None:
    """An exporter's lease is adopted, in limbo too; a reused entry is not (build GENERATION)."""
    _, scheduler = world.client(0)
    region, worker = world.client(1)
    world.put(keys)
    batch = scheduler.acquire(keys[: 3 * KEY])
    wire = batch.export()
    assert [row[:2] for row in layout.DESCRIPTOR.iter_unpack(wire)] == [(EPOCH, 0), (EPOCH, 1), (EPOCH, 2)]
    world.evict(1, withdraw=True)
    assert worker.adopt(wire).mask == bytes([1, 1, 1])
    assert worker.adopt(wire, keys[: 3 * KEY]).mask == bytes([1, 1, 1])
    assert worker.adopt(wire, keys[KEY : 4 * KEY]).mask == bytes(3)
    assert worker.adopt(wire, keys[:KEY] + keys[2 * KEY : 4 * KEY]).mask == bytes([1, 0, 0])
    with pytest.raises(ValueError, match="keys has 2 items for 3 descriptors"):
        worker.adopt(wire, keys[: 2 * KEY])
    adopted = worker.adopt(wire)
    assert adopted.mask == bytes([1, 1, 1])
    batch.release()
    assert bytes(adopted[1].view()) == expected(1)
    assert world.evict(0, 1, 2) == ([], [0, 1, 2])
    adopted.release()
    assert world.evict(0, 1, 2) == ([0, 1, 2], [])
    world.reserve([0])
    world.table.publish(0, key(keys, 0), b"\0", 3, 1, u32(0), u64(1), u32(0))
    assert worker.adopt(wire).mask == bytes(3)
    assert region.counters()[layout.Counter.ADOPTS_FAILED] == 3 + 3 + 2
    with pytest.raises(ValueError, match="descriptors has 25 bytes"):
        worker.adopt(wire[:25])


def test_touches_tell_of_runs(world: World, keys: bytes) -> None:
    region, client = world.client()
    world.put(keys[: 5 * KEY])
    client.match(keys)
    client.match(keys, 11)
    client.acquire(keys, 12)
    client.fetch(key(keys, 2), 0, 13)
    client.fetch(key(keys, 9))
    rows = list(layout.TOUCH.iter_unpack(region.touches()))
    assert [(r[0], r[2], r[4], r[5], r[8], r[9]) for r in rows] == [
        (11, 4, 5, 40, layout.TouchKind.MATCH, 0),
        (12, 4, 5, 40, layout.TouchKind.ACQUIRE, 0),
        (13, 2, 1, 1, layout.TouchKind.FETCH, OBJECT_BYTES),
        (0, layout.NONE32, 0, 1, layout.TouchKind.FETCH, 0),
    ]
    missed = [int.from_bytes(key(keys, i)[:8], "little") for i in (5, 5)] + [
        0,
        int.from_bytes(key(keys, 9)[:8], "little"),
    ]
    assert [r[6] for r in rows] == missed
    assert region.touches() == b""


# --- writing into the pool


def test_writable_views_are_bounded_and_retire(world: World, keys: bytes) -> None:
    _, reader = world.client(0)
    _, writer = world.client(1, writable=True)
    with pytest.raises(RuntimeError, match="read-only"):
        reader.writable(0, 64)
    slot = writer.writable(3 * OBJECT_BYTES, OBJECT_BYTES)
    view = slot.view
    view[:] = b"w" * OBJECT_BYTES
    assert bytes(world.table.memory(0, 3 * OBJECT_BYTES, OBJECT_BYTES)) == b"w" * OBJECT_BYTES
    assert slot.exports == 1
    slot.retire()
    with pytest.raises(RuntimeError, match="retired"):
        _ = slot.view
    del view
    assert slot.exports == 0
    for place in (world.pool_bytes - 64, 1 << 40, (1 << 48) - 1):
        with pytest.raises(RuntimeError, match=r"a writable slot: .* leave the mapping"):
            writer.writable(place, 128)
    with pytest.raises(RuntimeError, match="segment 1 of 1"):
        writer.writable(1 << 48, 64)
    with pytest.raises(RuntimeError, match="leave the mapping"):
        writer.writable(0, (1 << 64) - 1)


# --- life


def test_close_keeps_what_views_show(world: World, keys: bytes) -> None:
    _, client = world.client()
    world.put(keys)
    batch = client.acquire(keys)
    view = batch[1].view()
    assert client.close() == 1
    for call in (
        lambda: client.match(keys),
        lambda: client.poll(1),
        lambda: client.fetch(key(keys, 0)),
        lambda: client.state,
    ):
        with pytest.raises(RuntimeError, match="closed"):
            call()
    assert bytes(view) == expected(1)
    assert world.table.held(0) == (1, OBJECT_BYTES)
    del view
    assert world.table.held(0) == (0, 0)
    assert client.close() == 0


def test_slots_attach_and_detach(world: World, keys: bytes) -> None:
    region, client = world.client(2)
    world.put(keys)
    batch = client.acquire(keys[:KEY])
    with pytest.raises(RuntimeError, match="slot 2 is taken"):
        world.table.attach(2, region, 1, 1, 1, 1)
    with pytest.raises(ValueError, match="made for slot 2"):
        world.table.attach(3, region, 1, 1, 1, 1)
    world.table.disconnected(2)  # its hazards count until it is known to be gone
    assert world.evict(0) == ([], [0])
    world.table.detach(2)
    assert world.evict(0) == ([0], [])
    with pytest.raises(RuntimeError, match="slot 2 is free"):
        world.table.held(2)
    with pytest.raises(ValueError, match="slot 9 of 4"):
        world.table.detach(9)
    assert len(batch) == 1


def test_a_region_serves_one_client(world: World) -> None:
    _, fd = world.region()
    client = _native.Client(world.meta, fd, [world.segment], False)
    client.submit(4, 1, b"")
    with pytest.raises(RuntimeError, match="in use already"):
        _native.Client(world.meta, fd, [world.segment], False)


def child_reports(check: Callable[[], bool]) -> int:
    """Runs `check` in a forked child; 0 true, 1 false, 2 an exception; the number of a signal is negative."""
    pid = os.fork()
    if pid == 0:
        status = 2
        with contextlib.suppress(BaseException):
            status = 0 if check() else 1
        os._exit(status)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def test_forked_children_refuse_and_touch_nothing(world: World, keys: bytes) -> None:
    region, client = world.client(writable=True)
    world.put(keys)
    held: dict[str, Any] = {"batch": client.acquire(keys), "slot": client.writable(0, 64)}
    held["view"] = held["batch"][4].view()
    calls: list[Callable[[], object]] = [
        lambda: client.match(keys), lambda: client.acquire(keys), lambda: client.poll(1), lambda: client.close(),
        lambda: held["batch"].release(), lambda: held["batch"][0].view(), lambda: held["batch"].export(),
        lambda: held["slot"].view, lambda: region.pop(1), lambda: region.touches(), lambda: world.table.scan(0, 1),
        lambda: world.table.evict(u32(0), False), lambda: world.table.held(0), lambda: client.add(0, 1),
    ]  # fmt: skip

    def in_child() -> bool:
        for call in calls:
            try:
                call()
            except RuntimeError as error:
                if "forked" not in str(error):
                    return False
            else:
                return False
        held.clear()  # destructors of a view, a batch and a slot
        gc.collect()
        return True

    assert child_reports(in_child) == 0
    assert (client.held, world.table.held(0)[0]) == (40, 40)
    assert bytes(held["view"]) == expected(4)


def test_pool_is_read_only_for_readers(world: World, keys: bytes) -> None:
    ctypes = pytest.importorskip("ctypes")
    _, client = world.client()
    world.put(keys)
    batch = client.acquire(keys[:KEY])
    (address,) = memoryview(batch.columns()[0]).cast("Q")

    def in_child() -> bool:
        _, own = world.client(3)  # a client of the child's own
        return own.match(keys) == 40

    assert child_reports(in_child) == 2  # the daemon's side does not work there either

    line = next(line for line in Path("/proc/self/maps").read_text().splitlines() if _contains(line, address))
    assert line.split()[1] == "r--s"
    assert ctypes.string_at(address, OBJECT_BYTES) == expected(0)


def _contains(line: str, address: int) -> bool:
    begin, end = (int(part, 16) for part in line.split()[0].split("-"))
    return begin <= address < end
