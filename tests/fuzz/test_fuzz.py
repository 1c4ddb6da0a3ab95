"""The short form of `make fuzz SECONDS=…`, without clang and atheris: the corpus, then random edits of it for a moment.

Each target runs in a process of its own: one that crashes is a failure with the input that did it, not the end of the
tests. Found by these and since fixed: a client's cursor that ended the daemon, error payloads of any bytes
(tests/unit/server/test_runner_hostile.py, tests/unit/shm/test_ring_messages.py).
"""

from __future__ import annotations

import fcntl
import os
import random
import subprocess
import sys
from pathlib import Path

import native_build
import pytest

pytestmark = pytest.mark.slow
HERE = Path(__file__).resolve().parent
PYTHON = ("frames", "payloads", "config", "ring", "meta", "adopt", "restart")
NATIVE = ("fuzz_ring", "fuzz_meta", "fuzz_adopt")
SECONDS = 1.5


def run(command: list[str], directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=100)
    kept = [path.name for path in directory.iterdir()]
    assert done.returncode == 0, f"{done.stderr[-3000:]}\ninput kept: {kept}"
    with capsys.disabled():
        print("\n" + done.stdout.strip().splitlines()[-1])


@pytest.mark.parametrize("target", PYTHON)
def test_the_target_ends_only_as_its_contract_says(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seed = random.SystemRandom().getrandbits(32)
    command = [sys.executable, str(HERE / "fuzz.py"), target, "--seconds", str(SECONDS), "--seed", str(seed)]
    run(command, tmp_path, capsys)


@pytest.fixture(scope="module")
def native() -> Path:
    """The folder of the native targets, on the testing build's objects."""
    native_build.testing_library()
    tools = Path(sys.executable).parent
    with (native_build.BUILD / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        configure = [str(tools / "cmake"), "-DKVD_FUZZ=ON", str(native_build.BUILD)]
        build = [str(tools / "cmake"), "--build", str(native_build.BUILD), "--target", *NATIVE]
        for command in (configure, build):
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return native_build.BUILD


@pytest.mark.parametrize("target", NATIVE)
def test_the_native_target_survives(
    native: Path, target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seed = random.SystemRandom().getrandbits(32)
    files = [str(path) for path in sorted((HERE / "corpus" / target).iterdir())]
    assert files, "the corpus is kept in the repository"
    run([str(native / target), str(SECONDS), str(seed), *files], tmp_path, capsys)


def test_a_target_can_fail(tmp_path: Path) -> None:
    """A parser that lets another exception out is found, and the input is kept."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import fuzz, targets\n"
        "def broken(data):\n    if len(data) > 3 and data[0] % 6 == 2: {}['missing']\n"
        "fuzz.at_random('payloads', broken, fuzz.known('payloads', targets.SEEDS['payloads']), 5.0, 1)"
    )
    command = [sys.executable, "-c", code, str(HERE)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert [name for name in os.listdir(tmp_path) if name.startswith("crash-payloads-")]
