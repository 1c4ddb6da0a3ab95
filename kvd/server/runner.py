"""Rings in, events to the core, answers out.

Owns no state but counters; event-loop thread only. For each client that woke the daemon it takes frames from the
ring (already copied out of shared memory), checks every field, looks up the facts and steps the core, all in one
turn. Fairness: after TURN_NS a client's remaining frames wait until the loop went round. Backpressure: while a
client's ring of answers is full, its asks are not handled. A payload that cannot be right disconnects this
client only.
"""

from __future__ import annotations

import asyncio
import struct
from array import array
from collections.abc import Callable
from functools import lru_cache
from typing import Final

from kvd.core import events as ev
from kvd.errors import CapacityError, InvariantError, KvdError, ProtocolError, Retry, UsageError
from kvd.layout.shards import Split
from kvd.server.clients import Client, Clients
from kvd.server.domain import Domain
from kvd.server.supervise import Guard
from kvd.shm import messages
from kvd.shm.messages import Cq, Sq

TURN_NS: Final = 1_000_000
POP_FRAMES: Final = 16
FRAMES_ALL: Final = 0xFFFFFFFF  # more than any ring holds
TOUCHES_MAX: Final = 1024  # of one look at one client; the newest count, the ring is lossy anyway
TOUCHES_AGE_NS: Final = 1_000_000
LEASES_AGE_NS: Final = 10_000_000
RETRY_MIN_S: Final = 0.001
RETRY_MAX_S: Final = 0.25

_RESERVE, _PUBLISH, _ABORT, _PING = (int(kind) for kind in Sq)
_RESERVED, _PUBLISHED, _ABORTED, _PONG, _ERROR = (int(kind) for kind in Cq)
_TOUCH: Final = struct.Struct("<QQIIIIQIIQ8x")
_NO_PARENT: Final = messages.NO_PARENT
_PUSHED_ASLEEP: Final = 3
_HOSTILE: Final = -1


split_of = lru_cache(256)(
    Split.from_code
)  # a split says what it is by its code; UsageError(split) if none has it


class Runner:
    """Serves the rings of all clients of one domain."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        domain: Domain,
        clients: Clients,
        *,
        leased_over: str,
        guard: Guard,
    ) -> None:
        self._loop = loop
        self._domain = domain
        self._clients = clients
        self._leased_over = leased_over
        self._guarded = guard
        self._touches_ns = 0
        self._admin_replies: dict[int, Callable[[ev.AdminReply | ev.ErrorReply], None]] = {}
        self._admin_op = 0
        self.frames = 0
        self.replies_deferred = 0
        self.lease_refusals = 0
        domain.performers.update(
            {
                ev.ReservedReply: self._reserved,
                ev.PublishedReply: self._published,
                ev.AbortedReply: self._aborted,
                ev.ErrorReply: self._refused,
                ev.AdminReply: self._administrated,
                ev.DoAgain: self._again_later,
            }
        )
        clients.drain = self.drain
        clients.drain_rest = self.drain_rest

    # --- turns

    def drain(self, client: Client) -> None:
        """Serve a client that woke the daemon until its ring is empty or its turn is over."""
        if client.attached and not client.draining and client.leaving is None:
            self._guarded(self._turn, client)

    def drain_rest(self, client: Client) -> None:
        """Handle what is in the ring now (the client leaves), in turns, and nothing that is pushed later."""
        self._fetch(client, FRAMES_ALL)
        self._rest(client)

    def _rest(self, client: Client) -> None:
        end_ns = self._domain.clock.now_ns() + TURN_NS
        while client.attached and client.inbox:
            client.replies.clear()
            self._handle(client, client.inbox.popleft())
            if client.inbox and self._domain.clock.now_ns() > end_ns:
                self._loop.call_soon(self._guarded, self._rest, client)
                return
        if client.attached:
            self._touches_of(client)
        while client.leaving:  # emptied: what follows holds on to the client
            client.leaving.pop(0)()

    def _turn(self, client: Client) -> None:
        client.draining = False
        if not client.attached or client.leaving is not None or not self._flush(client):
            return
        client.region.awake()
        end_ns = self._domain.clock.now_ns() + TURN_NS
        while client.attached and client.leaving is None and not client.replies:
            if client.inbox or self._fetch(client):
                self._handle(client, client.inbox.popleft())
                if self._domain.clock.now_ns() > end_ns:
                    client.draining = True
                    self._loop.call_soon(self._guarded, self._turn, client)
                    return
            elif not client.attached or client.region.may_sleep():
                break
        self._touches_of(client)

    def _fetch(self, client: Client, frames_max: int = POP_FRAMES) -> bool:
        """Take frames from the ring into the inbox. False when there are none, or the ring is hostile."""
        try:
            client.inbox.extend(client.region.pop(frames_max))
        except ValueError as error:
            self._clients.disconnect(client, ProtocolError(f"hostile ring: {error}", code="ring"))
        return bool(client.inbox)

    def _handle(self, client: Client, frame: tuple[int, int, bytes]) -> None:
        client.frames += 1
        self.frames += 1
        try:
            self._frame(client, *frame)
        except ProtocolError as error:
            self._clients.disconnect(client, error)

    # --- frames

    def _frame(self, client: Client, kind: int, op: int, payload: bytes) -> None:
        if kind == _RESERVE:
            self._reserve(client, op, messages.parse_reserve(payload))
        elif kind == _PUBLISH:
            publish = messages.parse_publish(payload)
            self._domain.step(
                ev.Publish(
                    client.slot, op, publish.reservation, publish.first, publish.checksums, publish.include
                )
            )
        elif kind == _ABORT:
            abort = messages.parse_abort(payload)
            self._domain.step(ev.Abort(client.slot, op, abort.reservation, abort.first, abort.count))
        elif kind == _PING:
            if payload:
                raise ProtocolError(
                    f"malformed PING of {len(payload)} bytes: it is empty", code="ring", kind="PING"
                )
            self._push(client, _PONG, op, b"")
        else:
            raise ProtocolError(f"unknown ring message of type {kind}", code="ring", kind=kind)

    def _reserve(self, client: Client, op: int, ask: messages.Reserve) -> None:
        refusal = self._refusal(client, ask)
        if refusal is not None:
            self._push(client, _ERROR, op, messages.pack_error(refusal))
            return
        # What this client looked up before it asks to write was not there then; afterwards it would be being written.
        self._touches_of(client)
        self._drain_touches()
        indices = bytes([member.index for member in ask.members])
        shape = (ask.split, ask.family_members)
        if ask.parent == _NO_PARENT:
            entries, present = self._domain.table.probe(ask.keys, indices, shape)
            parent_entry = ev.NONE
        else:
            entries, present = self._domain.table.probe(ask.parent + ask.keys, indices, shape)
            parent_entry = int.from_bytes(entries[:4], "little")
            entries, present = entries[4:], present[len(indices) :]
        self._domain.step(
            ev.Reserve(
                client=client.slot,
                op=op,
                request=ask.request,
                namespace=ask.namespace,
                keys=ask.keys,
                parent_entry=parent_entry,
                parent_key8=int.from_bytes(ask.parent[:8], "little"),
                members=ask.members,
                split=ask.split,
                family_members=ask.family_members,
                skip_pending=ask.skip_pending,
                entries=memoryview(entries).cast("I"),
                present=present,
            )
        )

    def _refusal(self, client: Client, ask: messages.Reserve) -> KvdError | None:
        """Why this reservation is well-formed and still cannot be."""
        if not self._domain.namespaces.may_use(client.peer, ask.namespace):
            return UsageError(
                f"namespace {ask.namespace} is not registered by this client; ask for it with its manifest first, on "
                "the connection that attached",
                code="namespace", namespace=ask.namespace,
            )  # fmt: skip
        if ask.split:
            try:
                split_of(ask.split)
            except UsageError as error:
                return error
        limit_bytes = self._domain.sizes.leased_bytes_max
        if self._leased_over == "report" or limit_bytes is None:
            return None
        if client.over_leased or self._domain.clock.now_ns() - client.leased_ns > LEASES_AGE_NS:
            self._clients.look_at_leases(client, limit_bytes)
        if not client.over_leased:
            return None
        self.lease_refusals += 1
        return CapacityError(
            f"this client holds leases on {client.leased_bytes} B, more than its limit of "
            f"{limit_bytes} B; release some",
            code="leased", leased_bytes=client.leased_bytes, limit_bytes=limit_bytes, retry=Retry.AFTER,
        )  # fmt: skip

    # --- answers

    def _reserved(self, reply: ev.ReservedReply) -> None:
        self._answer(
            reply, _RESERVED, messages.pack_reserved(reply.reservation, reply.places, reply.statuses)
        )

    def _published(self, reply: ev.PublishedReply) -> None:
        self._answer(reply, _PUBLISHED, messages.pack_published(reply.statuses))

    def _aborted(self, reply: ev.AbortedReply) -> None:
        self._answer(reply, _ABORTED, messages.pack_aborted(reply.count))

    def _refused(self, reply: ev.ErrorReply) -> None:
        if reply.client == ev.ADMIN:
            self._administrated(reply)
        else:
            self._answer(reply, _ERROR, messages.pack_error(reply.error))

    def _answer(
        self,
        reply: ev.ReservedReply | ev.PublishedReply | ev.AbortedReply | ev.ErrorReply,
        kind: int,
        payload: bytes,
    ) -> None:
        client = self._clients.by_slot.get(reply.client)
        if client is not None and client.attached:
            self._push(client, kind, reply.op, payload)

    def _administrated(self, reply: ev.AdminReply | ev.ErrorReply) -> None:
        done = self._admin_replies.pop(reply.op, None)
        if done is None:
            raise InvariantError(f"the core answered administration {reply.op}, which nobody asked")
        done(reply)

    def _push(self, client: Client, kind: int, op: int, payload: bytes) -> None:
        if not client.replies:
            pushed = self._pushed(client, kind, op, payload)
            if pushed == _PUSHED_ASLEEP:
                self._clients.wake(client)
            if pushed:
                return
        if client.leaving is not None:
            return  # nobody reads it any more, and what is left of the ring does not wait for it
        client.replies.append((kind, op, payload))
        self.replies_deferred += 1
        self._retry_later(client)

    def _pushed(self, client: Client, kind: int, op: int, payload: bytes) -> int:
        """Push an answer: 0 if there is no room. A client that lies about what it has read is disconnected."""
        try:
            return client.region.push(kind, op, payload)
        except ValueError as error:
            if len(payload) > client.region.payload_bytes_max:
                raise  # ours
            self._clients.disconnect(client, ProtocolError(f"hostile ring: {error}", code="ring"))
            return _HOSTILE

    def _flush(self, client: Client) -> bool:
        """Push answers that waited for room. False while some still wait, or the client is no longer served."""
        while client.replies:
            pushed = self._pushed(client, *client.replies[0])
            if pushed == _HOSTILE:
                return False
            if not pushed:
                self._retry_later(client)
                return False
            client.replies.popleft()
            client.retry_s = 0.0
            if pushed == _PUSHED_ASLEEP:
                self._clients.wake(client)
        return True

    def _retry_later(self, client: Client) -> None:
        if client.retry is None and client.attached and client.leaving is None:
            client.retry_s = min(max(2 * client.retry_s, RETRY_MIN_S), RETRY_MAX_S)
            client.retry = self._loop.call_later(client.retry_s, self._retry, client)

    def _retry(self, client: Client) -> None:
        client.retry = None
        self.drain(client)

    def flush_all(self) -> None:
        """At the end: what fits goes out now."""
        for client in list(self._clients.by_slot.values()):
            if client.attached:
                self._flush(client)
                self._clients.wake(client)

    # --- recency, leases, once a second

    def _drain_touches(self) -> None:
        """Before room is made: what is being used must not look idle. At most once a millisecond."""
        now_ns = self._domain.clock.now_ns()
        if now_ns - self._touches_ns >= TOUCHES_AGE_NS:
            self._touches_ns = now_ns
            for client in self._clients.by_slot.values():
                self._touches_of(client)

    def read_touches(self) -> None:
        """Now, for an operator who asks about a request of this very moment."""
        self._touches_ns = 0
        self._drain_touches()

    def _touches_of(self, client: Client) -> None:
        rows = client.region.touches()
        if rows:
            rows = rows[-TOUCHES_MAX * _TOUCH.size :]
            families_max = self._domain.sizes.families_max
            touches = [
                touch
                for touch in map(ev.Touch._make, _TOUCH.iter_unpack(rows))
                if (touch.deepest_entry < families_max or touch.deepest_entry == ev.NONE)
                and 1 <= touch.kind <= 4
            ]
            if touches:
                self._domain.step(ev.Touched(client.slot, touches))

    def tick(self) -> None:
        """Once a second: touches, leases over the limit, the core's own housekeeping."""
        limit_bytes = self._domain.sizes.leased_bytes_max
        for client in list(self._clients.by_slot.values()):
            self._touches_of(client)
            if (
                self._clients.look_at_leases(client, limit_bytes)
                and self._leased_over == "disconnect"
                and client.attached
            ):
                self._clients.kill(
                    client,
                    CapacityError(
                        f"this client held leases on {client.leased_bytes} B, more than its limit of {limit_bytes} B",
                        code="leased", leased_bytes=client.leased_bytes, limit_bytes=limit_bytes,
                    ),
                )  # fmt: skip
        self._domain.step(ev.Tick())

    # --- administration

    def administrate(
        self, make: Callable[[int], ev.Event], done: Callable[[ev.AdminReply | ev.ErrorReply], None]
    ) -> None:
        """Step an administrative event; `done` gets the core's answer, now or later."""
        self._admin_op += 1
        self._admin_replies[self._admin_op] = done
        self._domain.step(make(self._admin_op))

    def withdraw(self, entry: int) -> None:
        """Take a family that is damaged, and what lies behind it, out of use; the core notes what came of it."""
        self.administrate(lambda op: ev.Withdraw(op, array("I", [entry])), lambda _reply: None)

    def _again_later(self, effect: ev.DoAgain) -> None:
        self._loop.call_soon(self._guarded, self._again, effect.token)

    def _again(self, token: int) -> None:
        self._domain.step(ev.Again(token))
