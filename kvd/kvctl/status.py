"""`kvctl status` and `kvctl health`: how the daemon is, on one screen.

Called by `kvd.kvctl.group`. What is not as configured comes first and in colour; zeros that would only say
that nothing happened are left out for people (`--json` has all of them).
"""

from __future__ import annotations

from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from kvd.kvctl import output
from kvd.kvctl.exits import ExitCode
from kvd.kvctl.session import JsonOption, SocketOption, TimeoutOption, connected, print_json
from kvd.version import VERSION

_STATE_STYLES = {"ok": "ok", "starting": "warn", "degraded": "warn"}
_REASONS = {
    "space": "for space", "window": "for larger objects", "entries": "index full", "records": "records full",
    "partial": "incomplete", "clear": "cleared", "withdraw": "withdrawn",
}  # fmt: skip


def status(
    ctx: typer.Context,
    socket: SocketOption = None,
    timeout: TimeoutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show health, pool, index, clients, hits and evictions."""
    with connected(ctx, socket, timeout) as admin:
        answer = admin.call("status")
    if as_json:
        print_json(answer)
        return
    show(output.console(), answer)


def health(
    ctx: typer.Context,
    socket: SocketOption = None,
    timeout: TimeoutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say whether the daemon is well.

    Exit code 1 if it is not: for probes and scripts.
    """
    with connected(ctx, socket, timeout) as admin:
        answer = admin.call("health")
    if as_json:
        print_json(answer)
    else:
        out = output.console()
        out.print(_state(answer["state"]))
        _show_parts(out, answer)
    if answer["state"] not in _STATE_STYLES:
        raise typer.Exit(ExitCode.NO)


def show(out: Console, answer: dict[str, Any]) -> None:
    """Print a status for people."""
    pool, core, clients = answer["pool"], answer["core"], answer["clients"]
    head = Text.assemble(
        (f"kvd {answer['version']} ", "bold"),
        _state(answer["state"]),
        f"  pid {answer['pid']}, up {output.duration(answer['uptime_s'])}, {answer['socket']}",
    )
    out.print(head)
    if answer["version"] != VERSION:
        out.print(output.styled(f"this kvctl is {VERSION}: install the same release on both sides", "warn"))
    _show_parts(out, answer["health"])
    out.print()
    out.print(
        output.facts(
            [
                ("pool", _pool_line(pool)),
                ("", _space_line(core["pool"])),
                ("index", _index_line(answer)),
                ("clients", _clients_line(clients)),
                ("lookups", _lookups_line(answer["lookups"], answer["counters"])),
                ("writes", _writes_line(answer["counters"])),
                ("evicted", _evicted_line(answer["counters"])),
                *_refused(answer["counters"]),
                *_verified(answer),
                ("memory", _memory_line(answer)),
            ]
        )
    )
    if answer["namespaces"]:
        out.print()
        print_namespaces(out, answer["namespaces"])
        more = answer["namespaces_count"] - len(answer["namespaces"])
        if more:
            out.print(f"{more:,} more hold less: kvctl ls shows all")


def print_namespaces(out: Console, namespaces: list[dict[str, Any]]) -> None:
    """One row a namespace."""
    output.print_table(
        out,
        ("namespace", "families", "size", "tenant", "label"),
        [
            (str(row["number"]), f"{row['families']:,}", output.size(row["bytes"]), row["tenant"] or "-", row["label"])
            for row in namespaces
        ],
        right=(0, 1, 2),
    )  # fmt: skip


def walk_progress(running: dict[str, Any]) -> str:
    """One line on a walk of kvctl verify that goes on."""
    damaged = f", {output.count(running['damaged'], 'object')} damaged" if running["damaged"] else ""
    return (
        f"{output.share(running['progress'], 1)} of the index, {output.count(running['objects'], 'object')} "
        f"({output.size(running['bytes'])}) intact{damaged}"
    )


def _state(state: str) -> Text:
    return output.styled(state, _STATE_STYLES.get(state, "bad"))


def _show_parts(out: Console, answer: dict[str, Any]) -> None:
    """The parts that are not well, each with its reason."""
    for name, part in answer["parts"].items():
        if part["state"] != "ok":
            reason = f": {part['reason']}" if part["reason"] else ""
            out.print(Text.assemble(f"  {name} is ", _state(part["state"]), reason))
    if answer["restarts"]:
        out.print(
            output.styled(f"  {output.count(answer['restarts'], 'restart')} of parts; see the log", "warn")
        )


def _pool_line(pool: dict[str, Any]) -> Text:
    population = pool["population"]
    parts: list[str | Text] = [
        f"{output.size(pool['size_bytes'])} in {output.count(len(pool['segments']), 'segment')}"
    ]
    if population["error"]:
        parts.append(output.styled(f"only {output.size(population['populated_bytes'])} populated", "bad"))
    elif not population["done"]:
        parts.append(output.styled(_progress(population), "warn"))
    huge_bytes = population["huge_bytes"]
    if (
        population["done"]
        and not population["error"]
        and population["populated_bytes"] < population["total_bytes"]
    ):
        parts.append("pages come when first used")
    elif population["done"]:  # they are measured at the end
        small = "small pages"
        parts.append(f"{output.share(huge_bytes, pool['size_bytes'])} huge pages" if huge_bytes else small)
    if population["locked"]:
        parts.append("locked")
    elif population["lock_refused"]:
        parts.append(output.styled("not locked (kvctl doctor)", "warn"))
    if pool["backing"] != "memfd":
        parts.append(f"backing {pool['backing']}")
    return Text(", ").join(Text(part) if isinstance(part, str) else part for part in parts)


def _progress(population: dict[str, Any]) -> str:
    populated, total, speed = (
        population["populated_bytes"],
        population["total_bytes"],
        population["gib_per_s"],
    )
    left = f", {output.duration((total - populated) / 2**30 / speed)} to go" if speed > 0 else ""
    return f"{output.share(populated, total)} populated, {speed:.1f} GiB/s{left}"


def _space_line(pool: dict[str, Any]) -> str:
    total = pool["total_bytes"]
    parts = [
        f"{output.size(pool[name])} {word} ({output.share(pool[name], total)})"
        for name, word in (("used_bytes", "used"), ("free_bytes", "free"))
    ]
    parts += [
        f"{output.size(pool[name])} {word}"
        for name, word in (
            ("reserved_bytes", "being written"),
            ("pinned_bytes", "pinned hard"),
            ("soft_pinned_bytes", "pinned softly"),
            ("limbo_bytes", "withdrawn and still held"),
        )
        if pool[name]
    ]
    return ", ".join(parts)


def _index_line(answer: dict[str, Any]) -> str:
    core = answer["core"]
    parts = [
        f"{output.count(core['families'], 'family', 'families')} of {core['families_max']:,} "
        f"({output.share(core['families'], core['families_max'])})",
        f"{output.count(core['records'], 'object')} of {core['records_max']:,}",
    ]
    if core["families_partial"]:
        parts.append(f"{core['families_partial']:,} incomplete")
    return ", ".join(parts)


def _memory_line(answer: dict[str, Any]) -> str:
    return f"index {output.size(answer['meta_bytes'])}, daemon {output.size(answer['private_bytes'])}"


def _clients_line(clients: dict[str, Any]) -> Text:
    parts = [Text(f"{clients['attached']} of {clients['max']} attached")]
    if clients["disconnected"]:
        parts.append(output.styled(f"{clients['disconnected']} left but alive (kvctl clients)", "warn"))
    if clients["leases"]:
        held = output.size(clients["leased_bytes"])
        parts.append(Text(f"{output.count(clients['leases'], 'lease')} on {held}"))
    return Text(", ").join(parts)


def _lookups_line(lookups: dict[str, int], counters: dict[str, int]) -> str:
    if not lookups["keys_asked"]:
        return "none yet"
    parts = [
        f"{output.share(lookups['keys_hit'], lookups['keys_asked'])} of "
        f"{output.count(lookups['keys_asked'], 'chunk')} found in {output.count(lookups['lookups'], 'lookup')}"
    ]
    misses = [
        f"{counters[name]:,} {word}"
        for name, word in (
            ("misses_never", "never stored"), ("misses_evicted", "evicted"), ("misses_pending", "being written"),
        )
        if counters[name]
    ]  # fmt: skip
    if misses:
        parts.append("first misses: " + ", ".join(misses))
    if lookups["verify_failed"]:
        parts.append(f"{lookups['verify_failed']:,} checksums failed")
    return "; ".join(parts)


def _writes_line(counters: dict[str, int]) -> str:
    if not counters["granted"]:
        return "none yet"
    parts = [
        f"{output.count(counters['published'], 'object')} ({output.size(counters['published_bytes'])}) published"
    ]
    duplicates = "duplicate" if counters["duplicates"] == 1 else "duplicates"
    parts += [
        f"{counters[name]:,} {word}"
        for name, word in (
            ("duplicates", duplicates), ("differs", "with other bytes"), ("aborted", "given back"),
            ("orphaned", "left by dead writers"),
        )
        if counters[name]
    ]  # fmt: skip
    return ", ".join(parts)


def _evicted_line(counters: dict[str, int]) -> str:
    reasons = [
        f"{counters[f'evicted_{name}']:,} {word}"
        for name, word in _REASONS.items()
        if counters.get(f"evicted_{name}")
    ]
    if not reasons:
        return "nothing yet"
    return f"{output.size(counters['evicted_bytes'])}; families: " + ", ".join(reasons)


def _verified(answer: dict[str, Any]) -> list[tuple[str, Text]]:
    """Row of what was compared with its checksums, only if there is something to say."""
    running, last, damaged = (
        answer["verify"]["running"],
        answer["verify"]["last"],
        answer["counters"]["verify_damaged"],
    )
    parts = [Text(f"walk: {walk_progress(running)}")] if running else []
    if last and not running:
        ago, intact = output.duration(last["ended_s"]), f"{output.count(last['objects'], 'object')} intact"
        if last["stopped"]:
            share = output.share(last["progress"], 1)
            parts.append(Text(f"last walk cut short {ago} ago at {share} of the index, {intact}"))
        else:
            parts.append(Text(f"last walk {ago} ago, {intact}"))
    if damaged:
        parts.append(output.styled(f"{output.count(damaged, 'object')} found damaged and withdrawn", "bad"))
    return [("verified", Text("; ").join(parts))] if parts else []


def _refused(counters: dict[str, int]) -> list[tuple[str, Text]]:
    """Row of what was refused, only if something was."""
    words = [
        output.count(counters[name], one, many)
        for name, one, many in (
            ("capacity_refusals", "reservation without room", "reservations without room"),
            ("lease_limit_refusals", "reservation over the lease limit", "reservations over the lease limit"),
            ("client_protocol_errors", "peer for malformed messages", "peers for malformed messages"),
            ("clients_killed", "client killed for what it leased", "clients killed for what they leased"),
            ("control_connections_refused", "connection", "connections"),
            ("pin_refusals", "pin", "pins"),
        )
        if counters.get(name)
    ]  # fmt: skip
    return [("refused", output.styled(", ".join(words), "warn"))] if words else []
