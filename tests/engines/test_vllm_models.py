"""kvd under the real vLLM with what changes the bytes or their shape: LoRAs, latents, TP, long prompts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from vllm_harness import BLOCK, MARKS, PREFIX, scenario

pytestmark = MARKS


@pytest.fixture
def running(daemon: Any) -> Any:
    """A daemon with room for every scenario."""
    return daemon(pool={"size": "512MiB"})


def test_loras(running: Any, tmp_path: Path) -> None:
    """E2: what one LoRA's prompts stored is found with that LoRA only, and not with others that took its place.

    Without the adapter's weights in the namespace "replaced" would load the KV of the LoRA of before, whose name and
    path are the same, and so are vLLM's hashes.
    """
    result = scenario("loras", socket=running.socket, folder=str(tmp_path))
    prefix = 1000 // BLOCK * BLOCK
    names = ("none", "a", "b")
    assert len({tuple(result[f"{name} cold"]["tokens"]) for name in names}) == 3
    for name in names:
        cold, again = result[f"{name} cold"], result[f"{name} again"]
        assert cold["hit_tokens"] == cold["loaded_bytes"] == 0, name
        assert cold["saved_chunks"] == 1000 // BLOCK, name
        assert again["hit_tokens"] == prefix, name
        assert again["loaded_bytes"] > 0, name
        assert again["tokens"] == cold["tokens"], name
    assert result["replaced"]["hit_tokens"] == result["replaced"]["loaded_bytes"] == 0
    assert result["replaced"]["tokens"] != result["a cold"]["tokens"]


def test_latent_attention(running: Any) -> None:
    """MLA: one latent a token and layer instead of keys and values. On a CPU vLLM has no prefix cache of its own for
    them, and blocks of 16 tokens: what is asked a second time comes from kvd already.
    """
    result = scenario("cold_and_loaded", socket=running.socket, kind="mla")
    assert result["loaded"]["tokens"] == result["local"]["tokens"] == result["cold"]["tokens"]
    assert result["loaded"]["cached"] == result["local"]["cached"] == PREFIX
    after = result["after_loaded"]
    assert after["hit_tokens"] == 2 * PREFIX
    assert after["loaded_bytes"] == 2 * PREFIX * 4 * (512 + 64) * 4  # layers, latent, float32
    assert after["hook_errors"] == after["load_failures"] == 0
    assert result["spoiled_objects"] > 0
    assert result["spoiled"]["tokens"] != result["cold"]["tokens"]


@pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="tensor parallelism on a CPU needs a core a worker"
)
def test_tensor_parallelism(running: Any) -> None:
    """A11, TP 2: each worker stores and loads its heads; the scheduler's one lease serves both, in four processes.

    Then the same at TP 1: the split is recorded with the families and no part of their names.
    """
    cores = sorted(os.sched_getaffinity(0))[:2]
    given = {
        "in_process": False, "environment": {"VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, cores))},
        "options": {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
    }  # fmt: skip
    first = scenario("one_run", socket=running.socket, **given)
    assert first["counters"]["saved_chunks"] == 2 * (PREFIX // BLOCK)  # counted by each worker
    second = scenario("one_run", socket=running.socket, **given)
    assert second["run"]["tokens"] == first["run"]["tokens"]
    assert (first["run"]["cached"], second["run"]["cached"]) == (0, PREFIX)
    assert second["counters"]["hit_tokens"] == PREFIX
    assert second["counters"]["loaded_bytes"] == first["counters"]["saved_bytes"] > 0
    assert second["counters"]["hook_errors"] == second["counters"]["load_failures"] == 0
    # One worker reads what two wrote, put together on the way; an empty or shuffled head would change tokens.
    alone = scenario("one_run", socket=running.socket)
    assert alone["run"]["tokens"] == first["run"]["tokens"]
    assert alone["run"]["cached"] == alone["counters"]["hit_tokens"] == PREFIX
    assert alone["counters"]["loaded_bytes"] == first["counters"]["saved_bytes"]
    assert alone["counters"]["hook_errors"] == alone["counters"]["load_failures"] == 0


def test_a_prompt_of_1024_chunks(running: Any) -> None:
    """A11: 32,769 tokens, computed and loaded in steps of 2,048."""
    result = scenario(
        "chunked", socket=running.socket, chunks=[1024],
        shape={"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 128},
        options={"max_num_batched_tokens": 2048, "max_model_len": 33000},
    )  # fmt: skip
    (run,) = result["runs"]
    assert run["loaded"]["tokens"] == run["cold"]["tokens"]
    assert run["hit"] == 1024 * BLOCK
    assert run["bytes"] == 1024 * BLOCK * 2 * 2 * 64 * 4  # layers, K and V, dimensions, float32
    assert result["counters"]["load_failures"] == result["counters"]["hook_errors"] == 0
