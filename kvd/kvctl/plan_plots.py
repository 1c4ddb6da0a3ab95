"""Pictures of the plans, through matplotlib, which is imported when the first one is drawn.

Owns nothing. Called by `kvd.kvctl.plan` with a checked path, in the calling thread; draws to the file and
never opens a window.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from kvd.errors import UsageError
from kvd.kvctl.plan_inputs import Model
from kvd.plan import units
from kvd.plan.breakeven import BreakEvenLength, BreakEvenPlan
from kvd.plan.capacity import CapacityPlan
from kvd.plan.chunk import ChunkSweep
from kvd.plan.network import NetworkPlan
from kvd.plan.objects import ObjectsPlan
from kvd.plan.routing import RoutePlan

# Told apart also by people who do not see red and green apart.
BLUE, ORANGE, GREEN, PINK, GREY = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#666666"


def _figure(columns: int = 1) -> tuple[Any, list[Any]]:
    """A figure with `columns` axes side by side, without pyplot and its global state."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError(
            "--plot needs matplotlib, which is not installed; allowed: pip install 'kvd[plot]'",
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


def draw_capacity(room: CapacityPlan, count: ObjectsPlan, path: Path) -> None:
    """Usable memory against hosts with the demand; objects and metadata against chunk size."""
    figure, (left, right) = _figure(2)
    tib = units.TIB
    last = max(room.hosts_count, room.hosts_spare_min) * 5 // 4 + 1
    per_host, demand = float(room.usable_per_host_bytes / tib), room.demand_bytes / tib
    left.plot([0, last], [0, last * per_host], color=BLUE, label="usable memory")
    left.axhline(demand, color=ORANGE, label=f"needed: {units.format_bytes(room.demand_bytes)}")
    left.plot([room.hosts_count], [float(room.usable_bytes / tib)], "o", color=BLUE,
              label=f"{room.hosts_count:,} hosts: {units.format_bytes(room.usable_bytes)}")  # fmt: skip
    left.plot([room.hosts_min], [room.hosts_min * per_host], "s", color=GREEN,
              label=f"fewest that hold it: {room.hosts_min:,}")  # fmt: skip
    left.set(xlabel="hosts", ylabel="TiB", title="Capacity against hosts", xlim=(0, last), ylim=(0, None))
    left.legend(loc="lower right", frameon=False)
    _draw_objects(right, count)
    _save(figure, path)


def _draw_objects(axis: Any, count: ObjectsPlan) -> None:
    """Objects (left scale) and metadata (right scale) over chunk sizes around the one planned."""
    powers = [1 << power for power in range(4, 15)]
    fitting = [
        size
        for size in powers
        if size <= count.prefix_tokens
        and (size * count.bytes_per_token + count.state_bytes) % count.members_count == 0
    ]
    sizes = sorted({*fitting, count.chunk_tokens})
    objects = [replace(count, chunk_tokens=size).objects_count for size in sizes]
    axis.plot(sizes, objects, "o-", color=BLUE, markersize=4)
    axis.plot([count.chunk_tokens], [count.objects_count], "s", color=ORANGE, markersize=8,
              label=f"{count.chunk_tokens:,} tokens: {count.objects_count:,} objects,\n"
              f"{units.format_bytes(count.metadata_bytes)} of metadata")  # fmt: skip
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=10)
    _token_ticks(axis, sizes)
    axis.set(xlabel="tokens of a chunk", ylabel="objects", title="Objects and metadata against chunk size")
    # One curve, two scales: metadata is objects × a constant, so a second curve would only repeat the first.
    each = max(count.metadata_per_object_bytes, 1) / units.MIB
    second = axis.secondary_yaxis("right", functions=(lambda n: n * each, lambda m: m / each))
    second.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    second.set_ylabel(f"metadata, MiB ({count.metadata_per_object_bytes} B an object)")
    axis.legend(loc="upper right", frameon=False)


def _token_ticks(axis: Any, sizes: list[int]) -> None:
    """Plain numbers of tokens on a logarithmic scale."""
    axis.set_xticks(sizes, [f"{size:,}" for size in sizes], rotation=45)
    axis.set_xticks([], minor=True)


def draw_network(plan: NetworkPlan, path: Path) -> None:
    """The two directions against what 1, 2, … links carry."""
    figure, (axis,) = _figure()
    gib = units.GIB
    effective = float(plan.link_effective_bytes_per_s / gib)
    matrix = plan.matrix
    sends = float(max(matrix.egress_bytes_per_s) / gib)
    receives = float(max(matrix.ingress_bytes_per_s) / gib)
    if plan.hosts_count is None:
        names = ["reads\n(cache → engines)", "writes\n(engines → cache)"]
        sends, receives = float(plan.read_bytes_per_s / gib), float(plan.write_bytes_per_s / gib)
    else:
        names = ["busiest sender", "busiest receiver"]
    bars = axis.bar(names, [sends, receives], width=0.5, color=[BLUE, PINK])
    axis.bar_label(bars, fmt="%.2f GiB/s", label_type="center", color="white", fontweight="bold")
    most = max(plan.links_per_node_min, plan.links_count or 0, 1)
    every = max(1, most // 12)
    for links in range(every, most + every, every):
        needed = links == plan.links_per_node_min
        axis.axhline(links * effective, color=ORANGE if needed else GREY, linestyle="-" if needed else ":",
                     linewidth=1.4 if needed else 0.8)  # fmt: skip
        axis.text(1.62, links * effective, f"{links} link{'s' * (links > 1)}", va="center", ha="left",
                  color=ORANGE if needed else GREY)  # fmt: skip
    axis.set(xlim=(-0.6, 1.6), ylim=(0, max(most * effective, sends, receives) * 1.12), ylabel="GiB/s",
             title="Traffic one way against links: a bound, not an SLO verdict")  # fmt: skip
    axis.grid(visible=False)
    _save(figure, path)


def draw_breakeven(
    plan: BreakEvenPlan, length: BreakEvenLength | None, model: Model | None, path: Path
) -> None:
    """Cost of reuse against length, with the prefill saved: a curve if it was sampled, else the one point."""
    figure, (axis,) = _figure()
    per_token, state_bytes = (model.token_bytes, model.state_bytes) if model else (None, 0)
    unit = per_token or units.MIB
    here = max(plan.size_bytes - state_bytes, 1) / unit
    crossing = length.tokens if length else None
    last = 2 * max(here, crossing or 0)
    # With a curve of savings both scales are logarithmic, or a crossing far below the length asked about is lost.
    first = min(here, crossing or here) / 8 if length else 0.0
    grid = [first * (last / first) ** (n / 200) if first else last * n / 200 for n in range(201)]
    # Only the bytes scale with the length: lookup, sync, queues and what overlaps stay as they were given.
    scaled_ns = plan.load_ns + plan.h2d_ns
    fixed_ns = plan.cost_ns - scaled_ns
    axis.plot(
        grid, [(fixed_ns + scaled_ns * (x * unit + state_bytes) / plan.size_bytes) / 1e6 for x in grid],
        color=ORANGE, label="cost of reuse",
    )  # fmt: skip
    if length is not None:
        axis.plot(
            grid, [length.saved_ns(round(x)) / 1e6 for x in grid], color=BLUE, label="prefill saved (fitted)"
        )
        if crossing is not None:
            axis.axvline(crossing, color=GREEN, linestyle="--", label=f"break-even: {crossing:,} tokens")
    saved = units.format_ns(plan.prefill_saved_ns)
    axis.plot([here], [plan.prefill_saved_ns / 1e6], "o", color=BLUE, label=f"prefill saved here: {saved}")
    axis.plot(
        [here], [plan.cost_ns / 1e6], "s", color=ORANGE, label=f"cost here: {units.format_ns(plan.cost_ns)}"
    )
    axis.annotate("", (here, plan.prefill_saved_ns / 1e6), (here, plan.cost_ns / 1e6),
                  arrowprops={"arrowstyle": "->", "color": GREY})  # fmt: skip
    verdict = "worth it" if plan.worth_it else "not worth it"
    axis.set(xlabel="tokens of the prefix" if per_token else "MiB of the prefix", ylabel="ms", xlim=(first, last),
             title=f"Break-even against length: {verdict} at "
             f"{units.format_bytes(plan.size_bytes)}")  # fmt: skip
    if length is not None:
        axis.set(xscale="log", yscale="log")
    else:
        axis.set_ylim(0, None)
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axis.legend(loc="upper left" if length is None else "lower right", frameon=False)
    _save(figure, path)


def draw_route(plan: RoutePlan, path: Path) -> None:
    """One stacked bar a host."""
    figure, (axis,) = _figure()
    chosen = plan.chosen
    hosts = list(reversed(plan.candidates))
    rows = range(len(hosts))
    start = [0.0 for _ in hosts]
    parts = (("queue", "queue_ns", GREY), ("lookup and load", "lookup_load_ns", ORANGE),
             ("uncached prefill", "prefill_ns", BLUE), ("handoff", "handoff_ns", PINK))  # fmt: skip
    for name, field, colour in parts:
        widths = [getattr(host, field) / 1e6 for host in hosts]
        axis.barh(rows, widths, left=start, height=0.55, color=colour, label=name)
        start = [a + b for a, b in zip(start, widths, strict=True)]
    for row, host in enumerate(hosts):
        refusal = plan.refusal(host)
        note = "chosen" if host is chosen else f"out: {refusal}" if refusal else ""
        axis.text(
            start[row], row, f"  {units.format_ns(host.total_ns)}{', ' + note if note else ''}", va="center"
        )
    axis.set_yticks(rows, [host.host + (" (session)" if host.session else "") for host in hosts])
    axis.set(xlabel="estimated ms to the first token", title="Where the request should run",
             xlim=(0, max([*start, 1.0]) * 1.35), ylim=(-0.6, len(hosts) - 0.4))  # fmt: skip
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=4, frameon=False)
    _save(figure, path)


def draw_chunk(found: ChunkSweep, path: Path) -> None:
    """Prefill skipped and load time against chunk size; objects and metadata CPU against it."""
    figure, (left, right) = _figure(2)
    sizes = [row.chunk_tokens for row in found.rows]
    left.plot(sizes, [float(row.usable_share) * 100 for row in found.rows], "o-", color=BLUE)
    left.axvline(found.proposed.chunk_tokens, color=GREEN, linestyle="--",
                 label=f"largest within 1 % of the most: {found.proposed.chunk_tokens:,}")  # fmt: skip
    left.set(ylabel="prefill skipped, % of prompt tokens", title="What the cache saves", ylim=(0, None))
    left.legend(loc="upper center", bbox_to_anchor=(0.5, -0.24), frameon=False)
    right.plot(
        sizes, [row.objects_peak_count for row in found.rows], "o-", color=BLUE, label="objects at the peak"
    )
    right.set_yscale("log")
    right.set(ylabel="objects", title="What that costs")
    other = right.twinx()
    other.plot(
        sizes, [row.load_p99_ns / 1e6 for row in found.rows], "s--", color=ORANGE, label="load P99, ms"
    )
    other.set(ylabel="ms", ylim=(0, None))
    other.spines["top"].set_visible(False)
    handles = [*right.get_lines(), *other.get_lines()]
    right.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.24), ncols=2, frameon=False)
    for axis in (left, right):
        axis.set_xscale("log", base=2)
        _token_ticks(axis, sizes)
        axis.set_xlabel("tokens of a chunk")
    _save(figure, path)
