"""The short form of the soak (`make soak MINUTES=5` is the long one): it must show a share of what that shows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SECONDS = 20.0
RUN = Path(__file__).resolve().parent / "run.py"


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_nothing_torn_leaked_or_stuck(capsys: pytest.CaptureFixture[str]) -> None:
    """What would make it fail: tests/faults/test_mutants.py, and test_a_soak_can_fail below."""
    done = soak()
    with capsys.disabled():
        print("\n" + done.stdout.strip())
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_a_soak_can_fail() -> None:
    """The daemon forgets that clients died: what they had reserved is leaked, or its books disagree at the next one."""
    inject = Path(__file__).resolve().parent.parent / "faults" / "inject"
    done = soak(seconds=3.0, FAULTS_OMIT="reclaim", PYTHONPATH=str(inject))
    assert done.returncode == 1, done.stdout
    assert "WRONG: reserv" in done.stdout or "WRONG: a daemon ended by itself (70)" in done.stdout, (
        done.stdout
    )


def soak(seconds: float = SECONDS, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(RUN), "--minutes", str(seconds / 60)]
    return subprocess.run(
        command, env={**os.environ, **env}, capture_output=True, text=True, timeout=seconds + 200
    )
