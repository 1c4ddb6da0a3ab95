"""Bounded memory of what requests did and of what left, so that a miss can be explained.

Owned by `Core`. The journal keeps the last `requests_max` requests, oldest out; per request a few totals and
its last touches. Ghosts keep the first 8 bytes of the identities that left last, at least `ghosts_max` of
them and at most twice as many, with the reason and the time. Nothing here holds a token, a prompt or an
identity in full.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from itertools import repeat

from kvd.core.events import Reason, Touch, TouchKind

touches_kept_max = 16
errors_kept_max = 8

_kind_names = {kind.value: kind.name.lower() for kind in TouchKind}


class Ghosts:
    """Why and when families left: two generations, the older one dropped when the younger is full."""

    def __init__(self, ghosts_max: int) -> None:
        self._ghosts_max = ghosts_max
        self._young: dict[int, tuple[Reason, int]] = {}
        self._old: dict[int, tuple[Reason, int]] = {}

    def add(self, key8s: Iterable[int], reason: Reason, now_ns: int) -> None:
        """These families left."""
        self._young.update(zip(key8s, repeat((reason, now_ns))))
        if len(self._young) >= self._ghosts_max:
            self._old = self._young
            self._young = {}

    def find(self, key8: int) -> tuple[Reason, int] | None:
        """Why and when this family left last."""
        return self._young.get(key8) or self._old.get(key8)

    def __len__(self) -> int:
        return len(self._young) + len(self._old)


class RequestRecord:
    """What one request did."""

    __slots__ = (
        "aborted", "errors", "evicted_bytes", "evicted_families", "first_ns", "granted", "last_ns", "pending",
        "present", "published", "reserved_bytes", "touches", "touches_count", "writing_ns", "writing_since_ns",
    )  # fmt: skip

    def __init__(self, now_ns: int) -> None:
        self.first_ns = now_ns
        self.last_ns = now_ns
        self.touches: tuple[tuple[int, Touch, str], ...] = ()  # when seen, what, why its first miss was one
        self.touches_count = 0
        self.granted = 0
        self.present = 0
        self.pending = 0
        self.reserved_bytes = 0
        self.evicted_families = 0
        self.evicted_bytes = 0
        self.published = 0
        self.aborted = 0
        self.writing_ns = 0  # from a reservation to its publication: filling, rings and both ends
        self.writing_since_ns = now_ns  # what was before is counted
        self.errors: tuple[tuple[int, str], ...] = ()

    def settled(self, now_ns: int) -> None:
        """Something reserved was published: the time since its reservation, or since the last of these, was writing."""
        self.writing_ns += now_ns - self.writing_since_ns
        self.writing_since_ns = now_ns


class Journal:
    """The last requests, by the hash of their id."""

    def __init__(self, requests_max: int) -> None:
        self._requests_max = requests_max
        self._requests: OrderedDict[int, RequestRecord] = OrderedDict()  # oldest first, found at once

    def __len__(self) -> int:
        return len(self._requests)

    def of(self, request: int, now_ns: int) -> RequestRecord | None:
        """The record of this request, made if it is new; None for 0 (no id given)."""
        if not request:
            return None
        record = self._requests.get(request)
        if record is None:
            if len(self._requests) >= self._requests_max:
                if not self._requests_max:
                    return None
                self._requests.popitem(last=False)
            record = self._requests[request] = RequestRecord(now_ns)
        record.last_ns = now_ns
        return record

    def touched(self, touch: Touch, miss: str, now_ns: int) -> None:
        """The request looked something up; `miss` says why its first missing family was missing."""
        record = self.of(touch.request, now_ns)
        if record is not None:
            record.touches_count += 1
            record.touches = (*record.touches[1 - touches_kept_max :], (now_ns, touch, miss))

    def failed(self, request: int, message: str, now_ns: int) -> None:
        """An operation of the request was refused."""
        record = self.of(request, now_ns)
        if record is not None and len(record.errors) < errors_kept_max:
            record.errors = (*record.errors, (now_ns, message))

    def explain(self, request: int, now_ns: int) -> dict[str, object]:
        """All that is known about a request, JSON-able; times are ages in nanoseconds before `now_ns`."""
        record = self._requests.get(request)
        if record is None:
            return {"known": False, "requests_kept_max": self._requests_max}
        return {
            "known": True,
            "first_age_ns": now_ns - record.first_ns,
            "last_age_ns": now_ns - record.last_ns,
            "touches_count": record.touches_count,
            "touches": [_touch_dict(seen_ns, touch, miss, now_ns) for seen_ns, touch, miss in record.touches],
            "granted": record.granted,
            "present": record.present,
            "pending": record.pending,
            "reserved_bytes": record.reserved_bytes,
            "evicted_families": record.evicted_families,
            "evicted_bytes": record.evicted_bytes,
            "published": record.published,
            "aborted": record.aborted,
            "writing_ns": record.writing_ns,
            "errors": [{"age_ns": now_ns - at_ns, "message": message} for at_ns, message in record.errors],
        }


def _touch_dict(seen_ns: int, touch: Touch, miss: str, now_ns: int) -> dict[str, object]:
    return {
        "kind": _kind_names.get(touch.kind, str(touch.kind)),
        "age_ns": now_ns - seen_ns,
        "asked": touch.asked,
        "matched": touch.matched,
        "missed_key8": f"{touch.missed_key8:016x}" if touch.missed_key8 else "",
        "missed_because": miss,
        "took_ns": touch.took_ns,
        "bytes": touch.bytes,
    }


def age_text(age_ns: int) -> str:
    """How long ago, for people: two digits and a unit."""
    age = max(age_ns, 0)
    for unit, size in (
        ("d", 86_400 * 10**9),
        ("h", 3_600 * 10**9),
        ("min", 60 * 10**9),
        ("s", 10**9),
        ("ms", 10**6),
    ):
        if age >= size:
            return f"{age / size:.1f} {unit} ago"
    return "just now"
