"""The chunk-size sweep: one recorded trace, replayed at several chunk sizes through a cache.

Owns the replay, the cost model of its metadata and the reference cache. The cache it replays through is a
`ChunkCache`; the real core is put behind the same protocol. Pure: requests, costs and capacity arrive as
arguments, time is the trace's. Any thread; a cache belongs to one replay.

What a chunk size decides: small chunks lose little of a shared prefix to rounding but make many objects and
much metadata work; large chunks the other way round.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Protocol, TypeAlias

from kvd.errors import UsageError
from kvd.plan import units
from kvd.plan.breakeven import transfer_ns
from kvd.plan.footprint import Footprint
from kvd.plan.ledger import RESULT, Answer, Step
from kvd.plan.units import (
    check_int,
    counted,
    format_bandwidth,
    format_bytes,
    format_ns,
    format_number,
    format_share,
)

window_ms = 10_000
sweep_sizes_max = 64


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """One request. `block_ids` name the blocks of the prompt, each id the whole prefix up to it."""

    timestamp_ms: int
    input_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        check_int("timestamp", self.timestamp_ms, 0, units.plan_count_max)
        check_int("input tokens", self.input_tokens, 1, units.plan_count_max)
        check_int("output tokens", self.output_tokens, 0, units.plan_count_max)


@dataclass(frozen=True, slots=True)
class Published:
    """What storing one chain did: families newly stored, families that had to leave for them."""

    stored_count: int
    evicted_count: int


class ChunkCache(Protocol):
    """A cache of equal families (chunks), named by ints that stand for the whole prefix up to them."""

    def match(self, chain: Sequence[int], now_ms: int) -> int:
        """How many leading chunks are present; counts as a use of these."""

    def publish(self, chain: Sequence[int], now_ms: int) -> Published:
        """Make the chain present as far as there is room, suffixes evicted before their prefixes."""

    @property
    def families_count(self) -> int:
        """Families present."""

    @property
    def cpu_ns(self) -> int | None:
        """CPU time that publishing and touching took so far, if this cache measures it."""


CacheFactory: TypeAlias = Callable[[int, int | None], ChunkCache]
"""(bytes of a family, capacity in bytes or None for no limit) -> an empty cache."""


class ReferenceLru:
    """Least recently used, suffixes before prefixes: the plain reference that other caches are compared with.

    One ordered table. A chain is always touched from its end to its beginning, so that a prefix is younger
    than every suffix of it, and the oldest entry is never a prefix of one that stays.
    """

    def __init__(self, family_bytes: int, capacity_bytes: int | None) -> None:
        check_int("bytes of a family", family_bytes, 1, units.plan_bytes_max)
        self.capacity_families: int | None = None
        if capacity_bytes is not None:
            check_int("capacity in bytes", capacity_bytes, family_bytes, units.plan_bytes_max)
            self.capacity_families = capacity_bytes // family_bytes
        self._families: OrderedDict[int, None] = OrderedDict()

    @property
    def cpu_ns(self) -> int | None:
        """Not measured: what it takes says nothing of the core."""
        return None

    @property
    def families_count(self) -> int:
        """Families present."""
        return len(self._families)

    def __contains__(self, family: int) -> bool:
        return family in self._families

    def match(self, chain: Sequence[int], now_ms: int) -> int:
        """How many leading chunks are present; they become the youngest."""
        families = self._families
        hits = next((position for position, family in enumerate(chain) if family not in families), len(chain))
        for family in reversed(chain[:hits]):
            families.move_to_end(family)
        return hits

    def publish(self, chain: Sequence[int], now_ms: int) -> Published:
        """Store the chain, or its first `capacity_families`; older families leave, oldest first."""
        families, capacity = self._families, self.capacity_families
        before = len(families)
        for family in reversed(chain if capacity is None else chain[:capacity]):
            families[family] = None
            families.move_to_end(family)
        stored = len(families) - before
        evicted = 0 if capacity is None else max(0, len(families) - capacity)
        for _ in range(evicted):
            families.popitem(last=False)
        return Published(stored, evicted)


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepCosts:
    """Time that chunks and objects take, in ns: assumed or measured (`kvctl bench local`), and said which.

    `load_per_object_ns` is the fixed part of moving one object, `load_bytes_per_s` the rest.
    """

    match_per_chunk_ns: int = 67
    lease_per_chunk_ns: int = 94
    publish_per_object_ns: int = 4_000
    load_per_object_ns: int = 10_000
    load_bytes_per_s: int = 20 * units.GIB

    def __post_init__(self) -> None:
        for name in ("match_per_chunk", "lease_per_chunk", "publish_per_object", "load_per_object"):
            check_int(name.replace("_", " "), getattr(self, f"{name}_ns"), 0, units.plan_duration_ns_max)
        check_int("--bandwidth", self.load_bytes_per_s, 1, units.plan_bandwidth_bytes_per_s_max)


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSetup:
    """What stays the same over the sweep. Raises UsageError: values out of range, a model that keeps states only."""

    footprint: Footprint
    trace_block_tokens: int
    engine_block_tokens: int = 16
    capacity_bytes: int | None = None
    metadata_per_object_bytes: int = 512
    costs: SweepCosts = SweepCosts()

    def __post_init__(self) -> None:
        if not self.footprint.token_groups:
            raise UsageError(
                f"the model keeps states only ({format_bytes(self.footprint.snapshot_bytes)} a "
                "snapshot) and no bytes per token, so that no chunk size saves or costs bytes; allowed: a model that "
                "keeps tokens. `kvctl plan capacity` counts snapshots, `kvctl plan breakeven` weighs loading one",
                code="states",
            )
        check_int("--trace-block", self.trace_block_tokens, 1, units.plan_count_max)
        check_int("--engine-block", self.engine_block_tokens, 1, units.plan_count_max)
        check_int("--metadata", self.metadata_per_object_bytes, 0, units.plan_bytes_max)

    def check_chunk(self, chunk_tokens: int) -> None:
        """UsageError unless the size suits the trace, the engine and the capacity."""
        check_int("--chunk-tokens", chunk_tokens, 1, units.plan_count_max)
        block = self.trace_block_tokens
        if chunk_tokens % block and block % chunk_tokens:
            raise UsageError(
                f"--chunk-tokens = {chunk_tokens}: the trace names blocks of {block} tokens and cannot say "
                f"what other cuts share; allowed: a divisor or a multiple of {block}",
                code="chunk", chunk_tokens=chunk_tokens, block_tokens=block,
            )  # fmt: skip
        if chunk_tokens % self.engine_block_tokens:
            raise UsageError(
                f"--chunk-tokens = {chunk_tokens} is not a multiple of the engine's block of "
                f"{self.engine_block_tokens}; allowed: multiples of {self.engine_block_tokens}",
                code="chunk", chunk_tokens=chunk_tokens, block_tokens=self.engine_block_tokens,
            )  # fmt: skip
        family_bytes = chunk_tokens * self.footprint.bytes_per_token
        if self.capacity_bytes is not None and self.capacity_bytes < family_bytes:
            raise UsageError(
                f"--capacity = {format_bytes(self.capacity_bytes)} holds no chunk of {chunk_tokens} tokens "
                f"({format_bytes(family_bytes)}); allowed: {format_bytes(family_bytes)} or more",
                code="contradiction", capacity_bytes=self.capacity_bytes, family_bytes=family_bytes,
            )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRow:
    """The replay at one chunk size. Counts and bytes are of the whole trace unless the name says peak.

    `span_ms` is from the first to the last request. Load times are of the requests that loaded something
    (`requests_hit_count`). `cache_cpu_ns` is the part of `metadata_cpu_ns` that the cache measured, None if it did not.
    """

    chunk_tokens: int
    requests_count: int
    prompt_tokens: int
    usable_tokens: int
    requests_hit_count: int
    chunks_probed_count: int
    chunks_leased_count: int
    objects_written_count: int
    objects_evicted_count: int
    objects_peak_count: int
    metadata_peak_bytes: int
    metadata_cpu_ns: int
    cache_cpu_ns: int | None
    fetched_bytes: int
    fetched_in_vain_bytes: int
    written_bytes: int
    span_ms: int
    fetched_mean_bytes_per_s: Fraction
    fetched_peak_bytes_per_s: Fraction
    load_p50_ns: int
    load_p99_ns: int

    @property
    def usable_share(self) -> Fraction:
        """Prompt tokens whose prefill is skipped ÷ all prompt tokens."""
        return Fraction(self.usable_tokens, self.prompt_tokens)


def check_blocks(request: RecordedRequest, trace_block_tokens: int) -> None:
    """UsageError unless the request has an id for every block begun."""
    ids, blocks = len(request.block_ids), -(-request.input_tokens // trace_block_tokens)
    if ids != blocks:
        raise UsageError(
            f"request at {request.timestamp_ms} ms: {counted(ids, 'block id')} for "
            f"{counted(request.input_tokens, 'token')}; "
            f"allowed: {blocks:,}, one for every {trace_block_tokens} tokens begun",
            code="trace", timestamp_ms=request.timestamp_ms,
        )  # fmt: skip


def chunk_chain(request: RecordedRequest, trace_block_tokens: int, chunk_tokens: int) -> list[int]:
    """Names of the whole chunks of a prompt. Two prompts share a name exactly if they share that prefix.

    A chunk of several blocks has the name of its last block, which stands for all before it; a part of a
    block has the block's name and its position in it. Raises UsageError when the ids do not fit the length.
    """
    check_blocks(request, trace_block_tokens)
    ids = request.block_ids
    chunks = request.input_tokens // chunk_tokens
    if chunk_tokens >= trace_block_tokens:
        blocks = chunk_tokens // trace_block_tokens
        return [ids[(position + 1) * blocks - 1] for position in range(chunks)]
    parts = trace_block_tokens // chunk_tokens
    return [ids[position // parts] * parts + position % parts for position in range(chunks)]


def usable_prefix(input_tokens: int, present_tokens: int, engine_block_tokens: int) -> int:
    """Tokens whose prefill is skipped: never the last one, and whole blocks of the engine."""
    return min(present_tokens, (input_tokens - 1) // engine_block_tokens * engine_block_tokens)


def percentile(ordered: Sequence[int], per_cent: int) -> int:
    """The nearest-rank percentile of values in ascending order; 0 of none."""
    return ordered[max(0, -(-len(ordered) * per_cent // 100) - 1)] if ordered else 0


def replay(
    requests: Sequence[RecordedRequest], chunk_tokens: int, setup: SweepSetup, factory: CacheFactory
) -> ChunkRow:
    """Replay one trace at one chunk size. Raises UsageError for a size that does not suit, or a bad trace."""
    setup.check_chunk(chunk_tokens)
    if not requests:
        raise UsageError("the trace has no requests; allowed: 1 or more", code="trace")
    costs, footprint = setup.costs, setup.footprint
    groups, members = footprint.token_groups, footprint.chunk_members_count
    family_bytes = chunk_tokens * footprint.bytes_per_token
    cache = factory(family_bytes, setup.capacity_bytes)
    usable_sum = fetched = in_vain = probed = leased = stored = evicted = peak = 0
    loads_ns: list[int] = []
    windows: dict[int, int] = {}
    for request in requests:
        chain = chunk_chain(request, setup.trace_block_tokens, chunk_tokens)
        hits = cache.match(chain, request.timestamp_ms)
        usable = usable_prefix(request.input_tokens, hits * chunk_tokens, setup.engine_block_tokens)
        probed += min(hits + 1, len(chain))
        if usable:
            needed = [group.needed_chunks(usable, chunk_tokens) for group in groups]
            size = sum(group.needed_bytes(usable, chunk_tokens) for group in groups)
            objects = sum(count * group.members_count for count, group in zip(needed, groups, strict=True))
            leased += max(needed)
            usable_sum += usable
            fetched += size
            in_vain += size - sum(group.needed_bytes(usable, 1) for group in groups)
            window = request.timestamp_ms // window_ms
            windows[window] = windows.get(window, 0) + size
            loads_ns.append(objects * costs.load_per_object_ns + transfer_ns(size, costs.load_bytes_per_s))
        if hits < len(chain):
            done = cache.publish(chain, request.timestamp_ms)
            stored += done.stored_count
            evicted += done.evicted_count
        peak = max(peak, cache.families_count)
    own_ns = cache.cpu_ns
    published_ns = stored * members * costs.publish_per_object_ns if own_ns is None else own_ns
    loads_ns.sort()
    span_ms = max(requests[-1].timestamp_ms - requests[0].timestamp_ms, 1)
    return ChunkRow(
        chunk_tokens=chunk_tokens,
        requests_count=len(requests),
        prompt_tokens=sum(request.input_tokens for request in requests),
        usable_tokens=usable_sum,
        requests_hit_count=len(loads_ns),
        chunks_probed_count=probed,
        chunks_leased_count=leased,
        objects_written_count=stored * members,
        objects_evicted_count=evicted * members,
        objects_peak_count=peak * members,
        metadata_peak_bytes=peak * members * setup.metadata_per_object_bytes,
        metadata_cpu_ns=probed * costs.match_per_chunk_ns + leased * costs.lease_per_chunk_ns + published_ns,
        cache_cpu_ns=own_ns,
        fetched_bytes=fetched,
        fetched_in_vain_bytes=in_vain,
        written_bytes=stored * family_bytes,
        span_ms=span_ms,
        fetched_mean_bytes_per_s=Fraction(fetched * 1_000, span_ms),
        fetched_peak_bytes_per_s=Fraction(max(windows.values(), default=0) * 1_000, window_ms),
        load_p50_ns=percentile(loads_ns, 50),
        load_p99_ns=percentile(loads_ns, 99),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkSweep:
    """The rows of a sweep, smallest chunk first, and the setup they share."""

    setup: SweepSetup
    rows: tuple[ChunkRow, ...] = field(metadata=RESULT)

    @property
    def answers(self) -> Mapping[str, Answer]:
        """Results under stable names; the rows are in `rows`."""
        return {
            "requests_count": self.most.requests_count,
            "prompt_tokens": self.most.prompt_tokens,
            "usable_most_chunk_tokens": self.most.chunk_tokens,
            "usable_most_share": self.most.usable_share,
            "proposed_chunk_tokens": self.proposed.chunk_tokens,
            "proposed_usable_share": self.proposed.usable_share,
        }

    @property
    def most(self) -> ChunkRow:
        """The row that skips the most prefill; of equal ones the largest chunk."""
        return max(self.rows, key=lambda row: (row.usable_tokens, row.chunk_tokens))

    @property
    def proposed(self) -> ChunkRow:
        """The largest chunk that skips at least 99 % of what the best one does."""
        enough = Fraction(99, 100) * self.most.usable_tokens
        return max(
            (row for row in self.rows if row.usable_tokens >= enough), key=lambda row: row.chunk_tokens
        )

    @property
    def steps(self) -> tuple[Step, ...]:
        """The arithmetic of the proposed row."""
        best, footprint, costs = self.proposed, self.setup.footprint, self.setup.costs
        size, members = format_number(best.chunk_tokens), footprint.chunk_members_count
        families = counted(best.objects_peak_count // members, "family", "families")
        span, hit = format_ns(best.span_ms * 1_000_000), counted(best.requests_hit_count, "load")
        return (
            Step("requests", "in the trace", best.requests_count, "requests"),
            Step("prompt tokens", "sum over the requests", best.prompt_tokens, "tokens"),
            Step("bytes of a chunk", f"{counted(best.chunk_tokens, 'token')} × "
                 f"{format_number(footprint.bytes_per_token)} B", best.chunk_tokens * footprint.bytes_per_token, "B"),
            Step(f"usable at {size}", "whole chunks present from the start, at most S - 1 tokens",
                 best.usable_tokens, "tokens"),
            Step("prefill skipped",
                 f"{format_number(best.usable_tokens)} ÷ {format_number(best.prompt_tokens)}",
                 best.usable_share, "share"),
            Step("objects at the peak", f"{families} present × {counted(members, 'member')}",
                 best.objects_peak_count, "objects"),
            Step("metadata CPU", f"{format_number(best.chunks_probed_count)} chunks looked up × "
                 f"{format_ns(costs.match_per_chunk_ns)} + {format_number(best.chunks_leased_count)} leased × "
                 f"{format_ns(costs.lease_per_chunk_ns)} + {self._published_text}", best.metadata_cpu_ns, "ns"),
            Step("read, mean", f"{format_bytes(best.fetched_bytes)} in the {span} of the trace",
                 best.fetched_mean_bytes_per_s, "B/s"),
            Step("load, P50", f"of {hit}, each its objects × {format_ns(costs.load_per_object_ns)} + its bytes ÷ "
                 f"{format_bandwidth(costs.load_bytes_per_s)}", best.load_p50_ns, "ns"),
            Step("load, P99", "of the same", best.load_p99_ns, "ns"),
        )  # fmt: skip

    @property
    def _published_text(self) -> str:
        """The part of the metadata's CPU time that storing takes."""
        best = self.proposed
        objects = f"{format_number(best.objects_written_count)} objects stored"
        if best.cache_cpu_ns is None:
            return f"{objects} × {format_ns(self.setup.costs.publish_per_object_ns)}"
        return f"{format_ns(best.cache_cpu_ns)} measured in the core ({objects})"

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What the numbers take for granted."""
        costs, setup = self.setup.costs, self.setup
        room = "without limit" if setup.capacity_bytes is None else f"of {format_bytes(setup.capacity_bytes)}"
        windows = setup.footprint.windows_said
        states = (
            (
                "state snapshots are left out: a prompt goes on behind every chunk, as if a snapshot stood there, and "
                "their bytes are neither stored nor loaded",
            )
            if setup.footprint.state_groups
            else ()
        )
        if self.most.cache_cpu_ns is None:
            decided = "least recently used leaves first, suffixes before prefixes"
            publish = f"publish {format_ns(costs.publish_per_object_ns)} an object: not measured here"
        else:
            decided = (
                "kvd's own core decides what leaves; its CPU time is measured here, without rings and copies"
            )
            publish = "publishing as measured"
        return (
            f"one cache {room}: {decided}",
            *((windows,) if windows else ()),
            *states,
            "a prompt's chunks are stored as soon as it has been looked up; generated tokens are not stored",
            f"below {format_number(setup.trace_block_tokens)} tokens the trace does not tell where prompts "
            f"part within a block: the usable prefix of smaller chunks is a lower bound",
            f"match {format_ns(costs.match_per_chunk_ns)} and lease {format_ns(costs.lease_per_chunk_ns)} a "
            f"chunk, {publish}",
            f"load {format_ns(costs.load_per_object_ns)} an object + bytes ÷ "
            f"{format_bandwidth(costs.load_bytes_per_s)}, each load alone on the link: P50 and P99 are over the "
            "requests that load something, without queues",
        )

    @property
    def conclusion(self) -> str:
        """What follows, and what does not."""
        best, most = self.proposed, self.most
        first = (
            f"On this trace chunks of {counted(best.chunk_tokens, 'token')} skip "
            f"{format_share(best.usable_share)} of the prefill"
        )
        if most is not best:
            first += f", within 1 % of the most ({format_share(most.usable_share)} at {most.chunk_tokens:,})"
        if most.chunk_tokens < best.chunk_tokens and best.objects_peak_count:
            fewer = Fraction(most.objects_peak_count, best.objects_peak_count)
            first += f", with {format_number(fewer, 1)} times fewer objects"
        if self.setup.footprint.snapshot_bytes:
            first += ", where a snapshot stands behind every chunk, whose bytes are not in these figures"
        return f"{first}; this says nothing about other traffic, nor about latency when loads queue."


def sweep(
    requests: Iterable[RecordedRequest],
    chunk_sizes: Sequence[int],
    setup: SweepSetup,
    factory: CacheFactory = ReferenceLru,
    on_row: Callable[[ChunkRow], None] | None = None,
) -> ChunkSweep:
    """Replay the trace once per chunk size; `on_row` hears of each row as it is done.

    Requests are taken in the order of their timestamps. Raises UsageError: no sizes, a size twice, more than
    `sweep_sizes_max` of them, a size that does not suit, an empty or malformed trace.
    """
    check_int("number of --chunk-tokens", len(chunk_sizes), 1, sweep_sizes_max)
    if len(set(chunk_sizes)) < len(chunk_sizes):
        raise UsageError(
            f"--chunk-tokens {', '.join(map(str, chunk_sizes))} name one twice; allowed: each once",
            code="chunk",
        )
    for chunk_tokens in chunk_sizes:
        setup.check_chunk(chunk_tokens)
    ordered = sorted(requests, key=lambda request: request.timestamp_ms)
    rows = []
    for chunk_tokens in sorted(chunk_sizes):
        rows.append(replay(ordered, chunk_tokens, setup, factory))
        if on_row is not None:
            on_row(rows[-1])
    return ChunkSweep(setup=setup, rows=tuple(rows))
