"""Clients of an earlier daemon that live: what they hold stays until they are gone or say that they hold nothing.

Owns their pidfds and regions; event-loop thread only. A ghost has a slot of META above those of this daemon's clients,
is scanned like any client, and what it may still be filling is in quarantine in the core.

    revoked ──▶ process gone (pidfd), or: attached here and said `left` ──▶ forgotten
"""

from __future__ import annotations

import asyncio
import os
from functools import partial
from typing import Final

from kvd.server import logs
from kvd.server.adoption import Ghost, client_name
from kvd.server.domain import Domain
from kvd.server.keeping import Keep
from kvd.server.peer import Peer
from kvd.server.supervise import Guard

REMINDER_TICKS: Final = 300
_log = logs.get("restart")


class Ghosts:
    """All of them."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, domain: Domain, keep: Keep, ghosts: list[Ghost], guard: Guard
    ) -> None:
        self._loop = loop
        self._domain = domain
        self._keep = keep
        self._ghosts = {ghost.slot: ghost for ghost in ghosts}
        self._guard = guard
        self._ticks = 0

    def __len__(self) -> int:
        return len(self._ghosts)

    def start(self) -> None:
        """Watch their processes."""
        for ghost in self._ghosts.values():
            if ghost.pidfd is not None:
                self._loop.add_reader(ghost.pidfd, self._guard, self._forget, ghost, "its process is gone")
            self._log_waiting("waiting_for_old_client", ghost)

    def left(self, peer: Peer, epoch: int, region_slot: int) -> bool:
        """The process at the other end says that it holds nothing of this region any more."""
        for ghost in self._ghosts.values():
            if (ghost.epoch, ghost.region_slot) == (epoch, region_slot) and ghost.pid == peer.pid:
                self._forget(ghost, "it attached anew and left")
                return True
        return False

    def tick(self) -> None:
        """Once a second: now and then, say who is waited for."""
        self._ticks += 1
        if self._ticks % REMINDER_TICKS == 0:
            for ghost in self._ghosts.values():
                self._log_waiting("still_waiting_for_old_client", ghost)

    def rows(self) -> list[dict[str, object]]:
        """One row a ghost, for status."""
        return [self._row(ghost) for ghost in self._ghosts.values()]

    def _row(self, ghost: Ghost) -> dict[str, object]:
        leases, leased_bytes = self._domain.table.held(ghost.slot)
        return {
            "pid": ghost.pid,
            "client_id": ghost.client_id,
            "epoch": f"{ghost.epoch:016x}",
            "leases": leases,
            "leased_bytes": leased_bytes,
            "being_written": ghost.records_count,
        }

    def _log_waiting(self, event: str, ghost: Ghost) -> None:
        _log.info(event, slot=ghost.slot, **self._row(ghost))

    def _forget(self, ghost: Ghost, why: str) -> None:
        if self._ghosts.pop(ghost.slot, None) is None:
            return
        if ghost.pidfd is not None:
            self._loop.remove_reader(ghost.pidfd)
            os.close(ghost.pidfd)
        self._domain.forget(ghost.slot, partial(self._forgotten, ghost, why))

    def _forgotten(self, ghost: Ghost, why: str) -> None:
        self._keep.remove(client_name(ghost.client_id))
        os.close(ghost.fd)
        _log.info(
            "old_client_gone",
            pid=ghost.pid,
            client_id=ghost.client_id,
            reason=why,
            waiting_for=len(self._ghosts),
        )
