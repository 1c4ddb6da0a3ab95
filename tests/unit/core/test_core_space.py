"""Frames, slots and size classes on their own."""

from __future__ import annotations

import random

import pytest

from kvd.core.frames import Frames
from kvd.core.slots import Slots, _slab_frames
from kvd.errors import InvariantError, UsageError

MIB = 1 << 20
FRAME = 2 * MIB


def test_frames_coalesce_and_fit_best() -> None:
    frames = Frames()
    frames.give(0, 10)
    assert frames.take(3) == 0
    assert frames.take(2) == 3
    assert frames.take(5) == 5
    assert frames.take(1) is None
    frames.give(0, 3)
    frames.give(5, 5)
    assert frames.take(2) == 0, "out of the smaller extent"
    frames.give(0, 2)
    frames.give(3, 2)
    assert frames.largest() == 10
    assert frames.take(10) == 0


def test_frames_of_two_segments_are_not_neighbours() -> None:
    slots = Slots([4 * MIB, 4 * MIB])
    slots.ready(0, 0, 4 * MIB)
    slots.ready(1, 0, 4 * MIB)
    assert slots.frames.free_count == 4
    assert slots.frames.largest() == 2


@pytest.mark.parametrize("seed", range(5))
def test_frames_against_a_plain_set(seed: int) -> None:
    draw = random.Random(seed)
    print(f"seed {seed}")
    frames, free, taken = Frames(), set(range(64)), []
    frames.give(0, 64)
    for _ in range(500):
        if draw.random() < 0.5:
            count = draw.randrange(1, 9)
            frame = frames.take(count)
            fits = any(set(range(at, at + count)) <= free for at in range(64))
            assert (frame is not None) == fits
            if frame is not None:
                assert set(range(frame, frame + count)) <= free
                free -= set(range(frame, frame + count))
                taken.append((frame, count))
        elif taken:
            frame, count = taken.pop(draw.randrange(len(taken)))
            frames.give(frame, count)
            free |= set(range(frame, frame + count))
        assert frames.free_count == len(free)


@pytest.mark.parametrize(
    ("size", "slot"),
    [(1, 64), (64, 64), (65, 128), (4095, 4096), (4096, 4096), (4097, 8192), (3 * MIB + 1, 3 * MIB + 4096)],
)
def test_size_classes_round_up(size: int, slot: int) -> None:
    assert Slots([16 * MIB]).class_for(size).slot_bytes == slot


@pytest.mark.parametrize(
    ("slot", "segment_frames", "frames"),
    [
        (64, 8, 1),  # no waste
        (MIB, 8, 1),
        (3 * MIB // 2, 8, 3),  # 1 frame wastes a quarter, 3 hold four
        (3 * MIB, 8, 3),
        (5 * MIB, 8, 5),
        (16 * MIB, 8, 8),
        (3 * MIB // 2, 2, 1),  # nothing better fits the segment
    ],
)
def test_slabs_waste_at_most_a_sixteenth(slot: int, segment_frames: int, frames: int) -> None:
    assert _slab_frames(slot, segment_frames) == frames


def test_an_object_larger_than_the_largest_segment_is_refused_by_name() -> None:
    slots = Slots([4 * MIB, 8 * MIB + 4096])
    assert slots.class_for(8 * MIB).slab_frames == 4
    with pytest.raises(UsageError, match="largest segment, 8388608 B"):
        slots.class_for(8 * MIB + 1)


@pytest.mark.parametrize(
    ("segment", "begin", "end"),
    [(1, 0, FRAME), (0, 1, FRAME), (0, 0, FRAME + 1), (0, 0, 9 * MIB), (0, FRAME, FRAME), (0, 0, 4 * MIB)],
)
def test_ranges_that_are_not_new_frames_are_refused(segment: int, begin: int, end: int) -> None:
    slots = Slots([8 * MIB])
    slots.ready(0, FRAME, 2 * FRAME)
    with pytest.raises(InvariantError, match="is not a new range"):
        slots.ready(segment, begin, end)


def test_the_tail_of_a_segment_beyond_its_last_frame_is_not_used() -> None:
    slots = Slots([5 * MIB])
    slots.ready(0, 0, 5 * MIB)
    assert slots.usable_bytes == 4 * MIB


@pytest.mark.parametrize("seed", range(5))
def test_slots_are_handed_out_once_and_come_back(seed: int) -> None:
    draw = random.Random(seed)
    print(f"seed {seed}")
    slots = Slots([16 * MIB, 8 * MIB])
    slots.ready(0, 0, 16 * MIB)
    slots.ready(1, 0, 8 * MIB)
    classes = [slots.class_for(size) for size in (100_000, 700_000, 3 * MIB)]
    used: dict[int, int] = {}
    batches = []
    for _ in range(300):
        if draw.random() < 0.5:
            chosen = draw.choice(classes)
            count = draw.randrange(1, 6)
            places = slots.take(chosen, count)
            assert len(places) <= count
            for place in places:
                assert all(place + chosen.slot_bytes <= at or at + size <= place for at, size in used.items())
                used[place] = chosen.slot_bytes
            if places:
                batches.append(places)
        elif batches:
            places = batches.pop(draw.randrange(len(batches)))
            slots.give(places, reserved=True)
            for place in places:
                del used[place]
    for places in batches:
        slots.give(places, reserved=True)
    assert slots.frames.free_count == 12
    assert slots.frames.largest() == 8
    assert not slots.slab_at
