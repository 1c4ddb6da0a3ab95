"""Does published memory still hold what was published? Walks the pool at a bounded rate, and samples.

Owns the one worker thread that computes checksums, and what is known of who wrote which object. Everything else runs on
the event-loop thread: facts of an object are copied there, its checksum is computed by the worker (which holds no
lock and changes nothing), and the outcome is judged on the loop again. Three things are looked at: what a client
found damaged and reported, a sample of what is published, and everything, when an operator asks for a sweep.

    facts on the loop ──▶ checksum in the worker ──▶ judged on the loop: same generation, still READY? ──▶ withdrawn

Invariants: a slot that was reused meanwhile is never judged (its entry has another state or generation by then, and no
entry comes back to READY in an old generation); what is damaged is withdrawn in the turn in which it was judged; no
client's word alone withdraws anything. Without a sweep, sample or report this costs no wakeup.
"""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

from kvd.config import ObjectsConfig
from kvd.core import events as ev
from kvd.errors import InvariantError, LifecycleError, UsageError
from kvd.limits import GIB, MIB
from kvd.server import logs
from kvd.server.clients import Client
from kvd.server.domain import Domain
from kvd.shm import compute
from kvd.shm.layout import EntryState

RATE_BYTES_S: Final = GIB
RATE_MIN_BYTES_S: Final = MIB
STEP_BYTES: Final = 8 * MIB
STEP_OBJECTS: Final = 256
SCAN_ENTRIES: Final = 4096
SAMPLES_MAX: Final = 256
REPORTS_MAX: Final = 64
WRITERS_KNOWN_MAX: Final = 4096
FLAG_WITHDRAWN: Final = 4
_ADDRESS: Final = (1 << 48) - 1
_PUBLISHED: Final = int(ev.PublishStatus.PUBLISHED)
_BROKEN: Final = (RuntimeError, ValueError, IndexError, TypeError)
_log = logs.get("verify")
Withdraw = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Item:
    """One object as it was when its facts were copied."""

    entry: int
    generation: int
    key: bytes
    member: int
    record: int
    place: int
    size_bytes: int
    checksum: int


@dataclass(slots=True)
class Sweep:
    """One walk over the pool, running or done."""

    number: int
    rate_bytes_s: int
    namespace: int | None
    started_ns: int
    at: int = 0  # the next entry to look at
    objects: int = 0
    size_bytes: int = 0
    damaged: int = 0
    left: int = 0  # objects that left while they were looked at
    ended_ns: int = 0
    stopped: bool = False
    keys: list[str] = field(default_factory=list)  # the first of the damaged families


class Writers:
    """Who published which record last, as far as is known. A u32 a record; names of the last few thousand clients."""

    def __init__(self, records_max: int) -> None:
        self._client_of = array("I", bytes(4 * records_max))
        self._names: dict[int, dict[str, object]] = {}

    def wrote(self, client: Client, records: Sequence[int], statuses: bytes) -> None:
        """Remember that this client published these records."""
        number = client.client_id & 0xFFFFFFFF
        if number not in self._names:
            while len(self._names) >= WRITERS_KNOWN_MAX:
                del self._names[next(iter(self._names))]
            self._names[number] = {
                "writer_client": client.client_id, "writer_pid": client.peer.pid, "writer_name": client.name,
            }  # fmt: skip
        client_of = self._client_of
        for record, status in zip(records, statuses, strict=True):
            if status == _PUBLISHED:
                client_of[record] = number

    def of(self, record: int) -> dict[str, object]:
        """What is known of the writer of a record: nothing, if it was forgotten or an earlier daemon's client."""
        return self._names.get(self._client_of[record], {})


class Verifier:
    """See the module. `counters` are for the metrics."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        domain: Domain,
        client_of: Callable[[int], Client | None],
        withdraw: Withdraw,
        config: ObjectsConfig,
        busy: Callable[[bool], None] = lambda _busy: None,
    ) -> None:
        self._loop = loop
        self._domain = domain
        self._client_of = client_of
        self._withdraw = withdraw
        self._busy = busy
        self._sample_every = config.verify_sample
        self._until_sample = self._sample_every
        self._wanted = asyncio.Event()
        self._samples: deque[tuple[int, int]] = deque()  # entry, record
        self._reports: deque[tuple[int, int, Callable[[dict[str, object]], None]]] = deque()
        self._sweep: Sweep | None = None
        self._last: Sweep | None = None
        self._number = 0
        self._pool: ThreadPoolExecutor | None = None
        self.writers = Writers(domain.sizes.records_max)
        self.counters = dict.fromkeys(
            ("verified_objects", "verified_bytes", "verify_damaged", "verify_left", "verify_sweeps",
             "verify_samples", "verify_samples_dropped", "damage_reports"), 0,
        )  # fmt: skip
        domain.published_observers.append(self._published)

    # --- what comes in

    def _published(self, effect: ev.DoPublish, answer: ev.Published) -> None:
        """Observes publications: notes who wrote, and takes every n-th object as a sample."""
        client = self._client_of(effect.client)
        if client is None:
            return
        self.writers.wrote(client, effect.records, bytes(answer.statuses))
        if self._sample_every:
            self._until_sample -= len(effect.records)
            if self._until_sample <= 0:
                self._until_sample = self._sample_every
                self._take_sample(effect, answer)

    def _take_sample(self, effect: ev.DoPublish, answer: ev.Published) -> None:
        if len(self._samples) >= SAMPLES_MAX:
            self.counters["verify_samples_dropped"] += 1
        elif answer.statuses[-1] == _PUBLISHED:
            self._samples.append((memoryview(answer.entries)[-1], effect.records[-1]))
            self._wanted.set()

    def report(self, entry: int, member: int, done: Callable[[dict[str, object]], None]) -> None:
        """A reader says that an object is damaged: it is looked at, and `done` told. Raises LifecycleError(busy)."""
        if len(self._reports) >= REPORTS_MAX:
            raise LifecycleError(
                f"{REPORTS_MAX} reports of damage are waiting already; report it again later", code="busy"
            )
        self.counters["damage_reports"] += 1
        self._reports.append((entry, member, done))
        self._wanted.set()

    def start_sweep(self, rate_bytes_s: int | None, namespace: int | None) -> dict[str, object]:
        """Begin to walk the pool; if that goes on already, its progress. Raises UsageError(rate)."""
        rate = RATE_BYTES_S if rate_bytes_s is None else rate_bytes_s
        if rate < RATE_MIN_BYTES_S:
            raise UsageError(
                f"verify: rate is {rate} B/s, it must be at least {RATE_MIN_BYTES_S} B/s (1MiB/s)",
                code="rate", rate_bytes_s=rate,
            )  # fmt: skip
        started = self._sweep is None
        if self._sweep is None:
            self._number += 1
            self._sweep = Sweep(self._number, rate, namespace, self._domain.clock.now_ns())
            _log.info("sweep_started", number=self._number, rate_bytes_s=rate, namespace=namespace)
            self._wanted.set()
        return {"started": started, **self._shown(self._sweep)}

    def stop_sweep(self) -> dict[str, object]:
        """End a sweep where it is. `ended` in the answer is that sweep, None if none went on."""
        ending = self._sweep
        if ending is not None:
            ending.stopped = True
            self._end_sweep(ending)
            self._wanted.set()
        return {**self.status(), "ended": self._shown(ending) if ending is not None else None}

    # --- what is told

    def status(self) -> dict[str, object]:
        """The sweep that runs, and the last one that ended."""
        return {
            "running": self._shown(self._sweep) if self._sweep else None,
            "last": self._shown(self._last) if self._last else None,
            "sample_every": self._sample_every,
        }

    def _shown(self, sweep: Sweep) -> dict[str, object]:
        now_ns = self._domain.clock.now_ns()
        total = self._domain.sizes.families_max
        return {
            "number": sweep.number,
            "namespace": sweep.namespace,
            "rate_bytes_s": sweep.rate_bytes_s,
            "progress": round(min(1.0, sweep.at / total), 4),
            "objects": sweep.objects,
            "bytes": sweep.size_bytes,
            "damaged": sweep.damaged,
            "left": sweep.left,
            "keys": list(sweep.keys),
            "stopped": sweep.stopped,
            "took_s": round(((sweep.ended_ns or now_ns) - sweep.started_ns) / 1e9, 3),
            "ended_s": round((now_ns - sweep.ended_ns) / 1e9, 1) if sweep.ended_ns else None,
        }

    # --- the task

    async def run(self) -> None:
        """The supervised task: works off what is wanted, sleeps otherwise."""
        while True:
            self._wanted.clear()
            if self._reports:
                await self._look_at_report()
            elif self._samples:
                await self._look_at_sample()
            elif self._sweep is not None:
                await self._sweep_step(self._sweep)
            else:
                await self._wanted.wait()

    def close(self) -> None:
        """No further checks; one that runs ends by itself within milliseconds."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    async def _look_at_report(self) -> None:
        entry, member, done = self._reports.popleft()
        items = [item for item in self._items(entry) if item.member == member]
        damaged = await self._check(items, "reader")
        done({"damaged": bool(damaged), "looked_at": len(items)})

    async def _look_at_sample(self) -> None:
        entry, record = self._samples.popleft()
        items = [item for item in self._items(entry) if item.record == record]
        self.counters["verify_samples"] += len(items)
        await self._check(items, "sample")

    async def _sweep_step(self, sweep: Sweep) -> None:
        """Check about STEP_BYTES of the pool, then wait as long as the rate asks for; reports come first meanwhile."""
        items = self._next_items(sweep)
        for part in _steps(items):
            began_s = self._loop.time()
            damaged = await self._check(part, "sweep", sweep)
            sweep.damaged += len(damaged)
            if sweep.stopped:
                return
            size_bytes = sum(item.size_bytes for item in part)
            await self._pause(began_s + size_bytes / sweep.rate_bytes_s, sweep)
        if not items:
            # A stretch without objects: others have their turn before the next one.
            await asyncio.sleep(0)
        if sweep.at >= self._domain.sizes.families_max and not sweep.stopped:
            self._end_sweep(sweep)

    async def _pause(self, until_s: float, sweep: Sweep) -> None:
        """Keep to the sweep's rate; reports and samples need not wait for that."""
        while not sweep.stopped:
            if self._reports:
                await self._look_at_report()
            elif self._samples:
                await self._look_at_sample()
            elif (left_s := until_s - self._loop.time()) > 0:
                self._wanted.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(left_s):
                        await self._wanted.wait()
            else:
                return

    def _end_sweep(self, sweep: Sweep) -> None:
        sweep.ended_ns = self._domain.clock.now_ns()
        self._sweep, self._last = None, sweep
        self.counters["verify_sweeps"] += 1
        told = self._shown(sweep)
        log = _log.warning if sweep.damaged else _log.info
        log(
            "sweep_ended",
            **{name: told[name] for name in ("number", "objects", "bytes", "damaged", "stopped")},
        )

    def _next_items(self, sweep: Sweep) -> list[Item]:
        """Objects of the next entries, about one step of them, from at most SCAN_ENTRIES entries."""
        core = self._domain.core
        count = min(SCAN_ENTRIES, self._domain.sizes.families_max - sweep.at)
        entries = memoryview(self._domain.table.scan(sweep.at, count)).cast("I") if count else ()
        end = sweep.at + count
        items: list[Item] = []
        total_bytes = 0
        for entry in entries:
            sweep.at = entry + 1
            if sweep.namespace is not None and core.namespace_of(entry) != sweep.namespace:
                continue
            found = self._items(entry)
            items += found
            total_bytes += sum(item.size_bytes for item in found)
            if total_bytes >= STEP_BYTES or len(items) >= STEP_OBJECTS:
                return items
        sweep.at = end
        return items

    def _items(self, entry: int) -> list[Item]:
        """The objects of a family as they are now; none if it is not published or was withdrawn."""
        try:
            row = self._domain.table.entry(entry)
        except _BROKEN as error:
            raise InvariantError(f"META: entry {entry} cannot be read: {error}", code="meta") from error
        if row["state"] != EntryState.READY or row["flags"] & FLAG_WITHDRAWN:
            return []
        generation, key = row["generation"], row["key"]
        return [
            Item(entry, generation, key, m["member"], m["record"], m["place"], m["size_bytes"], m["checksum"])
            for m in row["members"]
        ]

    # --- checking

    async def _check(self, items: Sequence[Item], by: str, sweep: Sweep | None = None) -> list[Item]:
        """Those of the items that are damaged; they are withdrawn by then."""
        if not items:
            return []
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="kvd-verify")
        views = [self._memory(item) for item in items]
        self._busy(True)
        found = await self._loop.run_in_executor(self._pool, _checksums, items, views)
        self._busy(False)
        damaged = []
        for item, checksum in zip(items, found, strict=True):
            if checksum == item.checksum:
                self.counters["verified_objects"] += 1
                self.counters["verified_bytes"] += item.size_bytes
                if sweep is not None:
                    sweep.objects += 1
                    sweep.size_bytes += item.size_bytes
            elif self._is_as_it_was(item):
                damaged.append(item)
                if sweep is not None and item.key.hex() not in sweep.keys and len(sweep.keys) < 16:
                    sweep.keys.append(item.key.hex())
                self._take_out(item, checksum, by)
            else:
                self.counters["verify_left"] += 1
                if sweep is not None:
                    sweep.left += 1
        return damaged

    def _memory(self, item: Item) -> memoryview:
        try:
            return self._domain.table.memory(item.place >> 48, item.place & _ADDRESS, item.size_bytes)
        except _BROKEN as error:
            raise InvariantError(
                f"META: record {item.record} of entry {item.entry} lies outside the pool: {error}",
                code="meta",
            ) from error

    def _is_as_it_was(self, item: Item) -> bool:
        row = self._domain.table.entry(item.entry)
        return bool(row["state"] == EntryState.READY and row["generation"] == item.generation)

    def _take_out(self, item: Item, found: int, by: str) -> None:
        """Damage is proven and the family is still there: tell, and withdraw it in this turn."""
        self.counters["verify_damaged"] += 1
        _log.error(
            "object_damaged", key=item.key.hex()[:16], member=item.member, size_bytes=item.size_bytes,
            segment=item.place >> 48, offset=item.place & _ADDRESS, expected=f"{item.checksum:016x}",
            found=f"{found:016x}", found_by=by, **self.writers.of(item.record),
        )  # fmt: skip
        if not self._domain.table.entry(item.entry)["flags"] & FLAG_WITHDRAWN:
            self._withdraw(item.entry)


def _checksums(items: Sequence[Item], views: Sequence[memoryview]) -> list[int]:
    """Run by the worker: the checksum of each object. Native code, which holds no lock of Python while it reads."""
    found = []
    for item, view in zip(items, views, strict=True):
        seed = int.from_bytes(compute.seeds(item.key, item.member), "little")
        found.append(compute.checksum(view, seed))
    return found


def _steps(items: Sequence[Item]) -> Iterator[list[Item]]:
    """Items in pieces of about STEP_BYTES: one family may be larger than all of a step."""
    step: list[Item] = []
    total_bytes = 0
    for item in items:
        step.append(item)
        total_bytes += item.size_bytes
        if total_bytes >= STEP_BYTES:
            yield step
            step, total_bytes = [], 0
    if step:
        yield step
