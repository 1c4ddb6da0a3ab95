"""The scheduler's half of the vLLM connector: what is there, what to load, what to save. Never waits for anything.

Runs on the engine's scheduler thread alone. Owns the state of every live request: its chain (the engine's block
hashes, chained under kvd's namespace), the leases that protect what was promised, how far it is saved. All of it is
local: look-ups and leases read shared memory; the daemon is asked by the workers' own threads.

    request ── match ──▶ leases held ── blocks allocated ──▶ load promised ── every worker reported ──▶ leases released
                             └── finished, matched anew ──▶ released
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from typing import Any

from kvd.clientlib.chain import Chain
from kvd.clientlib.families import FamilyLeases
from kvd.clientlib.namespace import Namespace
from kvd.clientlib.session import Session
from kvd.clientlib.store import Store
from kvd.engines.common import weights_revision
from kvd.engines.common_attach import Attachment
from kvd.engines.common_counters import Counters
from kvd.engines.common_worth import Worth
from kvd.engines.vllm_identity import HASH_BYTES, Identity
from kvd.engines.vllm_messages import COUNTERS, Load, Plan, Report, Save
from kvd.errors import KvdError

_WAIT_AT_START_S = 2.0
_SAVE_CHUNKS_MAX = 512  # of one request in one step; the rest follows in the next


@dataclass(slots=True, eq=False)
class _Request:
    request: Any
    chain: Chain | None = None
    root: bytes = b""
    adapter: str = "none"
    matched: FamilyLeases | None = None
    matched_computed: int = -1
    matched_tokens: int = 0
    base: int = 0  # chunks that were there when it was matched
    saved: int = 0  # chunks that are there, or were handed out to be saved
    preemptions: int = 0  # when blocks were first handed out to be saved
    no_load: bool = False


class SchedulerSide:
    """See the module."""

    def __init__(self, identity: Identity, workers: int) -> None:
        self.identity = identity
        self.counters = Counters(COUNTERS)
        self.worth = Worth()
        self._workers = workers
        self._requests: dict[str, _Request] = {}
        self._saving: dict[str, _Request] = {}  # those of which blocks were handed out to be saved
        self._promised: list[Load] = []
        self._held: dict[int, FamilyLeases] = {}  # by load number
        self._ended: dict[int, int] = {}
        self._gone: list[str] = []
        self._number = 0
        self._epoch = 0
        self._generation = ""
        self._worker_epochs: set[str] | None = None
        self._agreed: Session | None = None  # the last one that was found to be the workers'
        self._adapters: dict[tuple[str, int, int], str | None] = {}
        settings = identity.settings
        # With several block tables a failure can only be told of a whole request, and only between steps.
        self._between_steps = settings.load == "async" or not identity.one_group
        self.attachment: Attachment[Store] = Attachment(
            self._prepare, socket=settings.socket, client=f"vllm-scheduler-{os.getpid()}",
            deadline_s=settings.deadline_s,
        )  # fmt: skip
        self.attachment.wait(_WAIT_AT_START_S)

    def _prepare(self, store: Store) -> Store:
        store.namespace(self.identity.manifest).families(self.identity.geometry, self.identity.chunk_tokens)
        return store

    # -- what is there ------------------------------------------------------------------------------------

    def arrived(self, request: Any) -> None:
        """A request was queued: name its blocks now, so that the step that looks it up does not."""
        state = self._state(request)
        store = self.attachment.session
        if store is not None and (adapter := self._adapter(request)) is not None:
            self._chain(state, namespace_of(store, self.identity, adapter, self._generation))

    def match(self, request: Any, computed_tokens: int) -> tuple[int, bool]:
        """Tokens that can be loaded beyond `computed_tokens`, and whether between steps. Takes leases for it."""
        state = self._state(request)
        if state.matched is not None and state.matched_computed == computed_tokens:
            return state.matched_tokens, self._between_steps
        self._release(state)
        self.counters.add("lookups")
        self.counters.add("asked_tokens", max(0, request.num_tokens - computed_tokens))
        namespace = self._namespace(state)
        if namespace is None or state.no_load:
            return 0, False
        chain = self._chain(state, namespace)
        if not len(chain):
            return 0, False
        leases = namespace.acquire(
            chain, self.identity.geometry, prompt_tokens=request.num_tokens, request=request.request_id
        )
        state.base = state.saved = leases.usable_chunks
        tokens = leases.usable_chunks * self.identity.chunk_tokens - computed_tokens
        if tokens <= 0 or not self._pays(request, computed_tokens, tokens):
            leases.release()
            return 0, False
        state.matched, state.matched_computed, state.matched_tokens = leases, computed_tokens, tokens
        return tokens, self._between_steps

    def _pays(self, request: Any, computed_tokens: int, tokens: int) -> bool:
        if not self.identity.settings.break_even:
            return True
        size_bytes = self.identity.load_bytes(computed_tokens + tokens, tokens)
        if self.worth.pays(request.num_tokens - computed_tokens, tokens, size_bytes, time.monotonic_ns()):
            return True
        self.counters.add("loads_refused")
        return False

    def _state(self, request: Any) -> _Request:
        state = self._requests.get(request.request_id)
        if state is None:
            state = self._requests[request.request_id] = _Request(request)
        return state

    def _namespace(self, state: _Request) -> Namespace | None:
        """Where the chunks of a request are; None while the daemon is away, or the workers are at another one."""
        store = self.attachment.session
        if store is None or not self._same_daemon(store.present_session):
            self.counters.add("lookups_away")
            return None
        adapter = self._adapter(state.request)
        if adapter is None:
            self.counters.add("lookups_unknown_adapter")
            return None
        state.adapter = adapter
        return namespace_of(store, self.identity, adapter, self._generation)

    def _same_daemon(self, session: Session) -> bool:
        """Whether the workers are at the daemon of this session, as far as they have told."""
        if session is self._agreed:
            return True
        if self._worker_epochs is not None:
            if self._worker_epochs != {str(session.epoch)}:
                return False
            self._agreed = session
        return True

    def _adapter(self, request: Any) -> str | None:
        """The name of a request's LoRA with a revision of its weights; None until a thread has looked at them."""
        lora = request.lora_request
        if lora is None:
            return "none"
        try:
            status = os.stat(lora.lora_path)
        except OSError:
            return None
        key = (lora.lora_path, status.st_mtime_ns, lora.lora_int_id)
        if key not in self._adapters:
            self._adapters[key] = None
            threading.Thread(
                target=self._name_adapter, args=(key, lora), name="kvd-lora", daemon=True
            ).start()
        return self._adapters[key]

    def _name_adapter(self, key: tuple[str, int, int], lora: Any) -> None:
        try:
            self._adapters[key] = f"{lora.lora_name}@{weights_revision(lora.lora_path)}"
        except (KvdError, OSError):
            return  # stays unknown: neither loaded nor saved

    def _chain(self, state: _Request, namespace: Namespace) -> Chain:
        """The chain of the blocks that the engine has hashed so far."""
        root = namespace.manifest.root
        chain = state.chain
        if chain is None or state.root != root:
            chain = state.chain = Chain(root, self.identity.chunk_tokens, "sha256")
            state.root = root
        every = self.identity.hashes_per_chunk
        hashes = state.request.block_hashes
        known, there = len(chain), len(hashes) // every
        if there > known:
            new = (
                hashes[known:there]
                if every == 1
                else hashes[known * every + every - 1 : there * every : every]
            )
            chain.extend_hashes(b"".join(new), HASH_BYTES)
        return chain

    # -- what is promised ---------------------------------------------------------------------------------

    def allocated(self, request: Any, table: tuple[list[int], ...], external_tokens: int) -> None:
        """Blocks are allocated. With `external_tokens` the load is promised: from here on a failure must be told."""
        state = self._state(request)
        if external_tokens <= 0:
            self._release(state)
            return
        chunk = self.identity.chunk_tokens
        leases, state.matched = state.matched, None
        first = state.matched_computed // chunk
        stop = first + external_tokens // chunk
        self._number += 1
        exported, identities = self._to_adopt(state, leases)
        self._promised.append(
            Load(
                number=self._number,
                request=request.request_id,
                adapter=state.adapter,
                exported=exported,
                identities=identities,
                first=first,
                stop=stop,
                block_ids=tuple(ids[first:stop] for ids in table),
                between_steps=self._between_steps,
            )
        )
        if leases is not None:
            self._held[self._number] = leases
        self.counters.add("loads")
        self.counters.add("hit_tokens", external_tokens)

    @staticmethod
    def _to_adopt(state: _Request, leases: FamilyLeases | None) -> tuple[bytes, bytes]:
        """What a worker adopts, and of which chunks; nothing, which fails there, if it cannot be had."""
        if leases is None or state.chain is None:
            return b"", b""
        try:
            return leases.export(), bytes(state.chain[: leases.usable_chunks].identities)
        except KvdError:
            return b"", b""

    def _release(self, state: _Request) -> None:
        leases, state.matched = state.matched, None
        if leases is not None:
            leases.release()

    # -- a step -------------------------------------------------------------------------------------------

    def promises(self, plan: Plan) -> None:
        """Put what was promised, and what is over, into a plan. Cannot fail."""
        plan.loads, self._promised = self._promised, []
        plan.gone, self._gone = self._gone, []
        plan.epoch, plan.generation = self._epoch, self._generation

    def saves(self, plan: Plan, scheduled: Any) -> None:
        """Add what can be saved after the step that `scheduled` (a SchedulerOutput) describes."""
        blocks = scheduled.kv_connector_block_state
        saving = self.identity.settings.store and self.attachment.session is not None and blocks is not None
        chunk = self.identity.chunk_tokens
        for request_id, count in scheduled.num_scheduled_tokens.items():
            state = self._requests.get(request_id)
            if state is None:
                continue
            request = state.request
            computed = request.num_computed_tokens
            if computed < request.num_prompt_tokens:
                plan.prefill_tokens += count
            if not saving:
                continue
            full = min(
                (computed + count) // chunk, len(request.block_hashes) // self.identity.hashes_per_chunk
            )
            if full > state.saved:
                self._save(plan, state, full, blocks)

    def _save(self, plan: Plan, state: _Request, full: int, blocks: Any) -> None:
        namespace = self._namespace(state)
        table = blocks.get_block_ids(state.request.request_id)
        if namespace is None or table is None:
            return
        first, stop = state.saved, min(full, state.saved + _SAVE_CHUNKS_MAX)
        chain = self._chain(state, namespace)
        before = max(0, first - 1)
        if len(chain) < stop or any(len(ids) < stop for ids in table):
            return
        plan.saves.append(
            Save(
                request=state.request.request_id,
                adapter=state.adapter,
                identities=bytes(chain[before:stop].identities),
                has_parent=before < first,
                block_ids=tuple(list(ids[first:stop]) for ids in table),
            )
        )
        state.saved = stop
        if state.request.request_id not in self._saving:
            self._saving[state.request.request_id] = state
            state.preemptions = state.request.num_preemptions

    def preempted(self) -> None:
        """Find requests whose blocks the engine has taken away since the last step."""
        lost = [i for i, s in self._saving.items() if s.preemptions != s.request.num_preemptions]
        for request_id in lost:
            state = self._saving.pop(request_id)
            state.saved = state.base
            self._gone.append(request_id)

    # -- reports ------------------------------------------------------------------------------------------

    def reported(self, report: Report) -> None:
        """Workers are through with loads, or lost them."""
        if report.attached_epochs:
            self._worker_epochs, self._agreed = report.attached_epochs, None
        for number, count in report.ended.items():
            total = self._ended.get(number, 0) + count
            if total < self._workers:
                self._ended[number] = total
                continue
            self._ended.pop(number, None)
            if (leases := self._held.pop(number, None)) is not None:
                leases.release()
        if report.loaded_bytes:
            self.worth.loaded(report.loaded_bytes, report.loaded_ns)
        self.worth.computed(report.prefill_tokens, report.prefill_ns)
        if report.tainted_epoch >= self._epoch:
            self._epoch += 1
            for state in self._requests.values():
                state.saved = state.base  # what was handed out in that epoch was not saved
        for request_id in report.failed:
            self.worth.failed(time.monotonic_ns())
            if (failed := self._requests.get(request_id)) is not None:
                failed.no_load = True  # else the engine would ask, and be promised, for ever
                failed.base = failed.saved = 0

    def finished(self, request: Any) -> None:
        """The request has ended. What workers are still loading is protected until they report."""
        state = self._requests.pop(request.request_id, None)
        if state is not None:
            self._release(state)
        if self._saving.pop(request.request_id, None) is not None:
            self._gone.append(request.request_id)

    def reset(self) -> None:
        """The engine drops its caches because KV of the past is no longer right: go on in a namespace of its own."""
        self._generation = os.urandom(16).hex()
        for state in self._requests.values():
            self._release(state)
            state.chain, state.base, state.saved = None, 0, 0

    def close(self) -> None:
        """Let go of everything."""
        for state in self._requests.values():
            self._release(state)
        for leases in self._held.values():
            leases.release()
        self._requests.clear()
        self._saving.clear()
        self._held.clear()
        self.attachment.close()


def namespace_of(store: Store, identity: Identity, adapter: str, generation: str) -> Namespace:
    """The namespace of requests with that LoRA, after that reset. Both roles come to the same one."""
    manifest = identity.manifest
    if adapter == "none" and not generation:
        return store.namespace(manifest)
    key = (adapter, generation)
    known = _manifests.setdefault(manifest.root, {})
    if key not in known:
        extra = (
            {**manifest.fields()["extra"], "generation": generation}
            if generation
            else manifest.fields()["extra"]
        )
        known[key] = manifest.replace(adapter=adapter, extra=extra)
    return store.namespace(known[key])


_manifests: dict[bytes, dict[tuple[str, str], Any]] = {}
