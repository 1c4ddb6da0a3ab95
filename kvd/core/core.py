"""The core of one domain: `step(now_ns, event) -> effects`."""

from __future__ import annotations

from dataclasses import dataclass

from kvd.core.events import Effect, Event


@dataclass(frozen=True, slots=True)
class CoreConfig:
    """What an operator may choose about the core."""

    policy: str = "slru"
    protected_share: float = 0.25
    evict_batch_families: int = 64
    hard_pin_share: float = 0.5
    strict_duplicates: bool = False
    journal_requests: int = 4096
    ghosts: int = 16384


class Core:
    """Under construction: the signature is final."""

    def __init__(
        self, config: CoreConfig, families_max: int, records_max: int, segment_bytes: list[int]
    ) -> None:
        self.config = config

    def step(self, now_ns: int, event: Event) -> list[Effect]:
        """Take one event and say what is to be done."""
        raise NotImplementedError
