"""`kvctl verify`: is what is stored still what was published?

Called by `kvd.kvctl.group`. The daemon walks the pool by itself at a bounded rate; this shows how far it is.
Interrupting it leaves the daemon walking; `--stop` ends that. Without this, and with readers that do not verify,
nobody looks.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from kvd.errors import UsageError
from kvd.kvctl import output
from kvd.kvctl.exits import ExitCode
from kvd.kvctl.objects import namespace_number
from kvd.kvctl.session import JsonOption, SocketOption, TimeoutOption, connected, print_json
from kvd.kvctl.status import walk_progress

if TYPE_CHECKING:
    from kvd.kvctl.session import Asking

LOOK_S = 0.2


def verify(
    ctx: typer.Context,
    rate: Annotated[
        str, typer.Option("--rate", metavar="SIZE", help="Bytes a second at most, such as 500MiB/s.")
    ] = "1GiB/s",
    namespace: Annotated[
        str | None,
        typer.Option(
            "--namespace", "-n", metavar="NAMESPACE", help="Number, label or root; default: everything."
        ),
    ] = None,
    stop: Annotated[bool, typer.Option("--stop", help="End a walk that goes on.")] = False,
    detach: Annotated[
        bool, typer.Option("--detach", help="Begin and do not wait; see kvctl status.")
    ] = False,
    socket: SocketOption = None,
    timeout: TimeoutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare everything stored with its checksums; take out of use what is damaged.

    Exit code 1 if damage was found. If a walk goes on already, it is shown instead of a second one begun.
    """
    if stop and detach:
        raise UsageError("--stop ends a walk and --detach begins one: give one of them", code="options")
    rate_bytes_s = _rate(rate)
    with connected(ctx, socket, timeout) as admin:
        if stop:
            answer = admin.call("verify_stop")
            result = answer["ended"]
            if result is None:
                raise UsageError(f"no walk goes on; {_last(answer['last'])}", code="not-found")
        else:
            params = {} if namespace is None else {"namespace": namespace_number(admin, namespace)}
            begun = admin.call("verify", rate=rate_bytes_s, **params)
            result = begun if detach else _follow(admin, begun, shown=not as_json)
    if as_json:
        print_json(result)
    elif detach:
        output.console().print(f"walk number {result['number']} goes on; kvctl status shows it")
    else:
        show(output.console(), result)
    if result["damaged"]:
        raise typer.Exit(ExitCode.NO)


def _last(last: dict[str, Any] | None) -> str:
    if last is None:
        return "nothing was verified since the daemon started"
    how = "was stopped" if last["stopped"] else "was done"
    return f"the last one, number {last['number']}, {how} {output.duration(last['ended_s'])} ago"


def _rate(text: str) -> int:
    from kvd.config import parse_size

    try:
        return parse_size(text.removesuffix("/s"))
    except ValueError as error:
        raise UsageError(
            f"--rate = {text} is not allowed: {error}, with or without /s", code="rate"
        ) from None


def _follow(admin: Asking, begun: dict[str, Any], *, shown: bool) -> dict[str, Any]:
    """Wait for the end of the walk; on a terminal its progress is one line that changes."""
    if shown and not begun["started"]:
        print(f"walk number {begun['number']} goes on already; this is that one", file=sys.stderr)
    live = shown and sys.stderr.isatty()
    while True:
        status = admin.call("verify_status")
        running = status["running"]
        if running is None or running["number"] != begun["number"]:
            if live:
                print("\r\033[K", end="", file=sys.stderr)
            last: dict[str, Any] = status["last"]
            return last
        if live:
            print(f"\r\033[K{walk_progress(running)}", end="", flush=True, file=sys.stderr)
        time.sleep(LOOK_S)


def show(out: Console, result: dict[str, Any]) -> None:
    """What a walk found."""
    took = output.duration(result["took_s"])
    end = "stopped" if result["stopped"] else "done"
    out.print(
        f"{end} in {took}: {output.count(result['objects'], 'object')} ({output.size(result['bytes'])}) intact"
    )
    if result["left"]:
        out.print(f"{output.count(result['left'], 'object')} left while looked at")
    if result["damaged"]:
        out.print(
            output.styled(
                f"damaged and withdrawn: {output.count(result['damaged'], 'object')}; families:", "bad"
            )
        )
        for key in result["keys"]:
            out.print(f"  {key}")
        out.print("who wrote them is in the daemon's log (object_damaged)")
