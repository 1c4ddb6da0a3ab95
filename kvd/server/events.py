"""KV events: routers are told what was stored, removed and cleared, over ZMQ, in the form of vLLM's events.

Off unless `[events] listen` is set; needs the extra `kvd[events]` (pyzmq). Owns one thread with the two sockets, and
the queue to it. The event-loop thread only appends what it did to that queue: a publication or an eviction costs it one
append, whoever listens. The queue is bounded: where it overflows it is emptied, and the index is walked anew, a few
entries a turn of the loop; subscribers are told to forget everything and get it again.

    PUB     [topic, u64 big-endian sequence, msgpack [ts, [event …], nil, epoch]]
    ROUTER  a request [b"", u64 sequence] is answered by [b"", topic, sequence, payload] for every batch from there on,
            as long as it is kept, else by all that is stored, under the sequence that it stands for; then by
            [b"", b"", -1, b""]

Sequences begin at 0 and have no gaps in one epoch (16 hex digits, another one with every start of the daemon). A gap,
or another epoch, means: ask the ROUTER from the first missing one on, or forget everything and ask from 0 on. A thread
that dies, or a socket that fails, ends events and nothing else; health says so.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, Final

import msgpack

from kvd.config import EventsConfig
from kvd.core import events as ev
from kvd.errors import ConfigError
from kvd.server import logs
from kvd.server.domain import Domain
from kvd.server.event_view import Row, View
from kvd.server.supervise import Supervisor
from kvd.shm.layout import EntryState

WALK_ENTRIES: Final = 4096  # looked at in one turn, of which at most
WALK_ROWS: Final = 64  # are read
WALK_PAUSE_S: Final = 0.005
BATCH_EVENTS: Final = 64
BATCHES_KEPT: Final = 4096
PEER_BATCHES_MAX: Final = 2 * BATCHES_KEPT  # that wait for one subscriber; it misses what comes after
CLOSE_S: Final = 1.0
COUNTERS: Final = ("event_batches", "event_overflows", "event_walks", "event_replays")
_END: Final = (-1).to_bytes(8, "big", signed=True)
_log = logs.get("events")


class Events:
    """See the module. Made before anything is published; `start` once the loop runs."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, domain: Domain, config: EventsConfig, supervisor: Supervisor
    ) -> None:
        try:
            import zmq
        except ImportError:
            raise ConfigError(
                "events.listen needs pyzmq, which is not installed: pip install pyzmq, or leave it empty",
                code="events", key="events.listen", value=config.listen,
            ) from None  # fmt: skip
        self._zmq = zmq
        self._loop, self._domain, self._config, self._supervisor = loop, domain, config, supervisor
        self._queue: deque[tuple[Any, ...]] = deque()
        self._view = View(domain.sizes.families_max, self._name_of)
        self._epoch = f"{domain.identity.epoch:016x}"
        self._topic = config.topic.encode()
        self._sequence = 0
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=BATCHES_KEPT)
        self._sleeping = False
        self._closing = self._closed = False
        self._walk_from: int | None = None
        self._thread: threading.Thread | None = None
        self.counters = dict.fromkeys(COUNTERS, 0)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._context = zmq.Context()
        self._context.setsockopt(zmq.LINGER, 0)
        try:
            self._pub, self.address = self._bound(zmq.PUB, "listen", config.listen)
            self._router: Any = None
            self.replay_address = ""
            if config.replay_listen:
                self._router, self.replay_address = self._bound(
                    zmq.ROUTER, "replay_listen", config.replay_listen
                )
        except ConfigError:
            self._context.destroy(linger=0)
            os.close(self._wake_fd)
            raise
        domain.published_observers.append(self._published)
        domain.evicted_observers.append(self._evicted)

    def _bound(self, kind: int, key: str, address: str) -> tuple[Any, str]:
        made = self._context.socket(kind)
        made.setsockopt(self._zmq.SNDHWM, PEER_BATCHES_MAX)
        if kind == self._zmq.ROUTER:  # so that an answer that does not fit is known
            made.setsockopt(self._zmq.ROUTER_MANDATORY, 1)
        try:
            made.bind(address)
        except self._zmq.ZMQError as error:
            made.close(linger=0)
            raise ConfigError(
                f"events.{key} = {address!r} cannot be used: {error}; write tcp://127.0.0.1:5557 or ipc:///path",
                code="listen", key=f"events.{key}", value=address,
            ) from None  # fmt: skip
        return made, made.getsockopt_string(self._zmq.LAST_ENDPOINT)

    def _name_of(self, number: int) -> str:
        record = self._domain.namespaces.by_number.get(number)
        return record.root.hex()[:12] if record is not None else ""

    # --- on the loop

    def start(self) -> None:
        """Begin to publish; what an earlier daemon left is told first."""
        self._supervisor.set_health("events", "ok")
        self._thread = threading.Thread(target=self._run, name="kvd-events", daemon=True)
        self._thread.start()
        if self._domain.table.scan(0, self._domain.sizes.families_max):
            self._walk()
        _log.info("events", listen=self.address, replay=self.replay_address, epoch=self._epoch)

    def _published(self, effect: ev.DoPublish, answer: ev.Published) -> None:
        self._put((View.published, effect, answer))

    def _evicted(self, effect: ev.DoEvict, answer: ev.Evicted) -> None:
        self._put((View.evicted, effect, answer))

    def _put(self, item: tuple[Any, ...]) -> None:
        if self._closing:
            return
        if len(self._queue) >= self._config.queue_max:
            self.counters["event_overflows"] += 1
            _log.warning("events_overflow", queue_max=self._config.queue_max)
            self._walk()
            return  # the walk sees what this did
        self._queue.append(item)
        if self._sleeping:
            self._wake()

    def _wake(self) -> None:
        self._sleeping = False
        os.eventfd_write(self._wake_fd, 1)

    def _walk(self) -> None:
        """Drop what waits and go through the whole index, a part a turn."""
        self.counters["event_walks"] += 1
        going = self._walk_from is not None
        self._walk_from = 0
        self._queue.clear()
        self._queue.append((_forget,))
        if self._sleeping:
            self._wake()
        if not going:
            self._loop.call_soon(self._supervisor.guard, self._walk_on)

    def _walk_on(self) -> None:
        if self._closing or self._walk_from is None:
            return
        if len(self._queue) < self._config.queue_max // 2:
            begin = self._walk_from
            ready = memoryview(self._domain.table.scan(begin, WALK_ENTRIES)).cast("I").tolist()
            taken = ready[:WALK_ROWS]
            self._walk_from = taken[-1] + 1 if len(ready) > WALK_ROWS else begin + WALK_ENTRIES
            if taken:
                self._put((View.walked, [self._row(entry) for entry in taken]))
            if self._walk_from is not None and self._walk_from >= self._domain.sizes.families_max:
                self._walk_from = None
                return
            self._loop.call_soon(self._supervisor.guard, self._walk_on)
        else:
            self._loop.call_later(WALK_PAUSE_S, self._supervisor.guard, self._walk_on)

    def _row(self, entry: int) -> Row:
        found = self._domain.table.entry(entry)
        low, high = found["present"]
        mandatory = int(found["members_count"])
        there = ((low | high << 64) & ((1 << mandatory) - 1)).bit_count()
        parent, generation = found["parent"]
        if parent != ev.NONE:
            before = self._domain.table.entry(parent)
            alive = before["state"] == EntryState.READY and before["generation"] & 0xFFFFFFFF == generation
            parent = parent if alive else ev.NONE
        return Row(entry, found["key"], parent, int(found["namespace"]), mandatory - there)

    def close(self) -> None:
        """Send what waits, for at most a second, and end."""
        if self._closed:
            return
        self._closing = self._closed = True
        os.eventfd_write(self._wake_fd, 1)
        if self._thread is not None:
            self._thread.join(CLOSE_S)
            if self._thread.is_alive():
                return  # it goes with the process
        self._context.destroy(linger=0)
        os.close(self._wake_fd)

    def _broke(self, error: Exception) -> None:
        """The thread is gone: the daemon goes on without events."""
        self._closing = True
        self._queue.clear()
        self._supervisor.set_health("events", "failed", f"{type(error).__name__}: {error}")
        _log.error("events_ended", exc_info=error)

    # --- in the thread

    def _run(self) -> None:
        try:
            poller = self._zmq.Poller()
            poller.register(self._wake_fd, self._zmq.POLLIN)
            if self._router is not None:
                poller.register(self._router, self._zmq.POLLIN)
            while self._queue or not self._closing:
                self._drain()
                self._sleeping = True
                ready = dict(poller.poll(0 if self._queue or self._closing else None))
                self._sleeping = False
                if self._wake_fd in ready:
                    os.eventfd_read(self._wake_fd)
                if self._router is not None and self._router in ready:
                    self._replay()
        except Exception as error:  # noqa: BLE001 - told to the loop, which goes on
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._broke, error)

    def _drain(self) -> None:
        """Send all that waits, several operations in a batch."""
        for batch in _batches(self._events()):
            payload = self._packed(batch)
            self._pub.send_multipart((self._topic, self._sequence.to_bytes(8, "big"), payload))
            self._kept.append((self._sequence, payload))
            self._sequence += 1
            self.counters["event_batches"] += 1

    def _events(self) -> Iterator[dict[str, Any]]:
        while True:
            try:
                do, *arguments = self._queue.popleft()
            except IndexError:
                return
            yield from do(self._view, *arguments)

    def _packed(self, batch: list[dict[str, Any]]) -> bytes:
        packed = msgpack.packb([time.time(), batch, None, self._epoch])
        assert isinstance(packed, bytes)
        return packed

    def _replay(self) -> None:
        assert self._router is not None
        frames = self._router.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            return
        self.counters["event_replays"] += 1
        asked = int.from_bytes(frames[2], "big")
        kept: Iterable[tuple[int, bytes]]
        if asked >= self._sequence or (self._kept and self._kept[0][0] <= asked):
            kept = [item for item in self._kept if item[0] >= asked]
        else:
            # What waits in the queue comes after: its sequences are higher than the one this stands for.
            latest = max(0, self._sequence - 1)
            kept = ((latest, self._packed(batch)) for batch in _batches(self._view.snapshot()))
        try:
            for sequence, payload in kept:
                answer = (frames[0], b"", self._topic, sequence.to_bytes(8, "big"), payload)
                self._router.send_multipart(answer, self._zmq.DONTWAIT)
            self._router.send_multipart((frames[0], b"", b"", _END, b""), self._zmq.DONTWAIT)
        except self._zmq.ZMQError as error:
            # Nobody is waited for: a peer that does not read, or is gone, gets no end, and asks again.
            if error.errno not in (self._zmq.EAGAIN, self._zmq.EHOSTUNREACH):
                raise


def _forget(view: View) -> Iterator[dict[str, Any]]:
    yield view.forget()


def _batches(events: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    batch: list[dict[str, Any]] = []
    for event in events:
        batch.append(event)
        if len(batch) == BATCH_EVENTS:
            yield batch
            batch = []
    if batch:
        yield batch


def loopback(address: str) -> bool:
    """Whether nobody outside this host can connect."""
    return not address.startswith("tcp://") or address.startswith(
        ("tcp://127.", "tcp://localhost:", "tcp://[::1]:")
    )
