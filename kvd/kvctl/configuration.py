"""`kvctl config check`: is this configuration right, and what does it come to on this machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from kvd.kvctl.session import JsonOption, print_json

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Look at a configuration, without a daemon."
)


@app.command()
def check(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE", help="TOML file; default: KVD_CONFIG, or /etc/kvd/kvd.toml if it exists."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check a file (and the KVD_* variables over it); show every option, where it was set, and the sizes that follow.

    Exit code 1 if something is wrong: the key, its value, what is allowed, and where it was set are named.
    """
    from kvd import config as configuration
    from kvd.kvctl import output
    from kvd.probe import memory

    path = default_path() if file is None else file
    loaded = configuration.Config.load(path, os.environ)
    facts = memory.memory()
    sizes = configuration.resolve(loaded, facts.bound_bytes, facts.bound_source)
    rows = loaded.describe()
    if as_json:
        print_json(
            {
                "file": None if path is None else str(path),
                "options": [
                    {"key": key, "value": value, "set_by": source, "meaning": meaning}
                    for key, value, source, meaning in rows
                ],
                "pool_bytes": sizes.pool_bytes,
                "segments_bytes": list(sizes.segments_bytes),
                "families_max": sizes.families_max,
                "records_max": sizes.records_max,
                "index_bytes": sizes.index_bytes,
                "notes": sizes.notes,
                "leased_bytes_max": sizes.leased_bytes_max,
                "memory_bytes": sizes.memory_bytes,
                "memory_source": sizes.memory_source,
            }
        )
        return
    out = output.console()
    wide = out.width >= output.WIDE_COLUMNS
    table = [
        (
            key,
            *(
                output.styled(cell, "dim") if source == "default" else cell
                for cell in (value, source, meaning)
            ),
        )
        for key, value, source, meaning in rows
    ]
    columns = ("option", "value", "set by", "meaning")
    # Next to these columns a narrow terminal has no room for the sentences.
    shown = len(columns) if wide else 3
    output.print_table(out, columns[:shown], [row[:shown] for row in table])
    out.print(
        f"\n{path or 'no file: defaults and environment'}: valid. Pool of {output.size(sizes.pool_bytes)} in "
        f"{output.count(len(sizes.segments_bytes), 'segment')}, {sizes.families_max:,} families, {sizes.records_max:,} "
        f"objects, an index of up to {output.size(sizes.index_bytes)}; {sizes.memory_source} has "
        f"{output.size(sizes.memory_bytes)}"
    )
    for note in sizes.notes:
        out.print(output.styled(f"note: {note}", "warn"))
    if not wide:
        out.print(f"A terminal of {output.WIDE_COLUMNS} columns shows what each option means.")


def default_path() -> Path | None:
    """The file that the daemon would read: KVD_CONFIG, or the default place if there is one."""
    from kvd.config import DEFAULT_PATH

    named = os.environ.get("KVD_CONFIG")
    if named:
        return Path(named)
    return DEFAULT_PATH if DEFAULT_PATH.exists() else None
