"""What the daemon says of itself: status for kvctl, one line for systemd, series for Prometheus.

Reads everything, owns nothing but what population found out about pages; event-loop thread only. Series are made from
the same numbers as the status, all present from the start.
"""

from __future__ import annotations

import heapq
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Final

from kvd.config import Config, format_size
from kvd.errors import InvariantError
from kvd.probe import process
from kvd.server import logs
from kvd.server.blockers import Blockers
from kvd.server.clients import Client, Clients
from kvd.server.domain import Domain
from kvd.server.events import COUNTERS as EVENT_COUNTERS
from kvd.server.events import Events
from kvd.server.metrics import Series
from kvd.server.namespaces import NamespaceRecord
from kvd.server.population import Progress
from kvd.server.runner import Runner
from kvd.server.supervise import Supervisor
from kvd.server.verifier import Verifier
from kvd.shm import pool
from kvd.version import VERSION

if TYPE_CHECKING:
    from kvd.server.control import Control

CLIENT_COUNTERS: Final = (
    "lookups", "keys_asked", "keys_hit", "leases", "leases_released", "bytes_viewed", "fetches", "adopts",
    "adopts_failed", "verify_failed", "bytes_filled",
)  # fmt: skip
NAMESPACES_SHOWN_MAX: Final = 100
PARTS: Final = ("daemon", "population", "tick", "metrics", "verify")


class Report:
    """Looks at all parts of one daemon."""

    def __init__(
        self,
        config: Config,
        domain: Domain,
        clients: Clients,
        runner: Runner,
        progress: Progress,
        supervisor: Supervisor,
        verifier: Verifier,
        blockers: Blockers,
    ) -> None:
        self._config = config
        self._domain = domain
        self._clients = clients
        self._runner = runner
        self._progress = progress
        self._supervisor = supervisor
        self._verifier = verifier
        self._blockers = blockers
        self._started_s = time.monotonic()
        self._gone_counters = [0] * len(CLIENT_COUNTERS)
        self.control: Control | None = None
        self.events: Events | None = None
        self.restart: Callable[[], dict[str, object]] = dict  # what was kept, and who is waited for
        self.page_kinds: dict[int, pool.PageKind] = {}
        clients.on_gone = self._keep_counters

    # --- status

    def status(self) -> dict[str, object]:
        """Everything that `kvctl status` shows."""
        domain = self._domain
        for client in self._clients.by_slot.values():
            self._clients.look_at_leases(client, domain.sizes.leased_bytes_max)
        statistics = domain.core.statistics()
        used = statistics.pop("namespaces")
        return {
            "version": VERSION,
            "pid": os.getpid(),
            "epoch": f"{domain.identity.epoch:016x}",
            "uptime_s": round(time.monotonic() - self._started_s, 1),
            "state": self._supervisor.state,
            "health": self.health(),
            "socket": self._config.server.socket,
            "domain": domain.name,
            "pool": self._pool(),
            "core": statistics,
            "meta_bytes": domain.table.meta_bytes,
            "private_bytes": process.private_bytes() or 0,
            "clients": {
                "attached": sum(client.attached for client in self._clients.by_slot.values()),
                "disconnected": sum(not client.attached for client in self._clients.by_slot.values()),
                "max": self._config.clients.max,
                "leases": sum(client.leases for client in self._clients.by_slot.values()),
                "leased_bytes": sum(client.leased_bytes for client in self._clients.by_slot.values()),
            },
            "connections": self._connections(),
            "verify": self._verifier.status(),
            "restart": self.restart(),
            "namespaces": self.namespaces(self._largest(used), used),
            "namespaces_count": len(domain.namespaces),
            "lookups": dict(zip(CLIENT_COUNTERS, self._client_counters(), strict=True)),
            "counters": self._counters(),
        }

    def _connections(self) -> dict[str, object]:
        control = self.control
        return {
            "open": len(control.connections) if control is not None else 0,
            "of_one_user_max": control.per_uid_max if control is not None else 0,
            "refused": control.refusals.connections_count if control is not None else 0,
            "last_refused": control.refusals.last() if control is not None else None,
        }

    def _largest(self, used: object) -> list[NamespaceRecord]:
        """The namespaces with the most bytes, as many as a status has room for, by number."""
        sizes = {number: row["bytes"] for number, row in used.items()} if isinstance(used, dict) else {}
        records = list(self._domain.namespaces.by_number.values())
        if len(records) > NAMESPACES_SHOWN_MAX:
            records = heapq.nlargest(
                NAMESPACES_SHOWN_MAX, records, key=lambda record: sizes.get(record.number, 0)
            )
        return sorted(records, key=lambda record: record.number)

    def namespaces(self, records: Iterable[NamespaceRecord], used: object = None) -> list[dict[str, object]]:
        """One row each. `used`: families and bytes by number, where they are known already."""
        if used is None:
            used = self._domain.core.statistics()["namespaces"]
        if not isinstance(used, dict):
            raise InvariantError("the core lists namespaces as a map")
        rows: list[dict[str, object]] = []
        for item in records:
            row = used.get(item.number, {"families": 0, "bytes": 0})
            rows.append(
                {
                    "number": item.number,
                    "root": item.root.hex(),
                    "label": item.label,
                    "model": item.model,
                    "tenant": item.tenant,
                    "families": row["families"],
                    "bytes": row["bytes"],
                }
            )
        return rows

    def health(self) -> dict[str, object]:
        """State of every part."""
        return {
            "state": self._supervisor.state,
            "restarts": self._supervisor.restarts,
            "parts": {
                part: {"state": item.state, "reason": item.reason}
                for part, item in self._supervisor.parts().items()
            },
        }

    def clients(self) -> list[dict[str, object]]:
        """One row a client slot in use."""
        return [
            self._client_row(client)
            for client in sorted(self._clients.by_slot.values(), key=lambda c: c.slot)
        ]

    def _client_row(self, client: Client) -> dict[str, object]:
        self._clients.look_at_leases(client, self._domain.sizes.leased_bytes_max)
        age_ns = self._domain.clock.now_ns() - client.attached_ns
        return {
            "slot": client.slot,
            "client_id": client.client_id,
            "name": client.name,
            "pid": client.peer.pid,
            "uid": client.peer.uid,
            "state": str(client.state),
            "hostile": client.hostile,
            "access": "write" if client.writable else "read",
            "attached_s": round(age_ns / 1e9, 1),
            "leases": client.leases,
            "leased_bytes": client.leased_bytes,
            "over_lease_limit": client.over_leased,
            "blocks_reclaim_s": self._blockers.blocks_s(client),
            "frames": client.frames,
            "answers_waiting": len(client.replies),
            "counters": dict(zip(CLIENT_COUNTERS, client.region.counters(), strict=False)),
        }

    def _pool(self) -> dict[str, object]:
        progress = self._progress
        return {
            "size_bytes": self._domain.pool_bytes,
            "memory_bytes": self._domain.sizes.memory_bytes,
            "backing": self._config.pool.backing,
            "families_max": self._domain.sizes.families_max,
            "records_max": self._domain.sizes.records_max,
            "population": progress.as_dict(),
            "segments": [
                {
                    "number": segment.number,
                    "size_bytes": segment.size_bytes,
                    "populated_bytes": progress.segments_bytes[segment.number],
                    "pages": self.page_kinds.get(segment.number, pool.PageKind.SMALL).name.lower(),
                    "node": progress.segments_node[segment.number],
                }
                for segment in self._domain.segments
            ],
        }

    def line(self) -> str:
        """One line for `systemctl status`; changes only when something happened."""
        attached = sum(client.attached for client in self._clients.by_slot.values())
        size_bytes, populated_bytes = self._domain.pool_bytes, self._progress.populated_bytes
        pool_text = format_size(size_bytes)
        if not self._progress.done:
            pool_text = f"{100 * populated_bytes // max(1, size_bytes)}% of {pool_text} populated"
        return f"{self._supervisor.state}, {attached} client{'' if attached == 1 else 's'}, pool {pool_text}"

    # --- counters

    def _keep_counters(self, client: Client) -> None:
        """What a client counted stays counted when it is gone: totals never fall."""
        self._gone_counters = self._sum(self._gone_counters, client)

    @staticmethod
    def _sum(totals: list[int], client: Client) -> list[int]:
        # A client can write any number here; what is shown stays a number that Prometheus can hold.
        return [
            (total + value) & 0xFFFFFFFFFFFFFFFF
            for total, value in zip(totals, client.region.counters(), strict=False)
        ]

    def _client_counters(self) -> list[int]:
        totals = self._gone_counters
        for client in self._clients.by_slot.values():
            totals = self._sum(totals, client)
        return totals

    def _counters(self) -> dict[str, int]:
        refusals = self.control.refusals if self.control is not None else None
        return {
            **self._domain.core.counters,
            "client_disconnects": self._clients.disconnects,
            "client_protocol_errors": self._clients.protocol_errors
            + (refusals.protocol_errors_count if refusals is not None else 0),
            "clients_killed": self._clients.kills,
            "control_connections": self.control.accepted if self.control is not None else 0,
            "control_connections_refused": refusals.connections_count if refusals is not None else 0,
            "namespaces_forgotten": self._domain.namespaces.forgotten_count,
            "control_errors": self.control.errors if self.control is not None else 0,
            "ring_frames": self._runner.frames,
            "answers_deferred": self._runner.replies_deferred,
            "lease_limit_refusals": self._runner.lease_refusals,
            "task_restarts": self._supervisor.restarts,
            "log_lines_dropped": logs.dropped_count(),
            **self._verifier.counters,
            **(self.events.counters if self.events is not None else dict.fromkeys(EVENT_COUNTERS, 0)),
        }

    # --- metrics

    def series(self) -> Iterator[Series]:
        """All series, every one present whatever happened so far."""
        yield Series("kvd_info", "gauge", "Version and epoch of the daemon.", [
            ({"version": VERSION, "epoch": f"{self._domain.identity.epoch:016x}"}, 1)])  # fmt: skip
        yield Series("kvd_uptime_seconds", "gauge", "Seconds since the daemon started.", [
            ({}, round(time.monotonic() - self._started_s, 1))])  # fmt: skip
        states = {part: item.state for part, item in self._supervisor.parts().items()}
        yield Series("kvd_part_healthy", "gauge", "1 if this part of the daemon works as configured.", [
            ({"part": part}, float(states.get(part, "ok") == "ok")) for part in dict.fromkeys((*PARTS, *states))
        ])  # fmt: skip
        counters = self._counters()
        evicted = {
            name: value
            for name, value in counters.items()
            if name.startswith("evicted_") and name != "evicted_bytes"
        }
        yield Series("kvd_evicted_families_total", "counter", "Families evicted, by reason.", [
            ({"reason": name.removeprefix("evicted_")}, value) for name, value in evicted.items()])  # fmt: skip
        for name, value in counters.items():
            if name not in evicted:
                yield Series(f"kvd_{name}_total", "counter", f"{name.replace('_', ' ')}.", [({}, value)])
        for name, value in zip(CLIENT_COUNTERS, self._client_counters(), strict=True):
            yield Series(
                f"kvd_client_{name}_total",
                "counter",
                f"{name.replace('_', ' ')}, as clients count.",
                [({}, value)],
            )
        yield from self._gauges()

    def _gauges(self) -> Iterator[Series]:
        clients = self._clients.by_slot.values()
        for name, meaning, value in (
            ("pool_bytes", "Bytes of the pool.", self._domain.pool_bytes),
            ("pool_populated_bytes", "Bytes of the pool that are backed by memory.", self._progress.populated_bytes),
            ("pool_huge_bytes", "Bytes of the pool in huge pages, as measured.", self._progress.huge_bytes),
            ("meta_bytes", "Bytes of the index that clients map.", self._domain.table.meta_bytes),
            ("namespaces", "Namespaces registered.", len(self._domain.namespaces)),
            ("clients_attached", "Clients attached.", sum(client.attached for client in clients)),
            ("clients_disconnected", "Clients that left but live.", sum(not c.attached for c in clients)),
            ("clients_max", "Client slots.", self._config.clients.max),
            ("leases", "Leases, as of the last second.", sum(client.leases for client in clients)),
            ("leased_bytes", "Bytes leased, as of the last second.", sum(client.leased_bytes for client in clients)),
        ):  # fmt: skip
            yield Series(f"kvd_{name}", "gauge", meaning, [({}, value)])
        for name, number in _flat(self._domain.core.statistics()):
            yield Series(f"kvd_{name}", "gauge", f"{name.replace('_', ' ')}.", [({}, number)])


def _flat(values: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, float]]:
    """(name, number) of every number in nested maps; what comes and goes (lists, namespaces) is left out."""
    for name, value in values.items():
        if isinstance(value, Mapping) and name != "namespaces":
            yield from _flat(value, f"{prefix}{name}_")
        elif isinstance(value, int | float):
            yield f"{prefix}{name}", value
