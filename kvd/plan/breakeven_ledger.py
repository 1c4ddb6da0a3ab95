"""The break-even ledgers: the arithmetic of `kvd.plan.breakeven`, shown to a person.

Owns three plans: one load against the prefill it saves, the length from which on loading pays, and the fit of the
prefill samples. Pure, any thread. What was measured, and what was not given and counts as 0, is said.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from kvd.errors import UsageError
from kvd.plan import units
from kvd.plan.breakeven import LoadCost, PrefillCost, break_even_tokens, fit_prefill, reuse_gain_ns
from kvd.plan.footprint import Footprint, PrefixRead
from kvd.plan.ledger import Answer, Step
from kvd.plan.units import (
    check_int,
    check_positive,
    counted,
    format_bandwidth,
    format_bytes,
    format_ns,
    format_number,
    format_share,
    format_sum,
)


def _fit_parts(model: PrefillCost) -> tuple[str, str, str]:
    """The three coefficients as text: fixed, a new token, a pair."""
    return (
        format_ns(model.fixed_ns),
        format_ns(model.linear_ns_per_token),
        format_ns(model.quadratic_ns_per_pair),
    )


def _prefill_text(model: PrefillCost, new_tokens: int, context_tokens: int = 0) -> str:
    """The sum that `PrefillCost.prefill_ns` is."""
    fixed, linear, pair = _fit_parts(model)
    new = format_number(new_tokens)
    pairs = f"{new}² ÷ 2"
    if context_tokens:
        pairs = f"{new} × ({format_number(context_tokens)} + {new} ÷ 2)"
    return f"{fixed} + {new} × {linear} + {pairs} × {pair}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakEvenPlan:
    """The inequality for one load. Times in ns, size in bytes, bandwidth in bytes a second.

    `hidden_ns` is the time of load and copy that overlaps with compute and so is not on the critical path. Of what
    else is told: `read` is how the size came about, `prefill` and `prefix_tokens` where the prefill saved comes from
    (None: it was given), `measured` names the rates measured on a daemon, `not_given` the parts that are counted as 0,
    `notes` what else is assumed. Raises UsageError: a value out of range, more hidden than there is.
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
    read: PrefixRead | None = None
    prefill: PrefillCost | None = None
    prefix_tokens: int | None = None
    measured: tuple[str, ...] = ()
    not_given: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_int("--bytes", self.size_bytes, 1, units.plan_bytes_max)
        check_positive("--bandwidth", self.bandwidth_bytes_per_s, units.plan_bandwidth_bytes_per_s_max)
        for name in ("lookup", "h2d", "sync", "prefill-saved", "hidden", "queue-reuse", "queue-cold"):
            check_int(
                f"--{name}", getattr(self, f"{name.replace('-', '_')}_ns"), 0, units.plan_duration_ns_max
            )
        if self.hidden_ns > self.load_ns + self.h2d_ns + self.sync_ns:
            raise UsageError(
                f"--hidden = {format_ns(self.hidden_ns)} is more than load, copy and sync take together; "
                f"allowed: 0 … {format_ns(self.load_ns + self.h2d_ns + self.sync_ns)}",
                code="contradiction", hidden_ns=self.hidden_ns,
            )  # fmt: skip

    @property
    def load_ns(self) -> int:
        """Transfer time, rounded up."""
        return units.ceil_div(self.size_bytes * units.NS_PER_S, self.bandwidth_bytes_per_s)

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
        left = self.prefill_saved_ns - self.other_ns
        # Hiding more than load and copy take cannot win time, so that lookup and queue alone may lose already.
        if left <= 0 or self.prefill_saved_ns < self.cost_ns - self.load_critical_ns:
            return None
        return Fraction(self.size_bytes * units.NS_PER_S, left)

    @property
    def other_ns(self) -> int:
        """The cost of reuse without the load; below 0 where more is hidden than all else takes."""
        return self.cost_ns - self.load_ns

    @property
    def copy_name(self) -> str:
        """What the copy is: a measured one stays in this host's memory."""
        return "copy into blocks" if "copy" in self.measured else "copy to GPU"

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
        load, copy, sync, hidden = map(format_ns, (self.load_ns, self.h2d_ns, self.sync_ns, self.hidden_ns))
        less = f" - {hidden} hidden" if self.hidden_ns else ""
        queue = self.queue_reuse_ns - self.queue_cold_ns
        waits = f"+ queue {format_ns(queue)}" if queue >= 0 else f"- {format_ns(-queue)} less queue"
        parts = f"lookup {format_ns(self.lookup_ns)} + %s {waits}"
        rows = [
            *(self.read.steps if self.read is not None else ()),
            Step("load", f"{format_bytes(self.size_bytes)} ÷ {format_bandwidth(self.bandwidth_bytes_per_s)}",
                 self.load_ns, "ns"),
            Step("on the critical path", f"load {load} + {self.copy_name} {copy} + sync {sync}{less}",
                 self.load_critical_ns, "ns"),
            Step("queue, reuse less cold",
                 f"{format_ns(self.queue_reuse_ns)} - {format_ns(self.queue_cold_ns)}", queue, "ns"),
            Step("cost of reuse", parts % f"critical {format_ns(self.load_critical_ns)}", self.cost_ns, "ns"),
            *self._saved_steps,
            Step("gain", format_sum(self.prefill_saved_ns, self.cost_ns, format_ns), self.gain_ns, "ns"),
        ]  # fmt: skip
        least = self.bandwidth_min_bytes_per_s
        if least is not None:
            others = parts % f"{self.copy_name} {copy} + sync {sync}{less}"
            left = f"({format_sum(self.prefill_saved_ns, self.other_ns, format_ns)})"
            rows += [
                Step("all but the load", others, self.other_ns, "ns"),
                Step("bandwidth for a draw", f"{format_bytes(self.size_bytes)} ÷ {left}", least, "B/s"),
            ]
        return tuple(rows)

    @property
    def _saved_steps(self) -> tuple[Step, ...]:
        """Where the prefill saved comes from."""
        if self.prefill is None or self.prefix_tokens is None:
            text = "given: full prefill less that of the suffix"
            return (Step("prefill saved", text, self.prefill_saved_ns, "ns"),)
        model, prefix = self.prefill, self.prefix_tokens
        full, suffix = model.prefill_ns(prefix + 1), model.prefill_ns(1, prefix)
        return (
            Step("full prefill", _prefill_text(model, prefix + 1), full, "ns"),
            Step("prefill of the suffix", _prefill_text(model, 1, prefix), suffix, "ns"),
            Step("prefill saved", f"{format_ns(full)} - {format_ns(suffix)}", self.prefill_saved_ns, "ns"),
        )

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What the numbers take for granted."""
        saved = (
            "prefill saved was given as a full prefill less a prefill of the suffix, not as a part of one"
            if self.prefill is None
            else "the prompt is the prefix and one token more; its prefill and that of the suffix are fitted"
        )
        hidden = f", but for {format_ns(self.hidden_ns)} that overlap with compute" if self.hidden_ns else ""
        bandwidth = (
            "the rates measured are those of one thread on the daemon as busy as it was: under more load they fall"
            if "bandwidth" in self.measured
            else "the bandwidth given is what this load gets while others run, not what the link can do alone"
        )
        missing = (f"{', '.join(self.not_given)} not given, counted as 0",) if self.not_given else ()
        copied = (
            "the copy measured is one into blocks of this host's memory, not one to a GPU (--h2d says that)"
        )
        read = self.read.assumptions if self.read is not None else ()
        order = f"load, copy and sync follow one another{hidden}"
        told = (copied,) if "copy" in self.measured else ()
        return (*read, order, *missing, saved, bandwidth, *told, *self.notes)

    @property
    def conclusion(self) -> str:
        """What follows, and what does not."""
        cost, saved = format_ns(self.cost_ns), format_ns(self.prefill_saved_ns)
        verdict = (
            f"Loading is worth it: it costs {cost} and saves {saved} of prefill"
            if self.worth_it
            else f"Loading is not worth it: it costs {cost} and saves {saved} of prefill, so compute"
        )
        when = f" ({', '.join(self.measured)} measured just now)" if self.measured else ""
        return f"{verdict}; this holds for one request at these rates{when}, not for many at once."


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakEvenLength:
    """From which length on loading a prefix pays, at given load and prefill costs.

    With `chunk_tokens` above 1 lengths are whole chunks. `sampled` is the range of lengths that the prefill cost was
    fitted to, `notes` what else is assumed. Raises UsageError as the costs do, or for a chunk above `tokens_max`.
    """

    cost: LoadCost
    prefill: PrefillCost
    footprint: Footprint
    chunk_tokens: int = 1
    tokens_max: int = 1 << 20
    queue_delta_ns: int = 0
    sampled: tuple[int, int] | None = None
    copy_name: str = "copy to GPU"
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_int("--chunk-tokens", self.chunk_tokens, 1, self.tokens_max)

    @property
    def tokens(self) -> int | None:
        """The shortest prefix worth loading, None if none up to `tokens_max` is."""
        return break_even_tokens(
            self.cost, self.prefill, self.footprint, self.tokens_max, self.queue_delta_ns, self.chunk_tokens
        )

    def cost_ns(self, tokens: int) -> int:
        """Lookup, load, copy, sync and the extra queueing for a prefix of `tokens`, whole chunks."""
        size = self.footprint.needed_bytes(tokens, self.chunk_tokens)
        return self.cost.lookup_ns + self.cost.critical_ns(size) + self.queue_delta_ns

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
        found = self.tokens
        longest = self.tokens_max // self.chunk_tokens * self.chunk_tokens
        shown = found or longest
        read = PrefixRead(footprint=self.footprint, tokens=shown, chunk_tokens=self.chunk_tokens)
        _, linear, pair = _fit_parts(self.prefill)
        size, cost = format_bytes(read.size_bytes), self.cost
        parts = [("lookup", cost.lookup_ns), ("sync", cost.sync_ns), ("queue", self.queue_delta_ns)]
        rows = [Step("prefix", "the shortest that pays" if found else "none pays; the longest looked at",
                     shown, "tokens"), *read.steps]  # fmt: skip
        for name, rate in (("load", cost.load_bytes_per_s), (self.copy_name, cost.h2d_bytes_per_s)):
            if rate is not None:
                took = LoadCost(0, rate, None, 0).critical_ns(read.size_bytes)
                rows.append(Step(name, f"{size} ÷ {format_bandwidth(rate)}", took, "ns"))
                parts.insert(-2, (name, took))
        rows.append(Step("cost of reuse", " + ".join(f"{name} {format_ns(took)}" for name, took in parts),
                         self.cost_ns(shown), "ns"))  # fmt: skip
        tokens = format_number(shown)
        text = f"{tokens} × {linear} + {tokens}² ÷ 2 × {pair}"
        rows.append(Step("prefill saved", text, self.saved_ns(shown), "ns"))
        return tuple(rows)

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What the numbers take for granted."""
        chunks = (
            f"a prefix is whole chunks of {format_number(self.chunk_tokens)} tokens"
            if self.chunk_tokens > 1
            else "prefixes of any length can be loaded; kvd keeps whole chunks (--chunk-tokens says how long they are)"
        )
        windows = self.footprint.windows_said
        return (
            f"prefill grows linearly with the new tokens and with the pairs that attend; the fixed "
            f"{format_ns(self.prefill.fixed_ns)} are not saved",
            chunks,
            *((windows,) if windows else ()),
            *(("one snapshot is read, whatever the length",) if self.footprint.state_groups else ()),
            "load and copy grow with the bytes, at the rates above; lookup, sync and queue stay the same",
            *self.notes,
        )

    @property
    def conclusion(self) -> str:
        """What follows, and what does not."""
        found, chunk = self.tokens, self.chunk_tokens
        if found is None:
            verdict = f"No prefix up to {format_number(self.tokens_max)} tokens is worth loading"
        elif found == chunk:
            verdict = f"Every prefix is worth loading, from {counted(found, 'token')} on"
        else:
            chunks = f" ({counted(found // chunk, 'chunk')})" if chunk > 1 else ""
            verdict = (
                f"Prefixes below {format_number(found)} tokens{chunks} are faster to compute than to load"
            )
        return f"{verdict} at these rates; {self._extrapolated(found)}."

    def _extrapolated(self, found: int | None) -> str:
        if self.sampled is None:
            return "outside the lengths at which prefill was measured this is extrapolation"
        low, high = self.sampled
        sampled = f"the sampled {format_number(low)} … {format_number(high)} tokens"
        if found is None:
            return f"above {sampled} this is extrapolation"
        if low <= found <= high:
            return f"that is within {sampled}, outside of which this would be extrapolation"
        where = "below" if found < low else "above"
        return f"that is {where} {sampled}, so it is extrapolation: measure prefill there"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillFit:
    """The prefill cost fitted to samples of (prompt tokens, ns). Raises UsageError as `fit_prefill` does."""

    samples: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        fit_prefill(self.samples)

    @property
    def cost(self) -> PrefillCost:
        """The fitted cost."""
        return fit_prefill(self.samples)

    @property
    def sampled(self) -> tuple[int, int]:
        """The shortest and the longest length sampled."""
        lengths = [tokens for tokens, _ in self.samples]
        return min(lengths), max(lengths)

    @property
    def error_max_share(self) -> Fraction:
        """The largest relative error of the fit at a sample."""
        cost = self.cost
        return max(abs(Fraction(cost.prefill_ns(tokens) - took, took)) for tokens, took in self.samples)

    @property
    def answers(self) -> Mapping[str, Answer]:
        """Results under stable names."""
        cost = self.cost
        return {
            "fixed_ns": cost.fixed_ns,
            "linear_ns_per_token": cost.linear_ns_per_token,
            "quadratic_ns_per_pair": cost.quadratic_ns_per_pair,
            "error_max_share": self.error_max_share,
        }

    @property
    def steps(self) -> tuple[Step, ...]:
        """The coefficients, and the fit beside every sample."""
        cost = self.cost
        rows = [
            Step("fixed", "of every prefill", cost.fixed_ns, "ns"),
            Step("a new token", "weights and everything but attention", cost.linear_ns_per_token, "ns"),
            Step("a pair", "of a new token and one it attends to", cost.quadratic_ns_per_pair, "ns"),
        ]
        for tokens, took in sorted(self.samples):
            text = f"{_prefill_text(cost, tokens)}; measured {format_ns(took)}"
            rows.append(Step(f"fit at {format_number(tokens)}", text, cost.prefill_ns(tokens), "ns"))
        return tuple(rows)

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What the numbers take for granted."""
        lengths = len({tokens for tokens, _ in self.samples})
        fixed = "" if lengths > 2 else "; two lengths cannot tell a fixed part, so it is 0"
        return (
            f"prefill = fixed + tokens × a + tokens² ÷ 2 × b, least squares of the relative errors{fixed}",
            "attention is full in every layer: windows grow more slowly, and the fit to them is only a fit",
        )

    @property
    def conclusion(self) -> str:
        """What follows, and what does not."""
        low, high = self.sampled
        if self.error_max_share < Fraction(1, 10_000):
            exact = "meets every sample to 0.01 %"
        else:
            exact = f"is at most {format_share(self.error_max_share)} off at a sample"
        return (
            f"The fit {exact}; between {format_number(low)} and {format_number(high)} tokens it interpolates, outside "
            f"it is extrapolation."
        )
