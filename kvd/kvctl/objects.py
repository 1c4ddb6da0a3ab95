"""`kvctl ls` and `kvctl inspect`: what is stored.

Called by `kvd.kvctl.group`. `inspect --verify` attaches as a reader, so it needs a client slot; nothing else here does.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from kvd.errors import CorruptionError, UsageError
from kvd.kvctl import output
from kvd.kvctl.exits import ExitCode
from kvd.kvctl.session import (
    JsonOption,
    SocketOption,
    TimeoutOption,
    connected,
    deadline_of,
    print_json,
    socket_of,
)
from kvd.kvctl.status import print_namespaces

if TYPE_CHECKING:
    from kvd.kvctl.session import Asking

LS_FAMILIES = 100  # shown without --limit
PAGE_FAMILIES = 1000
PAGE_NAMESPACES = 1000
KeyArgument = Annotated[
    str, typer.Argument(metavar="KEY", help="Hex digits of the key, the first 8 or more.")
]


def ls(
    ctx: typer.Context,
    namespace: Annotated[
        str | None,
        typer.Argument(metavar="NAMESPACE", help="Number, label or root; without it: all namespaces."),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option("--limit", min=1, help=f"Families shown at most; default: {LS_FAMILIES}."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All families; not with --limit.")] = False,
    socket: SocketOption = None,
    timeout: TimeoutOption = None,
    as_json: JsonOption = False,
) -> None:
    """List namespaces, or the families (chunks) of one namespace."""
    if everything and limit is not None:
        raise UsageError(
            f"--all shows every family and --limit {limit} at most {limit}: give one of them", code="options"
        )
    with connected(ctx, socket, timeout) as admin:
        if namespace is None:
            rows = _namespaces(admin)
        else:
            number = namespace_number(admin, namespace)
            rows, more = _families(admin, number, None if everything else limit or LS_FAMILIES)
    out = output.console()
    if namespace is None:
        if as_json:
            print_json(rows)
        elif rows:
            print_namespaces(out, rows)
        else:
            out.print("no namespaces: no client has registered one yet")
    elif as_json:
        print_json({"families": rows, "more": more})
    else:
        _show_families(out, rows, more=more)


def inspect(
    ctx: typer.Context,
    key: KeyArgument,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read the bytes and compare them with their checksums.")
    ] = False,
    socket: SocketOption = None,
    timeout: TimeoutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show one family: its members, where they lie, who holds it.

    Exit code 1 if it is absent or damaged.
    """
    with connected(ctx, socket, timeout) as admin:
        answer = admin.call("inspect", key=key)
        holders = [row for row in admin.call("clients") if row["slot"] in answer["holders"]]
        named = admin.call("namespaces", start=answer["namespace"], limit=1)["namespaces"]
    answer["holders"] = [{name: row[name] for name in ("slot", "pid", "name")} for row in holders]
    if verify:
        _verify(socket_of(ctx, socket), answer, deadline_of(ctx, timeout))
    if as_json:
        print_json(answer)
    else:
        labels = [row["label"] for row in named if row["number"] == answer["namespace"]]
        _show_family(output.console(), answer, labels[0] if labels else "?")
    if any(member.get("verified") is False for member in answer["members"]):
        raise typer.Exit(ExitCode.NO)


def namespace_number(admin: Asking, text: str) -> int:
    """The number of the namespace that a person named by number, label or the beginning of its root."""
    known = _namespaces(admin)
    matches = [row for row in known if text in (str(row["number"]), row["label"], row["root"])]
    if not matches and len(text) >= 8:
        matches = [row for row in known if row["root"].startswith(text.lower())]
    if len(matches) == 1:
        return int(matches[0]["number"])
    if matches:
        numbers = ", ".join(str(row["number"]) for row in matches)
        raise UsageError(
            f"{text!r} names the namespaces {numbers}; give a number", code="namespace", namespace=text
        )
    listed = ", ".join(f"{row['number']} ({row['label']})" for row in known[:8]) or "none"
    raise UsageError(
        f"there is no namespace {text!r}; kvctl ls shows them: {listed}{', …' if len(known) > 8 else ''}",
        code="not-found", namespace=text,
    )  # fmt: skip


def _namespaces(admin: Asking) -> list[dict[str, Any]]:
    """All namespaces, page by page."""
    rows: list[dict[str, Any]] = []
    start: int | None = 1
    while start is not None:
        page = admin.call("namespaces", start=start, limit=PAGE_NAMESPACES)
        rows += page["namespaces"]
        start = page["next"]
    return rows


def _families(admin: Asking, namespace: int, limit: int | None) -> tuple[list[dict[str, Any]], bool]:
    """Families of a namespace, page by page, up to `limit` (None: all), and whether there are more."""
    rows: list[dict[str, Any]] = []
    start: int | None = 0
    while start is not None and (limit is None or len(rows) < limit):
        ask = PAGE_FAMILIES if limit is None else min(PAGE_FAMILIES, limit - len(rows))
        page = admin.call("ls", namespace=namespace, start=start, limit=ask)
        rows += page["families"]
        start = page["next"]
    return rows, start is not None


def _depth(families: int | None, before: str = "") -> str:
    """How many lie before it; the daemon counts no further than a thousand requests."""
    return "far down" if families is None else f"{before}{families:,}"


def _show_families(out: Console, rows: list[dict[str, Any]], *, more: bool) -> None:
    if not rows:
        out.print("no families in this namespace")
        return
    first = "key" if out.width >= output.WIDE_COLUMNS else "key (begins with)"
    output.print_table(
        out,
            (first, "chunk", "size", "members", "idle", "pin"),
            [
                (
                    output.key(out, row["key"]),
                    _depth(row["depth"]),
                    output.size(row["size_bytes"]),
                    _members(row),
                    output.duration(row["idle_s"]),
                    "-" if row["pin"] == "none" else row["pin"],
                )
                for row in rows
            ],
            right=(1, 2, 3),
    )  # fmt: skip
    if more:
        out.print(f"{len(rows):,} shown; more with --limit N or --all")


def _members(row: dict[str, Any]) -> str:
    have = row["members_count"] - row["missing"]
    return str(have) if not row["missing"] else f"{have} of {row['members_count']}"


def _show_family(out: Console, answer: dict[str, Any], label: str) -> None:
    holders = ", ".join(f"{row['name']} (pid {row['pid']})" for row in answer["holders"]) or "nobody"
    missing = (
        f", {answer['missing']} of {answer['members_count']} members missing" if answer["missing"] else ""
    )
    rows = [
        ("key", answer["key"]),
        ("namespace", f"{answer['namespace']} ({label})"),
        ("chunk", f"{_depth(answer['depth'], 'number ')} in its chain, generation {answer['generation']}"),
        ("state", f"{answer['state']}{missing}"),
        ("size", f"{output.size(answer['size_bytes'])} of the pool"),
        ("idle", output.duration(answer["idle_s"])),
        ("pin", answer["pin"]),
        ("leased by", holders),
    ]
    if answer["split"]:
        rows.append(("split", ", ".join(f"{name} {value}" for name, value in answer["split"].items())))
    out.print(output.facts(rows))
    out.print()
    verified = any("verified" in member for member in answer["members"])
    output.print_table(
        out,
        (
            "member",
            "size",
            "segment",
            "offset",
            "heads",
            "layers",
            "checksum",
            *(["bytes"] if verified else []),
        ),
        [
            (
                str(member["member"]),
                output.size(member["size_bytes"]),
                str(member["segment"]),
                f"{member['offset']:#x}",
                _range(member["heads"]),
                _range(member["layers"]),
                member["checksum"],
                *([_verdict(member)] if verified else []),
            )
            for member in answer["members"]
        ],
        right=(0, 1, 2, 3),
    )
    damaged = [member for member in answer["members"] if member.get("verified") is False]
    if damaged:
        advice = (
            "The daemon found the same and took it out of use"
            if any(member["withdrawn"] for member in damaged)
            else f"Take it out of use: kvctl withdraw {answer['key'][:16]}"
        )
        out.print(output.styled(f"damaged: the bytes are not those that were published. {advice}", "bad"))


def _range(pair: list[int]) -> str:
    return "all" if pair == [0, 0] else f"{pair[0]}-{pair[1] - 1}"


def _verdict(member: dict[str, Any]) -> Any:
    return output.styled("intact", "ok") if member["verified"] else output.styled("DAMAGED", "bad")


def _verify(path: str, answer: dict[str, Any], deadline_s: float) -> None:
    """Read every member under one lease (damage withdraws the family), compare, and note the outcome with it."""
    from kvd.clientlib.store import connect

    identity = bytes.fromhex(answer["key"])
    with connect(path, client="kvctl inspect", access="read", deadline_s=deadline_s) as store:
        lease = store.fetch(identity, answer["members"][0]["member"]) if answer["members"] else None
        if lease is None:
            raise UsageError(
                f"the family {answer['key'][:16]} left while it was looked at; nothing to verify",
                code="not-found",
            )
        with contextlib.closing(_Release(lease)):
            for member in answer["members"]:
                try:
                    lease.verify(member["member"])
                    member["verified"] = True
                except CorruptionError as error:
                    member["verified"] = False
                    member["found"] = error.fields["found"]
                    member["withdrawn"] = bool(error.fields["withdrawn"])


class _Release:
    """`close` for `contextlib.closing`."""

    def __init__(self, lease: Any) -> None:
        self.close = lease.release
