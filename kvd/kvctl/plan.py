"""`kvctl plan`: the planner on the command line.

Owns the options of the five plans, the reading of files they name, and how a ledger is shown: a table of
steps, the assumptions, one closing sentence, or JSON. Called by `kvd.kvctl.main`, which mounts `app`. Runs
in the calling thread; only `breakeven --measure` touches a daemon. Invariant: bad input ends with exit
code 2 and a message that names the field, the value and what is allowed, never with a traceback.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec

import typer
from rich.console import Console

from kvd import limits
from kvd.errors import KvdError, UsageError, to_dict
from kvd.kvctl.plan_inputs import Model, model_of, own_metadata_bytes, token_bytes_of
from kvd.kvctl.plan_tables import console, print_ledger, print_matrix, print_rows, row_dict
from kvd.kvctl.plan_trace import read_trace
from kvd.plan import units
from kvd.plan.breakeven import NS_PER_S, BreakEvenLength, BreakEvenPlan, LoadCost, fit_prefill, transfer_ns
from kvd.plan.capacity import CapacityPlan
from kvd.plan.chunk import CacheFactory, ReferenceLru, SweepCosts, SweepSetup, sweep
from kvd.plan.ledger import Ledger, as_dict, plain
from kvd.plan.network import NetworkPlan
from kvd.plan.objects import ObjectsPlan, metadata_per_object_bytes_assumed
from kvd.plan.queueing import InFlightPlan
from kvd.plan.routing import Candidate, RoutePlan

if TYPE_CHECKING:
    from kvd.kvctl.plan_measure import Measured

P = ParamSpec("P")

app = typer.Typer(
    name="plan",
    help="Arithmetic about a fleet, step by step: capacity, network, break-even, routing, chunk size.",
    no_args_is_help=True,
    add_completion=False,
)


def _parse_whole(text: str | int) -> int:
    """A whole number, also as 32_768; defaults come through here as they are."""
    try:
        if isinstance(text, str) and not text.isascii():  # int() would take digits of any script
            raise ValueError
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r}; allowed: a whole number, like 32768") from None


def _whole(*names: str, help: str) -> Any:
    """An option that is a whole number, refused with its value when it is not."""
    return typer.Option(*names, help=help, parser=_parse_whole, metavar="N")


JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
PlotOption = Annotated[Path | None, typer.Option("--plot", metavar="FILE.png", help="Also draw it as a PNG.")]
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config", metavar="CONFIG.JSON", help="Hugging Face config.json to take bytes per token from."
    ),
]
DtypeOption = Annotated[str, typer.Option("--dtype", help="With --config: the type that KV is kept in.")]
TokenBytesOption = Annotated[
    int | None,
    _whole("--bytes-per-token", help="Instead of --config: KV bytes of one token, all layers."),
]
TpOption = Annotated[int, _whole("--tp", help="Shards of a group (tensor parallel ranks that split KV).")]
GroupsOption = Annotated[int, _whole("--groups", help="Groups of layers with the same attention rule.")]
MetadataOption = Annotated[str, typer.Option("--metadata", help="Metadata per object, assumed.")]


def _report(
    name: str, ledgers: dict[str, Ledger], as_json: bool, extra: dict[str, object] | None = None
) -> None:
    """Print the ledgers of one plan, as JSON or for a person."""
    if as_json:
        body = {title: as_dict(ledger) for title, ledger in ledgers.items()}
        typer.echo(json.dumps({"plan": name, "ledgers": body, **(extra or {})}, indent=2, ensure_ascii=False))
        return
    for title, ledger in ledgers.items():
        print_ledger(title, ledger)


def _guarded(command: Callable[P, None]) -> Callable[P, None]:
    """Turn a UsageError into its message and exit code 2; with --json into an object with `error`."""

    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except UsageError as error:
            if kwargs.get("as_json"):
                typer.echo(json.dumps({"error": to_dict(error)}, indent=2, ensure_ascii=False))
            else:
                typer.echo(f"kvctl plan: {error}", err=True)
            raise typer.Exit(2) from None

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__wrapped__ = command  # type: ignore[attr-defined]
    run.__annotations__ = command.__annotations__
    return run


def _plots(path: Path | None) -> Any:
    """The drawing module, once the path is known to be fit; None if nothing is to be drawn."""
    if path is None:
        return None
    if path.suffix != ".png":
        raise UsageError(f"--plot = {path}: allowed: a file name that ends in .png", code="file")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"--plot = {path}: no such folder; allowed: an existing one", code="file")
    from kvd.kvctl import plan_plots

    return plan_plots


@app.command()
@_guarded
def capacity(
    prefixes: Annotated[int, _whole(help="Unique prefixes to keep.")],
    prefix_tokens: Annotated[int, _whole(help="Tokens of each.")],
    hosts: Annotated[int, _whole(help="Hosts.")],
    dram: Annotated[str, typer.Option(help="Memory of a host, like 512GiB.")],
    config: ConfigOption = None,
    bytes_per_token: TokenBytesOption = None,
    dtype: DtypeOption = "bfloat16",
    replicas: Annotated[int, _whole(help="Copies of everything, each on another host.")] = 1,
    usable: Annotated[str, typer.Option(help="Part of the memory for payload, like 0.8 or 80%.")] = "0.8",
    shared_tokens: Annotated[int, _whole(help="Leading tokens that all prefixes have in common.")] = 0,
    spare_hosts: Annotated[
        int | None, _whole(help="Hosts that may be lost at once. Default: 1 where there are several.")
    ] = None,
    chunk_tokens: Annotated[int, _whole(help="Tokens of a chunk.")] = 256,
    snapshots: Annotated[
        int | None,
        _whole(help="Of a model with states: snapshots kept of each prefix. Default: one a whole chunk."),
    ] = None,
    tp: TpOption = 1,
    groups: GroupsOption = 1,
    metadata: MetadataOption = f"{metadata_per_object_bytes_assumed}B",
    bench: Annotated[
        Path | None, typer.Option(help="JSON of `kvctl bench local --json`: kvd's own metadata figure.")
    ] = None,
    as_json: JsonOption = False,
    plot: PlotOption = None,
) -> None:
    """Do the prefixes and their copies fit, how many objects are they, and what does the metadata cost?"""
    plots = _plots(plot)
    model = model_of(config, bytes_per_token, dtype)
    units.check_int("--chunk-tokens", chunk_tokens, 1, units.plan_count_max)
    kept, shared = _snapshots(model.state_bytes, snapshots, prefix_tokens, shared_tokens, chunk_tokens)
    room = CapacityPlan(
        prefixes_count=prefixes,
        prefix_tokens=prefix_tokens,
        bytes_per_token=model.token_bytes,
        replicas_count=replicas,
        hosts_count=hosts,
        dram_per_host_bytes=units.parse_bytes(dram, "--dram"),
        usable_share=units.parse_share(usable, "--usable"),
        shared_tokens=shared_tokens,
        spare_hosts=min(1, max(0, hosts - 1)) if spare_hosts is None else spare_hosts,
        state_bytes=model.state_bytes,
        snapshots_count=kept,
        shared_snapshots_count=shared,
    )
    count = ObjectsPlan(
        prefixes_count=prefixes,
        prefix_tokens=prefix_tokens,
        bytes_per_token=model.token_bytes,
        chunk_tokens=chunk_tokens,
        members_count=units.check_int("--tp", tp, 1, 4096) * units.check_int("--groups", groups, 1, 4096),
        metadata_per_object_bytes=units.parse_bytes(metadata, "--metadata"),
        metadata_per_family_bytes=None if bench is None else own_metadata_bytes(bench),
        shared_tokens=shared_tokens,
        state_bytes=model.state_bytes,
    )
    if plots is not None:
        plots.draw_capacity(room, count, plot)
    _report("capacity", {"Capacity": room, "Objects and metadata": count}, as_json)


def _snapshots(
    state_bytes: int, given: int | None, prefix_tokens: int, shared_tokens: int, chunk_tokens: int
) -> tuple[int, int]:
    """Snapshots kept of a prefix, and how many of them all prefixes share."""
    if not state_bytes:
        if given is not None:
            raise UsageError(
                f"--snapshots = {given} without a model that keeps a state; allowed: with --config of one",
                code="contradiction",
            )  # fmt: skip
        return 0, 0
    most = prefix_tokens // chunk_tokens
    if given is not None:
        return units.check_int("--snapshots", given, 1, max(1, most)), 0
    return most, shared_tokens // chunk_tokens


@app.command()
@_guarded
def network(
    rate: Annotated[str, typer.Option(help="Requests, like 200/s.")],
    hit: Annotated[str, typer.Option(help="Part of them that hits, like 0.75.")],
    size: Annotated[str, typer.Option("--bytes", help="Bytes of a hit, like 1GiB.")],
    link: Annotated[str, typer.Option(help="One link, like 400Gbit.")],
    efficiency: Annotated[str, typer.Option(help="Part of it reached in practice, like 0.65.")] = "1",
    store_rate: Annotated[str, typer.Option(help="New prefixes stored, like 50/s.")] = "0/s",
    store_bytes: Annotated[str | None, typer.Option(help="Bytes of a store, if not those of a hit.")] = None,
    replicas: Annotated[int, _whole(help="Copies of each.")] = 1,
    hosts: Annotated[int | None, _whole(help="Hosts that are cache and engine, 2 … 256.")] = None,
    local: Annotated[str, typer.Option(help="With --hosts: part of the hits on the own host.")] = "0",
    hot: Annotated[str | None, typer.Option(help="With --hosts: part of the reads one host owns.")] = None,
    links: Annotated[int | None, _whole(help="Links there are, on each node.")] = None,
    latency: Annotated[
        str | None, typer.Option(help="Mean time of a load under this traffic: sizes what is in flight.")
    ] = None,
    as_json: JsonOption = False,
    plot: PlotOption = None,
) -> None:
    """How many links do the reads and writes of the cache need at the least?"""
    plots = _plots(plot)
    plan = NetworkPlan(
        requests_per_s=units.parse_rate(rate, "--rate"),
        hit_share=units.parse_share(hit, "--hit"),
        bytes_per_hit=units.parse_bytes(size, "--bytes"),
        link_bytes_per_s=units.parse_bandwidth(link, "--link"),
        efficiency=units.parse_share(efficiency, "--efficiency"),
        stores_per_s=units.parse_rate(store_rate, "--store-rate"),
        bytes_per_store=None if store_bytes is None else units.parse_bytes(store_bytes, "--store-bytes"),
        replicas_count=replicas,
        hosts_count=hosts,
        local_share=units.parse_share(local, "--local"),
        hot_share=None if hot is None else units.parse_share(hot, "--hot"),
        links_count=links,
    )
    ledgers: dict[str, Ledger] = {"Network": plan}
    if latency is not None:
        ledgers["Loads in flight (Little's law)"] = _in_flight(
            plan, units.parse_duration_ns(latency, "--latency")
        )
    if plots is not None:
        plots.draw_network(plan, plot)
    matrix = plan.matrix
    shown = {
        "nodes": list(matrix.nodes),
        "bytes_per_s": [[plain(v) for v in row] for row in matrix.bytes_per_s],
    }
    if not as_json:
        print_matrix(plan)
    _report("network", ledgers, as_json, {"matrix": shown})


def _in_flight(plan: NetworkPlan, latency_ns: int) -> InFlightPlan:
    """Loads in flight; the capacity is where the busiest direction would be full."""
    arrivals = Fraction(plan.requests_per_s) * plan.hit_share
    used = plan.utilisation_share
    return InFlightPlan(
        arrivals_per_s=arrivals,
        time_in_system_ns=latency_ns,
        capacity_per_s=arrivals / used if arrivals and used else Fraction(units.plan_rate_per_s_max),
        bytes_each=plan.bytes_per_hit,
    )


@app.command()
@_guarded
def breakeven(
    bandwidth: Annotated[str | None, typer.Option(help="Rate of the load, like 20GiB/s.")] = None,
    size: Annotated[str | None, typer.Option("--bytes", help="Bytes to load, like 1GiB.")] = None,
    prefill_saved: Annotated[
        str | None, typer.Option(help="Full prefill less prefill of the suffix, both measured.")
    ] = None,
    lookup: Annotated[str | None, typer.Option(help="Lookup. Default: 0.")] = None,
    h2d: Annotated[str | None, typer.Option(help="Copy of these bytes to the GPU. Default: 0.")] = None,
    sync: Annotated[str, typer.Option(help="Synchronisation.")] = "0",
    hidden: Annotated[str, typer.Option(help="Part of load and copy that overlaps with compute.")] = "0",
    queue_reuse: Annotated[str, typer.Option(help="Queue wait if the prefix is reused.")] = "0",
    queue_cold: Annotated[str, typer.Option(help="Queue wait if it is computed.")] = "0",
    prefill_sample: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TOKENS=TIME", help="A measured full prefill, like 8192=700ms; two lengths or more."
        ),
    ] = None,
    prefix_tokens: Annotated[int | None, _whole(help="Tokens of the prefix to load.")] = None,
    config: ConfigOption = None,
    bytes_per_token: TokenBytesOption = None,
    dtype: DtypeOption = "bfloat16",
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
    plots = _plots(plot)
    if bandwidth is None and not measured:
        raise UsageError(
            "the rate of the load is not known; allowed: --bandwidth RATE, like 20GiB/s, or --measure",
            code="missing",
        )
    model = None
    if config is not None or bytes_per_token is not None:
        model = model_of(config, bytes_per_token, dtype)
    prefill = fit_prefill([_prefill_sample(text) for text in prefill_sample]) if prefill_sample else None
    size_bytes = _load_bytes(size, prefix_tokens, model)
    if prefill_saved is not None:
        saved_ns = units.parse_duration_ns(prefill_saved, "--prefill-saved")
    elif prefill is not None and prefix_tokens is not None:
        saved_ns = prefill.saved_ns(prefix_tokens + 1, prefix_tokens)
    else:
        raise UsageError(
            "the prefill saved is not known; allowed: --prefill-saved TIME, or --prefill-sample TOKENS=TIME at two "
            "lengths or more with --prefix-tokens",
            code="missing",
        )  # fmt: skip
    rates = _measure(socket) if measured else None
    plan = BreakEvenPlan(
        size_bytes=size_bytes,
        **_costs(rates, size_bytes, bandwidth, lookup, h2d),
        sync_ns=units.parse_duration_ns(sync, "--sync"),
        prefill_saved_ns=saved_ns,
        hidden_ns=units.parse_duration_ns(hidden, "--hidden"),
        queue_reuse_ns=units.parse_duration_ns(queue_reuse, "--queue-reuse"),
        queue_cold_ns=units.parse_duration_ns(queue_cold, "--queue-cold"),
    )
    ledgers: dict[str, Ledger] = {"Break-even": plan}
    length = None
    if prefill is not None and model is not None:
        length = BreakEvenLength(
            cost=_load_cost(plan),
            prefill=prefill,
            bytes_per_token=model.token_bytes,
            state_bytes=model.state_bytes,
            queue_delta_ns=max(0, plan.queue_reuse_ns - plan.queue_cold_ns),
        )
        ledgers["Break-even length"] = length
    if plots is not None:
        plots.draw_breakeven(plan, length, model, plot)
    if rates is not None and not as_json:
        console().print(f"Measured now, one thread: {rates.said}.", soft_wrap=True, markup=False)
    _report("breakeven", ledgers, as_json, None if rates is None else {"measured": asdict(rates)})


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
    rates: Measured | None, size_bytes: int, bandwidth: str | None, lookup: str | None, h2d: str | None
) -> Any:
    """Costs of a load: what was given, else what was measured, else 0."""
    found: dict[str, int | Fraction] = {
        "lookup_ns": 0 if rates is None else rates.lookup_ns,
        "h2d_ns": 0 if rates is None else transfer_ns(size_bytes, rates.copy_bytes_per_s),
    }
    if rates is not None:
        found["bandwidth_bytes_per_s"] = Fraction(rates.load_bytes_per_s)
    if bandwidth is not None:
        found["bandwidth_bytes_per_s"] = units.parse_bandwidth(bandwidth, "--bandwidth")
    if lookup is not None:
        found["lookup_ns"] = units.parse_duration_ns(lookup, "--lookup")
    if h2d is not None:
        found["h2d_ns"] = units.parse_duration_ns(h2d, "--h2d")
    return found


def _prefill_sample(text: str) -> tuple[int, int]:
    """'8192=700ms' as (tokens, ns)."""
    tokens, equals, time = text.partition("=")
    if not equals or not tokens.strip().isascii() or not tokens.strip().isdigit() or len(tokens) > 18:
        raise UsageError(
            f"--prefill-sample = {text!r}; allowed: TOKENS=TIME, like 8192=700ms", code="quantity", value=text
        )
    return int(tokens), units.parse_duration_ns(time, "--prefill-sample")


def _load_bytes(size: str | None, prefix_tokens: int | None, model: Model | None) -> int:
    """Bytes to load, from --bytes or from the tokens; both must agree if both are given."""
    given = None if size is None else units.parse_bytes(size, "--bytes")
    counted = None
    if prefix_tokens is not None:
        units.check_int("--prefix-tokens", prefix_tokens, 1, units.plan_count_max)
        counted = None if model is None else prefix_tokens * model.token_bytes + model.state_bytes
    if given is not None and counted is not None and given != counted:
        state = f" and a state of {model.state_bytes} B" if model is not None and model.state_bytes else ""
        each = 0 if model is None else model.token_bytes
        raise UsageError(
            f"--bytes = {size} but {prefix_tokens} tokens × {each} B{state} = {units.format_bytes(counted)}; "
            f"allowed: one of the two, or equal ones",
            code="contradiction",
        )  # fmt: skip
    found = given if given is not None else counted
    if found is None:
        raise UsageError(
            "the bytes to load are not known; allowed: --bytes SIZE, or --prefix-tokens with --config or "
            "--bytes-per-token",
            code="missing",
        )  # fmt: skip
    return found


def _load_cost(plan: BreakEvenPlan) -> LoadCost:
    """The costs of one load as rates, so that other lengths can be asked about."""
    copy = None if plan.h2d_ns == 0 else Fraction(plan.size_bytes * NS_PER_S, plan.h2d_ns)
    return LoadCost(plan.lookup_ns, plan.bandwidth_bytes_per_s, copy, plan.sync_ns)


@app.command()
@_guarded
def route(
    host: Annotated[
        list[str],
        typer.Option(
            metavar="NAME:PART=TIME,…",
            help="A host, like warm:queue=800ms,lookup=2ms,load=98ms,prefill=5ms,handoff=0,itl=30ms,session. Repeat.",
        ),
    ],
    itl_limit: Annotated[str | None, typer.Option(help="Longest inter-token latency allowed.")] = None,
    session_margin: Annotated[str, typer.Option(help="How much slower the session's host may be.")] = "20ms",
    as_json: JsonOption = False,
    plot: PlotOption = None,
) -> None:
    """Which host answers first, within the limit on inter-token latency?"""
    plots = _plots(plot)
    plan = RoutePlan(
        candidates=tuple(_candidate(text) for text in host),
        itl_limit_ns=None if itl_limit is None else units.parse_duration_ns(itl_limit, "--itl-limit"),
        session_margin_ns=units.parse_duration_ns(session_margin, "--session-margin"),
    )
    if plots is not None:
        plots.draw_route(plan, plot)
    _report("route", {"Routing": plan}, as_json)


def _candidate(text: str) -> Candidate:
    """One --host. Parts not named are 0; an ITL not named is unknown."""
    allowed = ("queue", "lookup", "load", "prefill", "handoff", "itl")
    name, _, rest = text.rpartition(":") if "=" in text or ":" in text else (text, "", "")
    times: dict[str, int] = {}
    session = False
    for part in filter(None, (part.strip() for part in rest.split(","))):
        key, equals, value = part.partition("=")
        if part == "session":
            session = True
        elif not equals or key not in allowed:
            raise UsageError(
                f"--host = {text!r}: unknown part {part!r}; allowed: {', '.join(allowed)} with a time, and session",
                code="host", value=text,
            )  # fmt: skip
        elif key in times:
            raise UsageError(
                f"--host = {text!r}: {key} is given twice; allowed: once", code="host", value=text
            )
        else:
            times[key] = units.parse_duration_ns(value, f"--host {name}: {key}")
    return Candidate(
        host=name,
        queue_ns=times.get("queue", 0),
        lookup_load_ns=times.get("lookup", 0) + times.get("load", 0),
        prefill_ns=times.get("prefill", 0),
        handoff_ns=times.get("handoff", 0),
        itl_ns=times.get("itl"),
        session=session,
    )


@app.command()
@_guarded
def chunk(
    trace: Annotated[
        Path, typer.Option(metavar="TRACE.jsonl", help="timestamp, input_length, output_length, hash_ids.")
    ],
    config: ConfigOption = None,
    bytes_per_token: TokenBytesOption = None,
    dtype: DtypeOption = "bfloat16",
    size: Annotated[
        list[int] | None,
        _whole("--chunk-tokens", help="A chunk size to try. Repeat. Default: 64 … 4096."),
    ] = None,
    trace_block: Annotated[int, _whole(help="Tokens that one id of the trace stands for.")] = 512,
    engine_block: Annotated[int, _whole(help="Tokens of the engine's block.")] = 16,
    capacity: Annotated[
        str | None, typer.Option(help="Payload memory, like 2TiB. Default: no limit.")
    ] = None,
    tp: TpOption = 1,
    groups: GroupsOption = 1,
    metadata: MetadataOption = f"{metadata_per_object_bytes_assumed}B",
    match_time: Annotated[str, typer.Option(help="Looking up one chunk.")] = "67ns",
    lease_time: Annotated[str, typer.Option(help="Leasing and releasing one chunk.")] = "94ns",
    publish_time: Annotated[str, typer.Option(help="Publishing one object.")] = "4us",
    object_time: Annotated[str, typer.Option(help="Fixed part of loading one object.")] = "10us",
    bandwidth: Annotated[str, typer.Option(help="Rate of the load.")] = "20GiB/s",
    requests_max: Annotated[int, _whole(help="Requests to replay, from the first.")] = 1_000_000,
    cache: Annotated[
        str, typer.Option(help="core: kvd's own decisions and CPU time; lru: the plain reference.")
    ] = "core",
    policy: Annotated[str, typer.Option(help="With --cache core: slru or lru.")] = "slru",
    as_json: JsonOption = False,
    plot: PlotOption = None,
) -> None:
    """Replay a recorded trace at several chunk sizes: objects, metadata, usable prefix, load times."""
    plots = _plots(plot)
    members = units.check_int("--tp", tp, 1, 4096) * units.check_int("--groups", groups, 1, 4096)
    setup = SweepSetup(
        bytes_per_token=token_bytes_of(config, bytes_per_token, dtype, "the replay follows tokens only"),
        trace_block_tokens=trace_block,
        engine_block_tokens=engine_block,
        members_count=members,
        capacity_bytes=None if capacity is None else units.parse_bytes(capacity, "--capacity"),
        metadata_per_object_bytes=units.parse_bytes(metadata, "--metadata"),
        through_core=cache == "core",
        costs=SweepCosts(
            match_per_chunk_ns=units.parse_duration_ns(match_time, "--match-time"),
            lease_per_chunk_ns=units.parse_duration_ns(lease_time, "--lease-time"),
            publish_per_object_ns=units.parse_duration_ns(publish_time, "--publish-time"),
            load_per_object_ns=units.parse_duration_ns(object_time, "--object-time"),
            load_bytes_per_s=units.parse_bandwidth(bandwidth, "--bandwidth"),
        ),
    )
    sizes = size or [64, 128, 256, 512, 1024, 2048, 4096]
    requests = list(read_trace(trace, units.check_int("--requests-max", requests_max, 1, 100_000_000)))
    progress = Console(stderr=True)
    with progress.status(f"replaying {len(requests):,} requests at {len(sizes)} chunk sizes") as status:
        found = sweep(
            requests, sizes, setup, _factory(cache, policy, members),
            on_row=lambda row: status.update(f"done: {row.chunk_tokens} tokens"),
        )  # fmt: skip
    if plots is not None:
        plots.draw_chunk(found, plot)
    if not as_json:
        print_rows(found)
    _report("chunk", {"Chunk size": found}, as_json, {"rows": [row_dict(row) for row in found.rows]})


def _factory(cache: str, policy: str, members: int) -> CacheFactory:
    """What the trace is replayed through. Raises UsageError(cache)."""
    for option, value, allowed in (
        ("--cache", cache, ("core", "lru")),
        ("--policy", policy, ("slru", "lru")),
    ):
        if value not in allowed:
            raise UsageError(
                f"{option} = {value!r}; allowed: {', '.join(allowed)}", code="cache", value=value
            )
    if cache == "lru":
        return ReferenceLru
    if members > limits.members_per_family_max:
        raise UsageError(
            f"--tp × --groups = {members} members a chunk; allowed with --cache core: {limits.members_per_family_max}",
            code="members", members=members,
        )  # fmt: skip
    from kvd.kvctl.plan_core import core_factory

    return core_factory(members, policy)
