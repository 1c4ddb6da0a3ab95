"""What the scheduler's connector tells the workers' each step, and what they report back. Plain data, pickled by vLLM.

A chunk is a block of the engine; `block_ids` hold, for each group of the engine, one block id a chunk (0: no block).
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Load:
    """Chunks [first, stop) of a request; the scheduler holds their leases until every worker reported `number`."""

    number: int
    request: str
    adapter: str
    exported: bytes  # the scheduler's leases, to adopt
    identities: bytes  # of the whole usable prefix, 32 B each
    first: int
    stop: int
    block_ids: tuple[list[int], ...]
    between_steps: bool

    def blocks(self) -> set[int]:
        """Every block that this load was to fill."""
        return {block for ids in self.block_ids for block in ids if block}


@dataclass(slots=True)
class Save:
    """Chunks that are computed when this step is over. `identities` begin with that of the chunk before, if any."""

    request: str
    adapter: str
    identities: bytes
    has_parent: bool
    block_ids: tuple[list[int], ...]


@dataclass(slots=True)
class Plan:
    """One step. Saves of an `epoch` in which a load failed are dropped: they may have been computed from garbage."""

    epoch: int = 0
    generation: str = ""  # of the weights, as far as resets of the engine tell
    prefill_tokens: int = 0
    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)  # their blocks may be somebody else's from this step on


@dataclass(slots=True)
class Report:
    """What happened in one step on one worker, or, aggregated, on all of them."""

    ended: dict[int, int] = field(default_factory=dict)  # load number -> workers that are through with it
    failed: set[str] = field(default_factory=set)  # requests of which a load failed
    tainted_epoch: int = -1
    attached_epochs: set[str] = field(default_factory=set)  # daemons that workers are attached to; "": none
    loaded_bytes: int = 0
    loaded_ns: int = 0
    prefill_tokens: int = 0
    prefill_ns: int = 0

    def aggregate(self, other: Report) -> Report:
        """Both in one."""
        for number, count in other.ended.items():
            self.ended[number] = self.ended.get(number, 0) + count
        self.failed |= other.failed
        self.tainted_epoch = max(self.tainted_epoch, other.tainted_epoch)
        self.attached_epochs |= other.attached_epochs
        self.loaded_bytes += other.loaded_bytes
        self.loaded_ns = max(self.loaded_ns, other.loaded_ns)
        self.prefill_tokens = max(self.prefill_tokens, other.prefill_tokens)
        self.prefill_ns = max(self.prefill_ns, other.prefill_ns)
        return self

    @property
    def empty(self) -> bool:
        """Whether there is nothing to say."""
        return not (
            self.ended or self.failed or self.attached_epochs or self.loaded_bytes or self.prefill_tokens
        )


COUNTERS = (
    "lookups", "lookups_away", "lookups_unknown_adapter", "asked_tokens", "hit_tokens", "loads", "loads_refused",
    "load_failures", "loaded_bytes", "loaded_ns", "saved_chunks", "saved_bytes", "saves_present", "saves_full",
    "saves_late", "saves_away", "saves_tainted", "saves_gone", "saves_failed", "hook_errors",
)  # fmt: skip
"""Every counter of the connector; docs/engines.md says what each means."""
