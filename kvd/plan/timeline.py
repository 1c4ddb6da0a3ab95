"""One load beside the compute of the suffix, layer by layer: what each stage does when, and what nobody waits for.

Owns the timeline of a load as a pipeline of equal layers. Pure, any thread; times are exact Fractions of ns until they
are shown.

    lookup ─ sync ─ load 1 ─ load 2 ─ load 3 ─ …
                        └─ copy 1 ─ copy 2 ─ …
                              └─ compute 1 ─ compute 2 ─ … ─▶ first token

Invariant: a layer is copied when it is loaded, and computed when it is copied and the layer before it is computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from kvd.plan import units
from kvd.plan.ledger import Answer, Step
from kvd.plan.units import check_int, check_positive, format_bandwidth, format_bytes, format_ns, format_number

layers_max: Final = 4096


@dataclass(frozen=True, slots=True)
class Stage:
    """What one stage does: a span (begin, end) in ns after the request for each layer, in order."""

    name: str
    spans: tuple[tuple[Fraction, Fraction], ...]

    @property
    def begin_ns(self) -> Fraction:
        """When it begins."""
        return self.spans[0][0]

    @property
    def end_ns(self) -> Fraction:
        """When it is over."""
        return self.spans[-1][1]

    @property
    def busy_ns(self) -> Fraction:
        """For how long it works; the rest of its time it waits for the stage before it."""
        return sum((end - begin for begin, end in self.spans), Fraction(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelinePlan:
    """A load of `size_bytes` in `layers_count` equal parts, beside the prefill of the suffix. Times in ns.

    `suffix_ns` is the prefill of what is not loaded, `prefill_saved_ns` what computing all of the prompt would take
    beyond that (None: not asked). `copy_ns` 0 means that the load goes where the engine computes. `not_given` names the
    parts that are counted as 0. Raises UsageError: a value out of range.
    """

    size_bytes: int
    bandwidth_bytes_per_s: Fraction
    layers_count: int
    suffix_ns: int
    lookup_ns: int = 0
    copy_ns: int = 0
    sync_ns: int = 0
    prefill_saved_ns: int | None = None
    not_given: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_int("--bytes", self.size_bytes, 1, units.plan_bytes_max)
        check_positive("--bandwidth", self.bandwidth_bytes_per_s, units.plan_bandwidth_bytes_per_s_max)
        check_int("--layers", self.layers_count, 1, layers_max)
        for name, value in (
            ("--suffix-prefill", self.suffix_ns), ("--lookup", self.lookup_ns), ("--h2d", self.copy_ns),
            ("--sync", self.sync_ns), ("--prefill-saved", self.prefill_saved_ns or 0),
        ):  # fmt: skip
            check_int(name, value, 0, units.plan_duration_ns_max)

    @property
    def load_ns(self) -> int:
        """Transfer time of all layers, rounded up."""
        return units.ceil_div(self.size_bytes * units.NS_PER_S, self.bandwidth_bytes_per_s)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """What happens when; stages that take no time are left out."""
        found: list[Stage] = []
        now = Fraction(0)
        for name, took_ns in (("lookup", self.lookup_ns), ("sync", self.sync_ns)):
            if took_ns:
                found.append(Stage(name, ((now, now + took_ns),)))
                now += took_ns
        ready = [now] * self.layers_count  # when the stage before has done each layer
        for name, took_ns in self._parts:
            if took_ns:
                free, spans, each = Fraction(0), [], Fraction(took_ns, self.layers_count)
                for there in ready:
                    begin = max(free, there)
                    free = begin + each
                    spans.append((begin, free))
                found.append(Stage(name, tuple(spans)))
                ready = [end for _, end in spans]
        return tuple(found)

    @property
    def _parts(self) -> tuple[tuple[str, int], ...]:
        """The stages that every layer goes through."""
        return (
            ("load", self.load_ns),
            ("copy to GPU", self.copy_ns),
            ("suffix", self.suffix_ns),
        )

    @property
    def slowest(self) -> tuple[str, int]:
        """The stage that the others wait for, and its time; the last of equals."""
        return max(reversed(self._parts), key=lambda part: part[1])

    @property
    def in_turn_ns(self) -> int:
        """The first token if nothing overlapped."""
        return self.lookup_ns + self.sync_ns + sum(took for _, took in self._parts)

    @property
    def pipeline_ns(self) -> Fraction:
        """From the first byte loaded to the last layer computed: each stage once, then the slowest for each layer."""
        layers = self.layers_count
        once = Fraction(sum(took for _, took in self._parts), layers)
        return once + Fraction((layers - 1) * self.slowest[1], layers)

    @property
    def first_token_ns(self) -> Fraction:
        """When the last layer of the suffix is computed."""
        return self.lookup_ns + self.sync_ns + self.pipeline_ns

    @property
    def hidden_ns(self) -> int:
        """What overlaps, in whole ns: `--hidden` of a break-even."""
        return int(self.in_turn_ns - self.first_token_ns)

    @property
    def exposed_ns(self) -> Fraction:
        """What the load adds to the compute of the suffix, lookup and sync included."""
        return self.first_token_ns - self.suffix_ns

    @property
    def computed_ns(self) -> int | None:
        """The first token if all of the prompt is computed."""
        return None if self.prefill_saved_ns is None else self.suffix_ns + self.prefill_saved_ns

    @property
    def rows(self) -> tuple[tuple[str, Fraction, Fraction], ...]:
        """What is drawn: the stages from begin to end, and computing all of the prompt."""
        found = [(one.name, one.begin_ns, one.end_ns) for one in self.stages]
        if self.computed_ns is not None:
            found.append(("all computed", Fraction(0), Fraction(self.computed_ns)))
        return tuple(found)

    @property
    def shown_ns(self) -> Fraction:
        """The end of the scale: computing all may take so long that the stages could not be told apart."""
        return min(max(self.first_token_ns, Fraction(self.computed_ns or 0)), 2 * self.first_token_ns)

    @property
    def answers(self) -> Mapping[str, Answer]:
        """Results under stable names."""
        return {
            "first_token_ns": self.first_token_ns,
            "in_turn_ns": self.in_turn_ns,
            "hidden_ns": self.hidden_ns,
            "exposed_ns": self.exposed_ns,
            "slowest_stage": self.slowest[0],
            "computed_ns": self.computed_ns,
            "stages": [
                {"stage": one.name, "begin_ns": one.begin_ns, "end_ns": one.end_ns, "busy_ns": one.busy_ns}
                for one in self.stages
            ],
        }

    @property
    def steps(self) -> tuple[Step, ...]:
        """The arithmetic, in order."""
        layers = format_number(self.layers_count)
        each = {name: Fraction(took, self.layers_count) for name, took in self._parts if took}
        name, slowest_ns = self.slowest
        before = f"lookup {format_ns(self.lookup_ns)} + sync {format_ns(self.sync_ns)}"
        once = " + ".join(format_ns(took) for took in each.values())
        more = self.layers_count - 1
        repeated = (
            f" + {format_number(more)} × {format_ns(Fraction(slowest_ns, self.layers_count))}" if more else ""
        )
        total = " + ".join(f"{part} {format_ns(took)}" for part, took in self._parts if took)
        rows = [
            Step("load", f"{format_bytes(self.size_bytes)} ÷ {format_bandwidth(self.bandwidth_bytes_per_s)}",
                 self.load_ns, "ns"),
            *(Step(f"a layer: {part}", f"{format_ns(took)} ÷ {layers}", each[part], "ns")
              for part, took in self._parts if took),
            Step("slowest stage", f"{name}, for a layer", Fraction(slowest_ns, self.layers_count), "ns"),
            Step("all layers", once + repeated, self.pipeline_ns, "ns"),
            Step("first token", f"{before} + layers {format_ns(self.pipeline_ns)}", self.first_token_ns, "ns"),
            Step("one after another", f"{before} + {total}", self.in_turn_ns, "ns"),
            Step("hidden", f"{format_ns(self.in_turn_ns)} - {format_ns(self.first_token_ns)}", self.hidden_ns, "ns"),
        ]  # fmt: skip
        if self.computed_ns is not None and self.prefill_saved_ns is not None:
            text = f"suffix {format_ns(self.suffix_ns)} + saved {format_ns(self.prefill_saved_ns)}"
            rows.append(Step("computed instead", text, self.computed_ns, "ns"))
        return tuple(rows)

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What the numbers take for granted."""
        missing = (f"{', '.join(self.not_given)} not given, counted as 0",) if self.not_given else ()
        alone = "nothing overlaps: the load is one piece" if self.layers_count == 1 else (
            "layers are equal, and load, copy and compute do not slow one another down"
        )  # fmt: skip
        return (
            *missing,
            alone,
            "lookup and sync come first, and nothing overlaps with them",
            "the bandwidth given is what this load gets while others run, not what the link can do alone",
        )

    @property
    def conclusion(self) -> str:
        """What follows, and what does not."""
        first, exposed = format_ns(self.first_token_ns), format_ns(self.exposed_ns)
        said = (
            f"The first token comes after {first}: {format_ns(self.hidden_ns)} of {format_ns(self.in_turn_ns)} overlap "
            f"and the load adds {exposed} to the {format_ns(self.suffix_ns)} that the suffix takes"
        )
        if self.computed_ns is not None:
            order = "later than" if self.first_token_ns > self.computed_ns else "against"
            said += f", {order} {format_ns(self.computed_ns)} if all is computed"
        return f"{said}; this is one request on stages of its own, not a measurement."
