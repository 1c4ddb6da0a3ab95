"""One sharing domain: META, POOL, core, namespaces. Performs the core's effects on the shared tables.

Owns everything that one trust group may map. Called on the event-loop thread only. `step` is the one way in: it
gives the core an event and performs what it answers, in order, and brings every result back before the next event.
Invariant: an exception of the native table or an InvariantError means that kvd's books disagree; it is not caught
here, the daemon stops.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from kvd.clock import Clock
from kvd.config import Config, Sizes
from kvd.core import events as ev
from kvd.core.core import Core, CoreConfig
from kvd.server import logs
from kvd.server.namespaces import Namespaces
from kvd.shm import _native, pool, segments

_log = logs.get("domain")


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """Who the daemon is, as META tells it."""

    boot_id: bytes
    pid: int
    start_ticks: int
    epoch: int
    bucket_seed: int


@dataclass(slots=True)
class Domain:
    """A domain in service. `performers` says what is done for each type of effect; who sends the core's answers to
    clients (the runner) puts itself there for theirs.
    """

    name: str
    identity: ProcessIdentity
    sizes: Sizes
    clock: Clock
    core: Core
    table: _native.Table
    meta_fd: int
    segments: list[pool.Segment]
    namespaces: Namespaces = field(init=False)
    # Told of each publication and eviction once the table has spoken, before the core is.
    published_observers: list[Callable[[ev.DoPublish, ev.Published], None]] = field(default_factory=list)
    evicted_observers: list[Callable[[ev.DoEvict, ev.Evicted], None]] = field(default_factory=list)
    leaving: dict[int, Callable[[], None]] = field(
        default_factory=dict
    )  # by slot: what follows when it is given up
    # By type rather than by `match`: this is looked up for every effect of every operation.
    performers: dict[type, Callable[[Any], ev.Published | ev.Evicted | None]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.namespaces = Namespaces(self.core.namespace_is_used)
        self.performers = {
            ev.DoReserve: self._reserve,
            ev.DoPublish: self._publish,
            ev.DoEvict: self._evict,
            ev.DoFreeRecords: lambda effect: self.table.free_records(effect.records),
            ev.DoParents: lambda effect: self.table.set_parents(effect.entries, effect.parents),
            ev.DoFlags: lambda effect: self.table.set_flags(effect.entries, effect.flags),
            ev.Note: self._note,
            ev.Gone: self._gone,
        }

    @property
    def pool_bytes(self) -> int:
        """Bytes of all segments."""
        return sum(segment.size_bytes for segment in self.segments)

    def step(self, event: ev.Event) -> None:
        """Give the core one event and perform what follows from it."""
        now_ns = self.clock.now_ns()
        effects = self.core.step(now_ns, event)
        if len(effects) == 1:
            answer = self.performers[type(effects[0])](effects[0])
            if answer is None:
                return
            effects = self.core.step(now_ns, answer)
        stack: list[Iterator[ev.Effect]] = [iter(effects)]
        while stack:
            effect = next(stack[-1], None)
            if effect is None:
                stack.pop()
                continue
            answer = self.performers[type(effect)](effect)
            if answer is not None:
                stack.append(iter(self.core.step(now_ns, answer)))

    def forget(self, slot: int, then: Callable[[], None]) -> None:
        """A client can touch nothing any more. `then` is called, in this turn or a later one, when all is back."""
        self.leaving[slot] = then
        self.step(ev.ClientGone(slot))

    def _gone(self, effect: ev.Gone) -> None:
        self.table.detach(effect.client)
        self.leaving.pop(effect.client)()

    def _reserve(self, effect: ev.DoReserve) -> None:
        self.table.reserve(
            effect.client,
            effect.reservation & 0xFFFFFFFF,
            effect.records,
            effect.places,
            effect.sizes,
            effect.members,
            effect.ranges,
        )

    def _publish(self, effect: ev.DoPublish) -> ev.Published:
        statuses, entries, differs, used = self.table.publish(
            effect.client,
            effect.keys,
            effect.members,
            effect.split,
            effect.family_members,
            effect.records,
            effect.checksums,
            effect.entries,
            effect.namespace,
            effect.parents,
        )
        if effect.answer_op != ev.NO_OP:
            # The event that the answer stands for has happened; the client wakes up while the core writes its books.
            self.performers[ev.PublishedReply](ev.PublishedReply(effect.client, effect.answer_op, statuses))
        answer = ev.Published(effect.token, statuses, memoryview(entries).cast("I"), differs, used)
        for observe in self.published_observers:
            observe(effect, answer)
        return answer

    def _evict(self, effect: ev.DoEvict) -> ev.Evicted:
        out = self.table.evict(effect.entries, effect.withdraw)
        answer = ev.Evicted(
            token=effect.token,
            freed=memoryview(out.freed).cast("I"),
            held=memoryview(out.held).cast("I"),
            records=memoryview(out.records).cast("I"),
            places=memoryview(out.places).cast("Q"),
            sizes=memoryview(out.sizes).cast("Q"),
        )
        for observe in self.evicted_observers:
            observe(effect, answer)
        return answer

    def _note(self, effect: ev.Note) -> None:
        logger = _log.warning if effect.level == "warning" else _log.info
        fields = effect.fields
        if effect.event == "duplicate_differs":
            stored = self.stored_checksum(int(str(fields["entry"])), int(str(fields["member"])))
            fields = {**fields, "stored_checksum": "" if stored is None else f"{stored:016x}"}
        logger(effect.event, domain=self.name, **fields)

    def stored_checksum(self, entry: int, member: int) -> int | None:
        """The checksum a published member carries; None: there is no such member (any more)."""
        members = self.table.entry(entry)["members"]
        return next((int(row["checksum"]) for row in members if row["member"] == member), None)

    def close(self) -> None:
        """Remove named memory. The mappings go with the process."""
        for segment in self.segments:
            if segment.name:
                segments.unlink_named(segment.name)


def core_config(config: Config, sizes: Sizes) -> CoreConfig:
    """What the operator chose, in the core's words."""
    return CoreConfig(
        policy=config.eviction.policy,
        protected_share=config.eviction.protected_share,
        hard_pin_share=config.eviction.pinned_share,
        strict_duplicates=config.objects.strict_duplicates,
        client_reserved_bytes_max=sizes.reserved_bytes_max,
        answers_early=True,
    )


def make_table(
    sizes: Sizes, identity: ProcessIdentity, made: list[pool.Segment], clients_max: int
) -> tuple[_native.Table, int]:
    """A META of a new epoch over these segments, and its read-only descriptor."""
    meta_rw_fd = segments.create("kvd-meta")
    try:
        table = _native.Table(
            meta_rw_fd,
            families_max=sizes.families_max,
            records_max=sizes.records_max,
            segment_bytes=list(sizes.segments_bytes),
            clients_max=clients_max,
            epoch=identity.epoch,
            boot_id=identity.boot_id,
            bucket_seed=identity.bucket_seed,
            pid=identity.pid,
            start_ticks=identity.start_ticks,
        )
        meta_fd = segments.reopen_read_only(meta_rw_fd)
    finally:
        os.close(meta_rw_fd)
    for segment in made:
        table.map_segment(segment.number, segment.fd, sealed=segment.sealed)
        kind = pool.PageKind.HUGETLB if segment.hugetlb else pool.PageKind.SMALL
        table.set_segment(segment.number, 0, kind, segment.inode)
    return table, meta_fd


def create(
    name: str,
    config: Config,
    sizes: Sizes,
    identity: ProcessIdentity,
    clock: Clock,
    posix_names: list[str],
    *,
    hugetlb: bool,
) -> Domain:
    """META and POOL of a new domain, nothing populated yet. Raises CapacityError or UnavailableError."""
    made: list[pool.Segment] = []
    for number, size_bytes in enumerate(sizes.segments_bytes):
        posix_name = posix_names[number] if posix_names else ""
        made.append(pool.create_segment(number, size_bytes, hugetlb=hugetlb, posix_name=posix_name))
    table, meta_fd = make_table(sizes, identity, made, config.clients.max)
    core = Core(core_config(config, sizes), sizes.families_max, sizes.records_max, list(sizes.segments_bytes))
    return Domain(name, identity, sizes, clock, core, table, meta_fd, made)
