"""The books of a core as bytes, and back: what a trace begins with, and what two cores are compared by.

Pure; used by `kvd.core.trace` in the thread of the core, between two operations. The graph of objects is written as it
is: shared objects once, columns as their bytes, so that whoever reads it back has the same books down to the order of
every list. Only the classes of `CLASSES` are written or made; a snapshot from a file makes nothing else.

Invariant: `pack(unpack(pack(books))) == pack(books)`.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import fields
from enum import Enum, IntEnum
from typing import Any, Final

import msgpack

from kvd.core.books import Books, ClientBook, CoreConfig
from kvd.core.columns import Numbers
from kvd.core.events import PinKind, Reason, Touch
from kvd.core.forest import Forest
from kvd.core.frames import Frames
from kvd.core.journal import Ghosts, Journal, RequestRecord
from kvd.core.orphans import Orphans
from kvd.core.pins import Pins
from kvd.core.policy import Lru, Slru, Value
from kvd.core.reservations import Pending, Reservation, Reservations, Shape, Shapes
from kvd.core.slots import SizeClass, Slab, Slots
from kvd.errors import InvariantError, ProtocolError
from kvd.types import Member

CLASSES: Final[dict[str, type]] = {
    one.__name__: one
    for one in (
        Books, ClientBook, CoreConfig, Forest, Frames, Ghosts, Journal, Lru, Member, Numbers, Orphans, Pending, PinKind,
        Pins, Reason, RequestRecord, Reservation, Reservations, Shape, Shapes, SizeClass, Slab, Slots, Slru, Touch,
        Value,
    )
}  # fmt: skip
PASSING: Final = frozenset({"effects"})  # of the step that is going on
_PLAIN: Final = frozenset({type(None), bool, float, str, bytes})
_DAMAGED: Final = (KeyError, IndexError, TypeError, ValueError, AttributeError)


def pack(books: Books) -> bytes:
    """The books as bytes. InvariantError: they hold an object of a class that is not known here."""
    packed: bytes = msgpack.packb(_Writer().put(books), use_bin_type=True)
    return packed


def unpack(packed: bytes) -> Books:
    """Books from bytes. ProtocolError: these are not the books of a core of this release."""
    try:
        raw = msgpack.unpackb(packed, raw=False, use_list=True, strict_map_key=False)
        books = _Reader().get(raw)
    except _DAMAGED as error:
        raise ProtocolError(
            f"the state in this trace cannot be read: {type(error).__name__}: {error}", code="trace"
        ) from None
    if not isinstance(books, Books):
        raise ProtocolError("the state in this trace is not that of a core", code="trace")
    return books


def digest(packed: bytes) -> str:
    """16 hex digits that two states share only if they are the same."""
    return hashlib.blake2b(packed, digest_size=8).hexdigest()


def _attributes(one: object) -> Iterator[tuple[str, Any]]:
    """Names and values, slots first; what is not set is left out."""
    for base in type(one).__mro__:
        for name in getattr(base, "__slots__", ()):
            if hasattr(one, name):
                yield name, getattr(one, name)
    yield from getattr(one, "__dict__", {}).items()


class _Writer:
    """Numbers every object that can be shared in the order in which it is met."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}

    def put(self, one: Any) -> Any:
        kind = type(one)
        if kind in _PLAIN:
            return one
        if kind is int:
            return one if -(1 << 63) <= one < 1 << 64 else ["i", hex(one)]
        if kind is tuple:
            return ["t", *map(self.put, one)]
        if isinstance(one, IntEnum):
            return int(one)
        if isinstance(one, Enum):
            return ["e", self._name(one), one.value]
        if isinstance(one, tuple):
            return ["n", self._name(one), *map(self.put, one)]
        known = self._numbers.get(id(one))
        if known is not None:
            return ["r", known]
        self._numbers[id(one)] = len(self._numbers)
        if kind is array:
            return ["a", one.typecode, one.tobytes()]
        if kind is bytearray:
            return ["b", bytes(one)]
        if kind is list:
            return ["l", *map(self.put, one)]
        if kind is dict or kind is OrderedDict:
            flat = [self.put(part) for item in one.items() for part in item]
            return ["d" if kind is dict else "o", *flat]
        if getattr(kind, "__dataclass_params__", None) is not None and kind.__dataclass_params__.frozen:
            return ["v", self._name(one), *(self.put(getattr(one, field.name)) for field in fields(one))]
        return self._object(one)

    def _object(self, one: object) -> list[Any]:
        out = ["x", self._name(one)]
        for name, value in _attributes(one):
            out += (name, self.put([] if name in PASSING else value))
        return out

    @staticmethod
    def _name(one: object) -> str:
        name = type(one).__name__
        if CLASSES.get(name) is not type(one):
            raise InvariantError(f"a core holds a {name}, which no trace knows", code="trace", kind=name)
        return name


class _Reader:
    """The reverse. Whatever is not as `_Writer` writes it raises one of `_DAMAGED`."""

    def __init__(self) -> None:
        self._made: list[Any] = []
        self._shared: dict[str, Callable[[int, list[Any]], Any]] = {
            "a": self._array, "b": self._bytes, "l": self._list, "d": self._dict, "o": self._dict, "v": self._value,
            "x": self._object,
        }  # fmt: skip

    def get(self, raw: Any) -> Any:
        if type(raw) is not list:
            return raw
        tag = raw[0]
        if tag == "t":
            return tuple([self.get(part) for part in raw[1:]])
        if tag == "i":
            return int(raw[1], 16)
        if tag == "e":
            return CLASSES[raw[1]](raw[2])
        if tag == "n":
            return CLASSES[raw[1]](*[self.get(part) for part in raw[2:]])
        if tag == "r":
            return self._made[raw[1]]
        self._made.append(None)
        return self._shared[tag](len(self._made) - 1, raw)

    def _array(self, number: int, raw: list[Any]) -> Any:
        column: array[int] = array(raw[1])
        column.frombytes(raw[2])
        self._made[number] = column
        return column

    def _bytes(self, number: int, raw: list[Any]) -> Any:
        self._made[number] = made = bytearray(raw[1])
        return made

    def _list(self, number: int, raw: list[Any]) -> Any:
        made: list[Any] = []
        self._made[number] = made
        made.extend(self.get(part) for part in raw[1:])
        return made

    def _dict(self, number: int, raw: list[Any]) -> Any:
        self._made[number] = made = {} if raw[0] == "d" else OrderedDict()
        for at in range(1, len(raw), 2):
            key = self.get(raw[at])
            made[key] = self.get(raw[at + 1])
        return made

    def _value(self, number: int, raw: list[Any]) -> Any:
        self._made[number] = made = CLASSES[raw[1]](*[self.get(part) for part in raw[2:]])
        return made

    def _object(self, number: int, raw: list[Any]) -> Any:
        kind: Any = CLASSES[raw[1]]
        self._made[number] = made = kind.__new__(kind)
        for at in range(2, len(raw), 2):
            object.__setattr__(made, raw[at], self.get(raw[at + 1]))
        return made
