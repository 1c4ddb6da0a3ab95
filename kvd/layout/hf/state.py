"""Readers for models that keep a recurrent state: Mamba, Mamba-2, gated DeltaNet, KDA, lightning attention,
hybrids.

Pure. A state is one snapshot a sequence, whatever its length; layers that also attend are in two groups.
Planes:

    Mamba      conv [d_inner, kernel], ssm [d_inner, state]
    Mamba-2    ssm [heads, head_dim x state], conv_x [heads, head_dim x kernel],
               conv_b and conv_c [groups, state x kernel]
    DeltaNet   recurrent [value heads, key dim x value dim], conv_v [value heads, value dim x kernel],
               conv_q and conv_k [key heads, key dim x kernel]
    KDA        the same with as many key heads as value heads
    lightning  state [heads, head_dim x head_dim]

Heads come first in each, so that tensor parallelism cuts every plane along its heads. A plane with fewer
heads than ranks is stored once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from kvd.layout.geometry import HEADS_MAX, Group, Plane, Rule
from kvd.layout.hf.attention import groups_of, latent_planes
from kvd.layout.hf.fields import DIM_FIELD_MAX, Fields, Types, attention_planes, where

KERNEL_MAX: Final = 256


def _columns(fields: Fields, types: Types, *names: str, default: int | None = None) -> int:
    kernel = fields.number(*names, most=KERNEL_MAX, default=default)
    if kernel <= types.conv_columns_less:
        raise fields.refuse(names[0], f"is {kernel}", f"it must be above {types.conv_columns_less}")
    return kernel - types.conv_columns_less


def _state_dtype(types: Types) -> str:
    return types.state or "float32"


def _conv_dtype(types: Types) -> str:
    return types.conv or types.computed("conv_dtype")


def mamba2_planes(
    types: Types, heads: int, head_dim: int, state: int, groups: int, columns: int
) -> tuple[Plane, ...]:
    """Planes of one Mamba-2 layer."""
    conv = _conv_dtype(types)
    return (
        Plane("ssm", heads, head_dim * state, _state_dtype(types)),
        Plane("conv_x", heads, head_dim * columns, conv),
        Plane("conv_b", groups, state * columns, conv),
        Plane("conv_c", groups, state * columns, conv),
    )


def mamba1_planes(types: Types, inner: int, state: int, columns: int) -> tuple[Plane, ...]:
    """Planes of one Mamba layer: every inner channel is a head of its own."""
    return (
        Plane("ssm", inner, state, _state_dtype(types)),
        Plane("conv", inner, columns, _conv_dtype(types)),
    )


def delta_planes(
    types: Types, key_heads: int, key_dim: int, value_heads: int, value_dim: int, columns: int
) -> tuple[Plane, ...]:
    """Planes of one delta-rule layer (gated DeltaNet, KDA)."""
    conv = _conv_dtype(types)
    return (
        Plane("recurrent", value_heads, key_dim * value_dim, _state_dtype(types)),
        Plane("conv_v", value_heads, value_dim * columns, conv),
        Plane("conv_q", key_heads, key_dim * columns, conv),
        Plane("conv_k", key_heads, key_dim * columns, conv),
    )


def _hybrid(
    fields: Fields, kinds: Sequence[str], attention: tuple[Plane, ...], state: tuple[Plane, ...]
) -> list[Group]:
    """Groups of a hybrid whose layers are "full", "state", "both" or "none"."""
    both = ["full" if kind in ("full", "both") else "none" for kind in kinds]
    groups = groups_of(fields, attention, both, None)
    states = where(kinds, "state", "both")
    if states:
        groups.append(Group(Rule.STATE, states, state))
    return groups


def mamba(fields: Fields, types: Types) -> list[Group]:
    """Mamba and Falcon Mamba: no attention at all."""
    hidden = fields.hidden()
    inner = fields.maybe("intermediate_size", most=DIM_FIELD_MAX) or (
        fields.number("expand", most=64, default=2) * hidden
    )
    state = fields.number("state_size", most=DIM_FIELD_MAX)
    planes = mamba1_planes(types, inner, state, _columns(fields, types, "conv_kernel"))
    return [Group(Rule.STATE, tuple(range(fields.layers())), planes)]


def mamba2(fields: Fields, types: Types) -> list[Group]:
    """Mamba-2: `num_heads` and `head_dim` are those of the state space, not of attention."""
    planes = mamba2_planes(
        types,
        fields.number("num_heads", most=HEADS_MAX),
        fields.number("head_dim", most=DIM_FIELD_MAX),
        fields.number("state_size", most=DIM_FIELD_MAX),
        fields.number("n_groups", most=HEADS_MAX),
        _columns(fields, types, "conv_kernel"),
    )
    return [Group(Rule.STATE, tuple(range(fields.layers())), planes)]


def jamba(fields: Fields, types: Types) -> list[Group]:
    """Jamba: attention in every `attn_layer_period`-th layer from `attn_layer_offset` on, Mamba in the
    others.
    """
    layers = fields.layers()
    kinds = fields.listed("layers_block_type", {"mamba": "state", "attention": "full"})
    if kinds is None:
        period = fields.number("attn_layer_period", most=layers)
        offset = fields.mapping.get("attn_layer_offset")
        if isinstance(offset, bool) or not isinstance(offset, int) or not 0 <= offset < period:
            raise fields.refuse("attn_layer_offset", f"is {offset!r}", f"allowed: 0 … {period - 1}")
        kinds = ["full" if layer % period == offset else "state" for layer in range(layers)]
    inner = fields.number("mamba_expand", most=64) * fields.hidden()
    state = mamba1_planes(
        types,
        inner,
        fields.number("mamba_d_state", most=DIM_FIELD_MAX),
        _columns(fields, types, "mamba_d_conv"),
    )
    return _hybrid(fields, kinds, attention_planes(types, fields.kv_heads(), fields.head_dim()), state)


def _mamba2_of(fields: Fields, types: Types) -> tuple[Plane, ...]:
    """Mamba-2 planes from the `mamba_*` names; the width is heads x head size, not expand x hidden size."""
    heads = fields.number("mamba_n_heads", most=HEADS_MAX)
    if fields.mapping.get("mamba_d_head") == "auto":
        inner = fields.number("mamba_expand", most=64) * fields.hidden()
        if inner % heads:
            raise fields.refuse("mamba_d_head", "is 'auto'", f"and {heads} heads do not divide {inner}")
        head_dim = inner // heads
    else:
        head_dim = fields.number("mamba_d_head", most=DIM_FIELD_MAX)
    stated = fields.maybe("mamba_d_ssm", most=DIM_FIELD_MAX)
    if stated is not None and stated != heads * head_dim:
        raise fields.refuse(
            "mamba_d_ssm", f"is {stated}", f"{heads} heads of {head_dim} make {heads * head_dim}"
        )
    return mamba2_planes(
        types,
        heads,
        head_dim,
        fields.number("mamba_d_state", most=DIM_FIELD_MAX),
        fields.number("mamba_n_groups", most=HEADS_MAX),
        _columns(fields, types, "mamba_d_conv"),
    )


def bamba(fields: Fields, types: Types) -> list[Group]:
    """Bamba: attention in the layers listed, Mamba-2 in the others."""
    layers = fields.layers()
    kinds = fields.listed("layers_block_type", _BLOCKS) or fields.listed("layer_types", _BLOCKS)
    if kinds is None:
        listed = fields.mapping.get("attn_layer_indices")
        if not isinstance(listed, list) or not all(type(n) is int and 0 <= n < layers for n in listed):
            raise fields.refuse(
                "attn_layer_indices", f"is {listed!r}", f"allowed: layers in 0 … {layers - 1}"
            )
        kinds = ["full" if layer in listed else "state" for layer in range(layers)]
    planes = attention_planes(types, fields.kv_heads(), fields.head_dim())
    return _hybrid(fields, kinds, planes, _mamba2_of(fields, types))


def falcon_h1(fields: Fields, types: Types) -> list[Group]:
    """Falcon-H1: attention and Mamba-2 side by side in every layer."""
    planes = attention_planes(types, fields.kv_heads(), fields.head_dim())
    return _hybrid(fields, ["both"] * fields.layers(), planes, _mamba2_of(fields, types))


def zamba2(fields: Fields, types: Types) -> list[Group]:
    """Zamba 2: Mamba-2 everywhere; hybrid layers also hold the KV of a shared attention over twice the
    width.
    """
    kinds = fields.listed("layers_block_type", {**_BLOCKS, "hybrid": "both"})
    if kinds is None:
        raise fields.refuse("layers_block_type", "is missing", "zamba2 needs it")
    hidden, heads = fields.hidden(), fields.heads()
    mamba_heads = fields.number("n_mamba_heads", most=HEADS_MAX)
    inner = fields.number("mamba_expand", most=64) * hidden
    head_dim = fields.maybe("mamba_headdim", most=DIM_FIELD_MAX) or inner // mamba_heads
    if head_dim * mamba_heads != inner:
        raise fields.refuse(
            "n_mamba_heads", f"is {mamba_heads}", f"heads of {head_dim} must make the inner width {inner}"
        )
    state = mamba2_planes(
        types,
        mamba_heads,
        head_dim,
        fields.number("mamba_d_state", most=DIM_FIELD_MAX),
        fields.number("mamba_ngroups", most=HEADS_MAX),
        _columns(fields, types, "mamba_d_conv"),
    )
    stated = fields.maybe("attention_head_dim", most=DIM_FIELD_MAX)
    attention_dim = stated or 2 * hidden // heads
    return _hybrid(fields, kinds, attention_planes(types, fields.kv_heads(), attention_dim), state)


def nemotron_h(fields: Fields, types: Types) -> list[Group]:
    """Nemotron-H: a letter a layer, M Mamba-2, * attention, - and E keep nothing."""
    letters = {"M": "state", "*": "full", "-": "none", "E": "none"}
    kinds = fields.listed("hybrid_override_pattern", letters) or fields.listed(
        "layers_block_type", {**_BLOCKS, "mlp": "none", "moe": "none"}
    )
    if kinds is None:
        raise fields.refuse(
            "hybrid_override_pattern", "is missing", "nemotron_h needs it or layers_block_type"
        )
    state = mamba2_planes(
        types,
        fields.number("mamba_num_heads", most=HEADS_MAX),
        fields.number("mamba_head_dim", most=DIM_FIELD_MAX),
        fields.number("ssm_state_size", most=DIM_FIELD_MAX),
        fields.number("n_groups", "mamba_n_groups", most=HEADS_MAX),
        _columns(fields, types, "conv_kernel", "mamba_d_conv"),
    )
    head_dim = fields.head_dim("attention_head_dim", "head_dim", default=128)
    return _hybrid(fields, kinds, attention_planes(types, fields.kv_heads(), head_dim), state)


def qwen3_next(fields: Fields, types: Types) -> list[Group]:
    """Qwen3-Next: gated DeltaNet, and full attention in every `full_attention_interval`-th layer."""
    layers = fields.layers()
    kinds = fields.listed("layer_types", _BLOCKS)
    if kinds is None:
        every = fields.number("full_attention_interval", most=layers, default=4)
        kinds = ["state" if (layer + 1) % every else "full" for layer in range(layers)]
    state = delta_planes(
        types,
        fields.number("linear_num_key_heads", most=HEADS_MAX),
        fields.number("linear_key_head_dim", most=DIM_FIELD_MAX),
        fields.number("linear_num_value_heads", most=HEADS_MAX),
        fields.number("linear_value_head_dim", most=DIM_FIELD_MAX),
        _columns(fields, types, "linear_conv_kernel_dim"),
    )
    planes = attention_planes(types, fields.kv_heads(), fields.head_dim(default=256))
    return _hybrid(fields, kinds, planes, state)


def minimax(fields: Fields, types: Types) -> list[Group]:
    """MiniMax: lightning attention, full attention where `attn_type_list` is 1. The state has the type of
    the KV.
    """
    kinds = fields.listed("layer_types", _BLOCKS) or fields.listed(
        "attn_type_list", {"0": "state", "1": "full"}
    )
    if kinds is None:
        raise fields.refuse("attn_type_list", "is missing", "it or layer_types says which layers attend")
    head_dim = fields.head_dim()
    state = (
        Plane("state", fields.heads(), head_dim * head_dim, types.state or types.computed("state_dtype")),
    )
    return _hybrid(fields, kinds, attention_planes(types, fields.kv_heads(), head_dim), state)


def kimi_linear(fields: Fields, types: Types) -> list[Group]:
    """Kimi Linear: KDA and latent attention; the layer lists of `linear_attn_config` count from 1."""
    layers = fields.layers()
    nested = fields.mapping.get("linear_attn_config")
    inner = Fields(
        nested if isinstance(nested, Mapping) else {}, f"{fields.name}: linear_attn_config", fields.model_type
    )
    kinds = fields.listed("layer_types", _BLOCKS)
    if kinds is None:
        full, kda = inner.mapping.get("full_attn_layers"), inner.mapping.get("kda_layers")
        if not isinstance(full, list) or not isinstance(kda, list):
            raise inner.refuse(
                "full_attn_layers and kda_layers", "are missing", "they say which layers attend"
            )
        named = [*full, *kda]
        if len(named) != layers or any(layer not in named for layer in range(1, layers + 1)):
            raise inner.refuse(
                "full_attn_layers and kda_layers", "do not name each layer once", f"allowed: 1 … {layers}"
            )
        kinds = ["full" if layer + 1 in full else "state" for layer in range(layers)]
    source = inner if inner.mapping else fields
    names = ("num_heads", "head_dim", "short_conv_kernel_size") if inner.mapping else (
        "linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")  # fmt: skip
    heads = source.number(names[0], most=HEADS_MAX)
    dim = source.number(names[1], most=DIM_FIELD_MAX)
    state = delta_planes(types, heads, dim, heads, dim, _columns(source, types, names[2]))
    return _hybrid(fields, kinds, latent_planes(fields, types), state)


_BLOCKS: Final = {
    "linear_attention": "state",
    "mamba": "state",
    "full_attention": "full",
    "attention": "full",
}

READERS: Final[Mapping[str, Callable[[Fields, Types], list[Group]]]] = {
    "mamba": mamba,
    "falcon_mamba": mamba,
    "mamba2": mamba2,
    "jamba": jamba,
    "bamba": bamba,
    "granitemoehybrid": bamba,
    "falcon_h1": falcon_h1,
    "zamba2": zamba2,
    "nemotron_h": nemotron_h,
    "qwen3_next": qwen3_next,
    "minimax": minimax,
    "minimax_text_01": minimax,
    "minimax_m1": minimax,
    "kimi_linear": kimi_linear,
}
