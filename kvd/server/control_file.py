"""The file of the control socket: bound for this daemon, whatever an earlier one left in its place.

Called once at the start, by `App`. Invariant: nothing is removed that is no socket, or where somebody listens.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat

from kvd.errors import Retry, UnavailableError, UsageError


def bind(path: str, mode: int) -> socket.socket:
    """Bind the control socket. A stale file is replaced only after a connect showed that nobody listens.

    Raises UnavailableError(in-use) naming the daemon that is there, UsageError(socket) if the place cannot be used.
    """
    if len(os.fsencode(path)) > 107:
        raise UsageError(
            f"server.socket = {path!r} is longer than the kernel's 107 bytes", code="socket", socket=path
        )
    if os.path.lexists(path):
        _remove_stale(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    old_mask = os.umask(0o777 & ~mode)
    try:
        sock.bind(path)
        sock.listen(128)
    except OSError as error:
        sock.close()
        raise UsageError(
            f"server.socket = {path!r} cannot be used: {error.strerror}; create its directory for this user, or set "
            "server.socket (KVD_SOCKET)",
            code="socket", socket=path,
        ) from error  # fmt: skip
    finally:
        os.umask(old_mask)
    return sock


def _remove_stale(path: str) -> None:
    # Connecting to a regular file is refused too: only what is a socket may be taken for a stale one.
    if not stat.S_ISSOCK(os.lstat(path).st_mode):
        raise UsageError(
            f"server.socket = {path!r} is there and is not a socket; remove it, or set server.socket (KVD_SOCKET)",
            code="socket", socket=path,
        )  # fmt: skip
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        probe.settimeout(1.0)
        probe.connect(path)
    except ConnectionRefusedError:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        return
    except FileNotFoundError:
        return
    except OSError as error:
        if not isinstance(error, TimeoutError | BlockingIOError):
            raise UsageError(
                f"server.socket = {path!r} is there and is no socket that can be replaced: {error.strerror}",
                code="socket", socket=path,
            ) from error  # fmt: skip
    finally:
        probe.close()
    raise UnavailableError(
        f"another daemon listens on {path}; stop it first (kvctl stop), or give this one another server.socket",
        code="in-use", retry=Retry.NEVER, socket=path,
    )  # fmt: skip
