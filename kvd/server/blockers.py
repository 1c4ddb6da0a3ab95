"""Who keeps memory from being reclaimed, and since when.

Owns a short list of families that were to leave and could not, because somebody leases them; event-loop thread only.
Once a second it is asked who still holds them. Bounded: it remembers the last few, and so names a blocker as long as it
holds one of those; what it does not remember costs nobody anything but the name. It changes nothing: a lease ends when
its holder ends it.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from kvd.core import events as ev
from kvd.server import logs
from kvd.server.clients import Client, Clients
from kvd.server.domain import Domain

FAMILIES_MAX: Final = 8
TELL_AFTER_NS: Final = 10_000_000_000
_log = logs.get("blockers")


class Blockers:
    """See the module."""

    def __init__(self, domain: Domain, clients: Clients) -> None:
        self._domain = domain
        self._clients = clients
        self._wanted: deque[tuple[int, int]] = deque(maxlen=FAMILIES_MAX)  # entry, generation
        self._since_ns: dict[int, int] = {}  # client id -> when it was first seen to hold what was to leave
        self._told: set[int] = set()
        domain.evicted_observers.append(self._evicted)

    def _evicted(self, _effect: ev.DoEvict, answer: ev.Evicted) -> None:
        """Observes evictions: notes one of the families that were held."""
        if len(answer.held):
            entry = memoryview(answer.held)[0]
            known = (entry, self._domain.table.entry(entry)["generation"])
            if known not in self._wanted:
                self._wanted.append(known)

    def look(self) -> None:
        """Once a second: who holds what was to leave."""
        if not self._wanted and not self._since_ns:
            return
        now_ns, table = self._domain.clock.now_ns(), self._domain.table
        holders: set[int] = set()
        for known in list(self._wanted):
            entry, generation = known
            slots = table.holders(entry) if table.entry(entry)["generation"] == generation else []
            holders.update(slots)
            if not slots:
                self._wanted.remove(known)
        ids = {
            client.client_id for slot in holders if (client := self._clients.by_slot.get(slot)) is not None
        }
        self._since_ns = {number: self._since_ns.get(number, now_ns) for number in ids}
        self._told &= ids
        for client in self._clients.by_slot.values():
            if client.client_id in ids - self._told and self._blocks_ns(client, now_ns) >= TELL_AFTER_NS:
                self._told.add(client.client_id)
                _log.warning(
                    "client_blocks_reclaim", slot=client.slot, pid=client.peer.pid, client=client.name,
                    seconds=round(self._blocks_ns(client, now_ns) / 1e9),
                )  # fmt: skip

    def _blocks_ns(self, client: Client, now_ns: int) -> int:
        return now_ns - self._since_ns.get(client.client_id, now_ns)

    def blocks_s(self, client: Client) -> float | None:
        """For how long this client has held what was to leave, to the second; None: it does not."""
        since_ns = self._since_ns.get(client.client_id)
        return None if since_ns is None else round((self._domain.clock.now_ns() - since_ns) / 1e9, 1)
