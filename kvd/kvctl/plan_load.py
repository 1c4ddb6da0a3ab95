"""`kvctl plan breakeven` and `kvctl plan route`: whether one prefix is worth loading, and where a request should run.

Called by `kvd.kvctl.plan`, in the calling thread. Only `breakeven --measure` touches a daemon.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from fractions import Fraction
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvd import limits
from kvd.errors import KvdError, UsageError
from kvd.kvctl.output import console
from kvd.kvctl.plan_options import (
    ConfigOption,
    DtypeOption,
    JsonOption,
    PlotOption,
    TokenBytesOption,
    contradiction,
    guarded,
    model,
    named_parts,
    plots_for,
    report,
    whole,
)
from kvd.plan import units
from kvd.plan.breakeven import LoadCost, transfer_ns
from kvd.plan.breakeven_ledger import BreakEvenLength, BreakEvenPlan, PrefillFit
from kvd.plan.footprint import Footprint, PrefixRead
from kvd.plan.ledger import Ledger
from kvd.plan.routing import Candidate, RoutePlan

if TYPE_CHECKING:
    from kvd.kvctl.plan_measure import Measured

SESSION_MARGIN_DEFAULT = "20ms"


@guarded
def breakeven(
    bandwidth: Annotated[str | None, typer.Option(help="Rate of the load, like 20GiB/s.")] = None,
    size: Annotated[str | None, typer.Option("--bytes", help="Bytes to load, like 1GiB.")] = None,
    prefill_saved: Annotated[
        str | None, typer.Option(help="Full prefill less prefill of the suffix, both measured.")
    ] = None,
    lookup: Annotated[str | None, typer.Option(help="Lookup. Default: 0.")] = None,
    h2d: Annotated[str | None, typer.Option(help="Copy of these bytes to the GPU. Default: 0.")] = None,
    sync: Annotated[str | None, typer.Option(help="Synchronisation. Default: 0.")] = None,
    hidden: Annotated[
        str,
        typer.Option(
            help="Time of load and copy that overlaps with compute, like 20ms; `timeline` derives it."
        ),
    ] = "0",
    queue_reuse: Annotated[
        str | None, typer.Option(help="Queue wait if the prefix is reused. Default: 0.")
    ] = None,
    queue_cold: Annotated[str | None, typer.Option(help="Queue wait if it is computed. Default: 0.")] = None,
    prefill_sample: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TOKENS=TIME", help="A measured full prefill, like 8192=700ms; two lengths or more."
        ),
    ] = None,
    prefix_tokens: Annotated[int | None, whole(help="Tokens of the prefix to load.")] = None,
    chunk_tokens: Annotated[
        int | None, whole(help="Tokens of a chunk: lengths and windows are whole chunks then.")
    ] = None,
    config: ConfigOption = None,
    bytes_per_token: TokenBytesOption = None,
    dtype: DtypeOption = None,
    measured: Annotated[
        bool,
        typer.Option(
            "--measure", help="Lookup, load and copy rates, where not given, from the running daemon."
        ),
    ] = False,
    socket: Annotated[
        str | None, typer.Option(metavar="PATH", help="With --measure: the daemon's socket.")
    ] = None,
    as_json: JsonOption = False,
    plot: PlotOption = None,
) -> None:
    """Is loading a prefix faster than computing it, and from which length on?"""
    plots = plots_for(plot)
    if bandwidth is None and not measured:
        raise UsageError(
            "the rate of the load is not known; allowed: --bandwidth RATE, like 20GiB/s, or --measure",
            code="missing",
        )
    if measured and None not in (bandwidth, lookup, h2d):
        raise contradiction(
            "--measure with --bandwidth, --lookup and --h2d: nothing is left to measure",
            "without one of them",
        )
    if socket is not None and not measured:
        raise contradiction(f"--socket = {socket} without --measure: no daemon is asked", "both")
    footprint = None
    if config is not None or bytes_per_token is not None or dtype is not None:
        footprint = model(config, bytes_per_token, dtype)
    _check_used(footprint, prefix_tokens, chunk_tokens, prefill_saved, prefill_sample)
    chunk = 1 if chunk_tokens is None else chunk_tokens
    units.check_int("--chunk-tokens", chunk, 1, limits.chunk_tokens_max)
    fit = PrefillFit(samples=tuple(map(_prefill_sample, prefill_sample))) if prefill_sample else None
    if prefix_tokens is not None:
        units.check_int("--prefix-tokens", prefix_tokens, 1, units.plan_count_max)
    read = None
    if footprint is not None and prefix_tokens is not None:
        read = PrefixRead(footprint=footprint, tokens=prefix_tokens, chunk_tokens=chunk)
    size_bytes = _load_bytes(size, read)
    saved_ns = _saved_ns(prefill_saved, fit, prefix_tokens)
    rates = _measure(socket) if measured else None
    times = {
        "lookup": lookup, "h2d": h2d, "sync": sync, "queue_reuse": queue_reuse, "queue_cold": queue_cold
    }  # fmt: skip
    plan = BreakEvenPlan(
        size_bytes=size_bytes,
        read=read,
        **_costs(rates, size_bytes, read, bandwidth, times),
        prefill_saved_ns=saved_ns,
        hidden_ns=units.parse_duration_ns(hidden, "--hidden"),
        prefill=None if fit is None or prefill_saved is not None else fit.cost,
        prefix_tokens=prefix_tokens,
    )
    ledgers: dict[str, Ledger] = {"Break-even": plan}
    length = None
    if fit is not None:
        ledgers["Prefill, fitted"] = fit
    if fit is not None and footprint is not None:
        length = _length(plan, fit, footprint, chunk)
        ledgers["Break-even length"] = length
    if plots is not None:
        plots.draw_breakeven(plan, length, plot)
    if rates is not None and not as_json:
        console().print(f"Measured now, one thread: {rates.said}.", soft_wrap=True, markup=False)
    report("breakeven", ledgers, as_json, None if rates is None else {"measured": asdict(rates)})


def _check_used(
    footprint: Footprint | None,
    prefix_tokens: int | None,
    chunk_tokens: int | None,
    prefill_saved: str | None,
    samples: list[str] | None,
) -> None:
    """Refuse what would be ignored."""
    if footprint is not None and prefix_tokens is None and not samples:
        raise contradiction(
            "--config or --bytes-per-token without a length: nothing asks what a token takes",
            "with --prefix-tokens, or with --prefill-sample",
        )
    if footprint is not None:
        return
    if chunk_tokens is not None:
        raise contradiction(
            f"--chunk-tokens = {chunk_tokens} without the model: how windows and lengths are cut does not matter",
            "with --config or --bytes-per-token",
        )
    if prefill_saved is not None and prefix_tokens is not None:
        raise contradiction(
            f"--prefix-tokens = {prefix_tokens} with --prefill-saved and without the model: it says nothing",
            "with --config, --bytes-per-token or --prefill-sample",
        )
    if prefill_saved is not None and samples:
        raise contradiction(
            "--prefill-sample with --prefill-saved and without the model: the samples say nothing",
            "one of the two, or with --config or --bytes-per-token",
        )


def _saved_ns(prefill_saved: str | None, fit: PrefillFit | None, prefix_tokens: int | None) -> int:
    """The prefill saved, as given or as fitted."""
    if prefill_saved is not None:
        return units.parse_duration_ns(prefill_saved, "--prefill-saved")
    if fit is not None and prefix_tokens is not None:
        return fit.cost.saved_ns(prefix_tokens + 1, prefix_tokens)
    raise UsageError(
        "the prefill saved is not known; allowed: --prefill-saved TIME, or --prefill-sample TOKENS=TIME at two "
        "lengths or more with --prefix-tokens",
        code="missing",
    )


def _measure(socket: str | None) -> Measured:
    """The rates of the daemon. What keeps them from being measured is a refusal like any other."""
    from kvd.kvctl.plan_measure import measure

    try:
        return measure(socket, 10.0)
    except UsageError:
        raise
    except KvdError as error:
        raise UsageError(
            f"--measure: {error.message}; start the daemon, name its --socket, or give the rates",
            code="measure",
        ) from None


def _costs(
    rates: Measured | None,
    size_bytes: int,
    read: PrefixRead | None,
    bandwidth: str | None,
    times: Mapping[str, str | None],
) -> dict[str, Any]:
    """Costs of a load: what was given, else what was measured, else 0; and which of these it was."""
    found: dict[str, Any] = {
        f"{name}_ns": units.parse_duration_ns(text, f"--{name.replace('_', '-')}")
        for name, text in times.items()
        if text is not None
    }
    measured, notes = [], []
    if bandwidth is not None:
        found["bandwidth_bytes_per_s"] = units.parse_bandwidth(bandwidth, "--bandwidth")
    elif rates is not None:
        found["bandwidth_bytes_per_s"] = Fraction(rates.load_bytes_per_s)
        measured.append("bandwidth")
    if rates is not None and "lookup_ns" not in found:
        measured.append("lookup")
        chunks, each = rates.chunks, units.counted(rates.chunks, "chunk")
        note = f"the lookup measured is of {each}, taken as it is (--chunk-tokens and --prefix-tokens say how many)"
        if read is not None and read.chunk_tokens > 1:
            chunks = read.tokens // read.chunk_tokens
            note = f"lookup and lease of {each} took {units.format_ns(rates.lookup_ns)}; these are "
            note += f"{units.counted(chunks, 'chunk')}, in proportion"
        found["lookup_ns"] = units.ceil_div(rates.lookup_ns * chunks, rates.chunks)
        notes.append(note)
    if rates is not None and "h2d_ns" not in found:
        found["h2d_ns"] = transfer_ns(size_bytes, rates.copy_bytes_per_s)
        measured.append("copy")
    parts = {"lookup_ns": "lookup", "h2d_ns": "copy to GPU", "sync_ns": "sync"}
    missing = [said for name, said in parts.items() if name not in found]
    if not {"queue_reuse_ns", "queue_cold_ns"} & found.keys():
        missing.append("queue waits")
    return {
        **dict.fromkeys(parts, 0), **found,
        "measured": tuple(measured), "not_given": tuple(missing), "notes": tuple(notes),
    }  # fmt: skip


def _prefill_sample(text: str) -> tuple[int, int]:
    """'8192=700ms' as (tokens, ns)."""
    tokens, equals, time = text.partition("=")
    if not equals or not tokens.strip().isascii() or not tokens.strip().isdigit() or len(tokens) > 18:
        raise UsageError(
            f"--prefill-sample = {text!r}; allowed: TOKENS=TIME, like 8192=700ms", code="quantity", value=text
        )
    return int(tokens), units.parse_duration_ns(time, "--prefill-sample")


def _load_bytes(size: str | None, read: PrefixRead | None) -> int:
    """Bytes to load, from --bytes or from what the prefix needs; both must agree if both are given."""
    given = None if size is None else units.parse_bytes(size, "--bytes")
    if given is not None and read is not None and given != read.size_bytes:
        raise UsageError(
            f"--bytes = {size} but {read.steps[-1].expression} = {units.format_bytes(read.size_bytes)}; "
            f"allowed: one of the two, or equal ones",
            code="contradiction",
        )  # fmt: skip
    if given is not None:
        return given
    if read is None:
        raise UsageError(
            "the bytes to load are not known; allowed: --bytes SIZE, or --prefix-tokens with --config or "
            "--bytes-per-token",
            code="missing",
        )  # fmt: skip
    return read.size_bytes


def _length(plan: BreakEvenPlan, fit: PrefillFit, footprint: Footprint, chunk_tokens: int) -> BreakEvenLength:
    """The question at other lengths: the costs of the one load as rates."""
    copy = None if plan.h2d_ns == 0 else plan.size_bytes * units.NS_PER_S // plan.h2d_ns
    for option, bytes_per_s in (("--bandwidth", plan.bandwidth_bytes_per_s), ("--h2d", copy)):
        if bytes_per_s is not None and bytes_per_s < 1:
            raise UsageError(
                f"{option} gives {units.format_bandwidth(bytes_per_s)}: from which length on such a load pays is not "
                "looked for; allowed: 1 B/s and more",
                code="range",
            )  # fmt: skip
    delta_ns = plan.queue_reuse_ns - plan.queue_cold_ns
    notes = []
    if copy is not None and "copy" not in plan.measured:
        notes.append(
            f"the copy was given for {units.format_bytes(plan.size_bytes)} in {units.format_ns(plan.h2d_ns)}: that "
            "rate is taken at every length"
        )
    if plan.hidden_ns:
        notes.append(
            f"the {units.format_ns(plan.hidden_ns)} hidden above are not counted: what overlaps at another length is "
            "not known, so that the length is no longer than this"
        )
    if delta_ns < 0:
        notes.append(
            f"that reuse waits {units.format_ns(-delta_ns)} less is not counted, so that the length is no longer "
            "than this"
        )
    return BreakEvenLength(
        cost=LoadCost(plan.lookup_ns, int(plan.bandwidth_bytes_per_s), copy, plan.sync_ns),
        prefill=fit.cost,
        footprint=footprint,
        chunk_tokens=chunk_tokens,
        queue_delta_ns=max(0, delta_ns),
        sampled=fit.sampled,
        copy_name=plan.copy_name,
        notes=tuple(notes),
    )


@guarded
def route(
    host: Annotated[
        list[str],
        typer.Option(
            metavar="NAME:PART=TIME,…",
            help="A host, like warm:queue=800ms,lookup=2ms,load=98ms,prefill=5ms,handoff=0,itl=30ms,session. Repeat.",
        ),
    ],
    itl_limit: Annotated[str | None, typer.Option(help="Longest inter-token latency allowed.")] = None,
    session_margin: Annotated[
        str | None, typer.Option(help="How much slower the session's host may be. Default: 20ms.")
    ] = None,
    as_json: JsonOption = False,
    plot: PlotOption = None,
) -> None:
    """Which host answers first, within the limit on inter-token latency?"""
    plots = plots_for(plot)
    candidates = tuple(map(_candidate, host))
    if session_margin is not None and not any(one.session for one in candidates):
        raise contradiction(
            f"--session-margin = {session_margin}, but no --host holds the session", "with one that does"
        )
    plan = RoutePlan(
        candidates=candidates,
        itl_limit_ns=None if itl_limit is None else units.parse_duration_ns(itl_limit, "--itl-limit"),
        session_margin_ns=units.parse_duration_ns(
            session_margin or SESSION_MARGIN_DEFAULT, "--session-margin"
        ),
    )
    if plots is not None:
        plots.draw_route(plan, plot)
    report("route", {"Routing": plan}, as_json)


def _candidate(text: str) -> Candidate:
    """One --host. Parts not named are 0, and said so; an ITL not named is unknown."""
    parts = ("queue", "lookup", "load", "prefill", "handoff")
    name, found = named_parts("--host", text, (*parts, "itl"), "a time", ("session",))
    session = found.pop("session", None) is not None
    times = {key: units.parse_duration_ns(value, f"--host {name}: {key}") for key, value in found.items()}
    missing = tuple(part for part in parts if part not in times)
    candidate = Candidate(
        host=name,
        queue_ns=times.get("queue", 0),
        lookup_load_ns=times.get("lookup", 0) + times.get("load", 0),
        prefill_ns=times.get("prefill", 0),
        handoff_ns=times.get("handoff", 0),
        itl_ns=times.get("itl"),
        session=session,
        not_given=missing,
    )
    if len(missing) == len(parts):
        raise UsageError(
            f"--host = {text!r}: nothing is known of its time to the first token, which is not 0; allowed: "
            f"{name}:PART=TIME,… with at least one of {', '.join(parts)}",
            code="host", value=text,
        )  # fmt: skip
    return candidate
