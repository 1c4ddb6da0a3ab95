"""KvdConnector: kvd under vLLM, as a KVConnectorBase_V1 for scheduler and workers.

    --kv-transfer-config '{"kv_connector": "KvdConnector", "kv_connector_module_path": "kvd.engines.vllm",
                           "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}'

This module is the border to vLLM and imports it; what is decided is decided in `vllm_scheduler`, what is copied in
`vllm_worker`, what is described in `vllm_identity`. A hook that raises kills the engine, so every hook is guarded: an
error is logged, counted and becomes a miss, or, where a load was promised, a failed load.
"""

from __future__ import annotations

import functools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from kvd.engines import vllm_stats
from kvd.engines.vllm_identity import identify
from kvd.engines.vllm_messages import Plan, Report
from kvd.engines.vllm_scheduler import SchedulerSide
from kvd.engines.vllm_worker import WorkerSide
from kvd.errors import KvdError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

log = logging.getLogger("vllm.kvd")
F = TypeVar("F", bound=Callable[..., Any])

KVConnectorMetadata.register(Plan)
KVConnectorWorkerMetadata.register(Report)

_HOOK_SAMPLES = 4096
_LOG_EVERY_S = 10.0


def guarded(fallback: Callable[..., Any]) -> Callable[[F], F]:
    """Run a hook; if it raises, log and count, and answer what `fallback(connector, *arguments)` says."""

    def wrap(hook: F) -> F:
        @functools.wraps(hook)
        def run(self: KvdConnector, *given: Any, **named: Any) -> Any:
            try:
                return hook(self, *given, **named)
            except Exception:  # noqa: BLE001  the engine dies of whatever leaves a hook
                self._hook_failed(hook.__name__)
            return fallback(self, *given, **named)

        return cast(F, run)

    return wrap


def _nothing(*_: object, **__: object) -> None:
    return None


class KvdConnector(KVConnectorBase_V1, SupportsHMA):
    """See the module. `hook_ns`: how long the scheduler hooks of the latest steps took, match and metadata together;
    `arrival_ns`: how long it took to name the blocks of each request, when it was queued.
    """

    _cache_hit_source = vllm_stats.HIT_SOURCE

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self.scheduler: SchedulerSide | None = None
        self.worker: WorkerSide | None = None
        self.hook_ns: deque[int] = deque(maxlen=_HOOK_SAMPLES)
        self.arrival_ns: deque[int] = deque(maxlen=_HOOK_SAMPLES)
        self._step_ns = 0
        self._logged_s = 0.0
        self._plan = Plan()
        try:
            identity = identify(vllm_config, kv_cache_config)
            if role == KVConnectorRole.SCHEDULER:
                self.scheduler = SchedulerSide(identity, vllm_config.parallel_config.world_size)
            else:
                self.worker = WorkerSide(identity, _tp_rank())
            log.info("kvd: %s serves %s", role.name.lower(), identity.manifest.short)
        except KvdError as error:
            log.warning("kvd: not used by this engine: %s", error)
        except Exception:
            log.exception("kvd: not used by this engine")

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that is dropped is a miss of tomorrow, nothing else."""
        return False

    def _hook_failed(self, name: str) -> None:
        side = self.scheduler or self.worker
        if side is not None:
            side.counters.add("hook_errors")
        if (now := time.monotonic()) - self._logged_s > _LOG_EVERY_S:
            self._logged_s = now
            log.exception("kvd: %s failed; the engine goes on", name)

    # -- scheduler ----------------------------------------------------------------------------------------

    @guarded(_nothing)
    def on_new_request(self, request: Request) -> None:
        """A request is queued, between steps."""
        if self.scheduler is None:
            return
        began_ns = time.perf_counter_ns()
        self.scheduler.arrived(request)
        self.arrival_ns.append(time.perf_counter_ns() - began_ns)

    @guarded(lambda *_: (0, False))
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens that kvd has beyond those computed, and whether they are loaded between steps."""
        if self.scheduler is None:
            return 0, False
        began_ns = time.perf_counter_ns()
        try:
            tokens, between = self.scheduler.match(request, num_computed_tokens)
            return tokens, between and tokens > 0
        finally:
            self._step_ns += time.perf_counter_ns() - began_ns

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        """The blocks are there: the load is promised. Unguarded as far as a promise goes: silence would be garbage."""
        if self.scheduler is None:
            return
        self.scheduler.allocated(
            request, blocks.get_block_ids() if num_external_tokens else (), num_external_tokens
        )

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Plan:
        """What workers do in this step."""
        plan = Plan()
        if self.scheduler is None:
            return plan
        began_ns = time.perf_counter_ns()
        self._find_preempted()
        self.scheduler.promises(plan)
        self._find_saves(plan, scheduler_output)
        self.hook_ns.append(self._step_ns + time.perf_counter_ns() - began_ns)
        self._step_ns = 0
        return plan

    @guarded(_nothing)
    def _find_preempted(self) -> None:
        assert self.scheduler is not None
        self.scheduler.preempted()

    @guarded(_nothing)
    def _find_saves(self, plan: Plan, scheduler_output: SchedulerOutput) -> None:
        assert self.scheduler is not None
        self.scheduler.saves(plan, scheduler_output)

    @guarded(_nothing)
    def update_connector_output(self, connector_output: Any) -> None:
        """What workers reported."""
        report = getattr(connector_output, "kv_connector_worker_meta", None)
        if self.scheduler is not None and isinstance(report, Report):
            self.scheduler.reported(report)

    @guarded(lambda *_: (False, None))
    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended. No block needs to be held: copies never outlast a step."""
        if self.scheduler is not None:
            self.scheduler.finished(request)
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished`, with several block tables."""
        return self.request_finished(request, [])

    @guarded(lambda *_: False)
    def reset_cache(self) -> bool | None:
        """The engine's KV of the past is no longer right: from now on this engine uses a namespace of its own."""
        if self.scheduler is not None:
            self.scheduler.reset()
        return True

    def take_events(self) -> Iterable[Any]:
        """None: the daemon publishes its own."""
        return ()

    # -- worker -------------------------------------------------------------------------------------------

    @guarded(_nothing)
    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """The engine's tensors, by layer."""
        if self.worker is None:
            return
        try:
            self.worker.register(kv_caches)
        except KvdError as error:
            log.warning("kvd: not used by this worker: %s", error)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """A step begins."""
        super().bind_connector_metadata(connector_metadata)
        self._plan = connector_metadata if isinstance(connector_metadata, Plan) else Plan()
        self._begin()

    @guarded(_nothing)
    def _begin(self) -> None:
        if self.worker is not None:
            self.worker.begin(self._plan)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Loads of this step, and those that go on between steps. Unguarded, since silence would be garbage: whatever
        goes wrong with a load, the worker tells that it failed and does not raise.
        """
        if self.worker is not None and self._plan.loads:
            self.worker.load(self._plan)

    @guarded(_nothing)
    def wait_for_layer_load(self, layer_name: str) -> None:
        """A layer is about to be computed: with load="layers" what the step loads of it may be under way."""
        if self.worker is not None:
            self.worker.wait_for_layer(layer_name)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Whether a step must come by `wait_for_layer_load`, which a captured graph would not."""
        return extra_config.get("load") == "layers"

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Blocks are copied when the step is over, all layers in one call."""

    @guarded(_nothing)
    def wait_for_save(self) -> None:
        """The step is over: copy what was computed."""
        if self.worker is not None:
            self.worker.save(self._plan)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Loads between steps that have ended, the failed ones among them."""
        results = self.get_transfer_results(finished_req_ids)
        return None, results.finished_recving or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Loads between steps that have ended, and those that failed."""
        if self.worker is None:
            return KVConnectorTransferResults()
        ended, failed = self.worker.through()
        return KVConnectorTransferResults(finished_recving=ended, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that a load of this step did not fill."""
        return set() if self.worker is None else self.worker.failed_blocks()

    @guarded(_nothing)
    def build_connector_worker_meta(self) -> Report | None:
        """What the scheduler must know."""
        return None if self.worker is None else self.worker.report()

    # -- both ---------------------------------------------------------------------------------------------

    @guarded(_nothing)
    def get_kv_connector_stats(self) -> vllm_stats.KvdStats | None:
        """What was counted since the last call."""
        side = self.scheduler or self.worker
        changed = side.counters.take() if side is not None else {}
        return vllm_stats.KvdStats(data=dict(changed)) if changed else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> vllm_stats.KvdStats:
        """Counters of one interval, for the engine's log."""
        return vllm_stats.KvdStats(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: VllmConfig, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> vllm_stats.KvdPromMetrics:
        """Counters in the engine's Prometheus page."""
        return vllm_stats.KvdPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @guarded(_nothing)
    def shutdown(self) -> None:
        """Publish what is copied, release what is leased, detach."""
        for side in (self.scheduler, self.worker):
            if side is not None:
                side.close()


def _tp_rank() -> int:
    from vllm.distributed import get_tensor_model_parallel_rank

    return int(get_tensor_model_parallel_rank())
