"""The life of a client: attach, orderly detach, disconnection, death.

Owns the slots, the regions and the descriptors of all clients; event-loop thread only.

    (free) --attach--> ATTACHED --detach, nothing held--> (free)
                          |  \\--detach, leases or reservations held--> DISCONNECTED
                          |--EOF, hostile ring-------> DISCONNECTED
                          '--process gone (pidfd)--> (free) <--process gone-- DISCONNECTED

Invariant: what a client holds or fills is given back only when it can no longer be used: its process is gone, or it
detached in order and holds nothing. A disconnected client that lives keeps its slot; no timer ends that. What was in
its ring when it left is handled first, in turns; what it pushes afterwards is not.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Final, NamedTuple

from kvd.config import Config
from kvd.core import events as ev
from kvd.errors import CapacityError, KvdError, ProtocolError, Retry, UsageError
from kvd.server import logs
from kvd.server.adoption import client_name
from kvd.server.domain import Domain
from kvd.server.keeping import Keep, Nobody
from kvd.server.peer import Peer
from kvd.server.supervise import Guard
from kvd.shm import _native, segments

WAKE_BYTES_MAX: Final = 4096
_log = logs.get("clients")


class State(StrEnum):
    """Where a client is in its life."""

    ATTACHED = "attached"
    DISCONNECTED = "disconnected"
    GONE = "gone"


class Held(NamedTuple):
    """What a client that leaves still has."""

    leases: int
    items: int  # reserved, neither published nor given back


@dataclass(slots=True, eq=False, weakref_slot=True)
class Client:
    """One attached process, or one that left a slot behind while it lives."""

    slot: int
    client_id: int
    name: str
    peer: Peer
    writable: bool
    region: _native.Region
    region_fd: int
    wake: socket.socket
    attached_ns: int
    state: State = State.ATTACHED
    attached: bool = True  # its ring is served; asked several times per frame
    hostile: bool = False
    inbox: deque[tuple[int, int, bytes]] = field(
        default_factory=deque
    )  # taken from the ring, not handled yet
    replies: deque[tuple[int, int, bytes]] = field(
        default_factory=deque
    )  # that found the ring of answers full
    retry: asyncio.TimerHandle | None = None
    retry_s: float = 0.0
    draining: bool = False  # a continuation is scheduled
    leaving: list[Callable[[], None]] | None = None  # done when the rest of its ring is handled
    leases: int = 0  # as of the last look
    leased_bytes: int = 0
    leased_ns: int = 0
    over_leased: bool = False
    frames: int = 0
    on_disconnect: Callable[[KvdError | None], None] | None = None  # closes its control connection
    on_wake_closed: Callable[[], None] | None = None  # reads what it said last


class Clients:
    """All clients of a domain."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        domain: Domain,
        config: Config,
        guard: Guard,
        keep: Keep | None = None,
        ids_from: int = 1,
    ) -> None:
        self._loop = loop
        self._domain = domain
        self._config = config.clients
        self.slots_max = config.clients.max
        self._guard = guard
        self._free = list(range(config.clients.max - 1, -1, -1))
        self._next_id = ids_from  # never used again over this memory: regions are kept by it
        self._keep = keep if keep is not None else Nobody()
        self.by_slot: dict[int, Client] = {}
        self.drain: Callable[[Client], None] = _nothing
        self.drain_rest: Callable[[Client], None] = _nothing  # calls what is in `leaving` in the end
        self.on_gone: Callable[[Client], None] = _nothing  # its region can still be read
        self.on_forgotten: Callable[[Peer], None] = _nothing  # nothing of its client is left
        self.disconnects = 0
        self.protocol_errors = 0
        self.kills = 0

    def attach(self, peer: Peer, name: str, *, writable: bool) -> tuple[Client, list[int], socket.socket]:
        """A new client: (client, descriptors to send: META, CLIENT, wake and the segments, the client's end of the
        wake socket, to be closed once it is sent). Raises CapacityError(clients, attach), UsageError(gone),
        UnavailableError(keep).
        """
        if not self._free:
            raise CapacityError(
                f"all {self._config.max} client slots are taken ({self._disconnected_count()} by processes that left "
                "but live); end some, or raise clients.max",
                code="clients", clients_max=self._config.max, disconnected=self._disconnected_count(),
            )  # fmt: skip
        if peer.pidfd is None or peer.exited():
            raise UsageError("the process that connected is gone already", code="gone", pid=peer.pid)
        slot = self._free[-1]
        client_id = self._next_id
        self._next_id += 1
        try:
            region, fd, ours, theirs = self._make(slot, client_id)
        except OSError as error:
            raise CapacityError(
                f"the daemon has no descriptors or memory for another client ({error.strerror}); end some, or raise "
                "its limits (LimitNOFILE)",
                code="attach", errno=error.errno or 0, retry=Retry.AFTER,
            ) from error  # fmt: skip
        now_ns = self._domain.clock.now_ns()
        client = Client(slot, client_id, name, peer, writable, region, fd, ours, now_ns)
        self._free.pop()
        self.by_slot[slot] = client
        self._domain.table.attach(slot, region, peer.pid, peer.start_ticks, client.client_id, now_ns)
        self._domain.step(ev.ClientAttached(slot, peer.pid, name, writable))
        self._loop.add_reader(ours.fileno(), self._guard, self._on_wake, client)
        self._loop.add_reader(peer.pidfd, self._guard, self._on_exit, client)
        region.may_sleep()
        pool_fds = [part.fd if writable else part.read_only_fd for part in self._domain.segments]
        logs.audit("attached", uid=peer.uid, pid=peer.pid, slot=slot, client=name, writable=writable)
        return client, [self._domain.meta_fd, fd, theirs.fileno(), *pool_fds], theirs

    def _make(self, slot: int, client_id: int) -> tuple[_native.Region, int, socket.socket, socket.socket]:
        fd = segments.create(f"kvd-client-{slot}")
        try:
            region = _native.Region(
                fd, slot=slot, epoch=self._domain.identity.epoch, sq_bytes=self._config.sq_size,
                cq_bytes=self._config.cq_size, touch_records=self._config.touch_records,
                hazards_max=self._config.hazards_max,
            )  # fmt: skip
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        except BaseException:
            os.close(fd)
            raise
        ours.setblocking(False)
        try:  # before it can hold anything: the next daemon must see what it holds
            self._keep.store(client_name(client_id), fd)
        except BaseException:
            self._keep.remove(client_name(client_id))
            for end in (ours, theirs):
                end.close()
            os.close(fd)
            raise
        return region, fd, ours, theirs

    def detach(
        self, client: Client, done: Callable[[Held | ProtocolError], None], *, gives_back: bool = False
    ) -> None:
        """Leave in order. `done` gets what is still held: nothing frees the slot, else it is taken until the exit.

        A slot that is being written counts as held, since a view of it may be alive, unless the client `gives_back`.
        """
        if not client.attached or client.leaving is not None:
            raise UsageError("this client is not attached", code="detached")
        self._when_drained(client, partial(self._detach_drained, client, done, gives_back))

    def _detach_drained(
        self, client: Client, done: Callable[[Held | ProtocolError], None], gives_back: bool
    ) -> None:
        if not client.attached:
            done(ProtocolError("what was left in the ring cannot be right", code="ring"))
            return
        client.on_disconnect = None  # the connection goes on: it has to carry the answer
        items = 0 if gives_back else self._domain.core.live_items(client.slot)
        held = Held(self._domain.table.held(client.slot)[0], items)
        if held == Held(0, 0):
            self._forget(client)
        else:
            self._disconnect(client, None)
        done(held)

    def disconnect(self, client: Client, error: KvdError | None) -> None:
        """Stop serving a client that lives (or may): its leases and reservations stay until its process is gone.

        Without an error, what it has pushed until now counts: sockets of a dying process close before its pidfd tells.
        """
        if not client.attached:
            return
        if error is not None:
            self._disconnect(client, error)
        elif client.leaving is None:
            self._when_drained(client, partial(self._disconnect, client, None))

    def _when_drained(self, client: Client, then: Callable[[], None]) -> None:
        if client.leaving is None:
            client.leaving = [then]
            self.drain_rest(client)
        else:
            client.leaving.append(then)

    def _disconnect(self, client: Client, error: KvdError | None) -> None:
        if not client.attached:
            return
        client.state, client.attached = State.DISCONNECTED, False
        self.disconnects += 1
        if error is not None:
            client.hostile = True
            self.protocol_errors += isinstance(
                error, ProtocolError
            )  # else it is counted as what it is: a kill
            _log.warning("client_disconnected", **self._who(client), code=error.code, reason=error.message)
        else:
            _log.info("client_disconnected", **self._who(client))
        self._close_wake(client)
        self._domain.table.disconnected(client.slot)
        if client.on_disconnect is not None:
            client.on_disconnect(error)

    def kill(self, client: Client, error: KvdError) -> None:
        """Disconnect and kill (policy leased_over = disconnect): only its end gives back what it holds."""
        self.kills += 1
        self.disconnect(client, error)
        if client.peer.pidfd is None:
            return
        try:
            signal.pidfd_send_signal(client.peer.pidfd, signal.SIGKILL)
        except ProcessLookupError:
            return
        except PermissionError:
            _log.error(
                "client_cannot_be_killed", **self._who(client), uid=client.peer.uid,
                hint="the daemon needs CAP_KILL to end processes of other users; what this one holds stays held",
            )  # fmt: skip

    def _on_wake(self, client: Client) -> None:
        try:
            data = client.wake.recv(WAKE_BYTES_MAX)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if data:
            self.drain(client)
            return
        self._wake_closed(client)

    def _wake_closed(self, client: Client) -> None:
        """It has closed its end; if it left in order, it said so before."""
        if client.attached and client.on_wake_closed is not None:
            client.on_wake_closed()
        self.disconnect(client, None)

    def _on_exit(self, client: Client) -> None:
        """The process is gone. What it pushed before it died is valid and comes first."""
        if client.peer.pidfd is not None:
            self._loop.remove_reader(client.peer.pidfd)
        if client.attached:
            self._when_drained(client, partial(self._forget, client))
        else:
            self._forget(client)

    def _forget(self, client: Client) -> None:
        if client.state is State.GONE:
            return
        state, client.state, client.attached = client.state, State.GONE, False
        self.on_gone(client)
        if state is State.ATTACHED:
            self._close_wake(client)
        if client.peer.pidfd is not None:
            self._loop.remove_reader(client.peer.pidfd)
        if client.on_disconnect is not None and state is State.ATTACHED:
            client.on_disconnect(None)
        self._domain.forget(client.slot, partial(self._forgotten, client))

    def _forgotten(self, client: Client) -> None:
        """All it had reserved has come back; now its slot may be somebody else's."""
        del self.by_slot[client.slot]
        self._free.append(client.slot)
        self._keep.remove(client_name(client.client_id))
        os.close(client.region_fd)
        client.peer.close()
        self.on_forgotten(client.peer)
        _log.info("client_gone", **self._who(client))

    def _close_wake(self, client: Client) -> None:
        self._loop.remove_reader(client.wake.fileno())
        client.wake.close()
        client.replies.clear()
        client.inbox.clear()
        if client.retry is not None:
            client.retry.cancel()
            client.retry = None

    def wake(self, client: Client) -> None:
        """One byte for a client that sleeps. A full socket holds bytes it has not seen: it will wake."""
        try:
            client.wake.send(b"\1", socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._loop.call_soon(self._guard, self._wake_closed, client)

    def look_at_leases(self, client: Client, limit_bytes: int | None) -> bool:
        """Count what a client holds; True if that is more than the limit, which is logged when it comes to that."""
        was_over = client.over_leased
        client.leases, client.leased_bytes = self._domain.table.held(client.slot)
        client.leased_ns = self._domain.clock.now_ns()
        client.over_leased = limit_bytes is not None and client.leased_bytes > limit_bytes
        if client.over_leased and not was_over:
            _log.warning(
                "client_over_lease_limit", **self._who(client),
                leased_bytes=client.leased_bytes, limit_bytes=limit_bytes,
            )  # fmt: skip
        return client.over_leased

    def _disconnected_count(self) -> int:
        return sum(not client.attached for client in self.by_slot.values())

    @staticmethod
    def _who(client: Client) -> dict[str, object]:
        return {"slot": client.slot, "pid": client.peer.pid, "client": client.name}


def _nothing(_client: object) -> None:
    return
