"""The control connection of a client: connect, handshake, requests, descriptors.

Owns the unix socket to the daemon. One request at a time under a lock, from any thread; every wait has a deadline.
Raises UnavailableError (no daemon, gone, deadline), CompatibilityError (versions), UsageError (not allowed), and
whatever error the daemon answers.
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import TypeVar

from kvd import arguments, limits
from kvd.errors import KvdError, ProtocolError, UnavailableError, UsageError
from kvd.version import VERSION
from kvd.wire import frames
from kvd.wire import messages as wire

DEFAULT_SOCKET = "/run/kvd/kvd.sock"
A = TypeVar("A", bound=wire.Body)
_INT_BYTES = array.array("i").itemsize


def socket_path(path: str | os.PathLike[str] | None) -> str:
    """The socket to use: the argument, KVD_SOCKET, or /run/kvd/kvd.sock. Raises UsageError(socket)."""
    if path is None:
        return os.environ.get("KVD_SOCKET") or DEFAULT_SOCKET
    try:
        text = os.fsdecode(path)
        os.fsencode(text)
    except (TypeError, UnicodeError):
        text = ""
    if not text or "\0" in text:
        raise arguments.refusal("socket", path, "give the path of the daemon's socket", "socket")
    return text


class Control:
    """One control connection. `welcome` holds the daemon's answer to the handshake."""

    def __init__(self, path: str, *, name: str, role: str, deadline_s: float) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._decoder = frames.Decoder()
        self._frames: list[frames.Message] = []
        self._fds: list[int] = []
        self._next_id = 1
        self._sock = _dial(path, deadline_s)
        try:
            hello = wire.Hello(
                (wire.PROTOCOL_MIN, wire.PROTOCOL_MAX), VERSION, wire.LAYOUT_VERSION, name, role
            )
            self.welcome = self.request(hello, wire.Welcome, deadline_s=deadline_s)
        except BaseException:
            self.close()
            raise

    def fileno(self) -> int:
        """The socket's descriptor; readable with EOF means that the daemon is gone."""
        return self._sock.fileno()

    def request(self, ask: wire.Ask, answer: type[A], *, deadline_s: float) -> A:
        """Send one message and wait for its answer of this type; an `error` answer is raised."""
        end = time.monotonic() + deadline_s
        with self._turn(end):
            return self._receive(self._send(ask, end), answer, end)

    def attach(self, ask: wire.Attach, *, deadline_s: float) -> tuple[wire.Attached, list[int]]:
        """Attach, and take the descriptors that come along (further ones in `segments` messages)."""
        end = time.monotonic() + deadline_s
        with self._turn(end):
            number = self._send(ask, end)
            try:
                attached = self._receive(number, wire.Attached, end)
                expected, more = attached.fds, attached.more
                while more:
                    segments = self._receive(number, wire.Segments, end)
                    expected, more = expected + segments.fds, segments.more
                if len(self._fds) != expected or expected != 3 + len(attached.segments):
                    raise ProtocolError(
                        f"the daemon announced {expected} descriptors for {len(attached.segments)} segments "
                        f"and sent {len(self._fds)}",
                        code="fds",
                    )  # fmt: skip
            except BaseException:
                self._drop_fds()
                raise
            fds, self._fds = self._fds, []
            return attached, fds

    def farewell(self, ask: wire.Ask) -> None:
        """Say something that needs no answer, without waiting, when nobody else uses this connection any more."""
        with contextlib.suppress(OSError):  # who does not listen learns of the end from the kernel
            self._sock.settimeout(0)
            self._sock.send(frames.encode(ask.to_map(self._next_id)), socket.MSG_NOSIGNAL)

    def close(self) -> None:
        """Close the socket; safe to call twice."""
        self._drop_fds()
        self._sock.close()

    @contextlib.contextmanager
    def _turn(self, end: float) -> Iterator[None]:
        """The connection is the caller's alone meanwhile. A forked child shares it with its parent: it gets none."""
        if os.getpid() != self._pid:
            raise UsageError(
                "this connection was made before a fork: connect again in the child", code="forked"
            )
        if not self._lock.acquire(timeout=max(0.0, end - time.monotonic())):
            raise self._late()
        try:
            yield
        finally:
            self._lock.release()

    def _drop_fds(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds = []

    def _send(self, ask: wire.Ask, end: float) -> int:
        number, self._next_id = self._next_id, self._next_id % 0xFFFF_FFFF + 1
        try:
            self._sock.settimeout(max(0.001, end - time.monotonic()))
            self._sock.sendall(frames.encode(ask.to_map(number)))
        except OSError as error:
            # A daemon that refuses says why before it closes: that answer may be here already.
            self._raise_refusal()
            raise self._gone(error) from error
        return number

    def _raise_refusal(self) -> None:
        try:
            self._sock.settimeout(0)
            self._frames.extend(self._decoder.feed(self._sock.recv(65536)))
        except OSError:
            return
        for frame in self._frames:
            if frame.get("t") == wire.Error.type:
                raise wire.Error.parse(frame).exception()

    def _receive(self, number: int, expected: type[A], end: float) -> A:
        while True:
            while self._frames:
                at, answer = wire.parse_answer(self._frames.pop(0))
                # An answer to a request that passed its deadline is dropped; id 0 is about the connection.
                if at not in (number, 0):
                    continue
                if isinstance(answer, wire.Error):
                    raise answer.exception()
                if not isinstance(answer, expected):
                    raise ProtocolError(
                        f"the daemon answered {answer.type!r} where {expected.type!r} was due", code="type"
                    )
                return answer
            self._frames.extend(self._decoder.feed(self._read(end)))

    def _read(self, end: float) -> bytes:
        left = end - time.monotonic()
        if left <= 0:
            raise self._late()
        self._sock.settimeout(left)
        try:
            data, ancillary, flags, _ = self._sock.recvmsg(
                65536, socket.CMSG_SPACE(limits.fds_per_message_max * _INT_BYTES), socket.MSG_CMSG_CLOEXEC
            )
        except TimeoutError:
            return self._read(end)
        except OSError as error:
            raise self._gone(error) from error
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(payload[: len(payload) - len(payload) % _INT_BYTES])
                self._fds.extend(fds)
        if flags & socket.MSG_CTRUNC:
            raise ProtocolError("descriptors were cut off: raise RLIMIT_NOFILE", code="fds")
        if not data:
            raise self._gone(None)
        return data

    def _late(self) -> KvdError:
        return UnavailableError(
            f"the daemon at {self.path} did not answer before the deadline", code="deadline", socket=self.path
        )

    def _gone(self, cause: OSError | None) -> KvdError:
        why = f" ({cause.strerror})" if cause is not None and cause.strerror else ""
        return UnavailableError(
            f"the daemon at {self.path} closed the connection{why}; attach again when it is back",
            code="daemon-gone", socket=self.path,
        )  # fmt: skip


def _dial(path: str, deadline_s: float) -> socket.socket:
    if len(os.fsencode(path)) > 107:
        raise UsageError(
            f"socket path of {len(path)} characters: the kernel allows 107", code="socket", socket=path
        )
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.settimeout(deadline_s)
        sock.connect(path)
    except OSError as error:
        sock.close()
        raise _explain(path, error) from error
    return sock


def _explain(path: str, error: OSError) -> KvdError:
    match error.errno:
        case errno.ENOENT:
            what = "there is no socket; start the daemon (kvd serve) or set KVD_SOCKET to its socket"
            return UnavailableError(f"no daemon at {path}: {what}", code="no-daemon", socket=path)
        case errno.ECONNREFUSED:
            what = "the socket is there but nobody listens; start the daemon (kvd serve)"
            return UnavailableError(f"no daemon at {path}: {what}", code="no-daemon", socket=path)
        case errno.EACCES | errno.EPERM:
            what = "this user may not open the socket; add it to the daemon's group or to access.uids"
            return UsageError(f"{path}: {what}", code="denied", socket=path, uid=os.getuid())
        case errno.EAGAIN:
            what = "its queue of new connections is full; try again"
            return UnavailableError(f"the daemon at {path} is busy: {what}", code="busy", socket=path)
        case _:
            return UnavailableError(
                f"cannot connect to {path}: {error.strerror or error}", code="connect", socket=path
            )
