"""The unix socket: connections, frames, descriptors, backpressure.

Owns the listening socket and every control connection; event-loop thread only. Sockets are non-blocking and driven by
readiness callbacks, because descriptors must ride on the first byte of their frame. Limits: OUT_BYTES_MAX
queued per connection (its asks are not read meanwhile), REQUESTS_PER_TURN asks before the loop goes on,
`requests_in_flight_max` unanswered ones, 5 s for the handshake, `access.connections_per_uid` connections of one user.
What a peer sends can end its own connection only.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import socket
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kvd import limits
from kvd.config import AccessConfig
from kvd.errors import (
    CapacityError,
    InvariantError,
    KvdError,
    ProtocolError,
    Retry,
    UnavailableError,
    UsageError,
)
from kvd.server import logs
from kvd.server.admin import Admin
from kvd.server.clients import Client, Clients, Held
from kvd.server.domain import Domain
from kvd.server.ghosts import Ghosts
from kvd.server.peer import Peer, identify
from kvd.server.refusals import Refusals
from kvd.server.supervise import Guard
from kvd.server.turns import Turns
from kvd.version import VERSION
from kvd.wire import frames
from kvd.wire import messages as wire

OUT_BYTES_MAX: Final = 8 * limits.MIB
READ_BYTES: Final = 64 * limits.KIB
REQUESTS_PER_TURN: Final = 16
CONNECTIONS_SPARE: Final = 64  # beyond clients.max, for kvctl and for those that wait for a slot
CONNECTIONS_SPARE_OF_UID: Final = 16  # of these, what one user may have where the configuration says nothing
CONNECTIONS_RESERVED: Final = 8  # that root and the daemon's own user have beyond that, for kvctl alone
ACCEPT_PAUSE_S: Final = 1.0
# One that administers and was silent for so long makes room for the next one of root or the daemon's own user.
ADMIN_IDLE_S: Final = 60.0

_log = logs.get("control")


@dataclass(slots=True)
class _Chunk:
    data: memoryview
    fds: tuple[int, ...]
    to_close: tuple[int, ...]


class Connection:
    """One peer on the control socket."""

    def __init__(self, control: Control, sock: socket.socket, peer: Peer) -> None:
        self._control = control
        self._loop = control.loop
        self._sock = sock
        self._fd = sock.fileno()
        self._decoder = frames.Decoder(frames.ASK_VALUES_MAX)
        self._asks: deque[frames.Message] = deque()
        self._out: deque[_Chunk] = deque()
        self._out_bytes = 0
        self._reading = False
        self._writing = False
        self._turn_scheduled = False
        self.peer = peer
        self.hello: wire.Hello | None = None
        self.is_reserve = False  # beyond what its user may have: for administration alone
        self.asked_s = self._loop.time()
        self.client: Client | None = None
        self.attached_once = False
        self.unanswered = 0
        self.closed = False
        seconds = limits.handshake_timeout_ns / 1e9
        self._handshake: asyncio.TimerHandle | None = self._loop.call_later(seconds, self._handshake_late)
        self._read_on()

    # --- receiving

    def _read_on(self) -> None:
        if not self._reading and not self.closed:
            self._loop.add_reader(self._fd, self._control.guarded, self._readable)
            self._reading = True

    def _read_off(self) -> None:
        if self._reading:
            self._loop.remove_reader(self._fd)
            self._reading = False

    def _readable(self) -> None:
        try:
            # A plain recv: the kernel drops descriptors that a peer may have sent along.
            data = self._sock.recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        self.asked_s = self._loop.time()
        try:
            self._asks.extend(self._decoder.feed(data))
            if len(self._asks) + self.unanswered > limits.requests_in_flight_max:
                raise ProtocolError(
                    f"more than {limits.requests_in_flight_max} requests without an answer", code="in-flight"
                )
        except ProtocolError as error:
            self.broke_protocol(error)
            return
        self._turn()

    def read_rest(self) -> None:
        """The peer is going: what it said before that comes first, such as that it leaves in order."""
        if not self.closed:
            self._readable()

    def _turn(self) -> None:
        self._turn_scheduled = False
        for _ in range(REQUESTS_PER_TURN):
            if self.closed or not self._asks or not self._may_ask():
                break
            self._control.handle(self, self._asks.popleft())
        if self.closed:
            return
        if self._asks or self._out_bytes > OUT_BYTES_MAX:
            self._read_off()
            self._go_on()
        else:
            self._read_on()

    def _may_ask(self) -> bool:
        """Whether this peer has taken its answers, and is not waiting for too many."""
        return self._out_bytes <= OUT_BYTES_MAX and self.unanswered < REQUESTS_PER_TURN

    def _go_on(self) -> None:
        if self._asks and self._may_ask() and not self._turn_scheduled:
            self._turn_scheduled = True
            self._loop.call_soon(self._control.guarded, self._turn)

    def answered(self) -> None:
        """One of the asks that take a while has its answer."""
        self.unanswered -= 1
        if not self.closed:
            self._go_on()

    def _handshake_late(self) -> None:
        self._handshake = None
        self.broke_protocol(ProtocolError("no hello within 5 s", code="handshake"))

    def greeted(self, hello: wire.Hello) -> None:
        """The handshake is done."""
        self.hello = hello
        if self._handshake is not None:
            self._handshake.cancel()
            self._handshake = None

    # --- sending

    def send(self, body: wire.Body, id: int, fds: Sequence[int] = (), to_close: Sequence[int] = ()) -> None:
        """Queue a message; `fds` ride on its first byte, `to_close` are closed once they left."""
        if self.closed:
            for fd in to_close:
                os.close(fd)
            return
        try:
            data = frames.encode(body.to_map(id))
        except ProtocolError as error:
            data = frames.encode(wire.Error.of(error).to_map(id))
        self._out.append(_Chunk(memoryview(data), tuple(fds), tuple(to_close)))
        self._out_bytes += len(data)
        if not self._writing:
            self._flush()

    def _flush(self) -> None:
        while self._out:
            chunk = self._out[0]
            rights = (
                [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", chunk.fds))] if chunk.fds else []
            )
            try:
                sent = self._sock.sendmsg([chunk.data], rights, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                self.close()
                return
            self._out_bytes -= sent
            chunk.data = chunk.data[sent:]
            chunk.fds = ()
            self._close_sent(chunk)
            if not chunk.data:
                self._out.popleft()
        self._write_when(bool(self._out))

    @staticmethod
    def _close_sent(chunk: _Chunk) -> None:
        for fd in chunk.to_close:
            os.close(fd)
        chunk.to_close = ()

    def _write_when(self, wanted: bool) -> None:
        if wanted and not self._writing:
            self._loop.add_writer(self._fd, self._control.guarded, self._writable)
        elif not wanted and self._writing:
            self._loop.remove_writer(self._fd)
        self._writing = wanted

    def _writable(self) -> None:
        self._flush()
        if not self.closed and self._out_bytes <= OUT_BYTES_MAX // 2 and not self._reading:
            self._turn()

    @property
    def pending_bytes(self) -> int:
        """Bytes that the peer has not taken yet."""
        return self._out_bytes

    def is_idle_admin(self, since_s: float) -> bool:
        """Whether it only administers, waits for nothing, and asked for nothing after `since_s`."""
        if self.hello is None or self.hello.role != "admin" or self.asked_s > since_s:
            return False
        return not (self._asks or self.unanswered or self._out_bytes)

    # --- ending

    def broke_protocol(self, error: ProtocolError) -> None:
        """What it said is no message: count it, say why, and close."""
        self._control.refusals.protocol_error(self.peer, error)
        self.fail(error)

    def fail(self, error: KvdError) -> None:
        """Say why, then close."""
        self._control.errors += 1
        self.send(wire.Error.of(error), 0)
        self.close()

    def close(self) -> None:
        """Close the connection. Its client, if any, is disconnected, not gone."""
        if self.closed:
            return
        self.closed = True
        self._read_off()
        self._write_when(False)
        if self._handshake is not None:
            self._handshake.cancel()
        for chunk in self._out:
            self._close_sent(chunk)
        self._out.clear()
        self._sock.close()
        self._control.closed(self)
        client, self.client = self.client, None
        if client is not None:
            client.on_disconnect = None
            self._control.clients.disconnect(client, None)
        elif not self._control.owns_peer(self.peer):
            self.peer.close()
        self._control.let_go(self.peer)


class Control:
    """The control socket of the daemon."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        listener: socket.socket,
        domain: Domain,
        clients: Clients,
        admin: Admin,
        access: AccessConfig,
        turns: Turns,
        guarded: Guard,
    ) -> None:
        self.loop = loop
        self.clients = clients
        self.connections: set[Connection] = set()
        self.errors = 0
        self.accepted = 0
        self._listener = listener
        self._domain = domain
        self._admin = admin
        self._access = access
        self._turns = turns
        self._connections_max = clients.slots_max + CONNECTIONS_SPARE
        self.per_uid_max = connections_per_uid(access, clients.slots_max)
        self._of_uid: Counter[int] = Counter()
        self.guarded = guarded
        clients.on_forgotten = self.let_go
        self.refusals = Refusals(loop.time, lambda: (connection.peer for connection in self.connections))
        self.ghosts: Ghosts | None = None
        self._own_uid = os.getuid()
        self._accepting = False

    def start(self) -> None:
        """Accept connections."""
        if not self._accepting and self._listener.fileno() >= 0:
            self.loop.add_reader(self._listener.fileno(), self.guarded, self._accept)
            self._accepting = True

    def stop_accepting(self) -> None:
        """No new connections; those that are there go on."""
        if self._accepting:
            self.loop.remove_reader(self._listener.fileno())
            self._accepting = False

    def close(self) -> None:
        """Close all connections and the listening socket: clients see EOF."""
        self.stop_accepting()
        for connection in list(self.connections):
            connection.close()
        self._listener.close()

    def owns_peer(self, peer: Peer) -> bool:
        """Whether a client that is still there uses this peer's pidfd."""
        return any(client.peer is peer for client in self.clients.by_slot.values())

    def let_go(self, peer: Peer) -> None:
        """Of the namespaces that this peer was told, if neither its connection nor its client is there any more."""
        if not self.owns_peer(peer) and not any(other.peer is peer for other in self.connections):
            self._domain.namespaces.let_go(peer)

    def _accept(self) -> None:
        for _ in range(REQUESTS_PER_TURN):
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # out of descriptors or memory: try again later, do not spin
                _log.error("accept_failed", reason=error.strerror)
                self.stop_accepting()
                self.loop.call_later(ACCEPT_PAUSE_S, self.start)
                return
            self.accepted += 1
            sock.setblocking(False)
            try:
                peer = identify(sock)
            except UsageError as error:
                _refuse(sock, error)
                continue
            refusal = self._no_room(peer.uid)
            if refusal is not None and self._is_own(peer.uid) and self._end_idle_admin(peer.uid):
                refusal = self._no_room(peer.uid)
            if refusal is not None:
                self.refusals.connection(peer, refusal)
                _refuse(sock, refusal)
                peer.close()
                continue
            connection = Connection(self, sock, peer)
            connection.is_reserve = self._of_uid[peer.uid] >= self.per_uid_max
            self._of_uid[peer.uid] += 1
            self.connections.add(connection)

    def _is_own(self, uid: int) -> bool:
        """Whether it is root or the daemon's own user."""
        return uid in (0, self._own_uid)

    def _no_room(self, uid: int) -> KvdError | None:
        """Why this user gets no connection now."""
        spare = CONNECTIONS_RESERVED if self._is_own(uid) else 0
        if self._of_uid[uid] >= self.per_uid_max + spare:
            return self._too_many(uid)
        # Root and the daemon's own user get in whatever others hold open: someone must be able to look.
        if len(self.connections) >= self._connections_max and not self._is_own(uid):
            return CapacityError(
                f"{len(self.connections)} control connections are open, as many as this daemon has room for; close "
                "some, or raise clients.max",
                code="connections", connections_max=self._connections_max,
            )  # fmt: skip
        return None

    def _end_idle_admin(self, uid: int) -> bool:
        """Close the connection for administration of this user that was silent longest, if that is long enough:
        what somebody forgot to close must not keep everybody from looking.
        """
        since_s = self.loop.time() - ADMIN_IDLE_S
        idle = [one for one in self.connections if one.peer.uid == uid and one.is_idle_admin(since_s)]
        if not idle:
            return False
        oldest = min(idle, key=lambda one: one.asked_s)
        idle_s = round(self.loop.time() - oldest.asked_s)
        _log.info("idle_connection_closed", uid=uid, pid=oldest.peer.pid, idle_s=idle_s)
        told = "this connection was idle and made room for another one; connect again"
        oldest.send(wire.Error.of(UnavailableError(told, code="idle", retry=Retry.REATTACH)), 0)
        oldest.close()
        return True

    def _too_many(self, uid: int) -> CapacityError:
        return CapacityError(
            f"user {uid} has {self._of_uid[uid]} control connections open, as many as one may; close some (each "
            "connected store is one), or raise access.connections_per_uid",
            code="connections", uid=uid, connections_max=self.per_uid_max,
        )  # fmt: skip

    def closed(self, connection: Connection) -> None:
        """A connection has ended."""
        self.connections.discard(connection)
        uid = connection.peer.uid
        self._of_uid[uid] -= 1
        if not self._of_uid[uid]:
            del self._of_uid[uid]

    # --- asks

    def handle(self, connection: Connection, message: frames.Message) -> None:
        """Answer one ask."""
        try:
            id = wire.id_of(message)
        except ProtocolError as error:
            connection.broke_protocol(error)
            return
        try:
            _, ask = wire.parse_ask(message)
            if connection.hello is None:
                self._hello(connection, id, ask)
            else:
                self._dispatch(connection, id, ask)
        except KvdError as error:
            if error.code.startswith("KVD-INVARIANT"):
                raise
            connection.send(wire.Error.of(error), id)
            if connection.hello is None:
                self.errors += 1
                if isinstance(error, ProtocolError):
                    self.refusals.protocol_error(connection.peer, error)
                connection.close()

    def _hello(self, connection: Connection, id: int, ask: wire.Ask) -> None:
        if not isinstance(ask, wire.Hello):
            raise ProtocolError(f"the first message is hello, not {ask.type}", code="handshake")
        self._check_access(connection.peer)
        if connection.is_reserve and ask.role != "admin":
            error = self._too_many(connection.peer.uid)
            self.refusals.connection(connection.peer, error)
            raise error
        protocol = wire.agree(ask, VERSION)
        connection.greeted(ask)
        epoch = self._domain.identity.epoch.to_bytes(8, "big")
        connection.send(wire.Welcome(protocol, VERSION, wire.LAYOUT_VERSION, epoch, os.getpid()), id)

    def _check_access(self, peer: Peer) -> None:
        access = self._access
        if self._is_own(peer.uid) or (not access.uids and not access.gids):
            return
        if peer.uid in access.uids or peer.uid in access.admin_uids:
            return
        if not {peer.gid, *peer.groups}.isdisjoint(access.gids):
            return
        raise UsageError(
            f"user {peer.uid} may not use this daemon; an administrator can add it to access.uids or access.gids",
            code="denied", uid=peer.uid,
        )  # fmt: skip

    def _dispatch(self, connection: Connection, id: int, ask: wire.Ask) -> None:
        match ask:
            case wire.Attach():
                self._attach(connection, id, ask)
            case wire.Detach():
                self._detach(connection, id, ask)
            case wire.Left():
                epoch = int.from_bytes(ask.epoch, "big")
                waited = self.ghosts is not None and self.ghosts.left(connection.peer, epoch, ask.slot)
                connection.send(wire.Noted(waited), id)
            case wire.Namespace():
                self._namespace(connection, id, ask)
            case wire.Call():
                self._call(connection, id, ask)
            case wire.Hello():
                raise ProtocolError("hello is said once", code="handshake")

    def _answer_later(self, connection: Connection, id: int) -> Callable[[object], None]:
        """Counts an ask as unanswered until what is returned is called with its result or a KvdError."""

        def done(outcome: object) -> None:
            body = wire.Error.of(outcome) if isinstance(outcome, KvdError) else outcome
            connection.send(body if isinstance(body, wire.Body) else wire.Result(body), id)
            connection.answered()

        connection.unanswered += 1
        return done

    def _call(self, connection: Connection, id: int, ask: wire.Call) -> None:
        done = self._answer_later(connection, id)
        try:
            self._admin.call(connection.peer, ask.method, ask.params, done, lambda: not connection.closed)
        except KvdError:
            connection.unanswered -= 1
            raise

    def _namespace(self, connection: Connection, id: int, ask: wire.Namespace) -> None:
        done = self._answer_later(connection, id)
        peer = connection.peer

        def step() -> bool:
            if not connection.closed:
                try:
                    record = self._domain.namespaces.register(
                        ask.manifest,
                        ask.label,
                        (peer.pid, peer.start_ticks),
                        peer,
                        uid=None if self._is_own(peer.uid) else peer.uid,
                    )
                except KvdError as error:
                    if isinstance(error, InvariantError):
                        raise
                    done(error)
                else:
                    done(wire.Namespaced(record.number))
            return True

        self._turns.submit(peer.uid, peer, step)

    def _attach(self, connection: Connection, id: int, ask: wire.Attach) -> None:
        hello = connection.hello
        if hello is None or hello.role != "engine":
            raise UsageError("an admin connection cannot attach; connect with role engine", code="role")
        if connection.attached_once:
            raise UsageError("a connection attaches once; open another one", code="attached")
        if ask.domain != self._domain.name:
            raise UsageError(
                f"there is no domain {ask.domain!r}; this daemon has {self._domain.name!r}",
                code="domain", domain=ask.domain,
            )  # fmt: skip
        writable = ask.access == "write"
        client, fds, wake = self.clients.attach(connection.peer, hello.client, writable=writable)
        connection.client, connection.attached_once = client, True
        client.on_disconnect = lambda error: self._disconnected(connection, error)
        client.on_wake_closed = connection.read_rest
        sizes = [segment.size_bytes for segment in self._domain.segments]
        first, rest = fds[: limits.fds_per_message_max], fds[limits.fds_per_message_max :]
        connection.send(
            wire.Attached(client.slot, self._domain.name, sizes, len(first), bool(rest)),
            id,
            first,
            (wake.detach(),),
        )
        while rest:
            part, rest = rest[: limits.fds_per_message_max], rest[limits.fds_per_message_max :]
            connection.send(wire.Segments(len(part), bool(rest)), id, part)

    def _detach(self, connection: Connection, id: int, ask: wire.Detach) -> None:
        client = connection.client
        if client is None:
            raise UsageError("this connection is not attached", code="detached")

        def done(outcome: Held | ProtocolError) -> None:
            connection.client = None
            if isinstance(outcome, Held):
                connection.send(wire.Detached(outcome.leases, outcome.items), id)
            else:
                connection.send(wire.Error.of(outcome), id)

        self.clients.detach(client, done, gives_back=ask.gives_back)

    def _disconnected(self, connection: Connection, error: KvdError | None) -> None:
        """The client was disconnected from another side (ring, death, policy): its connection ends too."""
        connection.client = None
        if error is not None:
            connection.fail(error)
        else:
            connection.close()


def connections_per_uid(access: AccessConfig, clients_max: int) -> int:
    """How many connections one user may have: as configured, or its clients and some for kvctl."""
    if access.connections_per_uid == "auto":
        return clients_max + CONNECTIONS_SPARE_OF_UID
    return access.connections_per_uid


def _refuse(sock: socket.socket, error: KvdError) -> None:
    with contextlib.suppress(OSError):
        sock.send(frames.encode(wire.Error.of(error).to_map(0)), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
    sock.close()
