"""`kvctl version`: the release that is installed here."""

from __future__ import annotations

import typer

from kvd.kvctl.session import JsonOption, print_json
from kvd.version import VERSION


def version(ctx: typer.Context, as_json: JsonOption = False) -> None:
    """Print the release of this kvctl.

    That of the daemon is in kvctl status; kvctl doctor compares them.
    """
    if as_json:
        print_json({"version": VERSION})
    else:
        print(f"kvctl {VERSION}")
