"""Frames of the control protocol: a length, then one msgpack map (PROTOCOL.md, "Frames").

Pure and sans-IO. Owns the framing and the structural limits; what a map means is in `kvd.wire.messages`. Used
by the daemon and by clients, one Decoder a connection, by one thread. Invariants: bytes from a peer raise
ProtocolError and nothing else; a decoder never holds more than one frame beyond what it was fed, and what
msgpack builds from a frame is bounded before msgpack sees it.
"""

from __future__ import annotations

import struct
from typing import Any, Final

import msgpack

from kvd import limits
from kvd.errors import ProtocolError

Message = dict[str, Any]

HEADER_BYTES: Final = 4
DEPTH_MAX: Final = 16
VALUES_MAX: Final = 1 << 20
"""Most values (keys included) in one frame; the daemon takes fewer from its clients (ASK_VALUES_MAX)."""
ASK_VALUES_MAX: Final = 1 << 14

_HEADER: Final = struct.Struct("<I")


def encode(message: Message) -> bytes:
    """One frame. Raises ProtocolError(encode) if the map has no msgpack form or is too large."""
    try:
        body: bytes = msgpack.packb(message, use_bin_type=True)
    except (TypeError, ValueError, OverflowError, UnicodeError) as error:
        raise ProtocolError(
            f"message {message.get('t')!r} cannot be encoded: {error}", code="encode"
        ) from None
    if len(body) > limits.frame_bytes_max:
        raise ProtocolError(
            f"message {message.get('t')!r} is {len(body)} B, a frame holds {limits.frame_bytes_max}; "
            "ask for less",
            code="frame-size", size_bytes=len(body),
        )  # fmt: skip
    return _HEADER.pack(len(body)) + body


class Decoder:
    """Turns received bytes, cut anywhere, into messages. After a ProtocolError it refuses everything."""

    __slots__ = ("_buffer", "_failed", "_values_max")

    def __init__(self, values_max: int = VALUES_MAX) -> None:
        self._buffer = bytearray()
        self._failed = False
        self._values_max = values_max

    @property
    def buffered_bytes(self) -> int:
        """Bytes of a frame that is not complete yet."""
        return len(self._buffer)

    def feed(self, data: bytes | bytearray | memoryview) -> list[Message]:
        """The messages that `data` completes, in order.

        Raises ProtocolError for malformed input, and again for everything fed after it.
        """
        if self._failed:
            raise ProtocolError("the connection is already broken by a malformed frame", code="broken")
        buffer = self._buffer
        buffer += data
        messages: list[Message] = []
        position = 0
        try:
            while len(buffer) - position >= HEADER_BYTES:
                (length,) = _HEADER.unpack_from(buffer, position)
                if not 1 <= length <= limits.frame_bytes_max:
                    raise _malformed(f"length {length} is outside 1 … {limits.frame_bytes_max}")
                end = position + HEADER_BYTES + length
                if end > len(buffer):
                    break
                messages.append(decode_body(bytes(buffer[position + HEADER_BYTES : end]), self._values_max))
                position = end
        except ProtocolError:
            self._failed = True
            self._buffer = bytearray()
            raise
        if position:
            del buffer[:position]
        return messages


def decode_body(body: bytes, values_max: int = VALUES_MAX) -> Message:
    """The map in one frame's body. Raises ProtocolError."""
    _check_structure(body, values_max)
    try:
        message = msgpack.unpackb(body, raw=False, strict_map_key=True, use_list=True)
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        raise _malformed(f"not msgpack: {error}") from None
    if not isinstance(message, dict):
        raise _malformed("not a map")
    return message


def _malformed(why: str) -> ProtocolError:
    return ProtocolError(f"malformed frame: {why}", code="frame")


# For each first byte: how many bytes of a length field follow it, and how many bytes of value then follow.
_FIXED_BYTES: Final = {
    0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8,
    0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8,
}  # fmt: skip
_SIZED: Final = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}  # bin and str
_CONTAINERS: Final = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}  # array and map
_STR_LEADS: Final = frozenset((*range(0xA0, 0xC0), 0xD9, 0xDA, 0xDB))


def _length_at(body: bytes, position: int, width: int) -> int:
    if position + width > len(body):
        raise _malformed("cut short inside a length")
    return int.from_bytes(body[position : position + width], "big")


def _measure(body: bytes, position: int) -> tuple[int, int, bool]:
    """(position behind this value's head and scalar body, values it contains, whether it is a map)."""
    lead = body[position]
    position += 1
    if lead <= 0x7F or lead >= 0xE0:
        return position, 0, False
    if lead <= 0x8F:
        return position, 2 * (lead & 0x0F), True
    if lead <= 0x9F:
        return position, lead & 0x0F, False
    if lead <= 0xBF:
        return position + (lead & 0x1F), 0, False
    if lead in _FIXED_BYTES:
        return position + _FIXED_BYTES[lead], 0, False
    if lead in _SIZED:
        width = _SIZED[lead]
        return position + width + _length_at(body, position, width), 0, False
    if lead in _CONTAINERS:
        width, factor = _CONTAINERS[lead]
        return position + width, factor * _length_at(body, position, width), factor == 2
    raise _malformed("an extension type or a reserved byte")


def _check_structure(body: bytes, values_max: int) -> None:
    """Depth, count, string keys and exact length, before msgpack allocates anything for what is announced.

    msgpack reserves room for the announced count of each open container; without this check a frame of a few
    kilobytes can ask for gigabytes.
    """
    position = 0
    values = 0
    open_counts: list[int] = [1]
    open_maps: list[bool] = [False]
    while open_counts:
        if open_counts[-1] == 0:
            open_counts.pop()
            open_maps.pop()
            continue
        if position >= len(body):
            raise _malformed("cut short")
        if open_maps[-1] and open_counts[-1] % 2 == 0 and body[position] not in _STR_LEADS:
            raise _malformed("a map key that is not a string")
        open_counts[-1] -= 1
        position, contained, is_map = _measure(body, position)
        values += 1
        if position > len(body) or contained > len(body) - position:
            raise _malformed("cut short")
        if values + contained > values_max:
            raise _malformed(f"more than {values_max} values")
        if contained:
            if len(open_counts) > DEPTH_MAX:
                raise _malformed(f"nested deeper than {DEPTH_MAX}")
            open_counts.append(contained)
            open_maps.append(is_map)
    if position != len(body):
        raise _malformed(f"{len(body) - position} bytes behind the map")
