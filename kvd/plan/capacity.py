"""The capacity ledger: do the cached prefixes, with their copies, fit in the memory of the hosts?

Pure functions of their arguments, any thread. Counts unique prefixes, never requests: a prefix that a
thousand requests share is stored once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from kvd.errors import UsageError
from kvd.plan import units
from kvd.plan.ledger import Answer, Step
from kvd.plan.units import (
    check_int,
    check_positive,
    counted,
    format_bytes,
    format_number,
    format_share,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityPlan:
    """Unique KV bytes × copies against usable memory, all in bytes and exact.

    `shared_tokens` are leading tokens common to all prefixes, stored once. `usable_share` is the part of a
    host's memory that holds payload. `spare_hosts` may be lost at once and their copies made again on the
    others. A model with recurrent layers also keeps `snapshots_count` states of `state_bytes` of each
    prefix, the first `shared_snapshots_count` of which all prefixes have in common. Raises UsageError: a
    value out of range, more copies than hosts, more shared tokens than a
    prefix has, no host left after `spare_hosts` are lost.
    """

    prefixes_count: int
    prefix_tokens: int
    bytes_per_token: int
    replicas_count: int
    hosts_count: int
    dram_per_host_bytes: int
    usable_share: Fraction
    shared_tokens: int = 0
    spare_hosts: int = 1
    state_bytes: int = 0
    snapshots_count: int = 0
    shared_snapshots_count: int = 0

    def __post_init__(self) -> None:
        check_int("prefixes", self.prefixes_count, 1, units.plan_count_max)
        check_int("prefix tokens", self.prefix_tokens, 1, units.plan_count_max)
        check_int("bytes per token", self.bytes_per_token, 1, units.plan_bytes_max)
        check_int("hosts", self.hosts_count, 1, units.plan_count_max)
        check_int("replicas", self.replicas_count, 1, units.plan_count_max)
        check_int("memory of a host", self.dram_per_host_bytes, 1, units.plan_bytes_max)
        check_int("shared tokens", self.shared_tokens, 0, units.plan_count_max)
        check_int("spare hosts", self.spare_hosts, 0, units.plan_count_max)
        check_positive("usable share", self.usable_share, 1)
        check_int("bytes of a state", self.state_bytes, 0, units.plan_bytes_max)
        check_int("snapshots", self.snapshots_count, 0, self.prefix_tokens)
        check_int("shared snapshots", self.shared_snapshots_count, 0, self.snapshots_count)
        if self.replicas_count > self.hosts_count:
            raise UsageError(
                f"replicas = {self.replicas_count} with hosts = {self.hosts_count}: copies on one host are "
                f"lost together; allowed: 1 … {self.hosts_count} replicas",
                code="contradiction", replicas=self.replicas_count, hosts=self.hosts_count,
            )  # fmt: skip
        if self.shared_tokens > self.prefix_tokens:
            raise UsageError(
                f"shared tokens = {self.shared_tokens} is more than a prefix of {self.prefix_tokens} tokens "
                f"has; allowed: 0 … {self.prefix_tokens}",
                code="contradiction", shared_tokens=self.shared_tokens, prefix_tokens=self.prefix_tokens,
            )  # fmt: skip
        if self.spare_hosts >= self.hosts_count:
            raise UsageError(
                f"spare hosts = {self.spare_hosts} of hosts = {self.hosts_count}: none would be left; "
                f"allowed: 0 … {self.hosts_count - 1}",
                code="contradiction", spare_hosts=self.spare_hosts, hosts=self.hosts_count,
            )  # fmt: skip
        check_int("unique KV with copies, in bytes", self.demand_bytes, 1, units.plan_bytes_max)

    @property
    def prefix_bytes(self) -> int:
        """KV of one prefix, its states included."""
        return self.prefix_tokens * self.bytes_per_token + self.snapshots_count * self.state_bytes

    @property
    def unique_bytes(self) -> int:
        """One copy of everything."""
        own_tokens = self.prefixes_count * (self.prefix_tokens - self.shared_tokens)
        own_states = self.prefixes_count * (self.snapshots_count - self.shared_snapshots_count)
        states = own_states + self.shared_snapshots_count
        return (own_tokens + self.shared_tokens) * self.bytes_per_token + states * self.state_bytes

    @property
    def demand_bytes(self) -> int:
        """All copies."""
        return self.unique_bytes * self.replicas_count

    @property
    def usable_per_host_bytes(self) -> Fraction:
        """Payload memory of one host; a fraction of a byte is kept so that sums stay exact."""
        return self.dram_per_host_bytes * Fraction(self.usable_share)

    @property
    def usable_bytes(self) -> Fraction:
        """Payload memory of all hosts."""
        return self.usable_per_host_bytes * self.hosts_count

    @property
    def headroom_bytes(self) -> Fraction:
        """What is left; negative when it does not fit."""
        return self.usable_bytes - self.demand_bytes

    @property
    def fits(self) -> bool:
        """Whether all copies can be held with no host lost."""
        return self.headroom_bytes >= 0

    @property
    def hosts_min(self) -> int:
        """The fewest hosts that hold all copies, none lost."""
        return max(units.ceil_div(self.demand_bytes, self.usable_per_host_bytes), self.replicas_count)

    @property
    def hosts_spare_min(self) -> int:
        """The fewest hosts that still hold all copies after `spare_hosts` are lost."""
        return self.hosts_min + self.spare_hosts

    @property
    def fits_after_loss(self) -> bool:
        """Whether all copies can be made again after losing `spare_hosts`."""
        return self.hosts_count >= self.hosts_spare_min

    @property
    def answers(self) -> Mapping[str, Answer]:
        """Results under stable names."""
        return {
            "prefix_bytes": self.prefix_bytes,
            "unique_bytes": self.unique_bytes,
            "demand_bytes": self.demand_bytes,
            "usable_bytes": self.usable_bytes,
            "headroom_bytes": self.headroom_bytes,
            "fits": self.fits,
            "fits_after_loss": self.fits_after_loss,
            "hosts_min": self.hosts_min,
            "hosts_spare_min": self.hosts_spare_min,
        }

    @property
    def steps(self) -> tuple[Step, ...]:
        """The arithmetic, in order."""
        tokens, shared = format_number(self.prefix_tokens), format_number(self.shared_tokens)
        prefixes, hosts = format_number(self.prefixes_count), format_number(self.hosts_count)
        demand, per_host = format_bytes(self.demand_bytes), format_bytes(self.usable_per_host_bytes)
        token, memory = format_number(self.bytes_per_token), format_bytes(self.dram_per_host_bytes)
        unique = (
            f"({prefixes} × ({tokens} - {shared}) + {shared}) tokens × {token} B"
            if self.shared_tokens
            else f"{prefixes} prefixes × {format_bytes(self.prefix_bytes)}"
        )
        states = ""
        if self.snapshots_count:
            kept, size = format_number(self.snapshots_count), format_bytes(self.state_bytes)
            states = f" + {kept} states × {size}"
            if self.shared_tokens:
                common = format_number(self.shared_snapshots_count)
                unique += f" + ({prefixes} × ({kept} - {common}) + {common}) states × {size}"
        rows: list[tuple[str, str, int | Fraction, str]] = [
            ("one prefix", f"{tokens} tokens × {token} B{states}", self.prefix_bytes, "B"),
            ("unique KV", unique, self.unique_bytes, "B"),
            ("with copies", f"{format_bytes(self.unique_bytes)} × {self.replicas_count:,}",
             self.demand_bytes, "B"),
            ("usable on a host", f"{memory} × {format_share(self.usable_share)}",
             self.usable_per_host_bytes, "B"),
            ("usable in all", f"{hosts} hosts × {per_host}", self.usable_bytes, "B"),
            ("headroom", f"{format_bytes(self.usable_bytes)} - {demand}", self.headroom_bytes, "B"),
            ("hosts at least", f"{demand} ÷ {per_host}, rounded up", self.hosts_min, "hosts"),
            ("headroom on those", f"{format_number(self.hosts_min)} × {per_host} - {demand}",
             self.hosts_min * self.usable_per_host_bytes - self.demand_bytes, "B"),
        ]  # fmt: skip
        if self.spare_hosts:
            text = f"{format_number(self.hosts_min)} + {self.spare_hosts} that may be lost"
            rows.append(("hosts with spares", text, self.hosts_spare_min, "hosts"))
        return tuple(Step(*row) for row in rows)

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What the numbers take for granted."""
        shared = (
            f"the first {format_number(self.shared_tokens)} tokens of every prefix are the same, stored once"
            if self.shared_tokens
            else "no two prefixes begin alike (--shared-tokens says how much they have in common)"
        )
        states = (
            f"{counted(self.snapshots_count, 'snapshot')} of the recurrent layers' state are kept of each prefix "
            "(--snapshots says how many)",
        )
        return (
            "unique prefixes are counted, not requests",
            shared,
            *(states if self.snapshots_count else ()),
            f"{format_share(self.usable_share)} of a host's memory holds payload; the rest is left to "
            "metadata, rounding to slots, quarantine and everything else on the host",
            f"{counted(self.replicas_count, 'copy', 'copies')} of everything, spread evenly over the hosts, "
            "no two on one host",
        )

    @property
    def conclusion(self) -> str:
        """What follows, and what does not."""
        hosts = counted(self.hosts_count, "host")
        if not self.fits:
            verdict = (
                f"It does not fit: {format_bytes(self.demand_bytes)} are needed and {hosts} "
                f"have {format_bytes(self.usable_bytes)}; it takes at least {format_number(self.hosts_min)}"
            )
        elif self.headroom_bytes == 0:
            verdict = f"It fits exactly on {hosts}, with no headroom: nothing can be added without evicting"
        else:
            part = format_share(self.headroom_bytes / self.usable_bytes)
            verdict = f"It fits on {hosts} with {format_bytes(self.headroom_bytes)} ({part}) to spare"
        if self.fits and self.spare_hosts:
            lost = counted(self.spare_hosts, "host")
            verdict += (
                f", and all copies can be made again after losing {lost}"
                if self.fits_after_loss
                else f", and after losing {lost} the missing copies have no room "
                f"(that takes {format_number(self.hosts_spare_min)})"
            )
        return f"{verdict}; this says what can be held, not what will be hit nor how fast it is read."
