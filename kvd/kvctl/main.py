"""The command `kvctl`: ask and steer the daemon of this host.

Owns the options that come before a command, the help and the entry point; the commands are in the modules that
`kvd.kvctl.group` names. Runs in one thread, without an event loop.
"""

from __future__ import annotations

import sys
from io import TextIOWrapper

import typer

from kvd.kvctl import exits
from kvd.kvctl.group import Group
from kvd.kvctl.session import Shared, SocketOption, TimeoutOption

app = typer.Typer(
    name="kvctl",
    cls=Group,
    rich_markup_mode=None,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=exits.HELP,
)


@app.callback()
def options(ctx: typer.Context, socket: SocketOption = None, timeout: TimeoutOption = None) -> None:
    """Ask and steer the kvd daemon of this host.

    Every command takes --json for programs. Keys are hex; their first 8 digits or more will do.
    """
    ctx.obj = Shared(socket, timeout)


def main() -> None:
    """Entry point of the command `kvctl`."""
    for stream in (sys.stdout, sys.stderr):
        # An ASCII locale must not turn a table into a traceback.
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
    app(prog_name="kvctl")


if __name__ == "__main__":
    main()
