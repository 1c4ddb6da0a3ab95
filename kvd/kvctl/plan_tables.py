"""What `kvctl plan` prints: a ledger, the traffic matrix, the rows of a sweep. Called by its commands alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction

from rich import box
from rich.table import Table

from kvd.kvctl.output import console
from kvd.plan import units
from kvd.plan.chunk import ChunkRow, ChunkSweep
from kvd.plan.ledger import Ledger
from kvd.plan.network import NetworkPlan

matrix_shown_nodes_max = 7  # what fits 80 columns, the last node among them


_GAP = "…"


def print_ledger(title: str, ledger: Ledger) -> None:
    out = console()
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("step")
    table.add_column("how", overflow="fold")
    table.add_column("value", justify="right", no_wrap=True)
    for step in ledger.steps:
        table.add_row(step.label, step.expression, step.text)
    out.print(table)
    out.print("Assumed:", style="bold")
    for assumption in ledger.assumptions:
        out.print(f"  - {assumption}", soft_wrap=True, markup=False)
    out.print(f"\n{ledger.conclusion}\n", style="bold", soft_wrap=True, markup=False)


def print_matrix(plan: NetworkPlan) -> None:
    """The directed traffic matrix, rows send and columns receive, with the sums that links have to carry."""
    matrix, nodes = plan.matrix, range(len(plan.matrix.nodes))
    shown: list[int | None] = list(nodes)
    title = "GiB/s from row to column"
    if len(nodes) > matrix_shown_nodes_max:
        # All but the first are alike, and the last stands for those left out.
        shown = [*nodes[: matrix_shown_nodes_max - 2], None, nodes[-1]]
        title += f" ({matrix_shown_nodes_max - 1} of {len(nodes)}, the rest like the last)"
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False,
                  collapse_padding=True)  # fmt: skip
    table.add_column("")
    for name in [*(_GAP if n is None else matrix.nodes[n] for n in shown), "sends"]:
        table.add_column(name, justify="right", no_wrap=True)
    for source in shown:
        if source is None:
            table.add_row(*[_GAP] * (len(shown) + 2))
            continue
        row = matrix.bytes_per_s[source]
        cells = [_GAP if n is None else "-" if n == source else _gib(row[n]) for n in shown]
        table.add_row(matrix.nodes[source], *cells, _gib(matrix.egress_bytes_per_s[source]))
    table.add_row(
        "receives", *(_GAP if n is None else _gib(matrix.ingress_bytes_per_s[n]) for n in shown), ""
    )
    console().print(table)


def _gib(value: Fraction) -> str:
    return f"{float(value) / units.GIB:,.2f}"


def print_rows(found: ChunkSweep) -> None:
    table = Table(title="One row a chunk size", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD,
                  pad_edge=False, collapse_padding=True, padding=0)  # fmt: skip
    gib = units.GIB
    columns: Sequence[tuple[str, Callable[[ChunkRow], str]]] = (
        ("chunk\ntokens", lambda row: f"{row.chunk_tokens:,}"),
        ("prefill\nskipped", lambda row: f"{float(row.usable_share):.2%}"),
        ("objects\nat peak", lambda row: f"{row.objects_peak_count:,}"),
        ("metadata\nMiB", lambda row: f"{row.metadata_peak_bytes / units.MIB:,.1f}"),
        ("CPU\ns", lambda row: f"{row.metadata_cpu_ns / 1e9:,.2f}"),
        ("read\nGiB", lambda row: f"{row.fetched_bytes / gib:,.1f}"),
        ("in vain\nGiB", lambda row: f"{row.fetched_in_vain_bytes / gib:,.1f}"),
        ("read\nGiB/s", lambda row: f"{float(row.fetched_mean_bytes_per_s) / gib:,.2f}"),
        ("P50 of\nload ms", lambda row: f"{row.load_p50_ns / 1e6:,.1f}"),
        ("P99 of\nload ms", lambda row: f"{row.load_p99_ns / 1e6:,.1f}"),
    )
    for title, _ in columns:
        table.add_column(title, justify="right", no_wrap=True)
    for row in found.rows:
        table.add_row(*(show(row) for _, show in columns))
    out = console()
    out.print(table)
    loads = sorted({row.requests_hit_count for row in found.rows})
    over = f"{loads[0]:,}" if len(loads) == 1 else f"{loads[0]:,} to {loads[-1]:,}"
    span = units.format_ns(found.rows[0].span_ms * 1_000_000)
    out.print(
        f"CPU: of all metadata. Read: bytes loaded; in vain: what of them was not needed; GiB/s: "
        f"read ÷ the {span} of the trace. P50, P99: time of one load, over the {over} requests that load something.\n",
        markup=False,
    )
