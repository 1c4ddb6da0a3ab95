"""Whether loading KV beats computing it again.

    T_lookup + T_load_critical + (Q_reuse - Q_cold)  <  T_prefill_full - T_prefill_suffix

Owns that inequality, the load cost model, the prefill cost model and its fit. Used live, once per request with
measured rates: ints in nanoseconds, a handful of additions, nothing kept. The ledgers that show the same arithmetic to
a person are in `kvd.plan.breakeven_ledger`. Pure, any thread.

The time saved is a difference of two prefills, never a share P/S of one: attention grows with the square of
the length, and the suffix still attends to the prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from kvd.errors import UsageError
from kvd.plan import units
from kvd.plan.footprint import Footprint
from kvd.plan.units import check_int


def reuse_gain_ns(
    lookup_ns: int, load_critical_ns: int, queue_reuse_ns: int, queue_cold_ns: int, prefill_saved_ns: int
) -> int:
    """Nanoseconds that reuse wins (negative: loses) against computing. Load if and only if it is > 0."""
    return prefill_saved_ns - lookup_ns - load_critical_ns - (queue_reuse_ns - queue_cold_ns)


def transfer_ns(size_bytes: int, bytes_per_s: int) -> int:
    """Time to move `size_bytes`, rounded up. Raises UsageError for a negative size or a rate not above 0."""
    if size_bytes < 0 or bytes_per_s <= 0:
        raise UsageError(
            f"transfer of {size_bytes} B at {bytes_per_s} B/s; allowed: a size of 0 or more, a rate above 0",
            code="range", size_bytes=size_bytes, bytes_per_s=bytes_per_s,
        )  # fmt: skip
    return -(-size_bytes * units.NS_PER_S // bytes_per_s)


@dataclass(frozen=True, slots=True)
class LoadCost:
    """Measured cost of bringing KV to the GPU: lookup, transfer to host memory, copy to the GPU, synchronise.

    A rate of None means that the stage does not happen (data already in host memory has no transfer).
    """

    lookup_ns: int
    load_bytes_per_s: int | None
    h2d_bytes_per_s: int | None
    sync_ns: int

    def __post_init__(self) -> None:
        check_int("lookup", self.lookup_ns, 0, units.plan_duration_ns_max)
        check_int("sync", self.sync_ns, 0, units.plan_duration_ns_max)
        for name, rate in (("load rate", self.load_bytes_per_s), ("copy rate", self.h2d_bytes_per_s)):
            if rate is not None:
                check_int(name, rate, 1, units.plan_bandwidth_bytes_per_s_max)

    def critical_ns(self, size_bytes: int) -> int:
        """Load and copy one after the other, and the synchronisation; without the lookup."""
        time_ns = self.sync_ns
        if self.load_bytes_per_s is not None:
            time_ns += transfer_ns(size_bytes, self.load_bytes_per_s)
        if self.h2d_bytes_per_s is not None:
            time_ns += transfer_ns(size_bytes, self.h2d_bytes_per_s)
        return time_ns


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """Prefill time = fixed + linear × new tokens + quadratic × pairs of (new token, token it attends to).

    `linear_ps_per_token` and `quadratic_fs_per_pair` are in pico- and femtoseconds so that ints are fine
    enough: 100 µs a token is 10**8 ps, 1 ns a pair is 10**6 fs.
    """

    fixed_ns: int
    linear_ps_per_token: int
    quadratic_fs_per_pair: int

    def __post_init__(self) -> None:
        check_int("fixed prefill time", self.fixed_ns, 0, units.plan_duration_ns_max)
        check_int("linear prefill time", self.linear_ps_per_token, 0, units.plan_duration_ns_max)
        check_int("quadratic prefill time", self.quadratic_fs_per_pair, 0, units.plan_duration_ns_max)

    @property
    def linear_ns_per_token(self) -> Fraction:
        """Of a new token."""
        return Fraction(self.linear_ps_per_token, 1_000)

    @property
    def quadratic_ns_per_pair(self) -> Fraction:
        """Of a new token and one that it attends to."""
        return Fraction(self.quadratic_fs_per_pair, 1_000_000)

    def prefill_ns(self, new_tokens: int, context_tokens: int = 0) -> int:
        """Time to compute `new_tokens` after `context_tokens` that are already there. 0 new tokens cost 0."""
        if new_tokens == 0:
            return 0
        pairs_twice = new_tokens * (2 * context_tokens + new_tokens)
        return (
            self.fixed_ns
            + new_tokens * self.linear_ps_per_token // 1_000
            + pairs_twice * self.quadratic_fs_per_pair // 2_000_000
        )

    def saved_ns(self, prompt_tokens: int, prefix_tokens: int) -> int:
        """T_prefill_full - T_prefill_suffix when the first `prefix_tokens` of the prompt are loaded.

        Raises UsageError unless 0 <= prefix < prompt: the last token is always computed, for its logits.
        """
        if not 0 <= prefix_tokens < prompt_tokens:
            raise UsageError(
                f"prefix of {prefix_tokens} tokens in a prompt of {prompt_tokens}; allowed: 0 … "
                f"{prompt_tokens - 1}, the last token is computed for its logits",
                code="range", prefix_tokens=prefix_tokens, prompt_tokens=prompt_tokens,
            )  # fmt: skip
        return self.prefill_ns(prompt_tokens) - self.prefill_ns(prompt_tokens - prefix_tokens, prefix_tokens)


def load_gain_ns(
    cost: LoadCost,
    prefill: PrefillCost,
    prompt_tokens: int,
    prefix_tokens: int,
    size_bytes: int,
    queue_reuse_ns: int = 0,
    queue_cold_ns: int = 0,
) -> int:
    """The live question for one request: what loading its prefix wins, in ns; load only if it is > 0."""
    return reuse_gain_ns(
        cost.lookup_ns,
        cost.critical_ns(size_bytes),
        queue_reuse_ns,
        queue_cold_ns,
        prefill.saved_ns(prompt_tokens, prefix_tokens),
    )


def break_even_tokens(
    cost: LoadCost,
    prefill: PrefillCost,
    footprint: Footprint,
    tokens_max: int,
    queue_delta_ns: int = 0,
    chunk_tokens: int = 1,
) -> int | None:
    """The shortest prefix of whole chunks that is worth loading, or None if none up to `tokens_max` is.

    What it saves is convex in the length: full attention, so a linear and a quadratic part. What it costs is concave on
    multiples of the chunk: a constant (look-up, snapshot, synchronisation, queueing) and the bytes, of which a full
    group needs all tokens and a window the smaller of length and window. So the gain is convex, starts at or below 0
    at length 0 (`queue_delta_ns` >= 0) and crosses 0 once: bisection finds the crossing. A chunked group, whose need
    goes up and down with the length, enters with the most it can need (`KeptGroup.last_is_bound`), which keeps this
    true and errs on the side of computing. Raises UsageError for a negative delay or sizes out of range.
    """
    check_int("tokens", tokens_max, 1, units.plan_count_max)
    check_int("chunk tokens", chunk_tokens, 1, tokens_max)
    check_int("extra queueing of reuse", queue_delta_ns, 0, units.plan_duration_ns_max)

    def pays(chunks: int) -> bool:
        tokens = chunks * chunk_tokens
        size = footprint.needed_bytes(tokens, chunk_tokens)
        return load_gain_ns(cost, prefill, tokens + 1, tokens, size, queue_delta_ns) > 0

    low, high = 0, tokens_max // chunk_tokens  # not pays(low), pays(high)
    if not pays(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if pays(middle) else (middle, high)
    return high * chunk_tokens


def fit_prefill(samples: Sequence[tuple[int, int]]) -> PrefillCost:
    """Prefill cost from measured (prompt tokens, ns) of whole prompts: least squares of the relative error.

    Two different lengths fit the linear and the quadratic part, three or more the fixed part too. A part
    that would come out negative is left out and the rest fitted again. Raises UsageError: fewer than two
    different lengths (one point cannot tell linear from quadratic), values not above 0.
    """
    for tokens, time_ns in samples:
        check_int("--prefill-sample, tokens", tokens, 1, units.plan_count_max)
        check_int("--prefill-sample, time", time_ns, 1, units.plan_duration_ns_max)
    lengths = len({tokens for tokens, _ in samples})
    if lengths < 2:
        raise UsageError(
            f"prefill was sampled at {lengths} length; allowed: 2 or more, one cannot tell linear growth "
            f"from growth with the square",
            code="samples", lengths=lengths,
        )  # fmt: skip
    parts = ["linear", "quadratic", *(["fixed"] if lengths >= 3 else [])]
    while True:
        rows = [_features(tokens, time_ns, parts) for tokens, time_ns in samples]
        found = dict(zip(parts, _least_squares(rows), strict=True))
        lowest = min(found, key=lambda part: found[part])
        if found[lowest] >= 0:
            break
        parts.remove(lowest)
    return PrefillCost(
        fixed_ns=round(found.get("fixed", Fraction(0))),
        linear_ps_per_token=round(found.get("linear", Fraction(0)) * 1_000),
        quadratic_fs_per_pair=round(found.get("quadratic", Fraction(0)) * 1_000_000),
    )


def _features(tokens: int, time_ns: int, parts: Sequence[str]) -> list[Fraction]:
    """One sample as a row of the fit, divided by its time so that long prompts do not drown short ones."""
    pairs = Fraction(tokens * tokens, 2)
    value = {"fixed": Fraction(1), "linear": Fraction(tokens), "quadratic": pairs}
    return [value[part] / time_ns for part in parts]


def _least_squares(rows: Sequence[Sequence[Fraction]]) -> list[Fraction]:
    """x that minimises the squares of rows · x - 1, by the normal equations in exact arithmetic."""
    size = len(rows[0])
    matrix = [
        [sum((row[i] * row[j] for row in rows), Fraction(0)) for j in range(size)]
        + [sum((row[i] for row in rows), Fraction(0))]
        for i in range(size)
    ]
    for pivot in range(size):  # positive definite: the pivots are not 0
        scale = matrix[pivot][pivot]
        matrix[pivot] = [value / scale for value in matrix[pivot]]
        for other in range(size):
            if other != pivot:
                factor = matrix[other][pivot]
                matrix[other] = [a - factor * b for a, b in zip(matrix[other], matrix[pivot], strict=True)]
    return [row[-1] for row in matrix]
