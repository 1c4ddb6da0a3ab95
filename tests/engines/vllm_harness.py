"""Runs scenarios of the real vLLM for its tests: a process each, asked for what it wants done, judged by its result.

Used by test_vllm*.py alone. `MARKS` belong on every module that uses it: they skip, with the reason printed, where vLLM
cannot be imported (it has a virtual environment of its own, build/venv-vllm).
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

MARKS = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None,
        reason="vLLM is not importable here: make test-engines has an environment for it",
    ),
]

HERE = Path(__file__).parent
MODELS = Path(tempfile.gettempdir()) / f"kvd-vllm-models-{os.getuid()}"
BLOCK = 32
PREFIX = 2000 // BLOCK * BLOCK  # what a prompt of 2,000 tokens can load


def scenario(
    name: str,
    *,
    when: dict[str, Callable[[], object]] | None = None,
    dies: bool = False,
    file: str = "vllm_scenarios.py",
    **given: Any,
) -> Any:
    """Run a scenario; `when` says what to do as it asks. Its result; its output if it has none.

    With `dies` the process and its children are killed (SIGKILL) when it asks for "die".
    """
    # Whether a load is worth it depends on what the machine does besides: here every hit is loaded.
    extra = {"break_even": False, **given.pop("extra", {})}
    given = {"models": str(MODELS), "extra": extra, **given}
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONHASHSEED", "KVD_SOCKET")}
    process = subprocess.Popen(
        [sys.executable, str(HERE / file), name, json.dumps(given)], env=clean,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdin is not None
    result, output = None, []
    try:
        for line in process.stdout:
            output.append(line)
            if line == "ASK die\n" and dies:
                os.killpg(process.pid, signal.SIGKILL)
            elif line.startswith("ASK "):
                (when or {})[line.split()[1]]()
                process.stdin.write("done\n")
                process.stdin.flush()
            elif line.startswith("RESULT "):
                result = json.loads(line[len("RESULT ") :])
        process.wait(60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if result is None:
        pytest.fail(f"{name} gave no result, exit code {process.returncode}:\n{''.join(output[-60:])}")
    print(json.dumps(result))
    return result


def check_loaded(result: Any, tokens: int) -> None:
    """Loaded from kvd, all of it, with the tokens of the cold run; and bytes that are spoiled change them."""
    assert result["loaded"]["tokens"] == result["cold"]["tokens"]
    assert result["loaded"]["cached"] == tokens
    loaded = result["after_loaded"]
    assert loaded["hit_tokens"] == tokens
    assert loaded["loaded_bytes"] > 0
    assert loaded["hook_errors"] == loaded["load_failures"] == 0
    assert result["spoiled_objects"] > 0
    assert result["spoiled"]["tokens"] != result["cold"]["tokens"]
