"""Rings between a client and the daemon's side, through Python: order, fullness, waking, waiting, hostile bytes.

Where a test guards a safety mechanism it names the build (`KVD_MUTANT=x`, tests/native_build.py) in which it fails.
"""

from __future__ import annotations

import mmap
import signal
import socket
import struct
import threading
from collections.abc import Iterator
from random import Random

import pytest
from shm_world import EPOCH, SEED, World

from kvd.shm import _native, layout

RING_BYTES = 4096
AT = layout.OFFSETS["ClientHeader"]


class Ends:
    """Both ends of one client's rings, the wake sockets, and a second mapping that plays a hostile client."""

    def __init__(self, world: World) -> None:
        self.region, fd = world.region()
        self.client = _native.Client(world.meta, fd, [world.segment], False)
        self.raw = mmap.mmap(fd, 0)
        self.daemon_wake, self.client_wake = socket.socketpair()

    def put(self, field: str, code: str, value: int) -> None:
        struct.pack_into(code, self.raw, AT[field], value)

    def get(self, field: str, code: str) -> int:
        value: int = struct.unpack_from(code, self.raw, AT[field])[0]
        return value

    def close(self) -> None:
        self.raw.close()
        self.daemon_wake.close()
        self.client_wake.close()


@pytest.fixture
def ends(world: World) -> Iterator[Ends]:
    ends = Ends(world)
    yield ends
    ends.close()


def test_frames_arrive_whole_and_in_order(ends: Ends) -> None:
    random = Random(SEED)
    sent: list[tuple[int, int, bytes]] = []
    for push, pop in ((ends.client.submit, ends.region.pop), (ends.region.push, ends.client.poll)):
        sent.clear()
        got: list[tuple[int, int, bytes]] = []
        full = 0
        for op in range(3000):
            frame = (random.randrange(16), op, random.randbytes(random.randrange(300)))
            if push(*frame) == layout.Push.FULL:
                full += 1
                got += pop(1000)
                assert push(*frame) == layout.Push.PUSHED
            sent.append(frame)
            if random.random() < 0.05:
                got += pop(random.randrange(8))
        got += pop(100_000)
        assert got == sent
        assert full > 10
        assert pop(1) == []


def test_largest_frame_fits_at_every_position(ends: Ends) -> None:
    most = ends.client.payload_bytes_max
    assert most == ends.region.payload_bytes_max == RING_BYTES // 2 - 16
    with pytest.raises(
        ValueError, match=f"a payload of {most + 1} bytes does not fit the ring: at most {most}"
    ):
        ends.client.submit(1, 1, bytes(most + 1))
    with pytest.raises(ValueError, match="type 65535"):
        ends.client.submit(layout.FRAME_PAD, 1, b"")
    for op in range(600):
        assert ends.client.submit(1, op, bytes(8 * (op % 3))) == layout.Push.PUSHED
        assert ends.client.submit(2, op, b"x" * most) == layout.Push.PUSHED
        assert [(t, o, len(p)) for t, o, p in ends.region.pop(9)] == [(1, op, 8 * (op % 3)), (2, op, most)]


def test_sleepers_are_woken_once(ends: Ends) -> None:
    assert ends.client.submit(4, 1, b"") == layout.Push.PUSHED
    assert not ends.region.may_sleep()
    assert ends.get("daemon_sleeping", "<I") == 0
    assert len(ends.region.pop(10)) == 1
    assert ends.region.may_sleep()
    assert ends.get("daemon_sleeping", "<I") == 1
    assert ends.client.submit(4, 2, b"") == layout.Push.PUSHED_WAKE
    assert ends.client.submit(4, 3, b"") == layout.Push.PUSHED
    ends.region.pop(10)
    ends.region.may_sleep()
    ends.region.awake()
    assert ends.client.submit(4, 4, b"") == layout.Push.PUSHED
    assert ends.client.may_sleep()
    assert ends.region.push(4, 1, b"") == layout.Push.PUSHED_WAKE
    assert not ends.client.may_sleep()
    ends.client.poll(10)
    assert ends.client.may_sleep()
    ends.client.awake()
    assert ends.region.push(4, 2, b"") == layout.Push.PUSHED


@pytest.mark.parametrize(
    ("tail", "size", "kind", "flags", "message"),
    [
        (RING_BYTES + 8, 0, 1, 0, "the producer's cursor"),
        ((1 << 64) - 8, 0, 1, 0, "the producer's cursor"),
        (20, 0, 1, 0, "the producer's cursor"),
        (24, 16, 1, 0, "frame of type 1"),
        (RING_BYTES, 0xFFFFFFFF, 1, 0, "frame of type 1"),
        (RING_BYTES, RING_BYTES // 2, 1, 0, "frame of type 1"),
        (32, 0, 1, 3, "flags 3"),
        (16, 0, layout.FRAME_PAD, 0, "a pad leaves the ring"),
        (RING_BYTES, 1, layout.FRAME_PAD, 0, "a pad leaves the ring"),
    ],
)
def test_hostile_submissions(ends: Ends, tail: int, size: int, kind: int, flags: int, message: str) -> None:
    """I6. Fails in the build RING_BOUNDS."""
    layout.FRAME.pack_into(ends.raw, ends.get("sq_offset", "<Q"), size, kind, flags, 1)
    ends.put("sq_tail", "<Q", tail)
    for _ in range(2):  # and stays refused
        with pytest.raises(ValueError, match=message):
            ends.region.pop(16)


def test_good_frames_before_a_bad_one_are_returned(ends: Ends) -> None:
    for op in range(3):
        ends.client.submit(2, op, b"payload!")
    layout.FRAME.pack_into(ends.raw, ends.get("sq_offset", "<Q") + 2 * 24, 1 << 20, 2, 0, 2)
    assert [op for _, op, _ in ends.region.pop(16)] == [0, 1]
    with pytest.raises(ValueError, match="1048576 payload bytes"):
        ends.region.pop(16)


def test_hostile_consumer(ends: Ends) -> None:
    ends.put("cq_head", "<Q", 4096)
    with pytest.raises(ValueError, match="the consumer's cursor"):
        ends.region.push(1, 1, b"")


def test_hostile_sizes_and_marks_are_not_used(ends: Ends, world: World) -> None:
    """The header may say anything after the daemon made it: private copies are used."""
    for field, code in (("sq_bytes", "<I"), ("sq_offset", "<Q"), ("hazards_max", "<I"), ("hazards_offset", "<Q"),
                        ("hazards_high", "<I"), ("touch_tail", "<Q"), ("touch_records", "<I")):  # fmt: skip
        ends.put(field, code, 0xFFFFFFFF)
    for counter in range(layout.COUNTERS_COUNT):
        struct.pack_into("<Q", ends.raw, AT["counters"] + 8 * counter, (1 << 64) - 1)
    ends.client.submit(4, 7, b"12345678")
    assert ends.region.pop(4) == [(4, 7, b"12345678")]
    assert world.table.held(0) == (0, 0)
    assert world.table.holders(0) == []
    assert ends.region.touches() == b""
    assert ends.region.counters() == ((1 << 64) - 1,) * layout.COUNTERS_COUNT


def test_random_scribbling_ends_in_value_error_or_frames(ends: Ends) -> None:
    """Whatever stands in the client's header and ring, the daemon gets frames within bounds or a ValueError."""
    random = Random(SEED)
    begin = ends.get("sq_offset", "<Q")
    refused = 0
    for _ in range(300):
        ends.raw[begin : begin + RING_BYTES] = random.randbytes(RING_BYTES)
        for at in range(begin, begin + RING_BYTES, 24):
            layout.FRAME.pack_into(ends.raw, at, random.choice((0, 4, 8, 90, 5000)), 2, 0, 1)
        tail = random.choice((8, 24, 240, RING_BYTES, RING_BYTES + 8, random.getrandbits(64)))
        ends.put("sq_tail", "<Q", (ends.get("sq_head", "<Q") + tail) & ((1 << 64) - 1))
        try:
            assert all(len(payload) <= RING_BYTES // 2 for _, _, payload in ends.region.pop(1000))
        except ValueError:
            refused += 1
    assert refused > 100


# --- waiting


def test_wait_sees_data_deadline_and_end(ends: Ends) -> None:
    fd = ends.client_wake.fileno()
    assert ends.client.wait(fd, 0) == layout.Wait.DEADLINE
    ends.daemon_wake.send(b"\0" * 700)  # stray bytes wake nobody for good
    assert ends.client.wait(fd, 1_000_000) == layout.Wait.DEADLINE
    assert ends.get("client_sleeping", "<I") == 0
    ends.region.push(4, 1, b"")
    assert ends.client.wait(fd, 1 << 63) == layout.Wait.READY
    ends.daemon_wake.close()
    assert ends.client.wait(fd, 1 << 63) == layout.Wait.READY  # what was pushed before the end is there
    ends.client.poll(10)
    assert ends.client.wait(fd, 1 << 63) == layout.Wait.GONE
    with pytest.raises(OSError, match="waiting for the daemon"):
        ends.client.wait(10_000, 10)


def test_wait_is_woken_by_a_push_from_another_thread(ends: Ends) -> None:
    """The GIL is free while waiting, and the sleeper is seen by the producer."""
    stop = threading.Event()

    def daemon() -> None:
        while not stop.is_set():
            for kind, op, payload in ends.region.pop(16):
                if ends.region.push(kind, op, payload) == layout.Push.PUSHED_WAKE:
                    ends.daemon_wake.send(b"w")
            if ends.region.may_sleep():
                ends.daemon_wake.recv(64)
                ends.region.awake()

    thread = threading.Thread(target=daemon)
    thread.start()
    try:
        for op in range(300):
            if ends.client.submit(2, op, b"ping") == layout.Push.PUSHED_WAKE:
                ends.client_wake.send(b"w")
            assert ends.client.wait(ends.client_wake.fileno(), 20_000_000_000) == layout.Wait.READY
            assert ends.client.poll(16) == [(2, op, b"ping")]
    finally:
        stop.set()
        ends.client_wake.send(b"w")
        thread.join()


class InterruptedWaitError(Exception):
    """What the signal handler of the test raises."""


def test_signals_end_a_wait_only_by_raising(ends: Ends) -> None:
    """Ctrl-C works: handlers run during a wait, which then comes back so that who waits can look and go on."""
    caught: list[int] = []

    def handler(number: int, _: object) -> None:
        caught.append(number)
        if len(caught) == 3:
            raise InterruptedWaitError

    stop = threading.Event()

    def disturb() -> None:
        while not stop.wait(0.002):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, handler)
    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        with pytest.raises(InterruptedWaitError):
            while ends.client.wait(ends.client_wake.fileno(), 1 << 62) == layout.Wait.INTERRUPTED:
                pass
    finally:
        stop.set()
        thread.join()
        signal.signal(signal.SIGUSR1, before)
    assert len(caught) >= 3
    assert ends.client.wait(ends.client_wake.fileno(), 0) == layout.Wait.DEADLINE


@pytest.mark.parametrize("field", ["magic", "version", "sq_bytes", "sq_offset", "hazards_offset", "epoch"])
def test_clients_refuse_regions_that_do_not_fit(world: World, field: str) -> None:
    _, fd = world.region()
    with mmap.mmap(fd, 0) as raw:
        struct.pack_into("<I", raw, AT[field], 3)
    with pytest.raises((RuntimeError, ValueError), match=r"region|sq_bytes"):
        _native.Client(world.meta, fd, [world.segment], False)


def test_counters_are_the_clients_word(ends: Ends) -> None:
    ends.client.add(layout.Counter.BYTES_FILLED, 12)
    ends.client.add(layout.Counter.BYTES_FILLED, 30)
    assert ends.region.counters()[layout.Counter.BYTES_FILLED] == 42
    with pytest.raises(ValueError, match="counter 32 of 32"):
        ends.client.add(32, 1)
    assert ends.client.epoch == EPOCH
    assert ends.client.state == layout.MetaState.SERVING
