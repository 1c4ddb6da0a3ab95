"""kvd under the real vLLM with other engines beside it, dead ones before it, poisoned blocks, a daemon that stops."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from vllm_harness import BLOCK, MARKS, PREFIX, scenario

import kvd

pytestmark = MARKS
FILE = "vllm_scenarios_rough.py"


@pytest.fixture
def running(daemon: Any) -> Any:
    """A daemon with room for every scenario."""
    return daemon(pool={"size": "512MiB"})


def test_two_engines_at_the_same_time(running: Any) -> None:
    """B1: both look up, load, store the same prompts at once; each finds what the other stored; tokens never differ."""
    barriers = {name: threading.Barrier(2, timeout=300) for name in ("meet", "part")}
    when = {name: barrier.wait for name, barrier in barriers.items()}

    def engine(number: int) -> Any:
        with contextlib.ExitStack() as undo:
            undo.callback(lambda: [barrier.abort() for barrier in barriers.values()])
            result = scenario("side_by_side", file=FILE, socket=running.socket, number=number, when=when)
            undo.pop_all()
            return result

    with ThreadPoolExecutor(2) as pool:
        one, two = pool.map(engine, (0, 1))
    assert one["alone"] == two["alone"]
    for result in (one, two):
        assert len(result["equal"]) == 24
        assert all(equal for _, equal in result["equal"])
        assert result["counters"]["loaded_bytes"] > 0
        assert result["counters"]["hook_errors"] == result["counters"]["load_failures"] == 0
    # Each prompt is stored under a salt of each engine's own, and once for both.
    chunks = sum((700 + 40 * n) // BLOCK for n in range(8))
    total = {name: one["counters"][name] + two["counters"][name] for name in one["counters"]}
    assert 0 < total["saved_chunks"] <= 3 * chunks + 8  # the answers fill a block more, at most
    offered = ("saved_chunks", "saves_present", "saves_gone", "saves_late", "saves_away")
    assert sum(total[name] for name in offered) >= 3 * chunks


def test_an_engine_is_killed_and_started_again(running: Any) -> None:
    """C1, E1: killed (SIGKILL) between promise and copy. The next one hits all that was stored; no lease is left."""
    first = scenario("killed", file=FILE, socket=running.socket, dies=True)
    assert first["counters"]["saved_chunks"] == PREFIX // BLOCK
    second = scenario("one_run", socket=running.socket)
    assert second["counters"]["hit_tokens"] == PREFIX
    assert second["counters"]["loaded_bytes"] > 0
    assert second["run"]["tokens"] == first["cold"]["tokens"]
    with kvd.connect(running.socket) as store:
        clients = store.call("clients")
    assert sum(client["leases"] for client in clients) == 0
    assert len(clients) == 1, "the dead engine's scheduler or worker is still a client"


@pytest.mark.parametrize(("load", "seed"), [("sync", 5), ("async", 6)])
def test_freed_blocks_are_garbage(running: Any, load: str, seed: int) -> None:
    """A2, A3: no load writes to and no save reads from a block that the engine has freed, however late the daemon is.

    Without `gone` in the plan (`forget_gone`) late saves publish the garbage, and the tokens differ.
    """
    result = scenario(
        "poisoned", file=FILE, socket=running.socket, random_seed=seed, extra={"load": load},
        options={"num_gpu_blocks_override": 96, "max_model_len": 2048, "max_num_batched_tokens": 256},
    )  # fmt: skip
    assert result["freed"] > 500
    assert result["preempted"] > 0
    assert result["aborted"] > 3
    assert result["counters"]["saves_gone"] > 0
    assert result["hit"] > 0
    assert result["counters"]["loaded_bytes"] > 0
    assert [r["tokens"] for r in result["checked"]] == [r["tokens"] for r in result["reference"]]
    assert result["held"] == 0
    assert result["counters"]["hook_errors"] == 0


def test_garbage_would_be_noticed(running: Any) -> None:
    """The control of the test above: without `gone` its tokens do differ."""
    result = scenario(
        "poisoned", file=FILE, socket=running.socket, random_seed=5, forget_gone=True, abort_chance=0.1,
        options={"num_gpu_blocks_override": 96, "max_model_len": 2048, "max_num_batched_tokens": 256},
    )  # fmt: skip
    assert [r["tokens"] for r in result["checked"]] != [r["tokens"] for r in result["reference"]]


def test_daemon_stops_for_ten_seconds_in_mid_request(running: Any) -> None:
    """C2: SIGSTOP while a request is answered. No step waits, hits go on, tokens stay right, and all is well after."""
    when = {
        "stop": lambda: os.kill(running.pid, signal.SIGSTOP),
        "cont": lambda: os.kill(running.pid, signal.SIGCONT),
    }
    result = scenario("stopped_in_mid_request", file=FILE, socket=running.socket, stopped_s=10, when=when)
    for name, tokens in result["outputs"].items():
        kind, number = name.split("-")[:2]
        expected = result["cold"] if kind == "known" else result["fresh"][int(number)]
        assert tokens == expected["tokens"], name
    assert len(result["outputs"]) == 3 + result["loads"]
    assert result["loads"] > 1
    assert result["step_s_max"] < 5  # not the ten seconds; a step of 800 tokens on a busy machine
    assert result["afterwards"]["tokens"] == result["cold"]["tokens"]
    assert result["afterwards"]["cached"] == PREFIX
    assert result["bytes"] > 0
    assert result["counters"]["hook_errors"] == 0
