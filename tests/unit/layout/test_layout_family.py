"""Completeness: by each group's rule, against a reference that walks every token, and in tables a person can check."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.errors import UsageError
from kvd.layout import family
from kvd.layout.family import Completeness
from kvd.layout.geometry import Geometry, Group, Plane, Rule
from kvd.layout.shards import Objects, Split

PLANES = (Plane("k", 2, 4, "bfloat16"), Plane("v", 2, 4, "bfloat16"))
STATE = (Plane("ssm", 2, 4, "float32"),)
CHUNK = 4


def geometry(*groups: tuple[Rule, int]) -> Geometry:
    """One layer a group."""
    return Geometry(
        [
            Group(rule, (number,), STATE if rule is Rule.STATE else PLANES, window)
            for number, (rule, window) in enumerate(groups)
        ]
    )


FULL = (Rule.FULL, 0)


def sees(rule: Rule, window: int, token: int, position: int) -> bool:
    """Whether computing the token at `position` reads the KV of an earlier `token`."""
    if rule is Rule.FULL:
        return True
    if rule is Rule.WINDOW:
        return token > position - window
    return rule is Rule.CHUNKED and token // window == position // window


def usable_slowly(geom: Geometry, present: list[int], splits: list[Split]) -> set[int]:
    """Every usable length, from the meaning: walk all later positions, all earlier tokens, all groups, all members."""
    lengths = set()
    for chunks in range(len(present) + 1):
        tokens = chunks * CHUNK
        good = True
        for number, group in enumerate(geom.groups):
            if group.rule is Rule.STATE:
                needed = {chunks - 1} if chunks else set()
            else:
                needed = {
                    token // CHUNK
                    for token in range(tokens)
                    for position in range(tokens, tokens + 2 * CHUNK)
                    if sees(group.rule, group.window, token, position)
                }
            for chunk in needed:
                for part in Objects(geom, splits[chunk], CHUNK):
                    if part.group == number and not present[chunk] >> part.index & 1:
                        good = False
        if good:
            lengths.add(chunks)
    return lengths


SPLITS = st.sampled_from([Split(), Split(tp=2), Split(tp=2, pp=2), Split(cp=2)])


@pytest.mark.slow
@settings(deadline=None)
@given(
    st.lists(
        st.one_of(
            st.just(FULL),
            st.tuples(st.just(Rule.WINDOW), st.integers(1, 20)),
            st.tuples(st.just(Rule.CHUNKED), st.integers(1, 20)),
            st.just((Rule.STATE, 0)),
        ),
        min_size=2, max_size=4,
    ),
    st.data(),
)  # fmt: skip
def test_usable_lengths_are_those_of_the_slow_reference(
    groups: list[tuple[Rule, int]], data: st.DataObject
) -> None:
    geom = geometry(*groups)
    splits = data.draw(st.lists(SPLITS, max_size=7))
    present = []
    for split in splits:
        members = (1 << len(Objects(geom, split, CHUNK))) - 1
        bitmap = data.draw(st.one_of(st.just(members), st.just(members), st.just(0), st.integers(0, members)))
        present.append(bitmap)
    rule = Completeness(geom, CHUNK)
    codes = [split.code for split in splits]
    lengths = rule.usable_lengths(present, codes)
    expected = usable_slowly(geom, present, splits)
    assert {k for k in range(len(present) + 1) if lengths >> k & 1} == expected
    best = rule.usable_chunks(present, codes)
    assert best == max(expected)
    needed = rule.required(best, codes)
    assert all(present[chunk] & mask == mask for chunk, mask in enumerate(needed))
    if best:  # and nothing of what is required can be missing
        for chunk, mask in enumerate(needed):
            if mask:
                lowest = mask & -mask
                poorer = [*present[:chunk], present[chunk] & ~lowest, *present[chunk + 1 :]]
                assert not rule.usable_lengths(poorer, codes) >> best & 1


def test_the_source_example() -> None:
    """chunk0 11, chunk1 10, chunk2 11: only chunk 0."""
    rule = Completeness(geometry(FULL), CHUNK)
    assert rule.usable_chunks([0b11, 0b01, 0b11], Split(tp=2).code) == 1


HYBRID = geometry(FULL, (Rule.WINDOW, 6), (Rule.STATE, 0))  # members: 1 full, 2 window, 4 state
ALL = 0b111


@pytest.mark.parametrize(
    ("present", "usable", "why"),
    [
        ([ALL, ALL, ALL], {0, 1, 2, 3}, "everything is there"),
        ([0b011, 0b011, ALL], {0, 3}, "snapshots only at the newest boundary: 3 chunks or nothing"),
        ([0b001, ALL, ALL], {0, 3}, "window of 6 needs 5 tokens back: chunks 1 and 2, not chunk 0"),
        ([0b001, 0b001, ALL], {0}, "a window reaches back into chunk 1, which lacks it"),
        ([0b110, ALL, ALL], {0}, "full attention needs chunk 0"),
        ([ALL, ALL, 0b011], {0, 1, 2}, "no snapshot at 3: fall back to 2 (row A10)"),
        ([ALL, 0, ALL], {0, 1}, "a hole ends full attention"),
        ([], {0}, "nothing asked"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_hybrid_table(present: list[int], usable: set[int], why: str) -> None:
    lengths = Completeness(HYBRID, CHUNK).usable_lengths(present, 0)
    assert {k for k in range(len(present) + 1) if lengths >> k & 1} == usable


@pytest.mark.parametrize(
    ("groups", "present", "usable"),
    [
        ([(Rule.WINDOW, 5)], [0, 0, 1], {0, 3}),  # only windows: old chunks are not needed at all
        ([(Rule.WINDOW, 6)], [0, 0, 1], {0}),  # one token more reaches into chunk 1
        ([(Rule.WINDOW, 1)], [0, 0, 0], {0, 1, 2, 3}),  # sees only itself
        ([(Rule.CHUNKED, 8)], [0, 0, 0, 0], {0, 2, 4}),  # at a multiple of the stretch nothing is needed
        ([(Rule.CHUNKED, 8)], [0, 0, 1, 0], {0, 2, 3, 4}),
        ([(Rule.CHUNKED, 6)], [0, 1, 0], {0, 2, 3}),  # at 8: from 6; at 12: nothing; at 4: chunk 0 is missing
        ([(Rule.STATE, 0)], [0, 1, 0], {0, 2}),
    ],
)
def test_single_rules(groups: list[tuple[Rule, int]], present: list[int], usable: set[int]) -> None:
    lengths = Completeness(geometry(*groups), CHUNK).usable_lengths(present, 0)
    assert {k for k in range(len(present) + 1) if lengths >> k & 1} == usable


def test_never_a_column_wise_and() -> None:
    """Every chunk complete in some group, every group complete somewhere: an AND over columns would say 0 or 3."""
    rule = Completeness(HYBRID, CHUNK)
    assert rule.usable_chunks([0b101, 0b011, 0b111], 0) == 3


def test_the_last_token_rule_cuts() -> None:
    rule = Completeness(geometry(FULL), CHUNK)
    assert rule.usable_chunks([1, 1, 1], 0, prompt_tokens=12) == 2
    assert rule.usable_chunks([1, 1, 1], 0, prompt_tokens=13) == 3
    assert rule.usable_chunks([1, 1, 1], 0, prompt_tokens=1) == 0
    state = Completeness(HYBRID, CHUNK)
    assert state.usable_chunks([0b011, 0b011, ALL], 0, prompt_tokens=12) == 0


def test_chunks_of_different_splits_mix() -> None:
    rule = Completeness(geometry(FULL), CHUNK)
    codes = [Split().code, Split(tp=2).code, Split().code]
    assert rule.usable_chunks([0b1, 0b11, 0b1], codes) == 3
    assert rule.usable_chunks([0b1, 0b01, 0b1], codes) == 1
    assert rule.required(3, codes) == [0b1, 0b11, 0b1]


def test_a_split_this_model_cannot_have_is_a_miss() -> None:
    odd = Geometry.attention(layers=2, kv_heads=5, head_dim=4, dtype="bfloat16")
    rule = Completeness(odd, CHUNK)
    impossible = Split(tp=2).code
    assert rule.usable_chunks([0b11], impossible) == 0
    assert rule.usable_chunks([0b1, 0b11], [0, 1 << 14]) == 1  # no split has that code
    with pytest.raises(UsageError, match="chunk 0 was written by split code 1"):
        rule.required(1, impossible)


def test_one_answer_is_a_length_that_all_share() -> None:
    """The smallest of the best answers would be 3, which the first observer cannot use."""
    first, second = 0b100001, 0b101001  # usable: {0, 5} and {0, 3, 5}
    third = 0b001001  # {0, 3}
    assert family.one_answer([first, second]) == 5
    assert family.one_answer([first, third]) == 0
    assert family.one_answer([second, third]) == 3
    with pytest.raises(UsageError, match="no observers"):
        family.one_answer([])


def test_masks_are_the_members_of_each_group() -> None:
    geom = Geometry([Group(Rule.WINDOW, (0,), PLANES, 6), Group(Rule.FULL, tuple(range(1, 64)), PLANES)], 64)
    full, window = Completeness(geom, CHUNK).group_masks(Split(tp=2, pp=16).code) or (0, 0)
    assert (full.bit_count(), window.bit_count(), full & window) == (32, 2, 0)


def test_bitmaps_and_splits_go_together() -> None:
    with pytest.raises(UsageError, match="3 bitmaps, but 2 splits"):
        Completeness(HYBRID, CHUNK).usable_lengths([1, 1, 1], [0, 0])
