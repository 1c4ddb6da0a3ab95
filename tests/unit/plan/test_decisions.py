"""Break-even, routing, Little's law and value per byte."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.errors import UsageError
from kvd.plan import breakeven, ledger
from kvd.plan.breakeven import (
    LoadCost,
    PrefillCost,
    break_even_tokens,
    fit_prefill,
    load_gain_ns,
    transfer_ns,
)
from kvd.plan.breakeven_ledger import BreakEvenLength, BreakEvenPlan
from kvd.plan.footprint import Footprint
from kvd.plan.queueing import InFlightPlan
from kvd.plan.routing import Candidate, RoutePlan
from kvd.plan.units import GIB
from kvd.plan.value import value_per_byte

MS = 1_000_000
LOAD = BreakEvenPlan(
    size_bytes=GIB,
    bandwidth_bytes_per_s=Fraction(20 * GIB),
    lookup_ns=2 * MS,
    h2d_ns=40 * MS,
    sync_ns=8 * MS,
    prefill_saved_ns=700 * MS,
)
COST = LoadCost(lookup_ns=2 * MS, load_bytes_per_s=20 * GIB, h2d_bytes_per_s=25 * GIB, sync_ns=8 * MS)
PREFILL = PrefillCost(fixed_ns=2 * MS, linear_ps_per_token=50 * MS, quadratic_fs_per_pair=8 * MS)


def test_break_even_of_the_source() -> None:
    assert LOAD.load_ns == 50 * MS
    assert LOAD.cost_ns == 100 * MS
    assert LOAD.worth_it
    assert LOAD.conclusion.startswith("Loading is worth it: it costs 100 ms and saves 700 ms")
    lost = replace(LOAD, prefill_saved_ns=60 * MS)
    assert not lost.worth_it
    assert lost.conclusion.startswith("Loading is not worth it: it costs 100 ms and saves 60 ms")


def test_live_form_agrees_with_the_ledger() -> None:
    assert breakeven.reuse_gain_ns(2 * MS, 98 * MS, 0, 0, 700 * MS) == LOAD.gain_ns == 600 * MS
    assert COST.critical_ns(GIB) == LOAD.load_critical_ns


def test_a_draw_is_not_worth_it_and_queues_count_by_their_difference() -> None:
    assert not replace(LOAD, prefill_saved_ns=100 * MS).worth_it
    assert replace(LOAD, queue_reuse_ns=700 * MS, queue_cold_ns=100 * MS).gain_ns == 0
    assert replace(LOAD, hidden_ns=98 * MS).cost_ns == 2 * MS


def test_bandwidth_for_a_draw_is_where_it_flips() -> None:
    least = LOAD.bandwidth_min_bytes_per_s
    assert least is not None
    assert not replace(LOAD, bandwidth_bytes_per_s=least).worth_it
    assert replace(LOAD, bandwidth_bytes_per_s=least * Fraction(1001, 1000)).worth_it
    assert replace(LOAD, prefill_saved_ns=40 * MS).bandwidth_min_bytes_per_s is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hidden_ns": 99 * MS}, "hidden = 99 ms is more than load, copy and sync"),
        ({"bandwidth_bytes_per_s": Fraction(0)}, "bandwidth = 0 must be greater"),
        ({"size_bytes": 0}, "bytes = 0 is below 1"),
        ({"lookup_ns": -1}, "lookup = -1 is below 0"),
        ({"queue_cold_ns": -1}, "--queue-cold = -1"),
    ],
)
def test_break_even_refuses(change: dict[str, int], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        replace(LOAD, **change)  # type: ignore[arg-type]


def test_time_saved_is_not_a_share_of_the_prefill() -> None:
    """Taking P/S of the full prefill would claim 3/4 of it; the suffix attends to the prefix, so less is saved."""
    full, saved = PREFILL.prefill_ns(32_768), PREFILL.saved_ns(32_768, 24_576)
    assert saved < full * 3 // 4
    assert saved == full - PREFILL.prefill_ns(8_192, 24_576)


def test_the_last_token_is_computed() -> None:
    with pytest.raises(UsageError, match="allowed: 0 … 99"):
        PREFILL.saved_ns(100, 100)
    assert PREFILL.saved_ns(100, 0) == 0
    assert PREFILL.prefill_ns(0, 50) == 0


def test_transfer_refuses_what_is_not_a_rate() -> None:
    assert transfer_ns(0, 1) == 0
    assert transfer_ns(1, 3) == 333_333_334
    for size, rate in ((1, 0), (1, -1), (-1, 1)):
        with pytest.raises(UsageError, match="a rate above 0"):
            transfer_ns(size, rate)
    with pytest.raises(UsageError, match="load rate = 0"):
        LoadCost(0, 0, None, 0)


def test_no_transfer_and_no_copy_cost_nothing() -> None:
    assert LoadCost(5, None, None, 7).critical_ns(GIB) == 7


def test_break_even_length() -> None:
    plan = BreakEvenLength(cost=COST, prefill=PREFILL, footprint=Footprint.by_hand(131_072))
    found = plan.tokens
    assert found is not None
    assert plan.saved_ns(found) > plan.cost_ns(found)
    assert plan.saved_ns(found - 1) <= plan.cost_ns(found - 1)
    assert json.loads(json.dumps(ledger.as_dict(plan)))["answers"]["break_even_tokens"] == found
    slow = BreakEvenLength(
        cost=replace(COST, load_bytes_per_s=1_000), prefill=PREFILL, footprint=Footprint.by_hand(131_072)
    )
    assert slow.tokens is None
    assert slow.conclusion.startswith("No prefix up to 1,048,576 tokens is worth loading")


costs = st.builds(
    LoadCost, st.integers(0, 10**8), st.integers(10**6, 10**12), st.none() | st.integers(10**6, 10**12),
    st.integers(0, 10**8),
)  # fmt: skip
prefills = st.builds(PrefillCost, st.integers(0, 10**8), st.integers(0, 10**9), st.integers(0, 10**8))


@given(costs, prefills, st.integers(1, 10**6), st.integers(1, 400))
def test_break_even_length_is_the_first_that_pays(
    cost: LoadCost, prefill: PrefillCost, per_token: int, tokens_max: int
) -> None:
    def pays(n: int) -> bool:
        return load_gain_ns(cost, prefill, n + 1, n, n * per_token) > 0

    # Times are rounded to whole ns, so that a crossing can flicker by a token; the answer pays, its
    # predecessor does not, and "none" means that the longest does not.
    found = break_even_tokens(cost, prefill, Footprint.by_hand(per_token), tokens_max)
    if found is None:
        assert not pays(tokens_max)
    else:
        assert pays(found)
        assert found == 1 or not pays(found - 1)


@given(costs, st.integers(0, 10**12), st.integers(1, 10**9))
def test_more_bandwidth_never_makes_a_load_slower(cost: LoadCost, size: int, more: int) -> None:
    assert cost.load_bytes_per_s is not None
    faster = replace(cost, load_bytes_per_s=cost.load_bytes_per_s + more)
    assert faster.critical_ns(size) <= cost.critical_ns(size)
    assert cost.critical_ns(size + more) >= cost.critical_ns(size)


@given(prefills, st.integers(1, 10**6), st.data())
def test_a_longer_prefix_never_saves_less(prefill: PrefillCost, prompt: int, data: st.DataObject) -> None:
    short = data.draw(st.integers(0, prompt - 1))
    long = data.draw(st.integers(short, prompt - 1))
    assert -2 <= prefill.saved_ns(prompt, short) <= prefill.saved_ns(prompt, long) + 2


@given(st.integers(0, 10**8), st.integers(10**6, 10**9), st.integers(10**4, 10**8))
def test_fit_finds_the_cost_that_made_the_samples(fixed: int, linear: int, quadratic: int) -> None:
    true = PrefillCost(fixed, linear, quadratic)
    lengths = (128, 1_024, 8_192, 32_768)
    found = fit_prefill([(n, true.prefill_ns(n)) for n in lengths])
    for n in (512, 4_096, 16_384):
        assert found.prefill_ns(n) == pytest.approx(true.prefill_ns(n), rel=1e-3)


def test_fit_leaves_out_parts_that_would_be_negative() -> None:
    """Time that grows slower than the length has no quadratic part; a negative one would save less than nothing."""
    found = fit_prefill([(1_000, 100 * MS), (10_000, 900 * MS)])
    assert found.quadratic_fs_per_pair == 0
    assert found.linear_ps_per_token > 0
    flat = fit_prefill([(10, 100 * MS), (100, 99 * MS), (1000, 98 * MS)])
    assert (flat.linear_ps_per_token, flat.quadratic_fs_per_pair) == (0, 0)
    assert flat.fixed_ns == pytest.approx(99 * MS, rel=0.01)


@pytest.mark.parametrize("samples", [[], [(8_192, 700 * MS)], [(8_192, 700 * MS), (8_192, 710 * MS)]])
def test_one_length_is_not_enough_to_fit(samples: list[tuple[int, int]]) -> None:
    with pytest.raises(UsageError, match="allowed: 2 or more"):
        fit_prefill(samples)


WARM = Candidate("warm", queue_ns=800 * MS, lookup_load_ns=100 * MS)
COLD = Candidate("cold", queue_ns=10 * MS, prefill_ns=300 * MS)


def test_a_long_queue_loses_to_computing_again() -> None:
    plan = RoutePlan(candidates=(WARM, COLD))
    assert plan.chosen is COLD
    assert (COLD.total_ns, WARM.total_ns) == (310 * MS, 900 * MS)
    assert plan.conclusion.startswith("Send it to cold: 310 ms to the first token (next: warm with 900 ms)")


def test_even_the_session_does_not_save_a_host_far_slower() -> None:
    home = replace(WARM, session=True)
    assert RoutePlan(candidates=(home, COLD), session_margin_ns=20 * MS).chosen is COLD


@pytest.mark.parametrize(("margin_ms", "chosen"), [(39, "a"), (40, "home"), (41, "home")])
def test_the_session_host_is_preferred_within_its_margin(margin_ms: int, chosen: str) -> None:
    hosts = (Candidate("a", queue_ns=100 * MS), Candidate("home", queue_ns=140 * MS, session=True))
    plan = RoutePlan(candidates=hosts, session_margin_ns=margin_ms * MS)
    assert plan.chosen is not None
    assert plan.chosen.host == chosen
    assert ("holds the session" in plan.conclusion) == (chosen == "home")


def test_at_equal_times_the_session_host_wins() -> None:
    hosts = (
        Candidate("a", queue_ns=MS),
        Candidate("b", queue_ns=MS, session=True),
        Candidate("c", queue_ns=MS),
    )
    assert [c.host for c in RoutePlan(candidates=hosts).ranking] == ["b", "a", "c"]


def test_the_itl_limit_is_respected() -> None:
    """Without the limit `cold` wins by far; over it, or of unknown ITL, no time makes up for it."""
    fast = replace(COLD, itl_ns=60 * MS)
    slow = replace(WARM, itl_ns=20 * MS)
    plan = RoutePlan(candidates=(fast, slow, Candidate("new")), itl_limit_ns=50 * MS)
    assert plan.chosen is slow
    assert plan.refusal(fast) == "ITL 60 ms > limit 50 ms"
    assert plan.refusal(plan.candidates[2]) == "its ITL is not known"
    none = RoutePlan(candidates=(fast,), itl_limit_ns=50 * MS)
    assert none.chosen is None
    assert none.conclusion.startswith("No host can take the request within the ITL limit")
    session = RoutePlan(candidates=(replace(fast, session=True), slow), itl_limit_ns=50 * MS)
    assert session.chosen is slow


@pytest.mark.parametrize(
    ("candidates", "says"),
    [
        ((), "number of --host = 0 is below 1"),
        ((COLD, COLD), "'cold' is given twice"),
        ((replace(COLD, session=True), replace(WARM, session=True)), "cold, warm all hold the session"),
    ],
)
def test_routing_refuses(candidates: tuple[Candidate, ...], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        RoutePlan(candidates=candidates)


def test_a_candidate_refuses_negative_times_and_no_name() -> None:
    with pytest.raises(UsageError, match="warm: queue = -1 is below 0"):
        replace(WARM, queue_ns=-1)
    with pytest.raises(UsageError, match="allowed: 1 … 255"):
        Candidate("")


times = st.integers(0, 10**10)
hosts = st.lists(
    st.tuples(times, times, times, times, st.none() | times), min_size=1, max_size=6
).map(lambda rows: tuple(Candidate(f"h{n}", *row) for n, row in enumerate(rows)))  # fmt: skip


@given(hosts, st.none() | st.integers(1, 10**10), st.integers(0, 10**9), st.data())
def test_the_choice_is_never_worse_than_the_margin(
    candidates: tuple[Candidate, ...], limit: int | None, margin: int, data: st.DataObject
) -> None:
    home = data.draw(st.integers(0, len(candidates) - 1))
    marked = tuple(replace(c, session=n == home) for n, c in enumerate(candidates))
    plan = RoutePlan(candidates=marked, itl_limit_ns=limit, session_margin_ns=margin)
    fit = [c for c in marked if limit is None or (c.itl_ns is not None and c.itl_ns <= limit)]
    if not fit:
        assert plan.chosen is None
        return
    best = min(c.total_ns for c in fit)
    assert plan.chosen in fit
    assert plan.chosen.total_ns <= best + (margin if plan.chosen.session else 0)


def test_littles_law() -> None:
    plan = InFlightPlan(
        arrivals_per_s=Fraction(150), time_in_system_ns=50 * MS, capacity_per_s=Fraction(151), bytes_each=GIB
    )
    assert plan.in_flight_mean == Fraction(15, 2)
    assert plan.bytes_in_flight_mean == Fraction(15, 2) * GIB
    assert "7.5 requests are in flight on average, 7.5 GiB of buffers" in plan.conclusion
    assert ledger.as_dict(plan)["assumptions"]


@pytest.mark.parametrize("arrivals", [151, 152, 10**6])
def test_littles_law_is_refused_for_an_overloaded_system(arrivals: int) -> None:
    with pytest.raises(UsageError, match="queue grows without end") as caught:
        InFlightPlan(arrivals_per_s=Fraction(arrivals), time_in_system_ns=MS, capacity_per_s=Fraction(151))
    assert caught.value.code == "KVD-USAGE-OVERLOADED"


def test_value_per_byte() -> None:
    assert (
        value_per_byte(100, 2.0, 700.0, read_per_reuse_ns=100.0, write_ns=150.0, replication_ns=50.0) == 10.0
    )
    assert value_per_byte(100, 0.0, 700.0, write_ns=100.0) == -1.0


@pytest.mark.parametrize(
    "arguments",
    [
        (0, 1.0, 1.0), (-1, 1.0, 1.0), (1, -1.0, 1.0), (1, 1.0, -1.0), (1, float("nan"), 1.0),
        (1, 1.0, float("nan")), (1, float("inf"), 1.0), (1, 1.0, 1.0, float("inf")), (1, 1.0, 1.0, 0.0, -1.0),
        (1, 1.0, 1.0, 0.0, float("nan")), (1, 1.0, 1.0, 0.0, 0.0, float("inf")),
    ],
)  # fmt: skip
def test_value_per_byte_refuses(arguments: tuple[int, float, float]) -> None:
    with pytest.raises(UsageError, match="allowed"):
        value_per_byte(*arguments)


@given(st.integers(1, 10**12), st.floats(0, 1e6), st.floats(0, 1e12), st.floats(0, 1e12), st.floats(0, 1e6))
def test_value_falls_with_cost_and_rises_with_reuse(
    size: int, reuses: float, saved: float, read: float, more: float
) -> None:
    read = min(read, saved)
    base = value_per_byte(size, reuses, saved, read)
    assert value_per_byte(size, reuses + more, saved, read) >= base - 1e-9 * reuses * saved / size
    assert value_per_byte(size, reuses, saved, read, write_ns=more) <= base
    assert value_per_byte(size, reuses, saved, read, replication_ns=more) <= base
