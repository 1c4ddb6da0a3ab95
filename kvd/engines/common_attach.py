"""Attachment: a store that is there or is not, and never makes an engine wait.

Owns one background thread that connects, prepares what the adapter needs on a store, watches for the end of the daemon,
and connects again. Everybody else reads `session`, which costs an attribute. A daemon that answers late is given a rest
(`trouble`): until it is over `resting` says so, and nobody should ask it for anything.

    away ── connected, prepared ──▶ there ── daemon gone ──▶ away         there ── trouble ──▶ resting ── time ──▶ there
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from kvd.clientlib.store import Store, connect
from kvd.errors import KvdError, UsageError

log = logging.getLogger("kvd.engines")
T = TypeVar("T")

RETRY_FIRST_S = 0.02
RETRY_MAX_S = 1.0
REST_FIRST_S = 0.5
REST_MAX_S = 10.0
_LOOK_S = 0.02


class Attachment(Generic[T]):
    """See the module. `prepare(store)` makes the session, once, on the thread; an error means: try again.

    The session outlives daemons: the store attaches to the next one, under the same namespaces and registrations.
    """

    def __init__(
        self,
        prepare: Callable[[Store], T],
        *,
        socket: str | os.PathLike[str] | None = None,
        client: str | None = None,
        deadline_s: float = 1.0,
        verify_reads: bool = False,
    ) -> None:
        self._prepare = prepare
        self._socket, self._client = socket, client
        self._deadline_s, self._verify = deadline_s, verify_reads
        self._session: T | None = None
        self._made: T | None = None
        self._store: Store | None = None
        self._rest_until_ns = 0
        self._rest_s = REST_FIRST_S
        self._ended = threading.Event()
        self._changed = threading.Event()
        self.attached_count = 0
        self._thread = threading.Thread(target=self._run, name="kvd-attach", daemon=True)
        self._thread.start()

    @property
    def session(self) -> T | None:
        """What `prepare` made, None while the daemon is away."""
        return self._session

    @property
    def resting(self) -> bool:
        """Whether the daemon is given a rest: it is there, but answers late or not."""
        return time.monotonic_ns() < self._rest_until_ns

    def trouble(self) -> None:
        """A call met its deadline or failed for want of the daemon: ask nothing for a while, longer each time."""
        self._rest_until_ns = time.monotonic_ns() + int(self._rest_s * 1e9)
        self._rest_s = min(2 * self._rest_s, REST_MAX_S)

    def well(self) -> None:
        """A call was answered in time: the next rest is a short one again."""
        self._rest_s = REST_FIRST_S

    def wait(self, timeout_s: float) -> T | None:
        """The session, waiting for it at most so long: for start-up and tests, never for a hot path."""
        end = time.monotonic() + timeout_s
        while self._session is None and (left := end - time.monotonic()) > 0 and not self._ended.is_set():
            self._changed.wait(min(left, 0.05))
        return self._session

    def close(self, timeout_s: float = 2.0) -> None:
        """End the thread and detach; what is leased stays readable."""
        self._ended.set()
        self._thread.join(timeout_s)
        self._drop()

    def _drop(self) -> None:
        self._session, store, self._store = None, self._store, None
        if store is not None:
            store.close()

    # -- the thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        pause_s, told = RETRY_FIRST_S, ""
        while not self._ended.is_set():
            try:
                self._attach()
            except (KvdError, OSError) as error:
                if str(error) != told:
                    told = str(error)
                    log.warning("kvd: %s; the engine goes on without it and tries again", error)
                if isinstance(error, UsageError):
                    pause_s = RETRY_MAX_S
                self._ended.wait(pause_s * random.uniform(0.5, 1.0))
                pause_s = min(2 * pause_s, RETRY_MAX_S)
                continue
            except Exception:
                log.exception("kvd: cannot prepare; the engine goes on without it")
                return
            log.info("kvd: attached to %s", self._store.socket if self._store else "")
            pause_s, told = RETRY_FIRST_S, ""
            self._watch()

    def _attach(self) -> None:
        if self._store is None:
            # Only this thread attaches again: who looks something up must not find itself in a handshake.
            self._store = connect(
                self._socket, client=self._client, deadline_s=self._deadline_s, verify_reads=self._verify,
                reattach=False,
            )  # fmt: skip
        elif not self._store.present_session.look():
            self._store.reattach = True
            try:
                self._store.renew()
            finally:
                self._store.reattach = False
            if (lost := self._store.lost) is not None:
                raise lost
        if self._made is None:
            self._made = self._prepare(self._store)
        self._rest_until_ns = 0
        self.attached_count += 1
        self._session = self._made
        self._changed.set()

    def _watch(self) -> None:
        """Until the daemon is gone or this is closed."""
        store = self._store
        assert store is not None
        while not self._ended.wait(_LOOK_S):
            if not store.present_session.look():
                log.warning("kvd: the daemon is gone; the engine goes on without it")
                break
        self._changed.clear()
        self._session = None
