"""Whether loading KV beats computing it again.

    T_lookup + T_load_critical + (Q_reuse - Q_cold)  <  T_prefill_full - T_prefill_suffix

Owns that inequality, the load cost model and the prefill cost model. The upper half of the module is used
live, once per request with measured rates: ints in nanoseconds, a handful of additions, nothing kept. The
lower half is the ledger that shows the same arithmetic to a person. Pure, any thread.

The time saved is a difference of two prefills, never a share P/S of one: attention grows with the square of
the length, and the suffix still attends to the prefix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from kvd.errors import UsageError
from kvd.plan import units
from kvd.plan.ledger import Answer, Step
from kvd.plan.units import (
    Number,
    check_int,
    check_positive,
    format_bandwidth,
    format_bytes,
    format_ns,
    format_number,
)

NS_PER_S = 1_000_000_000


def reuse_gain_ns(
    lookup_ns: int, load_critical_ns: int, queue_reuse_ns: int, queue_cold_ns: int, prefill_saved_ns: int
) -> int:
    """Nanoseconds that reuse wins (negative: loses) against computing. Load if and only if it is > 0."""
    return prefill_saved_ns - lookup_ns - load_critical_ns - (queue_reuse_ns - queue_cold_ns)


def transfer_ns(size_bytes: int, bytes_per_s: Number) -> int:
    """Time to move `size_bytes`, rounded up. Raises UsageError for a negative size or a rate not above 0."""
    if size_bytes < 0 or bytes_per_s <= 0:
        raise UsageError(
            f"transfer of {size_bytes} B at {bytes_per_s} B/s; allowed: a size of 0 or more, a rate above 0",
            code="range", size_bytes=size_bytes, bytes_per_s=str(bytes_per_s),
        )  # fmt: skip
    return -(-size_bytes * NS_PER_S // bytes_per_s)


@dataclass(frozen=True, slots=True)
class LoadCost:
    """Measured cost of bringing KV to the GPU: lookup, transfer to host memory, copy to the GPU, synchronise.

    A rate of None means that the stage does not happen (data already in host memory has no transfer).
    """

    lookup_ns: int
    load_bytes_per_s: Number | None
    h2d_bytes_per_s: Number | None
    sync_ns: int

    def __post_init__(self) -> None:
        check_int("lookup", self.lookup_ns, 0, units.plan_duration_ns_max)
        check_int("sync", self.sync_ns, 0, units.plan_duration_ns_max)
        for name, rate in (("load rate", self.load_bytes_per_s), ("copy rate", self.h2d_bytes_per_s)):
            if rate is not None:
                check_positive(name, rate, units.plan_bandwidth_bytes_per_s_max)

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
    bytes_per_token: int,
    tokens_max: int,
    queue_delta_ns: int = 0,
    state_bytes: int = 0,
) -> int | None:
    """The shortest prefix worth loading, or None if none up to `tokens_max` is. `state_bytes` come with any length.

    The gain is a convex function of the length that starts at or below 0 (with `queue_delta_ns` >= 0), so it
    crosses 0 once and bisection finds the crossing. Raises UsageError for a negative delay or sizes.
    """
    check_int("bytes per token", bytes_per_token, 1, units.plan_bytes_max)
    check_int("tokens", tokens_max, 1, units.plan_count_max)
    check_int("extra queueing of reuse", queue_delta_ns, 0, units.plan_duration_ns_max)
    check_int("bytes of a state", state_bytes, 0, units.plan_bytes_max)

    def pays(tokens: int) -> bool:
        size = tokens * bytes_per_token + state_bytes
        return load_gain_ns(cost, prefill, tokens + 1, tokens, size, queue_delta_ns) > 0

    if not pays(tokens_max):
        return None
    low, high = 0, tokens_max  # not pays(low), pays(high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if pays(middle) else (middle, high)
    return high


def fit_prefill(samples: Sequence[tuple[int, int]]) -> PrefillCost:
    """Prefill cost from measured (prompt tokens, ns) of whole prompts: least squares of the relative error.

    Two different lengths fit the linear and the quadratic part, three or more the fixed part too. A part
    that would come out negative is left out and the rest fitted again. Raises UsageError: fewer than two
    different lengths (one point cannot tell linear from quadratic), values not above 0.
    """
    for tokens, time_ns in samples:
        check_int("sampled tokens", tokens, 1, units.plan_count_max)
        check_int("sampled time", time_ns, 1, units.plan_duration_ns_max)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakEvenPlan:
    """The inequality for one load. Times in ns, size in bytes, bandwidth in bytes a second.

    `hidden_ns` is the part of load and copy that overlaps with compute and so is not on the critical path.
    Raises UsageError: a value out of range, more hidden than there is.
    """

    size_bytes: int
    bandwidth_bytes_per_s: Fraction
    lookup_ns: int
    h2d_ns: int
    sync_ns: int
    prefill_saved_ns: int
    hidden_ns: int = 0
    queue_reuse_ns: int = 0
    queue_cold_ns: int = 0

    def __post_init__(self) -> None:
        check_int("bytes", self.size_bytes, 1, units.plan_bytes_max)
        check_positive("bandwidth", self.bandwidth_bytes_per_s, units.plan_bandwidth_bytes_per_s_max)
        for name in ("lookup", "h2d", "sync", "prefill_saved", "hidden", "queue_reuse", "queue_cold"):
            check_int(name.replace("_", " "), getattr(self, f"{name}_ns"), 0, units.plan_duration_ns_max)
        if self.hidden_ns > self.load_ns + self.h2d_ns + self.sync_ns:
            raise UsageError(
                f"hidden = {format_ns(self.hidden_ns)} is more than load, copy and sync take together; "
                f"allowed: 0 … {format_ns(self.load_ns + self.h2d_ns + self.sync_ns)}",
                code="contradiction", hidden_ns=self.hidden_ns,
            )  # fmt: skip

    @property
    def load_ns(self) -> int:
        """Transfer time, rounded up."""
        return units.ceil_div(self.size_bytes * NS_PER_S, self.bandwidth_bytes_per_s)

    @property
    def load_critical_ns(self) -> int:
        """Load, copy and sync on the critical path."""
        return self.load_ns + self.h2d_ns + self.sync_ns - self.hidden_ns

    @property
    def cost_ns(self) -> int:
        """The left side of the inequality."""
        return self.lookup_ns + self.load_critical_ns + self.queue_reuse_ns - self.queue_cold_ns

    @property
    def gain_ns(self) -> int:
        """The right side less the left."""
        return reuse_gain_ns(
            self.lookup_ns,
            self.load_critical_ns,
            self.queue_reuse_ns,
            self.queue_cold_ns,
            self.prefill_saved_ns,
        )

    @property
    def worth_it(self) -> bool:
        """Whether to load; a draw is not worth the trouble."""
        return self.gain_ns > 0

    @property
    def bandwidth_min_bytes_per_s(self) -> Fraction | None:
        """The bandwidth at which loading would draw, None if no bandwidth would do."""
        left = self.prefill_saved_ns - (self.cost_ns - self.load_ns)
        return Fraction(self.size_bytes * NS_PER_S, left) if left > 0 else None

    @property
    def answers(self) -> Mapping[str, Answer]:
        """Results under stable names."""
        return {
            "load_ns": self.load_ns,
            "load_critical_ns": self.load_critical_ns,
            "cost_ns": self.cost_ns,
            "prefill_saved_ns": self.prefill_saved_ns,
            "gain_ns": self.gain_ns,
            "worth_it": self.worth_it,
            "bandwidth_min_bytes_per_s": self.bandwidth_min_bytes_per_s,
        }

    @property
    def steps(self) -> tuple[Step, ...]:
        """The arithmetic, in order."""
        hidden = f" - {format_ns(self.hidden_ns)} hidden" if self.hidden_ns else ""
        queue = self.queue_reuse_ns - self.queue_cold_ns
        rows = [
            Step("load", f"{format_bytes(self.size_bytes)} ÷ {format_bandwidth(self.bandwidth_bytes_per_s)}",
                 self.load_ns, "ns"),
            Step("on the critical path", f"load {format_ns(self.load_ns)} + copy to GPU "
                 f"{format_ns(self.h2d_ns)} + sync {format_ns(self.sync_ns)}{hidden}",
                 self.load_critical_ns, "ns"),
            Step("queue, reuse less cold",
                 f"{format_ns(self.queue_reuse_ns)} - {format_ns(self.queue_cold_ns)}", queue, "ns"),
            Step("cost of reuse", f"lookup {format_ns(self.lookup_ns)} + "
                 f"{format_ns(self.load_critical_ns)} + queue {format_ns(queue)}", self.cost_ns, "ns"),
            Step("prefill saved", "full prefill - prefill of the suffix",
                 self.prefill_saved_ns, "ns"),
            Step("gain", f"{format_ns(self.prefill_saved_ns)} - {format_ns(self.cost_ns)}",
                 self.gain_ns, "ns"),
        ]  # fmt: skip
        least = self.bandwidth_min_bytes_per_s
        if least is not None:
            others = format_ns(self.cost_ns - self.load_ns)
            rows.append(Step("bandwidth for a draw", f"{format_bytes(self.size_bytes)} ÷ "
                             f"({format_ns(self.prefill_saved_ns)} - {others})", least, "B/s"))  # fmt: skip
        return tuple(rows)

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What the numbers take for granted."""
        return (
            "load, copy and sync follow one another"
            + (f", but for {format_ns(self.hidden_ns)} that overlap with compute" if self.hidden_ns else ""),
            "prefill saved is a full prefill less a prefill of the suffix, both measured, not a part of one",
            "bandwidth is what this load gets while others run, not what the link can do alone",
        )

    @property
    def conclusion(self) -> str:
        """What follows, and what does not."""
        cost, saved = format_ns(self.cost_ns), format_ns(self.prefill_saved_ns)
        verdict = (
            f"Loading is worth it: it costs {cost} and saves {saved} of prefill"
            if self.worth_it
            else f"Loading is not worth it: it costs {cost} and saves {saved} of prefill, so compute"
        )
        return f"{verdict}; this holds for one request at these rates, which kvd measures again as it runs."


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakEvenLength:
    """From which length on loading a prefix pays, at given load and prefill costs. Raises UsageError as they do."""

    cost: LoadCost
    prefill: PrefillCost
    bytes_per_token: int
    tokens_max: int = 1 << 20
    queue_delta_ns: int = 0
    state_bytes: int = 0

    @property
    def tokens(self) -> int | None:
        """The shortest prefix worth loading, None if none up to `tokens_max` is."""
        return break_even_tokens(
            self.cost,
            self.prefill,
            self.bytes_per_token,
            self.tokens_max,
            self.queue_delta_ns,
            self.state_bytes,
        )

    def size_bytes(self, tokens: int) -> int:
        """What a prefix of `tokens` has to load."""
        return tokens * self.bytes_per_token + self.state_bytes

    def cost_ns(self, tokens: int) -> int:
        """Lookup, load, copy, sync and the extra queueing for a prefix of `tokens`."""
        return self.cost.lookup_ns + self.cost.critical_ns(self.size_bytes(tokens)) + self.queue_delta_ns

    def saved_ns(self, tokens: int) -> int:
        """Prefill saved by a prefix of `tokens` before a suffix of one token."""
        return self.prefill.saved_ns(tokens + 1, tokens)

    @property
    def answers(self) -> Mapping[str, Answer]:
        """Results under stable names."""
        return {"break_even_tokens": self.tokens, "tokens_max": self.tokens_max}

    @property
    def steps(self) -> tuple[Step, ...]:
        """The arithmetic, in order."""
        shown = self.tokens or self.tokens_max
        state = f" + a state of {format_bytes(self.state_bytes)}" if self.state_bytes else ""
        model = self.prefill
        linear = format_ns(Fraction(model.linear_ps_per_token, 1_000))
        pair = format_ns(Fraction(model.quadratic_fs_per_pair, 1_000_000))
        text = f"{format_number(shown)} × {linear} + {format_number(shown)}² ÷ 2 × {pair}"
        rows = [
            Step("prefix", "the shortest that pays" if self.tokens else "none pays; the longest looked at",
                 shown, "tokens"),
            Step("its bytes", f"{format_number(shown)} × {format_number(self.bytes_per_token)} B{state}",
                 self.size_bytes(shown), "B"),
            Step("cost of reuse", "lookup + load + copy to GPU + sync + extra queueing", self.cost_ns(shown), "ns"),
            Step("prefill saved", text, self.saved_ns(shown), "ns"),
        ]  # fmt: skip
        return tuple(rows)

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What the numbers take for granted."""
        fixed = format_ns(self.prefill.fixed_ns)
        return (
            f"prefill grows linearly with the new tokens and with the pairs that attend, plus {fixed} that are not "
            f"saved; fitted to the samples given",
            "load and copy run at the same rates at every length",
            "nothing of them overlaps with compute, and a queue that reuse avoids is not counted: with either, the "
            "length is no longer than this",
        )

    @property
    def conclusion(self) -> str:
        """What follows, and what does not."""
        found = self.tokens
        verdict = (
            f"Prefixes below {format_number(found)} tokens are faster to compute than to load"
            if found is not None
            else f"No prefix up to {format_number(self.tokens_max)} tokens is worth loading"
        )
        return f"{verdict} at these rates; beyond the sampled lengths this is extrapolation."
