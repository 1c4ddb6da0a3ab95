"""The command `kvd`: serve, config check, version.

Exit codes: 0 stopped as asked, 2 wrong command line, 69 another daemon is there or memory is missing, 70 kvd broke,
71 the system refused something, 75 the stop took longer than its bound, 78 the configuration is wrong.
"""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path
from typing import Annotated, Final

import typer

from kvd import config as configuration
from kvd.config import Config, Sizes
from kvd.errors import ConfigError, KvdError
from kvd.probe import memory
from kvd.version import VERSION

EXIT_UNAVAILABLE: Final = 69
EXIT_SYSTEM: Final = 71
EXIT_CONFIG: Final = 78

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="The storage daemon for KV caches.",
    pretty_exceptions_enable=False,
)
config_app = typer.Typer(no_args_is_help=True, help="Look at the configuration.")
app.add_typer(config_app, name="config")

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        help=f"TOML file; default: KVD_CONFIG, or {configuration.DEFAULT_PATH} if it exists.",
    ),
]


def load(path: Path | None) -> Config:
    """The configuration from `path`, KVD_CONFIG or the default place, and the environment."""
    if path is None:
        named = os.environ.get("KVD_CONFIG")
        if named:
            path = Path(named)
        elif configuration.DEFAULT_PATH.exists():
            path = configuration.DEFAULT_PATH
    return Config.load(path, os.environ)


def sized(config: Config) -> Sizes:
    """Sizes on this machine."""
    facts = memory.memory()
    return configuration.resolve(config, facts.bound_bytes, facts.bound_source)


def _fail(error: KvdError) -> typer.Exit:
    print(f"kvd: {error}", file=sys.stderr)
    return typer.Exit(EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_UNAVAILABLE)


@app.command()
def serve(config: ConfigOption = None) -> None:
    """Run the daemon in the foreground until SIGTERM or SIGINT."""
    import uvloop

    from kvd.server import app as daemon
    from kvd.server import logs

    try:
        loaded = load(config)
        logs.configure(loaded.server.log_format, loaded.server.log_level)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        try:
            code = daemon.run(loaded, sized(loaded), os.environ, uvloop.new_event_loop)
        finally:
            logs.drain()
    except KvdError as error:
        raise _fail(error) from None
    except OSError as error:
        print(f"kvd: the system refused: {error}", file=sys.stderr)
        raise typer.Exit(EXIT_SYSTEM) from None
    raise typer.Exit(code)


@app.command(hidden=True)
def keeper(listener: int) -> None:
    """Keep what a daemon stores, on a listening socket that it hands over. The daemon starts this by itself."""
    from kvd.server import keeper as process

    process.main(listener)


@app.command()
def version() -> None:
    """Print the version."""
    print(f"kvd {VERSION}")


@config_app.command("check")
def check(config: ConfigOption = None) -> None:
    """Check the configuration, print every option with its value and where it was set."""
    try:
        loaded = load(config)
        sizes = sized(loaded)
    except KvdError as error:
        raise _fail(error) from None
    rows = loaded.describe()
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for key, value, source, meaning in rows:
        print(f"{key:{widths[0]}}  {value:{widths[1]}}  {source:{widths[2]}}  {meaning}")
    print(
        f"\npool {configuration.format_size(sizes.pool_bytes)} in {len(sizes.segments_bytes)} segments, "
        f"{sizes.families_max} families, {sizes.records_max} records, index up to "
        f"{configuration.format_size(sizes.index_bytes)}; {sizes.memory_source} has "
        f"{configuration.format_size(sizes.memory_bytes)}"
    )
    for note in sizes.notes:
        print(f"note: {note}")


def main() -> None:
    """Entry point of the command `kvd`."""
    app(prog_name="kvd")


if __name__ == "__main__":
    main()
