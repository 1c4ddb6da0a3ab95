"""Store: this process at the daemon of its host, over restarts of that daemon.

Owns the sessions: the one that serves, and former ones of which something is held. Composes what the other modules of
clientlib do. May be used from any thread and any event loop of the process that connected; a forked child must connect
for itself. Leases and views outlive `close`, and the daemon. That a daemon is gone is noticed where something is asked
of it, or is not found, and by the one thread of `watch`, for those who ask for nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sys
import threading
import time
from types import TracebackType
from typing import Any

from kvd import arguments, limits
from kvd.clientlib.calls import Calls
from kvd.clientlib.control import Control, socket_path
from kvd.clientlib.leases import Lease
from kvd.clientlib.namespace import Namespace
from kvd.clientlib.native_errors import NATIVE, translate
from kvd.clientlib.session import Session
from kvd.clientlib.watch import watch
from kvd.errors import KvdError, UsageError
from kvd.layout.manifest import Manifest
from kvd.shm import compute
from kvd.wire import messages as wire

_PAUSE_MIN_NS = 20_000_000
_PAUSE_MAX_NS = 1_000_000_000
_LEFT_S = 1.0
_FORMER_LOOK_S = 0.25
_HELLO_S = 0.05  # a daemon that is starting answers later; look-ups must not wait for it
_COUNTERS = (
    "lookups", "keys_asked", "keys_hit", "leases", "leases_released", "bytes_viewed", "fetches",
    "adopts", "adopts_failed", "verify_failed", "bytes_filled",
)  # fmt: skip


def connect(
    socket: str | os.PathLike[str] | None = None,
    *,
    client: str | None = None,
    access: str = "write",
    domain: str = "default",
    deadline_s: float = 5.0,
    verify_reads: bool = False,
    reattach: bool = True,
) -> Store:
    """Attach to the daemon of this host: `socket`, else KVD_SOCKET, else /run/kvd/kvd.sock.

    `client` names this process for operators. `access` "read" maps the pool read-only. `deadline_s` bounds this call
    and is the default of those that wait. `verify_reads` compares an object with its checksum when it is first looked
    at or copied under a lease (CorruptionError), whoever reads: `fetch`, `acquire`, `adopt`.
    `reattach`: when the daemon was restarted, attach to the next one by itself.
    Raises UnavailableError, CompatibilityError, UsageError.
    """
    return Store(
        socket_path(socket), _process_name() if client is None else client, access, domain, deadline_s,
        verify_reads=verify_reads, reattach=reattach,
    )  # fmt: skip


async def connect_async(socket: str | os.PathLike[str] | None = None, **options: Any) -> Store:
    """As `connect`, without blocking the loop."""
    return await asyncio.to_thread(connect, socket, **options)


class Store:
    """See the module. Made by `connect`; a context manager, sync and async."""

    def __init__(
        self,
        path: str,
        client: str,
        access: str,
        domain: str,
        deadline_s: float,
        *,
        verify_reads: bool,
        reattach: bool = True,
    ) -> None:
        if not isinstance(access, str) or access not in ("read", "write"):
            raise arguments.refusal("access", access, 'give "read" or "write"', "access")
        arguments.text("client", client, wire.CLIENT_NAME_CHARS_MAX)
        arguments.text("domain", domain, 64)
        arguments.flag("verify_reads", verify_reads)
        arguments.flag("reattach", reattach)
        deadline_s = arguments.seconds("deadline_s", deadline_s)
        self.socket = path
        self.client = client
        self.access = access
        self.domain = domain
        self.deadline_s = deadline_s
        self.verify_reads = verify_reads
        self.reattach = reattach
        self._closed = False
        self._pid = os.getpid()
        self._namespaces: dict[bytes, Namespace] = {}
        self._former: list[Session] = []  # of daemons that are gone, while something of them is held
        # Re-entrant: a collection under it may run a finaliser that closes this very store.
        self._renewing = threading.RLock()
        self._look_ns = self._eager_ns = 0  # not before then is looked for the daemon (again)
        self._pause_ns = _PAUSE_MIN_NS
        self._serve(self._attach(deadline_s))

    def _attach(self, hello_s: float) -> Session:
        return Session(
            self.socket, self.client, self.domain, self.access, hello_s=hello_s, deadline_s=self.deadline_s
        )

    def _serve(self, session: Session) -> None:
        self._session = session
        self.native = session.native  # read on the hot path: a plain attribute
        self.slot = session.slot
        self.segment_bytes = session.segment_bytes
        watch.add(session.fileno(), self)

    # -- the daemon ---------------------------------------------------------------------------------------

    @property
    def calls(self) -> Calls:
        """Operations in flight at the present daemon."""
        return self._session.calls

    @property
    def present_session(self) -> Session:
        """The attachment that serves, or the one that did last."""
        return self._session

    def session(self) -> Session:
        """The attachment to a daemon that is there as far as is known; attaches again if need be and if it is time.

        Raises UnavailableError(retry=reattach), UsageError(closed, forked).
        """
        if os.getpid() != self._pid:
            raise UsageError(
                "this store was connected before a fork: connect again in the child", code="forked"
            )
        session = self._session
        if (session.calls.lost is None and not session.native.lost) or self.renew(eager=True):
            return self._session
        lost = self._session.lost
        if lost is not None:
            raise lost
        return self._session

    async def session_async(self) -> Session:
        """As `session`, without blocking the loop."""
        session = self._session
        if session.calls.lost is None and not session.native.lost:
            return session
        return await asyncio.to_thread(self.session)

    def renew(self, *, eager: bool = False) -> bool:
        """Called when something was not found: whether that was because of a daemon that is gone, and there is another
        one now, so that asking again is worth while. Looks at most every 20 ms; a daemon that is away is tried every
        20 ms … 1 s, with jitter. `eager`: for who cannot go on without a daemon, every 20 ms. Never raises.
        """
        now_ns = time.monotonic_ns()
        if now_ns < (self._eager_ns if eager else self._look_ns) or self._closed or os.getpid() != self._pid:
            return False
        if not self._renewing.acquire(timeout=_HELLO_S if eager else 0):
            return False  # another thread is at it
        try:
            return not self._closed and self._renew(now_ns)
        finally:
            self._renewing.release()

    def _renew(self, now_ns: int) -> bool:
        session = self._session
        self._look_ns = self._eager_ns = now_ns + _PAUSE_MIN_NS
        if session.look():
            self._pause_ns = _PAUSE_MIN_NS
            self._say_left()
            return False
        if not self.reattach:
            return False
        try:
            following = self._attach(min(_HELLO_S, self.deadline_s))
        except (KvdError, OSError, RuntimeError):  # the last: no thread is to be had
            self._pause()
            return False
        if self._closed or self._session is not session:  # a finaliser closed or renewed this store meanwhile
            following.close()
            return not self._closed
        self._pause()  # a daemon that hangs up at once is not asked without end; `look` ends the pause
        self._serve(following)
        session.retire()
        self._former.append(session)
        self._say_left()
        if self._former:
            watch.ask(self)
        return True

    def _pause(self) -> None:
        self._look_ns = time.monotonic_ns() + int(self._pause_ns * random.uniform(0.5, 1.5))
        self._pause_ns = min(2 * self._pause_ns, _PAUSE_MAX_NS)

    def tend(self) -> float | None:
        """The connection has ended: attach again, and tell when nothing of the last daemon is held any more. Seconds
        until another try, None: there is nothing to do.
        """
        session = self._session
        if self._closed:
            return None
        if session.has_ended():
            if not self.reattach:
                return None
            self.renew()
            if self._session is session:
                return max((self._look_ns - time.monotonic_ns()) / 1e9, _PAUSE_MIN_NS / 1e9)
        if self._former and self._renewing.acquire(blocking=False):
            try:
                self._say_left()
            finally:
                self._renewing.release()
        return _FORMER_LOOK_S if self._former else None

    def _say_left(self) -> None:
        """Tell the daemon of former attachments of which nothing is held any more."""
        for former in [session for session in self._former if session.left]:
            try:
                left = wire.Left(former.epoch, former.slot)
                self._session.request(left, wire.Noted, min(_LEFT_S, self.deadline_s))
            except KvdError:
                return  # next time, or the end of the process tells
            self._former.remove(former)

    # -- namespaces ---------------------------------------------------------------------------------------

    def namespace(self, manifest: Manifest) -> Namespace:
        """The namespace of a manifest; the daemon learns of it with the first reservation."""
        arguments.instance(
            "manifest", manifest, Manifest, "give a kvd.Manifest(model=..., revision=..., ...)"
        )
        found = self._namespaces.get(manifest.root)
        if found is None:
            found = self._namespaces[manifest.root] = Namespace(self, manifest)
        return found

    def namespace_number(self, namespace: Namespace) -> int:
        """The number under which the daemon keeps a namespace; asks once."""
        return self.session().number(namespace.manifest)

    # -- reading by identity ------------------------------------------------------------------------------

    def fetch(self, identity: bytes, member: int = 0, *, request: str | None = None) -> Lease | None:
        """A lease on one object by its identity, None when it is not here."""
        number = 0 if request is None else self.request(request)
        try:
            native = self.native.fetch(identity, member, number)
            if native is None:
                if self.renew():
                    native = self.native.fetch(identity, member, number)
                if native is None:
                    return None
        except NATIVE as error:
            _check_identity(identity, member)
            raise translate(error) from None
        return Lease(native, identity, self.report_damage, set() if self.verify_reads else None)

    def report_damage(self, identity: bytes, member: int) -> bool:
        """Count that an object is damaged and tell the daemon; whether it found the same and withdrew the family.

        Waits for the daemon, at most a second: who reads damaged bytes has lost more time than that already.
        """
        _check_identity(identity, member)
        with contextlib.suppress(RuntimeError):  # closed meanwhile
            self.native.add(_COUNTERS.index("verify_failed"), 1)
        try:
            answer = self.call("damaged", min(1.0, self.deadline_s), key=bytes(identity).hex(), member=member)
        except (KvdError, OSError, ValueError):
            return False  # a daemon that is away withdraws nothing; the caller gets its CorruptionError all the same
        return bool(answer["damaged"])

    # -- administration -----------------------------------------------------------------------------------

    def call(self, method: str, deadline_s: float | None = None, **params: Any) -> Any:
        """Ask the daemon (docs: kvd/wire/PROTOCOL.md, "Methods of call")."""
        arguments.text("method", method, 64)
        limit = None if deadline_s is None else arguments.seconds("deadline_s", deadline_s)
        return self.session().request(wire.Call(method, params), wire.Result, limit).result

    def status(self) -> dict[str, Any]:
        """The daemon's status, as `kvctl status --json` shows it."""
        answer = self.call("status")
        assert isinstance(answer, dict)
        return answer

    def stats(self) -> dict[str, int]:
        """Counters of this client since it attached."""
        return dict(zip(_COUNTERS, self.native.counters(), strict=False))

    @staticmethod
    def request(request: str | None) -> int:
        """The number under which a request id travels (never the id itself); 0 without one."""
        if request is None:
            return 0
        try:
            return compute.request_hash(request)
        except (AttributeError, UnicodeEncodeError, TypeError):
            raise arguments.refusal(
                "request", request, "give a string that can be encoded as UTF-8, or None"
            ) from None

    # -- end ----------------------------------------------------------------------------------------------

    @property
    def lost(self) -> KvdError | None:
        """Why this store can only read what it leased, None while the daemon answers."""
        return self._session.lost

    def fileno(self) -> int:
        """A descriptor for poll: POLLRDHUP on it says that the daemon has gone, before any call has noticed.

        Another one after the store has attached to the next daemon.
        """
        return self._session.fileno()

    def close(self) -> None:
        """Detach. Leases and views that are alive keep their memory, and the daemon honours them until they end."""
        if self._closed:
            return
        self._closed = True
        if os.getpid() != self._pid:
            self._session.abandon()
            return
        with self._renewing:
            if self._session.calls.lost is None:
                self._say_left()
            self._session.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Store:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)

    def __repr__(self) -> str:
        return f"<Store {self.client} on {self.socket}, slot {self.slot}>"


class Admin:
    """An administrative connection: no memory, no client slot. Used by kvctl."""

    def __init__(self, path: str | os.PathLike[str] | None = None, *, deadline_s: float = 5.0) -> None:
        self._deadline_s = arguments.seconds("deadline_s", deadline_s)
        self._control = Control(socket_path(path), name=_process_name(), role="admin", deadline_s=deadline_s)

    @property
    def welcome(self) -> wire.Welcome:
        """What the daemon said of itself in the handshake."""
        return self._control.welcome

    def call(self, method: str, **params: Any) -> Any:
        """Ask the daemon; raises what it answers as an error."""
        return self._control.request(
            wire.Call(method, params), wire.Result, deadline_s=self._deadline_s
        ).result

    def close(self) -> None:
        """Close the connection."""
        self._control.close()

    def __enter__(self) -> Admin:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_identity(identity: object, member: object) -> None:
    """Raises UsageError for what names no object."""
    way = f"give the {limits.identity_bytes} bytes of chain[i]"
    if arguments.buffer("identity", identity, way, "identity").nbytes != limits.identity_bytes:
        raise arguments.refusal("identity", identity, way, "identity")
    arguments.count("member", member, 0, limits.members_per_family_max - 1, "member")


def _process_name() -> str:
    name = os.path.basename(sys.argv[0] if sys.argv and sys.argv[0] else "python") or "python"
    return f"{name}-{os.getpid()}"[:64]
