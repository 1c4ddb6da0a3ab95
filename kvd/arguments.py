"""What callers give, checked: each refusal is a UsageError that names the argument, its value and what is allowed.

Pure; called where arguments enter kvd. Numbers may be of any integer type (numpy's too), but True and 1.0 are no
counts and nan is no time: they are mistakes that would otherwise show up far from where they were made.
"""

from __future__ import annotations

import numbers
import operator
from typing import Any, Final, TypeVar

from kvd import limits
from kvd.errors import UsageError

T = TypeVar("T")
DEADLINE_S_MAX: Final = 1e6  # eleven days
_SHOWN_CHARS_MAX: Final = 60
_BOOL: Final[type] = bool  # a number to Python, and no time


def described(value: object) -> str:
    """`value` as a message shows it: short, whatever it is."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - a value that cannot be shown is described all the same
        return f"a {type(value).__name__}"
    return text if len(text) <= _SHOWN_CHARS_MAX else text[:_SHOWN_CHARS_MAX] + "…"


def refusal(name: str, value: object, allowed: str, code: str = "argument") -> UsageError:
    """The error that says that an argument cannot be so."""
    shown = described(value)
    return UsageError(
        f"{name} = {shown} ({type(value).__name__}) is not allowed: {allowed}",
        code=code,
        argument=name,
        value=shown,
    )


def seconds(name: str, value: object) -> float:
    """A time to wait: 0 … DEADLINE_S_MAX seconds."""
    # numpy's numbers are registered as Real. Comparisons with nan are false, so that it is refused here, too.
    if isinstance(value, numbers.Real) and not isinstance(value, _BOOL):
        given: Any = value
        if 0 <= given <= DEADLINE_S_MAX:
            return float(given)
    raise refusal(
        name, value, f"give seconds, 0 … {DEADLINE_S_MAX:g}; as good as no limit is the largest", "deadline"
    )


def count(name: str, value: Any, low: int, high: int, code: str = "argument") -> int:
    """An integer low … high of any integer type."""
    if not isinstance(value, bool):
        try:
            number = operator.index(value)
        except TypeError:
            pass
        else:
            if low <= number <= high:
                return number
    raise refusal(name, value, f"give an integer {low} … {high}", code)


def size(name: str, value: Any) -> int:
    """Bytes of one object."""
    return count(name, value, 1, limits.object_bytes_max, "size")


def flag(name: str, value: Any) -> bool:
    """True or False, nothing that only looks like it."""
    if value is True or value is False:
        return value
    raise refusal(name, value, "give True or False")


def text(name: str, value: Any, chars_max: int = 4096, *, chars_min: int = 1) -> str:
    """A string that can be sent."""
    if isinstance(value, str) and chars_min <= len(value) <= chars_max and "\0" not in value:
        try:
            value.encode()
        except UnicodeEncodeError:
            pass
        else:
            return value
    raise refusal(
        name, value, f"give a string of {chars_min} … {chars_max} characters without NUL or half characters"
    )


def instance(name: str, value: Any, kind: type[T], way: str) -> T:
    """A value of a class of ours. `way` says how to get one."""
    if isinstance(value, kind):
        return value
    raise refusal(name, value, way)


def buffer(name: str, value: Any, way: str, code: str = "argument") -> memoryview:
    """Bytes, or anything with a contiguous buffer."""
    try:
        view = memoryview(value)
    except TypeError:
        raise refusal(name, value, way, code) from None
    if not view.contiguous:
        raise refusal(name, value, f"{way}, contiguous", code)
    return view


def length(name: str, value: Any, way: str) -> int:
    """How many items a sequence has."""
    try:
        return len(value)
    except TypeError:
        raise refusal(name, value, way) from None
