"""Quantities as people write them, as exact numbers, and back.

Owns the unit tables and the bounds of what the planner accepts. `512GiB` becomes an int of bytes, `400Gbit`
an exact Fraction of bytes a second, `8ms` an int of nanoseconds. Nothing passes through a float: 80 % of
512 GiB times 160 hosts is exactly 64 TiB, and a plan that says "exactly" must mean it.

Who may call it: anyone above `kvd.plan`; no state, any thread. Invariant: a unit that is not in a table is
refused by name, a number outside its bound is refused with the bound, nothing is clamped or guessed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Final, TypeAlias

from kvd.errors import UsageError

Number: TypeAlias = int | Fraction

KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30
TIB: Final = 1 << 40
NS_PER_S: Final = 10**9

quantity_chars_max: Final = 64
plan_bytes_max: Final = 1 << 70  # 1 ZiB: more than all memory ever made is a typing error
plan_bandwidth_bytes_per_s_max: Final = 1 << 60
plan_duration_ns_max: Final = 366 * 86_400 * NS_PER_S
plan_rate_per_s_max: Final = 10**12
plan_count_max: Final = 1 << 60
plan_price_max: Final = 10**12

_BYTE_UNITS: Final[dict[str, int]] = {
    "B": 1,
    "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15,
    "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB, "PiB": 1 << 50,
}  # fmt: skip
_BIT_UNITS: Final[dict[str, int]] = {
    "bit": 1, "kbit": 10**3, "Mbit": 10**6, "Gbit": 10**9, "Tbit": 10**12,
}  # fmt: skip
_BANDWIDTH_UNITS: Final[dict[str, Fraction]] = {
    **{f"{unit}/s": Fraction(size) for unit, size in _BYTE_UNITS.items()},
    **{f"{unit}/s": Fraction(bits, 8) for unit, bits in _BIT_UNITS.items()},
    # A link is sold as "400 Gbit"; that bits are meant per second is clear, that bytes are is not.
    **{unit: Fraction(bits, 8) for unit, bits in _BIT_UNITS.items()},
}
_DURATION_UNITS_NS: Final[dict[str, int]] = {
    "ns": 1, "us": 10**3, "µs": 10**3, "ms": 10**6, "s": 10**9, "min": 60 * 10**9, "h": 3600 * 10**9,
}  # fmt: skip
_RATE_UNITS_PER_S: Final[dict[str, Fraction]] = {
    "/s": Fraction(1), "/min": Fraction(1, 60), "/h": Fraction(1, 3600), "/day": Fraction(1, 86_400),
}  # fmt: skip

# What people write for a unit that is not in its table, and what they may have meant.
_HABITS: Final[dict[str, str]] = {
    **{letter: f"{letter}iB or {letter}B" for letter in "KMGTP"},
    **{f"{letter}i": f"{letter}iB" for letter in "KMGTP"},
    "k": "KiB or kB", "bytes": "B",
    "m": "min or ms", "sec": "s", "secs": "s", "second": "s", "seconds": "s", "msec": "ms", "usec": "us", "mins": "min",
    "hr": "h", "hrs": "h",
    "rps": "/s", "qps": "/s", "req/s": "/s", "requests/s": "/s", "per s": "/s", "/sec": "/s",
    "rpm": "/min", "/m": "/min",
}  # fmt: skip
_PER_SECOND = re.compile(r"([kKMGTP]?i?)([bB])(?:it)?(?:ps|/sec)")

_QUANTITY = re.compile(r"([+-]?)([0-9]+(?:\.[0-9]+)?|\.[0-9]+)[ ]*([^0-9 .+-].*)?")


def _split(text: str, field: str, example: str) -> tuple[Fraction, str]:
    """The exact number and the unit ('' if none) of one quantity."""
    if len(text) > quantity_chars_max:
        raise UsageError(
            f"{field}: {len(text)} characters; allowed: at most {quantity_chars_max}, like {example}",
            code="quantity", field=field,
        )  # fmt: skip
    match = _QUANTITY.fullmatch(text.strip())
    if match is None:
        raise UsageError(
            f"{field} = {text!r} is not a quantity; allowed: one like {example}",
            code="quantity", field=field, value=text,
        )  # fmt: skip
    sign, digits, unit = match.groups()
    number = Fraction(f"0{digits}")
    return (-number if sign == "-" else number), (unit or "").strip()


def _unknown_unit(field: str, text: str, unit: str, allowed: Mapping[str, Number]) -> UsageError:
    """The error for a unit outside its table; says which one was probably meant."""
    named = f"unknown unit {unit!r}" if unit else "no unit"
    return UsageError(
        f"{field} = {text!r}: {named}; allowed: {', '.join(allowed)}{_meant(unit, allowed)}",
        code="unit", field=field, value=text, unit=unit,
    )  # fmt: skip


def _meant(unit: str, allowed: Mapping[str, Number]) -> str:
    """'; did you mean …?' for a unit outside its table, '' if there is nothing near."""
    by_case = [name for name in allowed if name.lower() == unit.lower()]
    habit = _PER_SECOND.fullmatch(unit)
    if habit is not None:
        scale = "k" if habit[1] == "K" else habit[1]
        usual = [f"{scale}bit/s"] if habit[2] == "b" else [f"{habit[1]}B/s"]
    else:
        usual = _HABITS.get(unit, _HABITS.get(unit.lower(), "")).split(" or ")
    if by_case:
        return f"; did you mean {' or '.join(by_case)}? Units are case-sensitive, b is not a bit"
    likely = [name for name in usual if name in allowed] or [
        f"{name}/s" for name in usual if f"{name}/s" in allowed
    ]
    if likely:
        return f"; did you mean {' or '.join(likely)}?"
    if unit.removesuffix("/s").endswith("b") and len(unit.removesuffix("/s")) <= 3:
        return "; b could be bits or bytes: write bit or B"
    return f"; did you mean {unit}/s?" if f"{unit}/s" in allowed else ""


def _scaled(text: str, field: str, example: str, units: Mapping[str, Number], bare: str | None) -> Fraction:
    """number × unit; `bare` is the unit meant when none is written, None if one must be (0 needs none)."""
    number, unit = _split(text, field, example)
    if not unit and (bare is not None or number == 0):
        return number * (units[bare] if bare is not None else 1)
    if unit not in units:
        raise _unknown_unit(field, text, unit, units)
    return number * units[unit]


def parse_bytes(text: str, field: str = "size") -> int:
    """Size in bytes: '512GiB', '1.5 MiB', '4096'. UsageError: unknown unit, not whole bytes, out of range."""
    value = _scaled(text, field, "512GiB", _BYTE_UNITS, "B")
    if value.denominator != 1:
        raise UsageError(
            f"{field} = {text!r} is not a whole number of bytes; allowed: whole bytes, like {round(value)}B",
            code="quantity", field=field, value=text,
        )  # fmt: skip
    return check_int(field, int(value), 0, plan_bytes_max, shown=text, unit=" B")


def parse_bandwidth(text: str, field: str = "bandwidth") -> Fraction:
    """Bytes a second, exactly: '20GiB/s', '400Gbit' (a link: bits a second). UsageError as `parse_bytes`."""
    value = _scaled(text, field, "20GiB/s or 400Gbit", _BANDWIDTH_UNITS, None)
    return check_number(field, value, 0, plan_bandwidth_bytes_per_s_max, shown=text, unit=" B/s")


def parse_duration_ns(text: str, field: str = "duration") -> int:
    """Nanoseconds: '8ms', '2.5 us', '0'. UsageError: unknown unit, below 1 ns of resolution, out of range."""
    value = _scaled(text, field, "8ms", _DURATION_UNITS_NS, None)
    if value.denominator != 1:
        raise UsageError(
            f"{field} = {text!r} is finer than a nanosecond; allowed: whole nanoseconds",
            code="quantity", field=field, value=text,
        )  # fmt: skip
    return check_int(field, int(value), 0, plan_duration_ns_max, shown=text, unit=" ns")


def parse_rate(text: str, field: str = "rate") -> Fraction:
    """Events a second, exactly: '200/s', '12/min'. UsageError: unknown unit, out of range."""
    value = _scaled(text, field, "200/s", _RATE_UNITS_PER_S, None)
    return check_number(field, value, 0, plan_rate_per_s_max, shown=text, unit="/s")


def parse_price(text: str, field: str = "price") -> Fraction:
    """An amount of money, exactly: '98.32'. UsageError: a unit, below 0."""
    number, unit = _split(text, field, "98.32")
    if unit:
        raise UsageError(
            f"{field} = {text!r}: unknown unit {unit!r}; allowed: a number, like 98.32",
            code="unit", field=field, value=text, unit=unit,
        )  # fmt: skip
    return check_number(field, number, 0, plan_price_max, shown=text)


def parse_share(text: str, field: str = "share") -> Fraction:
    """A share of a whole, exactly: '0.75' or '75%'. UsageError outside 0 … 1 (0% … 100%)."""
    number, unit = _split(text, field, "0.75 or 75%")
    if unit not in ("", "%"):
        raise UsageError(
            f"{field} = {text!r}: unknown unit {unit!r}; allowed: 0 … 1, or 0% … 100%",
            code="unit", field=field, value=text, unit=unit,
        )  # fmt: skip
    if not unit and 1 < number <= 100:
        raise UsageError(
            f"{field} = {text!r} is above 1; allowed: 0 … 1, or 0% … 100%; did you mean {text.strip()}%?",
            code="range", field=field, value=text,
        )  # fmt: skip
    return check_share(field, number / 100 if unit == "%" else number, shown=text)


def check_int(
    field: str, value: int, low: int, high: int, *, shown: str | None = None, unit: str = ""
) -> int:
    """`value` if it is an int in low … high; otherwise UsageError with the field, the value and the range in `unit`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(
            f"{field} = {value!r} is not a whole number; allowed: an int in {low:,} … {high:,}",
            code="range", field=field, value=str(value),
        )  # fmt: skip
    if not low <= value <= high:
        raise _outside(field, value, low, high, shown, unit)
    return value


def check_number(
    field: str, value: Number, low: Number, high: Number, *, shown: str | None = None, unit: str = ""
) -> Fraction:
    """`value` as a Fraction in low … high. A float is refused: what it stands for is not what was written."""
    if isinstance(value, bool) or not isinstance(value, int | Fraction):
        raise UsageError(
            f"{field} = {value!r} is not exact; allowed: an int or a Fraction, such as Fraction('{value}')",
            code="range", field=field, value=str(value),
        )  # fmt: skip
    if not low <= value <= high:
        raise _outside(field, value, low, high, shown, unit)
    return Fraction(value)


def check_share(field: str, value: Number, *, shown: str | None = None) -> Fraction:
    """`value` as a Fraction in 0 … 1."""
    return check_number(field, value, 0, 1, shown=shown)


def check_positive(field: str, value: Number, high: Number, *, shown: str | None = None) -> Fraction:
    """`value` as a Fraction in (0, high]: for what something is divided by."""
    exact = check_number(field, value, 0, high, shown=shown)
    if exact == 0:
        raise UsageError(
            f"{field} = {shown or value} must be greater than 0",
            code="range", field=field, value=str(value),
        )  # fmt: skip
    return exact


def _outside(
    field: str, value: Number, low: Number, high: Number, shown: str | None, unit: str
) -> UsageError:
    text = repr(shown) if shown is not None else f"{value}"
    direction = f"above {high:,}{unit}" if value > high else f"below {low:,}"
    return UsageError(
        f"{field} = {text} is {direction}; allowed: {low:,} … {high:,}{unit}",
        code="range", field=field, value=str(value),
    )  # fmt: skip


def ceil_div(dividend: Number, divisor: Number) -> int:
    """The smallest int >= dividend / divisor, exactly."""
    return -int(-Fraction(dividend) // Fraction(divisor))


def format_number(value: Number, decimals: int = 2) -> str:
    """'4,194,304', '51.2', '≈ 46.57': the sign ≈ says that digits were cut."""
    exact = Fraction(value)
    rounded = round(exact, decimals)
    if rounded == 0 and exact != 0:
        short = f"{float(exact):.2g}"
        return short if Fraction(short) == exact else f"≈ {short}"
    whole, part = divmod(abs(rounded), 1)
    digits = f"{int(part * 10**decimals):0{decimals}d}".rstrip("0") if decimals else ""
    text = f"{'-' if rounded < 0 else ''}{int(whole):,}{'.' + digits if digits else ''}"
    return text if rounded == exact else f"≈ {text}"


def scale_of(value: Number | float, units: Sequence[tuple[str, int]]) -> tuple[str, int]:
    """The largest unit that `value` does not fall below, and its factor."""
    size = abs(Fraction(value))
    return next((unit for unit in units if size >= unit[1]), units[-1])


def _format_scaled(value: Number, units: Sequence[tuple[str, int]]) -> str:
    name, factor = scale_of(value, units)
    return f"{format_number(Fraction(value) / factor)} {name}"


SHOWN_BYTES: Final = [("PiB", 1 << 50), ("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB), ("B", 1)]
SHOWN_NS: Final = [("s", 10**9), ("ms", 10**6), ("us", 10**3), ("ns", 1)]


def format_bytes(value: Number) -> str:
    """'51.2 TiB'."""
    return _format_scaled(value, SHOWN_BYTES)


def format_bandwidth(bytes_per_s: Number) -> str:
    """'≈ 30.27 GiB/s'."""
    return _format_scaled(bytes_per_s, SHOWN_BYTES) + "/s"


def format_ns(duration_ns: Number) -> str:
    """'100 ms'."""
    if duration_ns == 0:
        return "0 s"
    return _format_scaled(duration_ns, SHOWN_NS)


def format_rate(per_s: Number) -> str:
    """'200/s'."""
    return f"{format_number(per_s)}/s"


def format_share(share: Number) -> str:
    """'75 %'."""
    return f"{format_number(Fraction(share) * 100)} %"


def format_sum(first: Number, second: Number, show: Callable[[Number], str]) -> str:
    """'a - b', or 'a + b' where b is below 0: what a person would write for first less second."""
    return f"{show(first)} - {show(second)}" if second >= 0 else f"{show(first)} + {show(-second)}"


def counted(count: int, singular: str, plural: str = "") -> str:
    """'1 host', '128 hosts', '2 copies'."""
    return f"{count:,} {singular if count == 1 else plural or singular + 's'}"
