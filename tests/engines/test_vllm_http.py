"""kvd under vLLM's OpenAI server: eight clients replay conversations, also against a second server.

Needs the checkpoint of examples/make_checkpoint.py, since a server wants a tokenizer; skipped, with the reason printed,
without it or without vLLM.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CHECKPOINT = Path(__file__).resolve().parents[2] / "build" / "models" / "smollm2-135m"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None,
        reason="vLLM is not importable here: make test-engines has an environment for it",
    ),
    pytest.mark.skipif(not CHECKPOINT.exists(), reason=f"no checkpoint at {CHECKPOINT}: make demo makes it"),
]
CLIENTS, TURNS = 8, 3


class Server:
    """An OpenAI server on a free port of the loopback."""

    def __init__(self, kvd_socket: str, log: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        transfer = {
            "kv_connector": "KvdConnector", "kv_connector_module_path": "kvd.engines.vllm", "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"socket": kvd_socket},
        }  # fmt: skip
        self._log = log.open("wb")
        self.process = subprocess.Popen(
            [
                sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(CHECKPOINT),
                "--served-model-name", "m", "--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32",
                "--max-model-len", "4096", "--block-size", "32", "--enforce-eager", "--kv-transfer-config",
                json.dumps(transfer),
            ],
            env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
            stdout=self._log, stderr=self._log, start_new_session=True,
        )  # fmt: skip
        try:
            self._until_healthy(log)
        except BaseException:
            self.close()
            raise

    def _until_healthy(self, log: Path) -> None:
        for _ in range(1200):
            with contextlib.suppress(OSError), self._open("/health"):
                return
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(0.25)  # instead of sleeping: ends at once if the server does
                break
        pytest.fail(f"the server did not start:\n{log.read_text(errors='replace')[-4000:]}")

    def _open(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"}
        )
        return urllib.request.urlopen(request, timeout=300)

    def complete(self, prompt: str) -> str:
        """One answer, greedily."""
        with self._open(
            "/v1/completions", {"model": "m", "prompt": prompt, "max_tokens": 16, "temperature": 0}
        ) as answer:
            return str(json.load(answer)["choices"][0]["text"])

    def counter(self, name: str) -> float:
        """A counter of its Prometheus page."""
        with self._open("/metrics") as answer:
            page = answer.read().decode()
        found = [line for line in page.splitlines() if line.startswith(f"vllm:kvd_{name}_total{{")]
        assert len(found) == 1, f"{name}: {found}"
        return float(found[0].rsplit(" ", 1)[1])

    def close(self) -> None:
        """End it and its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self._log.close()


@contextlib.contextmanager
def serving(kvd_socket: str, log: Path) -> Iterator[Server]:
    server = Server(kvd_socket, log)
    try:
        yield server
    finally:
        server.close()


def conversations(server: Server) -> list[list[str]]:
    """What each client was told, turn by turn; turns of a client follow each other, clients do not wait."""
    rules = "\n".join(f"Rule {n}: a value of {n * 7} is written as {n * 13 % 101}." for n in range(30))

    def one(client: int) -> list[str]:
        text, answers = f"Client {client}.\n{rules}\n", []
        for turn in range(TURNS):
            text += f"Question {turn}: how is {7 * (client + turn + 1)} written?\nAnswer:"
            answers.append(server.complete(text))
            text += answers[-1] + "\n"
        return answers

    with concurrent.futures.ThreadPoolExecutor(CLIENTS) as pool:
        return list(pool.map(one, range(CLIENTS)))


def test_conversations_go_on_at_a_second_server(daemon: Any, tmp_path: Path) -> None:
    """The second server loads what the first stored and says the same; the counters are there from the start."""
    running = daemon(pool={"size": "1GiB"})
    with serving(running.socket, tmp_path / "first.log") as first:
        assert first.counter("loaded_bytes") == 0
        said = conversations(first)
    with serving(running.socket, tmp_path / "second.log") as second:
        again = conversations(second)
        assert second.counter("loaded_bytes") > 0
        assert second.counter("hit_tokens") > 0.5 * second.counter("asked_tokens")
        assert second.counter("hook_errors") == second.counter("load_failures") == 0
    assert again == said
