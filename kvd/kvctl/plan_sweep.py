"""`kvctl plan chunk`: one recorded trace, replayed at several chunk sizes.

Called by `kvd.kvctl.plan`, in the calling thread. Reads the trace and touches no daemon.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvd import limits
from kvd.core.policy import policy_names
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
    geometry_of,
    guarded,
    model,
    plots_for,
    report,
    whole,
)
from kvd.kvctl.plan_tables import print_rows
from kvd.kvctl.plan_trace import read_trace
from kvd.plan import units
from kvd.plan.chunk import CacheFactory, ReferenceLru, SweepCosts, SweepSetup, sweep
from kvd.plan.ledger import inputs, plain

SIZES_DEFAULT = (64, 128, 256, 512, 1024, 2048, 4096)


@guarded
def chunk(
    trace: Annotated[
        Path, typer.Option(metavar="TRACE.jsonl", help="timestamp, input_length, output_length, hash_ids.")
    ],
    config: ConfigOption = None,
    bytes_per_token: TokenBytesOption = None,
    dtype: DtypeOption = None,
    size: Annotated[
        list[int] | None,
        whole("--chunk-tokens", help="A chunk size to try. Repeat. Default: 64 … 4096."),
    ] = None,
    trace_block: Annotated[int, whole(help="Tokens that one id of the trace stands for.")] = 512,
    engine_block: Annotated[int, whole(help="Tokens of the engine's block.")] = 16,
    capacity: Annotated[
        str | None, typer.Option(help="Payload memory, like 2TiB. Default: no limit.")
    ] = None,
    tp: TpOption = 1,
    pp: PpOption = 1,
    groups: GroupsOption = None,
    metadata: MetadataOption = METADATA_DEFAULT,
    match_time: Annotated[str, typer.Option(help="Looking up one chunk.")] = "67ns",
    lease_time: Annotated[str, typer.Option(help="Leasing and releasing one chunk.")] = "94ns",
    publish_time: Annotated[
        str | None, typer.Option(help="With --cache lru: publishing one object. Default: 4us.")
    ] = None,
    object_time: Annotated[str, typer.Option(help="Fixed part of loading one object.")] = "10us",
    bandwidth: Annotated[str, typer.Option(help="Rate of the load.")] = "20GiB/s",
    requests_max: Annotated[int, whole(help="Requests to replay, from the first.")] = 1_000_000,
    cache: Annotated[
        str, typer.Option(help="core: kvd's own decisions and CPU time; lru: the plain reference.")
    ] = "core",
    policy: Annotated[
        str | None, typer.Option(help="With --cache core: slru, lru or value. Default: slru.")
    ] = None,
    as_json: JsonOption = False,
    plot: PlotOption = None,
) -> None:
    """Replay a recorded trace at several chunk sizes: objects, metadata, usable prefix, load times."""
    plots = plots_for(plot)
    footprint = model(config, bytes_per_token, dtype, tp=tp, pp=pp, groups=groups)
    units.check_int("--engine-block", engine_block, 1, units.plan_count_max)
    if config is not None:
        for group in geometry_of(config, dtype).groups:
            group.check_block(engine_block)
    factory = _factory(cache, policy, publish_time, footprint.chunk_members_count)
    setup = SweepSetup(
        footprint=footprint,
        trace_block_tokens=trace_block,
        engine_block_tokens=engine_block,
        capacity_bytes=None if capacity is None else units.parse_bytes(capacity, "--capacity"),
        metadata_per_object_bytes=units.parse_bytes(metadata, "--metadata"),
        costs=SweepCosts(
            match_per_chunk_ns=units.parse_duration_ns(match_time, "--match-time"),
            lease_per_chunk_ns=units.parse_duration_ns(lease_time, "--lease-time"),
            publish_per_object_ns=units.parse_duration_ns(publish_time or "4us", "--publish-time"),
            load_per_object_ns=units.parse_duration_ns(object_time, "--object-time"),
            load_bytes_per_s=int(units.parse_bandwidth(bandwidth, "--bandwidth")),
        ),
    )
    sizes = size or list(SIZES_DEFAULT)
    most = units.check_int("--requests-max", requests_max, 1, 100_000_000)
    requests = list(read_trace(trace, most, trace_block))
    progress = Console(stderr=True)
    replayed = f"{units.counted(len(requests), 'request')} at {units.counted(len(sizes), 'chunk size')}"
    with progress.status(f"replaying {replayed}") as status:
        found = sweep(
            requests, sizes, setup, factory,
            on_row=lambda row: status.update(f"done: {row.chunk_tokens} tokens"),
        )  # fmt: skip
    if plots is not None:
        plots.draw_chunk(found, plot)
    if not as_json:
        print_rows(found)
    rows = [{**inputs(row), "usable_share": plain(row.usable_share)} for row in found.rows]
    report("chunk", {"Chunk size": found}, as_json, {"rows": rows})


def _factory(cache: str, policy: str | None, publish_time: str | None, members: int) -> CacheFactory:
    """What the trace is replayed through. Raises UsageError(cache, contradiction)."""
    for option, value, allowed in (
        ("--cache", cache, ("core", "lru")),
        ("--policy", policy or "slru", policy_names),
    ):
        if value not in allowed:
            raise UsageError(
                f"{option} = {value!r}; allowed: {', '.join(allowed)}", code="cache", value=value
            )
    if cache == "lru":
        if policy is not None:
            raise contradiction(
                f"--policy = {policy} with --cache lru, which has no policy", "with --cache core"
            )
        return ReferenceLru
    if publish_time is not None:
        raise contradiction(
            f"--publish-time = {publish_time} with --cache core, which measures it", "with --cache lru"
        )
    if members > limits.members_per_family_max:
        raise UsageError(
            f"--tp × --groups = {members} members a chunk; allowed with --cache core: {limits.members_per_family_max}",
            code="members", members=members,
        )  # fmt: skip
    from kvd.kvctl.plan_core import core_factory

    return core_factory(members, policy or "slru")
