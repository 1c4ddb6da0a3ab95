"""Store: one attachment of this process to the daemon of its host.

Owns the control connection, the mapped regions and the rings; composes what the other modules of clientlib do. May
be used from any thread and any event loop of the process that connected; a forked child must connect for itself.
Leases and views outlive `close`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import socket
import sys
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from kvd.clientlib import background
from kvd.clientlib.calls import Calls
from kvd.clientlib.control import Control, socket_path
from kvd.clientlib.leases import Lease
from kvd.clientlib.namespace import Namespace
from kvd.clientlib.native_errors import NATIVE, translate
from kvd.errors import KvdError, UsageError
from kvd.layout.manifest import Manifest
from kvd.shm import compute
from kvd.shm._native import Client
from kvd.wire import messages as wire

_PREFAULT_BYTES = 16 << 20
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
) -> Store:
    """Attach to the daemon of this host: `socket`, else KVD_SOCKET, else /run/kvd/kvd.sock.

    `client` names this process for operators. `access` "read" maps the pool read-only. `deadline_s` bounds this call
    and is the default of those that wait. `verify_reads` checks every object's checksum when its lease is looked at.
    Raises UnavailableError, CompatibilityError, UsageError.
    """
    return Store(
        socket_path(socket), client or _process_name(), access, domain, deadline_s, verify_reads=verify_reads
    )


async def connect_async(socket: str | os.PathLike[str] | None = None, **options: Any) -> Store:
    """As `connect`, without blocking the loop."""
    return await asyncio.to_thread(connect, socket, **options)


class Store:
    """See the module. Made by `connect`; a context manager, sync and async."""

    def __init__(
        self, path: str, client: str, access: str, domain: str, deadline_s: float, *, verify_reads: bool
    ) -> None:
        if access not in ("read", "write"):
            raise UsageError(f'access {access!r} is not "read" or "write"', code="access", access=access)
        self.socket = path
        self.client = client
        self.access = access
        self.deadline_s = deadline_s
        self.verify_reads = verify_reads
        self._closed = False
        self._pid = os.getpid()
        self._namespaces: dict[bytes, Namespace] = {}
        self._control = Control(path, name=client, role="engine", deadline_s=deadline_s)
        try:
            self._attach(domain)
        except BaseException:
            self._control.close()
            raise

    def _attach(self, domain: str) -> None:
        ask = wire.Attach(domain, self.access)
        attached, fds = self._control.attach(ask, deadline_s=self.deadline_s)
        meta, region, wake, *segments = fds
        try:
            self.native = Client(meta, region, segments, self.access == "write")
            self._wake = socket.socket(fileno=os.dup(wake))
            self.slot = attached.slot
            self.segment_bytes = attached.segments
            self.calls = Calls(self.native, self._wake)
        except BaseException:
            for fd in segments:
                os.close(fd)
            raise
        finally:
            for fd in (meta, region, wake):
                os.close(fd)
        self._mapper = background.start(functools.partial(self._prefault, segments), "kvd-prefault")

    def _prefault(self, segment_fds: list[int]) -> None:
        """Map the pool ahead of its use: a page that is touched first in the middle of a copy costs it dearly.

        Only what is backed by memory: populating the rest is up to the daemon, which may have been told to leave it.
        """
        try:
            backed = [
                list(_backed(fd, size_bytes))
                for fd, size_bytes in zip(segment_fds, self.segment_bytes, strict=True)
            ]
        finally:
            for fd in segment_fds:
                os.close(fd)
        for number, ranges in enumerate(backed):
            for begin, end in ranges:
                for offset in range(begin, end, _PREFAULT_BYTES):
                    if background.leaving.is_set():
                        return
                    try:
                        self.native.prefault(number, offset, min(_PREFAULT_BYTES, end - offset))
                    except RuntimeError:
                        return  # closed meanwhile

    # -- namespaces ---------------------------------------------------------------------------------------

    def namespace(self, manifest: Manifest) -> Namespace:
        """The namespace of a manifest; the daemon learns of it with the first reservation."""
        found = self._namespaces.get(manifest.root)
        if found is None:
            found = self._namespaces[manifest.root] = Namespace(self, manifest)
        return found

    def namespace_number(self, namespace: Namespace) -> int:
        """The number under which the daemon keeps a namespace; asks once."""
        if namespace._number is None:
            manifest = namespace.manifest
            ask = wire.Namespace(manifest.encode(), f"{manifest.model}@{manifest.short}"[:128])
            answer = self._control.request(ask, wire.Namespaced, deadline_s=self.deadline_s)
            namespace._number = answer.number
        return namespace._number

    async def namespace_number_async(self, namespace: Namespace) -> int:
        """As `namespace_number`, without blocking the loop."""
        if namespace._number is None:
            return await asyncio.to_thread(self.namespace_number, namespace)
        return namespace._number

    def split_number(self, split: dict[str, Any]) -> int:
        """The number of a split (how a family is divided into members); equal splits have equal numbers."""
        return self._control.request(wire.Split(split), wire.Splitted, deadline_s=self.deadline_s).number

    # -- reading by identity ------------------------------------------------------------------------------

    def fetch(self, identity: bytes, member: int = 0, *, request: str | None = None) -> Lease | None:
        """A lease on one object by its identity, None when it is not here."""
        try:
            native = self.native.fetch(identity, member, self.request(request))
        except NATIVE as error:
            raise translate(error) from None
        return None if native is None else Lease(native, identity, self.report_damage)

    def report_damage(self, identity: bytes, member: int) -> bool:
        """Count that an object is damaged and tell the daemon; whether it found the same and withdrew the family.

        Waits for the daemon, at most a second: who reads damaged bytes has lost more time than that already.
        """
        with contextlib.suppress(RuntimeError):  # closed meanwhile
            self.native.add(_COUNTERS.index("verify_failed"), 1)
        try:
            answer = self.call("damaged", min(1.0, self.deadline_s), key=identity.hex(), member=member)
        except (KvdError, OSError, ValueError):
            return False  # a daemon that is away withdraws nothing; the caller gets its CorruptionError all the same
        return bool(answer["damaged"])

    # -- administration -----------------------------------------------------------------------------------

    def call(self, method: str, deadline_s: float | None = None, **params: Any) -> Any:
        """Ask the daemon (docs: kvd/wire/PROTOCOL.md, "Methods of call")."""
        limit = self.deadline_s if deadline_s is None else deadline_s
        return self._control.request(wire.Call(method, params), wire.Result, deadline_s=limit).result

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
        return compute.request_hash(request)

    # -- end ----------------------------------------------------------------------------------------------

    @property
    def lost(self) -> KvdError | None:
        """Why this store can only read what it leased, None while the daemon answers."""
        return self.calls.lost

    def close(self) -> None:
        """Detach. Leases and views that are alive keep their memory, and the daemon honours them until they end."""
        if self._closed:
            return
        self._closed = True
        if os.getpid() != self._pid:
            self._control.close()
            self._wake.close()
            return
        leased = self.native.close()
        self._mapper.join()
        if self.calls.lost is None and not leased:
            # A daemon that is away or slow learns of the end from the kernel.
            with contextlib.suppress(KvdError):
                self._control.request(wire.Detach(), wire.Detached, deadline_s=min(1.0, self.deadline_s))
        self.calls.close()
        self._control.close()
        self._wake.close()

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
        self.close()

    def __repr__(self) -> str:
        return f"<Store {self.client} on {self.socket}, slot {self.slot}>"


class Admin:
    """An administrative connection: no memory, no client slot. Used by kvctl."""

    def __init__(self, path: str | os.PathLike[str] | None = None, *, deadline_s: float = 5.0) -> None:
        self._deadline_s = deadline_s
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


def _backed(fd: int, size_bytes: int) -> Iterator[tuple[int, int]]:
    """Ranges [begin, end) of a segment that have memory."""
    end = 0
    while end < size_bytes:
        try:
            begin = os.lseek(fd, end, os.SEEK_DATA)
            end = os.lseek(fd, begin, os.SEEK_HOLE)
        except OSError:
            return  # nothing but a hole from here on
        yield begin, end


def _process_name() -> str:
    name = os.path.basename(sys.argv[0] if sys.argv and sys.argv[0] else "python") or "python"
    return f"{name}-{os.getpid()}"[:64]
