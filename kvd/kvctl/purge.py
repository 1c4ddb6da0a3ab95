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
from kvd.kvctl.session import JsonOption, SocketOption, print_json, shared
from kvd.probe import leftovers


def purge(
    ctx: typer.Context,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config", "-c", metavar="FILE", help="Configuration of the daemon; default: as it finds it."
        ),
    ] = None,
    socket: SocketOption = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove what a daemon that is gone left: its keeper with the memory, stale sockets, named memory.

    Refuses while a daemon runs. What systemd stores is removed with: systemctl clean --what=fdstore kvd
    """
    loaded = Config.load(config or default_path(), os.environ)
    path = socket or shared(ctx).socket or loaded.server.socket
    pid = leftovers.daemon_pid(path)
    if pid is not None:
        typer.echo(f"the daemon with pid {pid} owns {path}; stop it first (kvctl stop)", err=True)
        raise typer.Exit(ExitCode.NO)
    runtime_dir = loaded.server.runtime_dir
    found = leftovers.find(runtime_dir, path)
    if found and not yes and not as_json:
        for item in found:
            typer.echo(f"{item.path}: {item.what}")
        typer.confirm("Remove?", abort=True)
    removed = [item for item in found if leftovers.remove(item)]
    if as_json:
        print_json(
            {
                "removed": [asdict(item) for item in removed],
                "looked_at": {"runtime_dir": runtime_dir, "socket": path},
                "other_keepers": leftovers.other_keepers(runtime_dir),
            }
        )
        return
    for item in removed:
        typer.echo(f"removed {item.path}: {item.what}")
    if not removed:
        output.console().print(f"nothing was left in {runtime_dir} (server.runtime_dir) and at {path}")
        _tell_of_others(runtime_dir)


def _tell_of_others(runtime_dir: str) -> None:
    """Whoever looked in the wrong place must not believe that no memory is kept."""
    others = leftovers.other_keepers(runtime_dir)
    for other in others:
        output.console().print(f"a keeper listens at {other}, in another server.runtime_dir")
    if others:
        output.console().print(
            "if its daemon is gone: kvctl purge --config FILE, with the file of that daemon"
        )
