"""`kvctl plan`: the planner on the command line.

Owns the group of the five plans; they are in `plan_fleet` (capacity, network), `plan_load` (breakeven, route) and
`plan_sweep` (chunk), what they share in `plan_options`. Called by `kvd.kvctl.main`, which mounts `app`. Runs in the
calling thread; only `breakeven --measure` touches a daemon.
"""

from __future__ import annotations

import typer

from kvd.kvctl.plan_fleet import capacity, network
from kvd.kvctl.plan_load import breakeven, route
from kvd.kvctl.plan_options import EPILOG, PlanGroup
from kvd.kvctl.plan_sweep import chunk

app = typer.Typer(
    name="plan",
    cls=PlanGroup,
    help="Arithmetic about a fleet, step by step: capacity, network, break-even, routing, chunk size.",
    epilog=EPILOG,
    no_args_is_help=True,
    add_completion=False,
)
for command in (capacity, network, breakeven, route, chunk):
    app.command(epilog=EPILOG)(command)
