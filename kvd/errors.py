"""Every exception kvd raises, and what its receiver can do about it.

    KvdError
    +-- UsageError           KVD-USAGE-*      the caller's mistake; retry never
    |   +-- ConfigError      KVD-CONFIG-*     a key of the configuration
    +-- CapacityError        KVD-CAPACITY-*   no room now (full of leased, pinned or unwritten data)
    +-- LifecycleError       KVD-LIFECYCLE-*  lease gone, stale generation, reservation aborted
    |   +-- ViewsAliveError  (also BufferError) a lease was released while views of it live
    +-- CompatibilityError   KVD-COMPAT-*     versions or layouts that cannot work together
    +-- UnavailableError     KVD-UNAVAILABLE-* daemon away, deadline passed
    +-- ProtocolError        KVD-PROTOCOL-*   malformed or hostile bytes; the connection ends
    +-- CorruptionError      KVD-CORRUPTION-* bytes do not match their checksum
    +-- InvariantError       KVD-INVARIANT-*  kvd's own books disagree; the daemon stops

A miss is a result, never an exception. `code` is stable across releases, `retry` says what helps, `fields`
names the values involved. The text says what happened and what to do.
"""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar


class Retry(StrEnum):
    """What a caller who got an error may do."""

    NEVER = "never"
    NOW = "now"
    AFTER = "after"
    REATTACH = "reattach"


class KvdError(Exception):
    """Base of all errors. `code` is stable; `fields` are JSON-able values that the message talks about."""

    family: ClassVar[str] = "KVD"
    default_retry: ClassVar[Retry] = Retry.NEVER

    def __init__(self, message: str, *, code: str = "", retry: Retry | None = None, **fields: object) -> None:
        super().__init__(message)
        self.message = message
        self.code = f"{self.family}-{code.upper()}" if code else self.family
        self.retry = self.default_retry if retry is None else retry
        self.fields = fields

    def __str__(self) -> str:
        return f"{self.message} [{self.code}]"

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.message, self.code, self.retry.value, self.fields)


def _rebuild(cls: type[KvdError], message: str, code: str, retry: str, fields: dict[str, object]) -> KvdError:
    """Recreate an error that crossed a process boundary (pickle or the control protocol)."""
    error = cls(message, retry=Retry(retry))
    error.code = code
    error.fields = fields
    return error


class UsageError(KvdError):
    """The call cannot be right: wrong type, out of range, used after release."""

    family = "KVD-USAGE"


class ConfigError(UsageError):
    """A key of the configuration is unknown or has a value that is not allowed."""

    family = "KVD-CONFIG"


class CapacityError(KvdError):
    """There is no room now; `fields` count what holds the space."""

    family = "KVD-CAPACITY"
    default_retry = Retry.AFTER


class LifecycleError(KvdError):
    """A lease, descriptor or reservation is over, or belongs to an earlier generation or epoch."""

    family = "KVD-LIFECYCLE"


class ViewsAliveError(LifecycleError, BufferError):
    """A lease was released while views of it are alive; it is released when the last of them dies."""


class CompatibilityError(KvdError):
    """Two versions or two layouts cannot work together."""

    family = "KVD-COMPAT"


class UnavailableError(KvdError):
    """The daemon is away or did not answer before the deadline."""

    family = "KVD-UNAVAILABLE"
    default_retry = Retry.REATTACH


class ProtocolError(KvdError):
    """Bytes that break the protocol; the connection they came on is closed."""

    family = "KVD-PROTOCOL"


class CorruptionError(KvdError):
    """Bytes that do not match the checksum they were published with."""

    family = "KVD-CORRUPTION"


class InvariantError(KvdError):
    """kvd's own books disagree. The daemon stops: the cache is disposable, a wrong answer is not."""

    family = "KVD-INVARIANT"


_BY_FAMILY: dict[str, type[KvdError]] = {
    cls.family: cls
    for cls in (
        UsageError, ConfigError, CapacityError, LifecycleError, CompatibilityError,
        UnavailableError, ProtocolError, CorruptionError, InvariantError,
    )
}  # fmt: skip


def to_dict(error: KvdError) -> dict[str, object]:
    """The form in which an error crosses the control protocol and `kvctl --json`."""
    return {
        "code": error.code,
        "message": error.message,
        "retry": error.retry.value,
        "fields": {name: value if isinstance(value, str | int | float | bool) else str(value)
                   for name, value in error.fields.items()},
    }  # fmt: skip


def from_dict(data: dict[str, object]) -> KvdError:
    """Rebuild the error that `to_dict` described; an unknown family becomes a plain KvdError."""
    code = str(data.get("code", "KVD"))
    matches = [family for family in _BY_FAMILY if code == family or code.startswith(family + "-")]
    cls = _BY_FAMILY[max(matches, key=len)] if matches else KvdError
    fields = data.get("fields")
    named = {str(k): v for k, v in fields.items()} if isinstance(fields, dict) else {}
    error = cls(str(data.get("message", code)), **named)
    error.code = code
    error.retry = Retry(str(data.get("retry", Retry.NEVER.value)))
    return error
