"""Starting over memory that an earlier daemon left (docs/design/restart.md): what is believed and what is dropped.

Owns the way from kept descriptors to a domain in service. Called by `App` once, before anybody can connect, on the
event-loop thread. Whatever cannot be taken over for certain is dropped with a line in the log that names the reason,
and the daemon starts with memory of its own: nobody reuses the old memory then, so that old clients may read on.

Invariant: the old META stays stored until the new one is.
"""

from __future__ import annotations

import dataclasses
import os
import select
import time
from array import array
from dataclasses import dataclass, field
from typing import Any, Final

from kvd import limits
from kvd.clock import Clock
from kvd.config import Config, Sizes
from kvd.core import events as ev
from kvd.core.core import Core
from kvd.core.restoring import RUNS_FROM
from kvd.core.slots import slot_and_slab
from kvd.errors import KvdError, UnavailableError
from kvd.layout.manifest import Manifest
from kvd.server import domain as domains
from kvd.server import logs
from kvd.server.domain import Domain, ProcessIdentity
from kvd.server.keeping import Keep, numbered
from kvd.server.names import Known, Names, read
from kvd.server.notify import KEPT_PREFIX
from kvd.server.peer import start_ticks
from kvd.shm import _native, pool
from kvd.shm.layout import LAYOUT_VERSION
from kvd.version import VERSION

_NONE: Final = 0xFFFFFFFF
_log = logs.get("restart")


@dataclass(slots=True)
class Ghost:
    """A process that was attached to an earlier daemon and lives."""

    slot: int
    pid: int
    start_ticks: int
    client_id: int
    epoch: int  # of the daemon it attached to
    region_slot: int  # its slot there
    fd: int  # of its region
    pidfd: int | None  # None: of a pid namespace that cannot be seen; only it can say that it has left
    records_count: int = 0  # slots that it may still be writing


@dataclass(slots=True)
class Outcome:
    """What became of the kept memory; `kvctl status` shows it."""

    keep: str
    adopted: bool = False
    dropped_reason: str = ""
    from_epoch: str = ""
    families: int = 0
    in_limbo: int = 0
    size_bytes: int = 0
    being_written: int = 0
    dropped_damaged: int = 0
    dropped_segment: int = 0
    seconds: float = 0.0

    def as_dict(self) -> dict[str, object]:
        """JSON-able."""
        return dataclasses.asdict(self)


class _Dropped(Exception):  # noqa: N818 - a reason, not an error
    """The kept memory cannot be used."""

    def __init__(self, reason: str, **fields: object) -> None:
        super().__init__(reason)
        self.fields = fields


@dataclass(slots=True)
class _Kept:
    """The newest complete set among the kept descriptors."""

    number: int
    meta_fd: int
    known: Known
    old: _native.Adoption


@dataclass(slots=True)
class Started:
    """A domain, taken over or new, and who it must wait for."""

    domain: Domain
    outcome: Outcome
    number: int  # how many daemons were there over this memory, with this one
    ghosts: list[Ghost] = field(default_factory=list)
    client_ids_from: int = 1
    numbers_used: int = 0  # more, if a set could not be stored


def start(
    keep: Keep,
    name: str,
    config: Config,
    sizes: Sizes,
    identity: ProcessIdentity,
    clock: Clock,
    posix_names: list[str],
    *,
    hugetlb: bool,
) -> Started:
    """A domain over the kept memory if there is any that can be used, else over new memory; stored either way.

    Raises CapacityError, UnavailableError.
    """
    outcome = Outcome(keep.kind)
    before = set(keep.kept)
    began_s = time.monotonic()
    started = None
    if keep.kept:
        try:
            started = _take_over(keep, name, config, sizes, identity, clock, outcome, hugetlb=hugetlb)
        except _Dropped as dropped:
            outcome.dropped_reason = str(dropped)
            _log.warning("kept_memory_dropped", reason=str(dropped), **dropped.fields)
    if started is None:
        domain = domains.create(name, config, sizes, identity, clock, posix_names, hugetlb=hugetlb)
        newest = max(numbered(keep.kept, "meta") | numbered(keep.kept, "names"), default=0)
        started = Started(domain, outcome, newest + 1)
        started.client_ids_from = max(numbered(keep.kept, "client"), default=0) + 1
        domain.namespaces.names = _names(identity, None)
    _store(keep, started, before)
    outcome.seconds = round(time.monotonic() - began_s, 3)
    if outcome.adopted:
        _log.info(
            "memory_adopted", families=outcome.families, bytes=outcome.size_bytes, limbo=outcome.in_limbo,
            being_written=outcome.being_written, damaged=outcome.dropped_damaged, lost_segment=outcome.dropped_segment,
            from_epoch=outcome.from_epoch, seconds=outcome.seconds, old_clients=len(started.ghosts),
        )  # fmt: skip
    return started


# --- what is there


def _newest(keep: Keep) -> _Kept:
    metas, names = numbered(keep.kept, "meta"), numbered(keep.kept, "names")
    both = metas.keys() & names.keys()
    if not both:
        raise _Dropped("no complete index is kept", descriptors=len(keep.kept))
    number = max(both)
    try:
        known = read(keep.kept[names[number]])
    except (KvdError, OSError) as error:
        raise _Dropped(f"the list of names cannot be read: {error}") from None
    if known.layout != LAYOUT_VERSION:
        raise _Dropped(
            f"it is of layout version {known.layout} (kvd {known.version}), this daemon has layout version "
            f"{LAYOUT_VERSION} (kvd {VERSION}) and no converter",
            kept_layout=known.layout, layout=LAYOUT_VERSION, kept_version=known.version,
        )  # fmt: skip
    _check_names(known)
    meta_fd = keep.kept[metas[number]]
    try:
        old = _native.Adoption(meta_fd)
    except (RuntimeError, ValueError, OSError) as error:
        raise _Dropped(f"its index does not check out: {error}") from None
    return _Kept(number, meta_fd, known, old)


def _check_names(known: Known) -> None:
    """Each number stands for one namespace, and each namespace has one number."""
    roots = set()
    try:
        for _, manifest, _ in known.namespaces:
            roots.add(Manifest.decode(manifest).root)
    except KvdError as error:
        raise _Dropped(f"a kept namespace cannot be read: {error.message}") from None
    numbers = {number for number, _, _ in known.namespaces}
    if len(numbers) != len(roots) or not all(1 <= number <= limits.namespaces_max for number in numbers):
        raise _Dropped("the kept namespaces are not numbered once each")


def _living(pid: int, ticks: int) -> tuple[bool, int | None]:
    """Whether that very process lives, and a pidfd of it. The pidfd comes first: a number can be given away."""
    if pid == 0:
        return True, None
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return False, None
    except (OverflowError, OSError) as error:
        raise _Dropped(
            f"whether process {pid}, which was attached, lives cannot be told: {error}", pid=pid
        ) from None
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    if start_ticks(pid) != ticks or poll.poll(0):
        os.close(pidfd)
        return False, None
    return True, pidfd


def _ghosts(keep: Keep, old: _native.Adoption, clients_max: int) -> list[Ghost]:
    """The old clients that live. All of them must be looked at before anything is reused."""
    regions = numbered(keep.kept, "client")
    ghosts: list[Ghost] = []
    for row in old.clients:
        lives, pidfd = _living(row["pid"], row["start_ticks"])
        if not lives:
            continue
        region = regions.get(row["client_id"])
        if region is None:
            raise _Dropped(
                f"process {row['pid']} was attached and lives, but its region was not kept: nobody knows what it holds",
                pid=row["pid"], client=row["client_id"],
            )  # fmt: skip
        ghosts.append(
            Ghost(
                clients_max + len(ghosts), row["pid"], row["start_ticks"], row["client_id"], row["epoch"],
                row["region_slot"], keep.kept[region], pidfd,
            )
        )  # fmt: skip
    return ghosts


def _segments(
    keep: Keep, old: _native.Adoption, wanted: tuple[int, ...], *, hugetlb: bool
) -> tuple[list[pool.Segment], bytes]:
    """The pool: kept segments where number, size and file are those of the old META, new ones elsewhere.

    The second value says for each old segment whether it was kept.
    """
    pools = numbered(keep.kept, "pool")
    made: list[pool.Segment] = []
    kept = bytearray(len(old.segments))
    for number, size_bytes in enumerate(wanted):
        row = old.segments[number] if number < len(old.segments) else None
        if row is not None and row[0] == size_bytes and number in pools:
            status = os.fstat(keep.kept[pools[number]])
            if (status.st_size, status.st_ino) == (size_bytes, row[3]):
                fd = keep.kept.pop(pools[number])
                made.append(pool.adopt_segment(number, fd, hugetlb=row[2] == int(pool.PageKind.HUGETLB)))
                kept[number] = 1
                continue
        made.append(pool.create_segment(number, size_bytes, hugetlb=hugetlb))
    return made, bytes(kept)


def _placed(old: _native.Adoption, wanted: tuple[int, ...]) -> tuple[array[int], array[int]]:
    """Slot bytes and slab frames for each size that occurs; 0 where a slot would not lie where it lay.

    How many frames a slab has depends on the largest segment for large objects only.
    """
    was = [row[0] for row in old.segments]
    sizes = memoryview(old.sizes()).cast("Q")
    now = [slot_and_slab(size, list(wanted)) for size in sizes]
    then = [slot_and_slab(size, was) for size in sizes]
    fit = [one if one == before else (0, 0) for one, before in zip(now, then, strict=True)]
    return array("Q", [slot for slot, _ in fit]), array("I", [frames for _, frames in fit])


# --- taking over


def _take_over(
    keep: Keep,
    name: str,
    config: Config,
    sizes: Sizes,
    identity: ProcessIdentity,
    clock: Clock,
    outcome: Outcome,
    *,
    hugetlb: bool,
) -> Started:
    kept = _newest(keep)
    old = kept.old
    if old.boot_id != identity.boot_id or kept.known.boot_id != identity.boot_id:
        raise _Dropped("it is of another boot of this machine")
    if old.epoch != kept.known.epoch:
        raise _Dropped("its index and its list of names are of different daemons")
    ghosts = _ghosts(keep, old, config.clients.max)
    outcome.from_epoch = f"{old.epoch:016x}"
    larger = dataclasses.replace(
        sizes,
        families_max=max(sizes.families_max, old.families_max),
        records_max=max(sizes.records_max, old.records_max),
    )
    if (larger.families_max, larger.records_max) != (sizes.families_max, sizes.records_max):
        _log.info("index_stays_larger", families_max=larger.families_max, records_max=larger.records_max)
    made, segments_kept = _segments(keep, old, sizes.segments_bytes, hugetlb=hugetlb)
    try:
        table, meta_fd = domains.make_table(larger, identity, made, config.clients.max + len(ghosts))
        columns = _adopt(kept, table, ghosts, segments_kept, sizes)
    except (RuntimeError, ValueError, OSError) as error:
        for segment in made:
            os.close(segment.fd)
            os.close(segment.read_only_fd)
        raise _Dropped(f"it cannot be taken over without risk: {error}") from None
    core = Core(
        domains.core_config(config, larger),
        larger.families_max,
        larger.records_max,
        list(larger.segments_bytes),
    )
    domain = Domain(name, identity, larger, clock, core, table, meta_fd, made)
    domain.namespaces.restore(kept.known.namespaces)
    domain.namespaces.names = _names(identity, kept.known)
    _tell(outcome, columns)
    for slot in memoryview(columns["ghost_slots"]).cast("I"):
        ghosts[slot - config.clients.max].records_count += 1
    fields = {item.name for item in dataclasses.fields(ev.Restore)}
    domain.step(ev.Restore(**{key: value for key, value in columns.items() if key in fields}))
    started = Started(domain, outcome, kept.number + 1, ghosts)
    started.client_ids_from = max((row["client_id"] for row in old.clients), default=0) + 1
    return started


def _adopt(
    kept: _Kept, table: _native.Table, ghosts: list[Ghost], segments_kept: bytes, sizes: Sizes
) -> dict[str, Any]:
    old = kept.old
    slot_bytes, slab_frames = _placed(old, sizes.segments_bytes)
    slots = array("I", [_NONE]) * old.clients_max
    by_id = {row["client_id"]: row["slot"] for row in old.clients}
    for ghost in ghosts:
        slots[by_id[ghost.client_id]] = ghost.slot
        old.attach_ghost(table, by_id[ghost.client_id], ghost.slot, ghost.fd)
    return old.adopt(
        table, segments_kept=segments_kept, slot_bytes=slot_bytes, slab_frames=slab_frames, ghosts=slots,
        frame_bytes=limits.frame_bytes, runs_from=RUNS_FROM,
        namespaces_count=max((number for number, _, _ in kept.known.namespaces), default=0),
    )  # fmt: skip


def _names(identity: ProcessIdentity, known: Known | None) -> Names:
    names = Names(LAYOUT_VERSION, identity.epoch, identity.boot_id, VERSION)
    if known is not None:
        for number, manifest, label in known.namespaces:
            names.add_namespace(number, manifest, label)
    return names


def _tell(outcome: Outcome, columns: dict[str, Any]) -> None:
    outcome.adopted = True
    outcome.families = columns["families"]
    outcome.in_limbo = columns["withdrawn"]
    outcome.size_bytes = columns["bytes"]
    outcome.being_written = columns["pending"]
    outcome.dropped_damaged = columns["damaged"]
    outcome.dropped_segment = columns["not_kept"]


# --- handing on


def client_name(client_id: int) -> str:
    """Under which name a client's region is kept."""
    return f"{KEPT_PREFIX}client-{client_id}"


def keep_names(keep: Keep, started: Started, names: Names) -> None:
    """The list of names goes on in another file: the next set is stored, META last, then the last one let go.

    Raises UnavailableError: the last set goes on, and nothing of the next one stays; its number is not used again.
    """
    before = started.number
    number = started.numbers_used = max(started.numbers_used, before) + 1
    following = [f"{KEPT_PREFIX}names-{number}", f"{KEPT_PREFIX}meta-{number}"]
    try:
        for name, fd in zip(following, (names.fd, started.domain.meta_fd), strict=True):
            keep.store(name, fd)
    except UnavailableError:
        for name in reversed(following):
            keep.remove(name)
        raise
    started.number = number
    keep.remove(f"{KEPT_PREFIX}meta-{before}")
    keep.remove(f"{KEPT_PREFIX}names-{before}")


def _store(keep: Keep, started: Started, before: set[str]) -> None:
    """The new set first, META last of it; then everything that is not of it is let go."""
    domain = started.domain
    names = {client_name(ghost.client_id) for ghost in started.ghosts}
    for ghost in started.ghosts:
        keep.taken(client_name(ghost.client_id), ghost.fd)
    assert domain.namespaces.names is not None
    fresh = {f"{KEPT_PREFIX}names-{started.number}": domain.namespaces.names.fd}
    for segment in domain.segments:
        pool_name = f"{KEPT_PREFIX}pool-{segment.number}"
        if started.outcome.adopted and pool_name in before and pool_name not in keep.kept:
            names.add(pool_name)  # it was taken over, and stays stored as it is
            keep.taken(pool_name, segment.fd)
            continue
        if pool_name in before:
            keep.remove(pool_name)  # another file
        fresh[pool_name] = segment.fd
    fresh[f"{KEPT_PREFIX}meta-{started.number}"] = domain.meta_fd
    for name, fd in fresh.items():
        keep.store(name, fd)
    for name in before - names - fresh.keys():
        keep.remove(name)
    for name, fd in keep.kept.items():
        if name not in names:
            os.close(fd)
    keep.kept = {}
