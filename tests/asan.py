"""The extension under AddressSanitizer and UndefinedBehaviorSanitizer, in real processes: `make stress-asan`.

Builds it once (under build/), then runs the unit tests of kvd.shm and a soak on it: daemon and clients alike, with
kills, hostile rings and scribbled regions. A finding ends its process, and that fails the run. Leaks of native tests
are looked for by `make sanitize`; in a Python process they would be those of the interpreter.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "asan"
INJECT = ROOT / "tests" / "faults" / "inject"


def library() -> Path:
    """Build what is out of date and return the module."""
    tools = Path(sys.executable).parent
    BUILD.mkdir(parents=True, exist_ok=True)
    configure = [
        str(tools / "cmake"), "-S", str(ROOT), "-B", str(BUILD), "-G", "Ninja", "-DCMAKE_BUILD_TYPE=RelWithDebInfo",
        f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}", f"-DPython_EXECUTABLE={sys.executable}",
        "-DKVD_PYTHON_MODULE=ON", "-DKVD_DEFINES=KVD_TESTING", "-DKVD_SANITIZE=address",
    ]  # fmt: skip
    for command in (configure, [str(tools / "cmake"), "--build", str(BUILD), "--target", "_native"]):
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return next(BUILD.glob("_native*.so"))


def environment(module: Path) -> dict[str, str]:
    """Every Python process that inherits this runs on the module."""
    # The C++ runtime too: without it there is nothing yet for the sanitizer's own throw to hand an exception on to.
    runtimes = [
        subprocess.run(
            ["g++", f"-print-file-name={name}"], check=True, capture_output=True, text=True
        ).stdout.strip()
        for name in ("libasan.so", "libstdc++.so.6")
    ]
    return {
        **os.environ,
        "LD_PRELOAD": " ".join(runtimes),
        "PYTHONPATH": str(INJECT),
        "FAULTS_LIBRARY": str(module),
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
        "PYTHONMALLOC": "malloc",
    }


def main() -> int:
    """Build, test, soak; the exit status of what failed first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=0.5)
    arguments = parser.parse_args()
    env = environment(library())
    tests = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "tests/unit/shm",
        "-k",
        "not tensor and not mutant",
    ]
    soak = [sys.executable, "tests/soak/run.py", "--minutes", str(arguments.minutes), "--least", "0.01"]
    for command in (tests, soak):
        print("==", " ".join(command[1:]), flush=True)
        if code := subprocess.run(command, cwd=ROOT, env=env).returncode:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
