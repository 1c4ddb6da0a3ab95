"""`kvctl plan capacity` and `kvctl plan network`: what a fleet has to hold and to carry.

Called by `kvd.kvctl.plan`, in the calling thread. Reads the files that options name and touches no daemon.
"""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Annotated

import typer

from kvd import limits
from kvd.errors import UsageError
from kvd.kvctl.plan_options import (
    METADATA_DEFAULT,
    ConfigOption,
    DtypeOption,
    GroupsOption,
    JsonOption,
    MetadataOption,
    PlotOption,
    PpOption,
    TokenBytesOption,
    TpOption,
    contradiction,
    guarded,
    model,
    plain_file,
    plots_for,
    report,
    whole,
)
from kvd.kvctl.plan_tables import print_matrix
from kvd.plan import units
from kvd.plan.capacity import CapacityPlan
from kvd.plan.ledger import Ledger, plain
from kvd.plan.network import NetworkPlan
from kvd.plan.objects import ObjectsPlan
from kvd.plan.queueing import InFlightPlan, OverloadedPlan

BENCH_BYTES_MAX = 16 << 20


@guarded
def capacity(
    prefixes: Annotated[int, whole(help="Unique prefixes to keep.")],
    prefix_tokens: Annotated[int, whole(help="Tokens of each.")],
    hosts: Annotated[int, whole(help="Hosts.")],
    dram: Annotated[str, typer.Option(help="Memory of a host, like 512GiB.")],
    config: ConfigOption = None,
    bytes_per_token: TokenBytesOption = None,
    dtype: DtypeOption = None,
    replicas: Annotated[int, whole(help="Copies of everything, each on another host.")] = 1,
    usable: Annotated[str, typer.Option(help="Part of the memory for payload, like 0.8 or 80%.")] = "0.8",
    shared_tokens: Annotated[int, whole(help="Leading tokens that all prefixes have in common.")] = 0,
    snapshots: Annotated[
        int | None,
        whole(help="State snapshots of each prefix, where the model keeps states. Default: 1."),
    ] = None,
    spare_hosts: Annotated[
        int | None, whole(help="Hosts that may be lost at once. Default: 1 where there are several.")
    ] = None,
    chunk_tokens: Annotated[int, whole(help="Tokens of a chunk.")] = 256,
    tp: TpOption = 1,
    pp: PpOption = 1,
    groups: GroupsOption = None,
    metadata: MetadataOption = METADATA_DEFAULT,
    bench: Annotated[
        Path | None, typer.Option(help="JSON of `kvctl bench local --json`: kvd's own metadata figure.")
    ] = None,
    as_json: JsonOption = False,
    plot: PlotOption = None,
) -> None:
    """Do the prefixes and their copies fit, how many objects are they, and what does the metadata cost?"""
    plots = plots_for(plot)
    footprint = model(config, bytes_per_token, dtype, tp=tp, pp=pp, groups=groups)
    units.check_int("--chunk-tokens", chunk_tokens, 1, limits.chunk_tokens_max)
    room = CapacityPlan(
        prefixes_count=prefixes,
        prefix_tokens=prefix_tokens,
        footprint=footprint,
        chunk_tokens=chunk_tokens,
        shared_tokens=shared_tokens,
        snapshots_count=snapshots,
        replicas_count=replicas,
        hosts_count=hosts,
        dram_per_host_bytes=units.parse_bytes(dram, "--dram"),
        usable_share=units.parse_share(usable, "--usable"),
        spare_hosts=min(1, max(0, hosts - 1)) if spare_hosts is None else spare_hosts,
    )
    count = ObjectsPlan(
        prefixes_count=prefixes,
        prefix_tokens=prefix_tokens,
        footprint=footprint,
        chunk_tokens=chunk_tokens,
        shared_tokens=shared_tokens,
        snapshots_count=snapshots,
        metadata_per_object_bytes=units.parse_bytes(metadata, "--metadata"),
        metadata_per_family_bytes=None if bench is None else _own_metadata_bytes(bench),
    )
    if plots is not None:
        plots.draw_capacity(room, count, plot)
    report("capacity", {"Capacity": room, "Objects and metadata": count}, as_json)


def _own_metadata_bytes(path: Path) -> int:
    """`metadata_bytes_per_object` of a benchmark run, in which every family has one member."""
    allowed = "the output of `kvctl bench local --json`"
    plain_file(path, "--bench", BENCH_BYTES_MAX, allowed)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--bench = {path}: {error.strerror}; allowed: {allowed}", code="file") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--bench = {path} is not JSON: {error}; allowed: {allowed}", code="file") from None
    value = found.get("metadata_bytes_per_object") if isinstance(found, dict) else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e9:
        raise UsageError(
            f"--bench = {path}: metadata_bytes_per_object = {value!r}; allowed: {allowed}, with bytes there",
            code="file",
        )
    return units.ceil_div(Fraction(value), 1)


@guarded
def network(
    rate: Annotated[str, typer.Option(help="Requests, like 200/s.")],
    hit: Annotated[str, typer.Option(help="Part of them that hits, like 0.75 or 75%.")],
    size: Annotated[str, typer.Option("--bytes", help="Bytes of a hit, like 1GiB.")],
    link: Annotated[str, typer.Option(help="One link, like 400Gbit.")],
    efficiency: Annotated[str, typer.Option(help="Part of it reached in practice, like 0.65.")] = "1",
    store_rate: Annotated[
        str | None, typer.Option(help="New prefixes stored, like 50/s. Default: 0/s.")
    ] = None,
    store_bytes: Annotated[str | None, typer.Option(help="Bytes of a store, if not those of a hit.")] = None,
    replicas: Annotated[int, whole(help="Copies of each.")] = 1,
    hosts: Annotated[int | None, whole(help="Hosts that are cache and engine, 2 … 256.")] = None,
    local: Annotated[str, typer.Option(help="With --hosts: part of the hits on the own host.")] = "0",
    hot: Annotated[str | None, typer.Option(help="With --hosts: part of the reads one host owns.")] = None,
    links: Annotated[int | None, whole(help="Links there are, on each node.")] = None,
    latency: Annotated[
        str | None, typer.Option(help="Mean time of a load under this traffic: sizes what is in flight.")
    ] = None,
    as_json: JsonOption = False,
    plot: PlotOption = None,
) -> None:
    """How many links do the reads and writes of the cache need at the least?"""
    plots = plots_for(plot)
    for option, value in (("--store-bytes", store_bytes), ("--replicas", replicas if replicas > 1 else None)):
        if value is not None and store_rate is None:
            raise contradiction(f"{option} = {value} without --store-rate: nothing is stored", "both")
    plan = NetworkPlan(
        requests_per_s=units.parse_rate(rate, "--rate"),
        hit_share=units.parse_share(hit, "--hit"),
        bytes_per_hit=units.parse_bytes(size, "--bytes"),
        link_bytes_per_s=units.parse_bandwidth(link, "--link"),
        efficiency=units.parse_share(efficiency, "--efficiency"),
        stores_per_s=Fraction(0) if store_rate is None else units.parse_rate(store_rate, "--store-rate"),
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
    report("network", ledgers, as_json, {"matrix": shown})


def _in_flight(plan: NetworkPlan, latency_ns: int) -> InFlightPlan | OverloadedPlan:
    """Loads in flight; the capacity is where the busiest direction would be full."""
    arrivals = Fraction(plan.requests_per_s) * plan.hit_share
    used = plan.utilisation_share
    capacity_per_s = arrivals / used if arrivals and used else None
    hits = f"{units.format_rate(plan.requests_per_s)} × {units.format_share(plan.hit_share)} hits"
    how = f"{hits} ÷ {units.format_share(used)} load of the busiest direction"
    if capacity_per_s is not None and arrivals >= capacity_per_s:
        return OverloadedPlan(arrivals_per_s=arrivals, capacity_per_s=capacity_per_s, capacity_from=how)
    return InFlightPlan(
        arrivals_per_s=arrivals,
        time_in_system_ns=latency_ns,
        capacity_per_s=capacity_per_s,
        bytes_each=plan.bytes_per_hit,
        capacity_from=how,
    )
