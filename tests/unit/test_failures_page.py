"""Every failure mode names the tests that show it, and they exist (docs/failures.md)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs" / "failures.md"
NAMED = re.compile(r"`([\w/]+\.(?:py|cpp))(?:::(\w+))?`")
ROW = re.compile(r"^\| (?!---|fault \|)")


def rows() -> list[str]:
    return [line for line in PAGE.read_text().splitlines() if ROW.match(line)]


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.split("|")[1].strip()[:40])
def test_every_row_names_a_test_that_exists(row: str) -> None:
    """A renamed or removed test fails this, so that the page cannot promise what nothing shows."""
    cells = row.strip("|").split(" | ")
    assert len(cells) == 5, "fault, what happens, what the reader sees, what returns the resources, test"
    named = NAMED.findall(cells[-1])
    assert named, f"no test: {row}"
    for path, test in named:
        file = ROOT / "tests" / path
        assert file.is_file(), f"{path} is not there"
        assert not test or re.search(rf"\bdef {test}\b", file.read_text()), f"{path} has no {test}"


def test_the_page_has_rows() -> None:
    assert len(rows()) > 30
