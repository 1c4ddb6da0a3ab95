"""Session: one attachment to one daemon. A store has one that serves, and those before it of which something is held.

Owns the control connection, the native client, the wake socket and the calls in flight. For any thread of the process
that attached. A daemon that is gone ends its session and nothing else: leases and views go on, reservations are over.

    serving ── EOF, revoked ──▶ lost ── another session serves ──▶ retired ── nothing held any more ──▶ left
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import select
import socket
from collections.abc import Iterator

from kvd.clientlib import background
from kvd.clientlib.calls import Calls
from kvd.clientlib.control import A, Control
from kvd.clientlib.native_errors import NATIVE
from kvd.clientlib.watch import watch
from kvd.errors import KvdError, UnavailableError
from kvd.layout.manifest import Manifest
from kvd.shm._native import Client
from kvd.wire import messages as wire

_PREFAULT_BYTES = 16 << 20


class Session:
    """See the module. `hello_s` bounds the handshake, `deadline_s` the attachment: it is never given up half-way."""

    def __init__(
        self, path: str, client: str, domain: str, access: str, *, hello_s: float, deadline_s: float
    ) -> None:
        self._deadline_s = deadline_s
        self._numbers: dict[bytes, int] = {}  # root of a manifest -> number
        self._control = Control(path, name=client, role="engine", deadline_s=hello_s)
        try:
            self._attach(domain, access)
        except BaseException:
            self._control.close()
            raise
        self.epoch = self._control.welcome.epoch

    def _attach(self, domain: str, access: str) -> None:
        attached, fds = self._control.attach(wire.Attach(domain, access), deadline_s=self._deadline_s)
        meta, region, wake, *segments = fds
        try:
            self.native = Client(meta, region, segments, access == "write")
            self._wake = socket.socket(fileno=os.dup(wake))
            self.slot = attached.slot
            self.segment_bytes = attached.segments
            self.calls = Calls(self.native, self._wake)
            self.calls.on_lost = self.native.lose
            self.calls.farewell(functools.partial(_farewell, self._control, self.native))
            self.mapper = background.start(functools.partial(self._prefault, segments), "kvd-prefault")
        except BaseException:
            for fd in segments:
                os.close(fd)
            raise
        finally:
            for fd in (meta, region, wake):
                os.close(fd)

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

    def fileno(self) -> int:
        """The control connection's descriptor."""
        return self._control.fileno()

    # -- asking -------------------------------------------------------------------------------------------

    def request(self, ask: wire.Ask, answer: type[A], deadline_s: float | None = None) -> A:
        """Ask the daemon over the control connection. Raises what it answers, UnavailableError."""
        try:
            return self._control.request(
                ask, answer, deadline_s=self._deadline_s if deadline_s is None else deadline_s
            )
        except UnavailableError as error:
            if error.code == "KVD-UNAVAILABLE-DAEMON-GONE":
                self.lose(error)
            raise

    def number(self, manifest: Manifest, deadline_s: float | None = None) -> int:
        """The number under which this daemon keeps a namespace; asked for once."""
        known = self._numbers.get(manifest.root)
        if known is None:
            ask = wire.Namespace(manifest.encode(), f"{manifest.model}@{manifest.short}"[:128])
            known = self._numbers[manifest.root] = self.request(ask, wire.Namespaced, deadline_s).number
        return known

    async def number_async(self, manifest: Manifest, deadline_s: float | None = None) -> int:
        """As `number`, without blocking the loop."""
        known = self._numbers.get(manifest.root)
        return known if known is not None else await asyncio.to_thread(self.number, manifest, deadline_s)

    # -- ending -------------------------------------------------------------------------------------------

    @property
    def lost(self) -> KvdError | None:
        """Why nothing can be asked any more, as far as that was noticed."""
        if self.calls.lost is None and self.native.lost:
            self.lose(_gone("it was replaced by another one"))
        return self.calls.lost

    def look(self) -> bool:
        """Whether the daemon is there: looks at the socket, waits for nothing."""
        if self.lost is None:
            try:
                if self._wake.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b"":
                    self.lose(_gone("it closed the connection"))
            except BlockingIOError:
                pass
            except OSError as error:
                self.lose(_gone(error.strerror or str(error)))
        return self.calls.lost is None

    def has_ended(self) -> bool:
        """Whether the control connection has ended; then the daemon is gone, whatever else still looks open."""
        if self.calls.lost is None and (fd := self._control.fileno()) >= 0:
            connection = select.poll()
            connection.register(fd, select.POLLRDHUP)
            if connection.poll(0):
                self.lose(_gone("it closed the connection"))
        return self.calls.lost is not None

    def lose(self, error: KvdError) -> None:
        """The daemon is gone: whoever waits is told, nothing is found any more, what is held stays."""
        self.calls.fail(error)

    def retire(self) -> None:
        """Another session serves: let go of all but the memory of what is still held."""
        self.native.retire()
        self.mapper.join()
        self.calls.close()
        watch.forget(self._control.fileno())
        self._control.close()

    @property
    def left(self) -> bool:
        """Retired, and neither a lease nor a writable view of it is there any more."""
        return self.native.left

    def close(self) -> None:
        """Detach in order, if the daemon is there and nothing is held: neither leases nor writable views.

        Otherwise the daemon learns from the kernel, when the process ends, that the memory can be used again.
        """
        self._give_back()  # so that it comes back, even if this client is going to hold something else
        lost = self.calls.lost  # those who wait may notice the next line as a loss
        held = self.native.close()
        # Once more: another thread may just have been granted a reservation. From here on none begins to be filled.
        filling = self._give_back()
        self.mapper.join()
        if lost is None and not held:
            # A daemon that is away or slow learns of the end from the kernel.
            with contextlib.suppress(KvdError):
                self._control.request(
                    wire.Detach(gives_back=not filling), wire.Detached, deadline_s=min(1.0, self._deadline_s)
                )
        self.calls.close()
        watch.forget(self._control.fileno())
        self._control.close()

    def _give_back(self) -> int:
        """Give back what is reserved; returns how many items are being filled at this moment."""
        return sum(reservation.give_back() for reservation in list(self.calls.reservations))

    def abandon(self) -> None:
        """In a forked child: close the descriptors, touch nothing else."""
        self._control.close()
        self.calls.abandon()


def _farewell(control: Control, native: Client) -> None:
    """A store was dropped without close. Nothing refers to it, so that neither leases nor reservations of it are used;
    only views may be alive. Waits for nobody: garbage may be collected anywhere.
    """
    with contextlib.suppress(*NATIVE):
        if not native.close():
            control.farewell(wire.Detach(gives_back=True))
    control.close()


def _gone(why: str) -> UnavailableError:
    return UnavailableError(
        f"the daemon is gone ({why}); leases and views stay readable, the store attaches again when it is back",
        code="daemon-gone",
    )


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
