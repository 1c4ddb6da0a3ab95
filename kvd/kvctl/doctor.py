"""`kvctl doctor`: is everything here as kvd needs it, with the daemon up or down.

Called by `kvd.kvctl.group`. Asks the machine (`kvd.probe`) and the daemon, changes nothing; the verdicts are made in
`kvd.kvctl.checks`.
"""

from __future__ import annotations

import os
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from kvd import config as configuration
from kvd.config import Config
from kvd.errors import ConfigError, KvdError
from kvd.kvctl import checks, output, session
from kvd.kvctl.checks import Answered, Check, Facts, Level
from kvd.kvctl.configuration import default_path
from kvd.kvctl.exits import ExitCode
from kvd.kvctl.session import JsonOption, SocketOption, TimeoutOption, print_json
from kvd.probe import hugepages, kernel, leftovers, memory, numa, process, unixsocket

_STYLES = {Level.OK: "ok", Level.WARN: "warn", Level.FAIL: "bad"}


def doctor(
    ctx: typer.Context,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            "-c",
            metavar="FILE",
            help="Configuration to judge by; default: as the daemon finds it.",
        ),
    ] = None,
    socket: SocketOption = None,
    timeout: TimeoutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check host, configuration, socket and daemon.

    Each finding comes with the way out. Works with the daemon down. Exit code 1 if a check fails;
    warnings do not count.
    """
    chosen = socket or session.shared(ctx).socket
    found = checks.all_checks(gather(chosen, config, session.deadline_of(ctx, timeout)))
    failed = sum(check.level is Level.FAIL for check in found)
    if as_json:
        print_json({"ok": not failed, "checks": [asdict(check) for check in found]})
    else:
        show(output.console(), found)
    if failed:
        raise typer.Exit(ExitCode.NO)


def gather(socket: str | None, config_file: Path | None, deadline_s: float) -> Facts:
    """Ask the machine and the daemon. Raises nothing: what cannot be asked is a fact, too."""
    facts = memory.memory()
    path = config_file or default_path()
    config, config_error, sizes = Config(), None, None
    try:
        config = Config.load(path, os.environ)
        sizes = configuration.resolve(config, facts.bound_bytes, facts.bound_source)
    except ConfigError as error:
        config_error = error
    socket_path = socket or os.environ.get("KVD_SOCKET") or config.server.socket
    daemon, daemon_error, native_error = _ask(socket_path, deadline_s)
    owner_pid = leftovers.daemon_pid(socket_path) or None  # 0: its number is not known
    return Facts(
        socket=unixsocket.facts(socket_path),
        daemon=daemon,
        daemon_error=daemon_error,
        config=config,
        config_file="" if path is None else str(path),
        config_error=config_error,
        sizes=sizes,
        memory=facts,
        swap_bytes=kernel.swap_bytes(),
        overcommit_mode=kernel.overcommit_mode(),
        own=process.limits(),
        of_daemon=None if daemon is None else process.limits(daemon.pid),
        huge=hugepages.facts(),
        shm_free_bytes=memory.file_system_free_bytes(),
        nodes=numa.nodes(),
        kernel=kernel.facts(),
        native_error=native_error,
        leftovers=tuple(leftovers.find(config.server.runtime_dir, socket_path)),
        owner_pid=owner_pid,
        owner_state="" if owner_pid is None else process.state(owner_pid),
        options="".join(
            f" {name} {shlex.quote(str(value))}"
            for name, value in (("--config", config_file), ("--socket", socket))
            if value is not None
        ),
    )


def _ask(path: str, deadline_s: float) -> tuple[Answered | None, KvdError | None, str]:
    """What the daemon says, why it says nothing, and why the native part of the client does not load."""
    try:
        from kvd.wire import messages as wire

        opened = session.open_admin(path, deadline_s)
    except ImportError as error:
        return None, None, str(error)
    except KvdError as error:
        return None, error, ""
    with opened:
        admin = session.Asking(opened)
        try:
            status, answer = admin.call("status"), admin.call("doctor")
            clients = admin.call("clients")
            settings = {key: value for key, value, *_ in admin.call("config")}
        except KvdError as error:
            return None, error, ""
        hello = admin.welcome
    return (
        Answered(
            hello.version, hello.pid, hello.layout, wire.LAYOUT_VERSION, status, answer, settings, clients
        ),
        None,
        "",
    )


def show(out: Console, found: list[Check]) -> None:
    """Print the verdicts for people: each with what was found, and below it the way out."""
    rows: list[tuple[str | Text, str | Text, str | Text]] = []
    for check in found:
        text = Text(check.found)
        if check.advice:
            text.append(f"\n→ {check.advice}", style="bold")
        rows.append((output.styled(check.level.value, _STYLES[check.level]), check.name, text))
    output.print_table(out, ("", "check", "found"), rows)
    failed = sum(check.level is Level.FAIL for check in found)
    warned = sum(check.level is Level.WARN for check in found)
    if failed or warned:
        out.print(f"\n{output.count(failed, 'failure')}, {output.count(warned, 'warning')}")
    else:
        out.print("\nall is well")
