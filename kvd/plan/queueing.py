"""Little's law: how many requests, and how many bytes of theirs, are in flight at once.

L = λ × W holds for any system that keeps up with its arrivals, and for no other: in an overloaded one the
queue grows for as long as the load lasts and no number is right. So it is refused there. Pure, any thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from kvd.errors import UsageError
from kvd.plan import units
from kvd.plan.ledger import Answer, Step
from kvd.plan.units import (
    check_int,
    check_number,
    check_positive,
    format_bytes,
    format_ns,
    format_number,
    format_rate,
)

capacity_per_s_max = units.plan_rate_per_s_max * units.plan_bandwidth_bytes_per_s_max  # of loads of a byte


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlightPlan:
    """Mean number in flight from the arrival rate and the mean time in the system, waiting included.

    `capacity_per_s` is what the system can complete (None: nothing here limits it), `capacity_from` how that came
    about. Raises UsageError with code KVD-USAGE-OVERLOADED when arrivals reach it, and for values out of range.
    """

    arrivals_per_s: Fraction
    time_in_system_ns: int
    capacity_per_s: Fraction | None
    bytes_each: int = 0
    capacity_from: str = ""

    def __post_init__(self) -> None:
        check_number("arrivals", self.arrivals_per_s, 0, units.plan_rate_per_s_max)
        check_int("--latency", self.time_in_system_ns, 0, units.plan_duration_ns_max)
        check_int("bytes of each", self.bytes_each, 0, units.plan_bytes_max)
        if self.capacity_per_s is None:
            return
        check_positive("capacity of the system", self.capacity_per_s, capacity_per_s_max)
        if self.arrivals_per_s >= self.capacity_per_s:
            raise UsageError(
                f"arrivals = {format_rate(self.arrivals_per_s)} against a capacity of "
                f"{format_rate(self.capacity_per_s)}: the queue grows without end and Little's law says "
                f"nothing; allowed: arrivals below the capacity. Shed load or add capacity first",
                code="overloaded", arrivals_per_s=float(self.arrivals_per_s),
                capacity_per_s=float(self.capacity_per_s),
            )  # fmt: skip

    @property
    def in_flight_mean(self) -> Fraction:
        """L = λ × W."""
        return Fraction(self.arrivals_per_s) * self.time_in_system_ns / units.NS_PER_S

    @property
    def utilisation_share(self) -> Fraction:
        """Arrivals ÷ capacity, below 1; 0 where nothing limits them."""
        if self.capacity_per_s is None:
            return Fraction(0)
        return Fraction(self.arrivals_per_s) / self.capacity_per_s

    @property
    def bytes_in_flight_mean(self) -> Fraction:
        """Buffer that the mean needs."""
        return self.in_flight_mean * self.bytes_each

    @property
    def answers(self) -> Mapping[str, Answer]:
        """Results under stable names."""
        return {
            "in_flight_mean": self.in_flight_mean,
            "bytes_in_flight_mean": self.bytes_in_flight_mean,
            "utilisation_share": self.utilisation_share,
        }

    @property
    def steps(self) -> tuple[Step, ...]:
        """The arithmetic, in order."""
        rows = [
            *self._utilisation_steps,
            Step("in flight, mean",
                 f"{format_rate(self.arrivals_per_s)} × {format_ns(self.time_in_system_ns)}",
                 self.in_flight_mean, "requests"),
        ]  # fmt: skip
        if self.bytes_each:
            rows.append(Step("buffers, mean", f"{format_number(self.in_flight_mean)} × "
                             f"{format_bytes(self.bytes_each)}", self.bytes_in_flight_mean, "B"))  # fmt: skip
        return tuple(rows)

    @property
    def _utilisation_steps(self) -> tuple[Step, ...]:
        if self.capacity_per_s is None:
            return (Step("utilisation", "of loads, which nothing here limits", Fraction(0), "share"),)
        text = f"{format_rate(self.arrivals_per_s)} ÷ {format_rate(self.capacity_per_s)}"
        return (
            *_capacity_steps(self.capacity_per_s, self.capacity_from),
            Step("utilisation", text, self.utilisation_share, "share"),
        )

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What the numbers take for granted."""
        return (
            "the system keeps up, and arrival rate and time in it are means over the same long stretch",
            "the time includes waiting: it has to be measured under this load, not on an idle system",
        )

    @property
    def conclusion(self) -> str:
        """What follows, and what does not."""
        are = "request is" if self.in_flight_mean == 1 else "requests are"
        buffers = f", {format_bytes(self.bytes_in_flight_mean)} of buffers" if self.bytes_each else ""
        return (
            f"{format_number(self.in_flight_mean)} {are} in flight on average{buffers}; "
            f"this is a mean, peaks and the time itself under more load do not follow from it."
        )


def _capacity_steps(capacity_per_s: Fraction, capacity_from: str) -> tuple[Step, ...]:
    return (Step("capacity", capacity_from, capacity_per_s, "1/s"),) if capacity_from else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OverloadedPlan:
    """What can be said when arrivals reach the capacity: that, and nothing about what is in flight."""

    arrivals_per_s: Fraction
    capacity_per_s: Fraction
    capacity_from: str = ""

    def __post_init__(self) -> None:
        check_number("arrivals", self.arrivals_per_s, 0, units.plan_rate_per_s_max)
        check_positive("capacity of the system", self.capacity_per_s, capacity_per_s_max)

    @property
    def answers(self) -> Mapping[str, Answer]:
        """Results under stable names: the utilisation, and no number in flight."""
        return {
            "in_flight_mean": None,
            "bytes_in_flight_mean": None,
            "utilisation_share": Fraction(self.arrivals_per_s) / self.capacity_per_s,
        }

    @property
    def steps(self) -> tuple[Step, ...]:
        """The arithmetic, as far as it goes."""
        text = f"{format_rate(self.arrivals_per_s)} ÷ {format_rate(self.capacity_per_s)}"
        share = Fraction(self.arrivals_per_s) / self.capacity_per_s
        return (
            *_capacity_steps(self.capacity_per_s, self.capacity_from),
            Step("utilisation", text, share, "share"),
        )

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What the numbers take for granted."""
        return ("arrivals are a mean over a long stretch: a short burst above the capacity is not meant",)

    @property
    def conclusion(self) -> str:
        """What follows, and what does not."""
        return (
            f"Arrivals of {format_rate(self.arrivals_per_s)} reach the capacity of {format_rate(self.capacity_per_s)}: "
            "the queue grows without end and Little's law says nothing; shed load or add capacity first."
        )
