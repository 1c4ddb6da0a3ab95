"""`kvctl pin`, `unpin`, `withdraw`, `clear`, `stop`: what changes the daemon. Each is a line in its audit log."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer

from kvd.kvctl import output
from kvd.kvctl.clients import print_holders
from kvd.kvctl.exits import ExitCode
from kvd.kvctl.objects import KeyArgument, namespace_number
from kvd.kvctl.session import JsonOption, SocketOption, TimeoutOption, connected, print_json

CLEAR_DEADLINE_S = 120.0
_CAUSES = {
    "leased": "leased",
    "pinned": "pinned hard (kvctl unpin KEY)",
    "reserved": "a prefix of what is being written",
    "written meanwhile": "a prefix of what was written meanwhile",
}


class Kind(StrEnum):
    """How to pin."""

    SOFT = "soft"
    HARD = "hard"


def pin(
    ctx: typer.Context,
    key: KeyArgument,
    kind: Annotated[
        Kind,
        typer.Option("--kind", help="soft: evicted last; hard: not evicted, within eviction.pinned_share."),
    ] = Kind.SOFT,
    socket: SocketOption = None,
    timeout: TimeoutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Keep the prefix that ends at KEY.

    The family KEY and everything before it in its chain.
    """
    with connected(ctx, socket, timeout) as admin:
        answer = admin.call("pin", key=key, kind=kind.value)
    if as_json:
        print_json(answer)
        return
    what = f"pinned ({kind.value})" if answer["pins_added"] else "was pinned already"
    output.console().print(f"{key} {what}; {output.size(answer['pinned_bytes'])} are pinned hard in all")


def unpin(
    ctx: typer.Context,
    key: KeyArgument,
    socket: SocketOption = None,
    timeout: TimeoutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove the pin that ends at KEY.

    Or behind it in the same run. Exit code 1 if there was none.
    """
    with connected(ctx, socket, timeout) as admin:
        answer = admin.call("unpin", key=key)
    removed = answer["pins_removed"]
    if as_json:
        print_json(answer)
    elif removed:
        still = f"{output.size(answer['pinned_bytes'])} are pinned hard now"
        output.console().print(f"{output.count(removed, 'pin')} removed; {still}")
    else:
        output.console().print(f"no pin ends at {key}: give the key that was pinned")
    if not removed:
        raise typer.Exit(ExitCode.NO)


def withdraw(
    ctx: typer.Context,
    key: KeyArgument,
    socket: SocketOption = None,
    timeout: TimeoutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take damaged data out of use.

    KEY and everything behind it is not found any more, pinned or not. Who reads it goes on reading.
    """
    with connected(ctx, socket, timeout) as admin:
        answer = admin.call("withdraw", key=key)
        holders = admin.call("clients") if answer["held_families"] else []
    if as_json:
        print_json(answer)
        return
    out = output.console()
    withdrawn = output.count(answer["families"] + answer["held_families"], "family", "families")
    out.print(f"withdrawn: {withdrawn}; {output.size(answer['bytes'])} free now")
    if answer["held_families"]:
        held = output.count(answer["held_families"], "family", "families")
        out.print(f"{held}, {output.size(answer['held_bytes'])}, are free when their readers let go:")
        print_holders(out, holders)


def clear(
    ctx: typer.Context,
    namespace: Annotated[
        str | None,
        typer.Option(
            "--namespace", "-n", metavar="NAMESPACE", help="Number, label or root; default: everything."
        ),
    ] = None,
    socket: SocketOption = None,
    timeout: TimeoutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Drop what is stored; say what stays and who holds it.

    What is leased, pinned hard or being extended stays, with the prefixes before it. Exit code 1 if something stays.
    """
    with connected(ctx, socket, timeout, CLEAR_DEADLINE_S) as admin:
        params = {} if namespace is None else {"namespace": namespace_number(admin, namespace)}
        answer = admin.call("clear", **params)
        holders = [row for row in admin.call("clients") if row["leases"]] if answer["kept"] else []
    if as_json:
        wanted = ("slot", "pid", "name", "leases", "leased_bytes")
        print_json({**answer, "holders": [{name: row[name] for name in wanted} for row in holders]})
    else:
        _show_clear(answer, holders)
    if answer["kept"]:
        raise typer.Exit(ExitCode.NO)


def _show_clear(answer: dict[str, Any], holders: list[dict[str, Any]]) -> None:
    out = output.console()
    families = output.count(answer["families"], "family", "families")
    out.print(f"dropped {families}, {output.size(answer['bytes'])}")
    for cause, kept in answer["kept"].items():
        families = output.count(kept["families"], "family", "families")
        out.print(
            output.styled(
                f"kept {families}, {output.size(kept['bytes'])}: {_CAUSES.get(cause, cause)}", "warn"
            )
        )
    if answer["limbo_families"]:
        out.print(
            f"{output.count(answer['limbo_families'], 'family', 'families')} withdrawn before, still held"
        )
    if holders:
        out.print("leases are held by:")
        print_holders(out, holders)


def stop(
    ctx: typer.Context,
    socket: SocketOption = None,
    timeout: TimeoutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Stop the daemon in order. What is in the pool is lost, and recomputed when it is needed."""
    with connected(ctx, socket, timeout) as admin:
        pid = admin.welcome.pid
        answer = admin.call("stop")
    if as_json:
        print_json({**answer, "pid": pid})
    else:
        limit = output.duration(answer["stop_timeout_s"])
        output.console().print(f"stopping pid {pid}; it ends within {limit}")
