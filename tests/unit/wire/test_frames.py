"""Frames: round trip, any cut, hostile bytes, bounded memory."""

import contextlib
import tracemalloc

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd import limits
from kvd.errors import ProtocolError
from kvd.wire import frames

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(allow_nan=False),
    st.text(max_size=40),
    st.binary(max_size=40),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=5), st.dictionaries(st.text(max_size=8), inner, max_size=5)
    ),
    max_leaves=20,
)
messages = st.dictionaries(st.text(max_size=8), values, max_size=6)


@pytest.mark.slow
@given(st.lists(messages, max_size=5), st.data())
def test_round_trip_whatever_the_cuts(sent, data):
    stream = b"".join(frames.encode(message) for message in sent)
    decoder = frames.Decoder()
    received = []
    while stream:
        cut = data.draw(st.integers(1, len(stream)))
        received += decoder.feed(stream[:cut])
        stream = stream[cut:]
    assert received == sent
    assert decoder.buffered_bytes == 0


@pytest.mark.slow
@given(st.binary(max_size=300))
@settings(max_examples=400)
def test_arbitrary_bytes_raise_nothing_but_protocol_errors(data):
    try:
        for message in frames.Decoder().feed(data):
            assert isinstance(message, dict)
    except ProtocolError:
        pass


@pytest.mark.slow
@given(st.binary(max_size=200))
@settings(max_examples=400)
def test_arbitrary_bodies_agree_with_msgpack(body):
    """What the structure check lets through is exactly what msgpack itself reads as a plain map."""
    try:
        decoded = frames.decode_body(body)
    except ProtocolError:
        return
    assert decoded == msgpack.unpackb(body, raw=False)


@pytest.mark.slow
@given(messages, st.data())
def test_a_flipped_byte_is_contained(message, data):
    stream = bytearray(frames.encode(message))
    at = data.draw(st.integers(0, len(stream) - 1))
    stream[at] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(ProtocolError):
        frames.Decoder().feed(bytes(stream))


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "little") + body


def nested(depth: int) -> bytes:
    return b"\x81\xa1a" * depth + b"\x80"


@pytest.mark.parametrize(
    ("stream", "why"),
    [
        (b"\0\0\0\0", "length 0"),
        ((limits.frame_bytes_max + 1).to_bytes(4, "little"), "length 4194305"),
        (framed(b"\x93\1\2\3"), "not a map"),
        (framed(b"\x81\1\2"), "key that is not a string"),
        (framed(b"\x81\xc4\1a\2"), "key that is not a string"),
        (framed(b"\x80\x80"), "1 bytes behind"),
        (framed(b"\x81\xa1a"), "cut short"),
        (framed(b"\x81\xa1a\xdd\xff\xff\xff\xff"), "cut short"),
        (framed(b"\x81\xa1a\xd4\x01\x00"), "extension"),
        (framed(msgpack.packb({"a": msgpack.Timestamp(1)})), "extension"),
        (framed(b"\x81\xa1a\xc1"), "reserved"),
        (framed(b"\x81\xa2\xff\xff\x01"), "not msgpack"),
        (framed(nested(17)), "deeper"),
    ],
)
def test_malformed_frames_are_refused_by_name(stream, why):
    decoder = frames.Decoder()
    with pytest.raises(ProtocolError, match=why):
        decoder.feed(stream)
    with pytest.raises(ProtocolError, match="already broken"):
        decoder.feed(frames.encode({}))


def test_sixteen_levels_pass():
    assert frames.Decoder().feed(framed(nested(16)))


def test_announced_sizes_allocate_nothing():
    """Without the structure check msgpack reserves 8 bytes for each announced element of each open array."""
    body = b"\x81\xa1a" + b"\xdd\x00\x10\x00\x00" * 12 + bytes(1 << 20)
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            frames.Decoder(values_max=1 << 14).feed(framed(body))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 6 * (1 << 20)


def test_too_many_values_are_refused():
    body = msgpack.packb({"a": [0] * 100})
    assert frames.decode_body(body, values_max=103)
    with pytest.raises(ProtocolError, match="more than 102 values"):
        frames.decode_body(body, values_max=102)


def test_a_dribbled_frame_is_bounded_by_its_announced_length():
    decoder = frames.Decoder()
    decoder.feed((1000).to_bytes(4, "little"))
    for _ in range(999):
        assert decoder.feed(b"\x80") == []
        assert decoder.buffered_bytes <= 1004
    with pytest.raises(ProtocolError):
        decoder.feed(b"\x80")


def test_encode_refuses_what_has_no_form():
    with pytest.raises(ProtocolError, match="cannot be encoded"):
        frames.encode({"t": "x", "value": object()})
    with pytest.raises(ProtocolError, match="cannot be encoded"):
        frames.encode({"t": "x", "value": 1 << 70})
    with pytest.raises(ProtocolError, match="a frame holds"):
        frames.encode({"t": "x", "value": bytes(limits.frame_bytes_max)})
