"""Counters of the connector in vLLM's own log line and on its Prometheus page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvd.engines.vllm_messages import COUNTERS

HIT_SOURCE = CacheHitSource.HOST


@dataclass
class KvdStats(KVConnectorStats):
    """Counters by name, as changes since the last time."""

    def reset(self) -> None:
        """Forget."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add."""
        for name, amount in other.data.items():
            self.data[name] = self.data.get(name, 0) + amount
        return self

    def reduce(self) -> dict[str, int | float]:
        """What one line of the log says: hit rate by token, volume, speed, and everything that went wrong."""
        said = {name: self.data[name] for name in COUNTERS if self.data.get(name)}
        asked, hit = said.get("asked_tokens", 0), said.get("hit_tokens", 0)
        short: dict[str, int | float] = {f"kvd_{name}": amount for name, amount in said.items()}
        if asked:
            short["kvd_hit_rate"] = round(hit / asked, 4)
        if said.get("loaded_ns"):
            short["kvd_load_GBps"] = round(said.get("loaded_bytes", 0) / said["loaded_ns"], 2)
        return short

    def is_empty(self) -> bool:
        """Whether nothing happened."""
        return not any(self.data.values())


class KvdPromMetrics(KVConnectorPromMetrics):
    """One counter each, `vllm:kvd_<name>_total`, from the start at 0."""

    def __init__(
        self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {}
        for name in COUNTERS:
            counter = self._counter_cls(
                name=f"vllm:kvd_{name}", documentation=f"kvd connector: {name.replace('_', ' ')}.",
                labelnames=labelnames,
            )  # fmt: skip
            for engine, values in per_engine_labelvalues.items():
                self._counters[engine, name] = counter.labels(*values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add what was counted."""
        for name, amount in transfer_stats_data.items():
            if amount > 0 and (counter := self._counters.get((engine_idx, name))) is not None:
                counter.inc(amount)
