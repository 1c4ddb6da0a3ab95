"""What the plans tell: results with the numbers they come from, what was not given, what was measured, what is out."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.errors import UsageError
from kvd.kvctl.plan_load import _costs, _length
from kvd.kvctl.plan_measure import Measured
from kvd.plan import ledger
from kvd.plan.breakeven import LoadCost, PrefillCost
from kvd.plan.breakeven_ledger import BreakEvenLength, BreakEvenPlan, PrefillFit
from kvd.plan.chunk import RecordedRequest, SweepSetup, sweep
from kvd.plan.footprint import Footprint, KeptGroup, PrefixRead
from kvd.plan.ledger import Step
from kvd.plan.network import NetworkPlan
from kvd.plan.objects import ObjectsPlan
from kvd.plan.queueing import OverloadedPlan
from kvd.plan.routing import Candidate, RoutePlan
from kvd.plan.units import GIB, format_ns, format_sum, parse_bandwidth

MS = 1_000_000
PLAN = BreakEvenPlan(
    size_bytes=GIB, bandwidth_bytes_per_s=Fraction(20 * GIB), lookup_ns=2 * MS, h2d_ns=40 * MS, sync_ns=8 * MS,
    prefill_saved_ns=700 * MS,
)  # fmt: skip
SAMPLES = ((1_024, 60 * MS), (8_192, 700 * MS), (32_768, 6_000 * MS))
RATES = Measured(chunks=32, lookup_ns=64_000, load_bytes_per_s=GIB, copy_bytes_per_s=2 * GIB)


def how(plan: ledger.Ledger, label: str) -> str:
    return next(step.expression for step in plan.steps if step.label == label)


def assumed(plan: ledger.Ledger) -> str:
    return "\n".join(plan.assumptions)


def test_a_conclusion_from_given_numbers_says_nothing_of_measuring() -> None:
    assert "measure" not in PLAN.conclusion
    measured = replace(PLAN, measured=("bandwidth", "copy"))
    assert "(bandwidth, copy measured just now)" in measured.conclusion
    assert "while others run" in assumed(PLAN)
    assert "while others run" not in assumed(measured)
    assert "one thread" in assumed(measured)


def test_the_draw_names_every_part_of_what_it_takes_off() -> None:
    assert how(PLAN, "all but the load") == "lookup 2 ms + copy to GPU 40 ms + sync 8 ms + queue 0 s"
    assert how(PLAN, "bandwidth for a draw") == "1 GiB ÷ (700 ms - 50 ms)"
    hidden = replace(PLAN, hidden_ns=98 * MS, prefill_saved_ns=52 * MS)
    assert how(hidden, "bandwidth for a draw") == "1 GiB ÷ (52 ms + 48 ms)"
    assert hidden.bandwidth_min_bytes_per_s == Fraction(GIB * 10**9, 100 * MS)
    early = replace(PLAN, queue_cold_ns=3 * MS)
    assert how(early, "cost of reuse").endswith("critical 98 ms - 3 ms less queue")


def test_hiding_more_than_there_is_left_wins_no_bandwidth() -> None:
    """Lookup alone takes longer than the prefill saved: no rate makes that a draw, however much is hidden."""
    plan = replace(PLAN, lookup_ns=100 * MS, hidden_ns=98 * MS, prefill_saved_ns=90 * MS)
    assert plan.bandwidth_min_bytes_per_s is None


@given(
    st.integers(0, 10**9), st.integers(0, 10**9), st.integers(0, 10**9), st.integers(0, 10**9),
    st.integers(0, 10**9), st.integers(0, 10**9),
)  # fmt: skip
def test_at_the_bandwidth_for_a_draw_nothing_is_won(
    lookup: int, h2d: int, sync: int, queue: int, cold: int, saved: int
) -> None:
    plan = replace(
        PLAN, lookup_ns=lookup, h2d_ns=h2d, sync_ns=sync, queue_reuse_ns=queue, queue_cold_ns=cold,
        prefill_saved_ns=saved,
    )  # fmt: skip
    least = plan.bandwidth_min_bytes_per_s
    if least is None:
        assert not plan.worth_it
    elif least < 1 << 59:
        assert replace(plan, bandwidth_bytes_per_s=least).gain_ns == 0


def test_a_fitted_prefill_is_shown_with_its_numbers() -> None:
    fit = PrefillFit(samples=SAMPLES)
    saved = fit.cost.saved_ns(8_193, 8_192)
    plan = replace(PLAN, prefill=fit.cost, prefix_tokens=8_192, prefill_saved_ns=saved)
    full, suffix = fit.cost.prefill_ns(8_193), fit.cost.prefill_ns(1, 8_192)
    values = {step.label: step.value for step in plan.steps}
    assert (values["full prefill"], values["prefill of the suffix"]) == (full, suffix)
    assert values["prefill saved"] == full - suffix == saved
    assert "8,193² ÷ 2" in how(plan, "full prefill")
    assert how(plan, "prefill saved") == f"{format_ns(full)} - {format_ns(suffix)}".replace("≈ ", "≈")
    assert [step.value for step in fit.steps[3:]] == [fit.cost.prefill_ns(n) for n, _ in SAMPLES]
    assert "measured 700 ms" in how(fit, "fit at 8,192")
    assert "meets every sample to 0.01 %" in fit.conclusion
    rough = PrefillFit(samples=((1_000, 100 * MS), (2_000, 150 * MS)))
    assert rough.error_max_share > Fraction(1, 100)
    assert "off at a sample" in rough.conclusion
    assert "two lengths cannot tell a fixed part" in assumed(rough)


def length(**change: object) -> BreakEvenLength:
    plan = BreakEvenLength(
        cost=LoadCost(2 * MS, 2 * GIB, 25 * GIB, 8 * MS), prefill=PrefillFit(samples=SAMPLES).cost,
        footprint=Footprint.by_hand(131_072), sampled=(1_024, 32_768),
    )  # fmt: skip
    return replace(plan, **change)  # type: ignore[arg-type]


def test_the_length_table_adds_up() -> None:
    plan = length(chunk_tokens=256, queue_delta_ns=MS)
    found = plan.tokens
    assert found is not None
    assert found % 256 == 0
    values = {step.label: step.value for step in plan.steps}
    assert values["cost of reuse"] == 2 * MS + values["load"] + values["copy to GPU"] + 8 * MS + MS
    assert values["cost of reuse"] == plan.cost_ns(found)
    assert how(plan, "cost of reuse").startswith("lookup 2 ms + load ")
    assert "sync 8 ms + queue 1 ms" in how(plan, "cost of reuse")
    assert f"({found // 256} chunks)" in plan.conclusion
    assert "whole chunks of 256 tokens" in assumed(plan)


def test_extrapolation_is_told_below_and_above_the_samples() -> None:
    cheap = LoadCost(0, 2 * GIB, None, 0)
    assert length(cost=cheap).conclusion.startswith("Prefixes below") or length(cost=cheap).tokens == 1
    low = length(cost=LoadCost(5 * MS, 200 * GIB, None, 0))
    assert low.tokens is not None
    assert low.tokens < 1_024
    assert "below the sampled 1,024 … 32,768 tokens" in low.conclusion
    within = length()
    assert within.tokens is not None
    assert ("within the sampled" in within.conclusion) == (within.tokens >= 1_024)
    never = length(cost=LoadCost(0, 1_000, None, 0))
    assert "above the sampled 1,024 … 32,768 tokens" in never.conclusion
    one = length(cost=LoadCost(0, 200 * GIB, None, 0))
    assert one.conclusion.startswith("Every prefix is worth loading, from 1 token on")
    chunk = length(cost=LoadCost(0, 200 * GIB, None, 0), chunk_tokens=256)
    assert chunk.conclusion.startswith("Every prefix is worth loading, from 256 tokens on")
    with pytest.raises(UsageError, match="--chunk-tokens = 4096 is above"):
        length(tokens_max=1_024, chunk_tokens=4_096)


def test_what_the_length_leaves_out_is_told() -> None:
    fit = PrefillFit(samples=SAMPLES)
    plan = replace(PLAN, hidden_ns=5 * MS, queue_cold_ns=3 * MS)
    found = _length(plan, fit, Footprint.by_hand(131_072), 1)
    told = assumed(found)
    assert "the copy was given for 1 GiB in 40 ms" in told
    assert "the 5 ms hidden above are not counted" in told
    assert "reuse waits 3 ms less is not counted" in told
    assert "load and copy grow with the bytes" in told
    assert found.queue_delta_ns == 0


def test_parts_not_given_are_named_and_measured_ones_are_not() -> None:
    typed = _costs(None, GIB, None, "20GiB/s", {"lookup": "2ms"})
    assert typed["not_given"] == ("copy to GPU", "sync", "queue waits")
    assert typed["measured"] == ()
    asked = _costs(RATES, GIB, None, None, {"h2d": None, "sync": "8ms", "queue_reuse": "1ms"})
    assert asked["measured"] == ("bandwidth", "lookup", "copy")
    assert asked["not_given"] == ()
    plan = BreakEvenPlan(size_bytes=GIB, prefill_saved_ns=MS, **asked)
    assert "copy into blocks 500 ms" in how(plan, "on the critical path")
    assert "not one to a GPU" in assumed(plan)
    assert "copy to GPU, sync, queue waits not given, counted as 0" in assumed(
        BreakEvenPlan(size_bytes=GIB, prefill_saved_ns=MS, **typed)
    )


@pytest.mark.parametrize(
    ("tokens", "chunk", "expected"), [(8_192, 256, 64_000), (2_048, 256, 16_000), (8_192, 1, 64_000)]
)
def test_a_measured_lookup_is_scaled_to_the_chunks_of_the_prefix(
    tokens: int, chunk: int, expected: int
) -> None:
    read = PrefixRead(footprint=Footprint.by_hand(131_072), tokens=tokens, chunk_tokens=chunk)
    found = _costs(RATES, read.size_bytes, read, None, {})
    assert found["lookup_ns"] == expected
    assert ("in proportion" in found["notes"][0]) == (chunk > 1)


def test_measured_rates_are_told_in_the_units_of_the_table() -> None:
    assert RATES.said == (
        "32 chunks looked up and leased in 64 us, loaded at 1 GiB/s, copied into blocks of host memory at 2 GiB/s"
    )


def test_the_read_of_a_model_is_part_of_the_table() -> None:
    kept = Footprint((
        KeptGroup(name="full", token_bytes=81_920),
        KeptGroup(name="window 1024", token_bytes=425_984, last_tokens=1_023),
    ))  # fmt: skip
    read = PrefixRead(footprint=kept, tokens=8_192, chunk_tokens=256)
    plan = replace(PLAN, size_bytes=read.size_bytes, read=read)
    assert how(plan, "read, window 1024") == "last 4 chunks × 256 tokens × 425,984 B"
    assert "of a window only the last are read (window 1024: 1,023 tokens)" in assumed(plan)


def test_routing_tells_totals_itl_and_what_was_not_given() -> None:
    warm = Candidate("warm", queue_ns=800 * MS, itl_ns=20 * MS, session=True, not_given=("lookup", "load"))
    cold = Candidate("cold", queue_ns=10 * MS, itl_ns=60 * MS)
    plan = RoutePlan(candidates=(warm, cold), itl_limit_ns=50 * MS)
    data = json.loads(json.dumps(ledger.as_dict(plan)))
    assert data["answers"]["ranking"] == ["warm"]
    assert [host["total_ns"] for host in data["answers"]["hosts"]] == [800 * MS, 10 * MS]
    assert [host["itl_ns"] for host in data["answers"]["hosts"]] == [20 * MS, 60 * MS]
    assert data["inputs"]["candidates"][0]["queue_ns"] == 800 * MS
    assert "warm: lookup, load not given, counted as 0" in plan.assumptions
    assert how(plan, "warm (session)").endswith("; ITL 20 ms")
    assert "no host holds the session" in assumed(RoutePlan(candidates=(cold,)))


NETWORK = NetworkPlan(
    requests_per_s=Fraction(200), hit_share=Fraction(3, 4), bytes_per_hit=GIB,
    link_bytes_per_s=parse_bandwidth("400Gbit"), efficiency=Fraction(13, 20),
    stores_per_s=Fraction(50), replicas_count=2, hosts_count=8, hot_share=Fraction(3, 10),
)  # fmt: skip


def test_the_cells_of_the_matrix_and_the_busiest_direction_are_derived() -> None:
    steps = {step.label: step for step in NETWORK.steps}
    assert steps["host0 to each other"].value == NETWORK.matrix.bytes_per_s[0][1]
    assert steps["host0 to each other"].expression == (
        "150 GiB/s × 30 % owned ÷ 7 others + 100 GiB/s ÷ 8 hosts ÷ 7 others"
    )
    assert steps["any other to each"].value == NETWORK.matrix.bytes_per_s[1][0]
    assert "host0 sends 7 × ≈8.21 GiB/s" in steps["busiest direction"].expression
    even = replace(NETWORK, hot_share=None)
    assert how(even, "a host to each other").startswith("150 GiB/s ÷ 8 owners ÷ 7 others")
    cool = replace(NETWORK, hot_share=Fraction(0))
    assert how(cool, "busiest direction").startswith("host1 sends 7 ×")
    assert how(replace(NETWORK, hosts_count=None, hot_share=None), "busiest direction").startswith(
        "the larger of 150"
    )


@given(st.integers(2, 9), st.fractions(0, 1, max_denominator=20), st.fractions(0, 1, max_denominator=20))
def test_no_host_receives_more_than_the_busiest_sends(hosts: int, hot: Fraction, local: Fraction) -> None:
    matrix = replace(NETWORK, hosts_count=hosts, hot_share=hot, local_share=local).matrix
    assert matrix.busiest_bytes_per_s == max(matrix.egress_bytes_per_s)


def test_nothing_to_carry_needs_no_link() -> None:
    quiet = replace(NETWORK, requests_per_s=Fraction(0), stores_per_s=Fraction(0))
    assert quiet.conclusion.startswith("Nothing crosses the network")
    assert "meets the bound" in replace(quiet, links_count=1).conclusion


def test_overload_is_an_answer() -> None:
    plan = OverloadedPlan(
        arrivals_per_s=Fraction(150), capacity_per_s=Fraction(30), capacity_from="150/s ÷ 500 %"
    )
    assert plan.answers["in_flight_mean"] is None
    assert plan.answers["utilisation_share"] == 5
    assert [step.label for step in plan.steps] == ["capacity", "utilisation"]
    assert "the queue grows without end" in plan.conclusion


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (1, "hosts", "1 host"),
        (1, "families", "1 family"),
        (2, "tokens", "2 tokens"),
        (1, "B", "1 B"),
        (0, "links", "0 links"),
    ],
)
def test_one_of_a_thing_is_told_as_one(value: int, unit: str, text: str) -> None:
    assert Step("x", "", value, unit).text == text


def test_a_sweep_tells_its_room_and_the_numbers_of_its_cpu_time() -> None:
    setup = SweepSetup(footprint=Footprint.by_hand(10, 2), trace_block_tokens=64)
    found = sweep([RecordedRequest(n, 256, 1, (1, 2, 3, 4)) for n in range(2)], [64], setup)
    assert found.assumptions[0].startswith("one cache without limit: ")
    limited = replace(found, setup=replace(setup, capacity_bytes=1 << 30))
    assert limited.assumptions[0].startswith("one cache of 1 GiB: ")
    assert how(found, "metadata CPU") == (
        "5 chunks looked up × 67 ns + 4 leased × 94 ns + 8 objects stored × 4 us"
    )
    values = {step.label: step.value for step in found.steps}
    assert values["metadata CPU"] == 5 * 67 + 4 * 94 + 8 * 4_000
    assert how(found, "load, P50").startswith("of 1 load, each its objects × 10 us + its bytes ÷ 20 GiB/s")
    assert how(found, "read, mean") == "2.5 KiB in the 1 ms of the trace"
    measured = replace(found.rows[0], cache_cpu_ns=5_000)
    assert "5 us measured in the core (8 objects stored)" in how(
        replace(found, rows=(measured,)), "metadata CPU"
    )
    assert "rows" not in ledger.inputs(found)


def test_cut_numbers_are_marked_in_sums_as_in_results() -> None:
    step = Step("x", "≈ 1.5 GiB ÷ ≈ 3 s", 1, "B")
    assert step.expression == step.as_dict()["expression"] == "≈1.5 GiB ÷ ≈3 s"
    assert format_sum(5, -3, str) == "5 + 3"


def test_json_has_the_inputs() -> None:
    count = ObjectsPlan(
        prefixes_count=1, prefix_tokens=256, footprint=Footprint.by_hand(16, 2), chunk_tokens=256
    )
    data = json.loads(json.dumps(ledger.as_dict(count)))
    assert data["inputs"]["prefix_tokens"] == 256
    assert data["inputs"]["footprint"]["groups"][0]["token_bytes"] == 16
    assert count.conclusion.startswith("2 objects take")
    assert ledger.plain(Fraction(1, 2)) == 0.5
    assert ledger.plain({"a": (Fraction(2), None)}) == {"a": [2, None]}
    assert ledger.inputs(3) == {}


def test_a_prefill_cost_shows_what_is_fixed() -> None:
    plan = length(prefill=PrefillCost(2 * MS, 50 * MS, 8 * MS))
    assert "the fixed 2 ms are not saved" in assumed(plan)
