"""`kvctl plan`: the planner on the command line.

Owns the group of the plans; they are in `plan_fleet` (capacity, network), `plan_load` (breakeven, route),
`plan_timeline`, `plan_sweep` (chunk) and `plan_cost`, what they share in `plan_options`. Called by `kvd.kvctl.main`,
which mounts `app`. Runs in the calling thread; only `breakeven --measure` touches a daemon.
"""

from __future__ import annotations

import typer

from kvd.kvctl.plan_cost import cost
from kvd.kvctl.plan_fleet import capacity, network
from kvd.kvctl.plan_load import breakeven, route
from kvd.kvctl.plan_options import EPILOG, PlanGroup
from kvd.kvctl.plan_sweep import chunk
from kvd.kvctl.plan_timeline import timeline

app = typer.Typer(
    name="plan",
    cls=PlanGroup,
    help="Arithmetic about a fleet, step by step: capacity, network, break-even, timeline, routing, chunk size, cost.",
    epilog=EPILOG,
    no_args_is_help=True,
    add_completion=False,
)
for command in (capacity, network, breakeven, timeline, route, chunk, cost):
    app.command(epilog=EPILOG)(command)
