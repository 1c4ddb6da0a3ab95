"""`kvctl purge`: removes what a daemon that is gone left on this host. Works without a daemon, and only without one.

Called by `kvd.kvctl.group`. What counts as left is decided by `kvd.probe.leftovers`.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from kvd.config import Config
from kvd.kvctl import output
from kvd.kvctl.configuration import default_path
from kvd.kvctl.exits import ExitCode
from kvd.kvctl.session import JsonOption, print_json
from kvd.probe import leftovers


def purge(
    config: Annotated[
        Path | None,
        typer.Option(
            "--config", "-c", metavar="FILE", help="Configuration of the daemon; default: as it finds it."
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove what a daemon that is gone left: its keeper with the memory, stale sockets, named memory.

    Refuses while a daemon runs. What systemd stores is removed with: systemctl clean --what=fdstore kvd
    """
    loaded = Config.load(config or default_path(), os.environ)
    socket = loaded.server.socket
    pid = leftovers.daemon_pid(socket)
    if pid is not None:
        typer.echo(f"the daemon with pid {pid} owns {socket}; stop it first (kvctl stop)", err=True)
        raise typer.Exit(ExitCode.NO)
    found = leftovers.find(loaded.server.runtime_dir, socket)
    if found and not yes and not as_json:
        for item in found:
            typer.echo(f"{item.path}: {item.what}")
        typer.confirm("Remove?", abort=True)
    removed = [item for item in found if leftovers.remove(item)]
    if as_json:
        print_json({"removed": [asdict(item) for item in removed]})
        return
    for item in removed:
        typer.echo(f"removed {item.path}: {item.what}")
    if not removed:
        output.console().print("nothing was left")
