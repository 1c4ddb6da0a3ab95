"""The messages of the control protocol as typed values (PROTOCOL.md, "Handshake" and "Messages").

Pure. One frozen class a message, `to_map` to send it and `parse` to check one that came: missing or mistyped
keys raise ProtocolError(message) naming the message and the key, unknown keys are ignored, an unknown type
raises ProtocolError(type). Used by the daemon and by clients; asks and answers have tables of their own, so
that neither side takes the other's messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, Final, Self

from kvd import limits
from kvd.errors import CompatibilityError, KvdError, ProtocolError, from_dict, to_dict
from kvd.wire.frames import Message

PROTOCOL_MIN: Final = 1
PROTOCOL_MAX: Final = 1
LAYOUT_VERSION: Final = 1
CLIENT_NAME_CHARS_MAX: Final = 64
U32_MAX: Final = 0xFFFFFFFF
U64_MAX: Final = 0xFFFFFFFFFFFFFFFF

ROLES: Final = ("engine", "admin")
ACCESSES: Final = ("read", "write")


def _bad(message: str, key: str, value: object, allowed: str) -> ProtocolError:
    shown = repr(value) if len(repr(value)) <= 80 else repr(value)[:77] + "..."
    return ProtocolError(
        f"message {message!r}: key {key!r} is {shown}, allowed is {allowed}",
        code="message",
        message_type=message,
        key=key,
    )


_ABSENT: Final = object()


def _text(kind: str, key: str, value: object, chars_max: int = 4096) -> str:
    if not isinstance(value, str) or len(value) > chars_max:
        raise _bad(kind, key, _shown(value), f"a string of at most {chars_max} characters")
    return value


def _number(kind: str, key: str, value: object, maximum: int = U32_MAX) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= maximum:
        raise _bad(kind, key, _shown(value), f"an integer 0 … {maximum}")
    return value


def _shown(value: object) -> object:
    return "missing" if value is _ABSENT else value


def _mapping(kind: str, key: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _bad(kind, key, _shown(value), "a map")
    return value


def _flag(kind: str, key: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _bad(kind, key, _shown(value), "true or false")
    return value


def _octets(kind: str, key: str, value: object, bytes_min: int, bytes_max: int) -> bytes:
    if not isinstance(value, bytes) or not bytes_min <= len(value) <= bytes_max:
        raise _bad(kind, key, _shown(value), f"{bytes_min} … {bytes_max} bytes")
    return value


def _choice(kind: str, key: str, value: object, allowed: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in allowed:
        raise _bad(kind, key, _shown(value), " or ".join(allowed))
    return value


def printable(text: str) -> str:
    """`text` with what could confuse a terminal or a log replaced."""
    return "".join(char if char.isprintable() else "?" for char in text)


@dataclass(frozen=True, slots=True)
class Body:
    """A message without its id. Subclasses say their type, and check their keys in `parse`."""

    type: ClassVar[str] = ""

    def to_map(self, id: int) -> Message:
        """The map that is sent as a frame."""
        message: Message = {"t": self.type, "id": id}
        for item in fields(self):
            message[item.name] = getattr(self, item.name)
        return message

    @classmethod
    def parse(cls, message: Mapping[str, Any]) -> Self:
        """Check `message`, whose type is this one. Raises ProtocolError(message)."""
        values = {}
        for item in fields(cls):
            value = message.get(item.name, _ABSENT)
            if value is _ABSENT and item.default is not MISSING:
                value = item.default
            values[item.name] = cls._checked(item.name, value)
        return cls(**values)

    @classmethod
    def _checked(cls, key: str, value: object) -> object:
        raise _bad(cls.type, key, value, "no such key")


@dataclass(frozen=True, slots=True)
class Hello(Body):
    """First frame of a connection: versions, name and role of the peer."""

    type: ClassVar[str] = "hello"
    protocol: tuple[int, int]
    version: str
    layout: int
    client: str
    role: str = "engine"

    @classmethod
    def _checked(cls, key: str, value: object) -> object:
        match key:
            case "protocol":
                if not isinstance(value, list | tuple) or len(value) != 2:
                    raise _bad(cls.type, key, _shown(value), "[lowest, highest]")
                low, high = (_number(cls.type, key, item) for item in value)
                if low > high:
                    raise _bad(cls.type, key, value, "[lowest, highest]")
                return (low, high)
            case "layout":
                return _number(cls.type, key, value)
            case "role":
                return _choice(cls.type, key, value, ROLES)
            case "client":
                return printable(_text(cls.type, key, value, CLIENT_NAME_CHARS_MAX))
        return printable(_text(cls.type, key, value, 64))


@dataclass(frozen=True, slots=True)
class Welcome(Body):
    """The daemon's answer to `hello`."""

    type: ClassVar[str] = "welcome"
    protocol: int
    version: str
    layout: int
    epoch: bytes  # 8 bytes, big endian
    pid: int

    @classmethod
    def _checked(cls, key: str, value: object) -> object:
        match key:
            case "version":
                return _text(cls.type, key, value, 64)
            case "epoch":
                return _octets(cls.type, key, value, 8, 8)
        return _number(cls.type, key, value)


@dataclass(frozen=True, slots=True)
class Attach(Body):
    """Ask for the memory of a domain."""

    type: ClassVar[str] = "attach"
    domain: str = "default"
    access: str = "write"

    @classmethod
    def _checked(cls, key: str, value: object) -> object:
        if key == "access":
            return _choice(cls.type, key, value, ACCESSES)
        return printable(_text(cls.type, key, value, 64))


@dataclass(frozen=True, slots=True)
class Attached(Body):
    """META, CLIENT, the wake socket and the first segments come along as descriptors."""

    type: ClassVar[str] = "attached"
    slot: int
    domain: str
    segments: list[int]  # sizes in bytes, of all segments
    fds: int  # descriptors in this message
    more: bool  # `segments` messages follow

    @classmethod
    def _checked(cls, key: str, value: object) -> object:
        match key:
            case "segments":
                if not isinstance(value, list) or not 1 <= len(value) <= limits.segments_max:
                    raise _bad(cls.type, key, _shown(value), f"1 … {limits.segments_max} sizes")
                return [_number(cls.type, key, item, limits.segment_bytes_max) for item in value]
            case "domain":
                return _text(cls.type, key, value, 64)
            case "more":
                return _flag(cls.type, key, value)
        return _number(cls.type, key, value)


@dataclass(frozen=True, slots=True)
class Segments(Body):
    """Further segment descriptors of the same attach."""

    type: ClassVar[str] = "segments"
    fds: int
    more: bool

    @classmethod
    def _checked(cls, key: str, value: object) -> object:
        return _flag(cls.type, key, value) if key == "more" else _number(cls.type, key, value)


@dataclass(frozen=True, slots=True)
class Detach(Body):
    """Leave in order. With leases or reservations still held the client counts until its process ends.

    `gives_back`: nobody of this client writes into what it reserved, or ever will; what is granted is given back.
    """

    type: ClassVar[str] = "detach"
    gives_back: bool = False

    @classmethod
    def _checked(cls, key: str, value: object) -> object:
        return _flag(cls.type, key, value)


@dataclass(frozen=True, slots=True)
class Detached(Body):
    """What the client still holds: leases, and items that it reserved and neither published nor gave back."""

    type: ClassVar[str] = "detached"
    leases: int
    items: int

    @classmethod
    def _checked(cls, key: str, value: object) -> object:
        return _number(cls.type, key, value)


@dataclass(frozen=True, slots=True)
class Left(Body):
    """This process holds nothing any more of what it had at an earlier daemon."""

    type: ClassVar[str] = "left"
    epoch: bytes  # of that daemon, 8 bytes, big endian
    slot: int  # its slot there

    @classmethod
    def _checked(cls, key: str, value: object) -> object:
        if key == "epoch":
            return _octets(cls.type, key, value, 8, 8)
        return _number(cls.type, key, value)


@dataclass(frozen=True, slots=True)
class Noted(Body):
    """Answer to `left`: whether the daemon was waiting for it."""

    type: ClassVar[str] = "noted"
    waited: bool

    @classmethod
    def _checked(cls, key: str, value: object) -> object:
        return _flag(cls.type, key, value)


@dataclass(frozen=True, slots=True)
class Namespace(Body):
    """Register a manifest (canonical encoding) and learn its number."""

    type: ClassVar[str] = "namespace"
    manifest: bytes
    label: str = ""

    @classmethod
    def _checked(cls, key: str, value: object) -> object:
        if key == "manifest":
            return _octets(cls.type, key, value, 1, limits.manifest_bytes_max + 16)
        return printable(_text(cls.type, key, value, 128))


@dataclass(frozen=True, slots=True)
class Namespaced(Body):
    """The number that RESERVE carries."""

    type: ClassVar[str] = "namespaced"
    number: int

    @classmethod
    def _checked(cls, key: str, value: object) -> object:
        return _number(cls.type, key, value)


@dataclass(frozen=True, slots=True)
class Call(Body):
    """An administrative method."""

    type: ClassVar[str] = "call"
    method: str
    params: dict[str, Any]

    @classmethod
    def _checked(cls, key: str, value: object) -> object:
        if key == "method":
            return printable(_text(cls.type, key, value, 64))
        return _mapping(cls.type, key, value)


@dataclass(frozen=True, slots=True)
class Result(Body):
    """What a `call` answers."""

    type: ClassVar[str] = "result"
    result: Any

    @classmethod
    def _checked(cls, key: str, value: object) -> object:
        if value is _ABSENT:
            raise _bad(cls.type, key, "missing", "any value")
        return value


@dataclass(frozen=True, slots=True)
class Error(Body):
    """Any ask may be answered with this; id 0 ends the connection."""

    type: ClassVar[str] = "error"
    error: dict[str, Any]

    @classmethod
    def of(cls, error: KvdError) -> Error:
        """The message that carries `error`."""
        return cls(to_dict(error))

    def exception(self) -> KvdError:
        """The error as the asker raises it."""
        try:
            return from_dict(self.error)
        except (ValueError, TypeError) as error:
            return ProtocolError(f"the daemon sent an error that cannot be read: {error}", code="message")

    @classmethod
    def _checked(cls, key: str, value: object) -> object:
        return _mapping(cls.type, key, value)


Ask = Hello | Attach | Detach | Left | Namespace | Call
Answer = Welcome | Attached | Segments | Detached | Noted | Namespaced | Result | Error

_ASKS: Final[dict[str, type[Ask]]] = {cls.type: cls for cls in (Hello, Attach, Detach, Left, Namespace, Call)}
_ANSWERS: Final[dict[str, type[Answer]]] = {
    cls.type: cls for cls in (Welcome, Attached, Segments, Detached, Noted, Namespaced, Result, Error)
}


def id_of(message: Mapping[str, Any]) -> int:
    """The id of any message. Raises ProtocolError(message)."""
    return _number(str(message.get("t"))[:64], "id", message.get("id", _ABSENT))


def _parse(message: Mapping[str, Any], table: Mapping[str, type[Any]], who: str) -> Any:
    kind = message.get("t")
    cls = table.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise ProtocolError(
            f"{who} does not know messages of type {str(kind)[:64]!r}; known are {', '.join(sorted(table))}",
            code="type", message_type=str(kind)[:64],
        )  # fmt: skip
    return cls.parse(message)


def parse_ask(message: Mapping[str, Any]) -> tuple[int, Ask]:
    """(id, ask) of a message the daemon received. Raises ProtocolError(type | message)."""
    return id_of(message), _parse(message, _ASKS, "the daemon")


def parse_answer(message: Mapping[str, Any]) -> tuple[int, Answer]:
    """(id, answer) of a message a client received. Raises ProtocolError(type | message)."""
    return id_of(message), _parse(message, _ANSWERS, "the client")


def agree(hello: Hello, version: str) -> int:
    """The protocol version to speak with a peer. Raises CompatibilityError naming both sides."""
    low, high = hello.protocol
    client = f"the client (kvd {hello.version})"
    daemon = f"the daemon (kvd {version})"
    if low > PROTOCOL_MAX or high < PROTOCOL_MIN:
        raise CompatibilityError(
            f"{client} speaks control protocol {low} … {high}, {daemon} {PROTOCOL_MIN} … {PROTOCOL_MAX}; "
            "upgrade the older of the two",
            code="protocol",
            client_version=hello.version,
            client_protocol=f"{low}-{high}",
            daemon_version=version,
            daemon_protocol=f"{PROTOCOL_MIN}-{PROTOCOL_MAX}",
        )
    if hello.role == "engine" and hello.layout != LAYOUT_VERSION:
        raise CompatibilityError(
            f"{client} maps shared memory of layout {hello.layout}, {daemon} lays out {LAYOUT_VERSION}; "
            "install the same release on both sides",
            code="layout",
            client_version=hello.version,
            client_layout=hello.layout,
            daemon_version=version,
            daemon_layout=LAYOUT_VERSION,
        )
    return min(high, PROTOCOL_MAX)
