"""`kvctl trace`: record the events of the daemon's core, replay them to the same state.

Called by `kvd.kvctl.group`. The daemon writes the file, in its own name; replaying needs no daemon, only the same
release: it steps a core of its own and compares what it does with what was recorded. Interrupting `record` ends the
recording.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvd.errors import CompatibilityError, ProtocolError, UsageError
from kvd.kvctl import output
from kvd.kvctl.exits import ExitCode
from kvd.kvctl.session import JsonOption, SocketOption, TimeoutOption, connected, print_json

if TYPE_CHECKING:
    from kvd.core.trace import Replay
    from kvd.kvctl.session import Asking

LOOK_S = 0.2
READ_BYTES = 1 << 20
WRITTEN_WITHIN_S = 30.0
app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Record the core's events; replay them to the same state.",
)
FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="Of the trace.")]


@app.command()
def record(
    ctx: typer.Context,
    file: FileArgument,
    seconds: Annotated[
        float, typer.Option("--seconds", metavar="SECONDS", help="How long to record.", min=0.0)
    ] = 10.0,
    limit: Annotated[
        str, typer.Option("--limit", metavar="SIZE", help="How large the file may become.")
    ] = "1GiB",
    socket: SocketOption = None,
    timeout: TimeoutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Record for some seconds in a new file, which the daemon makes.

    Exit code 1 if the recording ended before its time: the limit, or a disk that could not keep up.
    """
    from kvd.config import parse_size

    with connected(ctx, socket, timeout) as admin:
        admin.call("trace_start", path=str(file.absolute()), limit_bytes=parse_size(limit))
        try:
            _wait(admin, seconds)
        finally:
            if admin.call("trace_status")["recording"]:
                admin.call("trace_stop")
            result = _written(admin)
    if as_json:
        print_json(result)
    else:
        out = output.console()
        out.print(
            f"{file}: {output.count(result['events'], 'event')}, {output.size(result['bytes'])} in "
            f"{output.duration(result['seconds'])}"
        )
        if result["ended"] != "stopped" or result["error"]:
            out.print(output.styled(f"ended early: {result['error'] or result['ended']}", "warn"))
    if result["ended"] != "stopped" or result["error"]:
        raise typer.Exit(ExitCode.NO)


def _wait(admin: Asking, seconds: float) -> None:
    ends_s = time.monotonic() + seconds
    while (left_s := ends_s - time.monotonic()) > 0:
        time.sleep(min(LOOK_S, left_s))
        if not admin.call("trace_status")["recording"]:
            return


def _written(admin: Asking) -> dict[str, Any]:
    """The final status, once the file is complete."""
    ends_s = time.monotonic() + WRITTEN_WITHIN_S
    while True:
        status: dict[str, Any] = admin.call("trace_status")
        if status.get("written") or time.monotonic() > ends_s:
            return status
        time.sleep(LOOK_S / 10)


@app.command()
def replay(
    file: FileArgument,
    upto: Annotated[
        int | None, typer.Option("--upto", metavar="EVENT", help="Stop after this event.", min=1)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Replay a recording in a core of its own; say whether it does and becomes the same.

    Exit code 1 at the first difference, whose event is named.
    """
    from kvd.core.trace import Replay

    replayed = Replay()
    for value in _values(file):
        try:
            replayed.take(value)
        except (ProtocolError, CompatibilityError) as error:
            error.message = f"{file}: {error.message}"
            raise
        if replayed.done or (upto is not None and replayed.events >= upto):
            break
    if replayed.core is None:
        raise ProtocolError(f"{file} ends before the state at the start: it is no whole trace", code="trace")
    result = _result(replayed, upto)
    if as_json:
        print_json(result)
    else:
        _show(file, result)
    if replayed.difference:
        raise typer.Exit(ExitCode.NO)


def _values(file: Path) -> Iterator[Any]:
    """The msgpack values of a file; one that is cut off at the end is left out."""
    import msgpack

    try:
        source = file.open("rb")
    except OSError as error:
        raise UsageError(
            f"{file} cannot be read: {error.strerror}", code="trace-file", path=str(file)
        ) from None
    with source:
        values = msgpack.Unpacker(raw=False, strict_map_key=False, max_buffer_size=1 << 31)
        while data := source.read(READ_BYTES):
            values.feed(data)
            while True:
                try:
                    yield values.unpack()
                except msgpack.OutOfData:
                    break
                except (ValueError, msgpack.UnpackException) as error:
                    raise ProtocolError(f"{file} is damaged or no trace: {error}", code="trace") from None


def _result(replayed: Replay, upto: int | None) -> dict[str, Any]:
    statistics = replayed.core.statistics() if replayed.core is not None else {}
    stopped_here = upto is not None and not replayed.done
    return {
        "equal": not replayed.difference,
        "difference": replayed.difference,
        "events": replayed.events,
        "checks": replayed.checks,
        "ended": replayed.ended
        or ("stopped here" if stopped_here else "without an end: the daemon was killed"),
        "domain": replayed.header.get("domain"),
        "kinds": dict(sorted(replayed.kinds.items(), key=lambda item: -item[1])),
        "statistics": statistics,
    }


def _show(file: Path, result: dict[str, Any]) -> None:
    out = output.console()
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in result["kinds"].items()) or "none"
    out.print(f"{file}: {output.count(result['events'], 'event')} ({kinds})")
    if result["equal"]:
        checks = output.count(result["checks"], "comparison")
        out.print(output.styled(f"equal: effects of every event, {checks} of the state", "ok"))
    else:
        out.print(output.styled(f"different: {result['difference']}", "bad"))
    statistics = result["statistics"]
    out.print(
        f"ended: {result['ended']}; {output.count(statistics['families'], 'family', 'families')}, "
        f"{output.count(statistics['records'], 'object')}, "
        f"{output.count(statistics['reservations'], 'reservation')}"
    )
