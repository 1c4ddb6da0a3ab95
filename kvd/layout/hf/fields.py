"""Typed access to the fields of one config, with messages that name the field, its value and what is allowed.

Pure. Used by the readers of this package only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kvd.errors import UsageError
from kvd.layout.dtypes import dtype_bits
from kvd.layout.geometry import HEADS_MAX, LAYERS_MAX, Plane, Scales, kv_planes

DIM_FIELD_MAX = 1 << 22
WINDOW_FIELD_MAX = 1 << 30
SHOWN_CHARS_MAX = 200  # of what a field holds, in a message

KV_HEADS_DEFAULT: Final[Mapping[str, int]] = {
    "bamba": 8, "falcon_h1": 8, "gemma": 16, "gemma2": 4, "gemma3_text": 4, "gpt_oss": 8, "jamba": 8, "llama4_text": 8,
    "minimax": 8, "minimax_m1": 8, "minimax_text_01": 8, "mistral": 8, "mixtral": 8, "nemotron_h": 8, "qwen2": 32,
    "qwen2_moe": 16, "qwen3": 32, "qwen3_moe": 4, "qwen3_next": 2, "stablelm": 32, "starcoder2": 2,
}  # fmt: skip
"""KV heads where a config is silent, for classes that then have a number of their own, whatever the query heads are."""

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_HIDDEN = ("hidden_size", "n_embd", "d_model")


@dataclass(frozen=True, slots=True)
class Types:
    """Element types in which a cache is kept.

    `state` is for recurrent states ("" : as the architecture's own implementation keeps it), `conv` for the
    inputs that a causal convolution still needs, of which `conv_columns_less` fewer than the kernel is wide
    are kept (0: Transformers, 1: engines that keep kernel - 1). `model` is what the config says the model computes in.
    """

    k: str
    v: str
    scales: Scales | None = None
    state: str = ""
    conv: str = ""
    conv_columns_less: int = 0
    model: str = ""

    def computed(self, field: str) -> str:
        """What a state is kept in that follows the model: K's type, or, where that is quantised, the model's own.

        Raises UsageError(dtype) naming `field` where that is not known.
        """
        if dtype_bits(self.k) >= 16 or self.model:
            return self.k if dtype_bits(self.k) >= 16 else self.model
        raise UsageError(
            f"{field} is not known: K is kept in {self.k}, states are not, and the config has no torch_dtype; give "
            f"{field}=",
            code="dtype", field=field,
        )  # fmt: skip

    def check(self) -> None:
        """Raise UsageError(dtype) for a type that is unknown."""
        dtype_bits(self.k)
        dtype_bits(self.v, field="v_dtype")
        if self.state:
            dtype_bits(self.state, field="state_dtype")
        if self.conv:
            dtype_bits(self.conv, field="conv_dtype")
        if self.conv_columns_less not in (0, 1):
            raise UsageError(f"conv_columns_less is {self.conv_columns_less}; allowed: 0, 1", code="geometry")


@dataclass(frozen=True, slots=True)
class Fields:
    """One config (or the text part of one) under a name for messages."""

    mapping: Mapping[str, object]
    name: str
    model_type: str

    def refuse(self, field: str, found: str, allowed: str) -> UsageError:
        """The error for one field."""
        if len(found) > SHOWN_CHARS_MAX:
            found = f"{found[:SHOWN_CHARS_MAX]}…"
        return UsageError(
            f"{self.name}: {field} {found}; {allowed}",
            code="config-field",
            field=field,
            model=self.model_type,
        )

    def has(self, field: str) -> bool:
        """Whether the field is there and not null."""
        return self.mapping.get(field) is not None

    def flag(self, field: str, default: bool) -> bool:
        """A boolean."""
        value = self.mapping.get(field, default)
        if not isinstance(value, bool):
            raise self.refuse(field, f"is {value!r}", "allowed: true, false")
        return value

    def maybe(self, *names: str, most: int) -> int | None:
        """A whole number in 1 … most under the first of `names` that is there; null and absent are None.

        Two names for one thing that disagree are refused.
        """
        first: tuple[str, int] | None = None
        for name in filter(self.has, names):
            value = self.mapping[name]
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                raise self.refuse(name, f"is {value!r}", f"allowed is a whole number in 1 … {most}")
            first = first or (name, value)
            if value != first[1]:
                raise self.refuse(name, f"is {value}", f"{first[0]} says {first[1]}")
        return first[1] if first else None

    def number(self, *names: str, most: int, default: int | None = None) -> int:
        """As `maybe`, but absent is the default of the model class, or refused."""
        value = self.maybe(*names, most=most)
        if value is None:
            value = default
        if value is None:
            raise self.refuse(" or ".join(names), "is missing", f"{self.model_type} needs it")
        return value

    def layers(self) -> int:
        """Layers of the model."""
        for field in ("layers_block_type", "hybrid_override_pattern"):
            listed = self.mapping.get(field)
            if isinstance(listed, list | str) and listed and not any(self.has(name) for name in _LAYERS):
                return len(listed)
        defaults = {"gemma3_text": 26}
        return self.number(*_LAYERS, most=LAYERS_MAX, default=defaults.get(self.model_type))

    def heads(self, default: int | None = None) -> int:
        """Query heads: only to derive what a config leaves out; they are never counted."""
        return self.number(*_HEADS, most=HEADS_MAX, default=default)

    def hidden(self, default: int | None = None) -> int:
        """Width of the model."""
        return self.number(*_HIDDEN, most=DIM_FIELD_MAX, default=default)

    def kv_heads(self, *, heads_default: int | None = None) -> int:
        """KV heads; absent means one for each query head, unless the class says otherwise."""
        heads = self.heads(heads_default)
        default = heads
        if "num_key_value_heads" not in self.mapping:  # null is one for each query head in every class
            default = KV_HEADS_DEFAULT.get(self.model_type, heads)
        kv_heads = self.number("num_key_value_heads", most=HEADS_MAX, default=default)
        if heads % kv_heads:
            raise self.refuse(
                "num_key_value_heads", f"is {kv_heads}", f"it must divide the {heads} query heads"
            )
        return kv_heads

    def head_dim(self, *names: str, default: int | None = None, heads_default: int | None = None) -> int:
        """Width of one attention head: stated, the default of the class, or hidden size / query heads."""
        stated = self.maybe(*(names or ("head_dim",)), most=DIM_FIELD_MAX)
        if stated is not None:
            return stated
        if default is not None:
            return default
        hidden, heads = self.hidden(), self.heads(heads_default)
        if hidden % heads:
            raise self.refuse(
                "head_dim", "is missing", f"and {heads} heads do not divide the hidden size {hidden}"
            )
        return hidden // heads

    def listed(self, field: str, allowed: Mapping[str, str], length: int | None = None) -> list[str] | None:
        """A list of layer kinds, translated by `allowed`; None if absent. Its length must be that of the
        model.
        """
        value = self.mapping.get(field)
        if value is None:
            return None
        if not isinstance(value, Sequence) or (isinstance(value, str) and field != "hybrid_override_pattern"):
            raise self.refuse(
                field, f"is a {type(value).__name__}", "allowed is a list with one entry a layer"
            )
        layers = self.layers() if length is None else length
        if len(value) != layers:
            raise self.refuse(field, f"has {len(value)} entries", f"the model has {layers} layers")
        kinds: list[str] = []
        for layer, kind in enumerate(value):
            if str(kind) not in allowed:
                raise self.refuse(f"{field}[{layer}]", f"is {kind!r}", f"allowed: {', '.join(allowed)}")
            kinds.append(allowed[str(kind)])
        return kinds


def attention_planes(types: Types, kv_heads: int, head_dim: int) -> tuple[Plane, ...]:
    """K and V of one attention layer."""
    return kv_planes(kv_heads, head_dim, head_dim, types.k, types.v, types.scales)


def where(kinds: Sequence[str], *wanted: str) -> tuple[int, ...]:
    """Numbers of the layers whose kind is one of `wanted`."""
    return tuple(layer for layer, kind in enumerate(kinds) if kind in wanted)
