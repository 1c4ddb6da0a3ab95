"""Mutations through the rings: submit, wait for the answer, from threads and from event loops.

Owns the numbering of operations and who waits for which answer. Any thread may call; one of them at a time (the leader)
sleeps on the wake socket and hands answers to the others. An event loop registers once and is woken by the same socket.

An answer that comes after its caller gave up is not lost: a late RESERVED is given back with ABORT, so that a timeout
never leaks slots. Messages that nobody waits for (ABORT) and that the ring has no room for are kept until it has; many
answers that nobody waits for are taken out of the other ring, since a daemon that finds no room in it reads no further.
While any of this is due a thread of its own sees to it, so that an idle client does not sit on what it was granted too
late.

    waiting ── answer ──▶ done
       └── deadline ──▶ abandoned ── RESERVED arrives ──▶ ABORT due ──▶ sent

Anybody may take answers out of the ring; whoever does and finds the leader asleep stirs it, through an eventfd: its own
answer may be among them, and the byte that should have woken it may have been read by an event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Protocol

from kvd import limits
from kvd.clientlib import background, call_errors
from kvd.clientlib.native_errors import NATIVE, translate
from kvd.errors import KvdError, ProtocolError, UsageError
from kvd.shm import messages
from kvd.shm.messages import Cq, Sq

_POLL_FRAMES = 64
_FULL_RING_PAUSE_NS = 1_000_000
_LATE_LOOK_NS = 20_000_000
_POSTED_MAX = 512  # answers that may lie in the ring until somebody calls: the smallest has room for them

Answer = tuple[int, bytes]


class Rings(Protocol):
    """What is used of the native client."""

    def submit(self, type: int, op: int, payload: bytes, /) -> int: ...
    def poll(self, frames_max: int, /) -> list[tuple[int, int, bytes]]: ...
    def wait(self, wake_fd: int, timeout_ns: int, stir_fd: int, /) -> int: ...
    def may_sleep(self) -> bool: ...
    def awake(self) -> None: ...


class Reservation(Protocol):
    """What is used of `Writes`."""

    def give_back(self) -> int: ...


class _Waiter:
    __slots__ = ("answer", "future", "loop")

    def __init__(self) -> None:
        self.answer: Answer | KvdError | None = None
        self.future: asyncio.Future[Answer] | None = None
        self.loop: asyncio.AbstractEventLoop | None = None

    def resolve(self, answer: Answer | KvdError) -> bool:
        """Hand it over. False: its event loop was closed, nobody will ever look."""
        self.answer = answer
        if self.future is not None and self.loop is not None:
            try:
                self.loop.call_soon_threadsafe(_settle, self.future, answer)
            except RuntimeError:
                self.answer = call_errors.loop_closed()
                return False
        return True


def _settle(future: asyncio.Future[Answer], answer: Answer | KvdError) -> None:
    if future.done():
        return
    if isinstance(answer, KvdError):
        future.set_exception(answer)
    else:
        future.set_result(answer)


class _Ends:
    """The descriptors of a Calls, and what is said when it was dropped without close. Knows no Calls."""

    def __init__(self, wake: socket.socket) -> None:
        self.wake = wake
        self.stir = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.loops: set[asyncio.AbstractEventLoop] = set()
        self.farewell: Callable[[], None] | None = None
        self._pid = os.getpid()

    def dropped(self) -> None:
        """Nobody refers to the Calls any more. In any thread; a forked child has but the descriptors."""
        if os.getpid() != self._pid:
            self.close()
            return
        if self.farewell is not None:
            self.farewell()
        for loop in list(self.loops):
            try:
                if loop.is_running():  # here or elsewhere: it may be in the middle of what `leave` changes
                    loop.call_soon_threadsafe(self.leave, loop)
                else:  # nobody says when it runs again
                    self.leave(loop)
            except RuntimeError:  # closed: it watches nothing any more
                self.loops.discard(loop)
        if not self.loops:
            self.close()

    def leave(self, loop: asyncio.AbstractEventLoop) -> None:
        """This loop, which runs here or nowhere, watches no more; the last one closes the descriptors."""
        if loop in self.loops:
            self.loops.discard(loop)
            loop.remove_reader(self.wake.fileno())
        if not self.loops:
            self.close()

    def close(self) -> None:
        """Close the descriptors; safe to repeat."""
        self.wake.close()
        stir, self.stir = self.stir, -1
        if stir >= 0:
            os.close(stir)


def _readable(calls: weakref.ref[Calls], ends: _Ends) -> None:
    """An event loop sees the wake socket. It must not keep alive who dropped the store."""
    alive = calls()
    if alive is None:
        ends.leave(asyncio.get_running_loop())
    else:
        alive._on_wake()


class Calls:
    """Operations in flight of one client. `lost` is the reason once the daemon is gone."""

    def __init__(self, rings: Rings, wake: socket.socket) -> None:
        self._rings = rings
        self._wake = wake
        self._ends = _Ends(wake)
        self._finalizer = weakref.finalize(self, self._ends.dropped)
        self._finalizer.atexit = False  # the end of the process says it all
        self._ops = itertools.count(1)
        self._waiting: dict[int, _Waiter] = {}
        self._changed = threading.Condition()  # re-entrant: a garbage collection under it may give slots back
        self._leader: int | None = None  # the thread that sleeps on the wake socket for all
        self._asleep = False
        self._closing = False
        self.reservations: weakref.WeakSet[Reservation] = weakref.WeakSet()  # what close gives back
        self._loops = self._ends.loops
        self._abandoned: set[int] = set()  # reservations nobody waits for any more
        self._due: deque[tuple[Sq, bytes]] = deque()  # what the ring had no room for, and nobody waits for
        self._posted: set[int] = set()  # sent, and the answers nobody waits for are still to come
        self._collector: threading.Thread | None = None
        self.lost: KvdError | None = None
        self.on_lost: Callable[[], None] | None = None

    # -- from threads -------------------------------------------------------------------------------------

    def call(self, kind: Sq, payload: bytes, deadline_s: float) -> Answer:
        """Submit and wait. Raises what the daemon answered, or UnavailableError at the deadline."""
        end_ns = time.monotonic_ns() + int(deadline_s * 1e9)
        waiter = _Waiter()
        op = self._submit(kind, payload, waiter, end_ns)
        try:
            self._wait(waiter, end_ns)
            if waiter.answer is None:
                raise call_errors.deadline(kind, deadline_s)
        except BaseException:
            self._give_up(kind, op, waiter)
            raise
        answer = waiter.answer
        if isinstance(answer, KvdError):
            raise answer
        return answer

    def _wait(self, waiter: _Waiter, end_ns: int) -> None:
        while waiter.answer is None:
            left_ns = end_ns - time.monotonic_ns()
            if left_ns <= 0:
                self._drain()  # it may have come while nobody looked
                return
            if not self._lead(left_ns):
                continue
            try:
                while waiter.answer is None and left_ns > 0:
                    if not self._drain():
                        self._sleep(left_ns, waiter)
                    left_ns = end_ns - time.monotonic_ns()
            finally:
                self._follow()

    def _lead(self, wait_ns: int) -> bool:
        """Become the leader, or wait for at most so long until something has changed and return False."""
        with self._changed:
            if self._leader is not None:
                self._changed.wait(wait_ns / 1e9)
                return False
            self._leader = threading.get_ident()
            return True

    def _follow(self) -> None:
        with self._changed:
            self._leader = None
            self._changed.notify_all()
            if self._closing:
                self._close_unused()
        # The leader took the wake bytes; loops that still wait must look for themselves.
        self._nudge_loops()

    def _sleep(self, left_ns: int, waiter: _Waiter | None = None) -> None:
        """As the leader: until a wake byte, a stir, or the time is over."""
        self._asleep = True  # before the looks that follow; who resolves looks at it afterwards
        try:
            if self.lost is not None or (waiter is not None and waiter.answer is not None):
                return
            result = self._rings.wait(self._wake.fileno(), left_ns, self._ends.stir)
        except NATIVE as error:
            self.fail(translate(error))
            return
        finally:
            self._asleep = False
        if result < 0:
            self._drain()
            self.fail(call_errors.gone())

    def _stir_leader(self) -> None:
        if self._asleep and self._leader != threading.get_ident():
            with contextlib.suppress(OSError):  # full: it is stirred already
                os.eventfd_write(self._ends.stir, 1)

    # -- from event loops ---------------------------------------------------------------------------------

    async def call_async(self, kind: Sq, payload: bytes, deadline_s: float) -> Answer:
        """As `call`, without blocking the loop."""
        loop = asyncio.get_running_loop()
        self._register(loop)
        end_ns = time.monotonic_ns() + int(deadline_s * 1e9)
        waiter = _Waiter()
        waiter.future, waiter.loop = loop.create_future(), loop
        try:
            op = await self._submit_async(kind, payload, waiter, end_ns)
        except BaseException:
            waiter.future.cancel()
            raise
        try:
            self._on_wake()
            async with asyncio.timeout(max(0.0, (end_ns - time.monotonic_ns()) / 1e9)):
                return await waiter.future
        except BaseException as error:
            self._give_up(kind, op, waiter)
            if isinstance(error, TimeoutError):
                raise call_errors.deadline(kind, deadline_s) from None
            raise

    async def _submit_async(self, kind: Sq, payload: bytes, waiter: _Waiter, end_ns: int) -> int:
        while (op := self._try_submit(kind, payload, waiter)) is None:
            if time.monotonic_ns() >= end_ns:
                raise call_errors.ring_full()
            self._drain()
            await asyncio.sleep(_FULL_RING_PAUSE_NS / 1e9)
        return op

    def _register(self, loop: asyncio.AbstractEventLoop) -> None:
        if loop in self._loops:
            return
        with self._changed:
            if self.lost is not None:
                return  # the call says so
            for known in [known for known in self._loops if known.is_closed()]:
                self._loops.discard(known)
            loop.add_reader(self._wake.fileno(), _readable, weakref.ref(self), self._ends)
            self._loops.add(loop)

    def _on_wake(self) -> None:
        if self._closing:
            self._leave_loop()
            return
        try:
            while data := self._wake.recv(4096, socket.MSG_DONTWAIT):
                if len(data) < 4096:
                    break
            else:
                self._drain()
                self.fail(call_errors.gone())
                self._leave_loop()
                return
        except BlockingIOError:
            pass
        except OSError as error:
            self.fail(call_errors.gone(error))
            self._leave_loop()
            return
        try:
            self._rings.awake()
            self._drain()
            while not self._rings.may_sleep():
                self._drain()
        except NATIVE as error:  # closed meanwhile, or the rings are not what they should be
            self.fail(translate(error))
            self._leave_loop()

    def _leave_loop(self) -> None:
        """A socket at its end is readable for ever: it must not spin the loop until it is closed."""
        loop = asyncio.get_running_loop()
        with self._changed:
            if loop in self._loops:
                self._loops.discard(loop)
                loop.remove_reader(self._wake.fileno())
            if self._closing:
                self._close_unused()

    def _nudge_loops(self) -> None:
        for loop in list(self._loops):
            with contextlib.suppress(RuntimeError):  # closed: whoever waited there is gone
                loop.call_soon_threadsafe(self._on_wake)

    # -- both ---------------------------------------------------------------------------------------------

    def _submit(self, kind: Sq, payload: bytes, waiter: _Waiter, end_ns: int) -> int:
        while (op := self._try_submit(kind, payload, waiter)) is None:
            left_ns = end_ns - time.monotonic_ns()
            if left_ns <= 0:
                raise call_errors.ring_full()
            # The ring drains as answers come; look again at each, at the latest after a pause.
            pause_ns = min(left_ns, _FULL_RING_PAUSE_NS)
            if self._lead(pause_ns):
                try:
                    if not self._drain():
                        self._sleep(pause_ns)
                finally:
                    self._follow()
        return op

    def _try_submit(self, kind: Sq, payload: bytes, waiter: _Waiter) -> int | None:
        if self._abandoned or self._due:
            self._drain()
        op = next(self._ops)
        with self._changed:  # who fails takes all that wait, and those that come later are refused
            if self.lost is not None:
                raise call_errors.refusal(kind, self.lost)
            self._waiting[op] = waiter
        try:
            pushed = 0 if self._due else self._rings.submit(kind, op, payload)
        except NATIVE as error:
            self._waiting.pop(op, None)
            raise call_errors.unfit(kind, payload, error) from None
        if not pushed:
            self._waiting.pop(op, None)
            if waiter.answer is not None:  # failed meanwhile
                raise call_errors.refusal(kind, self.lost or call_errors.ring_full())
            return None
        if pushed & 2:
            self.wake_daemon()
        return op

    def wake_daemon(self) -> None:
        """One byte to a daemon that sleeps; a full socket means that it has bytes to wake up to anyway."""
        try:
            self._wake.send(b"\0", socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            pass
        except OSError as error:
            self.fail(call_errors.gone(error))

    def _drain(self) -> bool:
        """Take what answers there are and hand them over; send what is due. Whether there was an answer."""
        try:
            frames = self._rings.poll(_POLL_FRAMES)
        except NATIVE as error:
            self.fail(translate(error))
            return False
        if frames:
            with self._changed:
                for kind, op, payload in frames:
                    self._hand_over(kind, op, payload)
                self._changed.notify_all()
            self._stir_leader()
        if self._due:
            self._send_due()
        return bool(frames)

    def _hand_over(self, kind: int, op: int, payload: bytes) -> None:
        waiter = self._waiting.pop(op, None)
        if waiter is None:
            self._late(kind, op, payload)
        elif kind == Cq.ERROR:
            waiter.resolve(messages.parse_error(payload))
        elif not waiter.resolve((kind, payload)):
            self._late(kind, op, payload)

    # -- late answers -------------------------------------------------------------------------------------

    def _give_up(self, kind: Sq, op: int, waiter: _Waiter) -> None:
        """The caller goes without its answer. A grant that has come, or is still to come, must be given back."""
        with self._changed:
            self._waiting.pop(op, None)
            if isinstance(waiter.answer, tuple):
                self._late(waiter.answer[0], op, waiter.answer[1])
            elif waiter.answer is None and self.lost is None:
                (self._abandoned if kind == Sq.RESERVE else self._posted).add(op)
                self._collect_if_due()

    def _collect_if_due(self) -> None:
        with self._changed:
            due = self._abandoned or self._due or len(self._posted) > _POSTED_MAX
            over = self._closing or background.leaving.is_set()  # an interpreter that ends runs no thread
            if due and self._collector is None and not over:
                self._collector = background.start(self._collect, "kvd-late")

    def _collect(self) -> None:
        """Send what is due and take the answers nobody waits for, until there is neither; led like any caller's work.

        A daemon whose answers find no room reads no further: what was sent is done only once its answer was taken.
        """
        while True:
            with self._changed:
                over = self.lost is not None or background.leaving.is_set()
                if over or not (self._abandoned or self._due or self._posted):
                    self._collector = None
                    self._changed.notify_all()
                    return
            pause_ns = _FULL_RING_PAUSE_NS if self._due else _LATE_LOOK_NS
            if self._lead(pause_ns):
                try:
                    if not self._drain():
                        self._sleep(pause_ns)
                finally:
                    self._follow()

    def _late(self, kind: int, op: int, payload: bytes) -> None:
        self._abandoned.discard(op)
        self._posted.discard(op)
        if kind != Cq.RESERVED:
            return
        reservation, _, statuses = messages.parse_reserved(payload)
        if reservation:
            self.post(Sq.ABORT, messages.pack_abort(reservation, 0, len(statuses)))

    def post(self, kind: Sq, payload: bytes) -> None:
        """Submit without waiting for the answer: now, or when the ring has room. Nothing if the daemon is gone."""
        if self.lost is not None:
            return
        self._due.append((kind, payload))
        self._send_due()
        self._collect_if_due()

    def _send_due(self) -> None:
        with self._changed:
            while self._due and self.lost is None:
                message = kind, payload = self._due[0]
                op = next(self._ops)
                try:
                    pushed = self._rings.submit(kind, op, payload)
                except NATIVE:  # closed meanwhile: everything comes back with that
                    self._due.clear()
                    return
                if not pushed:
                    return
                if self._due and self._due[0] is message:  # else what interrupted this has sent it, too
                    self._due.popleft()
                self._posted.add(op)
                if pushed & 2:
                    self.wake_daemon()

    def fail(self, error: KvdError) -> None:
        """The daemon is gone: everybody who waits is told, later calls raise at once."""
        with self._changed:
            first = self.lost is None
            if first:
                self.lost = error
            waiters = [waiter for waiter in self._waiting.values() if waiter.answer is None]
            self._due.clear()
            self._posted.clear()
            for waiter in waiters:
                waiter.resolve(error)
            self._changed.notify_all()
        self._stir_leader()
        if first and self.on_lost is not None:
            self.on_lost()

    def close(self) -> None:
        """Stop waiting, tell waiters, and close the wake socket once neither a thread nor an event loop looks at it.

        A loop of another thread leaves by itself, in its next turn; the socket is closed then.
        """
        self.fail(UsageError("this store was closed; connect again", code="closed"))
        with self._changed:
            if self._closing:
                return
            self._closing = True
            while self._leader is not None and self._leader != threading.get_ident():
                self._changed.wait()  # it was stirred: it must not poll a descriptor that is somebody else's by then
            with contextlib.suppress(OSError):  # the daemon's end is closed already
                self._wake.shutdown(socket.SHUT_RDWR)
            for loop in list(self._loops):
                if loop.is_closed() or _here(loop):
                    self._loops.discard(loop)
                    if not loop.is_closed():
                        loop.remove_reader(self._wake.fileno())
                else:
                    try:
                        loop.call_soon_threadsafe(self._on_wake)
                    except RuntimeError:  # closed just now
                        self._loops.discard(loop)
            self._close_unused()
            collector = self._collector
            if collector is None or collector is threading.current_thread():
                return
            # Wait before the join: whoever runs this in a finaliser or signal handler may have the lock from before.
            while self._collector is collector and collector.is_alive():
                self._changed.wait(_LATE_LOOK_NS / 1e9)
        collector.join()

    def _close_unused(self) -> None:
        if not self._loops and self._leader is None:
            self.abandon()

    def farewell(self, call: Callable[[], None]) -> None:
        """What is done first if this is dropped without close. It must not refer to this, and waits for nobody."""
        self._ends.farewell = call

    def abandon(self) -> None:
        """Close the descriptors and touch nothing else: the end, also in a forked child."""
        self._finalizer.detach()
        self._ends.close()


def _here(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether this thread may touch the loop: it runs here, or nowhere."""
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return not loop.is_running()


def expect(kind: Cq, answer: Answer) -> bytes:
    """The payload of an answer that must be of this kind."""
    if answer[0] != kind:
        raise ProtocolError(f"the daemon answered message {answer[0]} where {kind.name} was due", code="ring")
    return answer[1]


def check_batch(families: int, members: int) -> None:
    """Refuse a batch that one ring message cannot carry, before anything is asked for."""
    if families * members > limits.batch_items_max:
        most = limits.batch_items_max // members
        raise UsageError(
            f"a batch of {families} chunks × {members} members is over {limits.batch_items_max} items; reserve in "
            f"several batches of at most {most} chunks: chain[:{most}], then chain[{most}:{2 * most}], and so on",
            code="batch", families=families, members=members, chunks_max=most,
        )  # fmt: skip
