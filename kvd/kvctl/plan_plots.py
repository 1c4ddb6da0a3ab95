"""Pictures of the plans, through matplotlib, which is imported when the first one is drawn.

Owns nothing. Called by the commands of `kvctl plan` with a checked path, in the calling thread; draws to the file and
never opens a window. Numbers in a picture have the unit of its axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from kvd.errors import UsageError
from kvd.plan import units
from kvd.plan.breakeven_ledger import BreakEvenLength, BreakEvenPlan
from kvd.plan.capacity import CapacityPlan
from kvd.plan.chunk import ChunkSweep
from kvd.plan.cost import CostPlan
from kvd.plan.network import NetworkPlan
from kvd.plan.objects import ObjectsPlan
from kvd.plan.routing import RoutePlan
from kvd.plan.timeline import TimelinePlan

# Told apart also by people who do not see red and green apart.
BLUE, ORANGE, GREEN, PINK, GREY = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#666666"
# No line of the grid runs through a text.
LEGEND: dict[str, Any] = {"framealpha": 1.0, "edgecolor": "none", "facecolor": "white"}
HEADROOM = 1.1  # of an axis above its highest point
NAME_CHARS_MAX = 56
GRID_POINTS = 200
FIGURE_HEIGHT_MAX = 60  # inches
PARTS_TOLD_APART = 150  # on the width of a picture
STAGE_COLOURS = {"load": ORANGE, "copy to GPU": PINK, "suffix": BLUE, "all computed": GREEN}
DECADES_MIN = 20  # a logarithmic scale needs more between its ends, or it has no ticks


def _figure(columns: int = 1) -> tuple[Any, list[Any]]:
    """A figure with `columns` axes side by side, without pyplot and its global state."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError(
            "--plot needs matplotlib, which is not installed; allowed: pip install matplotlib",
            code="missing",
        ) from None
    figure = Figure(figsize=(7.0 * columns, 4.6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = [figure.add_subplot(1, columns, column + 1) for column in range(columns)]
    for axis in axes:
        axis.grid(visible=True, color="#dddddd", linewidth=0.6)
        axis.set_axisbelow(True)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    return figure, axes


def _save(figure: Any, path: Path) -> None:
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise UsageError(
            f"--plot = {path}: {error.strerror}; allowed: a file that can be written", code="file"
        ) from None


def _plain(value: float, _: int | None = None) -> str:
    return f"{value:,.10g}"


def _text(said: str) -> str:
    """A name somebody gave is text, not mathematics."""
    return said.replace("$", r"\$")


def _short(name: str) -> str:
    """A name that fits a picture."""
    if len(name) <= NAME_CHARS_MAX:
        return name
    return f"{name[: NAME_CHARS_MAX // 2]}…{name[-NAME_CHARS_MAX // 2 + 1 :]}"


def _counts(axis: Any, values: Sequence[int]) -> None:
    """The scale of counts above 0: logarithmic where they span decades, else from 0."""
    if max(values) >= DECADES_MIN * max(1, min(values)):
        axis.set_yscale("log")
        axis.yaxis.set_minor_formatter(lambda value, _: "")
    else:
        axis.set_ylim(0, max(values) * HEADROOM or 1)
    axis.yaxis.set_major_formatter(_plain)


def draw_capacity(room: CapacityPlan, count: ObjectsPlan, path: Path) -> None:
    """Usable memory against hosts with the demand; objects and metadata against chunk size."""
    figure, (left, right) = _figure(2)
    last = max(room.hosts_count, room.hosts_spare_min) * 5 // 4 + 1
    unit, factor = units.scale_of(
        max(float(last * room.usable_per_host_bytes), room.demand_bytes), units.SHOWN_BYTES
    )

    def said(value: units.Number) -> str:
        return f"{units.format_number(Fraction(value) / factor)} {unit}"

    per_host = float(room.usable_per_host_bytes / factor)
    left.plot([0, last], [0, last * per_host], color=BLUE, label="usable memory")
    left.axhline(room.demand_bytes / factor, color=ORANGE, label=f"needed: {said(room.demand_bytes)}")
    left.plot([room.hosts_count], [float(room.usable_bytes / factor)], "o", color=BLUE,
              label=f"{units.counted(room.hosts_count, 'host')}: {said(room.usable_bytes)}")  # fmt: skip
    left.plot([room.hosts_min], [room.hosts_min * per_host], "s", color=GREEN,
              label=f"fewest that hold it: {room.hosts_min:,}")  # fmt: skip
    left.set(xlabel="hosts", ylabel=unit, title="Capacity against hosts", xlim=(0, last), ylim=(0, None))
    left.xaxis.get_major_locator().set_params(integer=True)
    left.xaxis.set_major_formatter(_plain)
    left.yaxis.set_major_formatter(_plain)
    high = room.demand_bytes / factor > last * per_host / 2
    left.legend(loc="lower right" if high else "upper left", **LEGEND)
    _draw_objects(right, count)
    _save(figure, path)


def _objects_at(count: ObjectsPlan, chunk_tokens: int) -> int | None:
    """Objects at another chunk size, None where it does not suit."""
    try:
        return replace(count, chunk_tokens=chunk_tokens).objects_count
    except UsageError:
        return None


def _draw_objects(axis: Any, count: ObjectsPlan) -> None:
    """Objects (left scale) and metadata (right scale) over chunk sizes around the one planned."""
    tried = sorted({*(1 << power for power in range(4, 15)), count.chunk_tokens})
    found = {size: objects for size in tried if (objects := _objects_at(count, size)) is not None}
    axis.plot(list(found), list(found.values()), "o-", color=BLUE, markersize=4)
    axis.plot([count.chunk_tokens], [count.objects_count], "s", color=ORANGE, markersize=8,
              label=f"{units.counted(count.chunk_tokens, 'token')}: {units.counted(count.objects_count, 'object')},\n"
              f"{units.format_bytes(count.metadata_bytes)} of metadata")  # fmt: skip
    axis.set_xscale("log", base=2)
    _counts(axis, list(found.values()))
    _token_ticks(axis, list(found))
    axis.set(xlabel="tokens of a chunk", ylabel="objects", title="Objects and metadata against chunk size")
    # One curve, two scales: metadata is objects × a constant, so a second curve would only repeat the first.
    unit, factor = units.scale_of(count.metadata_bytes, units.SHOWN_BYTES)
    each = max(count.metadata_per_object_bytes, 1) / factor
    second = axis.secondary_yaxis("right", functions=(lambda n: n * each, lambda m: m / each))
    second.yaxis.set_major_formatter(_plain)
    second.set_ylabel(f"metadata, {unit} ({count.metadata_per_object_bytes} B an object)")
    axis.legend(loc="best", **LEGEND)


def _token_ticks(axis: Any, sizes: list[int]) -> None:
    """Plain numbers of tokens on a logarithmic scale."""
    axis.set_xticks(sizes, [f"{size:,}" for size in sizes], rotation=45)
    axis.set_xticks([], minor=True)


def draw_network(plan: NetworkPlan, path: Path) -> None:
    """The two directions against what 1, 2, … links carry."""
    figure, (axis,) = _figure()
    matrix = plan.matrix
    most = max(plan.links_per_node_min, plan.links_count or 0, 1)
    unit, factor = units.scale_of(float(most * plan.link_effective_bytes_per_s), units.SHOWN_BYTES)
    effective = float(plan.link_effective_bytes_per_s / factor)
    if plan.hosts_count is None:
        names = ["reads\n(cache → engines)", "writes\n(engines → cache)"]
        rates = [plan.read_bytes_per_s, plan.write_bytes_per_s]
    else:
        names = ["busiest sender", "busiest receiver"]
        rates = [max(matrix.egress_bytes_per_s), max(matrix.ingress_bytes_per_s)]
    heights = [float(rate / factor) for rate in rates]
    bars = axis.bar(names, heights, width=0.5, color=[BLUE, PINK], zorder=2)
    labels = [f"{units.format_number(rate / factor)} {unit}/s" for rate in rates]
    top = max(most * effective, *heights)
    for bar, label, colour in zip(bars, labels, (BLUE, PINK), strict=True):
        inside = bar.get_height() > top * 0.08  # else there is no room for it
        axis.annotate(
            label, (bar.get_x() + bar.get_width() / 2, bar.get_height() / 2 if inside else top * 0.04),
            ha="center", va="center", color="white" if inside else colour, fontweight="bold", zorder=3,
        )  # fmt: skip
    every, least = max(1, most // 12), plan.links_per_node_min
    for links in sorted({*range(every, most + every, every), least} - {0}):
        needed = links == least
        if not needed and 2 * abs(links - least) < every:
            continue  # its number would lie on that of the fewest
        axis.axhline(links * effective, color=ORANGE if needed else GREY, linestyle="-" if needed else ":",
                     linewidth=1.4 if needed else 0.8, zorder=1)  # fmt: skip
        axis.text(1.62, links * effective, units.counted(links, "link"), va="center", ha="left",
                  color=ORANGE if needed else GREY)  # fmt: skip
    axis.set(xlim=(-0.6, 1.6), ylim=(0, top * 1.12), ylabel=f"{unit}/s",
             title="Traffic one way against links: a bound, not an SLO verdict")  # fmt: skip
    axis.yaxis.set_major_formatter(_plain)
    axis.grid(visible=False)
    _save(figure, path)


def draw_breakeven(plan: BreakEvenPlan, length: BreakEvenLength | None, path: Path) -> None:
    """Cost of reuse against length, with the prefill saved: a curve if it was sampled, else the one point."""
    figure, (axis,) = _figure()
    here: float | None
    if length is None:
        here = _draw_size(axis, plan)
    else:
        _draw_lengths(axis, plan, length)
        here = None if plan.read is None else plan.read.tokens
    if here is not None:
        saved, cost = plan.prefill_saved_ns, plan.cost_ns
        axis.plot([here], [saved], "o", color=BLUE, label=f"prefill saved here: {units.format_ns(saved)}")
        axis.plot([here], [cost], "s", color=ORANGE, label=f"cost here: {units.format_ns(cost)}")
        axis.annotate("", (here, saved), (here, cost), arrowprops={"arrowstyle": "->", "color": GREY})
    verdict = "worth it" if plan.worth_it else "not worth it"
    axis.set(
        ylabel="time", title=f"Break-even against length: {verdict} at {units.format_bytes(plan.size_bytes)}"
    )
    axis.yaxis.set_major_formatter(lambda value, _: units.format_ns(round(value)).removeprefix("≈ "))
    # Below: where curves cross, and how far apart they run, is different every time.
    figure.legend(loc="outside lower center", ncols=3, **LEGEND)
    _save(figure, path)


def _draw_size(axis: Any, plan: BreakEvenPlan) -> float:
    """The cost over the size of the load, or over its tokens; lookup, sync and what overlaps stay as given.

    Returns where the load asked about lies on the axis.
    """
    read = plan.read
    if read is None:
        unit, factor = units.scale_of(plan.size_bytes, units.SHOWN_BYTES)
        here, label = plan.size_bytes / factor, f"{unit} of the prefix"
        grid: list[float] = [0, 2 * here]
        sizes = [0, 2 * plan.size_bytes]
    else:
        here, label = read.tokens, "tokens of the prefix"
        step = max(1, 2 * read.tokens // read.chunk_tokens // GRID_POINTS) * read.chunk_tokens
        tokens = sorted({*range(0, 2 * read.tokens, step), read.tokens, 2 * read.tokens})
        grid = [float(n) for n in tokens]
        sizes = [read.footprint.needed_bytes(n, read.chunk_tokens) for n in tokens]
    scaled_ns = plan.load_ns + plan.h2d_ns
    costs = [plan.cost_ns - scaled_ns + scaled_ns * size / plan.size_bytes for size in sizes]
    axis.plot(grid, costs, color=ORANGE, label="cost of reuse")
    top = max(*costs, plan.prefill_saved_ns, 1) * HEADROOM
    axis.set(xlabel=label, xlim=(0, 2 * here), ylim=(min(0, *costs), top))
    axis.xaxis.set_major_formatter(_plain)
    return here


def _draw_lengths(axis: Any, plan: BreakEvenPlan, length: BreakEvenLength) -> None:
    """Both curves over whole chunks, on logarithmic scales, or a crossing far below the length asked about is lost."""
    crossing, chunk = length.tokens, length.chunk_tokens
    here = plan.read.tokens if plan.read is not None else crossing or length.tokens_max // chunk * chunk
    first = max(1, min(here, crossing or here) // 8 // chunk)
    last = max(2 * max(here, crossing or 0) // chunk, 4 * first)
    grid = sorted({round(first * (last / first) ** (n / GRID_POINTS)) for n in range(GRID_POINTS + 1)})
    tokens = [chunks * chunk for chunks in grid]
    marker = "." if len(tokens) < 20 else ""
    axis.plot(tokens, [length.cost_ns(n) for n in tokens], marker=marker, color=ORANGE, label="cost of reuse")
    axis.plot(
        tokens,
        [length.saved_ns(n) for n in tokens],
        marker=marker,
        color=BLUE,
        label="prefill saved (fitted)",
    )
    if crossing is not None:
        label = f"break-even: {units.counted(crossing, 'token')}"
        axis.axvline(crossing, color=GREEN, linestyle="--", label=label)
    # A crossing at the first length would otherwise lie on the frame.
    axis.set(xlabel="tokens of the prefix", xscale="log", yscale="log", xlim=(tokens[0] / 1.15, tokens[-1]))
    axis.xaxis.set_major_formatter(_plain)
    for one, (low, high) in ((axis.xaxis, axis.get_xlim()), (axis.yaxis, axis.get_ylim())):
        if high < 200 * low:  # powers of ten alone may be one number, or none
            one.get_major_locator().set_params(subs=(1, 2, 5))
        one.set_minor_formatter(lambda value, _: "")


def draw_route(plan: RoutePlan, path: Path) -> None:
    """One stacked bar a host, under a line that says which it is."""
    figure, (axis,) = _figure()
    chosen = plan.chosen
    hosts = list(reversed(plan.candidates))
    figure.set_figheight(min(max(4.6, 1.4 + 0.5 * len(hosts)), FIGURE_HEIGHT_MAX))
    rows = range(len(hosts))
    unit, factor = units.scale_of(max(host.total_ns for host in hosts), units.SHOWN_NS)
    start = [0.0 for _ in hosts]
    parts = (("queue", "queue_ns", GREY), ("lookup and load", "lookup_load_ns", ORANGE),
             ("uncached prefill", "prefill_ns", BLUE), ("handoff", "handoff_ns", PINK))  # fmt: skip
    for name, field, colour in parts:
        widths = [getattr(host, field) / factor for host in hosts]
        axis.barh(rows, widths, left=start, height=0.42, color=colour, label=name)
        start = [a + b for a, b in zip(start, widths, strict=True)]
    for row, host in enumerate(hosts):
        refusal = plan.refusal(host)
        name = _short(host.host)
        total = f"{units.format_number(Fraction(host.total_ns, factor), 3)} {unit}"
        text = ", ".join(filter(None, (
            f"{name}{' (session)' if host.session else ''}: {total}",
            "chosen" if host is chosen else "", f"out: {refusal}" if refusal else "",
        )))  # fmt: skip
        axis.text(0, row + 0.26, _text(text), va="bottom", fontsize=9,
                  fontweight="bold" if host is chosen else "normal",
                  bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0})  # fmt: skip
    axis.set_yticks([])
    axis.set(xlabel=f"estimated {unit} to the first token", title="Where the request should run",
             xlim=(0, max(*start, 1e-9) * 1.05), ylim=(-0.4, len(hosts) - 0.3))  # fmt: skip
    axis.xaxis.set_major_formatter(_plain)
    figure.legend(loc="outside lower center", ncols=4, **LEGEND)
    _save(figure, path)


def draw_timeline(plan: TimelinePlan, path: Path) -> None:
    """A row for each stage, a bar for each layer; below them what computing all takes, if that is known."""
    figure, (axis,) = _figure()
    unit, factor = units.scale_of(plan.shown_ns, units.SHOWN_NS)
    spans = {one.name: one.spans for one in plan.stages}
    end = float(plan.shown_ns / factor) * 1.04 or 1.0
    figure.set_figheight(2.2 + 0.45 * len(plan.rows))
    for at, (name, begin, over) in enumerate(plan.rows):
        bars = [(float(a / factor), float((b - a) / factor)) for a, b in spans.get(name, ((begin, over),))]
        colour = STAGE_COLOURS.get(name, GREY)
        # A white edge tells parts apart that are much wider than it; over thinner ones it would paint them white.
        apart = min(width for _, width in bars) > end / PARTS_TOLD_APART
        axis.broken_barh(bars, (-at - 0.32, 0.64), facecolors=colour, edgecolor="white" if apart else colour,
                         linewidth=0.6 if apart else 0.3, snap=False)  # fmt: skip
        if over > plan.shown_ns:
            axis.text(end * 0.99, -at, f"… {units.format_ns(over)}", color="white", ha="right", va="center")
    first = float(plan.first_token_ns / factor)
    axis.axvline(first, color="black", linestyle="--", linewidth=1.0,
                 label=f"first token: {units.format_ns(plan.first_token_ns)}")  # fmt: skip
    axis.set_yticks([-at for at in range(len(plan.rows))], [name for name, _, _ in plan.rows])
    parts = units.counted(plan.layers_count, "part")
    axis.set(xlabel=f"{unit} after the request", xlim=(0, end), ylim=(-len(plan.rows) + 0.4, 0.6),
             title=f"A load in {parts}: {units.format_ns(plan.hidden_ns)} of "
             f"{units.format_ns(plan.in_turn_ns)} overlap")  # fmt: skip
    axis.xaxis.set_major_formatter(_plain)
    figure.legend(loc="outside lower center", **LEGEND)
    _save(figure, path)


def draw_cost(plan: CostPlan, path: Path) -> None:
    """Cost of 1,000 good requests, and the share of the offered ones that are good, a bar each case."""
    figure, (left, right) = _figure(2)
    names = [_text(_short(case.name)) for case in plan.cases]
    at = range(len(names))
    for axis, values, text, colour in (
        (left, [case.price_of_shown for case in plan.cases], units.format_number, BLUE),
        (right, [case.good_share for case in plan.cases], units.format_share, GREEN),
    ):
        heights = [float(value or 0) for value in values]
        bars = axis.bar(at, heights, width=0.5, color=colour, zorder=2)
        axis.bar_label(
            bars, ["no good request" if value is None else text(value) for value in values], fontsize=9
        )
        axis.set_xticks(list(at), names)
        axis.set_ylim(0, max(*heights, 0) * HEADROOM or 1)
    left.set(title="Cost of 1,000 good requests", ylabel=_text(plan.currency))
    right.set(title="Good requests of those offered", ylim=(0, HEADROOM))
    left.yaxis.set_major_formatter(_plain)
    right.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    _save(figure, path)


def draw_chunk(found: ChunkSweep, path: Path) -> None:
    """Prefill skipped and load time against chunk size; objects and metadata CPU against it."""
    figure, (left, right) = _figure(2)
    sizes = [row.chunk_tokens for row in found.rows]
    shares = [float(row.usable_share) * 100 for row in found.rows]
    left.plot(sizes, shares, "o-", color=BLUE)
    left.axvline(found.proposed.chunk_tokens, color=GREEN, linestyle="--",
                 label=f"largest within 1 % of the most: {found.proposed.chunk_tokens:,}")  # fmt: skip
    left.set(ylabel="prefill skipped, % of prompt tokens", title="What the cache saves",
             ylim=(0, max(shares) * HEADROOM or 1))  # fmt: skip
    left.legend(loc="upper center", bbox_to_anchor=(0.5, -0.24), **LEGEND)
    objects = [row.objects_peak_count for row in found.rows]
    right.plot(sizes, objects, "o-", color=BLUE, label="objects at the peak")
    _counts(right, [*objects, 1] if not all(objects) else objects)
    right.set(ylabel="objects", title="What that costs")
    other = right.twinx()
    unit, factor = units.scale_of(max(row.load_p99_ns for row in found.rows), units.SHOWN_NS)
    loads = [row.load_p99_ns / factor for row in found.rows]
    other.plot(sizes, loads, "s--", color=ORANGE, label=f"P99 of a load, {unit}")
    other.set(ylabel=unit, ylim=(0, max(loads) * HEADROOM or 1))
    other.yaxis.set_major_formatter(_plain)
    other.spines["top"].set_visible(False)
    handles = [*right.get_lines(), *other.get_lines()]
    right.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.24), ncols=2, **LEGEND)
    for axis in (left, right):
        axis.set_xscale("log", base=2)
        _token_ticks(axis, sizes)
        axis.set_xlabel("tokens of a chunk")
    _save(figure, path)
