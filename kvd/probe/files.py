"""Small readers for /proc and /sys: a missing or unreadable file is None."""

from __future__ import annotations

from pathlib import Path


def text(path: Path) -> str | None:
    """Contents without trailing blanks, None if it cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None


def number(path: Path) -> int | None:
    """The integer in `path`; None if absent, or a word such as "max"."""
    value = text(path)
    return int(value) if value is not None and value.lstrip("-").isdigit() else None


def chosen(path: Path) -> str | None:
    """The bracketed choice of files like "always [never]"."""
    for word in (text(path) or "").split():
        if word.startswith("[") and word.endswith("]"):
            return word[1:-1]
    return None
