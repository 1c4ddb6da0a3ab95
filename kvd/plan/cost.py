"""What a request that was served well costs: the prices of a fleet over its goodput.

Owns the cost of effective service of several cases, compared with the first. Pure, any thread. Money is an exact number
in a unit that the caller names. Invariant: what was offered and not served within the limits, rejected requests
included, is paid for and counts for nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from kvd.errors import UsageError
from kvd.plan import units
from kvd.plan.ledger import UNITS_SHOWN, Answer, Step
from kvd.plan.units import check_int, check_number, check_positive, format_number, format_rate, format_share

cases_max: Final = 64
SHOWN_REQUESTS: Final = 1_000
SECONDS_AN_HOUR: Final = 3_600


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One way to serve. Prices are of one host for an hour: the host, and what is added to it (memory, storage, kvd).

    `offered_per_s` are all requests that came, `good_per_s` those of them that were answered within the limits. Raises
    UsageError: a value out of range, more good requests than offered ones.
    """

    name: str
    hosts_count: int
    host_price: Fraction
    extra_price: Fraction
    offered_per_s: Fraction
    good_per_s: Fraction
    not_given: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 0 < len(self.name) <= 255 or not self.name.isprintable() or self.name.isspace():
            raise UsageError(
                f"case name {self.name[:64]!r} has {len(self.name)} characters; allowed: 1 … 255 that can be printed",
                code="case",
            )
        where = f"--case {self.name}"
        check_int(f"{where}: hosts", self.hosts_count, 1, units.plan_count_max)
        for part, price in (("host-hour", self.host_price), ("extra-hour", self.extra_price)):
            check_number(f"{where}: {part}", price, 0, units.plan_price_max)
        check_positive(f"{where}: offered", self.offered_per_s, units.plan_rate_per_s_max)
        check_number(f"{where}: good", self.good_per_s, 0, units.plan_rate_per_s_max)
        if self.good_per_s > self.offered_per_s:
            raise UsageError(
                f"{where}: good = {format_rate(self.good_per_s)} is more than offered = "
                f"{format_rate(self.offered_per_s)}; allowed: at most that, good requests are some of those offered",
                code="contradiction", case=self.name,
            )  # fmt: skip

    @property
    def price_an_hour(self) -> Fraction:
        """All hosts."""
        return self.hosts_count * (self.host_price + self.extra_price)

    @property
    def good_share(self) -> Fraction:
        """Good requests of those offered."""
        return self.good_per_s / self.offered_per_s

    @property
    def good_an_hour(self) -> Fraction:
        """Good requests an hour."""
        return self.good_per_s * SECONDS_AN_HOUR

    @property
    def price_of_shown(self) -> Fraction | None:
        """Of 1,000 good requests; None if there are none."""
        return self.price_an_hour * SHOWN_REQUESTS / self.good_an_hour if self.good_an_hour else None


@dataclass(frozen=True, slots=True, kw_only=True)
class CostPlan:
    """Cases compared with the first. `limits` says in words what a good request is, `currency` what prices are in.

    Raises UsageError: no case, a name twice.
    """

    cases: tuple[Case, ...]
    limits: str = ""
    currency: str = "units"

    def __post_init__(self) -> None:
        check_int("number of --case", len(self.cases), 1, cases_max)
        if (
            self.currency in UNITS_SHOWN
            or not 0 < len(self.currency) <= 32
            or not self.currency.isprintable()
        ):
            raise UsageError(
                f"--currency = {self.currency[:32]!r}; allowed: up to 32 characters that can be printed, like EUR, and "
                "no unit of the tables",
                code="currency",
            )  # fmt: skip
        counts = Counter(case.name for case in self.cases)
        if twice := [name for name, count in counts.items() if count > 1]:
            raise UsageError(f"case {twice[0]!r} is given twice; allowed: each case once",
                             code="contradiction", case=twice[0])  # fmt: skip

    @property
    def cheapest(self) -> Case | None:
        """The case with the cheapest good request, the first of equals; None if no case has any."""
        served = [case for case in self.cases if case.price_of_shown is not None]
        return min(served, key=lambda case: case.price_of_shown or 0, default=None)

    def share(self, case: Case) -> Fraction | None:
        """What a good request costs in this case, as a share of the first case; None if that has no meaning."""
        own, first = case.price_of_shown, self.cases[0].price_of_shown
        return None if own is None or not first else own / first

    def extra_at_draw(self, case: Case) -> Fraction | None:
        """What may be added to a host for an hour until a good request costs what it does in the first case."""
        first = self.cases[0]
        if not first.good_per_s or not case.good_per_s:
            return None
        worth = first.price_an_hour * case.good_per_s / first.good_per_s
        return worth / case.hosts_count - case.host_price

    @property
    def answers(self) -> Mapping[str, Answer]:
        """Results under stable names."""
        cheapest = self.cheapest
        return {
            "cheapest": cheapest.name if cheapest else None,
            "cases": [
                {
                    "case": case.name,
                    "price_an_hour": case.price_an_hour,
                    "good_share": case.good_share,
                    "price_of_1000_good": case.price_of_shown,
                    "share_of_first": self.share(case),
                    "extra_hour_at_draw": None if case is self.cases[0] else self.extra_at_draw(case),
                }
                for case in self.cases
            ],
        }

    @property
    def steps(self) -> tuple[Step, ...]:
        """The arithmetic, case by case."""
        rows: list[Step] = []
        for case in self.cases:
            host = format_number(case.host_price)
            price = f"({host} + {format_number(case.extra_price)})" if case.extra_price else host
            good, hour = format_rate(case.good_per_s), format_number(case.price_an_hour)
            rows += [
                Step(f"{case.name}: an hour", f"{units.counted(case.hosts_count, 'host')} × {price}",
                     case.price_an_hour, self.currency),
                Step(f"{case.name}: within limits", f"{good} ÷ {format_rate(case.offered_per_s)} offered",
                     case.good_share, "share"),
                Step(f"{case.name}: good an hour", f"{good} × {SECONDS_AN_HOUR:,}", case.good_an_hour, "requests"),
            ]  # fmt: skip
            if case.price_of_shown is not None:
                text = f"{hour} × {SHOWN_REQUESTS:,} ÷ {format_number(case.good_an_hour)}"
                rows.append(
                    Step(f"{case.name}: {SHOWN_REQUESTS:,} good", text, case.price_of_shown, self.currency)
                )
            if case is not self.cases[0]:
                rows += self._compared(case)
        return tuple(rows)

    def _compared(self, case: Case) -> list[Step]:
        first, share, draw = self.cases[0], self.share(case), self.extra_at_draw(case)
        rows = []
        if share is not None and case.price_of_shown is not None and first.price_of_shown is not None:
            text = f"{format_number(case.price_of_shown)} ÷ {format_number(first.price_of_shown)}"
            rows.append(Step(f"{case.name}: of {first.name}", text, share, "share"))
        if draw is not None:
            good = f"{format_rate(case.good_per_s)} ÷ {format_rate(first.good_per_s)}"
            host = format_number(case.host_price)
            text = f"{format_number(first.price_an_hour)} × {good} ÷ {case.hosts_count:,} - {host}"
            rows.append(Step(f"{case.name}: extra at a draw", text, draw, self.currency))
        return rows

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What the numbers take for granted."""
        missing = (
            f"{case.name}: {', '.join(case.not_given)} not given, counted as 0"
            for case in self.cases
            if case.not_given
        )
        limits = f"a good request is one answered within {self.limits}" if self.limits else (
            "what a good request is was not said (--limits); it is the same in all cases"
        )  # fmt: skip
        loads = {case.offered_per_s for case in self.cases}
        load = (
            ("the cases were offered different loads: at one load the shares may be others",)
            if len(loads) > 1
            else ()
        )
        return (
            *missing,
            limits,
            "requests that were rejected, failed or late are among those offered, and are paid for",
            *load,
            "hosts cost the same whether they work or wait",
        )

    @property
    def conclusion(self) -> str:
        """What follows, and what does not."""
        best, first = self.cheapest, self.cases[0]
        if best is None or best.price_of_shown is None:
            return "No case answers any request within the limits, so none has a cost; which is nearer is not said."
        price = f"{format_number(best.price_of_shown)} {self.currency} for {SHOWN_REQUESTS:,}"
        if len(self.cases) == 1:
            return (
                f"Good requests cost {price}; this holds for the load and the limits given, not for others."
            )
        against = ""
        share = self.share(best)
        if best is not first:
            against = ", and none is served by " + first.name if share is None else (
                f", {format_share(share)} of what {first.name} takes"
            )  # fmt: skip
        return (
            f"Good requests cost least with {best.name}: {price}{against}; this holds for the load and the limits "
            f"given, not for others."
        )
