"""Quantities: exact numbers in, refusals by name, and what a person reads."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.errors import UsageError
from kvd.plan import units


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("512GiB", 512 << 30), ("1.5 MiB", 3 << 19), ("4096", 4096), ("4096B", 4096), ("2GB", 2 * 10**9),
        ("0", 0), ("0.5KiB", 512), (" 8 TiB ", 8 << 40), ("1kB", 1000), ("1KB", 1000),
    ],
)  # fmt: skip
def test_bytes(text: str, expected: int) -> None:
    value = units.parse_bytes(text)
    assert (value, type(value)) == (expected, int)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("20GiB/s", 20 << 30), ("400Gbit", 50 * 10**9), ("400Gbit/s", 50 * 10**9), ("200 Gbit", 25 * 10**9),
        ("1bit/s", Fraction(1, 8)), ("0", 0),
    ],
)  # fmt: skip
def test_bandwidth(text: str, expected: int | Fraction) -> None:
    assert units.parse_bandwidth(text) == expected


def test_200_gbit_is_25_gb_and_about_23_28_gib() -> None:
    link = units.parse_bandwidth("200Gbit")
    assert link == units.parse_bandwidth("25GB/s")
    assert units.format_bandwidth(link) == "≈ 23.28 GiB/s"


@pytest.mark.parametrize(
    ("text", "expected"),
    [("8ms", 8_000_000), ("2.5us", 2_500), ("2.5 µs", 2_500), ("1h", 3600 * 10**9), ("0", 0), ("3ns", 3)],
)
def test_duration(text: str, expected: int) -> None:
    assert units.parse_duration_ns(text) == expected


def test_rate_and_share() -> None:
    assert units.parse_rate("200/s") == 200
    assert units.parse_rate("12/min") == Fraction(1, 5)
    assert (
        units.parse_share("0.75") == units.parse_share("75%") == units.parse_share("75 %") == Fraction(3, 4)
    )


@pytest.mark.parametrize(
    ("parse", "text", "says"),
    [
        (units.parse_bytes, "512GiBB", "unknown unit 'GiBB'; allowed: B, kB"),
        (units.parse_bytes, "512gib", "did you mean GiB?"),
        (units.parse_bytes, "512Gb", "did you mean GB?"),
        (units.parse_bytes, "-1GiB", "below 0"),
        (units.parse_bytes, "9999999999999999999999GiB", "allowed: 0 … 1,180,591,620,717,411,303,424 B"),
        (units.parse_bytes, "0.3B", "not a whole number of bytes"),
        (units.parse_bytes, "1,5GiB", "unknown unit"),
        (units.parse_bytes, "1e9", "unknown unit 'e9'"),
        (units.parse_bytes, "GiB", "not a quantity"),
        (units.parse_bytes, "", "not a quantity"),
        (units.parse_bytes, "٣GiB", "not a quantity"),
        (units.parse_bytes, "1" * 65, "65 characters; allowed: at most 64"),
        (units.parse_bandwidth, "20GiB", "did you mean GiB/s?"),
        (units.parse_bandwidth, "400Gb", "write bit or B"),
        (units.parse_bandwidth, "400", "no unit"),
        (units.parse_duration_ns, "8", "no unit; allowed: ns, us"),
        (units.parse_duration_ns, "-8ms", "allowed: 0 … 31,622,400,000,000,000 ns"),
        (units.parse_rate, "-1/s", "allowed: 0 … 1,000,000,000,000/s"),
        (units.parse_duration_ns, "8sec", "unknown unit 'sec'"),
        (units.parse_duration_ns, "0.5ns", "finer than a nanosecond"),
        (units.parse_duration_ns, "99999999h", "above"),
        (units.parse_rate, "200", "did you mean /s?"),
        (units.parse_share, "75", "above 1; allowed: 0 … 1"),
        (units.parse_share, "101%", "above 1"),
        (units.parse_share, "0.5x", "unknown unit 'x'"),
    ],
)
def test_refusals_name_field_value_and_what_is_allowed(parse: object, text: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text, "--field")  # type: ignore[operator]
    assert "--field" in caught.value.message
    assert says in caught.value.message
    assert "allowed" in caught.value.message
    assert text[:20] in caught.value.message or len(text) > 64


@given(
    st.integers(0, units.plan_bytes_max >> 50), st.sampled_from(["B", "KiB", "MiB", "GiB", "TiB", "kB", "GB"])
)
def test_bytes_are_exact_at_any_size(number: int, unit: str) -> None:
    assert units.parse_bytes(f"{number}{unit}") == number * units.parse_bytes(f"1{unit}")


@given(st.text(max_size=80))
def test_no_text_raises_anything_but_a_usage_error(text: str) -> None:
    for parse in (
        units.parse_bytes,
        units.parse_bandwidth,
        units.parse_duration_ns,
        units.parse_rate,
        units.parse_share,
    ):
        try:
            value = parse(text)
        except UsageError:
            continue
        assert value >= 0


@given(st.integers(0, 10**9).map(lambda n: Fraction(n, 1000)))
def test_shown_numbers_are_marked_exactly_when_cut(value: Fraction) -> None:
    text = units.format_number(value)
    parsed = Fraction(text.removeprefix("≈ ").replace(",", ""))
    assert text.startswith("≈") == (parsed != value)
    assert abs(parsed - value) <= Fraction(1, 200)


def test_shown_forms() -> None:
    assert units.format_bytes(-(128 << 40)) == "-128 TiB"
    assert units.format_bytes(0) == "0 B"
    assert units.format_bytes(Fraction(512, 5) * (1 << 39)) == "51.2 TiB"
    assert units.format_ns(0) == "0 s"
    assert units.format_ns(1_500) == "1.5 us"
    assert units.format_number(4_194_304) == "4,194,304"
    assert units.format_number(Fraction(1, 10**6)) == "1e-06"
    assert units.format_number(Fraction(-1, 4)) == "-0.25"
    assert (units.counted(1, "host"), units.counted(2, "copy", "copies")) == ("1 host", "2 copies")


def test_floats_and_bools_are_not_exact_numbers() -> None:
    with pytest.raises(UsageError, match="not exact"):
        units.check_number("usable", 0.8, 0, 1)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="not a whole number"):
        units.check_int("hosts", True, 0, 1)
    with pytest.raises(UsageError, match="greater than 0"):
        units.check_positive("link", 0, 1)


@given(st.integers(-(10**6), 10**6), st.integers(1, 10**4))
def test_ceil_div(dividend: int, divisor: int) -> None:
    quotient = units.ceil_div(dividend, divisor)
    assert (quotient - 1) * divisor < dividend <= quotient * divisor
