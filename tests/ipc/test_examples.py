"""The example that needs only a daemon runs as its page says, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
def test_two_engines_of_other_splits_and_layouts_share_a_hybrid(daemon: Any) -> None:
    """Fails if a byte of K, V or a state is elsewhere: the example compares all of them."""
    ran = subprocess.run(
        [sys.executable, EXAMPLES / "paged_geometry.py", daemon().socket],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert "usable now: 4 of 4 chunks" in ran.stdout
    assert "every byte" in ran.stdout
