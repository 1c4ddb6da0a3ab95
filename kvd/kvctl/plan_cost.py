"""`kvctl plan cost`: what a request that was served well costs, with and without.

Called by `kvd.kvctl.plan`, in the calling thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import typer

from kvd.errors import UsageError
from kvd.kvctl.plan_options import (
    JsonOption,
    PlotOption,
    guarded,
    named_parts,
    parse_whole,
    plots_for,
    report,
)
from kvd.plan import units
from kvd.plan.cost import Case, CostPlan

PARTS = ("hosts", "host-hour", "extra-hour", "offered", "good")
NEEDED = ("hosts", "host-hour", "offered", "good")


@guarded
def cost(
    case: Annotated[
        list[str],
        typer.Option(
            metavar="NAME:PART=VALUE,…",
            help="A way to serve, like kvd:hosts=8,host-hour=98.32,extra-hour=1.2,offered=12/s,good=11.4/s. Repeat; "
            "the first is what the others are compared with.",
        ),
    ],
    limits: Annotated[
        str, typer.Option(help="What a good request is, in words, like 'TTFT 2 s, TPOT 50 ms'.")
    ] = "",
    currency: Annotated[str, typer.Option(help="What prices are in.")] = "units",
    as_json: JsonOption = False,
    plot: PlotOption = None,
) -> None:
    """What does a request within the limits cost, if rejected and late ones are paid for too?"""
    plots = plots_for(plot)
    plan = CostPlan(
        cases=tuple(map(_case, case)), limits=limits.strip(), currency=currency.strip() or "units"
    )
    if plots is not None:
        plots.draw_cost(plan, plot)
    report("cost", {"Cost of service": plan}, as_json)


def _case(text: str) -> Case:
    """One --case. The extra price may be left out, and that is said."""
    name, found = named_parts("--case", text, PARTS, "a value")
    missing = [part for part in NEEDED if part not in found]
    if missing or not name:
        what = f"without {', '.join(missing)}" if missing else "without a name"
        raise UsageError(
            f"--case = {text!r}: {what}; allowed: NAME:hosts=N,host-hour=PRICE,offered=RATE,good=RATE "
            "and extra-hour=PRICE",
            code="missing", value=text,
        )  # fmt: skip
    where = f"--case {name}"
    return Case(
        name=name,
        hosts_count=_hosts(where, found),
        host_price=units.parse_price(found["host-hour"], f"{where}: host-hour"),
        extra_price=units.parse_price(found.get("extra-hour", "0"), f"{where}: extra-hour"),
        offered_per_s=units.parse_rate(found["offered"], f"{where}: offered"),
        good_per_s=units.parse_rate(found["good"], f"{where}: good"),
        not_given=() if "extra-hour" in found else ("extra-hour",),
    )


def _hosts(where: str, found: Mapping[str, str]) -> int:
    try:
        return parse_whole(found["hosts"])
    except typer.BadParameter as error:
        raise UsageError(f"{where}: hosts = {error.message}", code="quantity", value=found["hosts"]) from None
