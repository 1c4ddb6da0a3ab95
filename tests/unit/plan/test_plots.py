"""What the pictures show: units of the axis in every text, nothing cut off, no point on the frame, plain numbers."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from kvd.errors import UsageError
from kvd.kvctl import plan_plots
from kvd.plan.breakeven import LoadCost
from kvd.plan.breakeven_ledger import BreakEvenLength, BreakEvenPlan, PrefillFit
from kvd.plan.capacity import CapacityPlan
from kvd.plan.chunk import RecordedRequest, SweepSetup, sweep
from kvd.plan.cost import Case, CostPlan
from kvd.plan.footprint import Footprint, KeptGroup, PrefixRead
from kvd.plan.network import NetworkPlan
from kvd.plan.objects import ObjectsPlan
from kvd.plan.routing import Candidate, RoutePlan
from kvd.plan.timeline import TimelinePlan
from kvd.plan.units import GIB, TIB

pytest.importorskip("matplotlib")
from matplotlib.colors import to_rgba

US, MS = 1_000, 1_000_000
NOWHERE = Path("unused.png")
FIT = PrefillFit(samples=((1_024, 60 * MS), (8_192, 700 * MS), (32_768, 6_000 * MS)))


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Figures that were drawn, laid out."""
    figures: list[Any] = []

    def keep(figure: Any, path: Path) -> None:
        figure.canvas.draw()
        figures.append(figure)

    monkeypatch.setattr(plan_plots, "_save", keep)
    return figures


def labels(axis: Any) -> list[str]:
    return [tick.get_text() for tick in axis.get_ticklabels() if tick.get_text()]


def inside(figure: Any, artist: Any) -> bool:
    box = artist.get_window_extent()
    width, height = figure.canvas.get_width_height()
    return bool(box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["warm", "gpu-host-017.cluster-b.eu-central-1.example.internal", "h" * 255, "a$b$c"]
)
def test_a_host_of_any_name_leaves_the_bars_their_room(name: str, drawn: list[Any]) -> None:
    hosts = (
        Candidate(name, queue_ns=800 * US, lookup_load_ns=98 * US, session=True),
        Candidate("cold", prefill_ns=310 * US),
    )
    plan_plots.draw_route(RoutePlan(candidates=hosts), NOWHERE)
    (figure,) = drawn
    (axis,) = figure.axes
    assert axis.get_xlabel() == "estimated us to the first token"
    assert any("898 us" in text.get_text() for text in axis.texts)
    assert axis.get_window_extent().width > 0.9 * figure.canvas.get_width_height()[0]
    assert all(inside(figure, one) for one in (*axis.texts, *figure.legends))
    assert all(text.get_bbox_patch() is not None for text in axis.texts), "no grid line through a text"


@pytest.mark.slow
def test_times_above_a_thousand_have_a_unit_that_needs_no_comma(drawn: list[Any]) -> None:
    plan_plots.draw_route(
        RoutePlan(candidates=(Candidate("a", queue_ns=1_500 * MS), Candidate("b"))), NOWHERE
    )
    assert drawn[0].axes[0].get_xlabel() == "estimated s to the first token"


def draw_lengths(bytes_per_s: int, lookup_ns: int) -> int | None:
    """The break-even picture of 8,192 tokens; the crossing in it."""
    kept = Footprint.by_hand(131_072)
    plan = BreakEvenPlan(
        size_bytes=GIB, bandwidth_bytes_per_s=Fraction(bytes_per_s), lookup_ns=lookup_ns, h2d_ns=0, sync_ns=0,
        prefill_saved_ns=700 * MS, read=PrefixRead(footprint=kept, tokens=8_192),
    )  # fmt: skip
    length = BreakEvenLength(cost=LoadCost(lookup_ns, bytes_per_s, None, 0), prefill=FIT.cost, footprint=kept)
    plan_plots.draw_breakeven(plan, length, NOWHERE)
    return length.tokens


@pytest.mark.slow
def test_a_crossing_at_the_first_token_starts_the_axis(drawn: list[Any]) -> None:
    assert draw_lengths(200 * GIB, 0) == 1
    (axis,) = drawn[0].axes
    assert axis.get_xlim()[0] > 0.5
    for line in axis.get_lines():
        xs = list(line.get_xdata())
        assert min(xs) >= 1
        assert all(x == int(x) for x in xs), "lengths are whole tokens: no steps"
    assert any("ms" in label for label in labels(axis.yaxis))
    assert "1,000" in labels(axis.xaxis)
    (legend,) = drawn[0].legends
    assert "break-even: 1 token" in [text.get_text() for text in legend.get_texts()]
    below = legend.get_window_extent().y1 <= axis.get_window_extent().y0
    assert below, "a legend within the axes hid the answer"


@pytest.mark.slow
def test_two_chunk_sizes_have_plain_ticks_and_points_below_the_frame(drawn: list[Any]) -> None:
    requests = [RecordedRequest(n, 6_400, 1, tuple(range(100))) for n in range(3)]
    found = sweep(
        requests, [64, 128], SweepSetup(footprint=Footprint.by_hand(100_000, 90), trace_block_tokens=64)
    )
    plan_plots.draw_chunk(found, NOWHERE)
    left, right, other = drawn[0].axes
    for axis in (left, right, other):
        highest = max(max(line.get_ydata()) for line in axis.get_lines() if len(set(line.get_xdata())) > 1)
        assert axis.get_ylim()[1] > highest * 1.05
    assert not any("×" in label or "^" in label for label in labels(right.yaxis))
    assert "8,000" in labels(right.yaxis)


def draw_capacity(kept: Footprint, prefixes: int) -> None:
    room = CapacityPlan(
        prefixes_count=prefixes, prefix_tokens=8_192, footprint=kept, chunk_tokens=256, replicas_count=1, hosts_count=4,
        dram_per_host_bytes=2 * TIB, usable_share=Fraction(4, 5),
    )  # fmt: skip
    count = ObjectsPlan(prefixes_count=prefixes, prefix_tokens=8_192, footprint=kept, chunk_tokens=256)
    plan_plots.draw_capacity(room, count, NOWHERE)


@pytest.mark.slow
def test_capacity_is_told_in_the_unit_of_its_axis(drawn: list[Any]) -> None:
    draw_capacity(Footprint.by_hand(131_072), 750)
    left, right = drawn[0].axes[:2]
    assert left.get_ylabel() == "TiB"
    told = " ".join(text.get_text() for text in left.get_legend().get_texts())
    assert "≈ 0.73 TiB" in told
    assert "GiB" not in told
    assert "100,000" in labels(right.yaxis)


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0, 200])
def test_traffic_is_labelled_inside_its_bar_or_above(rate: int, drawn: list[Any]) -> None:
    plan = NetworkPlan(
        requests_per_s=Fraction(rate), hit_share=Fraction(3, 4), bytes_per_hit=GIB,
        link_bytes_per_s=Fraction(50 * 10**9), efficiency=Fraction(1),
    )  # fmt: skip
    plan_plots.draw_network(plan, NOWHERE)
    (axis,) = drawn[0].axes
    assert all(line.get_zorder() < bar.get_zorder() for line in axis.get_lines() for bar in axis.patches)
    assert f"{rate * 3 // 4} GiB/s" in [text.get_text() for text in axis.texts]


def overlap(artists: list[Any]) -> bool:
    boxes = [artist.get_window_extent() for artist in artists]
    return any(one.overlaps(other) for one, other in combinations(boxes, 2))


@pytest.mark.slow
def test_many_hosts_make_the_picture_taller(drawn: list[Any]) -> None:
    hosts = tuple(Candidate(f"gpu-{n}", queue_ns=n * MS, prefill_ns=3_000 * MS) for n in range(14))
    plan_plots.draw_route(RoutePlan(candidates=hosts), NOWHERE)
    (axis,) = drawn[0].axes
    bars = [bar for bar in axis.patches if bar.get_facecolor() == to_rgba(plan_plots.BLUE)]
    assert not overlap([*(text.get_bbox_patch() for text in axis.texts), *bars])


@pytest.mark.slow
def test_numbers_of_links_do_not_cover_one_another(drawn: list[Any]) -> None:
    plan = NetworkPlan(
        requests_per_s=Fraction(227), hit_share=Fraction(1), bytes_per_hit=GIB, link_bytes_per_s=Fraction(GIB),
        efficiency=Fraction(1),
    )  # fmt: skip
    plan_plots.draw_network(plan, NOWHERE)
    told = [text for text in drawn[0].axes[0].texts if "link" in text.get_text()]
    assert "227 links" in [text.get_text() for text in told]
    assert not overlap(told)


@pytest.mark.slow
def test_a_span_of_a_decade_has_several_numbers_on_its_axis(drawn: list[Any]) -> None:
    draw_lengths(2 * GIB, 40 * MS)
    (axis,) = drawn[0].axes
    (low, high), shown = axis.get_xlim(), [tick.get_loc() for tick in axis.xaxis.get_major_ticks()]
    assert sum(low <= at <= high for at in shown) >= 4


@pytest.mark.slow
def test_a_flat_curve_is_not_under_the_legend(drawn: list[Any]) -> None:
    draw_capacity(Footprint((KeptGroup(name="state", snapshot_bytes=GIB),)), 10)
    axis = drawn[0].axes[1]
    curve = axis.transData.transform(axis.get_lines()[0].get_xydata())
    assert not any(axis.get_legend().get_window_extent().contains(x, y) for x, y in curve)


def test_without_matplotlib_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(UsageError) as caught:
        plan_plots._figure()
    assert "pip install matplotlib" in caught.value.message


@pytest.mark.parametrize(("layers", "saved", "unit"), [(1, None, "ms"), (32, 700 * MS, "ms"), (400, 1, "ms")])
def test_a_timeline_has_a_bar_for_each_part_of_each_stage(
    layers: int, saved: int | None, unit: str, drawn: list[Any]
) -> None:
    plan = TimelinePlan(
        size_bytes=GIB, bandwidth_bytes_per_s=Fraction(20 * GIB), layers_count=layers, suffix_ns=60 * MS, sync_ns=MS,
        copy_ns=40 * MS, prefill_saved_ns=saved,
    )  # fmt: skip
    plan_plots.draw_timeline(plan, NOWHERE)
    (figure,) = drawn
    (axis,) = figure.axes
    names = ["sync", "load", "copy to GPU", "suffix", *(["all computed"] if saved is not None else [])]
    assert labels(axis.yaxis) == names
    bars = {name: len(one.get_paths()) for name, one in zip(names, axis.collections, strict=True)}
    assert bars == {name: layers if name in ("load", "copy to GPU", "suffix") else 1 for name in names}
    assert axis.get_xlabel() == f"{unit} after the request"
    assert axis.get_xlim()[1] >= float(plan.first_token_ns / MS)
    assert ("760 ms" in " ".join(text.get_text() for text in axis.texts)) == (saved == 700 * MS)
    assert all(inside(figure, one) for one in (*axis.texts, *axis.get_yticklabels(), *figure.legends))


def test_a_case_without_a_good_request_is_drawn_as_that(drawn: list[Any]) -> None:
    def case(name: str, good: int) -> Case:
        return Case(name=name, hosts_count=1, host_price=Fraction(90), extra_price=Fraction(0),
                    offered_per_s=Fraction(12), good_per_s=Fraction(good))  # fmt: skip

    plan_plots.draw_cost(CostPlan(cases=(case("a$b$", 0), case("kvd", 9)), currency="US$"), NOWHERE)
    (figure,) = drawn
    left, right = figure.axes
    assert [text.get_text() for text in left.texts] == ["no good request", "≈ 2.78"]
    assert [text.get_text() for text in right.texts] == ["0 %", "75 %"]
    assert left.get_ylabel() == r"US\$"
    assert all(inside(figure, one) for one in (*left.texts, *right.texts, *left.get_xticklabels()))
