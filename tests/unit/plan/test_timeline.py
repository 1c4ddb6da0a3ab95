"""A load beside compute: the closed form against the pipeline said plainly, what it tells, what it refuses."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from kvd.errors import UsageError
from kvd.kvctl.plan import app
from kvd.plan.timeline import TimelinePlan
from kvd.plan.units import GIB

MS = 1_000_000
PLAN = TimelinePlan(
    size_bytes=GIB, bandwidth_bytes_per_s=Fraction(20 * GIB), layers_count=32, suffix_ns=60 * MS, lookup_ns=2 * MS,
    copy_ns=40 * MS, sync_ns=8 * MS,
)  # fmt: skip
LINE = "timeline --bytes 1GiB --bandwidth 20GiB/s --suffix-prefill 60ms"


def run(line: str, *more: str) -> Result:
    return CliRunner().invoke(app, [*line.split(), *more])


def test_one_piece_overlaps_with_nothing() -> None:
    plan = replace(PLAN, layers_count=1)
    assert plan.first_token_ns == plan.in_turn_ns == 160 * MS
    assert plan.hidden_ns == 0
    assert "nothing overlaps: the load is one piece" in plan.assumptions


def test_layers_hide_all_but_the_slowest_stage() -> None:
    """50 ms of load, 40 of copy and 60 of compute, each in 32 parts: 150/32 once, then 31 times 60/32."""
    assert PLAN.slowest == ("suffix", 60 * MS)
    assert PLAN.first_token_ns == (10 + Fraction(150, 32) + 31 * Fraction(60, 32)) * MS
    assert PLAN.hidden_ns == int((150 - 60) * Fraction(31, 32) * MS)
    assert PLAN.exposed_ns == PLAN.first_token_ns - 60 * MS


@pytest.mark.parametrize("slow", ["load", "copy", "suffix"])
def test_the_slowest_stage_says_how_long_it_takes(slow: str) -> None:
    """Fails if the pipeline waits for another stage than the slowest."""
    times = {"load": 1, "copy": 1, "suffix": 1, slow: 10}
    plan = replace(
        PLAN, size_bytes=times["load"] * 1000, bandwidth_bytes_per_s=Fraction(10**9), copy_ns=times["copy"] * 1000,
        suffix_ns=times["suffix"] * 1000, layers_count=10, lookup_ns=0, sync_ns=0,
    )  # fmt: skip
    assert plan.first_token_ns == 1200 + 9 * 1000


times = st.integers(0, 10**9)


@given(st.integers(1, 10**9), times, times, times, times, st.integers(1, 40))
def test_the_stages_end_when_the_sum_says(
    load: int, copy: int, suffix: int, lookup: int, sync: int, layers: int
) -> None:
    plan = TimelinePlan(
        size_bytes=load, bandwidth_bytes_per_s=Fraction(10**9), layers_count=layers, suffix_ns=suffix, lookup_ns=lookup,
        copy_ns=copy, sync_ns=sync,
    )  # fmt: skip
    assert plan.stages[-1].end_ns == plan.first_token_ns
    assert plan.first_token_ns <= plan.in_turn_ns
    assert 0 <= plan.in_turn_ns - plan.first_token_ns - plan.hidden_ns < 1
    assert plan.exposed_ns >= lookup + sync
    took = {"lookup": lookup, "sync": sync, "load": load, "copy to GPU": copy, "suffix": suffix}
    assert {one.name: one.busy_ns for one in plan.stages} == {name: ns for name, ns in took.items() if ns}
    piped = [one.spans for one in plan.stages if one.name not in ("lookup", "sync")]
    for before, after in itertools.pairwise(piped):
        assert len(before) == len(after) == layers
        for n, (begin, _) in enumerate(after):
            assert begin == max(before[n][1], after[n - 1][1] if n else Fraction(0))


def test_what_is_hidden_is_what_a_break_even_takes() -> None:
    """The two commands agree: cost of reuse with --hidden is the first token less the suffix."""
    parts = "--bytes 1GiB --bandwidth 20GiB/s --lookup 2ms --h2d 40ms --sync 8ms"
    result = run(f"timeline {parts} --layers 32 --suffix-prefill 60ms", "--json")
    found = json.loads(result.stdout)["ledgers"]["Timeline"]["answers"]
    result = run(f"breakeven {parts} --hidden {found['hidden_ns']}ns --prefill-saved 700ms", "--json")
    told = json.loads(result.stdout)["ledgers"]["Break-even"]["answers"]
    assert told["cost_ns"] == found["in_turn_ns"] - found["hidden_ns"] - 60 * MS
    assert [one["stage"] for one in found["stages"]] == ["lookup", "sync", "load", "copy to GPU", "suffix"]


def test_the_timeline_is_drawn_for_a_person() -> None:
    told = run(f"{LINE} --lookup 2ms --layers 4 --prefill-saved 700ms").stdout
    lines = told.splitlines()
    load = next(line for line in lines if line.startswith(" load "))
    suffix = next(line for line in lines if line.startswith(" suffix "))
    assert load.index("█") < suffix.index("█") < load.rindex("█") < suffix.rindex("█")
    assert "▸ until 760 ms" in told
    assert "copy to GPU, sync not given, counted as 0" in told
    assert "against 760 ms if all is computed" in told
    assert all(len(line) <= 80 for line in lines[:6])
    late = run(f"{LINE} --prefill-saved 1ms").stdout
    assert "later than 61 ms if all is computed" in late


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("--layers 0", "--layers = 0 is below 1"),
        ("--layers 5000", "--layers = 5000 is above 4,096"),
        ("--h2d 4", "--h2d = '4': no unit"),
        ("--sync -1ms", "--sync = '-1ms' is below 0"),
        ("--bandwidth 0B/s", "--bandwidth = 0 must be greater than 0"),
        ("--bytes 0", "--bytes = 0 is below 1"),
        ("--plot x.jpg", "allowed: a file name that ends in .png"),
    ],
)
def test_a_timeline_refuses(more: str, says: str) -> None:
    found = run(f"{LINE} {more}")
    assert found.exit_code == 2, found.output
    assert says in " ".join(found.stderr.split())


def test_a_timeline_refuses_a_negative_suffix() -> None:
    with pytest.raises(UsageError, match="--suffix-prefill = -1 is below 0"):
        replace(PLAN, suffix_ns=-1)
