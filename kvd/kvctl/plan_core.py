"""The real core behind the planner's chunk sweep: its decisions and its CPU time, with memory and index played here.

Owns one Core a replay and the tables around it. Called by `kvctl plan chunk` and benchmarks, in the calling thread.
Sizes are scaled down (all families are alike): what counts is how many fit, not how long their bytes would take.
What the clock measures is `Core.step` alone: the daemon's decisions, without rings, copies and the native index.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence

from kvd import limits
from kvd.core import events as ev
from kvd.core.core import Core, CoreConfig
from kvd.errors import InvariantError
from kvd.plan.chunk import CacheFactory, ChunkCache, Published
from kvd.types import Member

OBJECT_BYTES = 4096
FRAME_BYTES = 2 << 20
FAMILIES_UNLIMITED = 8 << 20
SPARE_OBJECTS = 512  # the index is what is short, not the memory


class CoreCache:
    """A `ChunkCache` whose contents the core decides on. `cpu_ns` is the time its steps took."""

    def __init__(self, families_max: int, members: int, policy: str) -> None:
        objects_max = families_max * members
        pool_bytes = -(-(objects_max + SPARE_OBJECTS) * OBJECT_BYTES // FRAME_BYTES) * FRAME_BYTES
        self._core = Core(CoreConfig(policy=policy), families_max, objects_max, [pool_bytes])
        self._core.step(0, ev.SegmentReady(0, 0, pool_bytes))
        self._core.step(0, ev.ClientAttached(0, 1, "replay", writable=True))
        self._members = tuple(Member(index, OBJECT_BYTES) for index in range(members))
        self._batch_families = max(1, min(128, limits.batch_items_max // members))
        self._numbers: dict[int, int] = {}  # name -> what its identity is made of: names may be of any size
        self._entry_of: dict[int, int] = {}
        self._name_of: dict[int, int] = {}
        self._items_of: dict[int, list[tuple[int, int]]] = {}  # entry -> record and place of each member
        self._request = 0
        self.cpu_ns = 0

    @property
    def families_count(self) -> int:
        """Families present."""
        return len(self._entry_of)

    def match(self, chain: Sequence[int], now_ms: int) -> int:
        """How many leading chunks are present; the core is told, as a client's touch does."""
        self._request += 1
        entry_of = self._entry_of
        matched = next((at for at, name in enumerate(chain) if name not in entry_of), len(chain))
        if chain:
            deepest = entry_of[chain[matched - 1]] if matched else ev.NONE
            missed = self._number(chain[matched]) if matched < len(chain) else 0
            touch = ev.Touch(
                self._request, self._now(now_ms), deepest, 0, matched, len(chain), missed, 0,
                ev.TouchKind.ACQUIRE, 0,
            )  # fmt: skip
            self._step(now_ms, ev.Touched(0, [touch]))
        return matched

    def publish(self, chain: Sequence[int], now_ms: int) -> Published:
        """Reserve and publish what is missing, in batches; as far as there is room behind the chain's own prefix."""
        stored = evicted = 0
        begin = next((at for at, name in enumerate(chain) if name not in self._entry_of), len(chain))
        while begin < len(chain):
            end = min(begin + self._batch_families, len(chain))
            before = len(self._entry_of)
            new = self._write(chain, begin, end, now_ms)
            if new is None:
                break
            stored += new
            evicted += before + new - len(self._entry_of)
            begin = end
        return Published(stored, evicted)

    def _number(self, name: int) -> int:
        return self._numbers.setdefault(name, len(self._numbers) + 1)

    def _now(self, now_ms: int) -> int:
        return now_ms * 1_000_000 + self._request

    def _step(self, now_ms: int, event: ev.Event) -> list[ev.Effect]:
        begin = time.perf_counter_ns()
        effects = self._core.step(self._now(now_ms), event)
        self.cpu_ns += time.perf_counter_ns() - begin
        return effects

    def _write(self, chain: Sequence[int], begin: int, end: int, now_ms: int) -> int | None:
        """Families newly stored of chunks [begin, end); None if there is no room."""
        names, width = chain[begin:end], len(self._members)
        keys = b"".join([self._number(name).to_bytes(8, "little") * 4 for name in names])
        entries = array("I", [self._entry_of.get(name, ev.NONE) for name in names])
        present = b"".join([(b"\1" if entry != ev.NONE else b"\0") * width for entry in entries])
        parent = self._entry_of.get(chain[begin - 1], ev.NONE) if begin else ev.NONE
        reserve = ev.Reserve(
            0, self._request, self._request, 0, keys, parent, self._members, 0, width, False, entries, present
        )
        reply = self._settle(now_ms, self._step(now_ms, reserve))
        if not isinstance(reply, ev.ReservedReply):
            return None
        if not reply.reservation:
            return 0
        count = len(names) * width
        publish = ev.Publish(
            0, self._request, reply.reservation, 0, array("Q", bytes(8 * count)), bytes([1]) * count
        )
        asked = [one for one in self._step(now_ms, publish) if isinstance(one, ev.DoPublish)]
        granted = [at for at, status in enumerate(reply.statuses) if status == ev.ReserveStatus.GRANTED]
        if len(asked) != 1 or len(granted) != len(asked[0].records):
            raise InvariantError("the core did not publish what it granted", code="replay")
        rows = dict.fromkeys(at // width for at in granted)  # whole families: nobody else writes here
        used = asked[0].entries[: len(rows)]
        entry_of_row = dict(zip(rows, used, strict=True))
        item_entries: array[int] = array("I", [entry_of_row[at // width] for at in granted])
        for at, entry, record in zip(granted, item_entries, asked[0].records, strict=True):
            name = names[at // width]
            self._entry_of[name], self._name_of[entry] = entry, name
            self._items_of.setdefault(entry, []).append((record, reply.places[at]))
        zeros = bytes(len(granted))
        self._step(now_ms, ev.Published(asked[0].token, zeros, item_entries, zeros, len(used)))
        return len(rows)

    def _settle(self, now_ms: int, effects: list[ev.Effect]) -> ev.Effect:
        """Carry out evictions until the reservation is answered; nobody holds anything here."""
        while isinstance(ask := effects[-1], ev.DoEvict):
            records: array[int] = array("I")
            places: array[int] = array("Q")
            for entry in ask.entries:
                del self._entry_of[self._name_of.pop(entry)]
                for record, place in self._items_of.pop(entry):
                    records.append(record)
                    places.append(place)
            effects = self._step(
                now_ms, ev.Evicted(ask.token, ask.entries, array("I"), records, places, array("Q"))
            )
        return effects[-1]


def core_factory(members: int, policy: str = "slru") -> CacheFactory:
    """Caches of the real core with that many members a family, for `kvd.plan.chunk.sweep`."""

    def make(family_bytes: int, capacity_bytes: int | None) -> ChunkCache:
        families = FAMILIES_UNLIMITED // members if capacity_bytes is None else capacity_bytes // family_bytes
        return CoreCache(families, members, policy)

    return make
