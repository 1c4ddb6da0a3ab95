"""The network ledger: bytes a second in each direction, and how many links can carry them.

Pure functions of their arguments, any thread. The traffic is a directed matrix, because links are full
duplex: 150 GiB/s one way and 100 GiB/s the other need the links of 150, not of 250. What comes out is a
bound: with fewer links it cannot work, with that many it still may not.
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
    check_number,
    check_positive,
    check_share,
    counted,
    format_bandwidth,
    format_bytes,
    format_number,
    format_rate,
    format_share,
)

matrix_hosts_max = 256


@dataclass(frozen=True, slots=True)
class TrafficMatrix:
    """Bytes a second from row to column. The diagonal is zero: what stays on a host uses no link."""

    nodes: tuple[str, ...]
    bytes_per_s: tuple[tuple[Fraction, ...], ...]

    @property
    def egress_bytes_per_s(self) -> tuple[Fraction, ...]:
        """What each node sends."""
        return tuple(sum(row, Fraction(0)) for row in self.bytes_per_s)

    @property
    def ingress_bytes_per_s(self) -> tuple[Fraction, ...]:
        """What each node receives."""
        return tuple(sum(column, Fraction(0)) for column in zip(*self.bytes_per_s, strict=True))

    @property
    def busiest_bytes_per_s(self) -> Fraction:
        """The largest one-way rate of any node: what its links have to carry."""
        return max((*self.egress_bytes_per_s, *self.ingress_bytes_per_s), default=Fraction(0))


def uniform_matrix(
    hosts_count: int,
    read_bytes_per_s: Fraction,
    write_bytes_per_s: Fraction,
    hot_share: Fraction | None = None,
) -> TrafficMatrix:
    """Host-to-host traffic: reads owner → reader, writes producer → holder of a copy.

    Readers and writers are spread evenly. Owners too, unless `hot_share` of all reads is owned by the first
    host. Only what crosses hosts belongs in the two rates. Two hosts or more.
    """
    others = hosts_count - 1
    hot = Fraction(1, hosts_count) if hot_share is None else hot_share
    cold = (1 - hot) / others
    write = write_bytes_per_s / (hosts_count * others)
    rows = []
    for source in range(hosts_count):
        rate = read_bytes_per_s * (hot if source == 0 else cold) / others + write
        rows.append(tuple(Fraction(0) if source == target else rate for target in range(hosts_count)))
    return TrafficMatrix(tuple(f"host{n}" for n in range(hosts_count)), tuple(rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkPlan:
    """Reads and writes of the cache against links. Rates per second, sizes in bytes, links full duplex.

    Without `hosts_count` the matrix has two nodes, the cache and the engines, and every byte crosses
    between them. With it, hosts are both, `local_share` of the reads stay on their host, and `hot_share`
    of the reads may be owned by one host. `links_count` is what there is, on each node. Raises UsageError:
    a value out of range, hosts outside 2 … 256, `local_share` or `hot_share` without hosts.
    """

    requests_per_s: Fraction
    hit_share: Fraction
    bytes_per_hit: int
    link_bytes_per_s: Fraction
    efficiency: Fraction
    stores_per_s: Fraction = Fraction(0)
    bytes_per_store: int | None = None
    replicas_count: int = 1
    hosts_count: int | None = None
    local_share: Fraction = Fraction(0)
    hot_share: Fraction | None = None
    links_count: int | None = None

    def __post_init__(self) -> None:
        check_number("--rate", self.requests_per_s, 0, units.plan_rate_per_s_max)
        check_share("--hit", self.hit_share)
        check_int("--bytes", self.bytes_per_hit, 1, units.plan_bytes_max)
        check_positive("--link", self.link_bytes_per_s, units.plan_bandwidth_bytes_per_s_max)
        check_positive("--efficiency", self.efficiency, 1)
        check_number("--store-rate", self.stores_per_s, 0, units.plan_rate_per_s_max)
        check_int("--replicas", self.replicas_count, 1, units.plan_count_max)
        check_share("--local", self.local_share)
        if self.bytes_per_store is not None:
            check_int("--store-bytes", self.bytes_per_store, 1, units.plan_bytes_max)
        if self.hot_share is not None:
            check_share("--hot", self.hot_share)
        if self.links_count is not None:
            check_int("--links", self.links_count, 1, units.plan_count_max)
        check_number("reads", self.read_bytes_per_s, 0, units.plan_bandwidth_bytes_per_s_max)
        check_number("writes", self.write_bytes_per_s, 0, units.plan_bandwidth_bytes_per_s_max)
        self._check_hosts()

    def _check_hosts(self) -> None:
        if self.hosts_count is None:
            for name, value in (("--local", self.local_share or None), ("--hot", self.hot_share)):
                if value is not None:
                    raise UsageError(
                        f"{name} = {format_share(value)} without a number of hosts: it says how reads spread "
                        f"over hosts; allowed: together with --hosts",
                        code="contradiction", field=name,
                    )  # fmt: skip
            return
        check_int("--hosts", self.hosts_count, 2, matrix_hosts_max)
        if self.replicas_count > self.hosts_count:
            raise UsageError(
                f"--replicas = {self.replicas_count} with --hosts = {self.hosts_count}: copies on one host are "
                f"lost together; allowed: 1 … {self.hosts_count} replicas",
                code="contradiction", replicas=self.replicas_count, hosts=self.hosts_count,
            )  # fmt: skip

    @property
    def read_bytes_per_s(self) -> Fraction:
        """Hits, wherever they are served from."""
        return Fraction(self.requests_per_s) * self.hit_share * self.bytes_per_hit

    @property
    def write_bytes_per_s(self) -> Fraction:
        """New data × copies; the first copy is counted as if it crossed the network too."""
        return Fraction(self.stores_per_s) * self.store_bytes * self.replicas_count

    @property
    def store_bytes(self) -> int:
        """Bytes of one store: those of a hit unless told otherwise."""
        return self.bytes_per_hit if self.bytes_per_store is None else self.bytes_per_store

    @property
    def link_effective_bytes_per_s(self) -> Fraction:
        """What one link carries one way."""
        return Fraction(self.link_bytes_per_s) * self.efficiency

    @property
    def matrix(self) -> TrafficMatrix:
        """Who sends how much to whom."""
        if self.hosts_count is not None:
            crossing = self.read_bytes_per_s * (1 - self.local_share)
            return uniform_matrix(self.hosts_count, crossing, self.write_bytes_per_s, self.hot_share)
        zero = Fraction(0)
        return TrafficMatrix(
            ("cache", "engines"), ((zero, self.read_bytes_per_s), (self.write_bytes_per_s, zero))
        )

    @property
    def read_links_min(self) -> int:
        """Links for all reads, were they spread over links without a gap."""
        return units.ceil_div(self.read_bytes_per_s, self.link_effective_bytes_per_s)

    @property
    def write_links_min(self) -> int:
        """The same for all writes, which run the other way."""
        return units.ceil_div(self.write_bytes_per_s, self.link_effective_bytes_per_s)

    @property
    def links_per_node_min(self) -> int:
        """Links below which the busiest node cannot carry its busier direction."""
        return units.ceil_div(self.matrix.busiest_bytes_per_s, self.link_effective_bytes_per_s)

    @property
    def utilisation_share(self) -> Fraction:
        """Load of the busiest direction on `links_count` links, or on the fewest; above 1 is overload."""
        links = self.links_count or self.links_per_node_min
        return (
            self.matrix.busiest_bytes_per_s / (links * self.link_effective_bytes_per_s)
            if links
            else Fraction(0)
        )

    @property
    def carries(self) -> bool | None:
        """Whether `links_count` links meet the bound; None if not asked."""
        return None if self.links_count is None else self.links_count >= self.links_per_node_min

    @property
    def answers(self) -> Mapping[str, Answer]:
        """Results under stable names."""
        return {
            "read_bytes_per_s": self.read_bytes_per_s,
            "write_bytes_per_s": self.write_bytes_per_s,
            "link_effective_bytes_per_s": self.link_effective_bytes_per_s,
            "read_links_min": self.read_links_min,
            "write_links_min": self.write_links_min,
            "links_per_node_min": self.links_per_node_min,
            "busiest_bytes_per_s": self.matrix.busiest_bytes_per_s,
            "utilisation_share": self.utilisation_share,
            "carries": self.carries,
        }

    @property
    def steps(self) -> tuple[Step, ...]:
        """The arithmetic, in order."""
        effective = format_bandwidth(self.link_effective_bytes_per_s)
        rows = [
            Step("reads", f"{format_rate(self.requests_per_s)} × {format_share(self.hit_share)} × "
                 f"{format_bytes(self.bytes_per_hit)}", self.read_bytes_per_s, "B/s"),
            Step("writes", f"{format_rate(self.stores_per_s)} × {format_bytes(self.store_bytes)} × "
                 f"{counted(self.replicas_count, 'copy', 'copies')}", self.write_bytes_per_s, "B/s"),
            Step("one link, nominal", f"{format_number(self.link_bytes_per_s * 8 / 10**9)} Gbit/s ÷ 8 = "
                 f"{format_number(self.link_bytes_per_s / 10**9)} GB/s", self.link_bytes_per_s, "B/s"),
            Step("one link, in practice", f"{format_bandwidth(self.link_bytes_per_s)} × "
                 f"{format_share(self.efficiency)}", self.link_effective_bytes_per_s, "B/s"),
            Step("links for all reads",
                 f"{format_bandwidth(self.read_bytes_per_s)} ÷ {effective}, rounded up",
                 self.read_links_min, "links"),
            Step("links for all writes",
                 f"{format_bandwidth(self.write_bytes_per_s)} ÷ {effective}, rounded up",
                 self.write_links_min, "links"),
        ]  # fmt: skip
        if self.hosts_count is not None:
            crossing = self.read_bytes_per_s * (1 - self.local_share)
            rows.append(Step("reads between hosts", f"{format_bandwidth(self.read_bytes_per_s)} × "
                             f"{format_share(1 - self.local_share)} not on their host",
                             crossing, "B/s"))  # fmt: skip
            rows += self._cell_steps
        matrix = self.matrix
        busiest = format_bandwidth(matrix.busiest_bytes_per_s)
        rows += [
            Step("busiest direction", self._busiest_text(matrix), matrix.busiest_bytes_per_s, "B/s"),
            Step("links at least", f"{busiest} ÷ {effective}, rounded up", self.links_per_node_min, "links"),
            Step("load of those" if self.links_count is None else "load of yours",
                 f"{busiest} ÷ ({self.links_count or self.links_per_node_min} × {effective})",
                 self.utilisation_share, "share"),
        ]  # fmt: skip
        return tuple(rows)

    @property
    def _cell_steps(self) -> list[Step]:
        """The cells of the host-to-host matrix: what the first host, and every other, sends to each."""
        assert self.hosts_count is not None
        matrix, others = self.matrix, self.hosts_count - 1
        read = format_bandwidth(self.read_bytes_per_s * (1 - self.local_share))
        write = f"{format_bandwidth(self.write_bytes_per_s)} ÷ {self.hosts_count} hosts ÷ {counted(others, 'other')}"
        if self.hot_share is None:
            text = f"{read} ÷ {self.hosts_count} owners ÷ {counted(others, 'other')} + {write}"
            return [Step("a host to each other", text, matrix.bytes_per_s[0][1], "B/s")]
        hot, cold = format_share(self.hot_share), format_share(1 - self.hot_share)
        cold = f"{read} × {cold} ÷ {counted(others, 'owner')} ÷ {counted(others, 'other')}"
        return [
            Step("host0 to each other", f"{read} × {hot} owned ÷ {counted(others, 'other')} + {write}",
                 matrix.bytes_per_s[0][1], "B/s"),
            Step("any other to each", f"{cold} + {write}",
                 matrix.bytes_per_s[1][0], "B/s"),
        ]  # fmt: skip

    def _busiest_text(self, matrix: TrafficMatrix) -> str:
        """What the busiest direction is the sum of. Of hosts it is what one sends: it sends to each as much as to any,
        so that nobody receives more than the largest sender sends.
        """
        sends = matrix.egress_bytes_per_s
        if self.hosts_count is None:
            return f"the larger of {format_bandwidth(sends[0])} and {format_bandwidth(sends[1])}, links are duplex"
        node = sends.index(matrix.busiest_bytes_per_s)
        each = matrix.bytes_per_s[node][0 if node else 1]
        return f"host{node} sends {self.hosts_count - 1} × {format_bandwidth(each)}"

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What the numbers take for granted."""
        spread = (
            "every hit and every copy crosses between cache and engines; hits on the own host would not"
            if self.hosts_count is None
            else "readers and producers are spread evenly over the hosts"
            + (
                ""
                if self.hot_share is None
                else f"; one host owns {format_share(self.hot_share)} of the reads"
            )
        )
        missed = Fraction(self.requests_per_s) * (1 - self.hit_share)
        stored = "all copies are written over the network, the first one included"
        if not self.stores_per_s and missed:
            more = format_bandwidth(missed * self.store_bytes)
            stored = (
                f"nothing is stored (--store-rate): a copy of what {format_rate(missed)} miss would be {more}"
            )
        return (
            "rates are means: bursts are not in them",
            spread,
            stored,
            f"links are full duplex, evenly loaded, and reach {format_share(self.efficiency)} of their rate",
            "nothing else uses them: the model's own traffic is not counted",
        )

    @property
    def conclusion(self) -> str:
        """What follows, and what does not."""
        where = "each host" if self.hosts_count is not None else "the cache"
        least = self.links_per_node_min
        need = f"{where} needs at least {counted(least, 'link')}" if least else f"{where} needs no link"
        load = format_share(self.utilisation_share)
        if self.carries is None and not least:
            return "Nothing crosses the network, so no link is needed; this holds while rates and sizes stay as given."
        if self.carries is None:
            first = f"{need[0].upper()}{need[1:]}, which would then be loaded to {load}"
        elif self.carries:
            meet = "meets" if self.links_count == 1 else "meet"
            on_each = " on each host" if self.hosts_count is not None else ""
            first = f"{counted(self.links_count or 0, 'link')}{on_each} {meet} the bound at a load of {load}"
        else:
            first = f"{counted(self.links_count or 0, 'link')} cannot carry it: {need}"
        return (
            f"{first}; this is a bound, not an SLO verdict: fewer cannot work, and whether that many keep a "
            f"latency limit depends on bursts and queues that are not in it."
        )
