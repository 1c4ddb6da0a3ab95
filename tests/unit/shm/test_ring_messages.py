"""Ring messages: what one end packs the other parses, and no bytes make a parser do anything but refuse."""

from __future__ import annotations

from array import array
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd import limits
from kvd.errors import CapacityError, ProtocolError, Retry, UsageError
from kvd.shm import messages
from kvd.shm.messages import Reserve
from kvd.types import Member

u16 = st.integers(0, 0xFFFF)
u32 = st.integers(0, 0xFFFFFFFF)
u64 = st.integers(0, 0xFFFFFFFFFFFFFFFF)


@st.composite
def members(draw: st.DrawFn) -> tuple[Member, ...]:
    indexes = draw(st.lists(st.integers(0, 127), min_size=1, max_size=6, unique=True))
    ranges = st.tuples(u16, u16).map(lambda pair: (min(pair), max(pair)))
    return tuple(
        Member(i, draw(st.integers(1, limits.object_bytes_max)), draw(ranges), draw(ranges)) for i in indexes
    )


@st.composite
def reserves(draw: st.DrawFn) -> Reserve:
    parts = draw(members())
    families = draw(st.integers(1, 8))
    complete = draw(st.integers(max(m.index for m in parts) + 1, limits.members_per_family_max))
    return Reserve(
        draw(u64), draw(u32), draw(u16), complete, draw(st.booleans()), draw(st.binary(min_size=32, max_size=32)),
        parts, draw(st.binary(min_size=32 * families, max_size=32 * families)),
    )  # fmt: skip


@given(reserves())
def test_reserve_survives_the_ring(message: Reserve) -> None:
    assert messages.parse_reserve(messages.pack_reserve(message)) == message


@given(reserves(), st.data())
def test_a_cut_or_longer_reserve_is_refused(message: Reserve, data: st.DataObject) -> None:
    payload = messages.pack_reserve(message)
    cut = data.draw(st.integers(0, len(payload) - 1))
    for bad in (payload[:cut], payload + b"\0"):
        with pytest.raises(ProtocolError):
            messages.parse_reserve(bad)


@given(st.binary(max_size=400))
@pytest.mark.parametrize("parse", [messages.parse_reserve, messages.parse_publish, messages.parse_abort])
def test_arbitrary_bytes_are_parsed_or_refused(parse: object, payload: bytes) -> None:
    with suppress(ProtocolError):
        parse(payload)  # type: ignore[operator]


def test_a_reserve_with_a_member_no_family_can_have_is_refused_and_an_optional_one_is_not() -> None:
    good = Reserve(0, 0, 0, 1, False, bytes(32), (Member(0, 64), Member(127, 64)), bytes(32))
    payload = bytearray(messages.pack_reserve(good))
    assert messages.parse_reserve(bytes(payload)) == good  # 127 is beyond what makes it complete: optional
    payload[56 + 24 + 8] = 128
    with pytest.raises(ProtocolError, match="member index 128"):
        messages.parse_reserve(bytes(payload))
    payload[56 + 24 + 8] = 0
    with pytest.raises(ProtocolError, match="members repeat"):
        messages.parse_reserve(bytes(payload))


def test_a_reserve_of_more_items_than_a_batch_holds_is_refused() -> None:
    families = limits.batch_items_max // 2 + 1
    big = Reserve(0, 0, 0, 2, False, bytes(32), (Member(0, 64), Member(1, 64)), bytes(32 * families))
    with pytest.raises(ProtocolError, match="members"):
        messages.parse_reserve(messages.pack_reserve(big))


@given(u64, u32, st.lists(st.tuples(u64, st.booleans()), min_size=1, max_size=50))
def test_publish_survives_the_ring(reservation: int, first: int, items: list[tuple[int, bool]]) -> None:
    checksums = array("Q", [c for c, _ in items])
    include = bytes(i for _, i in items)
    parsed = messages.parse_publish(messages.pack_publish(reservation, first, checksums, include))
    assert (parsed.reservation, parsed.first, parsed.checksums, parsed.include) == (
        reservation, first, checksums, include,
    )  # fmt: skip


def test_publish_flags_other_than_0_and_1_are_refused() -> None:
    payload = messages.pack_publish(1, 0, array("Q", [5]), b"\2")
    with pytest.raises(ProtocolError, match="include"):
        messages.parse_publish(payload)


@given(u64, st.lists(st.tuples(u64, st.integers(0, 2)), max_size=40))
def test_answers_survive_the_ring(reservation: int, items: list[tuple[int, int]]) -> None:
    places = array("Q", [p for p, _ in items])
    statuses = bytes(s for _, s in items)
    packed = messages.pack_reserved(reservation, places, statuses)
    assert messages.parse_reserved(packed) == (reservation, places, statuses)
    assert messages.parse_published(messages.pack_published(statuses)) == statuses
    assert messages.parse_abort(messages.pack_abort(reservation, 1, 2)) == messages.Abort(reservation, 1, 2)


def test_errors_keep_their_type_code_advice_and_fields() -> None:
    error = CapacityError("full", code="leased", leased_bytes=7)
    back = messages.parse_error(messages.pack_error(error))
    assert type(back) is CapacityError
    assert (back.code, back.retry, back.fields) == ("KVD-CAPACITY-LEASED", Retry.AFTER, {"leased_bytes": 7})


@pytest.mark.parametrize(("index", "size"), [(-1, 1), (128, 1), (0, 0), (0, limits.object_bytes_max + 1)])
def test_members_are_checked_by_name(index: int, size: int) -> None:
    with pytest.raises(UsageError, match=r"member index|object size"):
        Member(index, size)
