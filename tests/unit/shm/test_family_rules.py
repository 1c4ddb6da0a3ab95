"""The native twin of kvd.layout.family: the same answers as the reference, over many geometries and splits."""

from __future__ import annotations

import random
import struct

import pytest

from kvd.layout.family import RULE_NUMBERS, Completeness
from kvd.layout.geometry import Geometry, Group, Plane, Rule, kv_planes
from kvd.layout.shards import Split
from kvd.shm import _native

ROW = struct.Struct("<QQHBBI")
CHUNK = 4


def rows(present: list[int], splits: list[int]) -> bytes:
    low = (1 << 64) - 1
    return b"".join(
        ROW.pack(bits & low, bits >> 64, code if bits else 0, 1, bool(bits), 0)
        for bits, code in zip(present, splits, strict=True)
    )


def native(rule: Completeness, codes: list[int]) -> _native.FamilyRules:
    low = (1 << 64) - 1
    rules = _native.FamilyRules(CHUNK, [(RULE_NUMBERS[g.rule], g.window) for g in rule.geometry.groups])
    for code in codes:
        masks = rule.group_masks(code)
        rules.add(code, [(mask & low, mask >> 64) for mask in masks or ()])
    return rules


def geometry(rng: random.Random) -> Geometry:
    kinds = rng.sample([Rule.FULL, Rule.WINDOW, Rule.CHUNKED, Rule.STATE], rng.randint(1, 4))
    groups = []
    for number, kind in enumerate(kinds):
        if kind is Rule.STATE:
            groups.append(Group(kind, (number,), (Plane("state", 4, 8, "float32"),)))
        else:
            window = rng.choice((1, 2, 5, 8, 9, 16)) if kind is not Rule.FULL else 0
            groups.append(Group(kind, (number,), kv_planes(4, 8, 8, "float16"), window))
    return Geometry(groups, 4)


@pytest.mark.parametrize("seed", range(40))
def test_the_native_walk_agrees_with_the_reference(seed: int) -> None:
    rng = random.Random(seed)
    rule = Completeness(geometry(rng), CHUNK)
    codes = [Split(tp=tp).code for tp in (1, 2, 4)] + [Split(tp=3).code]  # 4 heads on 3 ranks: no such family
    rules = native(rule, codes)
    for _ in range(60):
        count = rng.randint(0, 24)
        splits = [rng.choice(codes if rng.random() < 0.2 else codes[:3]) for _ in range(count)]
        present = []
        for code in splits:
            bits = 0
            for mask in rule.group_masks(code) or (1,):
                bits |= mask if rng.random() < 0.8 else mask & rng.getrandbits(128)
            present.append(bits if rng.random() < 0.9 else 0)
        expected = rule.usable_chunks(present, splits)
        assert rules.usable(rows(present, splits)) == (expected, -1), f"seed {seed}: {rule.geometry.groups}"


def test_an_unknown_split_ends_the_walk_and_is_named() -> None:
    rule = Completeness(Geometry.attention(layers=1, kv_heads=4, head_dim=8, dtype="float16"), CHUNK)
    rules = native(rule, [0])
    four = Split(tp=4).code
    assert rules.usable(rows([1, 15, 1], [0, four, 0])) == (1, four)
    rules.add(four, [(15, 0)])
    assert rules.usable(rows([1, 15, 1], [0, four, 0])) == (3, -1)
    assert rules.usable(rows([1, 7, 1], [0, four, 0])) == (1, -1)


@pytest.mark.parametrize(
    ("groups", "said"),
    [([], "groups"), ([(0, 8)], "window 8"), ([(1, 0)], "window 0"), ([(4, 0)], "rule 4")],
)
def test_rules_that_cannot_be_are_refused(groups: list[tuple[int, int]], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        _native.FamilyRules(CHUNK, groups)


def test_masks_fit_their_groups_and_rows_are_whole() -> None:
    rules = _native.FamilyRules(CHUNK, [(0, 0), (3, 0)])
    with pytest.raises(ValueError, match="1 masks for 2 groups"):
        rules.add(0, [(1, 0)])
    with pytest.raises(ValueError, match="65536"):
        rules.add(65536, [])
    with pytest.raises(ValueError, match="not a multiple of 24"):
        rules.usable(b"123")


def test_a_family_is_complete_without_its_optional_members() -> None:
    """Members at or above family_members may come, in any order, and `match` does not ask for them."""
    from shm_world import OBJECT_BYTES, World, u32, u64

    assert OBJECT_BYTES
    world = World()
    _, client = world.client()
    key = bytes(range(32))
    for record, member, complete in ((0, 127, 0), (1, 0, 1), (2, 5, 1)):
        world.reserve([record], members=bytes([member]))
        entries = u32(0) if record == 0 else u32()
        status, _, _, _ = world.table.publish(0, key, bytes([member]), 0, 1, u32(record), u64(7), entries)
        assert status == b"\0"
        assert client.match(key) == complete
    low, high, split, count, ready, _ = ROW.unpack(client.present(key))
    assert (low, high, split, count, ready) == (0b100001, 1 << 63, 0, 1, 1)
    with pytest.raises(ValueError, match="member 128"):
        world.reserve([3], members=bytes([128]))
        world.table.publish(0, key, bytes([128]), 0, 1, u32(3), u64(7), u32())
    world.close()


def test_leases_by_rules_hold_what_the_prefix_needs_and_no_more() -> None:
    from shm_world import World

    world = World()
    _, client = world.client()
    keys = b"".join(bytes([n]) * 32 for n in range(1, 7))
    world.put(keys)  # split code 3
    window = _native.FamilyRules(CHUNK, [(1, 6)])
    batch, usable, unknown = client.acquire_family(keys, window)
    assert (len(batch), usable, unknown) == (0, 0, 3)
    window.add(3, [(1, 0)])
    batch, usable, unknown = client.acquire_family(keys, window)
    assert (usable, unknown, batch.mask) == (6, -1, b"\0\0\0\0\1\1")
    assert client.held == 2
    assert world.evict(0, 1, 2, 3, 4, 5) == ([0, 1, 2, 3], [4, 5])
    assert client.match_family(keys, window) == (6, -1), "what left is not needed"
    full = _native.FamilyRules(CHUNK, [(0, 0)])
    full.add(3, [(1, 0)])
    assert client.acquire_family(keys, full)[1] == 0
    batch.release()
    assert client.held == 0
    world.close()
