"""Mutations through the rings: submit, wait for the answer, from threads and from event loops.

Owns the numbering of operations and who waits for which answer. Any thread may call; one of them at a time (the leader)
sleeps on the wake socket and hands answers to the others. An event loop registers once and is woken by the same socket.

An answer that comes after its caller gave up is not lost: a late RESERVED is given back with ABORT, so that a timeout
never leaks slots. While such answers are due a thread of its own waits for them, so that an idle client does not sit on
what it was granted too late.

    waiting ── answer ──▶ done
       └── deadline ──▶ abandoned ── RESERVED arrives ──▶ ABORT sent
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from kvd import limits
from kvd.clientlib import background
from kvd.clientlib.native_errors import NATIVE, translate
from kvd.errors import CapacityError, KvdError, LifecycleError, ProtocolError, UnavailableError, UsageError
from kvd.shm import messages
from kvd.shm.messages import Cq, Sq

_POLL_FRAMES = 64
_FULL_RING_PAUSE_NS = 1_000_000
_LATE_LOOK_NS = 20_000_000

Answer = tuple[int, bytes]


class Rings(Protocol):
    """What is used of the native client."""

    def submit(self, type: int, op: int, payload: bytes, /) -> int: ...
    def poll(self, frames_max: int, /) -> list[tuple[int, int, bytes]]: ...
    def wait(self, wake_fd: int, timeout_ns: int, /) -> int: ...
    def may_sleep(self) -> bool: ...
    def awake(self) -> None: ...


class _Waiter:
    __slots__ = ("answer", "future", "loop")

    def __init__(self) -> None:
        self.answer: Answer | KvdError | None = None
        self.future: asyncio.Future[Answer] | None = None
        self.loop: asyncio.AbstractEventLoop | None = None

    def resolve(self, answer: Answer | KvdError) -> None:
        self.answer = answer
        if self.future is not None and self.loop is not None:
            self.loop.call_soon_threadsafe(_settle, self.future, answer)


def _settle(future: asyncio.Future[Answer], answer: Answer | KvdError) -> None:
    if future.done():
        return
    if isinstance(answer, KvdError):
        future.set_exception(answer)
    else:
        future.set_result(answer)


class Calls:
    """Operations in flight of one client. `lost` is the reason once the daemon is gone."""

    def __init__(self, rings: Rings, wake: socket.socket) -> None:
        self._rings = rings
        self._wake = wake
        self._next_op = 1
        self._waiting: dict[int, _Waiter] = {}
        self._changed = threading.Condition()
        self._leading = False
        self._loops: set[asyncio.AbstractEventLoop] = set()
        self._abandoned: set[int] = set()  # reservations nobody waits for any more
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
                raise _deadline(kind, deadline_s)
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
                return
            with self._changed:
                if self._leading:
                    self._changed.wait(left_ns / 1e9)
                    continue
                self._leading = True
            try:
                while waiter.answer is None and left_ns > 0:
                    if not self._drain():
                        self._sleep(left_ns)
                    left_ns = end_ns - time.monotonic_ns()
            finally:
                with self._changed:
                    self._leading = False
                    self._changed.notify_all()
                # The leader took the wake bytes; loops that still wait must look for themselves.
                self._nudge_loops()

    def _sleep(self, left_ns: int) -> None:
        if self._rings.wait(self._wake.fileno(), left_ns) < 0:
            self._drain()
            self.fail(_gone())

    # -- from event loops ---------------------------------------------------------------------------------

    async def call_async(self, kind: Sq, payload: bytes, deadline_s: float) -> Answer:
        """As `call`, without blocking the loop."""
        loop = asyncio.get_running_loop()
        self._register(loop)
        end_ns = time.monotonic_ns() + int(deadline_s * 1e9)
        waiter = _Waiter()
        waiter.future, waiter.loop = loop.create_future(), loop
        while (op := self._try_submit(kind, payload, waiter)) is None:
            if time.monotonic_ns() >= end_ns:
                raise _ring_full()
            await asyncio.sleep(_FULL_RING_PAUSE_NS / 1e9)
        try:
            self._on_wake()
            async with asyncio.timeout(deadline_s):
                return await waiter.future
        except BaseException as error:
            self._give_up(kind, op, waiter)
            if isinstance(error, TimeoutError):
                raise _deadline(kind, deadline_s) from None
            raise

    def _register(self, loop: asyncio.AbstractEventLoop) -> None:
        if loop not in self._loops:
            loop.add_reader(self._wake.fileno(), self._on_wake)
            self._loops.add(loop)

    def _on_wake(self) -> None:
        try:
            while data := self._wake.recv(4096, socket.MSG_DONTWAIT):
                if len(data) < 4096:
                    break
            else:
                self._drain()
                self.fail(_gone())
                self._leave_loop()
                return
        except BlockingIOError:
            pass
        except OSError as error:
            self.fail(_gone(error))
            self._leave_loop()
            return
        self._rings.awake()
        self._drain()
        while not self._rings.may_sleep():
            self._drain()

    def _leave_loop(self) -> None:
        """A socket at its end is readable for ever: it must not spin the loop until it is closed."""
        loop = asyncio.get_running_loop()
        if loop in self._loops:
            self._loops.discard(loop)
            loop.remove_reader(self._wake.fileno())

    def _nudge_loops(self) -> None:
        for loop in list(self._loops):
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._on_wake)

    # -- both ---------------------------------------------------------------------------------------------

    def _submit(self, kind: Sq, payload: bytes, waiter: _Waiter, end_ns: int) -> int:
        while (op := self._try_submit(kind, payload, waiter)) is None:
            left_ns = end_ns - time.monotonic_ns()
            if left_ns <= 0:
                raise _ring_full()
            # The ring drains as answers come; look again at each, at the latest after a pause.
            self._sleep(min(left_ns, _FULL_RING_PAUSE_NS))
            self._drain()
        return op

    def _try_submit(self, kind: Sq, payload: bytes, waiter: _Waiter) -> int | None:
        if self.lost is not None:
            raise _refusal(kind, self.lost)
        if self._abandoned:
            self._drain()
        op, self._next_op = self._next_op, self._next_op + 1
        self._waiting[op] = waiter
        pushed = self._rings.submit(kind, op, payload)
        if not pushed:
            del self._waiting[op]
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
            self.fail(_gone(error))

    def _drain(self) -> bool:
        frames = self._rings.poll(_POLL_FRAMES)
        if frames:
            with self._changed:
                for kind, op, payload in frames:
                    waiter = self._waiting.pop(op, None)
                    if waiter is None:
                        self._late(kind, op, payload)
                    elif kind == Cq.ERROR:
                        waiter.resolve(messages.parse_error(payload))
                    else:
                        waiter.resolve((kind, payload))
                self._changed.notify_all()
        return bool(frames)

    # -- late answers -------------------------------------------------------------------------------------

    def _give_up(self, kind: Sq, op: int, waiter: _Waiter) -> None:
        """The caller goes without its answer. A grant that has come, or is still to come, must be given back."""
        with self._changed:
            self._waiting.pop(op, None)
            if isinstance(waiter.answer, tuple):
                self._late(waiter.answer[0], op, waiter.answer[1])
            elif waiter.answer is None and kind == Sq.RESERVE and self.lost is None:
                self._abandoned.add(op)
                if self._collector is None:
                    self._collector = background.start(self._collect, "kvd-late")

    def _collect(self) -> None:
        """Wait for late answers until none is due; a thread's work, led like that of those who call."""
        while True:
            with self._changed:
                if not self._abandoned or self.lost is not None or background.leaving.is_set():
                    self._collector = None
                    return
                if self._leading:
                    self._changed.wait(_LATE_LOOK_NS / 1e9)
                    continue
                self._leading = True
            try:
                if not self._drain():
                    self._sleep(_LATE_LOOK_NS)
            except NATIVE as error:
                self.fail(translate(error))
            finally:
                with self._changed:
                    self._leading = False
                    self._changed.notify_all()
                self._nudge_loops()

    def _late(self, kind: int, op: int, payload: bytes) -> None:
        self._abandoned.discard(op)
        if kind != Cq.RESERVED:
            return
        reservation, _, statuses = messages.parse_reserved(payload)
        if reservation:
            self.post(Sq.ABORT, messages.pack_abort(reservation, 0, len(statuses)))

    def post(self, kind: Sq, payload: bytes) -> bool:
        """Submit without waiting for the answer. False when the ring is full or the daemon is gone."""
        if self.lost is not None:
            return False
        op, self._next_op = self._next_op, self._next_op + 1
        pushed = self._rings.submit(kind, op, payload)
        if pushed & 2:
            self.wake_daemon()
        return bool(pushed)

    def fail(self, error: KvdError) -> None:
        """The daemon is gone: everybody who waits is told, later calls raise at once."""
        if self.lost is None:
            self.lost = error
            if self.on_lost is not None:
                self.on_lost()
        for waiter in list(self._waiting.values()):
            if waiter.answer is None:
                waiter.resolve(error)
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Stop waiting: event loops are left, waiters are told."""
        for loop in self._loops:
            if not loop.is_closed():
                remove: Callable[..., Any] = loop.remove_reader
                fd = self._wake.fileno()
                if _running(loop):
                    remove(fd)
                else:
                    loop.call_soon_threadsafe(remove, fd)
        self._loops.clear()
        self.fail(UsageError("this store was closed; connect again", code="closed"))
        collector = self._collector
        if collector is not None:
            collector.join()  # it must not poll a descriptor that is somebody else's by then


def _refusal(kind: Sq, lost: KvdError) -> KvdError:
    """What a call gets once the daemon is gone: what that daemon had granted is over, whoever follows it."""
    if kind is Sq.PUBLISH and isinstance(lost, UnavailableError):
        return LifecycleError(
            "the daemon that granted this reservation is gone: it is over, reserve anew and write again",
            code="reservation-over",
        )
    return lost


def _running(loop: asyncio.AbstractEventLoop) -> bool:
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
        raise UsageError(
            f"a batch of {families} chunks × {members} members is over {limits.batch_items_max} items; "
            "reserve in several batches",
            code="batch", families=families, members=members,
        )  # fmt: skip


def _gone(cause: OSError | None = None) -> KvdError:
    why = f" ({cause.strerror})" if cause is not None and cause.strerror else ""
    return UnavailableError(
        f"the daemon is gone{why}: leases stay readable, attach again for more", code="daemon-gone"
    )


def _deadline(kind: Sq, deadline_s: float) -> KvdError:
    return UnavailableError(
        f"the daemon did not answer {kind.name} within {deadline_s:g} s; nothing was published by it",
        code="deadline", deadline_s=deadline_s,
    )  # fmt: skip


def _ring_full() -> KvdError:
    return CapacityError(
        "the request ring is full: the daemon is not keeping up; try again later", code="ring-full"
    )
