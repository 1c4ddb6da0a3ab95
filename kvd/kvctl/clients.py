"""`kvctl clients`: who is attached, what each holds, who left without going."""

from __future__ import annotations

from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from kvd.kvctl import output
from kvd.kvctl.session import JsonOption, SocketOption, TimeoutOption, connected, print_json


def clients(
    ctx: typer.Context,
    socket: SocketOption = None,
    timeout: TimeoutOption = None,
    as_json: JsonOption = False,
) -> None:
    """List attached processes, their leases and their traffic."""
    with connected(ctx, socket, timeout) as admin:
        rows = admin.call("clients")
    if as_json:
        print_json(rows)
        return
    out = output.console()
    if not rows:
        out.print("no clients")
        return
    output.print_table(
        out,
        ("slot", "pid", "access", "age", "leases", "held", "hits", "user", "name"),
        [_row(row) for row in rows],
        right=(0, 1, 4, 5, 6, 7),
    )
    if any(row["over_lease_limit"] for row in rows):
        out.print(output.styled("! holds more than clients.leased_max allows", "warn"))
    for row in rows:
        if row["blocks_reclaim_s"] is not None:
            out.print(
                output.styled(
                    f"{row['name']} (pid {row['pid']}, slot {row['slot']}) has held memory that was to be reused for "
                    f"{output.duration(row['blocks_reclaim_s'])}",
                    "warn",
                )
            )
    if any(row["state"] != "attached" for row in rows):
        out.print("left, refused: disconnected, but the process lives; what it holds comes back when it ends")


def print_holders(out: Console, rows: list[dict[str, Any]]) -> None:
    """Those of these clients that hold leases."""
    output.print_table(
        out,
        ("slot", "pid", "user", "leases", "held", "name"),
        [
            (str(row["slot"]), str(row["pid"]), str(row["uid"]), f"{row['leases']:,}", output.size(row["leased_bytes"]),
             row["name"])
            for row in rows
            if row["leases"]
        ],
        right=(0, 1, 2, 3, 4),
    )  # fmt: skip


def _row(row: dict[str, Any]) -> tuple[str | Text, ...]:
    counters = row["counters"]
    access: str | Text = row["access"]
    if row["hostile"]:
        access = output.styled("refused", "bad")
    elif row["state"] != "attached":
        access = output.styled("left", "warn")
    held = output.size(row["leased_bytes"])
    return (
        str(row["slot"]),
        str(row["pid"]),
        access,
        output.duration(row["attached_s"]),
        f"{row['leases']:,}",
        output.styled(f"{held} !", "warn") if row["over_lease_limit"] else held,
        output.share(counters["keys_hit"], counters["keys_asked"]),
        str(row["uid"]),
        row["name"],
    )
