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

from kvd import limits
from kvd.clock import Clock
from kvd.config import Config, Sizes
from kvd.core import events as ev
from kvd.core.core import Core, CoreConfig
from kvd.errors import CapacityError
from kvd.layout.manifest import Manifest
from kvd.server import logs
from kvd.server.names import Names
from kvd.shm import _native, pool, segments

_log = logs.get("domain")


@dataclass(frozen=True, slots=True)
class NamespaceRecord:
    """A namespace that a client registered: number in RESERVE, root of its chain."""

    number: int
    root: bytes
    label: str
    model: str
    tenant: str


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
    namespaces: dict[bytes, NamespaceRecord] = field(default_factory=dict)
    namespaces_by_number: dict[int, NamespaceRecord] = field(default_factory=dict)
    namespaces_of: dict[tuple[int, int], int] = field(
        default_factory=dict
    )  # by process: how many it brought up
    # Told of each publication and eviction once the table has spoken, before the core is.
    published_observers: list[Callable[[ev.DoPublish, ev.Published], None]] = field(default_factory=list)
    evicted_observers: list[Callable[[ev.DoEvict, ev.Evicted], None]] = field(default_factory=list)
    leaving: dict[int, Callable[[], None]] = field(
        default_factory=dict
    )  # by slot: what follows when it is given up
    names: Names | None = None  # what the next daemon over this memory must know
    # By type rather than by `match`: this is looked up for every effect of every operation.
    performers: dict[type, Callable[[Any], ev.Published | ev.Evicted | None]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
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

    def register_namespace(
        self, encoded: bytes, label: str, owner: tuple[int, int] | None = None
    ) -> NamespaceRecord:
        """The record of this manifest, new or known. Raises UsageError(encoding), CapacityError(namespaces).

        `owner` is the process that asks (pid, start ticks): numbers are given out for ever, and one process gets no
        more than its share. None: nobody's.
        """
        manifest = Manifest.decode(encoded)
        known = self.namespaces.get(manifest.root)
        if known is not None:
            return known
        number = len(self.namespaces) + 1
        if number > limits.namespaces_max:
            raise CapacityError(
                f"domain {self.name!r} has {limits.namespaces_max} namespaces already; restart the daemon to "
                "forget them",
                code="namespaces", namespaces_max=limits.namespaces_max,
            )  # fmt: skip
        if owner is not None:
            owned_count = self.namespaces_of.get(owner, 0)
            if owned_count >= limits.namespaces_per_process_max:
                raise CapacityError(
                    f"process {owner[0]} brought up {owned_count} namespaces, as many as one may: namespaces are for "
                    "models and tenants, not for requests",
                    code="namespaces", namespaces_max=limits.namespaces_per_process_max,
                )  # fmt: skip
            self.namespaces_of[owner] = owned_count + 1
        if self.names is not None:
            self.names.add_namespace(number, encoded, label)
        fields = manifest.fields()
        record = NamespaceRecord(number, manifest.root, label, str(fields["model"]), str(fields["tenant"]))
        self.namespaces[record.root] = record
        self.namespaces_by_number[number] = record
        return record

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
