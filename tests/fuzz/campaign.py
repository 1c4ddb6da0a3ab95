"""`make fuzz SECONDS=60`: every target for so long, guided by coverage, one line each on how far the coverage grew.

The native targets (libFuzzer, clang) run under AddressSanitizer and UndefinedBehaviorSanitizer; those in Python with
atheris. What is found is kept under build/fuzz-corpus; `--keep` merges what adds coverage of the native targets into
tests/fuzz/corpus. An input that breaks a target is kept beside it, named crash-…, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
BUILD, FOUND, KEPT = ROOT / "build" / "fuzz", ROOT / "build" / "fuzz-corpus", HERE / "corpus"
NATIVE = ("fuzz_ring", "fuzz_meta", "fuzz_adopt")
PYTHON = ("frames", "payloads", "config", "ring", "meta", "adopt", "restart")
COMPILERS = ("clang++-14", "clang++")
PROGRESS = re.compile(r"#(\d+)\s+(?:INITED|DONE|NEW|REDUCE|pulse).*?cov: (\d+).*?corp: (\d+)")
INPUT_BYTES_MAX = 1024


def build() -> bool:
    """The native targets; False without clang."""
    tools = Path(sys.executable).parent
    compiler = next((name for name in COMPILERS if _there(name)), None)
    if compiler is None:
        print("no clang: the native targets are left out (apt-get install clang-14 libclang-rt-14-dev)")
        return False
    configure = [
        str(tools / "cmake"), "-S", str(ROOT), "-B", str(BUILD), "-G", "Ninja", "-DCMAKE_BUILD_TYPE=RelWithDebInfo",
        f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}", f"-DCMAKE_CXX_COMPILER={compiler}", "-DKVD_SANITIZE=address",
        "-DKVD_FUZZ=ON",
    ]  # fmt: skip
    for command in (configure, [str(tools / "cmake"), "--build", str(BUILD)]):
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return True


def _there(name: str) -> bool:
    return subprocess.run(["which", name], capture_output=True).returncode == 0


def campaign(name: str, command: list[str], seconds: float) -> bool:
    """Run one target; False if it broke."""
    found, kept = FOUND / name, KEPT / name
    found.mkdir(parents=True, exist_ok=True)
    options = [
        f"-max_total_time={int(seconds)}", f"-max_len={INPUT_BYTES_MAX}", "-timeout=20", "-rss_limit_mb=4096",
        f"-artifact_prefix={FOUND}/{name}-", "-len_control=0",  # an input is a list of edits: one is rarely enough
    ]  # fmt: skip
    log = FOUND / f"{name}.log"
    with log.open("wb") as output:
        folders = [str(found), *([str(kept)] if kept.is_dir() else [])]
        done = subprocess.run([*command, *options, *folders], stdout=output, stderr=output, cwd=HERE)
    steps = PROGRESS.findall(log.read_text(errors="replace"))
    if done.returncode:
        print(f"{name}: BROKEN, see {log}")
        return False
    if not steps:
        print(f"{name}: no coverage was measured, see {log}")
        return False
    (_, began, _), (runs, ended, inputs) = steps[0], steps[-1]
    print(f"{name}: {int(runs):,} inputs run, coverage {began} -> {ended}, {inputs} of them kept", flush=True)
    return True


def keep(name: str, command: list[str]) -> None:
    """Merge what adds coverage into the corpus of the repository."""
    into = KEPT / name
    into.mkdir(parents=True, exist_ok=True)
    merge = [*command, "-merge=1", "-use_counters=0", str(into), str(FOUND / name)]
    subprocess.run(merge, check=True, cwd=HERE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    print(f"{name}: {len(os.listdir(into))} inputs in the corpus")


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="for each target")
    parser.add_argument("--keep", action="store_true", help="merge what adds coverage into tests/fuzz/corpus")
    parser.add_argument("targets", nargs="*", help=f"of {', '.join((*NATIVE, *PYTHON))}; default: all")
    arguments = parser.parse_args()
    commands = {name: [str(BUILD / name)] for name in NATIVE} if build() else {}
    commands |= {name: [sys.executable, str(HERE / "fuzz.py"), name, "--guided"] for name in PYTHON}
    good = True
    for name in arguments.targets or commands:
        good &= campaign(name, commands[name], arguments.seconds)
        if arguments.keep and name in NATIVE:
            keep(name, commands[name])
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
