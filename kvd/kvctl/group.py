"""The group of commands: loads a command's module when it is named, and turns errors into a line and an exit code.

Owns the boundary at which exceptions end. Used by `kvd.kvctl.main` only, in the calling thread. Invariants: naming one
command imports that command's module and no other (so that `kvctl version` starts fast); a KvdError never leaves
as a traceback; with `--json` an error is an object with the key `error` on standard output.
"""

from __future__ import annotations

import errno
import json
import sys
import traceback
from importlib import import_module
from typing import Any, Final

import typer
from typer.core import TyperGroup

from kvd.errors import KvdError, ProtocolError, to_dict
from kvd.kvctl import exits
from kvd.version import VERSION

# Commands in the order of the help: name -> module and attribute, which is a typer application or a function.
COMMANDS: Final[dict[str, tuple[str, str]]] = {
    "status": ("kvd.kvctl.status", "status"),
    "health": ("kvd.kvctl.status", "health"),
    "clients": ("kvd.kvctl.clients", "clients"),
    "ls": ("kvd.kvctl.objects", "ls"),
    "inspect": ("kvd.kvctl.objects", "inspect"),
    "why": ("kvd.kvctl.why", "why"),
    "pin": ("kvd.kvctl.changes", "pin"),
    "unpin": ("kvd.kvctl.changes", "unpin"),
    "withdraw": ("kvd.kvctl.changes", "withdraw"),
    "clear": ("kvd.kvctl.changes", "clear"),
    "verify": ("kvd.kvctl.verify", "verify"),
    "stop": ("kvd.kvctl.changes", "stop"),
    "doctor": ("kvd.kvctl.doctor", "doctor"),
    "purge": ("kvd.kvctl.purge", "purge"),
    "config": ("kvd.kvctl.configuration", "app"),
    "trace": ("kvd.kvctl.trace", "app"),
    "plan": ("kvd.kvctl.plan", "app"),
    "bench": ("kvd.kvctl.bench.command", "app"),
    "version": ("kvd.kvctl.version", "version"),
}


class Group(TyperGroup):
    """See the module."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Names in the order of the help."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of this name, loaded now; None if there is none."""
        if cmd_name not in self.commands:
            home = COMMANDS.get(cmd_name)
            if home is None:
                return None
            self.commands[cmd_name] = _load(cmd_name, *home)
        return self.commands[cmd_name]

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """As usual; typing errors are answered with the nearest names of all commands, loaded or not."""
        for name in COMMANDS:
            if args and args[0] not in COMMANDS:
                self.get_command(ctx, name)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command; the one place where errors end."""
        as_json = "--json" in ctx.args
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except KvdError as error:
            _tell(error, as_json=as_json)
            raise typer.Exit(exits.exit_code(error)) from None
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise  # a reader such as head has seen enough
            failed = KvdError(f"the system refused something: {error}", code="system")
            _tell(failed, as_json=False)
            raise typer.Exit(exits.exit_code(failed)) from None
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            # The usual cause is a daemon of another release whose answer has another shape.
            at = traceback.extract_tb(error.__traceback__)[-1]
            unexpected = ProtocolError(
                f"unexpected {type(error).__name__}: {error} (at {at.name}, line {at.lineno}); if the daemon is not "
                f"kvd {VERSION} like this kvctl, install the same release on both sides, else report this line",
                code="answer",
            )
            _tell(unexpected, as_json=as_json)
            raise typer.Exit(exits.exit_code(unexpected)) from None


def _load(name: str, module: str, attribute: str) -> Any:
    found = getattr(import_module(module), attribute)
    if not isinstance(found, typer.Typer):
        single = typer.Typer(add_completion=False, rich_markup_mode=None)
        single.command(name)(found)
        found = single
    elif found.registered_callback is None and len(found.registered_commands) == 1:
        # Without a callback typer would take an application of one command for that command.
        found.callback()(_nothing)
    found.rich_markup_mode, found._add_completion = None, False
    command = typer.main.get_command(found)
    command.name = name
    return command


def _nothing() -> None:
    return


def _tell(error: KvdError, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"error": to_dict(error)}, indent=2, ensure_ascii=False))
    else:
        print(exits.line(error), file=sys.stderr)
