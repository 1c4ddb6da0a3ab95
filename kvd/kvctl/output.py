"""How kvctl shows things to people: sizes, ages, tables.

Used by the commands, in the calling thread. Invariants: output that is not a terminal has no colour codes and no line
that is cut or wrapped, so that `kvctl ls | grep` finds whole keys; on a terminal nothing is wider than it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any, Final, TextIO

from rich import box
from rich.cells import cell_len
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

PIPE_COLUMNS: Final = 4096
KEY_DIGITS_SHORT: Final = 16
KEY_DIGITS: Final = 64
WIDE_COLUMNS: Final = 120
LAST_COLUMN_MIN: Final = 12
COLUMN_GAP: Final = 2
_STYLES: Final = {"ok": "green", "warn": "yellow", "bad": "bold red", "dim": "dim"}
_BYTE_UNITS: Final = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


class _Trimmed:
    """A stream that drops the blanks with which tables fill their lines."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write without trailing blanks."""
        return self._stream.write(re.sub(r" +(?=\n)", "", text))

    def flush(self) -> None:
        """Flush the stream."""
        self._stream.flush()


def console() -> Console:
    """A console on standard output as it is now."""
    # file: output may have been redirected since the import (pagers, tests).
    out = Console(file=sys.stdout, highlight=False, markup=False, emoji=False)
    if out.is_terminal:
        return out
    trimmed: Any = _Trimmed(sys.stdout)
    return Console(
        file=trimmed, highlight=False, markup=False, emoji=False, width=PIPE_COLUMNS, color_system=None
    )


def size(size_bytes: int) -> str:
    """'1.5 GiB', '97.7 KiB', '0 B': three digits or so, for people; --json has the exact number."""
    for unit, factor in _BYTE_UNITS:
        if size_bytes >= factor:
            scaled = size_bytes / factor
            text = f"{scaled:.{2 if scaled < 10 else 1}f}"
            return f"{text.rstrip('0').rstrip('.')} {unit}"
    return f"{size_bytes} B"


def count(number: int, singular: str, plural: str = "") -> str:
    """'1 family', '3,000 families'."""
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"


def share(part: float, whole: float) -> str:
    """'62.7%' of a whole; '-' when the whole is nothing. Only all is 100% and only nothing is 0%."""
    if whole <= 0:
        return "-"
    percent = 100 * part / whole
    if 0 < percent < 0.1:
        return "<0.1%"
    if 99.9 < percent < 100:
        return ">99.9%"
    return f"{percent:.1f}%".replace(".0%", "%")


def duration(seconds: float) -> str:
    """'12 s', '3 min 20 s', '2 h 5 min', '4 d 3 h'."""
    seconds = max(0.0, seconds)
    whole = int(seconds)
    for big, big_s, small, small_s in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= big_s:
            rest = whole % big_s // small_s
            return f"{whole // big_s} {big} {rest} {small}" if rest else f"{whole // big_s} {big}"
    return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"


def took(duration_ns: int) -> str:
    """'881 ns', '30.1 us', '1.23 ms', '2.5 s'."""
    for unit, factor in (("s", 10**9), ("ms", 10**6), ("us", 10**3)):
        if duration_ns >= factor:
            return f"{duration_ns / factor:.3g} {unit}"
    return f"{duration_ns} ns"


def key(out: Console, digits: str) -> str:
    """A key in full, or on a narrow terminal its first digits, which every command takes as well."""
    return digits if out.width >= WIDE_COLUMNS else digits[:KEY_DIGITS_SHORT]


def styled(text: str, style: str) -> Text:
    """Text in the style of its meaning: ok, warn, bad, dim."""
    return Text(text, style=_STYLES[style])


def print_table(
    out: Console, columns: Sequence[str], rows: Iterable[Sequence[str | Text]], *, right: Sequence[int] = ()
) -> None:
    """Print a table with a line under its head. `right`: columns of numbers.

    The last column may wrap, no other one. Where even so there is no room, each row is shown as a block: a cell that
    is cut, above all a number, would be a lie.
    """
    texts = [[Text(cell) if isinstance(cell, str) else cell for cell in row] for row in rows]
    widths = [max(cell_len(head), *(_width(row[at]) for row in texts), 0) for at, head in enumerate(columns)]
    gaps = COLUMN_GAP * (len(columns) - 1)
    if sum(widths[:-1]) + gaps + min(widths[-1], LAST_COLUMN_MIN) > out.width:
        for number, row in enumerate(texts):
            if number:
                out.print()
            out.print(facts(zip(columns, row, strict=True)))
        return
    grid = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold", padding=(0, 1, 0, 0)
    )
    for at, head in enumerate(columns):
        justify: JustifyMethod = "right" if at in right else "left"
        grid.add_column(head, justify=justify, no_wrap=at < len(columns) - 1, overflow="fold")
    for row in texts:
        grid.add_row(*row)
    out.print(grid)


def _width(cell: Text) -> int:
    return max((cell_len(line) for line in cell.plain.splitlines()), default=0)


def facts(rows: Iterable[tuple[str, str | Text]]) -> Table:
    """Names on the left, values on the right, wrapped below themselves."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, style="bold")
    grid.add_column(overflow="fold")
    for name, value in rows:
        grid.add_row(name, Text(value) if isinstance(value, str) else value)
    return grid
