"""A worker's half of the vLLM connector: copies between the engine's blocks and kvd's objects.

Hooks run on the worker's main thread. The engine's blocks are only ever read there, in `save`, after the step that
computed them and before the next one: no copy is under way when the engine reuses a block (A2). What waits for the
daemon (reserve before the copy, publish after it) runs on one thread; loads between steps on another, so that stores
never hold them up (C7).

    save:  begun ── reserved by the thread ──▶ ready ── save() copies ──▶ copied ── thread publishes ──▶ there
             └── request gone, load failed, daemon late ──▶ given back
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kvd.clientlib.caches import EngineCache
from kvd.clientlib.chain import Chain
from kvd.clientlib.families import FamilyLeases
from kvd.clientlib.namespace import Namespace
from kvd.clientlib.store import Store
from kvd.clientlib.writes import Writes
from kvd.engines.common_attach import Attachment
from kvd.engines.common_counters import Counters
from kvd.engines.vllm_identity import Identity, layout_of
from kvd.engines.vllm_layers import CopyBand, LayerLoads
from kvd.engines.vllm_messages import COUNTERS, Load, Plan, Report, Save
from kvd.engines.vllm_scheduler import namespace_of
from kvd.errors import CapacityError, KvdError, LifecycleError, UnavailableError
from kvd.layout.manifest import Manifest
from kvd.layout.paged import PagedLayout
from kvd.layout.shards import Rank

log = logging.getLogger("kvd.engines")

_WAIT_AT_START_S = 2.0
_PENDING_CHUNKS_MAX = 4096  # begun and not copied; beyond that new ones are dropped
_BATCH_CHUNKS = 256  # of one reservation
_FLUSH_S = 2.0
_IDENTITY_BYTES = 32


@dataclass(slots=True, eq=False)
class _Piece:
    """Consecutive chunks that have blocks in the same groups: one reservation."""

    chain: Chain
    block_ids: dict[int, list[int]]  # engine group -> one block a chunk
    writes: Writes | None = None


@dataclass(slots=True, eq=False)
class _Job:
    request: str
    adapter: str
    generation: str
    epoch: int
    pieces: list[_Piece]
    chunks: int
    ready: bool = False
    over: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def give_back(self) -> None:
        """Nothing of it is saved. For any thread; what is being reserved is given back when the answer comes."""
        with self._lock:
            self.over = True
            pieces, self.pieces = self.pieces, []
        for piece in pieces:
            if piece.writes is not None:
                piece.writes.abort()

    def settle(self, piece: _Piece, writes: Writes) -> bool:
        """Keep a reservation, unless the job is over."""
        with self._lock:
            if self.over:
                return False
            piece.writes = writes
            return True


@dataclass(frozen=True, slots=True)
class _Caches:
    """The engine's tensors under one namespace."""

    store: Store
    by_manifest: dict[bytes, list[EngineCache]]
    bands: dict[bytes, list[EngineCache]]  # with load="layers": of each band of layers


class WorkerSide:
    """See the module."""

    def __init__(self, identity: Identity, tp_rank: int) -> None:
        self.identity = identity
        self.counters = Counters(COUNTERS)
        self._rank = tp_rank
        self._layouts: list[PagedLayout] = []
        self._tensors: list[list[Any]] = []
        self._ratio = 1  # blocks of the tensors in one of the engine's
        self._jobs: list[_Job] = []
        self._report = Report()
        self._told_epoch: str | None = None
        self._tainted_epoch = -1
        self._failed_blocks: set[int] = set()
        self._step_began_ns, self._epoch = 0, 0
        self._lock = threading.Lock()  # of what the load thread ends
        self._through: set[str] = set()
        self._through_failed: set[str] = set()
        self._layers: LayerLoads | None = None
        self.attachment: Attachment[_Caches] | None = None
        self._stores = _Thread("kvd-store")
        self._loads = _Thread("kvd-load")

    # -- start and end ------------------------------------------------------------------------------------

    def register(self, kv_caches: dict[str, Any]) -> None:
        """The engine's tensors, by layer. Raises CompatibilityError for a layout that kvd cannot describe."""
        identity = self.identity
        self._tensors = [[kv_caches[name] for name in names] for names in identity.layers]
        self._layouts = [
            layout_of(identity, group, tensors, self._rank) for group, tensors in enumerate(self._tensors)
        ]
        self._ratio = self._layouts[0].blocks // identity.blocks
        settings = identity.settings
        if settings.load == "layers" and identity.one_group:
            self._layers = LayerLoads(identity.layers[0], self._layouts[0], self._tensors[0])
        self.attachment = Attachment(
            self._prepare, socket=settings.socket, client=f"vllm-worker-{self._rank}-{os.getpid()}",
            deadline_s=settings.deadline_s, verify_reads=settings.verify,
        )  # fmt: skip
        self.attachment.wait(_WAIT_AT_START_S)

    def _prepare(self, store: Store) -> _Caches:
        caches = _Caches(store, {}, {})
        self._warm(caches, self._registered(caches, self.identity.manifest))
        return caches

    def _registered(self, caches: _Caches, manifest: Manifest) -> list[EngineCache]:
        """The engine's tensors, registered under a manifest."""
        found = caches.by_manifest.get(manifest.root)
        if found is None:
            namespace, identity = caches.store.namespace(manifest), self.identity
            found = [
                namespace.register(
                    layout, tensors, geom=identity.geometry, group=identity.groups[group], split=identity.split,
                    rank=Rank(self._rank),
                )
                for group, (layout, tensors) in enumerate(zip(self._layouts, self._tensors, strict=True))
            ]  # fmt: skip
            caches.by_manifest[manifest.root] = found
            if self._layers is not None:
                caches.bands[manifest.root] = self._layers.register(
                    namespace, identity.geometry, identity.groups[0]
                )
        return found

    def _warm(self, caches: _Caches, registered: list[EngineCache]) -> None:
        """Make the copy plans now, so that the first load does not."""
        identity = self.identity
        families = caches.store.namespace(identity.manifest).families(
            identity.geometry, identity.chunk_tokens
        )
        objects = families.objects(identity.split)
        for cache in registered:
            cache.reads(families, identity.split.code)
            for part in objects.writes(tp_rank=self._rank):
                cache.write(families, objects, part)
        for band in caches.bands.get(identity.manifest.root, ()):
            band.reads(families, identity.split.code)

    def close(self) -> None:
        """Publish what is copied, give back the rest, let go."""
        self._drop(self._jobs)
        self._stores.close(_FLUSH_S)
        self._loads.close(_FLUSH_S)
        if self.attachment is not None:
            self.attachment.close()

    def flush(self, timeout_s: float) -> bool:
        """Wait until what was copied is published; for tests and the end of a program."""
        return self._stores.flush(timeout_s)

    # -- a step begins ------------------------------------------------------------------------------------

    def begin(self, plan: Plan) -> None:
        """Before the step: let go of blocks that are others' now, ask for room for what the step will compute."""
        self._step_began_ns, self._epoch = time.monotonic_ns(), plan.epoch
        gone = set(plan.gone)
        if gone:
            self._drop([job for job in self._jobs if job.request in gone], "saves_gone")
        if not plan.saves:
            return
        caches = self._session
        if caches is None or (self.attachment is not None and self.attachment.resting):
            self.counters.add("saves_away", sum(len(s.block_ids[0]) for s in plan.saves))
            return
        for save in plan.saves:
            chunks = len(save.block_ids[0])
            if plan.epoch <= self._tainted_epoch:
                self.counters.add("saves_tainted", chunks)
            elif chunks + sum(job.chunks for job in self._jobs) > _PENDING_CHUNKS_MAX:
                self.counters.add("saves_late", chunks)
            else:
                job = _Job(
                    save.request, save.adapter, plan.generation, plan.epoch, self._pieces(save), chunks
                )
                self._stores.do(partial(self._reserve, caches, job))
                self._jobs.append(job)  # one that was not begun would wait for ever

    @property
    def _session(self) -> _Caches | None:
        return None if self.attachment is None else self.attachment.session

    def _pieces(self, save: Save) -> list[_Piece]:
        """Cut where the set of groups that have a block changes (a window's early blocks are gone), and by size."""
        identity = self.identity
        chain = Chain.of_identities(identity.manifest.root, identity.chunk_tokens, save.identities)
        skip = 1 if save.has_parent else 0
        columns = list(zip(*save.block_ids, strict=True))
        pieces: list[_Piece] = []
        begin = 0
        for end in range(1, len(columns) + 1):
            here = [bool(block) for block in columns[begin]]
            if (
                end < len(columns)
                and [bool(block) for block in columns[end]] == here
                and end - begin < _BATCH_CHUNKS
            ):
                continue
            ids = {g: [columns[n][g] for n in range(begin, end)] for g, there in enumerate(here) if there}
            if ids:
                pieces.append(_Piece(chain[skip + begin : skip + end], ids))
            begin = end
        return pieces

    def _reserve(self, caches: _Caches, job: _Job) -> None:
        """On the store thread: ask for room."""
        identity, attachment = self.identity, self.attachment
        namespace = namespace_of(caches.store, identity, job.adapter, job.generation)
        assert attachment is not None
        try:
            for piece in list(job.pieces):
                writes = namespace.reserve(
                    piece.chain, geom=identity.geometry, split=identity.split, rank=Rank(self._rank),
                    groups=[identity.groups[g] for g in piece.block_ids], skip_pending=True,
                    request=job.request,
                )  # fmt: skip
                if not job.settle(piece, writes):
                    writes.abort()
                    return
            attachment.well()
            job.ready = True
        except CapacityError:
            self.counters.add("saves_full", job.chunks)
            job.give_back()
        except UnavailableError:
            attachment.trouble()
            self.counters.add("saves_away", job.chunks)
            job.give_back()
        except Exception:
            self.counters.add("saves_failed", job.chunks)
            log.exception("kvd: cannot reserve; %d chunks are not saved", job.chunks)
            job.give_back()

    # -- loads --------------------------------------------------------------------------------------------

    def load(self, plan: Plan) -> None:
        """Fill the blocks that were promised: now, beside the step, or between steps on the load thread.

        Never raises: a load that the thread cannot be given, say because there is none to be had, is a failed one.
        """
        within = [load for load in plan.loads if not load.between_steps]
        for load in plan.loads:
            if load.between_steps:
                try:
                    self._loads.do(partial(self._load_between, load, plan.generation))
                except Exception as error:  # noqa: BLE001  the engine is told that the load failed, whatever it was
                    self._not_begun(load, error)
                    self._ended_between(load, good=False)
        if within and self._layers is not None:
            self._layers.begin(within)
            try:
                self._loads.do(partial(self._load_layers, self._layers, within, plan.generation))
            except Exception as error:  # noqa: BLE001  the engine is told that the load failed, whatever it was
                for load in within:
                    self._not_begun(load, error)
                self._layers.end()
            return
        for load in within:
            if not self._load(load, plan.generation):
                self._tell_failed(load, plan.epoch)

    def _not_begun(self, load: Load, error: Exception) -> None:
        self._say_failed(load, error)
        self._count_load(load, -1, 0)

    def _tell_failed(self, load: Load, epoch: int) -> None:
        self._failed_blocks |= load.blocks()
        self._report.failed.add(load.request)
        self.taint(epoch)

    def wait_for_layer(self, name: str) -> None:
        """Until what this step loads of that layer is there."""
        if self._layers is not None:
            self._layers.wait(name)

    def _finish_layers(self) -> None:
        if self._layers is not None:
            for load in self._layers.finish():
                self._tell_failed(load, self._epoch)

    def _load_layers(self, layers: LayerLoads, loads: list[Load], generation: str) -> None:
        """On the load thread, beside the step. However it ends, each load is counted and nobody waits any more."""
        began_ns = time.monotonic_ns()
        copied = {load.number: 0 for load in loads}

        def failed(load: Load, error: Exception) -> None:
            copied[load.number] = -1
            self._say_failed(load, error)

        def copier(load: Load, leases: FamilyLeases, bands: list[EngineCache]) -> CopyBand:
            def copy(band: int) -> None:
                copied[load.number] += self.copy_group(load, 0, leases, bands[band])

            return copy

        with contextlib.ExitStack() as held:
            held.callback(layers.end)
            held.callback(self._count_layered, loads, copied, began_ns)
            work: list[tuple[Load, CopyBand | None]] = []
            for load in loads:
                try:
                    caches, namespace, leases = self._adopt(load, generation)
                    held.enter_context(leases)
                    work.append((load, copier(load, leases, caches.bands[namespace.manifest.root])))
                except Exception as error:  # noqa: BLE001  the engine is told that the load failed, whatever it was
                    failed(load, error)
                    work.append((load, None))
            layers.copy(work, failed)

    def _count_layered(self, loads: list[Load], copied: dict[int, int], began_ns: int) -> None:
        took_ns = (time.monotonic_ns() - began_ns) // len(loads)
        for load in loads:
            self._count_load(load, copied[load.number], took_ns)

    def taint(self, epoch: int) -> None:
        """A block that the engine computes with holds garbage: nothing that was computed in this epoch is saved."""
        self._tainted_epoch = max(self._tainted_epoch, epoch)
        self._report.tainted_epoch = self._tainted_epoch
        self._drop([job for job in self._jobs if job.epoch <= epoch], "saves_tainted")

    def _load_between(self, load: Load, generation: str) -> None:
        good = False
        try:
            good = self._load(load, generation)
        finally:
            self._ended_between(load, good=good)

    def _ended_between(self, load: Load, *, good: bool) -> None:
        with self._lock:
            self._through.add(load.request)
            if not good:
                self._through_failed.add(load.request)

    def _load(self, load: Load, generation: str) -> bool:
        """Whether every byte of a load is in its block. Any thread; never raises."""
        began_ns = time.monotonic_ns()
        try:
            copied = self.copy_in(load, generation)
        except Exception as error:  # noqa: BLE001  the engine is told that the load failed, whatever it was
            self._say_failed(load, error)
            copied = -1
        self._count_load(load, copied, time.monotonic_ns() - began_ns)
        return copied >= 0

    def _say_failed(self, load: Load, error: Exception) -> None:
        self.counters.add("load_failures")
        log.warning("kvd: load of request %s failed and is computed instead: %s", load.request, error)

    def _count_load(self, load: Load, copied: int, took_ns: int) -> None:
        """A load is over, for the scheduler's leases and the rates; `copied` is less than 0 if it failed."""
        with self._lock:
            self._report.ended[load.number] = self._report.ended.get(load.number, 0) + 1
            if copied > 0:
                self._report.loaded_bytes += copied
                self._report.loaded_ns += took_ns
        if copied > 0:
            self.counters.add("loaded_bytes", copied)
            self.counters.add("loaded_ns", took_ns)

    def copy_in(self, load: Load, generation: str) -> int:
        """Adopt the scheduler's leases and copy; returns the bytes. Raises KvdError when a byte could not be had."""
        caches, namespace, leases = self._adopt(load, generation)
        with leases:
            registered = self._registered(caches, namespace.manifest)
            return sum(self.copy_group(load, group, leases, cache) for group, cache in enumerate(registered))

    def _adopt(self, load: Load, generation: str) -> tuple[_Caches, Namespace, FamilyLeases]:
        """Own leases on all that a load needs. Raises KvdError when something of it is gone; then nothing is held."""
        caches, identity = self._session, self.identity
        if caches is None:
            raise UnavailableError("this worker is not attached to the daemon", code="away")
        namespace = namespace_of(caches.store, identity, load.adapter, generation)
        self._registered(caches, namespace.manifest)
        chain = namespace.chain_of(load.identities, identity.chunk_tokens)
        leases = namespace.adopt(load.exported, chain, identity.geometry)
        usable = leases.usable_chunks
        if usable < load.stop or (usable != load.stop and not identity.geometry_is_full):
            leases.release()
            raise LifecycleError(
                f"leases on {usable} chunks for a load up to chunk {load.stop}", code="adopt", chunks=usable
            )
        return caches, namespace, leases

    def copy_group(self, load: Load, group: int, leases: FamilyLeases, cache: EngineCache) -> int:
        """Copy what a load needs of one group of the engine into `cache`; returns the bytes."""
        needed = leases.chunks(self.identity.groups[group])
        first, stop = max(needed.start, load.first), min(needed.stop, load.stop)
        copied = 0
        for chunks in _stretches(load, group, first, stop):
            ids = load.block_ids[group][chunks.start - load.first : chunks.stop - load.first]
            copied += leases.scatter(cache, self._tensor_blocks(ids), chunks=chunks)
        return copied

    def _tensor_blocks(self, ids: Sequence[int]) -> Sequence[int]:
        """Numbers in the tensors of blocks of the engine."""
        if self._ratio == 1:
            return ids
        return [block * self._ratio + n for block in ids for n in range(self._ratio)]

    # -- a step is over -----------------------------------------------------------------------------------

    def save(self, plan: Plan) -> None:
        """After the step: copy what has its room, drop what may not wait, leave the rest to the next step."""
        self._finish_layers()
        if plan.prefill_tokens and not plan.loads:
            self._report.prefill_tokens += plan.prefill_tokens
            self._report.prefill_ns += time.monotonic_ns() - self._step_began_ns
        caches = self._session
        if not self._jobs:
            return
        if caches is None:
            self._drop(self._jobs, "saves_away")
            return
        waiting: list[_Job] = []
        for job in self._jobs:
            if job.over:
                continue
            if not job.ready:
                waiting.append(job)
                continue
            self._copy_out(caches, job)
        self._jobs = waiting
        if not self.identity.geometry_is_full:
            # The engine takes blocks behind a window away while the request runs: those cannot wait.
            self._drop(waiting, "saves_late")

    def _copy_out(self, caches: _Caches, job: _Job) -> None:
        namespace = namespace_of(caches.store, self.identity, job.adapter, job.generation)
        registered = self._registered(caches, namespace.manifest)
        try:
            for piece in job.pieces:
                assert piece.writes is not None
                for group, ids in piece.block_ids.items():
                    piece.writes.gather(registered[group], self._tensor_blocks(ids))
        except Exception:
            self.counters.add("saves_failed", job.chunks)
            log.exception("kvd: cannot copy %d chunks; they are not saved", job.chunks)
            job.give_back()
            return
        self._stores.do(lambda: self._publish(job))

    def _publish(self, job: _Job) -> None:
        """On the store thread: make visible what was copied."""
        try:
            for piece in job.pieces:
                if piece.writes is None:
                    continue
                granted = piece.writes.granted_count
                if granted:
                    piece.writes.publish()
                members = max(1, len(piece.writes) // len(piece.chain))
                self.counters.add("saved_chunks", granted // members)
                self.counters.add("saves_present", len(piece.chain) - granted // members)
                self.counters.add(
                    "saved_bytes", granted // members * self.identity.chunk_bytes // self.identity.split.tp
                )
        except UnavailableError:
            if self.attachment is not None:
                self.attachment.trouble()
            self.counters.add("saves_away", job.chunks)
        except KvdError as error:
            self.counters.add("saves_failed", job.chunks)
            log.warning("kvd: %d chunks are not saved: %s", job.chunks, error)
        finally:
            job.give_back()

    def _drop(self, jobs: list[_Job], why: str = "") -> None:
        for job in list(jobs):
            if why and not job.over:
                self.counters.add(why, job.chunks)
            job.give_back()
        dropped = set(map(id, jobs))
        self._jobs = [job for job in self._jobs if id(job) not in dropped]

    # -- what the engine asks -----------------------------------------------------------------------------

    def through(self) -> tuple[set[str], set[str]]:
        """Requests whose load between steps has ended, and those of them that failed."""
        with self._lock:
            ended, self._through = self._through, set()
            failed, self._through_failed = self._through_failed, set()
            self._report.failed |= failed
        return ended, failed

    def failed_blocks(self) -> set[int]:
        """Blocks that a load within this step did not fill."""
        self._finish_layers()  # a step that computes nothing is not saved
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def report(self) -> Report | None:
        """What there is to tell the scheduler."""
        caches = self._session
        epoch = "" if caches is None else str(caches.store.present_session.epoch)
        with self._lock:
            if epoch != self._told_epoch:
                self._told_epoch = epoch
                self._report.attached_epochs = {epoch}
            if self._report.empty:
                return None
            report, self._report = self._report, Report()
        return report


def _stretches(load: Load, group: int, first: int, stop: int) -> list[range]:
    """Chunks in [first, stop) that have a block in this group, as ranges."""
    ids = load.block_ids[group]
    stretches: list[range] = []
    for chunk in range(first, stop):
        if not ids[chunk - load.first]:
            continue
        if stretches and stretches[-1].stop == chunk:
            stretches[-1] = range(stretches[-1].start, chunk + 1)
        else:
            stretches.append(range(chunk, chunk + 1))
    return stretches


class _Thread:
    """One thread that does what it is given, in order. Starts with the first; what raises is logged, never lost."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def do(self, work: Callable[[], None]) -> None:
        """Append; returns at once. Raises what a thread that cannot be started raises; then nothing is appended."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            thread.start()
            self._thread = thread  # one that could not be started is tried again, nobody would read its queue
        self._queue.put(work)

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                work()
            except Exception:
                log.exception("kvd: %s", self._name)

    def flush(self, timeout_s: float) -> bool:
        """Wait until what was given so far is done; whether it is."""
        if self._thread is None:
            return True
        done = threading.Event()
        self._queue.put(done.set)
        return done.wait(timeout_s)

    def close(self, timeout_s: float) -> None:
        """Do what is left, at most so long, and end."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(timeout_s)
