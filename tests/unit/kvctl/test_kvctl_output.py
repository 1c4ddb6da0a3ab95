"""How values look, and how tables behave in terminals and in pipes."""

from __future__ import annotations

import io
import sys

import pytest
from rich.console import Console

from kvd.kvctl import output


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (100_000, "97.7 KiB"), (64 << 30, "64 GiB"),
     (3 << 40, "3 TiB"), (5000 << 40, "5000 TiB")],
)  # fmt: skip
def test_sizes(size_bytes: int, text: str) -> None:
    assert output.size(size_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0.0 s"), (9.96, "10.0 s"), (59.9, "59 s"), (60, "1 min"), (245, "4 min 5 s"), (3600, "1 h"),
     (11_100, "3 h 5 min"), (90_000, "1 d 1 h"), (-1, "0.0 s")],
)  # fmt: skip
def test_durations(seconds: float, text: str) -> None:
    assert output.duration(seconds) == text


@pytest.mark.parametrize(
    ("part", "whole", "text"),
    [
        (0, 0, "-"),
        (0, 5, "0%"),
        (5, 5, "100%"),
        (1, 10_000, "<0.1%"),
        (9_999, 10_000, ">99.9%"),
        (1, 8, "12.5%"),
    ],
)
def test_shares_are_all_or_nothing_only_when_they_are(part: int, whole: int, text: str) -> None:
    assert output.share(part, whole) == text


@pytest.mark.parametrize(
    ("ns", "text"), [(0, "0 ns"), (881, "881 ns"), (30_065, "30.1 us"), (2_500_000_000, "2.5 s")]
)
def test_what_took_how_long(ns: int, text: str) -> None:
    assert output.took(ns) == text


def test_a_pipe_gets_whole_lines_without_colour_or_trailing_blanks(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setenv("COLUMNS", "40")
    out = output.console()
    key, label = "ab" * 32, "word " * 60 + "end"
    rows = [(output.key(out, key), output.styled("bad", "bad"), label), ("k", "-", "short")]
    output.print_table(out, ("key", "state", "label"), rows)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 4
    assert key in lines[2]
    assert lines[2].endswith(label)
    assert "\x1b" not in stream.getvalue()
    assert all(line == line.rstrip() for line in lines)


@pytest.mark.parametrize("columns", [80, 120])
def test_a_terminal_gets_nothing_wider_than_itself_and_no_word_is_lost(columns: int) -> None:
    stream = io.StringIO()
    out = Console(file=stream, force_terminal=True, width=columns, color_system=None)
    rows = [(output.key(out, "ab" * 32), "100 KiB", "x" * 64 + " " + "q" * 64)]
    output.print_table(out, ("key", "size", "name"), rows, right=(1,))
    lines = stream.getvalue().splitlines()
    assert max(map(len, lines)) <= columns
    text = stream.getvalue()
    assert (text.count("x"), text.count("q")) == (64, 64)
    assert ("ab" * 32 in text) == (columns >= 120)
    assert "ab" * 8 in text


def test_what_does_not_fit_becomes_blocks_and_no_cell_is_cut() -> None:
    stream = io.StringIO()
    out = Console(file=stream, force_terminal=True, width=60, color_system=None)
    columns = [f"c{number}" for number in range(9)]
    output.print_table(out, columns, [["12345678"] * 8 + ["the name"]] * 2)
    text = stream.getvalue()
    assert text.count("12345678") == 16
    assert text.count("the name") == 2
    assert all(text.count(head) == 2 for head in columns)


def test_markup_in_names_is_only_text(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    output.console().print(output.facts([("name", "[bold]x[/bold] :smile:")]))
    assert stream.getvalue() == "name  [bold]x[/bold] :smile:\n"
