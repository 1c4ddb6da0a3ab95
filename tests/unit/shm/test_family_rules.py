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
