"""`kvctl plan timeline`: one load beside the compute of the suffix, layer by layer.

Called by `kvd.kvctl.plan`, in the calling thread.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Annotated

import typer

from kvd.kvctl.output import console
from kvd.kvctl.plan_options import JsonOption, PlotOption, guarded, plots_for, report, whole
from kvd.plan import units
from kvd.plan.timeline import TimelinePlan

BAR_CHARS = 40  # with names and times a line has 80


@guarded
def timeline(
    size: Annotated[str, typer.Option("--bytes", help="Bytes to load, like 1GiB.")],
    bandwidth: Annotated[str, typer.Option(help="Rate of the load, like 20GiB/s.")],
    suffix_prefill: Annotated[str, typer.Option(help="Prefill of what is not loaded, like 60ms.")],
    layers: Annotated[
        int,
        whole(help="Parts the load arrives in: layers, or bands of layers, as in kvd's vLLM connector (8)."),
    ] = 1,
    lookup: Annotated[str | None, typer.Option(help="Lookup. Default: 0.")] = None,
    h2d: Annotated[str | None, typer.Option(help="Copy of these bytes to the GPU. Default: 0.")] = None,
    sync: Annotated[str | None, typer.Option(help="Synchronisation. Default: 0.")] = None,
    prefill_saved: Annotated[
        str | None,
        typer.Option(help="Full prefill less prefill of the suffix: also say when all is computed."),
    ] = None,
    as_json: JsonOption = False,
    plot: PlotOption = None,
) -> None:
    """What of a load is hidden behind computing, if it arrives layer by layer?"""
    plots = plots_for(plot)
    given = {"lookup": lookup, "h2d": h2d, "sync": sync}
    times = {
        name: 0 if text is None else units.parse_duration_ns(text, f"--{name}")
        for name, text in given.items()
    }
    said = {"lookup": "lookup", "h2d": "copy to GPU", "sync": "sync"}
    plan = TimelinePlan(
        size_bytes=units.parse_bytes(size, "--bytes"),
        bandwidth_bytes_per_s=units.parse_bandwidth(bandwidth, "--bandwidth"),
        layers_count=layers,
        suffix_ns=units.parse_duration_ns(suffix_prefill, "--suffix-prefill"),
        lookup_ns=times["lookup"],
        copy_ns=times["h2d"],
        sync_ns=times["sync"],
        prefill_saved_ns=None
        if prefill_saved is None
        else units.parse_duration_ns(prefill_saved, "--prefill-saved"),
        not_given=tuple(said[name] for name, text in given.items() if text is None),
    )
    if plots is not None:
        plots.draw_timeline(plan, plot)
    if not as_json:
        _print_bars(plan)
    report("timeline", {"Timeline": plan}, as_json)


def _print_bars(plan: TimelinePlan) -> None:
    """Each stage from its begin to its end, on one scale; what computing all takes may leave it."""
    out = console()
    whole_ns = max(plan.shown_ns, Fraction(1))
    for name, begin, end in plan.rows:
        first = int(begin * BAR_CHARS / whole_ns)
        last = min(BAR_CHARS, max(first + 1, units.ceil_div(end * BAR_CHARS, whole_ns)))
        bar = " " * first + "█" * (last - first)
        beyond = "▸" if end > whole_ns else " "
        text = f" {name:<18}{bar:<{BAR_CHARS}}{beyond} until {units.format_ns(end)}"
        out.print(text, soft_wrap=True, markup=False, highlight=False)
    out.print()
