"""Where a request should run: on the host that has its prefix, or on one that is free.

    T = queue wait + lookup and load + uncached prefill + handoff

Owns that estimate and the choice made from it. Pure, any thread. A warm cache is worth nothing behind a long
queue: the estimate decides, not the hit. Hosts that would break the limit on inter-token latency are out
whatever their T, and the session's own host is preferred while it is not much slower, because its next turn
will find everything there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from kvd.errors import UsageError
from kvd.plan import units
from kvd.plan.ledger import Answer, Step
from kvd.plan.units import check_int, format_ns

hosts_max = 65_536


@dataclass(frozen=True, slots=True)
class Candidate:
    """One host as the router sees it, times in ns. `itl_ns`: its inter-token latency with this request.

    `not_given` names the parts that nobody told and that count as 0.
    """

    host: str
    queue_ns: int = 0
    lookup_load_ns: int = 0
    prefill_ns: int = 0
    handoff_ns: int = 0
    itl_ns: int | None = None
    session: bool = False
    not_given: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.host or len(self.host) > 255:
            raise UsageError(
                f"host name {self.host[:64]!r} has {len(self.host)} characters; allowed: 1 … 255", code="host"
            )
        for name in ("queue", "lookup_load", "prefill", "handoff"):
            check_int(f"{self.host}: {name}", getattr(self, f"{name}_ns"), 0, units.plan_duration_ns_max)
        if self.itl_ns is not None:
            check_int(f"{self.host}: itl", self.itl_ns, 0, units.plan_duration_ns_max)

    @property
    def total_ns(self) -> int:
        """Estimated time to the first token."""
        return self.queue_ns + self.lookup_load_ns + self.prefill_ns + self.handoff_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutePlan:
    """The choice among `candidates`, one of which may hold the session.

    `session_margin_ns` is how much slower the session's host may be and still be taken. With
    `itl_limit_ns`, hosts over it are out, and so are hosts whose ITL is not known. `chosen` is None when no
    host is left: then the request waits or is refused, it is not sent where it would break the limit.
    Raises UsageError: no candidates, a name twice, two session hosts, values out of range.
    """

    candidates: tuple[Candidate, ...]
    itl_limit_ns: int | None = None
    session_margin_ns: int = 0

    def __post_init__(self) -> None:
        check_int("number of --host", len(self.candidates), 1, hosts_max)
        check_int("--session-margin", self.session_margin_ns, 0, units.plan_duration_ns_max)
        if self.itl_limit_ns is not None:
            check_int("--itl-limit", self.itl_limit_ns, 1, units.plan_duration_ns_max, unit=" ns")
        names = [candidate.host for candidate in self.candidates]
        if twice := [name for name, count in Counter(names).items() if count > 1]:
            raise UsageError(f"host {twice[0]!r} is given twice; allowed: each host once",
                             code="contradiction", host=twice[0])  # fmt: skip
        owners = [candidate.host for candidate in self.candidates if candidate.session]
        if len(owners) > 1:
            raise UsageError(
                f"hosts {', '.join(owners)} all hold the session; allowed: one, a session has one owner",
                code="contradiction", hosts=", ".join(owners),
            )  # fmt: skip

    @property
    def ranking(self) -> tuple[Candidate, ...]:
        """Hosts within the limit, fastest first; at equal times the session's host, then by name."""
        eligible = [candidate for candidate in self.candidates if self.refusal(candidate) is None]
        return tuple(sorted(eligible, key=lambda c: (c.total_ns, not c.session, c.host)))

    def refusal(self, candidate: Candidate) -> str | None:
        """Why a host is out, None if it is not."""
        if self.itl_limit_ns is None:
            return None
        if candidate.itl_ns is None:
            return "its ITL is not known"
        if candidate.itl_ns > self.itl_limit_ns:
            return f"ITL {format_ns(candidate.itl_ns)} > limit {format_ns(self.itl_limit_ns)}"
        return None

    @property
    def chosen(self) -> Candidate | None:
        """Where the request goes, None if nowhere."""
        ranking = self.ranking
        if not ranking:
            return None
        home = next((candidate for candidate in ranking if candidate.session), None)
        best = ranking[0]
        return home if home is not None and home.total_ns <= best.total_ns + self.session_margin_ns else best

    @property
    def answers(self) -> Mapping[str, Answer]:
        """Results under stable names."""
        chosen = self.chosen
        return {
            "chosen": chosen.host if chosen else None,
            "total_ns": chosen.total_ns if chosen else None,
            "ranking": [candidate.host for candidate in self.ranking],
            "hosts": [
                {
                    "host": candidate.host,
                    "total_ns": candidate.total_ns,
                    "itl_ns": candidate.itl_ns,
                    "session": candidate.session,
                    "refusal": self.refusal(candidate),
                }
                for candidate in self.candidates
            ],
        }

    @property
    def steps(self) -> tuple[Step, ...]:
        """One line a host: the sum of its four parts."""
        return tuple(
            Step(
                f"{c.host}{' (session)' if c.session else ''}",
                f"queue {format_ns(c.queue_ns)} + lookup and load {format_ns(c.lookup_load_ns)} + "
                f"prefill {format_ns(c.prefill_ns)} + handoff {format_ns(c.handoff_ns)}"
                + (f"; ITL {format_ns(c.itl_ns)}" if c.itl_ns is not None and not self.refusal(c) else "")
                + (f"; out: {self.refusal(c)}" if self.refusal(c) else ""),
                c.total_ns,
                "ns",
            )
            for c in self.candidates
        )

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What the numbers take for granted."""
        limit = (
            "no limit on inter-token latency was given, so none is kept"
            if self.itl_limit_ns is None
            else f"a host whose ITL would be above {format_ns(self.itl_limit_ns)}, or is not known, is out"
        )
        missing = (
            f"{c.host}: {', '.join(c.not_given)} not given, counted as 0"
            for c in self.candidates
            if c.not_given
        )
        session = next((c.host for c in self.candidates if c.session), None)
        return (
            *missing,
            "the four parts follow one another; what overlaps has to be left out of the numbers given",
            "queue waits are estimates of this moment and are old when the request arrives",
            limit,
            f"{session} holds the session and is taken while it is at most {format_ns(self.session_margin_ns)} slower"
            if session is not None
            else "no host holds the session, so the fastest is taken",
        )

    @property
    def conclusion(self) -> str:
        """What follows, and what does not."""
        chosen = self.chosen
        if chosen is None:
            return (
                "No host can take the request within the ITL limit: let it wait or refuse it; this does not "
                "say that one will become free."
            )
        others = [candidate for candidate in self.ranking if candidate is not chosen]
        why = (
            f" (next: {others[0].host} with {format_ns(others[0].total_ns)})"
            if others
            else " (no other is left)"
        )
        if others and others[0].total_ns < chosen.total_ns:
            slower = format_ns(chosen.total_ns - others[0].total_ns)
            why = f", which holds the session; {others[0].host} would be {slower} faster, within the margin"
        return (
            f"Send it to {chosen.host}: {format_ns(chosen.total_ns)} to the first token{why}; this estimates "
            f"one request, not what the choice does to those behind it."
        )
