"""Cost of a request served well: rejected ones are paid for, cases are compared with the first, bad input is named."""

from __future__ import annotations

import json
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from kvd.kvctl.plan import app
from kvd.plan.cost import Case, CostPlan

NONE = "none:hosts=8,host-hour=90,offered=12/s,good=9/s"
KVD = "kvd:hosts=8,host-hour=90,extra-hour=2,offered=12/s,good=11.5/s"


def run(*cases: str, more: tuple[str, ...] = ()) -> Result:
    return CliRunner().invoke(app, ["cost", *(word for case in cases for word in ("--case", case)), *more])


def answers(*cases: str) -> dict[str, object]:
    result = run(*cases, more=("--json",))
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)["ledgers"]["Cost of service"]["answers"]
    assert isinstance(found, dict)
    return found


def case(name: str, hosts: int, price: Fraction, extra: Fraction, good: Fraction) -> Case:
    return Case(
        name=name, hosts_count=hosts, host_price=price, extra_price=extra, offered_per_s=Fraction(100), good_per_s=good
    )  # fmt: skip


def test_a_good_request_costs_what_all_of_them_are_paid_for() -> None:
    """8 hosts at 90 are 720 an hour; 9/s are 32,400 good requests, whatever was offered."""
    found = answers(NONE, KVD)
    assert found["cheapest"] == "kvd"
    none, kvd = found["cases"]
    assert none["price_of_1000_good"] == pytest.approx(720_000 / 32_400)
    assert kvd["price_of_1000_good"] == pytest.approx(736_000 / 41_400)
    assert (none["good_share"], none["share_of_first"], none["extra_hour_at_draw"]) == (0.75, 1, None)
    assert kvd["share_of_first"] == pytest.approx((736 / 41_400) / (720 / 32_400))
    assert kvd["extra_hour_at_draw"] == 25
    told = run(NONE, KVD, more=("--limits", "TTFT 2 s", "--currency", "EUR")).stdout
    assert "Good requests cost least with kvd: ≈ 17.78 EUR for 1,000, 80 % of what none takes" in told
    assert "answered within TTFT 2 s" in told
    assert "none: extra-hour not given, counted as 0" in told


def test_rejected_requests_are_in_the_denominator() -> None:
    """Fails if only what was served counts: a host that turns half away would look as good as one that serves all."""
    half = "half:hosts=1,host-hour=1,offered=10/s,good=5/s"
    all_of_them = "all:hosts=1,host-hour=1,offered=10/s,good=10/s"
    found = answers(half, all_of_them)
    assert [one["good_share"] for one in found["cases"]] == [0.5, 1]
    assert found["cases"][1]["share_of_first"] == 0.5


def test_without_good_requests_there_is_no_cost() -> None:
    nothing = "nothing:hosts=1,host-hour=1,offered=10/s,good=0/s"
    found = answers(nothing, KVD)
    assert found["cheapest"] == "kvd"
    assert found["cases"][0]["price_of_1000_good"] is None
    assert found["cases"][1]["share_of_first"] is None
    assert found["cases"][1]["extra_hour_at_draw"] is None
    found = answers(KVD, nothing)
    assert found["cases"][1]["extra_hour_at_draw"] is None, "fails if nothing for nothing is called a draw"
    assert "and none is served by nothing" in run(nothing, KVD).stdout
    assert "No case answers any request within the limits" in run(nothing).stdout


@pytest.mark.parametrize("currency", ["share", "B", "ns", "x" * 33, "a\x1bb"])
def test_a_currency_is_no_unit_of_the_tables(currency: str) -> None:
    result = run(NONE, more=("--currency", currency))
    assert result.exit_code == 2
    assert "allowed: up to 32 characters that can be printed" in result.stderr


def test_other_loads_and_a_case_alone_are_told() -> None:
    other = KVD.replace("12/s", "20/s")
    assert "were offered different loads" in run(NONE, other).stdout
    assert "were offered different loads" not in run(NONE, KVD).stdout
    assert "Good requests cost ≈ 22.22 units for 1,000" in run(NONE).stdout


prices = st.fractions(0, 1000, max_denominator=100)
goods = st.fractions(Fraction(1, 100), 100, max_denominator=100)


@given(st.integers(1, 50), st.integers(1, 50), prices, prices, goods, goods)
def test_at_the_extra_of_a_draw_both_cost_the_same(
    hosts: int, others: int, price: Fraction, extra: Fraction, good: Fraction, better: Fraction
) -> None:
    first = case("first", hosts, price, extra, good)
    plan = CostPlan(cases=(first, case("second", others, price, extra, better)))
    draw = plan.extra_at_draw(plan.cases[1])
    assert draw is not None
    if draw >= 0:
        drawn = case("second", others, price, draw, better)
        assert drawn.price_of_shown == first.price_of_shown
    share = plan.share(plan.cases[1])
    assert share is None or (share < 1) == (plan.cases[1].extra_price < draw)


@pytest.mark.parametrize(
    ("cases", "says"),
    [
        ((NONE, NONE), "case 'none' is given twice"),
        (("none:hosts=8",), "without host-hour, offered, good"),
        ((NONE.replace("none", ""),), "without a name"),
        (("none",), "without hosts, host-hour, offered, good"),
        ((NONE + ",price=3",), "unknown part 'price=3'; allowed: hosts, host-hour, extra-hour, offered, good"),
        ((NONE + ",good=8/s",), "good is given twice"),
        ((NONE.replace("good=9/s", "good=13/s"),), "good = 13/s is more than offered = 12/s"),
        ((NONE.replace("good=9/s", "good=9"),), "--case none: good = '9': no unit"),
        ((NONE.replace("hosts=8", "hosts=0"),), "--case none: hosts = 0 is below 1"),
        ((NONE.replace("hosts=8", "hosts=x"),), "--case none: hosts = 'x'; allowed: a whole number"),
        ((NONE.replace("=90", "=90EUR"),), "host-hour = '90EUR': unknown unit 'EUR'; allowed: a number"),
        ((NONE.replace("=90", "="),), "host-hour = '' is not a quantity; allowed: one like 98.32"),
        ((NONE.replace("=90", "=-1"),), "host-hour = '-1' is below 0"),
        ((NONE.replace("12/s", "0/s").replace("9/s", "0/s"),), "offered = 0 must be greater than 0"),
        ((NONE.replace("none", "n\x1b"),), "allowed: 1 … 255 that can be printed"),
        ((NONE.replace("none", " "),), "allowed: 1 … 255 that can be printed"),
        ((NONE.replace("none", "n" * 256),), "allowed: 1 … 255"),
    ],
)  # fmt: skip
def test_a_cost_refuses(cases: tuple[str, ...], says: str) -> None:
    result = run(*cases)
    assert result.exit_code == 2, result.output
    assert says in " ".join(result.stderr.split())
    assert says in json.loads(run(*cases, more=("--json",)).stdout)["error"]["message"]
