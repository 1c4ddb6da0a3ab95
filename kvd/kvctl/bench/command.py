"""The command line of `kvctl bench`."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

app = typer.Typer(help="Measure this host against its own floors.", no_args_is_help=True)


@app.command()
def local(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    quick: Annotated[
        bool, typer.Option(help="A tenth of the work; the figures are not the documented ones.")
    ] = False,
) -> None:
    """Every figure of one host in one run, beside its floor. Takes some minutes; starts daemons of its own.

    Exit status 1 if a figure misses its target.
    """
    from kvd.kvctl.bench.local import Plan, measure

    errors = Console(stderr=True)
    with errors.status("starting") as status:
        result = measure(Plan.quick() if quick else Plan(), lambda text: status.update(text))
    rows = result["rows"]
    if as_json:
        figures = {row.key: row.value for row in rows}
        full = [{**asdict(row), "passed": row.passed} for row in rows]
        print(
            json.dumps(
                {**figures, "rows": full, **{k: v for k, v in result.items() if k != "rows"}}, indent=2
            )
        )
    else:
        _show(result)
    if not quick and any(row.passed is False for row in rows):
        raise typer.Exit(1)


def _show(result: dict[str, Any]) -> None:
    console = Console()
    table = Table(
        "figure", "what", "value", "target", "", "detail", title="kvctl bench local", title_justify="left"
    )
    for row in result["rows"]:
        value = (
            "not measured"
            if row.value is None
            else f"{row.value:.3g}"
            if row.value < 100
            else f"{row.value:,.0f}"
        )
        mark = {None: "", True: "[green]met[/]", False: "[red]missed[/]"}[row.passed]
        table.add_row(
            row.key,
            row.what,
            value,
            f"{row.bound} {row.target:g}" if row.target else "reported",
            mark,
            row.note,
        )
    console.print(table)
    for name, points in result["growth"].items():
        if points:
            growth = Table(*points[0], title=f"growth with {name}", title_justify="left")
            for point in points:
                growth.add_row(*(f"{v:,}" if isinstance(v, int) else f"{v:.3g}" for v in point.values()))
            console.print(growth)
    console.print(", ".join(f"{k} {v}" for k, v in result["host"].items()))
