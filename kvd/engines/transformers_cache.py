"""What a Transformers model keeps in its cache, and the way between that cache and kvd's objects.

Owns no state beside what `describe` found out about one model. Called by kvd.engines.transformers only, on the caller's
thread. Nothing is taken from a config alone: one token is run through the model, and what its cache then holds must be
what the geometry says, in shape and element type, layer by layer. A cache that is anything else is refused.

    token groups   layer.keys, layer.values   [1, heads, tokens, dim]; windows keep the last ones only
    states         layer.conv_states[0], layer.recurrent_states[0]   a snapshot after the last token
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import transformers
from transformers import DynamicCache

from kvd.clientlib.families import FamilyLeases
from kvd.clientlib.namespace import Namespace
from kvd.clientlib.writes import Writes
from kvd.engines.common import json_values
from kvd.errors import UsageError
from kvd.layout.geometry import Geometry, Group, Rule
from kvd.layout.paged import PagedLayout
from kvd.layout.states import StateLayout, transformers_tensors

_LAYERS: Final = frozenset({
    "DynamicLayer", "DynamicSlidingWindowLayer", "LinearAttentionLayer", "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer",
})  # fmt: skip
_numbers = itertools.count()
_CACHE_NAMES: Final = ("cache", "past_key_values", "cache_params")


@dataclass(frozen=True, slots=True)
class Kept:
    """What one model keeps. `state_shapes`: shapes and types of the convolution and recurrent tensors, by group."""

    geometry: Geometry
    cache_name: str
    dtype: str
    device: torch.device
    state_shapes: dict[int, list[tuple[tuple[int, ...], torch.dtype]]] = field(default_factory=dict)

    @property
    def windowed(self) -> bool:
        """Whether any layer drops old tokens."""
        return any(group.windowed for group in self.geometry.groups)

    @property
    def only_states(self) -> bool:
        """Whether no layer keeps tokens."""
        return all(group.rule is Rule.STATE for group in self.geometry.groups)

    @property
    def has_states(self) -> bool:
        """Whether any layer keeps a state, which can only be stored at the very token it was taken."""
        return any(group.rule is Rule.STATE for group in self.geometry.groups)


def new_cache(model: Any) -> DynamicCache:
    """An empty cache of the kind `generate` makes."""
    return DynamicCache(config=model.config)


def cache_name(model: Any) -> str:
    """The name under which forward and generate take a cache: it changed over the releases."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    known = inspect.signature(inner.forward).parameters
    for name in _CACHE_NAMES:
        if name in known:
            return name
    raise UsageError(
        f"{type(inner).__name__}.forward takes none of {', '.join(_CACHE_NAMES)}: it has no cache to keep",
        code="architecture", architecture=type(inner).__name__,
    )  # fmt: skip


def describe(model: Any) -> Kept:
    """Run one token, and read off what the cache holds. Raises UsageError naming what cannot be kept."""
    name, cache = cache_name(model), new_cache(model)
    device = model.get_input_embeddings().weight.device
    try:
        with torch.no_grad():
            token = torch.zeros((1, 1), dtype=torch.long, device=device)
            model(input_ids=token, use_cache=True, **{name: cache})
    except Exception as error:
        raise _refused(f"one token with a DynamicCache gave {error!r}", "a model that keeps one") from error
    plain = json_values(model.config.to_dict())
    keys = [layer.keys for layer in cache.layers if torch.is_tensor(getattr(layer, "keys", None))]
    states = [layer for layer in cache.layers if getattr(layer, "recurrent_states", None)]
    types = {_name(k.dtype) for k in keys} or {_name(model.dtype)}
    if len(types) != 1:
        raise _refused(f"its layers keep keys of {sorted(types)}", "one element type for all")
    dtype = types.pop()
    options: dict[str, Any] = {"dtype": dtype}
    if states:
        conv, recurrent = states[0].conv_states[0], states[0].recurrent_states[0]
        if not (torch.is_tensor(conv) and torch.is_tensor(recurrent)):
            raise _refused("a layer keeps a convolution or a recurrent state, not both", "both")
        options |= {"state_dtype": _name(recurrent.dtype), "conv_dtype": _name(conv.dtype)}
    first: UsageError | None = None
    for less in (0, 1) if states else (0,):  # some classes keep one column of the convolution less
        geometry = Geometry.from_hf_config(plain, **options, conv_columns_less=less)
        try:
            return Kept(geometry, name, dtype, device, _compare(geometry, cache))
        except UsageError as refused:
            first = first or refused
    assert first is not None
    raise first


def _compare(geometry: Geometry, cache: Any) -> dict[int, list[tuple[tuple[int, ...], torch.dtype]]]:
    """Whether a cache of one token is what the geometry says; shapes of its states."""
    shapes: dict[int, list[tuple[tuple[int, ...], torch.dtype]]] = {}
    for number, group in enumerate(geometry.groups):
        for index in group.layers:
            layer = cache.layers[index]
            if type(layer).__name__ not in _LAYERS:
                raise _refused(f"layer {index} is a {type(layer).__name__}", ", ".join(sorted(_LAYERS)))
            if group.rule is not Rule.STATE:
                if len(group.planes) != 2:
                    raise _refused(f"layer {index} keeps {len(group.planes)} planes", "keys and values")
                for plane, tensor in zip(group.planes, (layer.keys, layer.values), strict=True):
                    found = (tuple(tensor.shape), _name(tensor.dtype))
                    _same(index, found, ((1, plane.heads, 1, plane.dim), plane.dtype))
                continue
            layout = _state_layout(group)
            tensors = [layer.conv_states[0], layer.recurrent_states[0]]
            if getattr(layer, "number_of_states", 1) != 1 or len(layout.tensors) != 2:
                raise _refused(f"layer {index} keeps several states", "one")
            for at, tensor in enumerate(tensors):
                kinds = {plane.dtype for plane in group.planes if plane.name in layout.tensors[at]}
                size = tensor.numel() * tensor.element_size()
                _same(
                    index, (tensor.shape[0], size, {_name(tensor.dtype)}), (1, layout.slot_bytes(at), kinds)
                )
            shapes[number] = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
    return shapes


def _same(layer: int, found: object, described: object) -> None:
    if found != described:
        raise _refused(f"layer {layer} keeps {found}", f"{described}, as its config says")


def _refused(found: str, allowed: str) -> UsageError:
    return UsageError(
        f"this model's cache cannot be kept: {found}; allowed: {allowed} "
        f"(Transformers {transformers.__version__})",
        code="architecture",
    )  # fmt: skip


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _state_layout(group: Group) -> StateLayout:
    return StateLayout(transformers_tensors(group), group.planes, len(group.layers), slots=1)


# -- out of objects ------------------------------------------------------------------------------------------


def restore(kept: Kept, namespace: Namespace, leases: FamilyLeases, cache: Any) -> int:
    """Fill an empty cache with the prefix that `leases` hold; returns the bytes copied.

    The cache is touched only when everything was copied.
    """
    filled: list[tuple[Any, Group, list[torch.Tensor]]] = []
    copied, chunk_tokens = 0, leases.tokens_count // leases.usable_chunks
    for number, group in enumerate(kept.geometry.groups):
        chunks = leases.chunks(number)
        tensors = _empty(kept, number, len(chunks) * chunk_tokens)
        if chunks:
            layout = _layout(group, len(chunks), chunk_tokens)
            flat = [_flat(tensor) for tensor in tensors]
            registered = namespace.register(
                layout, flat, geom=kept.geometry, group=number, name=_once("restore")
            )
            try:
                copied += leases.scatter(registered, range(1 if group.rule is Rule.STATE else len(chunks)))
            finally:
                registered.close()
        filled += [
            (cache.layers[layer], group, tensors[2 * at : 2 * at + 2])
            for at, layer in enumerate(group.layers)
        ]
    for layer, group, (first, second) in filled:
        first, second = first.to(kept.device), second.to(kept.device)
        if group.rule is Rule.STATE:
            layer.update_conv_state(first)
            layer.update_recurrent_state(second)
        else:
            _set_tokens(layer, group, first, second, leases.tokens_count)
    return copied


def _empty(kept: Kept, number: int, tokens: int) -> list[torch.Tensor]:
    """Memory for what one group keeps, two tensors a layer."""
    group = kept.geometry.groups[number]
    if group.rule is Rule.STATE:
        return [torch.empty(s, dtype=t) for _ in group.layers for s, t in kept.state_shapes[number]]
    return [
        torch.empty((1, plane.heads, tokens, plane.dim), dtype=getattr(torch, plane.dtype))
        for _ in group.layers
        for plane in group.planes
    ]


def _set_tokens(layer: Any, group: Group, keys: torch.Tensor, values: torch.Tensor, tokens: int) -> None:
    """Make a layer hold these last of `tokens` tokens, as if it had computed them."""
    keep = tokens if group.rule is Rule.FULL else min(tokens, group.window - 1)
    layer.lazy_initialization(keys, values)
    layer.keys, layer.values = (_last(tensor, keep) for tensor in (keys, values))
    if group.rule is not Rule.FULL:
        layer.cumulative_length = tokens


def _last(tensor: torch.Tensor, keep: int) -> torch.Tensor:
    """The last `keep` tokens; in front of those that were needed there are zeros, which nothing attends to."""
    missing = keep - tensor.shape[2]
    if missing > 0:
        return torch.nn.functional.pad(tensor, (0, 0, missing, 0))
    return tensor if missing == 0 else tensor[:, :, -keep:] if keep else tensor[:, :, :0]


def _layout(group: Group, chunks: int, chunk_tokens: int) -> PagedLayout | StateLayout:
    if group.rule is Rule.STATE:
        return _state_layout(group)
    return PagedLayout("transformers", group.planes, len(group.layers), chunks, chunk_tokens)


def _once(name: str) -> str:
    """A name for one registration: threads that load at the same time have layouts of their own."""
    return f"{name}-{next(_numbers)}"


def _flat(tensor: torch.Tensor) -> memoryview:
    """The bytes of a dense tensor: numpy has no bfloat16."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


# -- into objects --------------------------------------------------------------------------------------------


def record_windows(cache: Any, *, on: bool) -> None:
    """Let windows keep what they would drop, so that it can be stored; off: let them drop it with the next token."""
    for layer in cache.layers:
        if getattr(layer, "is_sliding", False):
            layer.record_past = on


def trim_windows(cache: Any, tokens: int, chunk_tokens: int) -> None:
    """Drop what neither the model nor the chunk that is not full yet needs."""
    for layer in cache.layers:
        if getattr(layer, "is_sliding", False) and torch.is_tensor(layer.keys):
            keep = max(layer.sliding_window - 1, tokens % chunk_tokens)
            if layer.keys.shape[-2] > keep:  # a copy, so that the rest is really let go
                layer.keys = layer.keys[:, :, -keep:].clone()
                layer.values = layer.values[:, :, -keep:].clone()


def storable(kept: Kept, cache: Any, tokens: int, chunk_tokens: int) -> Iterator[tuple[int, range]]:
    """(group, chunks) that this cache of `tokens` tokens holds in whole.

    Where there are states nothing is worth storing but exactly at a chunk's end. Raises UsageError for a cache that is
    not the one described: of a batch, quantised, of another length.
    """
    if kept.has_states and tokens % chunk_tokens:
        return
    whole = tokens // chunk_tokens
    for number, group in enumerate(kept.geometry.groups):
        if group.rule is Rule.STATE:
            first = whole - 1
            for layer, (tensor, (shape, dtype)) in _states(kept, number, cache):
                _same(layer, (tuple(tensor.shape), tensor.dtype), (shape, dtype))
        else:
            held = _held_tokens(group, cache, tokens)
            first = -(-(tokens - held) // chunk_tokens)
        if first < whole:
            yield number, range(first, whole)


def _held_tokens(group: Group, cache: Any, tokens: int) -> int:
    """How many of the last tokens every layer of a group still has."""
    held = tokens
    for index in group.layers:
        layer = cache.layers[index]
        if type(layer).__name__ not in _LAYERS or not torch.is_tensor(layer.keys):
            raise _refused(f"layer {index} is a {type(layer).__name__}", "the cache that load gave")
        if int(layer.get_seq_length()) != tokens:
            raise _refused(f"layer {index} has {int(layer.get_seq_length())} tokens", f"the {tokens} given")
        for plane, tensor in zip(group.planes, (layer.keys, layer.values), strict=True):
            shape, dtype = tuple(tensor.shape), _name(tensor.dtype)
            _same(index, (shape[0], shape[1], shape[3], dtype), (1, plane.heads, plane.dim, plane.dtype))
            held = min(held, shape[2])
    return held


def _states(kept: Kept, number: int, cache: Any) -> Iterator[tuple[int, Any]]:
    for index in kept.geometry.groups[number].layers:
        layer = cache.layers[index]
        tensors = [layer.conv_states[0], layer.recurrent_states[0]]
        yield from ((index, pair) for pair in zip(tensors, kept.state_shapes[number], strict=True))


def fill(
    kept: Kept, namespace: Namespace, writes: Writes, number: int, cache: Any, tokens: int, chunks: range,
    chunk_tokens: int,
) -> int:  # fmt: skip
    """Copy these chunks of one group into a reservation for them; returns the bytes copied."""
    group = kept.geometry.groups[number]
    if group.rule is Rule.STATE:
        tensors = [tensor for _, (tensor, _) in _states(kept, number, cache)]
    else:
        tensors = [
            _stretch(tensor, tokens, chunks, chunk_tokens)
            for index in group.layers
            for tensor in (cache.layers[index].keys, cache.layers[index].values)
        ]
    flat = [_flat(tensor.detach().to("cpu").contiguous()) for tensor in tensors]
    layout = _layout(group, len(chunks), chunk_tokens)
    registered = namespace.register(layout, flat, geom=kept.geometry, group=number, name=_once("fill"))
    try:
        return writes.gather(registered, range(1 if group.rule is Rule.STATE else len(chunks)))
    finally:
        registered.close()


def _stretch(tensor: torch.Tensor, tokens: int, chunks: range, chunk_tokens: int) -> torch.Tensor:
    """The tokens of some chunks, of a tensor that holds the last ones of `tokens`."""
    begin = chunks.start * chunk_tokens - (tokens - tensor.shape[2])
    return tensor[:, :, begin : begin + len(chunks) * chunk_tokens]


def check_ids(input_ids: Any) -> Sequence[int]:
    """The token ids of one sequence. Raises UsageError(input-ids) for a batch or for anything but whole numbers."""
    if torch.is_tensor(input_ids):
        rows = input_ids if input_ids.dim() == 2 else input_ids[None]
        if rows.dim() == 2 and rows.shape[0] == 1 and not rows.dtype.is_floating_point:
            ids: list[int] = rows[0].tolist()
            return ids
        found = f"a tensor of shape {tuple(input_ids.shape)} and {input_ids.dtype}"
    elif isinstance(input_ids, Sequence) and not isinstance(input_ids, str | bytes):
        rows = input_ids[0] if len(input_ids) == 1 and isinstance(input_ids[0], Sequence) else input_ids
        if all(isinstance(one, int) and not isinstance(one, bool) for one in rows):
            return list(rows)
        found = "a list with something else than whole numbers"
    else:
        found = f"a {type(input_ids).__name__}"
    raise UsageError(
        f"input_ids is {found}; allowed: the token ids of one sequence, [tokens] or [1, tokens], without padding",
        code="input-ids",
    )  # fmt: skip
