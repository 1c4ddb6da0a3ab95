"""What a vLLM engine keeps, in kvd's words: settings, manifest, geometry, and the layout of each group's tensors.

Read once by each role, from the engine's own configuration objects (duck-typed: nothing of vLLM is imported here), so
that scheduler and workers come to the same answer by themselves. What kvd cannot describe to the byte is refused by
name with UsageError or CompatibilityError; the connector then says so once and lets the engine run without kvd.

One group of the engine (layers that share a block table) is one group of the geometry; a chunk is a block of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvd.engines.common import manifest_from, weights_revision
from kvd.errors import CompatibilityError, UsageError
from kvd.layout.geometry import Geometry, Group, Plane, Rule
from kvd.layout.manifest import Manifest
from kvd.layout.paged import PagedLayout
from kvd.layout.shards import Objects, Split

HASHES: Final = ("sha256", "sha256_cbor")
HASH_BYTES: Final = 32
LOADS: Final = ("sync", "layers", "async")
_LAYER: Final = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")
_SETTINGS: Final = frozenset({
    "socket", "deadline_s", "model", "revision", "tenant", "salt", "load", "verify", "store",
    "break_even",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Settings:
    """`kv_connector_extra_config`; none is needed."""

    socket: str | None = None
    deadline_s: float = 1.0  # of a call to the daemon; on a thread of its own, never on a path of the engine
    model: str | None = None
    revision: str | None = None
    tenant: str = ""
    salt: str = ""
    load: str = "sync"  # "sync": before the step; "layers": beside it; "async": between steps
    verify: bool = False
    store: bool = True
    break_even: bool = True

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Settings:
        """Raises UsageError naming a key that is unknown or a value that is not allowed."""
        unknown = sorted(set(given) - _SETTINGS)
        if unknown:
            raise UsageError(
                f"kv_connector_extra_config: {', '.join(unknown)} unknown; allowed: {', '.join(sorted(_SETTINGS))}",
                code="setting",
            )  # fmt: skip
        settings = cls(**given)
        if settings.load not in LOADS:
            raise UsageError(f"load is {settings.load!r}; allowed: {', '.join(LOADS)}", code="setting")
        if not isinstance(settings.deadline_s, int | float) or not 0 < settings.deadline_s <= 60:
            raise UsageError(f"deadline_s is {settings.deadline_s!r}; allowed: up to 60 s", code="setting")
        return settings


@dataclass(frozen=True, slots=True)
class Identity:
    """What is kept: `layers[g]` are the engine's names of the layers of group g, in ascending order."""

    settings: Settings
    manifest: Manifest
    geometry: Geometry
    split: Split
    chunk_tokens: int
    hashes_per_chunk: int  # the engine's hashes are that much finer than its blocks
    blocks: int
    layers: tuple[tuple[str, ...], ...]
    groups: tuple[int, ...]  # number in the geometry of each group of the engine
    bytes_per_token: int  # of all groups and shards

    @property
    def one_group(self) -> bool:
        """Whether there is one block table: then single blocks can be reported as failed."""
        return len(self.groups) == 1

    @property
    def geometry_is_full(self) -> bool:
        """Whether a running request keeps all its blocks."""
        return all(group.rule is Rule.FULL for group in self.geometry.groups)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one chunk, all groups and shards."""
        return self.bytes_per_token * self.chunk_tokens

    def load_bytes(self, usable_tokens: int, new_tokens: int) -> int:
        """Bytes of all shards to load for the last `new_tokens` of a usable prefix: of windows the chunks they see."""
        total = 0
        for group in self.geometry.groups:
            seen = -(-group.kept_tokens(usable_tokens) // self.chunk_tokens) * self.chunk_tokens
            total += group.bytes_per_token * min(new_tokens, seen)
        return total

    def adapted(self, adapter: str) -> Manifest:
        """The manifest of requests that use a LoRA."""
        return self.manifest.replace(adapter=adapter)


def identify(vllm_config: Any, kv_cache_config: Any) -> Identity:
    """Read an engine's configuration. Raises UsageError, CompatibilityError for what kvd does not serve."""
    settings = Settings.of(vllm_config.kv_transfer_config.kv_connector_extra_config or {})
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    _refuse_parallel(vllm_config, parallel)
    algorithm = str(cache.prefix_caching_hash_algo)
    if algorithm not in HASHES:
        raise UsageError(
            f"prefix_caching_hash_algo {algorithm!r} can be made to collide, which in a shared cache hands one user's "
            f"KV to another; use one of {', '.join(HASHES)}",
            code="hash",
        )  # fmt: skip
    groups = [_group(number, spec, model) for number, spec in enumerate(kv_cache_config.kv_cache_groups)]
    sizes = {int(spec.kv_cache_spec.block_size) for spec in kv_cache_config.kv_cache_groups}
    if len(sizes) != 1:
        raise CompatibilityError(f"the engine's groups have blocks of {sorted(sizes)} tokens", code="blocks")
    chunk = sizes.pop()
    hashed = int(getattr(kv_cache_config, "hash_block_size", None) or chunk)
    if chunk % hashed:
        raise CompatibilityError(f"hashes of {hashed} tokens do not divide blocks of {chunk}", code="blocks")
    dtype = groups[0][1].planes[0].dtype
    geometry = Geometry([group for _, group in groups], None, "")
    order = tuple(geometry.groups.index(group) for _, group in groups)
    return Identity(
        settings=settings,
        manifest=_manifest(vllm_config, settings, geometry, dtype),
        geometry=geometry,
        split=Split(tp=int(parallel.tensor_parallel_size)),
        chunk_tokens=chunk,
        hashes_per_chunk=chunk // hashed,
        blocks=int(kv_cache_config.num_blocks),
        layers=tuple(names for names, _ in groups),
        groups=order,
        bytes_per_token=geometry.bytes_per_token,
    )


def _refuse_parallel(vllm_config: Any, parallel: Any) -> None:
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if (size := getattr(parallel, name, 1)) not in (None, 1):
            raise CompatibilityError(f"{name} {size} is not served", code="parallel", field=name)
    if getattr(vllm_config, "speculative_config", None) is not None:
        raise CompatibilityError("speculative decoding: draft layers are not described", code="speculative")


def _manifest(vllm_config: Any, settings: Settings, geometry: Geometry, dtype: str) -> Manifest:
    model, cache = vllm_config.model_config, vllm_config.cache_config
    if getattr(cache, "calculate_kv_scales", False):
        raise CompatibilityError(
            "calculate_kv_scales: scales that are found while running have no name", code="scales"
        )
    revision = settings.revision or weights_revision(
        model.model, revision=getattr(model.hf_config, "_commit_hash", None) or model.revision
    )
    return manifest_from(
        model.hf_config.to_dict(),
        model=settings.model or _model_name(str(model.model)),
        revision=revision,
        dtype=dtype,
        geometry=geometry,
        quantisation=str(model.quantization or "none"),
        tenant=settings.tenant,
        salt=settings.salt,
        extra={"engine": "vllm", "compute": str(model.dtype).removeprefix("torch.")},
    )


def _model_name(model: str) -> str:
    """The name of a model on a hub, or the last part of a path: the same weights at another path are the same."""
    path = Path(model)
    if path.parent.name == "snapshots" and path.parent.parent.name.startswith("models--"):
        return path.parent.parent.name.removeprefix("models--").replace("--", "/")
    return path.name if path.exists() else model


def _group(number: int, engine_group: Any, model: Any) -> tuple[tuple[str, ...], Group]:
    """One group of the engine: the names of its layers in ascending order, and what they keep (all ranks together)."""
    spec = engine_group.kv_cache_spec
    kind = type(spec).__name__
    named = sorted((_layer_number(name), name) for name in engine_group.layer_names)
    rule, window = _rule(kind, spec)
    mode = getattr(spec, "kv_quant_mode", 0)
    if int(mode) != 0 or getattr(spec, "state_content_bytes", None) is not None:
        raise CompatibilityError(f"group {number}: quantised KV ({mode!s}) is not described", code="kv-dtype")
    if getattr(spec, "num_head_slots", None) is not None or getattr(spec, "tokens_per_state", 1) != 1:
        raise CompatibilityError(
            f"group {number}: packed heads or states are not described", code="kv-layout"
        )
    if not getattr(engine_group, "enable_kv_transfer", True) or getattr(engine_group, "host_resident", False):
        raise CompatibilityError(f"group {number} of the engine is not transferable", code="kv-group")
    dtype = str(spec.dtype).removeprefix("torch.")
    if kind == "MLAAttentionSpec":
        planes: Sequence[Plane] = (Plane("latent", 1, int(spec.head_size), dtype),)
    else:
        heads = int(model.get_total_num_kv_heads())
        k_dim, v_dim = int(spec.head_size), int(getattr(spec, "head_size_v", None) or spec.head_size)
        planes = (Plane("k", heads, k_dim, dtype), Plane("v", heads, v_dim, dtype))
    if window and window < spec.block_size:
        raise CompatibilityError(
            f"window {window} is smaller than a block of {spec.block_size}", code="window"
        )
    group = Group(rule, tuple(n for n, _ in named), tuple(planes), window)
    return tuple(name for _, name in named), group


def _rule(kind: str, spec: Any) -> tuple[Rule, int]:
    match kind:
        case "FullAttentionSpec" | "MLAAttentionSpec":
            return (
                Rule.FULL,
                0,
            )  # with the hybrid manager off, sliding layers keep everything: full is what is kept
        case "SlidingWindowSpec":
            return Rule.WINDOW, int(spec.sliding_window)
        case "ChunkedLocalAttentionSpec":
            return Rule.CHUNKED, int(spec.attention_chunk_size)
        case _:
            raise CompatibilityError(
                f"{kind}: kvd's connector serves full, latent, sliding and chunked attention; not states",
                code="kv-spec", kind=kind,
            )  # fmt: skip


def _layer_number(name: str) -> int:
    found = _LAYER.findall(name)
    if len(found) != 1:
        raise CompatibilityError(f"layer {name!r} has no number, or several", code="layer", layer=name)
    return int(found[0])


def layout_of(identity: Identity, group: int, tensors: Sequence[Any], tp_rank: int) -> PagedLayout:
    """The layout of the tensors of one engine group on one rank, from what the tensors say of themselves.

    Each tensor is [blocks, heads, tokens, K|V] in any order of memory; a block of the engine may be several of them.
    """
    first = tensors[0]
    if first.device.type != "cpu":
        raise CompatibilityError(
            f"the KV cache is on {first.device}: this build of kvd copies from and to host memory only",
            code="device",
        )
    shape, strides, element = tuple(first.shape), first.stride(), first.element_size()
    if len(shape) != 4 or any(tuple(t.shape) != shape or t.stride() != strides for t in tensors):
        raise CompatibilityError(
            f"KV tensors of shape {shape} are not [blocks, heads, tokens, K|V]", code="kv-layout"
        )
    described = identity.geometry.groups[identity.groups[group]]
    objects = Objects(identity.geometry, identity.split, identity.chunk_tokens)
    mine = [p for p in objects.for_rank(tp_rank=tp_rank) if p.group == identity.groups[group]]
    heads = (min(p.heads[0] for p in mine), max(p.heads[1] for p in mine))
    if heads[1] - heads[0] != shape[1] or shape[0] % identity.blocks or identity.chunk_tokens % shape[2]:
        raise CompatibilityError(
            f"KV tensors {shape}: expected {heads[1] - heads[0]} heads, a multiple of {identity.blocks} blocks",
            code="kv-layout",
        )  # fmt: skip
    if (shape[0] // identity.blocks) * shape[2] != identity.chunk_tokens:
        raise CompatibilityError(
            f"blocks of {shape[2]} tokens do not make one of {identity.chunk_tokens}", code="blocks"
        )
    planes = tuple(Plane(p.name, heads[1] - heads[0], p.dim, p.dtype) for p in described.planes)
    return PagedLayout(
        "LBHNC", planes, layers=len(tensors), blocks=shape[0], block_tokens=shape[2], separate="L",
        first_head=heads[0],
        strides={axis: strides[n] * element for n, axis in enumerate("BHN") if shape[n] > 1},
    )  # fmt: skip
