"""`kvctl version`: the release that is installed here."""

from __future__ import annotations

import typer

from kvd.kvctl.session import JsonOption, print_json
from kvd.version import VERSION


def version(ctx: typer.Context, as_json: JsonOption = False) -> None:
    """Print the release of this kvctl (kvctl status and kvctl doctor tell that of the daemon)."""
    if as_json:
        print_json({"version": VERSION})
    else:
        print(f"kvctl {VERSION}")
