"""Reading geometry out of a Hugging Face `config.json`.

Pure but for one thing: given a path, it reads that file. Each architecture is read by the rule of its own
model class (attention.py, state.py), because the same key means different things in different ones:
`sliding_window` is inert in Qwen unless `use_sliding_window`, `num_kv_heads` in Falcon unless
`new_decoder_architecture`, `num_key_value_heads` is not the cache width of a latent cache, `head_dim` of a
Mamba-2 is no attention head. An architecture without a rule is refused by name, never read by guess.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from kvd.errors import UsageError
from kvd.layout.dtypes import DTYPE_BITS
from kvd.layout.geometry import Geometry, Group
from kvd.layout.hf import attention, state
from kvd.layout.hf.fields import Fields, Types

__all__ = ["SUPPORTED", "Types", "identity_fields", "load", "read"]

CONFIG_BYTES_MAX: Final = 4 << 20  # the largest, with a quantisation entry for each layer, have 100 KB

Reader = Callable[[Fields, Types], list[Group]]

_READERS: Final[dict[str, Reader]] = {**attention.READERS, **state.READERS}

SUPPORTED: Final = tuple(sorted(_READERS))
"""The `model_type`s that can be read."""

# What the nested text_config of a wrapper is, where it does not say so itself.
_TEXT_OF: Final = {
    "gemma3": "gemma3_text",
    "llama4": "llama4_text",
    "minimax_vl_01": "minimax_text_01",
    "mistral3": "mistral",
}

_BY_HAND: Final = (
    "describe it by hand: Geometry.attention(layers=, kv_heads=, head_dim=, dtype=, window=, window_layers=), "
    "Geometry.latent(layers=, latent_dim=, rope_dim=, dtype=), or Geometry([Group(rule, layers, planes, window), "
    "...]) for anything else"
)

_POSITION_KEYS: Final = (
    "rope_theta", "rope_scaling", "rope_parameters", "rope_local_base_freq", "partial_rotary_factor", "rotary_dim",
    "rotary_pct", "rotary_emb_base", "original_max_position_embeddings", "alibi", "no_rope_layers",
    "no_rope_layer_interval", "mla_use_nope", "position_embedding_type", "qk_rope_head_dim", "use_mem_rope",
)  # fmt: skip
_ATTENTION_KEYS: Final = (
    "num_hidden_layers", "n_layer", "num_attention_heads", "n_head", "num_key_value_heads", "num_kv_heads",
    "multi_query", "new_decoder_architecture", "head_dim", "attention_head_dim", "hidden_size", "n_embd",
    "kv_lora_rank", "sliding_window", "use_sliding_window", "max_window_layers", "sliding_window_pattern",
    "layer_types", "layers_block_type", "hybrid_override_pattern", "attention_chunk_size", "attn_type_list",
    "full_attention_interval", "linear_attn_config", "attn_layer_period", "attn_layer_offset",
    "attn_logit_softcapping", "query_pre_attn_scalar", "attention_bias", "qk_layernorm", "use_qk_norm",
)  # fmt: skip


def load(config: object) -> tuple[Mapping[str, object], str]:
    """The mapping behind `config` and a name for messages: a mapping, JSON text, or the path of a
    config.json.

    Raises UsageError(config-file) if there is no such file or it is not a JSON object.
    """
    if isinstance(config, Mapping):
        return config, "config"
    if not isinstance(config, str) and not hasattr(config, "__fspath__"):
        way = ": give config.to_dict()" if hasattr(config, "to_dict") else ""
        raise UsageError(
            f"a config of type {type(config).__name__}{way}; allowed: a mapping, JSON text, or the path of a "
            "config.json",
            code="config-file",
        )  # fmt: skip
    name, text = "config", str(config)
    if not text.lstrip().startswith(("{", "[")):
        name, text = text, _read(text)
    try:
        value = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{name} is not JSON: {error}", code="config-file", path=name) from None
    if not isinstance(value, dict):
        raise UsageError(f"{name} is not a JSON object, but a {type(value).__name__}", code="config-file")
    return value, name


def _read(name: str) -> str:
    """The text of a plain file: a pipe that nobody writes to would hold up the caller for ever."""
    path = Path(name)
    try:
        mode = path.stat().st_mode
        if stat.S_ISREG(mode) or stat.S_ISDIR(mode):  # opening a folder says what is wrong with it
            with path.open("rb") as file:
                raw = file.read(CONFIG_BYTES_MAX + 1)
            if len(raw) <= CONFIG_BYTES_MAX:
                return raw.decode("utf-8")
            why = f"it has more than {CONFIG_BYTES_MAX} B, the most allowed"
        else:
            why = "it is no plain file; read it and give its text"
    except (OSError, ValueError) as error:
        why = str(error)
    raise UsageError(f"{name} cannot be read: {why}", code="config-file", path=name)


def _once(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    """A JSON object that says each thing once: of two answers nobody knows which one was meant."""
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is there twice")
    return value


def _text_config(config: Mapping[str, object], name: str) -> Fields:
    """The part that describes the language model: the whole, or what a multimodal wrapper nests."""
    model_type = config.get("model_type")
    if model_type is not None and not isinstance(model_type, str):
        raise UsageError(f"{name}: model_type is {model_type!r}, not a string", code="config-field")
    both = config.get("is_encoder_decoder")
    if both is not None and not isinstance(both, bool):
        raise UsageError(f"{name}: is_encoder_decoder is {both!r}; allowed: true, false", code="config-field")
    if both:
        raise UsageError(
            f"{name}: {model_type} is an encoder-decoder, whose cross-attention is no prefix; {_BY_HAND}",
            code="architecture", architecture=str(model_type),
        )  # fmt: skip
    nested = config.get("text_config")
    if isinstance(nested, Mapping) and model_type not in _READERS:
        inner = nested.get("model_type")
        if inner is not None and not isinstance(inner, str):
            raise UsageError(
                f"{name}: text_config: model_type is {inner!r}, not a string", code="config-field"
            )
        return Fields(nested, f"{name}: text_config", inner or _TEXT_OF.get(str(model_type), ""))
    return Fields(config, name, str(model_type or ""))


def read(config: Mapping[str, object] | str, types: Types) -> Geometry:
    """Geometry of the model that `config` describes, kept in `types`.

    Raises UsageError: config-file, config-field (missing, wrong or contradictory, by name), architecture,
    geometry, dtype.
    """
    mapping, name = load(config)
    fields = _text_config(mapping, name)
    reader = _READERS.get(fields.model_type)
    if reader is None:
        named = mapping.get("architectures") or fields.model_type or "an unnamed architecture"
        what = f"model_type {fields.model_type!r}" if fields.model_type else "a config without model_type"
        raise UsageError(
            f"{fields.name}: {what} ({named}) has no rule here; {_BY_HAND}. Known: {', '.join(SUPPORTED)}",
            code="architecture", architecture=fields.model_type,
        )  # fmt: skip
    types.check()
    model = fields.mapping.get("torch_dtype") or fields.mapping.get("dtype") or mapping.get("torch_dtype")
    if isinstance(model, str) and model in DTYPE_BITS:  # what else it may be counts only where it is needed
        types = replace(types, model=model)
    return Geometry(reader(fields, types), fields.layers(), fields.model_type)


def identity_fields(config: Mapping[str, object] | str) -> dict[str, object]:
    """What a config says for a manifest: `architecture`, `position` and `attention`, ready for
    `Manifest(**...)`.
    """
    mapping, name = load(config)
    fields = _text_config(mapping, name)
    named = mapping.get("architectures")
    architecture = str(named[0]) if isinstance(named, list) and named else fields.model_type
    if not architecture:
        raise UsageError(f"{name}: neither architectures nor model_type is there", code="config-field")
    inner = fields.mapping
    return {
        "architecture": architecture,
        "position": {key: inner[key] for key in _POSITION_KEYS if key in inner},
        "attention": {key: inner[key] for key in _ATTENTION_KEYS if key in inner},
    }
