"""KV geometry: what one token, one chunk and one state snapshot of a model weigh, and which layers belong
together.

Pure. Owns planes, groups and the sizes that follow. Built by hand here, from a `config.json` in `hf/`; cut
into objects in `shards.py`. Query heads never enter: only what is kept is counted.

    geometry  = groups, in the order full, window, chunked, state
    group     = the layers that follow one rule and keep the same planes
    plane     = one tensor a layer keeps: k, v, a latent, scales, a convolution or recurrent state:
                heads (what tensor parallelism cuts) x dim elements of one dtype, per token or per snapshot

    bytes_per_token = sum over layers of (K elements x K bytes + V elements x V bytes + scales)
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from kvd import limits
from kvd.errors import UsageError
from kvd.layout import encoding
from kvd.layout.chain import check_chunk_tokens
from kvd.layout.dtypes import dtype_bits

if TYPE_CHECKING:
    from kvd.layout.shards import Objects, Split

LAYERS_MAX: Final = 4096
HEADS_MAX: Final = 0xFFFF  # a member record holds 16 bits of a head range
DIM_MAX: Final = 1 << 24
WINDOW_MAX: Final = 1 << 30
TOKENS_MAX: Final = 1 << 62


class Rule(StrEnum):
    """Which earlier tokens a layer needs before it can go on at position P."""

    FULL = "full"  # every one
    WINDOW = "window"  # the last window - 1
    CHUNKED = "chunked"  # those since the last multiple of window
    STATE = "state"  # none: a snapshot taken exactly at P


_RULE_ORDER: Final = tuple(Rule)


def count(name: str, value: object, most: int, *, least: int = 1) -> int:
    """A whole number in least … most, or UsageError(geometry) that names the field, the value and the range."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise UsageError(
            f"{name} is {value!r}; allowed is a whole number in {least} … {most}",
            code="geometry", field=name, value=str(value),
        )  # fmt: skip
    return value


def items(name: str, values: object, kind: type | None = None) -> tuple[Any, ...]:
    """A tuple of what a list holds, each of `kind`, or UsageError(geometry) that names the field and the value."""
    if isinstance(values, Iterable) and not isinstance(values, str | bytes | Mapping):
        found = tuple(values)
        if kind is None or all(isinstance(value, kind) for value in found):
            return found
    what = "entries" if kind is None else f"{kind.__name__} each"
    raise UsageError(
        f"{name} is {values!r}; allowed is a list, {what}", code="geometry", field=name, value=str(values)
    )


@dataclass(frozen=True, slots=True)
class Plane:
    """One tensor that a layer keeps: `heads` x `dim` elements of `dtype`, for each token or for each
    snapshot.
    """

    name: str
    heads: int
    dim: int
    dtype: str

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise UsageError(f"plane name {self.name!r} is not a name", code="geometry", field="name")
        count(f"heads of plane {self.name}", self.heads, HEADS_MAX)
        count(f"dim of plane {self.name}", self.dim, DIM_MAX)
        bits = self.dim * dtype_bits(self.dtype, field=f"dtype of plane {self.name}")
        if bits % 8:
            raise UsageError(
                f"plane {self.name}: {self.dim} elements of {self.dtype} are {bits} bits, not whole bytes",
                code="geometry", field=self.name,
            )  # fmt: skip

    @property
    def row_bytes(self) -> int:
        """Bytes of one head: for one token, or in one snapshot."""
        return self.dim * dtype_bits(self.dtype) // 8

    @property
    def size_bytes(self) -> int:
        """Bytes of all heads: for one token of one layer, or in one snapshot of one layer."""
        return self.heads * self.row_bytes


@dataclass(frozen=True, slots=True)
class Band:
    """Planes of one group with the same number of heads: they lie side by side, head by head."""

    heads: int
    planes: tuple[Plane, ...]

    @property
    def head_bytes(self) -> int:
        """Bytes of one head with all its planes, per token or snapshot."""
        return sum(plane.row_bytes for plane in self.planes)


@dataclass(frozen=True, slots=True)
class Group:
    """Layers with one rule and the same planes. `layers` are 0-based numbers in the model, ascending.

    `window` counts tokens: the layer sees itself and window - 1 before (WINDOW), or attends within aligned
    stretches of that many (CHUNKED); 0 for FULL and STATE.
    """

    rule: Rule
    layers: tuple[int, ...]
    planes: tuple[Plane, ...]
    window: int = 0

    def __post_init__(self) -> None:
        if self.rule not in _RULE_ORDER:
            raise UsageError(
                f"rule of a group is {self.rule!r}; allowed: {', '.join(_RULE_ORDER)}",
                code="geometry", field="rule", value=str(self.rule),
            )  # fmt: skip
        object.__setattr__(self, "rule", Rule(self.rule))
        object.__setattr__(self, "layers", items("layers of a group", self.layers))
        object.__setattr__(self, "planes", items("planes of a group", self.planes, Plane))
        if not self.layers or not self.planes:
            raise UsageError("a group needs layers and planes", code="geometry", field="group")
        for layer in self.layers:
            count("layer number", layer, LAYERS_MAX - 1, least=0)
        if list(self.layers) != sorted(set(self.layers)):
            raise UsageError(
                f"layers of group {self.name} are not ascending: {self.layers}",
                code="geometry",
                field="layers",
            )
        if len({plane.name for plane in self.planes}) != len(self.planes):
            raise UsageError(
                f"planes of group {self.name} share a name: {[plane.name for plane in self.planes]}",
                code="geometry", field="planes",
            )  # fmt: skip
        if self.windowed:
            count(f"window of group {self.rule}", self.window, WINDOW_MAX)
        elif self.window:
            raise UsageError(
                f"a {self.rule} group has no window, but was given {self.window}",
                code="geometry",
                field="window",
            )
        if self.rule is not Rule.STATE and len(self.bands) > 1:
            heads = {plane.name: plane.heads for plane in self.planes}
            raise UsageError(
                f"planes kept per token have different head counts {heads}; put them into groups of their own",
                code="geometry", field="heads",
            )  # fmt: skip

    @property
    def windowed(self) -> bool:
        """Whether the rule needs a window."""
        return self.rule in (Rule.WINDOW, Rule.CHUNKED)

    @property
    def name(self) -> str:
        """ "full", "window 4096", "chunked 8192" or "state"."""
        return f"{self.rule} {self.window}" if self.windowed else str(self.rule)

    @property
    def heads(self) -> int:
        """Heads of the first band: the KV heads of a token group."""
        return self.planes[0].heads

    @property
    def bands(self) -> tuple[Band, ...]:
        """Consecutive planes with the same number of heads."""
        bands: list[Band] = []
        for plane in self.planes:
            if bands and bands[-1].heads == plane.heads:
                bands[-1] = Band(plane.heads, (*bands[-1].planes, plane))
            else:
                bands.append(Band(plane.heads, (plane,)))
        return tuple(bands)

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer: for one token, or of one snapshot."""
        return sum(plane.size_bytes for plane in self.planes)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of all layers for one token; 0 for a state, which does not grow."""
        return 0 if self.rule is Rule.STATE else self.layer_bytes * len(self.layers)

    @property
    def state_bytes(self) -> int:
        """Bytes of one snapshot of all layers; 0 for what is kept per token."""
        return self.layer_bytes * len(self.layers) if self.rule is Rule.STATE else 0

    def check_block(self, block_tokens: int) -> None:
        """Raise UsageError(geometry) for a window that is smaller than a block of the engine."""
        if self.windowed and self.window < block_tokens:
            raise UsageError(
                f"the window of {self.window} tokens is smaller than the engine's block of {block_tokens}; use a "
                "smaller block",
                code="geometry", field="window",
            )  # fmt: skip

    def kept_tokens(self, tokens: int) -> int:
        """Tokens that the rule still needs after `tokens` of a sequence, to go on with the next one."""
        match self.rule:
            case Rule.FULL:
                return tokens
            case Rule.WINDOW:
                return min(tokens, self.window - 1)
            case Rule.CHUNKED:
                return tokens % self.window
            case Rule.STATE:
                return 0


@dataclass(frozen=True, slots=True)
class Scales:
    """Scales kept beside quantised K and V: one for every `group_dim` elements of a head (0: one a head)."""

    dtype: str = "float32"
    group_dim: int = 0
    zero_points: bool = False

    def planes(self, plane: Plane) -> list[Plane]:
        """The planes that scale `plane`."""
        dtype_bits(self.dtype, field="dtype of scales")
        size = count("group_dim of scales", self.group_dim or plane.dim, DIM_MAX)
        if plane.dim % size:
            raise UsageError(
                f"scales for every {size} elements do not divide the {plane.dim} of plane {plane.name}",
                code="geometry", field="group_dim",
            )  # fmt: skip
        names = [f"{plane.name}_scale"] + ([f"{plane.name}_zero"] if self.zero_points else [])
        return [Plane(name, plane.heads, plane.dim // size, self.dtype) for name in names]


def kv_planes(
    heads: int, k_dim: int, v_dim: int, k_dtype: str, v_dtype: str | None = None, scales: Scales | None = None
) -> tuple[Plane, ...]:
    """The planes of an attention layer: k, v and, if K and V are quantised, their scales."""
    v_type = k_dtype if v_dtype is None else v_dtype
    planes = [Plane("k", heads, k_dim, k_dtype), Plane("v", heads, v_dim, v_type)]
    if scales is not None:
        if not isinstance(scales, Scales):
            raise UsageError(
                f"scales is {scales!r}; allowed: kvd.layout.geometry.Scales(dtype, group_dim, zero_points)",
                code="geometry", field="scales",
            )  # fmt: skip
        planes += [scale for plane in list(planes) for scale in scales.planes(plane)]
    return tuple(planes)


@dataclass(frozen=True, slots=True)
class Geometry:
    """All groups of one model. Immutable; equal geometries describe the same bytes.

    `layers_count` counts all layers of the model, those that keep nothing included (pipeline stages are cut
    over them). Raises UsageError(geometry, dtype) naming field, value and what is allowed.
    """

    groups: tuple[Group, ...]
    layers_count: int
    architecture: str = ""

    def __init__(
        self, groups: Iterable[Group], layers_count: int | None = None, architecture: str = ""
    ) -> None:
        ordered = tuple(
            sorted(
                items("groups", groups, Group), key=lambda g: (_RULE_ORDER.index(g.rule), g.window, g.layers)
            )
        )
        if not ordered:
            raise UsageError("a geometry needs at least one group", code="geometry", field="groups")
        last = max(group.layers[-1] for group in ordered)
        object.__setattr__(self, "groups", ordered)
        object.__setattr__(self, "layers_count", last + 1 if layers_count is None else layers_count)
        object.__setattr__(self, "architecture", architecture)
        count("layers_count", self.layers_count, LAYERS_MAX)
        if last >= self.layers_count:
            raise UsageError(
                f"layer {last} is in a group, but the model has {self.layers_count} layers (0-based)",
                code="geometry", field="layers_count",
            )  # fmt: skip
        for rules, what in (
            ((Rule.FULL, Rule.WINDOW, Rule.CHUNKED), "keeps tokens"),
            ((Rule.STATE,), "a state"),
        ):
            layers = [layer for group in ordered if group.rule in rules for layer in group.layers]
            doubled = sorted({layer for layer in layers if layers.count(layer) > 1})
            if doubled:
                raise UsageError(
                    f"layers {doubled} are in two groups ({what} twice)", code="geometry", field="layers"
                )

    @classmethod
    def attention(
        cls,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: str,
        v_head_dim: int | None = None,
        v_dtype: str | None = None,
        scales: Scales | None = None,
        window: int = 0,
        window_layers: Sequence[int] | None = None,
    ) -> Geometry:
        """By hand, for attention in every layer. With `window`, `window_layers` slide (all, if not given)."""
        count("layers", layers, LAYERS_MAX)
        v_dim = head_dim if v_head_dim is None else v_head_dim
        planes = kv_planes(kv_heads, head_dim, v_dim, dtype, v_dtype, scales)
        if window_layers is not None and not window:
            raise UsageError("window_layers without a window", code="geometry", field="window")
        sliding: set[int] = set()
        if window:
            slide = range(layers) if window_layers is None else items("window_layers", window_layers, int)
            sliding = {count("window_layers", layer, layers - 1, least=0) for layer in slide}
        kept = [layer for layer in range(layers) if layer not in sliding]
        groups = [Group(Rule.FULL, tuple(kept), planes)] if kept else []
        if sliding:
            groups.append(Group(Rule.WINDOW, tuple(sorted(sliding)), planes, window))
        return cls(groups, layers)

    @classmethod
    def latent(cls, *, layers: int, latent_dim: int, rope_dim: int, dtype: str) -> Geometry:
        """By hand, for multi-head latent attention: one latent and one rope key a token, shared by all
        heads.
        """
        count("layers", layers, LAYERS_MAX)
        planes = (Plane("latent", 1, latent_dim, dtype), Plane("rope", 1, rope_dim, dtype))
        return cls([Group(Rule.FULL, tuple(range(layers)), planes)], layers)

    @classmethod
    def from_hf_config(
        cls,
        config: Mapping[str, object] | str,
        *,
        dtype: str,
        v_dtype: str | None = None,
        scales: Scales | None = None,
        state_dtype: str = "",
        conv_dtype: str = "",
        conv_columns_less: int = 0,
    ) -> Geometry:
        """Read a Hugging Face config: a mapping, its JSON text, or the path of a config.json (`kvd.layout.hf`).

        `dtype` is what K (and V, without `v_dtype`) is kept in. States are kept as the architecture's own code does, in
        the model's type where K is quantised, unless `state_dtype` and `conv_dtype` say otherwise.
        """
        from kvd.layout import hf

        types = hf.Types(
            dtype, dtype if v_dtype is None else v_dtype, scales, state_dtype, conv_dtype, conv_columns_less
        )
        return hf.read(config, types)

    @property
    def fingerprint(self) -> str:
        """32 hex digits that name every group, plane, type and width.

        Belongs into the manifest (`extra={"geometry": geom.fingerprint}`): two engines that keep a state in different
        types, or one convolution column more, must not meet.
        """
        groups = [
            [str(g.rule), g.window, list(g.layers), [[p.name, p.heads, p.dim, p.dtype] for p in g.planes]]
            for g in self.groups
        ]
        encoded = encoding.encode({"groups": groups, "layers": self.layers_count}, where="geometry")
        return hashlib.sha256(b"kvd-geometry-v1\0" + encoded).hexdigest()[:32]

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one more token adds, over all layers, before windows let go of old ones."""
        return sum(group.bytes_per_token for group in self.groups)

    @property
    def state_bytes(self) -> int:
        """Bytes of one snapshot of all recurrent layers; 0 if there are none."""
        return sum(group.state_bytes for group in self.groups)

    def stored_bytes(self, tokens: int, *, snapshots: int = 1) -> int:
        """Bytes of all objects of `tokens` tokens of one prefix, with that many state snapshots."""
        count("tokens", tokens, TOKENS_MAX, least=0)
        count("snapshots", snapshots, TOKENS_MAX, least=0)
        return self.bytes_per_token * tokens + self.state_bytes * snapshots

    def resident_bytes(self, tokens: int) -> int:
        """Bytes an engine must hold to go on after `tokens` tokens: windows cut to what they still see."""
        count("tokens", tokens, TOKENS_MAX, least=0)
        kept = sum(group.bytes_per_token * group.kept_tokens(tokens) for group in self.groups)
        return kept + self.state_bytes

    def token_slots(self, capacity_bytes: int) -> int:
        """Tokens (not requests of any length) whose KV fits `capacity_bytes`."""
        if self.bytes_per_token == 0:
            raise UsageError("this model keeps no bytes per token, only states", code="geometry")
        return count("capacity_bytes", capacity_bytes, 1 << 62, least=0) // self.bytes_per_token

    def objects(
        self,
        *,
        chunk_tokens: int,
        tp: int = 1,
        pp: int = 1,
        cp: int = 1,
        split: Split | None = None,
        block_tokens: int | None = None,
    ) -> Objects:
        """How a chunk is cut into objects: groups, shards, bytes, layer and head ranges
        (`kvd.layout.shards`).
        """
        from kvd.layout import shards

        check_chunk_tokens(chunk_tokens, block_tokens=block_tokens)
        if block_tokens:
            for group in self.groups:
                group.check_block(block_tokens)
        chosen = split if split is not None else shards.Split(tp=tp, pp=pp, cp=cp)
        if not isinstance(chosen, shards.Split):
            raise UsageError(f"split is {split!r}; allowed: a kvd.Split", code="split", field="split")
        if split is not None and (tp, pp, cp) != (1, 1, 1):
            raise UsageError("give either split= or tp=, pp=, cp=, not both", code="split")
        return shards.Objects(self, chosen, chunk_tokens)


def tail_waste_tokens(tokens: int, block_tokens: int) -> int:
    """Token slots of the last block that a sequence leaves empty: ceil(S / b) x b - S."""
    count("tokens", tokens, TOKENS_MAX, least=0)
    return -tokens % count("block_tokens", block_tokens, limits.chunk_tokens_max)


def mean_tail_waste_tokens(block_tokens: int) -> float:
    """The same on average over all lengths: (b - 1) / 2."""
    return (count("block_tokens", block_tokens, limits.chunk_tokens_max) - 1) / 2
