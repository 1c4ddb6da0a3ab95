"""What every command needs first: the options it shares with the others, and a connection to the daemon.

Used by the commands, in the calling thread. Invariant: importing this module imports nothing of the client library, so
that commands without a daemon start fast. What a daemon answers reaches commands as text that a terminal can show.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvd.errors import UnavailableError, UsageError
from kvd.probe import leftovers

if TYPE_CHECKING:
    from kvd.clientlib.store import Admin

SOCKET_HELP = "Socket of the daemon; default: KVD_SOCKET, or /run/kvd/kvd.sock."
DEADLINE_S = 5.0
TIMEOUT_S_MAX = 86_400.0

SocketOption = Annotated[str | None, typer.Option("--socket", metavar="PATH", help=SOCKET_HELP)]
TimeoutOption = Annotated[
    float | None,
    typer.Option("--timeout", metavar="SECONDS", help="How long to wait for the daemon; default: 5, clear 120."),
]  # fmt: skip
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of tables.")]


@dataclass(frozen=True, slots=True)
class Shared:
    """Options given before the command."""

    socket: str | None = None
    timeout_s: float | None = None


def shared(ctx: typer.Context) -> Shared:
    """The options given before the command."""
    return ctx.obj if isinstance(ctx.obj, Shared) else Shared()


def socket_of(ctx: typer.Context, socket: str | None) -> str:
    """The socket to use: of the command, before the command, KVD_SOCKET, the default."""
    from kvd.clientlib.control import socket_path

    return socket_path(socket or shared(ctx).socket)


class Asking:
    """An administrative connection whose answers can be shown: names in them were given by clients."""

    def __init__(self, admin: Admin) -> None:
        self._admin = admin
        self.welcome = admin.welcome
        self.close = admin.close

    def call(self, method: str, **params: Any) -> Any:
        """Ask the daemon; raises what it answers as an error, UsageError(text) for bytes that are no text."""
        for name, value in params.items():
            if isinstance(value, str) and not _is_text(value):
                raise UsageError(
                    f"{name} = {value!r} is not UTF-8 text; give it as UTF-8", code="text", param=name
                )
        return shown(self._admin.call(method, **params))


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:  # what the shell gave was not UTF-8
        return False
    return True


def shown(value: Any) -> Any:
    """A JSON-able value with everything replaced in its texts that could steer a terminal."""
    from kvd.wire.messages import printable

    match value:
        case str():
            return printable(value)
        case dict():
            return {
                printable(key) if isinstance(key, str) else key: shown(item) for key, item in value.items()
            }
        case list() | tuple():
            return [shown(item) for item in value]
    return value


def open_admin(path: str, deadline_s: float) -> Admin:
    """A connection to the daemon. Raises UnavailableError, UsageError, CompatibilityError."""
    from kvd.clientlib.store import Admin

    try:
        return Admin(path, deadline_s=deadline_s)
    except UnavailableError as error:
        # Nobody listens there, and yet a daemon may live: its lock tells. To start another one would not help.
        pid = leftovers.daemon_pid(path) if error.code == "KVD-UNAVAILABLE-NO-DAEMON" else None
        if not pid:  # 0: nobody may be told to end that
            raise
        message = leftovers.socket_is_gone(path, pid)
        raise UnavailableError(message, code="no-daemon", socket=path, pid=pid) from error


def deadline_of(ctx: typer.Context, timeout_s: float | None, otherwise_s: float = DEADLINE_S) -> float:
    """Seconds to wait: of the command, before the command, or `otherwise_s`. Raises UsageError(timeout)."""
    given = timeout_s if timeout_s is not None else shared(ctx).timeout_s
    if given is None:
        return otherwise_s
    if not 0 < given <= TIMEOUT_S_MAX:  # also refuses nan
        raise UsageError(
            f"--timeout = {given:g} is not allowed: give 0.001 … {TIMEOUT_S_MAX:g} seconds",
            code="timeout",
            timeout_s=given,
        )
    return given


@contextmanager
def connected(
    ctx: typer.Context, socket: str | None, timeout_s: float | None, otherwise_s: float = DEADLINE_S
) -> Iterator[Asking]:
    """A connection for the time of a command. `otherwise_s` is the deadline if the operator gave none."""
    admin = open_admin(socket_of(ctx, socket), deadline_of(ctx, timeout_s, otherwise_s))
    try:
        yield Asking(admin)
    finally:
        admin.close()


def print_json(value: Any) -> None:
    """One JSON value on standard output."""
    print(json.dumps(value, indent=2, ensure_ascii=False))
