"""What the vLLM scenarios share: tiny models, an engine, a run of one prompt, counters of the connector.

A scenario is a function of `vllm_scenarios.py`, run in a process of its own by `python vllm_scenarios.py NAME '{...}'`:
an engine holds threads, shared memory and settings that are read at import. It prints one JSON line, the last.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

BLOCK = 32
VOCABULARY = 2048


def prompt_of(tokens: int, seed: int = 0) -> list[int]:
    """Token ids that no other seed shares a block with."""
    return [(7 * i + 11 * seed * (i + 3) + 3 + seed) % (VOCABULARY - 10) + 3 for i in range(tokens)]


def make_model(into: Path, kind: str, seed: int = 0, **changes: Any) -> Path:
    """A random model of one of these kinds, saved as a checkpoint without tokenizer, unless it is there already.

    "llama": full attention. "sliding": every layer slides. "hybrid": sliding and full layers in turn (Gemma 3).
    "mla": latent attention (DeepSeek V2), which vLLM's CPU backend computes with latents of 512 + 64 only.
    """
    import torch
    from transformers import (
        DeepseekV2Config,
        DeepseekV2ForCausalLM,
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        LlamaConfig,
        LlamaForCausalLM,
        MistralConfig,
        MistralForCausalLM,
    )

    name = "-".join([kind, str(seed), *(f"{k}={v}" for k, v in sorted(changes.items()))])
    path = into / name
    if (path / "config.json").exists():
        return path
    common: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 40960,
        "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "tie_word_embeddings": False,
        "initializer_range": 0.08, **changes,
    }  # fmt: skip
    torch.manual_seed(seed)
    match kind:
        case "llama":
            model: Any = LlamaForCausalLM(LlamaConfig(**common))
        case "sliding":
            model = MistralForCausalLM(MistralConfig(**common, sliding_window=256))
        case "hybrid":
            layers = ["sliding_attention", "full_attention"] * (common["num_hidden_layers"] // 2)
            config = Gemma3TextConfig(
                **common, sliding_window=256, layer_types=layers, query_pre_attn_scalar=64
            )
            model = Gemma3ForCausalLM(config)
        case "mla":
            for name in ("num_key_value_heads", "head_dim"):
                del common[name]
            dense = common["num_hidden_layers"]
            config = DeepseekV2Config(
                **common, num_key_value_heads=4, kv_lora_rank=512, q_lora_rank=None, qk_rope_head_dim=64,
                qk_nope_head_dim=128, v_head_dim=128, first_k_dense_replace=dense, n_routed_experts=8,
            )  # fmt: skip
            model = DeepseekV2ForCausalLM(config)
        case _:
            raise ValueError(kind)
    building = path.with_name(path.name + f".{os.getpid()}")
    model.to(torch.float32).save_pretrained(building)
    building.rename(path)
    return path


def make_lora(into: Path, model: Path, seed: int) -> Path:
    """A random LoRA of a "llama" of `make_model`, as PEFT saves one; other seeds are other weights."""
    import torch
    from safetensors.torch import save_file

    into.mkdir(parents=True, exist_ok=True)
    config = json.loads((model / "config.json").read_text())
    hidden, head = config["hidden_size"], config["head_dim"]
    widths = {"q_proj": config["num_attention_heads"] * head, "v_proj": config["num_key_value_heads"] * head}
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, width in widths.items():
            where = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{where}.lora_A.weight"] = 0.1 * torch.randn(8, hidden, generator=random)
            tensors[f"{where}.lora_B.weight"] = 0.1 * torch.randn(width, 8, generator=random)
    save_file(tensors, into / "adapter_model.safetensors")
    described = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 8, "lora_alpha": 16, "bias": "none",
        "target_modules": list(widths), "base_model_name_or_path": str(model),
    }  # fmt: skip
    (into / "adapter_config.json").write_text(json.dumps(described))
    return into


def settle_environment(*, in_process: bool = True) -> None:
    """Settings that vLLM reads at import."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    if in_process:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


class Engine:
    """vLLM with or without kvd. `run` returns tokens and what was cached; `counters` adds up both roles."""

    def __init__(
        self, model: str, socket: str | None, *, in_process: bool = True, policy: str = "recompute",
        extra: dict[str, Any] | None = None, **options: Any,
    ) -> None:  # fmt: skip
        settle_environment(in_process=in_process)
        from vllm import LLM
        from vllm.config import KVTransferConfig

        if socket is not None:
            options["kv_transfer_config"] = KVTransferConfig(
                kv_connector="KvdConnector", kv_connector_module_path="kvd.engines.vllm", kv_role="kv_both",
                kv_load_failure_policy=policy, kv_connector_extra_config={"socket": socket, **(extra or {})},
            )  # fmt: skip
        if in_process:
            options.setdefault("distributed_executor_backend", "uni")
        settings = {
            "dtype": "float32", "max_model_len": 4096, "max_num_batched_tokens": 4096, "enforce_eager": True,
            "enable_prefix_caching": True, "block_size": BLOCK, "seed": 0, "skip_tokenizer_init": True,
            "disable_log_stats": False, **options,
        }  # fmt: skip
        self.llm = LLM(model, **settings)

    def run(self, prompt: list[int], tokens: int = 8, *, lora: Any = None, **request: Any) -> dict[str, Any]:
        """One prompt, greedily."""
        return self.run_all([prompt], tokens, lora=lora, **request)[0]

    def run_all(
        self, prompts: list[list[int]], tokens: int = 8, *, lora: Any = None, **request: Any
    ) -> list[dict[str, Any]]:
        """Several prompts at once; `lora` is a LoRARequest."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        inputs = [{"prompt_token_ids": prompt, **request} for prompt in prompts]
        outputs = self.llm.generate(inputs, sampling, use_tqdm=False, lora_request=lora)
        return [
            {
                "tokens": list(out.outputs[0].token_ids),
                "cached": out.num_cached_tokens,
                "reason": out.outputs[0].finish_reason,
                "ttft_s": getattr(out.metrics, "first_token_latency", None),
            }
            for out in outputs
        ]

    def reset(self) -> bool:
        """Drop the engine's own prefix cache."""
        return bool(self.llm.reset_prefix_cache())

    def metrics(self) -> dict[str, int]:
        """Counters of the connector as the engine's Prometheus page shows them: from wherever its roles run."""
        return {
            metric.name.removeprefix("vllm:kvd_"): int(metric.value)
            for metric in self.llm.get_metrics()
            if metric.name.startswith("vllm:kvd_")
        }

    # -- in process only ----------------------------------------------------------------------------------

    @property
    def connectors(self) -> tuple[Any, Any]:
        """The scheduler's and the worker's connector."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        core = self.llm.llm_engine.engine_core.engine_core
        return core.scheduler.get_kv_connector(), get_kv_transfer_group()

    def counters(self) -> dict[str, int]:
        """Counters of both roles, after everything copied was published."""
        scheduler, worker = self.connectors
        worker.worker.flush(10)
        totals = scheduler.scheduler.counters.totals()
        for name, amount in worker.worker.counters.totals().items():
            totals[name] += amount
        return totals

    def ready(self, timeout_s: float = 10.0) -> bool:
        """Whether both roles are attached."""
        scheduler, worker = self.connectors
        return all(
            side.attachment.wait(timeout_s) is not None for side in (scheduler.scheduler, worker.worker)
        )

    def close(self) -> None:
        """End of the engine."""
        self.llm.llm_engine.engine_core.shutdown()


def say(result: dict[str, Any]) -> None:
    """The answer of a scenario."""
    print("RESULT " + json.dumps(result), flush=True)
