"""`kvctl why REQUEST`: what a request found, what it missed and for which reason, and where its time went.

Called by `kvd.kvctl.group`. The request id is hashed here and travels as that number; the daemon never learns ids.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import typer

from kvd.errors import UsageError
from kvd.kvctl import output
from kvd.kvctl.exits import ExitCode
from kvd.kvctl.session import JsonOption, SocketOption, TimeoutOption, connected, print_json

_CAUSES: Final = {
    "never stored here": "was never stored here",
    "being written": "was being written by somebody",
}


def why(
    ctx: typer.Context,
    request: Annotated[
        str, typer.Argument(metavar="REQUEST", help="The request id that the engine gave to kvd.")
    ],
    socket: SocketOption = None,
    timeout: TimeoutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Tell what a request found, what it missed and why.

    One line that answers, then its look-ups with their times. Exit code 1 if the request is not known.
    """
    from kvd.clientlib.store import Store

    if not request:
        raise UsageError("REQUEST is empty: give the request id that the engine gave to kvd", code="request")
    number = Store.request(request)
    with connected(ctx, socket, timeout) as admin:
        answer = admin.call("why", request=number)
    if as_json:
        print_json(answer)
    else:
        show(request, answer)
    if not answer["known"]:
        raise typer.Exit(ExitCode.NO)


def show(request: str, answer: dict[str, Any]) -> None:
    """Print the explanation for people: one line that answers, then the tables."""
    out = output.console()
    out.print(headline(request, answer))
    if not answer["known"]:
        return
    out.print()
    if answer["touches"]:
        output.print_table(
            out,
            ("stage", "when", "took", "chunks", "size", "first miss"),
            [_touch(touch) for touch in answer["touches"]],
            right=(1, 2, 3, 4),
        )
        hidden = answer["touches_count"] - len(answer["touches"])
        if hidden > 0:
            out.print(
                f"(the last {len(answer['touches'])}; {output.count(hidden, 'earlier look-up')} not kept)"
            )
        out.print()
    out.print(output.facts(_totals(answer)))


def headline(request: str, answer: dict[str, Any]) -> str:
    """The one line that answers the question."""
    if not answer["known"]:
        kept = answer["requests_kept_max"]
        return (
            f"{request}: nothing is known of it. The daemon keeps the last {kept:,} requests since it started; "
            "engines must pass the request id"
        )
    # The match that asked for most says what the request wanted; a lease of fewer chunks is only its consequence.
    looked = [touch for touch in answer["touches"] if touch["asked"]]
    if not looked:
        line = f"{request}: looked nothing up"
    else:
        asked = max(touch["asked"] for touch in looked)
        best = [touch for touch in looked if touch["asked"] == asked][-1]
        line = f"{request}: found {best['matched']} of {output.count(asked, 'chunk')}"
        if best["matched"] < asked and best["missed_because"]:
            line += f"; chunk {best['matched']} {_cause(best['missed_because'])}"
    if answer["published"]:
        line += f"; published {output.count(answer['published'], 'object')}"
    if answer["errors"]:
        line += f"; {output.count(len(answer['errors']), 'error')}, last: {answer['errors'][-1]['message']}"
    return line


def _cause(text: str) -> str:
    return _CAUSES.get(text, f"was {text}")


def _touch(touch: dict[str, Any]) -> tuple[str, ...]:
    miss = "-"
    if touch["missed_key8"]:
        # The number is the first 8 bytes read as a little-endian integer; a key is shown byte by byte.
        digits = bytes.fromhex(touch["missed_key8"])[::-1].hex()
        miss = f"{digits} {touch['missed_because']}"
    return (
        touch["kind"],
        f"{output.duration(touch['age_ns'] / 1e9)} ago",
        output.took(touch["took_ns"]),
        f"{touch['matched']} of {touch['asked']}",
        output.size(touch["bytes"]) if touch["bytes"] else "-",
        miss,
    )


def _totals(answer: dict[str, Any]) -> list[tuple[str, str]]:
    by_stage: dict[str, int] = {}
    for touch in answer["touches"]:
        by_stage[touch["kind"]] = by_stage.get(touch["kind"], 0) + touch["took_ns"]
    span_ns = answer["first_age_ns"] - answer["last_age_ns"]
    first_ago = output.duration(answer["first_age_ns"] / 1e9)
    later = output.took(span_ns) if span_ns < 1_000_000_000 else output.duration(span_ns / 1e9)
    rows = [("seen", f"first {first_ago} ago, last {later} later" if span_ns else f"{first_ago} ago")]
    if answer["published"]:
        by_stage["write"] = answer["writing_ns"]
    if by_stage:
        rows.append(("time", ", ".join(f"{kind} {output.took(total)}" for kind, total in by_stage.items())))
    reserved = [
        f"{output.count(answer['granted'], 'object')} reserved ({output.size(answer['reserved_bytes'])})"
    ]
    reserved += [
        f"{answer[name]:,} {word}"
        for name, word in (
            ("present", "there already"), ("pending", "being written by others"), ("published", "published"),
            ("aborted", "given back"),
        )
        if answer[name]
    ]  # fmt: skip
    if answer["granted"] or answer["present"] or answer["pending"]:
        rows.append(("wrote", ", ".join(reserved)))
    if answer["evicted_families"]:
        families = output.count(answer["evicted_families"], "family", "families")
        rows.append(("made room", f"by evicting {families}, {output.size(answer['evicted_bytes'])}"))
    rows += [
        ("error", f"{output.duration(error['age_ns'] / 1e9)} ago: {error['message']}")
        for error in answer["errors"]
    ]
    return rows
