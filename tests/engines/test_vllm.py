"""kvd under the real vLLM (make test-engines). Each scenario is a process; what must hold is asserted here.

Tokens are compared with a run that computed everything; counters of the connector prove that bytes of kvd were
loaded; where bytes are spoiled the tokens must differ, so that "equal tokens" means something. Skipped, with the
reason printed, where vLLM cannot be imported: it has a virtual environment of its own (build/venv-vllm).
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from vllm_harness import BLOCK, MARKS, PREFIX, check_loaded, scenario

pytestmark = MARKS


@pytest.fixture
def running(daemon: Any) -> Any:
    """A daemon with room for every scenario."""
    return daemon(pool={"size": "512MiB"})


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
def test_cold_stored_loaded(running: Any, algorithm: str) -> None:
    """The main job, under both hashes of the engine."""
    result = scenario(
        "cold_and_loaded", socket=running.socket, options={"prefix_caching_hash_algo": algorithm}
    )
    check_loaded(result, PREFIX)
    assert result["after_cold"]["saved_chunks"] == PREFIX // BLOCK
    assert result["longer"]["cached"] >= PREFIX


@pytest.mark.parametrize("load", ["async", "layers"])
def test_loaded_between_steps_and_beside_them(running: Any, load: str) -> None:
    """The same with asynchronous loads, and with loads layer by layer."""
    check_loaded(scenario("cold_and_loaded", socket=running.socket, extra={"load": load}), PREFIX)


@pytest.mark.parametrize("kind", ["sliding", "hybrid"])
def test_windows(running: Any, kind: str) -> None:
    """A10: a hit only when every group's rule holds; sliding and hybrid models load and give the same tokens."""
    result = scenario("cold_and_loaded", socket=running.socket, kind=kind)
    check_loaded(result, PREFIX)


def test_damage_is_noticed_when_asked_for(running: Any) -> None:
    """With verify, spoiled bytes are a failed load, and the engine computes: the tokens stay right (A4)."""
    result = scenario("cold_and_loaded", socket=running.socket, extra={"verify": True})
    assert result["loaded"]["tokens"] == result["cold"]["tokens"] == result["spoiled"]["tokens"]
    assert result["after_spoiled"]["load_failures"] > 0


def test_second_process_and_other_identities(running: Any, tmp_path: Path) -> None:
    """E1: another process, with a random hash seed of its own, hits. A8, A9, E2: another revision under the same
    name, type, block size, salt, tenant are misses, never garbage.
    """
    link = str(tmp_path / "model")
    first = scenario("one_run", socket=running.socket, model_link=link)
    assert first["counters"]["hit_tokens"] == 0
    second = scenario("one_run", socket=running.socket, model_link=link)
    assert second["counters"]["hit_tokens"] == PREFIX
    assert second["run"]["tokens"] == first["run"]["tokens"]
    assert second["short"] == first["short"]
    others = {
        "revision": {"seed": 1},
        "dtype": {"options": {"dtype": "bfloat16"}},
        "block": {"options": {"block_size": 64}},
        "salt": {"extra": {"salt": "another"}},
    }
    for name, changed in others.items():
        other = scenario("one_run", socket=running.socket, model_link=link, **changed)
        assert other["counters"]["hit_tokens"] == other["counters"]["loaded_bytes"] == 0, name
        if name in ("block", "salt"):
            assert other["run"]["tokens"] == first["run"]["tokens"], name
        else:
            alone = scenario("one_run", model_link=link, **changed)
            assert other["run"]["tokens"] == alone["run"]["tokens"], name


def test_salts_of_requests(running: Any) -> None:
    """E2: what was stored under one salt is found under no other, and under its own again."""
    result = scenario("salts", socket=running.socket)
    assert [result[name]["hit"] for name in ("first", "other", "none")] == [0, 0, 0]
    assert result["again"]["hit"] == 1000 // BLOCK * BLOCK
    assert result["again"]["tokens"] == result["first"]["tokens"]


@pytest.mark.parametrize("load", ["sync", "async", "layers"])
def test_loads_fail_at_random(running: Any, load: str) -> None:
    """A4: every failed load is told; with policy recompute the tokens stay those of the cold run."""
    result = scenario(
        "failing_loads", socket=running.socket, random_seed=3, extra={"load": load}, policy="recompute"
    )
    assert result["failures"] > 3
    for run in (*result["rounds"], result["after"]):
        assert [r["tokens"] for r in run] == [r["tokens"] for r in result["cold"]]
    assert result["counters"]["load_failures"] == result["failures"]


def test_loads_fail_with_policy_fail(running: Any) -> None:
    """The request ends with an error, the engine lives, others are right."""
    result = scenario("failing_loads", socket=running.socket, random_seed=3, policy="fail")
    assert result["failures"] > 3
    errors = 0
    for run in result["rounds"]:
        for one, cold in zip(run, result["cold"], strict=True):
            if one["reason"] == "error":
                errors += 1
            else:
                assert one["tokens"] == cold["tokens"]
    assert errors >= result["failures"] > 0
    assert [r["tokens"] for r in result["after"]] == [r["tokens"] for r in result["cold"]]


def test_chunked_prefill_and_long_prompts(running: Any) -> None:
    """A11: 1 … 256 chunks, around 114 … 128 too, computed in steps of 512 tokens."""
    counts = [1, 2, 15, 16, 17, 113, 114, 127, 128, 129, 256]
    result = scenario(
        "chunked", socket=running.socket, chunks=counts,
        options={"max_num_batched_tokens": 512, "max_model_len": 16384},
    )  # fmt: skip
    for run in result["runs"]:
        assert run["loaded"]["tokens"] == run["cold"]["tokens"], run["chunks"]
        assert run["hit"] == run["chunks"] * BLOCK
        assert run["bytes"] > 0


def test_the_last_token_is_computed(running: Any) -> None:
    """A prompt that ends at a block's end does not load its last block."""
    result = scenario("chunked", socket=running.socket, chunks=[2, 16], rest=0)
    assert [run["hit"] for run in result["runs"]] == [BLOCK, 15 * BLOCK]
    assert all(run["loaded"]["tokens"] == run["cold"]["tokens"] for run in result["runs"])


def test_daemon_restarts(daemon: Any) -> None:
    """C3: the daemon stops, is killed, comes back, is killed between promise and copy; the engine never notices."""
    one = daemon(pool={"size": "256MiB"})
    holder = [one]

    def start() -> None:
        holder[0] = daemon(pool={"size": "256MiB"}, directory=one.directory)

    when = {"term": lambda: holder[0].stop(), "kill": lambda: holder[0].kill(), "start": start}
    result = scenario("restarts", socket=one.socket, how=["kill", "term"], when=when)
    for how in ("kill", "term"):
        assert result[how]["away"]["tokens"] == result["cold"]["tokens"]
        assert result[how]["attached_s"] < 5
        assert result[how]["loaded"]["tokens"] == result["cold"]["tokens"]
        assert result[how]["bytes"] > 0
    assert result["during"]["tokens"] == result["cold"]["tokens"]
    assert result["counters"]["hook_errors"] == 0


def test_daemon_stopped(running: Any) -> None:
    """C2, C11: a daemon that does not answer costs no step anything; what it has is still loaded."""
    when = {
        "stop": lambda: os.kill(running.pid, signal.SIGSTOP),
        "cont": lambda: os.kill(running.pid, signal.SIGCONT),
    }
    result = scenario("stopped_daemon", socket=running.socket, when=when)
    assert result["loaded"]["tokens"] == result["afterwards"]["tokens"] == result["cold"]["tokens"]
    assert result["loaded"]["cached"] == PREFIX
    # Who waits for the daemon waits for a second, at each prompt; other work on the machine slows down single ones.
    assert result["hook_us_max"] < 900_000
    assert min(result["stopped_s"]) < 2 * max(result["running_s"]) + 0.3
    counted = result["counters"]
    assert (
        counted["saves_away"] + counted["saves_gone"] > 0
    )  # gone: the request ended before the deadline of its save


@pytest.mark.parametrize("load", ["sync", "async"])
def test_preemption_and_aborts(running: Any, load: str) -> None:
    """A2, B2: requests lose their blocks or are aborted while they are stored and loaded; nothing wrong is stored, and
    no lease is left.
    """
    result = scenario(
        "preemption", socket=running.socket, random_seed=5, extra={"load": load},
        options={"num_gpu_blocks_override": 96, "max_model_len": 2048, "max_num_batched_tokens": 256},
    )  # fmt: skip
    assert result["preempted"] > 0
    assert result["aborted"] > 3
    assert result["held"] == 0
    assert result["hit"] > 0
    assert [r["tokens"] for r in result["checked"]] == [r["tokens"] for r in result["reference"]]
    assert result["counters"]["hook_errors"] == 0


def test_pool_full(daemon: Any) -> None:
    """More prompts than the pool holds: evicted or not saved, always right."""
    small = daemon(pool={"size": "32MiB"})
    result = scenario("many_prompts", socket=small.socket, count=12)
    assert [r["tokens"] for r in result["again"]] == [r["tokens"] for r in result["cold"]]
    assert result["counters"]["hook_errors"] == 0


def test_weights_changed(running: Any) -> None:
    """A9: after the engine resets its connector nothing of before is found, and what is stored since is."""
    result = scenario("weights_changed", socket=running.socket)
    assert result["hit_after_reset"] == 0
    assert result["hit_again"] == 1000 // BLOCK * BLOCK
    assert result["again"]["tokens"] == result["cold"]["tokens"]


def test_no_hook_raises(running: Any) -> None:
    """Every part of the connector raises in turn: the engine lives and its tokens stay right."""
    result = scenario("hook_that_raises", socket=running.socket)
    for run in (*result["runs"], result["after"]):
        assert run["tokens"] == result["cold"]["tokens"], run.get("hook")
    assert result["counters"]["hook_errors"] > 0


def test_several_processes(running: Any) -> None:
    """vLLM's default: scheduler, worker and front end are processes. The second engine hits what the first stored."""
    first = scenario("one_run", socket=running.socket, in_process=False)
    second = scenario("one_run", socket=running.socket, in_process=False)
    assert second["run"]["tokens"] == first["run"]["tokens"]
    assert (first["run"]["cached"], second["run"]["cached"]) == (0, PREFIX)


def test_without_a_daemon(tmp_path: Path) -> None:
    """No daemon at all: the engine starts and answers."""
    alone = scenario("one_run")
    away = scenario("one_run", socket=str(tmp_path / "nobody.sock"))
    assert away["run"]["tokens"] == alone["run"]["tokens"]
