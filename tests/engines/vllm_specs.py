"""What vLLM itself would keep for a model, layer by layer: asked of its own model classes, without weights or memory.

Run as `python vllm_specs.py CONFIG.json ...` in the environment of vLLM; prints one line "SPECS {...}" for each
config. A model is built full-size from its config on torch's "meta" device, as vLLM's own loader builds it, and each
layer that keeps something is asked for its KV cache spec: block, page bytes, window, shapes and types of states. What
tensor parallelism makes of it is asked of the same classes, which take the degree from the configuration alone. Models
whose classes this build of vLLM lacks are asked of its calculators of states, layer by layer as their configs list
them.
"""

from __future__ import annotations

import json
import sys
import tempfile
from math import prod
from pathlib import Path
from typing import Any

import vllm_lib

TP = (2, 3, 4, 8)
# The text model of a wrapper, built alone.
TEXT_CLASS = {"gemma3_text": "Gemma3ForCausalLM", "llama4_text": "Llama4ForCausalLM"}


def prepared(config: dict[str, Any]) -> dict[str, Any]:
    """The text model in words that the installed classes read; nothing that says what is kept is changed.

    Quantised weights need kernels of a GPU, and say nothing of the KV cache.
    """
    config = {**config.get("text_config", config)}
    for name in ("quantization_config", "auto_map"):
        config.pop(name, None)
    kind = config.setdefault("model_type", "gemma3_text")
    if kind in TEXT_CLASS:
        config["architectures"] = [TEXT_CLASS[kind]]
    if kind == "kimi_k2":
        config["model_type"] = "deepseek_v3"
    if kind == "falcon_h1":
        # The class checks heads against expand x hidden size even where the inner width is stated.
        inner = config["mamba_n_heads"] * config["mamba_d_head"]
        config |= {"mamba_d_ssm": inner, "mamba_expand": inner // config["mamba_n_heads"]}
    return config


def layer_of(name: str, spec: Any) -> dict[str, Any]:
    """One layer that keeps something: its number, its rule, and what a token or a snapshot weighs."""
    from vllm.utils.torch_utils import get_dtype_size

    kind = type(spec).__name__
    numbers = [int(part) for part in name.split(".") if part.isdigit()]
    window = getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None) or 0
    found = {"name": name, "number": numbers[0], "kind": kind, "window": window, "token": 0, "state": 0}
    if kind == "MambaSpec":
        assert spec.page_size_padded is None
        sizes = [
            prod(shape) * get_dtype_size(dtype) for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
        ]
        assert sum(sizes) == spec.page_size_bytes
        return found | {"state": spec.page_size_bytes}
    assert spec.page_size_bytes % spec.block_size == 0
    return found | {"token": spec.page_size_bytes // spec.block_size}


def ranks_of(config: Any, model: Any, tp: int) -> dict[str, Any]:
    """What one of `tp` ranks would keep: KV heads, and bytes of a layer's state."""
    from vllm.utils.torch_utils import get_dtype_size

    parallel = config.parallel_config
    found: dict[str, Any] = {"heads": None, "state": None}
    try:
        parallel.tensor_parallel_size = tp
        found["heads"] = config.model_config.get_num_kv_heads(parallel)
        if hasattr(model, "get_mamba_state_shape_from_config"):
            shapes = model.get_mamba_state_shape_from_config(config)
            dtypes = model.get_mamba_state_dtype_from_config(config)
            found["state"] = sum(
                prod(shape) * get_dtype_size(dtype) for shape, dtype in zip(shapes, dtypes, strict=True)
            )
    except (AssertionError, ValueError) as error:
        found["refused"] = str(error)
    finally:
        parallel.tensor_parallel_size = 1
    return found


def calculated(config: dict[str, Any]) -> dict[str, Any] | None:
    """MiniMax (its class has left vLLM) and Kimi Linear (its class needs a GPU), by vLLM's arithmetic of one layer."""
    import torch
    from vllm.model_executor.layers.mamba.mamba_utils import MambaStateDtypeCalculator as Dtypes
    from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator as Shapes
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, MLAAttentionSpec

    bf16 = torch.bfloat16
    full: Any

    def state_of(tp: int) -> MambaSpec:
        if linear is None:
            shapes = Shapes.linear_attention_state_shape(
                config["num_attention_heads"], tp, config["head_dim"]
            )
            return MambaSpec(16, shapes, Dtypes.linear_attention_state_dtype(bf16, "auto"))
        shapes = Shapes.kda_state_shape(
            tp, linear["num_heads"], linear["head_dim"], conv_kernel_size=linear["short_conv_kernel_size"]
        )
        return MambaSpec(16, shapes, Dtypes.kda_state_dtype(bf16, "auto"))

    linear = config.get("linear_attn_config")
    if config.get("model_type") == "kimi_linear" and linear:
        attends = [layer + 1 in linear["full_attn_layers"] for layer in range(config["num_hidden_layers"])]
        width = config["kv_lora_rank"] + config["qk_rope_head_dim"]
        full = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=width, dtype=bf16)
        heads = dict.fromkeys(TP, 1)
    elif str(config.get("model_type")).startswith("minimax"):
        attends = [bool(kind) for kind in config["attn_type_list"]]
        stated = config["num_key_value_heads"]
        full = FullAttentionSpec(block_size=16, num_kv_heads=stated, head_size=config["head_dim"], dtype=bf16)
        heads = {tp: max(1, stated // tp) for tp in TP}
    else:
        return None
    return {
        "layers": [
            layer_of(f"layers.{n}", full if full_one else state_of(1)) for n, full_one in enumerate(attends)
        ],
        "tp": {
            tp: {"heads": heads[tp], "state": state_of(tp).page_size_bytes}
            for tp in TP if config["num_attention_heads"] % tp == 0
        },
    }  # fmt: skip


def specs(path: Path, folder: Path) -> dict[str, Any]:
    """All layers of one config, and what ranks would keep."""
    import torch
    from vllm.config import get_layers_from_vllm_config, set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.model_loader.utils import initialize_model

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(prepared(json.loads(path.read_text()))))
    config = EngineArgs(
        model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True
    ).create_engine_config()  # fmt: skip
    with set_current_vllm_config(config):
        with torch.device("meta"):
            model = initialize_model(config)
        layers = get_layers_from_vllm_config(config, AttentionLayerBase)
        kept = [(name, layer.get_kv_cache_spec(config)) for name, layer in layers.items()]
        return {
            "layers": [layer_of(name, spec) for name, spec in kept if spec is not None],
            "tp": {tp: ranks_of(config, model, tp) for tp in TP},
        }


def main() -> None:
    """Print what vLLM says of each config that is named; what it refuses, with its words."""
    vllm_lib.settle_environment()
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment

    with tempfile.TemporaryDirectory() as folder:
        with set_current_vllm_config(VllmConfig()):
            init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
            ensure_model_parallel_initialized(1, 1)
        for path in map(Path, sys.argv[1:]):
            try:
                found = calculated(json.loads(path.read_text())) or specs(path, Path(folder) / path.stem)
            except Exception as error:  # noqa: BLE001  the test says which configs vLLM may refuse
                found = {"refused": f"{type(error).__name__}: {error}"}
            print("SPECS " + json.dumps({"file": path.stem, **found}), flush=True)


if __name__ == "__main__":
    main()
