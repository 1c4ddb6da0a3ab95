"""Exit codes of kvctl and how an error becomes one line and a code.

Called by the group of commands (`kvd.kvctl.group`) and by commands whose answer may be no. Pure; any thread.
Invariant: the numbers are an interface that scripts use; they are in the help of kvctl and in docs/operations.md.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from kvd.errors import (
    CapacityError,
    CompatibilityError,
    ConfigError,
    KvdError,
    UnavailableError,
    UsageError,
)
from kvd.wire.messages import printable


class ExitCode(IntEnum):
    """What kvctl ends with."""

    OK = 0
    NO = 1  # the answer is no: not found, a check failed, something could not be dropped
    USAGE = 2
    UNAVAILABLE = 3
    REFUSED = 4
    ERROR = 5
    INTERRUPTED = 130


_MEANINGS: Final = {
    ExitCode.OK: "done",
    ExitCode.NO: "the answer is no: not found, a check failed, something was kept",
    ExitCode.USAGE: "wrong usage",
    ExitCode.UNAVAILABLE: "no daemon, or no answer in time",
    ExitCode.REFUSED: "refused or denied: permission, limits, versions",
    ExitCode.ERROR: "another error of kvd",
    ExitCode.INTERRUPTED: "interrupted",
}
# \b keeps the lines of the help as they are.
HELP: Final = "\b\nExit codes:\n" + "\n".join(f"  {code.value:<5} {text}" for code, text in _MEANINGS.items())

_REFUSALS: Final = ("KVD-USAGE-DENIED", "KVD-USAGE-GONE")
_NOT_FOUND: Final = ("KVD-USAGE-NOT-FOUND",)
_ADVICE: Final = {
    "KVD-UNAVAILABLE-DEADLINE": "look at it with 'kvctl doctor' and its log, or wait longer with --timeout",
    "KVD-UNAVAILABLE-CONNECT": "look at the socket with 'kvctl doctor'",
}


def exit_code(error: KvdError) -> ExitCode:
    """The exit code for an error that ends a command."""
    if error.code.startswith(_NOT_FOUND) or isinstance(error, ConfigError):
        return ExitCode.NO
    if isinstance(error, CapacityError | CompatibilityError) or error.code.startswith(_REFUSALS):
        return ExitCode.REFUSED
    if isinstance(error, UnavailableError):
        return ExitCode.UNAVAILABLE
    return ExitCode.USAGE if isinstance(error, UsageError) else ExitCode.ERROR


def line(error: KvdError) -> str:
    """What happened, what to do, and the code, in one line (a configuration may have several mistakes: one each)."""
    advice = _ADVICE.get(error.code)
    message = f"{error.message}; {advice}" if advice else error.message
    return "\n".join(map(printable, f"kvctl: {message} [{error.code}]".split("\n")))
