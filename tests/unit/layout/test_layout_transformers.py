"""Geometry against the real thing: the tensors that Transformers itself keeps, summed.

Each model is built full-size from its real config on torch's "meta" device, which computes shapes and types without
memory or arithmetic, and run over a few tokens. So every number of the table is what the model's own class keeps, not a
formula. Small models of the remaining architectures are built the same way.
"""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
from geometry_table import ROWS, Row

from kvd.errors import UsageError
from kvd.layout import hf
from kvd.layout.geometry import Geometry

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
huggingface_hub = pytest.importorskip("huggingface_hub", reason="transformers is not installed")
torch = pytest.importorskip("torch", reason="torch is not installed")

pytestmark = pytest.mark.slow

CONFIGS = Path(__file__).parents[4] / "shared" / "configs"
TOKENS = 5

# The class that a published name is read by.
CLASS_OF = {
    "kimi_k2": "deepseek_v3", "RefinedWebModel": "falcon", "minimax_text_01": "minimax", "minimax_m1": "minimax",
}  # fmt: skip


def measured(config: dict[str, Any]) -> tuple[int, int, int]:
    """(bytes per token, state bytes, layers that keep anything) of Transformers' cache for this config, in BF16."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    model_type = CLASS_OF.get(config["model_type"], config["model_type"])
    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        built = transformers.CONFIG_MAPPING[model_type].from_dict({**config, "model_type": model_type})
        with torch.device("meta"), torch.no_grad():
            model = MODEL_FOR_CAUSAL_LM_MAPPING[type(built)](built).to(torch.bfloat16).eval()
            output = model(torch.ones(1, TOKENS, dtype=torch.long), use_cache=True)
    cache = getattr(output, "past_key_values", None) or output.cache_params
    per_token = state = kept = 0
    for number, layer in enumerate(cache.layers):
        before = per_token + state
        for name in ("keys", "values"):
            tensor = getattr(layer, name, None)
            if torch.is_tensor(tensor) and tensor.numel():
                assert tensor.shape[-2] == TOKENS
                per_token += tensor.numel() * tensor.element_size() // TOKENS
        for name in ("conv_states", "recurrent_states"):
            for tensor in (getattr(layer, name, None) or {}).values():
                state += tensor.numel() * tensor.element_size() if tensor is not None else 0
        lightning = getattr(cache, "linear_cache", [])
        if number < len(lightning) and torch.is_tensor(lightning[number]):
            state += lightning[number].numel() * lightning[number].element_size()
        kept += per_token + state > before
    return per_token, state, kept


def prepared(config: dict[str, Any]) -> dict[str, Any]:
    """The same config in the words of the installed class, where a file uses older ones."""
    config = dict(config.get("text_config", config))
    config.setdefault("model_type", "gemma3_text")
    if "attn_type_list" in config:
        config["layer_types"] = [
            "full_attention" if kind else "linear_attention" for kind in config["attn_type_list"]
        ]
    if config["model_type"] == "falcon_h1":
        # The file leaves out the inner width, and the default of the class is that of another model.
        config["mamba_d_ssm"] = config["mamba_n_heads"] * config["mamba_d_head"]
    return config


@pytest.mark.parametrize("row", ROWS, ids=[row.file for row in ROWS])
def test_real_models_keep_what_the_table_says(row: Row) -> None:
    path = CONFIGS / f"{row.file}.json"
    if not path.exists():
        pytest.skip("no ../shared/configs beside this checkout: real models are not built")
    per_token, state, kept = measured(prepared(json.loads(path.read_text())))
    assert (per_token, state) == (row.per_token, row.state)
    geom = Geometry.from_hf_config(str(path), dtype="bfloat16")
    assert kept == len({layer for group in geom.groups for layer in group.layers})


BASE = {
    "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64, "vocab_size": 64, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_expand": 2}
WINDOWED = {"sliding_window": 32}
GPT = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_inner": 64, "vocab_size": 64, "n_positions": 64}
SMALL: dict[str, dict[str, Any]] = {
    "llama": BASE,
    "phi": BASE,
    "granite": BASE,
    "stablelm": BASE,
    "cohere": BASE,
    "olmo2": BASE,
    "starcoder2": BASE | WINDOWED,
    "olmo3": BASE | WINDOWED,
    "mistral": BASE | {"sliding_window": None, "head_dim": 8},
    "mixtral": BASE | WINDOWED | {"num_local_experts": 2},
    "qwen2": BASE | WINDOWED | {"use_sliding_window": True, "max_window_layers": 2},
    "qwen2_moe": BASE | WINDOWED | {"use_sliding_window": True, "max_window_layers": 3, "num_experts": 8},
    "qwen3": BASE,
    "qwen3_moe": BASE | WINDOWED | {"use_sliding_window": True, "num_experts": 8},
    "gemma": BASE,
    "gemma2": BASE,
    "cohere2": BASE | WINDOWED,
    "llama4_text": BASE | {"head_dim": 16, "attention_chunk_size": 32, "num_local_experts": 2},
    "falcon": BASE | {"multi_query": False},
    "gpt_bigcode": GPT | {"multi_query": False},
    "gpt2": GPT,
    "gptj": GPT | {"rotary_dim": 8},
    "gpt_neox": BASE,
    "opt": BASE | {"ffn_dim": 64, "word_embed_proj_dim": 64},
    "bloom": {"hidden_size": 64, "n_layer": 3, "n_head": 4, "vocab_size": 64},
    "mamba": {"hidden_size": 64, "num_hidden_layers": 3, "state_size": 8, "vocab_size": 64},
    "falcon_mamba": {"hidden_size": 64, "num_hidden_layers": 3, "state_size": 8, "vocab_size": 64},
    "bamba": BASE | MAMBA | {"attn_layer_indices": [1, 4]},
    "granitemoehybrid": BASE | MAMBA | {"layer_types": ["mamba", "attention", "mamba"] * 2, "num_local_experts": 2},
    "zamba2": BASE | {"num_key_value_heads": 4, "n_mamba_heads": 4, "mamba_d_state": 8, "num_mem_blocks": 1,
                      "layers_block_type": ["mamba", "hybrid", "mamba"] * 2},
    "qwen3_next": BASE | {"num_experts": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
                          "linear_key_head_dim": 8, "linear_value_head_dim": 12},
}  # fmt: skip
FULL_SIZE = {json.loads(p.read_text()).get("model_type") for p in CONFIGS.glob("*.json")} | {
    "gemma3_text", "llama4_text", "RefinedWeb", "minimax",
}  # fmt: skip


@pytest.mark.parametrize("model_type", sorted(SMALL))
def test_small_models_of_the_other_architectures(model_type: str) -> None:
    transformers.logging.set_verbosity_error()
    config = SMALL[model_type] | {"model_type": model_type}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stated = transformers.CONFIG_MAPPING[model_type].from_dict(config).to_dict()
    per_token, state, _ = measured(config)
    for read in (
        stated,
        {**stated, **config},
    ):  # as a new Transformers writes it, and with the older names kept
        geom = Geometry.from_hf_config(read, dtype="bfloat16")
        assert (geom.bytes_per_token, geom.state_bytes) == (per_token, state)


@pytest.mark.parametrize("model_type", sorted(set(hf.SUPPORTED) & set(transformers.CONFIG_MAPPING)))
def test_a_silent_config_means_what_its_class_takes(model_type: str) -> None:
    """KV heads, windows and head sizes that a config leaves out are those that its class fills in."""
    if model_type in ("bloom", "gpt2", "gptj", "gpt_bigcode", "mamba", "mamba2", "falcon_mamba"):
        pytest.skip("its size has other names, or nothing that can be left out")
    config_class = transformers.CONFIG_MAPPING[model_type]
    known = config_class().to_dict()
    heads = math.lcm(known.get("num_key_value_heads") or 1, known.get("num_attention_heads") or 1)
    known |= {"model_type": model_type, "num_attention_heads": heads, "hidden_size": heads * 24}
    left_out = (
        "num_key_value_heads",
        "sliding_window",
        "head_dim",
        "attention_head_dim",
        "attention_chunk_size",
    )
    silent = {key: value for key, value in known.items() if key not in left_out}
    try:
        filled_in = config_class.from_dict(silent).to_dict()
        expected = Geometry.from_hf_config(filled_in, dtype="bfloat16").groups
    except (UsageError, huggingface_hub.errors.StrictDataclassError) as refused:
        pytest.skip(f"the default of the class is no model: {refused}")
    assert Geometry.from_hf_config(silent, dtype="bfloat16").groups == expected


def test_every_supported_architecture_is_measured() -> None:
    if not CONFIGS.exists():
        pytest.skip("no ../shared/configs beside this checkout: real models are not built")
    assert set(hf.SUPPORTED) - set(SMALL) - FULL_SIZE == set()
