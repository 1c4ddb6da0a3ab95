"""Traces: the events of a core, written down, and replayed to the same state.

Pure: makes and takes bytes; who keeps them where is the server's and kvctl's business. A trace is a stream of msgpack
values (docs/operations.md, "Recording and replaying the core's events"):

    {"kvd-trace": 1, "kvd": version, "domain": name, "started_ns": …}
    ["state", snapshot (`kvd.core.snapshot`), its digest]
    ["event", number, now_ns, name, fields, CRC-32 of the effects, None: the core raised]       one a step, from 1 on
    ["check", number, digest of statistics and counters]                                      now and then
    ["end", number, digest of the books ("" if there is none), why it ended]

Keys and requests are hashes: no prompt is in a trace, nor any payload. `TracedCore` records; it shares all of
its state with the core it stands in for and may be swapped with it between any two steps. `Replay` takes the values
back, steps a core of its own and stops at the first difference.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, Final

import msgpack

from kvd.core import events as ev
from kvd.core import snapshot
from kvd.core.core import Core
from kvd.errors import (
    CapacityError,
    CompatibilityError,
    InvariantError,
    KvdError,
    ProtocolError,
    Retry,
    UnavailableError,
)
from kvd.types import Member
from kvd.version import VERSION

FORMAT: Final = 1
CHECK_EVENTS: Final = 1024
EVENTS: Final[dict[str, type]] = {
    one.__name__: one
    for one in (
        ev.SegmentReady, ev.ClientAttached, ev.ClientGone, ev.Reserve, ev.Publish, ev.Abort, ev.Published, ev.Evicted,
        ev.Touched, ev.Pin, ev.Unpin, ev.Clear, ev.Withdraw, ev.Again, ev.Tick, ev.Restore,
    )
}  # fmt: skip
Sink = Callable[[bytes], bool]


def _fields_of(kind: type) -> tuple[str, ...]:
    if is_dataclass(kind):
        return tuple(field.name for field in fields(kind))
    return tuple(kind._fields)  # type: ignore[attr-defined]


_FIELDS: Final = {kind: _fields_of(kind) for kind in EVENTS.values()}


def _plain(one: Any) -> Any:
    """A value of an event or effect as msgpack has it."""
    if isinstance(one, int | str | bytes | float | None):
        return one if type(one) in (int, str, bytes, float, bool, type(None)) else one.value  # type: ignore[union-attr]
    if isinstance(one, array):
        return one.tobytes()
    if isinstance(one, memoryview | bytearray):
        return bytes(one)
    if isinstance(one, dict):
        return {str(key): _plain(value) for key, value in one.items()}
    if isinstance(one, list | tuple):
        return [_plain(part) for part in one]
    if isinstance(one, Member):
        return [one.index, one.size_bytes, list(one.heads), list(one.layers)]
    if isinstance(one, KvdError):
        return [one.code, one.message]
    return [type(one).__name__, *(_plain(getattr(one, field.name)) for field in fields(one))]


def _pack(value: Any) -> bytes:
    packed: bytes = msgpack.packb(value, use_bin_type=True)
    return packed


def effects_crc(effects: list[ev.Effect]) -> int:
    """CRC-32 over everything that these effects say."""
    return zlib.crc32(_pack([[type(one).__name__, _plain(one)] for one in effects]))


def statistics_digest(core: Core) -> str:
    """A digest of what the core says about itself, cheap enough for now and then."""
    return snapshot.digest(_pack([_plain(core.statistics()), _plain(core.counters)]))


def encode_event(event: ev.Event) -> list[Any]:
    """Name and fields."""
    kind = type(event)
    return [kind.__name__, [_plain(getattr(event, name)) for name in _FIELDS[kind]]]


def decode_event(name: str, values: list[Any]) -> ev.Event:
    """The event again. ProtocolError: there is none of this name with these fields."""
    try:
        kind = EVENTS[name]
        given = dict(zip(_FIELDS[kind], values, strict=True))
        if kind is ev.Reserve:
            given["members"] = tuple(
                Member(i, size, tuple(h), tuple(la)) for i, size, h, la in given["members"]
            )
        elif kind is ev.Touched:
            given["touches"] = [ev.Touch(*row) for row in given["touches"]]
        elif kind is ev.Pin:
            given["kind"] = ev.PinKind(given["kind"])
        elif kind is ev.Restore:
            given["shapes"] = [tuple(row) for row in given["shapes"]]
            given["slabs"] = [tuple(row) for row in given["slabs"]]
        event: ev.Event = kind(**given)
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(
            f"an event {name!r} of this trace cannot be read: {error}", code="trace"
        ) from None
    return event


class TracedCore(Core):
    """Stands in for a core and writes down each of its steps. Same thread, same state, same answers."""

    def __init__(self, core: Core, sink: Sink, domain: str, now_ns: int, begin: Sink | None = None) -> None:
        """The first two values go to `begin` (default: the sink), all others to `sink`; one that returns False wants no
        more of them. Raises UnavailableError(busy) while an operation is in the middle of its way.
        """
        if core._waiting is not None or core._later:
            raise UnavailableError(
                "a clear, or the end of a large client, is going on, and a trace cannot begin in the middle of it;"
                " try again",
                code="busy", retry=Retry.AFTER,
            )  # fmt: skip
        self.__dict__ = core.__dict__
        self._recorder = _Recorder(sink)
        begin = begin or sink
        packed = snapshot.pack(self._books)
        state = _pack(["state", packed, snapshot.digest(packed)])
        header = {"kvd-trace": FORMAT, "kvd": VERSION, "domain": domain, "started_ns": now_ns}
        if not (begin(_pack(header)) and begin(state)):
            raise CapacityError(
                f"the state at the start takes {len(state)} B, more than the limit of the trace: raise it",
                code="trace", state_bytes=len(state),
            )  # fmt: skip

    def step(self, now_ns: int, event: ev.Event) -> list[ev.Effect]:
        """As `Core.step`, and on record, even if it raises."""
        recorder = self._recorder
        encoded = encode_event(event)
        try:
            effects = super().step(now_ns, event)
        except BaseException:
            recorder.raised = True
            recorder.stepped(now_ns, encoded, None)
            raise
        recorder.stepped(now_ns, encoded, effects_crc(effects))
        if recorder.events % CHECK_EVENTS == 0 and self._waiting is None:
            recorder.sink(_pack(["check", recorder.events, statistics_digest(self)]))
        return effects

    @property
    def traced_events(self) -> int:
        """Steps on record."""
        return self._recorder.events

    def end(self, why: str, sink: Sink | None = None, *, compare: bool = True) -> None:
        """The last value: with the digest of the books if they can be looked at now."""
        whole = compare and not self._recorder.raised and self._waiting is None and not self._later
        found = snapshot.digest(snapshot.pack(self._books)) if whole else ""
        (sink or self._recorder.sink)(_pack(["end", self._recorder.events, found, why]))


class _Recorder:
    """Where a traced core writes to, and how far it is."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.events = 0
        self.raised = False  # the books may be wrong

    def stepped(self, now_ns: int, encoded: list[Any], crc: int | None) -> None:
        self.events += 1
        self.sink(_pack(["event", self.events, now_ns, *encoded, crc]))


class Replay:
    """Takes the values of a trace in order. After a difference, or an end, it takes no more."""

    def __init__(self) -> None:
        self.header: dict[str, Any] = {}
        self.core: Core | None = None
        self.events = 0
        self.checks = 0
        self.difference = ""
        self.ended = ""  # why the recording ended; empty: the trace stops without an end
        self.kinds: dict[str, int] = {}

    @property
    def done(self) -> bool:
        """There is nothing more to take."""
        return bool(self.difference or self.ended)

    def take(self, value: Any) -> None:
        """One value. ProtocolError, CompatibilityError: this is no trace, or none that this release can replay."""
        if not self.header:
            self._take_header(value)
            return
        try:
            tag, *rest = value
            if self.core is None:
                if tag != "state":
                    raise ProtocolError("this trace does not begin with a state", code="trace")
                self._take_state(*rest)
            elif tag == "event":
                self._take_event(*rest)
            elif tag == "check":
                self.checks += 1
                self._compare("statistics", rest[1], statistics_digest(self.core))
            elif tag == "end":
                self.ended = str(rest[2]) or "unknown"
                if rest[1]:
                    self.checks += 1
                    self._compare("books", rest[1], snapshot.digest(snapshot.pack(self.core._books)))
            else:
                raise ProtocolError(f"a trace has no values of the kind {tag!r}", code="trace")
        except (TypeError, ValueError, IndexError) as error:
            raise ProtocolError(f"a value of this trace cannot be read: {error}", code="trace") from None

    def _take_header(self, value: Any) -> None:
        if not isinstance(value, dict) or "kvd-trace" not in value:
            raise ProtocolError(
                "this file is no trace of kvd: record one with kvctl trace record", code="trace"
            )
        if value["kvd-trace"] != FORMAT or value.get("kvd") != VERSION:
            raise CompatibilityError(
                f"this trace is of kvd {value.get('kvd')}, format {value['kvd-trace']}; this is kvd {VERSION}, format "
                f"{FORMAT}: replay it with the release that recorded it",
                code="trace", recorded=str(value.get("kvd")), here=VERSION,
            )  # fmt: skip
        self.header = value

    def _take_state(self, packed: bytes, digest: str) -> None:
        self.core = Core.over(snapshot.unpack(packed))
        self.checks += 1
        self._compare("state at the start", digest, snapshot.digest(snapshot.pack(self.core._books)))

    def _take_event(self, number: int, now_ns: int, name: str, values: list[Any], crc: int | None) -> None:
        core = self.core
        if core is None or number != self.events + 1:
            raise ProtocolError(
                f"event {number} follows event {self.events}: the trace has a hole", code="trace"
            )
        self.events = number
        self.kinds[name] = self.kinds.get(name, 0) + 1
        event = decode_event(name, values)
        try:
            effects = core.step(now_ns, event)
        except (InvariantError, KeyError, IndexError, AttributeError, AssertionError) as error:
            told = f"{type(error).__name__}: {error}"
            if crc is None:
                self.ended = f"the core stopped here: {told}"
            else:
                self.difference = f"event {number} ({name}): {told}, which the recorded core did not say"
            return
        if crc is None:
            self.difference = f"event {number} ({name}): the recorded core stopped here, this one did not"
        elif effects_crc(effects) != crc:
            kinds = ", ".join(type(one).__name__ for one in effects) or "none"
            self.difference = f"event {number} ({name}): other effects than recorded; here: {kinds}"

    def _compare(self, what: str, recorded: str, here: str) -> None:
        if recorded != here:
            self.difference = f"after event {self.events}: {what} differ, {recorded} recorded, {here} here"
