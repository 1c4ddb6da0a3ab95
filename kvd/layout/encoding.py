"""The canonical encoding: one value, one string of bytes, in every process, host, hash seed and release.

Pure. Used for manifests and fingerprints. A value is a tag byte and a body; every length is a u32 in
little-endian:

    n                        None
    x                        FIXED: the field is declared the same for the whole domain
    t | f                    True | False
    i  len  ascii decimal    an integer, no leading zeros, "-" in front of a negative one
    d  8 bytes               a float that is no integer: IEEE 754 binary64, little-endian
    s  len  UTF-8            a string, as given: nothing is normalised
    b  len  bytes
    l  count  values         a list or tuple, in order
    m  count  (s, value)*    a mapping; keys are strings, sorted by their UTF-8 bytes

Two rules keep the numbers of a config file unambiguous. A finite float that is a whole number below 2^53 in
size is written as that integer, because one JSON writer says 10000 where another says 10000.0; -0.0 is 0.
NaN is refused, because it equals nothing, itself included. Strings are not brought into a Unicode normal
form, because its tables change between releases of Python: two spellings are two identities, and the worst
that follows is a miss.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from kvd import limits
from kvd.errors import UsageError

DEPTH_MAX: Final = 16
INTEGER_BITS_MAX: Final = 1024


class Fixed:
    """The one value `FIXED`: "this field is the same for the whole domain", written into the identity."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "FIXED"

    def __reduce__(self) -> str:
        return "FIXED"


FIXED: Final = Fixed()

Value = None | Fixed | bool | int | float | str | bytes | Sequence["Value"] | Mapping[str, "Value"]


def encode(value: object, *, where: str = "value") -> bytes:
    """Canonical bytes of `value`. Raises UsageError(encoding) naming the path inside `where` that has no
    encoding.
    """
    parts: list[bytes] = []
    _encode(value, where, 0, parts)
    encoded = b"".join(parts)
    if len(encoded) > limits.encoded_bytes_max:
        raise _refused(where, f"encodes to {len(encoded)} B, more than {limits.encoded_bytes_max}")
    return encoded


def freeze(value: object) -> object:
    """A deep, read-only copy of an encodable value, so that an identity cannot change later."""
    if isinstance(value, Mapping):
        return MappingProxyType({key: freeze(value[key]) for key in sorted(value)})
    if isinstance(value, list | tuple):
        return tuple(freeze(item) for item in value)
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    return value


def thaw(value: object) -> object:
    """The plain dict, list and scalar form of a frozen value (for JSON and printing)."""
    if isinstance(value, Mapping):
        return {key: thaw(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [thaw(item) for item in value]
    return value


def _refused(where: str, why: str) -> UsageError:
    return UsageError(f"{where} {why}", code="encoding", field=where)


def _sized(tag: bytes, body: bytes) -> bytes:
    return tag + struct.pack("<I", len(body)) + body


def _utf8(text: str, where: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise _refused(where, f"is not valid Unicode: {error.reason}") from None


def _encode(value: object, where: str, depth: int, parts: list[bytes]) -> None:
    if depth > DEPTH_MAX:
        raise _refused(where, f"is nested deeper than {DEPTH_MAX} levels")
    if value is None:
        parts.append(b"n")
    elif isinstance(value, Fixed):
        parts.append(b"x")
    elif isinstance(value, bool):
        parts.append(b"t" if value else b"f")
    elif isinstance(value, int):
        if value.bit_length() > INTEGER_BITS_MAX:
            raise _refused(where, f"is an integer of {value.bit_length()} bits, more than {INTEGER_BITS_MAX}")
        parts.append(_sized(b"i", b"%d" % value))
    elif isinstance(value, float):
        parts.append(_float(value, where))
    elif isinstance(value, str):
        parts.append(_sized(b"s", _utf8(value, where)))
    elif isinstance(value, bytes | bytearray | memoryview):
        parts.append(_sized(b"b", bytes(value)))
    elif isinstance(value, Mapping):
        _mapping(value, where, depth, parts)
    elif isinstance(value, list | tuple):
        parts.append(b"l" + struct.pack("<I", len(value)))
        for position, item in enumerate(value):
            _encode(item, f"{where}[{position}]", depth + 1, parts)
    else:
        raise _refused(
            where,
            f"is a {type(value).__name__}; allowed are None, bool, int, float, str, bytes, list and dict",
        )


def _float(value: float, where: str) -> bytes:
    if math.isnan(value):
        raise _refused(where, "is NaN, which equals nothing, itself included; leave it out")
    if value.is_integer() and abs(value) < 2.0**53:
        return _sized(b"i", b"%d" % int(value))
    return b"d" + struct.pack("<d", value)


def _mapping(value: Mapping[object, object], where: str, depth: int, parts: list[bytes]) -> None:
    keyed: list[tuple[bytes, str]] = []
    for key in value:
        if not isinstance(key, str):
            raise _refused(where, f"has the key {key!r}, which is not a string")
        keyed.append((_utf8(key, where), key))
    parts.append(b"m" + struct.pack("<I", len(keyed)))
    for raw, key in sorted(keyed):
        parts.append(_sized(b"s", raw))
        _encode(value[key], f"{where}.{key}", depth + 1, parts)


def decode(encoded: bytes, *, where: str = "value") -> object:
    """The value `encode` was given (floats that are whole come back as int). Only canonical bytes are
    accepted.

    Raises UsageError(encoding) for anything cut short, left over, out of order or not in the canonical form.
    """
    reader = _Reader(bytes(encoded), where)
    value = reader.value(0)
    if reader.position != len(reader.data):
        raise _refused(where, f"has {len(reader.data) - reader.position} bytes after its end")
    if encode(value, where=where) != reader.data:
        raise _refused(where, "is not in the canonical form")
    return value


class _Reader:
    """Walks one encoded value; every read is bounded by the bytes that are really there."""

    __slots__ = ("data", "position", "where")

    def __init__(self, data: bytes, where: str) -> None:
        self.data = data
        self.position = 0
        self.where = where

    def take(self, size: int) -> bytes:
        end = self.position + size
        if end > len(self.data):
            raise _refused(self.where, f"is cut short at byte {len(self.data)}")
        body = self.data[self.position : end]
        self.position = end
        return body

    def length(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def value(self, depth: int) -> object:
        if depth > DEPTH_MAX:
            raise _refused(self.where, f"is nested deeper than {DEPTH_MAX} levels")
        tag = self.take(1)
        try:
            return self._tagged(tag, depth)
        except (UnicodeDecodeError, ValueError) as error:
            raise _refused(self.where, f"holds a malformed {tag!r} value: {error}") from None

    def _tagged(self, tag: bytes, depth: int) -> object:
        match tag:
            case b"n":
                return None
            case b"x":
                return FIXED
            case b"t" | b"f":
                return tag == b"t"
            case b"i":
                return int(self.take(self.length()).decode("ascii"))
            case b"d":
                return float(struct.unpack("<d", self.take(8))[0])
            case b"s":
                return self.take(self.length()).decode("utf-8")
            case b"b":
                return self.take(self.length())
            case b"l":
                return [self.value(depth + 1) for _ in range(self.length())]
            case b"m":
                return dict(self._pair(depth) for _ in range(self.length()))
        raise _refused(self.where, f"has the unknown tag {tag!r} at byte {self.position - 1}")

    def _pair(self, depth: int) -> tuple[str, object]:
        key = self.value(depth + 1)
        if not isinstance(key, str):
            raise _refused(self.where, f"has the key {key!r}, which is not a string")
        return key, self.value(depth + 1)
