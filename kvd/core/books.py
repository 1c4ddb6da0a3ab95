"""What one core knows, in one place: the parts of `Core` that its operations work on together.

Made by `Core`, handed to every operation, used in the core's thread only. `effects` collects what the present
step wants done.
"""

from __future__ import annotations

from array import array
from collections.abc import Generator
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from kvd.core import counters, policy
from kvd.core.columns import Numbers
from kvd.core.events import Again, DoAgain, DoEvict, DoPublish, Effect, Evicted, Published
from kvd.core.forest import Forest
from kvd.core.journal import Ghosts, Journal
from kvd.core.orphans import Orphans
from kvd.core.pins import Pins
from kvd.core.reservations import Reservations, Shapes
from kvd.core.slots import Slots
from kvd.errors import ConfigError

R = TypeVar("R")

# An operation that needs answers: it yields what is to be answered and goes on with the answer.
Ask: TypeAlias = DoEvict | DoPublish | DoAgain
Answer: TypeAlias = Evicted | Published | Again
Flow: TypeAlias = Generator[Ask, Answer, R]


@dataclass(frozen=True, slots=True)
class CoreConfig:
    """What an operator may choose about the core. ConfigError names what is out of range."""

    policy: str = "slru"  # slru | lru | value
    protected_share: float = 0.25  # slru: of the pool's bytes
    evict_batch_families: int = 64  # leave together, if so many are wanted or less than 1/128 of all
    hard_pin_share: float = 0.5  # of the pool's bytes
    strict_duplicates: bool = False  # tell a writer that somebody published other bytes under the same key
    journal_requests: int = 4096
    ghosts: int = 16384
    partial_grace_ns: int = (
        1_000_000_000  # so long the other ranks have to publish their members, if room is wanted
    )
    partial_idle_ns: int = (
        60_000_000_000  # and so long if it is not: half a family keeps other splits from writing it
    )
    client_reserved_bytes_max: int = 1 << 62  # that one client may be writing at once
    answers_early: bool = False  # writers are answered by DoPublish, while the books are still being written

    def __post_init__(self) -> None:
        for name, low, high in (
            ("protected_share", 0.0, 1.0),
            ("hard_pin_share", 0.0, 1.0),
            ("evict_batch_families", 1, 1 << 16),
            ("journal_requests", 0, 1 << 24),
            ("ghosts", 0, 1 << 24),
            ("partial_grace_ns", 0, 1 << 62),
            ("partial_idle_ns", 0, 1 << 62),
            ("client_reserved_bytes_max", 1, 1 << 62),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise ConfigError(
                    f"{name} is {value}, allowed is {low} … {high}", code="range", key=name, value=value
                )


@dataclass(slots=True)
class ClientBook:
    """One attached client."""

    pid: int
    name: str
    writable: bool
    attached_ns: int


class Books:
    """All parts, composed."""

    def __init__(
        self, config: CoreConfig, families_max: int, records_max: int, segment_bytes: list[int]
    ) -> None:
        self.config = config
        self.families_max = families_max
        self.records_max = records_max
        self.counters = counters.new()
        self.clients: dict[int, ClientBook] = {}
        self.slots = Slots(segment_bytes)
        self.records = Numbers(0, records_max)
        self.forest = Forest(families_max)
        self.forest.policy = policy.make(
            config.policy, config.protected_share, self.forest.run_bytes, self.forest.members
        )
        self.forest.pins = Pins(self.forest)
        self.reservations = Reservations()
        self.shapes = Shapes(self.slots)
        self.orphans = Orphans()
        self.journal = Journal(config.journal_requests)
        self.ghosts = Ghosts(config.ghosts)
        # What clients of an earlier daemon may still be filling: client -> records, places.
        self.quarantine: dict[int, tuple[array[int], array[int]]] = {}
        self.limbo: dict[int, int] = {}  # withdrawn entries that somebody still holds -> bytes of their slots
        self.effects: list[Effect] = []
        self.now_ns = 0
        self._last_token = 0

    def next_token(self) -> int:
        """A token for an effect that is answered."""
        self._last_token += 1
        return self._last_token

    @property
    def hard_bytes_max(self) -> int:
        """How much may be pinned hard."""
        return int(self.slots.usable_bytes * self.config.hard_pin_share)

    @property
    def reserved_bytes(self) -> int:
        """Bytes of slots that are being written."""
        return sum(c.reserved_count * c.slot_bytes for c in self.slots.classes.values())

    @property
    def published_bytes(self) -> int:
        """Bytes of slots with published content, those in limbo included."""
        return sum(c.published_count * c.slot_bytes for c in self.slots.classes.values())

    @property
    def limbo_bytes(self) -> int:
        """Bytes of slots whose family is withdrawn and still held."""
        return sum(self.limbo.values())
