"""Is it worth loading? The live break-even of an engine, from what it measured itself (C8), and a stop after failures.

Pure arithmetic over `kvd.plan.breakeven`; rates are running means. Not thread-safe: kept by whoever decides. Until both
rates are known every load is worth trying; of the loads that are refused one in `PROBE_EVERY` is let through, so that a
rate measured at a bad moment is measured again.
"""

from __future__ import annotations

from kvd.plan.breakeven import LoadCost, PrefillCost, load_gain_ns

PROBE_EVERY = 32
FAILURES_MAX = 8  # in a row: then no loads for a while
FAILURE_REST_NS = 10_000_000_000
_WEIGHT = 0.25  # of a new measurement
_LOOKUP_NS = 50_000
_LOAD_BYTES_MIN = 64 << 10  # smaller loads measure overheads, not a rate
_PREFILL_TOKENS_MIN = 32


class Worth:
    """See the module. Sizes in bytes, times in ns."""

    def __init__(self) -> None:
        self.load_bytes_per_s = 0.0
        self.prefill_ns_per_token = 0.0
        # Made when a rate changes, not when a request asks: that is on the path of a scheduler's step.
        self._cost: LoadCost | None = None
        self._prefill: PrefillCost | None = None
        self.refused_count = 0
        self._failures = 0
        self._rest_until_ns = 0

    def loaded(self, size_bytes: int, took_ns: int) -> None:
        """A load of that size took so long."""
        self._failures = 0
        if size_bytes >= _LOAD_BYTES_MIN and took_ns > 0:
            self.load_bytes_per_s = _mean(self.load_bytes_per_s, size_bytes * 1e9 / took_ns)
            self._cost = LoadCost(_LOOKUP_NS, max(1, int(self.load_bytes_per_s)), None, 0)

    def failed(self, now_ns: int) -> None:
        """A load failed. Too many in a row stop loading for a while: something is wrong that retrying will not mend."""
        self._failures += 1
        if self._failures >= FAILURES_MAX:
            self._failures, self._rest_until_ns = 0, now_ns + FAILURE_REST_NS

    def computed(self, tokens: int, took_ns: int) -> None:
        """A step that computed so many tokens of prompts took so long."""
        if tokens >= _PREFILL_TOKENS_MIN and took_ns > 0:
            self.prefill_ns_per_token = _mean(self.prefill_ns_per_token, took_ns / tokens)
            self._prefill = PrefillCost(0, int(self.prefill_ns_per_token * 1000), 0)

    def pays(self, prompt_tokens: int, prefix_tokens: int, size_bytes: int, now_ns: int) -> bool:
        """Whether to load `size_bytes` for the first `prefix_tokens` of the `prompt_tokens` that must be computed."""
        if now_ns < self._rest_until_ns:
            return False
        cost, prefill = self._cost, self._prefill
        if cost is None or prefill is None or not 0 < prefix_tokens < prompt_tokens:
            return True
        if load_gain_ns(cost, prefill, prompt_tokens, prefix_tokens, size_bytes) > 0:
            return True
        self.refused_count += 1
        return self.refused_count % PROBE_EVERY == 0


def _mean(old: float, new: float) -> float:
    return new if not old else old + _WEIGHT * (new - old)
