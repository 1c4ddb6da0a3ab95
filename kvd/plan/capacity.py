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
from kvd.plan.footprint import KeptGroup, by_group
from kvd.plan.ledger import Answer, Step
from kvd.plan.prefixes import Prefixes
from kvd.plan.units import (
    check_int,
    check_positive,
    counted,
    format_bytes,
    format_number,
    format_share,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityPlan(Prefixes):
    """Unique KV bytes × copies against usable memory, all in bytes and exact.

    `usable_share` is the part of a host's memory that holds payload. `spare_hosts` may be lost at once and their
    copies made again on the others. Raises UsageError: as `Prefixes` does, a value out of range, more copies than
    hosts, no host left after `spare_hosts` are lost.
    """

    replicas_count: int
    hosts_count: int
    dram_per_host_bytes: int
    usable_share: Fraction
    spare_hosts: int = 1

    def __post_init__(self) -> None:
        Prefixes.__post_init__(self)
        check_int("--hosts", self.hosts_count, 1, units.plan_count_max)
        check_int("--replicas", self.replicas_count, 1, units.plan_count_max)
        check_int("--dram", self.dram_per_host_bytes, 1, units.plan_bytes_max)
        check_int("--spare-hosts", self.spare_hosts, 0, units.plan_count_max)
        check_positive("--usable", self.usable_share, 1)
        if self.replicas_count > self.hosts_count:
            raise UsageError(
                f"--replicas = {self.replicas_count} with --hosts = {self.hosts_count}: copies on one host are "
                f"lost together; allowed: 1 … {self.hosts_count} replicas",
                code="contradiction", replicas=self.replicas_count, hosts=self.hosts_count,
            )  # fmt: skip
        if self.spare_hosts >= self.hosts_count:
            raise UsageError(
                f"--spare-hosts = {self.spare_hosts} of --hosts = {self.hosts_count}: none would be left; "
                f"allowed: 0 … {self.hosts_count - 1}",
                code="contradiction", spare_hosts=self.spare_hosts, hosts=self.hosts_count,
            )  # fmt: skip
        check_int("unique KV with copies, in bytes", self.demand_bytes, 1, units.plan_bytes_max)

    @property
    def prefix_bytes(self) -> int:
        """One prefix with what it shares, snapshots included."""
        return self.own_bytes + self.shared_bytes

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
        demand, per_host = format_bytes(self.demand_bytes), format_bytes(self.usable_per_host_bytes)
        memory = format_bytes(self.dram_per_host_bytes)
        rows: list[tuple[str, str, int | Fraction, str]] = [
            ("with copies", f"{format_bytes(self.unique_bytes)} × {self.replicas_count:,}",
             self.demand_bytes, "B"),
            ("usable on a host", f"{memory} × {format_share(self.usable_share)}",
             self.usable_per_host_bytes, "B"),
            ("usable in all", f"{counted(self.hosts_count, 'host')} × {per_host}", self.usable_bytes, "B"),
            ("headroom", f"{format_bytes(self.usable_bytes)} - {demand}", self.headroom_bytes, "B"),
            ("hosts at least", f"{demand} ÷ {per_host}, rounded up", self.hosts_min, "hosts"),
            ("headroom on those", f"{format_number(self.hosts_min)} × {per_host} - {demand}",
             self.hosts_min * self.usable_per_host_bytes - self.demand_bytes, "B"),
        ]  # fmt: skip
        if self.spare_hosts:
            text = f"{format_number(self.hosts_min)} + {self.spare_hosts} that may be lost"
            rows.append(("hosts with spares", text, self.hosts_spare_min, "hosts"))
        return (*self._unique_steps, *(Step(*row) for row in rows))

    @property
    def _unique_steps(self) -> tuple[Step, ...]:
        """One prefix by group, what it shares, and all of them."""
        prefixes = counted(self.prefixes_count, "prefix", "prefixes")
        if not self.shared_chunks_count:
            rows = self._part_steps("one prefix", self.own_chunks_count, self.own_snapshots_count)
            return (
                *rows,
                Step("unique KV", f"{prefixes} × {format_bytes(self.own_bytes)}", self.unique_bytes, "B"),
            )
        return (
            *self._part_steps("own part", self.own_chunks_count, self.own_snapshots_count),
            *self._part_steps("shared part", self.shared_chunks_count, self.shared_snapshots_count),
            Step("unique KV", f"{prefixes} × {format_bytes(self.own_bytes)} + {format_bytes(self.shared_bytes)}",
                 self.unique_bytes, "B"),
        )  # fmt: skip

    def _part_steps(self, label: str, chunks: int, snapshots: int) -> list[Step]:
        """Whole chunks and snapshots of one prefix, or of what all share, by group."""
        groups = self.footprint.groups
        rows = [
            self._group_step(by_group(label, groups, group), group, chunks, snapshots) for group in groups
        ]
        if len(rows) > 1:
            total = self.footprint.stored_bytes(chunks * self.chunk_tokens, snapshots)
            rows.append(Step(label, " + ".join(row.text for row in rows), total, "B"))
        return rows

    def _group_step(self, label: str, group: KeptGroup, chunks: int, snapshots: int) -> Step:
        if group.is_state:
            text = f"{counted(snapshots, 'snapshot')} × {format_bytes(group.snapshot_bytes)}"
            return Step(label, text, snapshots * group.snapshot_bytes, "B")
        tokens = chunks * self.chunk_tokens
        text = f"{counted(tokens, 'token')} × {format_number(group.token_bytes)} B"
        return Step(label, text, tokens * group.token_bytes, "B")

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What the numbers take for granted."""
        shared = (
            f"the first {counted(self.shared_tokens, 'token')} of every prefix are the same, their chunks stored once"
            if self.shared_tokens
            else "no two prefixes begin alike (--shared-tokens says how much they have in common)"
        )
        return (
            "unique prefixes are counted, not requests",
            shared,
            *self.kept_said,
            *self._windows_said,
            f"{format_share(self.usable_share)} of a host's memory holds payload; the rest is left to "
            "metadata, rounding to slots, quarantine and everything else on the host",
            f"{counted(self.replicas_count, 'copy', 'copies')} of everything, spread evenly over the hosts, "
            "no two on one host",
        )

    @property
    def _windows_said(self) -> tuple[str, ...]:
        """Windows save reading, not room."""
        windowed = [group.name for group in self.footprint.groups if group.last_tokens is not None]
        if not windowed:
            return ()
        return (
            f"all tokens of {', '.join(windowed)} are kept: a reader may need any of them, though never all at once",
        )

    @property
    def conclusion(self) -> str:
        """What follows, and what does not."""
        hosts = counted(self.hosts_count, "host")
        has = f"{hosts} {'has' if self.hosts_count == 1 else 'have'} {format_bytes(self.usable_bytes)}"
        if not self.fits:
            verdict = (
                f"It does not fit: {format_bytes(self.demand_bytes)} are needed and {has}; it takes at least "
                f"{format_number(self.hosts_min)}"
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
