"""One thread of a process that sees its daemons go, for all stores, and attaches these to the next ones.

Without it a client that only reads, or is idle, would never notice: what it finds lies in memory that is still mapped,
so it would serve from the pool of a daemon that is gone, and hold that pool beside the next daemon's. The thread sleeps
on the control connections, reads nothing from them, and lives while a store does. Used by `Store` and `Session`.

    watched ── connection ends ──▶ tended ── another daemon is there, nothing of the last one is held ──▶ watched
                                     └── closed, dropped, not to attach again ──▶ (forgotten)
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
import weakref
from typing import Protocol

_JOIN_S = 1.0
_JOIN_STEP_S = 0.02
_FAILED_PAUSE_S = 1.0
_log = logging.getLogger("kvd.client")


class Watched(Protocol):
    """What is used of a store."""

    def tend(self) -> float | None:
        """Attach again, let go of former attachments. Seconds until another try is worth while, None: all is done."""


class Watch:
    """See the module. For any thread; `forget` is called before a descriptor is closed."""

    def __init__(self) -> None:
        # Re-entrant: a collection may end an object of the program whose finaliser closes a store, in this very thread.
        self._lock = threading.RLock()
        self._stores: dict[int, weakref.ref[Watched]] = {}  # by descriptor of the control connection
        self._asking: list[weakref.ref[Watched]] = []
        self._thread: threading.Thread | None = None
        self._epoll: select.epoll | None = None
        self._stir = -1

    def add(self, fd: int, store: Watched) -> None:
        """Watch this connection of a store; if no thread or descriptor is to be had, the log says that it is not."""
        with self._lock:
            self._stores[fd] = weakref.ref(store, self._dropped)
            try:
                epoll = self._epoll or self._start()
                # Once: a forked child may keep the connection open when it is closed here.
                epoll.register(fd, select.EPOLLRDHUP | select.EPOLLONESHOT)
            except (OSError, RuntimeError) as error:
                self._stores.pop(fd, None)
                _log.warning(
                    "kvd: %s: that the daemon goes is noticed only where something is asked of it", error
                )

    def _start(self) -> select.epoll:
        """Under the lock. All or nothing: RuntimeError, OSError if the system gives no thread or descriptor."""
        with contextlib.ExitStack() as undo:
            epoll = select.epoll()
            undo.callback(epoll.close)
            stir = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            undo.callback(os.close, stir)
            epoll.register(stir, select.EPOLLIN)
            thread = threading.Thread(target=self._run, args=(epoll, stir), name="kvd-watch", daemon=True)
            thread.start()
            undo.pop_all()
        self._epoll, self._stir, self._thread = epoll, stir, thread
        return epoll

    def ask(self, store: Watched) -> None:
        """Tend this store soon: something of a former attachment is held."""
        with self._lock:
            if self._epoll is not None:
                self._asking.append(weakref.ref(store))
                os.eventfd_write(self._stir, 1)

    def _dropped(self, _ref: object) -> None:
        """A store was collected without close: the thread looks for it."""
        with self._lock:
            if self._epoll is not None:
                os.eventfd_write(self._stir, 1)

    def forget(self, fd: int) -> None:
        """This connection is about to be closed. The last one ends the thread."""
        with self._lock:
            if self._stores.pop(fd, None) is None or self._epoll is None:
                return
            with contextlib.suppress(OSError):
                self._epoll.unregister(fd)
            if self._stores:
                return
            thread = self._thread
            os.eventfd_write(self._stir, 1)
        if thread is not None and thread is not threading.current_thread():
            # Not for ever: a finaliser may be here while this very thread has the lock that the other one needs to end.
            end = time.monotonic() + _JOIN_S
            while thread.is_alive() and not self._stores and time.monotonic() < end:
                thread.join(_JOIN_STEP_S)

    def _run(self, epoll: select.epoll, stir: int) -> None:
        away: list[weakref.ref[Watched]] = []
        pause_s: float | None = None
        while True:
            events = epoll.poll(pause_s)
            with self._lock:
                if any(fd == stir for fd, _ in events):
                    os.eventfd_read(stir)
                away.extend(self._stores[fd] for fd, _ in events if fd in self._stores)
                away.extend(self._asking)
                self._asking.clear()
                away = _each_once(away)
                for fd in [fd for fd, ref in list(self._stores.items()) if ref() is None]:
                    self._stores.pop(fd, None)
                if not self._stores:
                    self._epoll = self._thread = None
                    epoll.close()
                    os.close(stir)
                    return
            pauses = [(ref, _tend(ref)) for ref in away]
            away = [ref for ref, pause in pauses if pause is not None]
            pause_s = min((pause for _, pause in pauses if pause is not None), default=None)

    def abandon(self) -> None:
        """In a forked child, which has no such thread: close the descriptors, keep nothing."""
        epoll, stir = self._epoll, self._stir
        self.__init__()  # type: ignore[misc]  # the lock may be held by a thread that is not here
        if epoll is not None and stir >= 0:
            epoll.close()
            os.close(stir)


def _each_once(refs: list[weakref.ref[Watched]]) -> list[weakref.ref[Watched]]:
    return list({id(store): ref for ref in refs if (store := ref()) is not None}.values())


def _tend(ref: weakref.ref[Watched]) -> float | None:
    store = ref()
    try:
        return None if store is None else store.tend()
    except Exception:  # noqa: BLE001  the thread is for all stores: it goes on, and the log says why
        _log.exception("kvd: cannot attach again; tried again in %g s", _FAILED_PAUSE_S)
        return _FAILED_PAUSE_S


watch = Watch()
os.register_at_fork(after_in_child=watch.abandon)
