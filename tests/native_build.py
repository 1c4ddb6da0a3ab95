"""The testing build of the native extension: mechanisms can be left out, processes stopped at named steps.

`testing_library()` builds it once (cmake, half a minute, kept under build/) and returns the path of the module. A
process uses it when started as `python tests/native_build.py LIBRARY SCRIPT ARGS...` (or `-m MODULE ARGS...`): the
library takes the place of kvd.shm._native before anything of kvd is imported. What is left out is said in KVD_MUTANT,
where to stop in KVD_STOP_AT (kvd/shm/native/mutants.hpp).
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import runpy
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "testing"


def testing_library() -> Path:
    """Build what is out of date and return the module. Several test processes may ask at once."""
    BUILD.mkdir(parents=True, exist_ok=True)
    tools = Path(sys.executable).parent
    with (BUILD / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        configure = [
            str(tools / "cmake"), "-S", str(ROOT), "-B", str(BUILD), "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release",
            f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}", f"-DPython_EXECUTABLE={sys.executable}",
            "-DKVD_PYTHON_MODULE=ON", "-DKVD_DEFINES=KVD_TESTING",
        ]  # fmt: skip
        for command in (configure, [str(tools / "cmake"), "--build", str(BUILD), "--target", "_native"]):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{' '.join(command)}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return next(BUILD.glob("_native*.so"))


def command(library: Path, *arguments: str) -> list[str]:
    """The command that runs a script (or -m module) on the testing build."""
    return [sys.executable, str(Path(__file__)), str(library), *arguments]


def _load(library: str) -> None:
    spec = importlib.util.spec_from_file_location("kvd.shm._native", library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["kvd.shm._native"] = module
    spec.loader.exec_module(module)
    import kvd.shm

    kvd.shm._native = module  # type: ignore[attr-defined]


def main() -> None:
    """Run the rest of the command line on the given library."""
    library, *rest = sys.argv[1:]
    sys.path[0] = os.getcwd() if rest[0] == "-m" else str(Path(rest[0]).parent)
    _load(library)
    if rest[0] == "-m":
        sys.argv = rest[1:]
        runpy.run_module(rest[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = rest
        runpy.run_path(rest[0], run_name="__main__")


if __name__ == "__main__":
    main()
