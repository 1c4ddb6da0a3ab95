"""What `kvctl plan` prints: a ledger, the traffic matrix, the rows of a sweep. Called by `kvd.kvctl.plan` alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction

from rich import box
from rich.console import Console
from rich.table import Table

from kvd.plan import units
from kvd.plan.chunk import ChunkRow, ChunkSweep
from kvd.plan.ledger import Ledger, plain
from kvd.plan.network import NetworkPlan

matrix_shown_nodes_max = 7  # what fits 80 columns


def console() -> Console:
    """Standard output."""
    return Console(highlight=False)


def print_ledger(title: str, ledger: Ledger) -> None:
    out = console()
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("step")
    table.add_column("how", overflow="fold")
    table.add_column("value", justify="right", no_wrap=True)
    for step in ledger.steps:
        # ≈ belongs to a result; within an expression it would only be in the way.
        table.add_row(step.label, step.expression.replace("≈ ", ""), step.text)
    out.print(table)
    out.print("Assumed:", style="bold")
    for assumption in ledger.assumptions:
        out.print(f"  - {assumption}", soft_wrap=True, markup=False)
    out.print(f"\n{ledger.conclusion}\n", style="bold", soft_wrap=True, markup=False)


def print_matrix(plan: NetworkPlan) -> None:
    """The directed traffic matrix, rows send and columns receive, with the sums that links have to carry."""
    matrix = plan.matrix
    nodes = range(len(matrix.nodes))
    shown = [n for n in nodes if n < matrix_shown_nodes_max]
    cut = len(matrix.nodes) - len(shown)
    title = "GiB/s from row to column" + (f" (first {len(shown)} of {len(matrix.nodes)})" if cut else "")
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for name in [*(matrix.nodes[n] for n in shown), "sends"]:
        table.add_column(name, justify="right", no_wrap=True)
    for source in shown:
        cells = [_gib(matrix.bytes_per_s[source][target]) for target in shown]
        cells[source] = "-"
        table.add_row(matrix.nodes[source], *cells, _gib(matrix.egress_bytes_per_s[source]))
    table.add_row("receives", *(_gib(matrix.ingress_bytes_per_s[n]) for n in shown), "")
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
        ("fetched\nGiB", lambda row: f"{row.fetched_bytes / gib:,.1f}"),
        ("in vain\nGiB", lambda row: f"{row.fetched_in_vain_bytes / gib:,.1f}"),
        ("mean\nGiB/s", lambda row: f"{float(row.fetched_mean_bytes_per_s) / gib:,.2f}"),
        ("P50\nms", lambda row: f"{row.load_p50_ns / 1e6:,.1f}"),
        ("P99\nms", lambda row: f"{row.load_p99_ns / 1e6:,.1f}"),
    )
    for title, _ in columns:
        table.add_column(title, justify="right", no_wrap=True)
    for row in found.rows:
        table.add_row(*(show(row) for _, show in columns))
    console().print(table)


def row_dict(row: ChunkRow) -> dict[str, object]:
    """All fields of a row, and its usable share."""
    names = row.__dataclass_fields__
    return {**{name: plain(getattr(row, name)) for name in names}, "usable_share": plain(row.usable_share)}
