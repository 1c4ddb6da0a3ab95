"""Readers for models that only attend: MHA, GQA, MQA, sliding and chunked windows, multi-head latent
attention.

Pure. A reader takes the fields of one config and gives its groups. What a reader takes for granted where the
config is silent is the default of the model's class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from kvd.errors import UsageError
from kvd.layout.geometry import HEADS_MAX, Group, Plane, Rule
from kvd.layout.hf.fields import (
    DIM_FIELD_MAX,
    WINDOW_FIELD_MAX,
    Fields,
    Types,
    attention_planes,
    where,
)

KINDS: Final = {
    "full_attention": "full",
    "sliding_attention": "window",
    "chunked_attention": "chunked",
}


def groups_of(
    fields: Fields,
    planes: tuple[Plane, ...],
    kinds: Sequence[str],
    window: int | None,
    chunk: int | None = None,
) -> list[Group]:
    """Groups of attention layers of the given kinds ("full", "window", "chunked"; others keep no tokens)."""
    groups: list[Group] = []
    for kind, rule, span, field in (
        ("full", Rule.FULL, 0, ""),
        ("window", Rule.WINDOW, window, "sliding_window"),
        ("chunked", Rule.CHUNKED, chunk, "attention_chunk_size"),
    ):
        layers = where(kinds, kind)
        if not layers:
            continue
        if span is None:
            found = "is null" if field in fields.mapping else "is missing"
            raise fields.refuse(field, found, f"layers {layers[:4]}… need it")
        groups.append(Group(rule, layers, planes, span))
    return groups


def _span(fields: Fields, field: str, default: int | None) -> int | None:
    """A window in tokens: absent is the default of the class, null is none."""
    return fields.maybe(field, most=WINDOW_FIELD_MAX) if field in fields.mapping else default


def _uniform(window: int | None) -> Callable[[Fields, Types], list[Group]]:
    """Every layer the same: full attention, or the window if there is one (Mistral, Mixtral, Phi-3, Starcoder 2).

    `window` is the default of the class.
    """

    def reader(fields: Fields, types: Types) -> list[Group]:
        planes = attention_planes(types, fields.kv_heads(), fields.head_dim())
        span = _span(fields, "sliding_window", window)
        kinds = fields.listed("layer_types", KINDS) or ["window" if span else "full"] * fields.layers()
        return groups_of(fields, planes, kinds, span)

    return reader


def _plain(head_dim: int | None = None) -> Callable[[Fields, Types], list[Group]]:
    """Full attention in every layer: a config with a window is refused. `head_dim` is the default of the class."""

    def reader(fields: Fields, types: Types) -> list[Group]:
        if fields.has("sliding_window"):
            found = f"is {fields.mapping['sliding_window']!r}"
            raise fields.refuse("sliding_window", found, f"{fields.model_type} has no window")
        planes = attention_planes(types, fields.kv_heads(), fields.head_dim(default=head_dim))
        return groups_of(fields, planes, ["full"] * fields.layers(), None)

    return reader


def _qwen(head_dim: int | None) -> Callable[[Fields, Types], list[Group]]:
    """Qwen 2 and 3: the window counts only if `use_sliding_window`, from layer `max_window_layers` on."""

    def reader(fields: Fields, types: Types) -> list[Group]:
        planes = attention_planes(types, fields.kv_heads(), fields.head_dim(default=head_dim))
        layers = fields.layers()
        sliding = fields.flag("use_sliding_window", False)
        window = _span(fields, "sliding_window", 4096) if sliding else None
        kinds = fields.listed("layer_types", KINDS)
        if kinds is None and window is None:
            kinds = ["full"] * layers
        if kinds is None and fields.model_type == "qwen3_moe":
            kinds = ["window"] * layers  # its class slides in every layer, whatever max_window_layers says
        if kinds is None:
            first = fields.mapping.get("max_window_layers")
            if isinstance(first, bool) or not isinstance(first, int) or first < 0:
                raise fields.refuse(
                    "max_window_layers",
                    f"is {first!r}",
                    "with use_sliding_window it says where windows begin",
                )
            kinds = _qwen_kinds(fields.model_type, layers, first)
        return groups_of(fields, planes, kinds, window)

    return reader


def _qwen_kinds(model_type: str, layers: int, first: int) -> list[str]:
    if model_type == "qwen2_moe":
        return ["window" if layer % 2 == 0 and layer < first else "full" for layer in range(layers)]
    return ["window" if layer >= first else "full" for layer in range(layers)]


def _patterned(
    every: int, *, window: int, head_dim: int | None = None, heads: int | None = None
) -> Callable[[Fields, Types], list[Group]]:
    """Every n-th layer full, the others windowed. The arguments are the defaults of the class."""

    def reader(fields: Fields, types: Types) -> list[Group]:
        if fields.mapping.get("use_bidirectional_attention"):
            raise fields.refuse("use_bidirectional_attention", "is set", "such a model has no prefix to keep")
        planes = attention_planes(
            types,
            fields.kv_heads(heads_default=heads),
            fields.head_dim(default=head_dim, heads_default=heads),
        )
        pattern = fields.number("sliding_window_pattern", "_sliding_window_pattern", most=1024, default=every)
        kinds = fields.listed("layer_types", KINDS) or [
            "window" if (layer + 1) % pattern else "full" for layer in range(fields.layers())
        ]
        return groups_of(fields, planes, kinds, _span(fields, "sliding_window", window))

    return reader


def llama4(fields: Fields, types: Types) -> list[Group]:
    """Llama 4: layers with rotary positions attend within aligned chunks, those without (every 4th) to
    everything.
    """
    layers = fields.layers()
    planes = attention_planes(types, fields.kv_heads(), fields.head_dim(default=128))
    chunk = _span(fields, "attention_chunk_size", 8192)
    kinds = fields.listed("layer_types", KINDS)
    if kinds is None:
        flags = fields.mapping.get("no_rope_layers")
        if flags is None or flags == []:
            every = fields.number("no_rope_layer_interval", most=layers, default=4)
            flags = [int((layer + 1) % every != 0) for layer in range(layers)]
        if (
            not isinstance(flags, Sequence)
            or len(flags) != layers
            or any(flag not in (0, 1) for flag in flags)
        ):
            raise fields.refuse(
                "no_rope_layers", f"is {flags!r}", f"allowed is a list of {layers} zeros and ones"
            )
        kinds = ["chunked" if flag and chunk is not None else "full" for flag in flags]
    return groups_of(fields, planes, kinds, None, chunk)


def latent_planes(fields: Fields, types: Types) -> tuple[Plane, ...]:
    """What multi-head latent attention keeps: the latent and the rotary key, once for all heads."""
    if types.v != types.k or types.scales is not None:
        raise UsageError(
            "a latent cache is one row of one type without scales here; give dtype alone, or describe it by hand",
            code="geometry", field="v_dtype",
        )  # fmt: skip
    latent = fields.number("kv_lora_rank", most=DIM_FIELD_MAX)
    rope = fields.number("qk_rope_head_dim", most=DIM_FIELD_MAX)
    return (Plane("latent", 1, latent, types.k), Plane("rope", 1, rope, types.k))


def mla(fields: Fields, types: Types) -> list[Group]:
    """DeepSeek V2, V3 and Kimi K2; layers for multi-token prediction keep nothing between requests."""
    return [Group(Rule.FULL, tuple(range(fields.layers())), latent_planes(fields, types))]


def falcon(fields: Fields, types: Types) -> list[Group]:
    """Falcon: `num_kv_heads` counts only in the new decoder architecture; multi_query means one KV head.

    With the new architecture Transformers repeats K and V for every query head; engines keep the KV heads, as here.
    """
    heads = fields.heads()
    if fields.flag("new_decoder_architecture", False):
        kv_heads = fields.number("num_kv_heads", "n_head_kv", most=HEADS_MAX, default=heads)
    else:
        kv_heads = 1 if fields.flag("multi_query", True) else heads
    planes = attention_planes(types, kv_heads, fields.head_dim())
    return groups_of(fields, planes, ["full"] * fields.layers(), None)


def gpt_bigcode(fields: Fields, types: Types) -> list[Group]:
    """GPT BigCode: one KV head if multi_query, which is the default of its class."""
    kv_heads = 1 if fields.flag("multi_query", True) else fields.heads()
    planes = attention_planes(types, kv_heads, fields.head_dim())
    return groups_of(fields, planes, ["full"] * fields.layers(), None)


def all_heads(fields: Fields, types: Types) -> list[Group]:
    """One KV head for each query head, by construction of the class (GPT-2, GPT-NeoX, GPT-J, OPT, BLOOM)."""
    planes = attention_planes(types, fields.heads(), fields.head_dim())
    return groups_of(fields, planes, ["full"] * fields.layers(), None)


READERS: Final[Mapping[str, Callable[[Fields, Types], list[Group]]]] = {
    "llama": _plain(),
    "phi": _plain(),
    "granite": _plain(),
    "stablelm": _plain(),
    "cohere": _plain(),
    "olmo2": _plain(),
    "mistral": _uniform(4096),
    "mixtral": _uniform(None),
    "phi3": _uniform(None),
    "starcoder2": _uniform(None),
    "qwen2": _qwen(None),
    "qwen2_moe": _qwen(None),
    "qwen3": _qwen(128),
    "qwen3_moe": _qwen(None),
    "gemma": _plain(256),
    "gemma2": _patterned(2, window=4096, head_dim=256, heads=8),
    "gemma3_text": _patterned(6, window=4096, head_dim=256, heads=8),
    "gpt_oss": _patterned(2, window=128, head_dim=64, heads=64),
    "cohere2": _patterned(4, window=4096),
    "olmo3": _patterned(4, window=4096),
    "llama4_text": llama4,
    "deepseek_v2": mla,
    "deepseek_v3": mla,
    "kimi_k2": mla,
    "falcon": falcon,
    "RefinedWebModel": falcon,
    "RefinedWeb": falcon,
    "gpt_bigcode": gpt_bigcode,
    "gpt2": all_heads,
    "gpt_neox": all_heads,
    "gptj": all_heads,
    "opt": all_heads,
    "bloom": all_heads,
}
