"""An engine played by numpy, for the tests of geometry against a real daemon.

`Prompt` holds the true KV of every group, `Engine.memory` lays it out as an engine's tensors with noise around it, and
every comparison is byte for byte.
"""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np

import kvd
from kvd.layout.geometry import kv_planes

CHUNK, BLOCK, LAYERS, HEADS, DIM = 8, 4, 3, 8, 6
FULL = kvd.Geometry.attention(layers=LAYERS, kv_heads=HEADS, head_dim=DIM, dtype="bfloat16")
LATENT = kvd.Geometry.latent(layers=2, latent_dim=16, rope_dim=4, dtype="bfloat16")
STATE_PLANES = (kvd.Plane("ssm", 4, 6, "float32"),)
HYBRID = kvd.Geometry([
    kvd.Group(kvd.Rule.FULL, (0, 3), kv_planes(4, DIM, DIM, "bfloat16")),
    kvd.Group(kvd.Rule.WINDOW, (1,), kv_planes(4, DIM, DIM, "bfloat16"), 10),
    kvd.Group(kvd.Rule.STATE, (2,), STATE_PLANES),
])  # fmt: skip
AXES = {"L": 0, "P": 1, "H": 2, "B": 3, "N": 4, "D": 5}


def manifest(**changes: Any) -> kvd.Manifest:
    fields = {"model": "m", "revision": "r1", "dtype": "bfloat16", "tenant": "", "salt": "", "fixed": "*"}
    return kvd.Manifest(**{**fields, **changes})


def tokens(count: int, seed: int = 1) -> array[int]:
    return array("I", np.random.default_rng(seed).integers(0, 50_000, count, dtype=np.uint32).tobytes())


class Prompt:
    """The true KV of a prompt: for each token group bytes [layer, plane, head, token, row]."""

    def __init__(self, geom: kvd.Geometry, chunks: int, seed: int = 1) -> None:
        rng = np.random.default_rng(seed)
        self.geom, self.chunks = geom, chunks
        self.groups = [
            None
            if group.rule is kvd.Rule.STATE
            else [
                rng.integers(
                    0, 256, (len(group.layers), plane.heads, chunks * CHUNK, plane.row_bytes), dtype=np.uint8
                )
                for plane in group.planes
            ]
            for group in geom.groups
        ]


class Engine:
    """One rank: which heads and layers of a group it keeps, in which layout, and its tensors."""

    def __init__(
        self, prompt: Prompt, *, group: int = 0, tp: int = 1, rank: int = 0, order: str = "vllm-hnd",
        blocks: int = 0, layers: tuple[int, int] | None = None, seed: int = 3,
    ) -> None:  # fmt: skip
        described = prompt.geom.groups[group]
        self.group, self.prompt = group, prompt
        self.heads = max(1, described.heads // tp)
        self.first = rank * described.heads // tp
        self.layers = layers or (0, len(described.layers))
        self.planes = tuple(kvd.Plane(p.name, self.heads, p.dim, p.dtype) for p in described.planes)
        self.blocks = blocks or prompt.chunks * CHUNK // BLOCK + 3
        self.layout = kvd.PagedLayout(
            order, self.planes, self.layers[1] - self.layers[0], self.blocks, BLOCK,
            first_layer=self.layers[0], first_head=self.first,
        )  # fmt: skip
        self.rng = np.random.default_rng(seed)
        order_ids = self.rng.permutation(self.blocks)
        self.ids = order_ids[: prompt.chunks * CHUNK // BLOCK].astype(np.int64)
        self.noise = [
            self.rng.integers(0, 256, (self.layers[1] - self.layers[0], self.heads, self.blocks, BLOCK, p.row_bytes),
                              dtype=np.uint8)
            for p in self.planes
        ]  # fmt: skip

    def memory(self, *, chunks: int | range = 0) -> list[np.ndarray]:
        """Tensors with the first `chunks` chunks of the prompt (or those of a range) in their blocks."""
        wanted = range(chunks) if isinstance(chunks, int) else chunks
        truth = self.prompt.groups[self.group]
        assert truth is not None
        filled = []
        for plane, noise in zip(truth, self.noise, strict=True):
            data = noise.copy()
            mine = plane[self.layers[0] : self.layers[1], self.first : self.first + self.heads]
            per = CHUNK // BLOCK
            for chunk in wanted:
                for slot in range(per):
                    at = chunk * CHUNK + slot * BLOCK
                    data[:, :, self.ids[chunk * per + slot]] = mine[:, :, at : at + BLOCK]
            filled.append(data)
        return self._arranged(filled)

    def _arranged(self, planes: list[np.ndarray]) -> list[np.ndarray]:
        separate, axes = self.layout.separate_axes, self.layout.axes
        inside = "P" not in separate and axes.endswith("PD")
        if inside:  # planes side by side, of any sizes
            data = np.concatenate(planes, axis=-1)[:, None]  # L 1 H B N D
        else:
            data = np.stack(planes, axis=1)  # L P H B N D
        data = data.transpose([AXES[a] for a in separate] + [AXES[a] for a in axes if a not in separate])
        data = np.ascontiguousarray(data).reshape(-1, *data.shape[len(separate) :])
        if inside:
            data = data.reshape(*data.shape[:-2], data.shape[-1])
        return [np.ascontiguousarray(one) for one in data]


def write(
    ns: kvd.Namespace, chain: kvd.Chain, engine: Engine, split: kvd.Split, rank: Any, **options: Any
) -> list[kvd.Published]:
    """What a rank does after prefill."""
    geom = engine.prompt.geom
    chunks = range(chain.start, chain.start + len(chain))
    cache = ns.register(
        engine.layout, engine.memory(chunks=engine.prompt.chunks), geom=geom, group=engine.group,
        name=str(engine.layout.fingerprint),
    )  # fmt: skip
    per = CHUNK // BLOCK
    with ns.reserve(chain, geom=geom, split=split, rank=rank, **options) as writes:
        writes.gather(cache, engine.ids[chunks.start * per : chunks.stop * per])
        return writes.publish()


def read(ns: kvd.Namespace, chain: kvd.Chain, engine: Engine, **options: Any) -> int:
    """What a rank does before prefill; checks every byte of its tensors, the untouched ones too."""
    tensors = engine.memory()
    cache = ns.register(
        engine.layout, tensors, geom=engine.prompt.geom, group=engine.group, name="reader", **options
    )
    with ns.acquire(chain, engine.prompt.geom) as leases:
        chunks, per = leases.chunks(engine.group), CHUNK // BLOCK
        copied = leases.scatter(cache, engine.ids[chunks.start * per : chunks.stop * per])
        usable = leases.usable_chunks
    cache.close()
    expected = engine.memory(chunks=chunks)
    assert all(np.array_equal(a, b) for a, b in zip(tensors, expected, strict=True))
    row = sum(plane.size_bytes for plane in engine.planes) * engine.layout.layers
    assert copied == len(chunks) * CHUNK * row
    return usable


def state_cache(ns: kvd.Namespace, slots: int, data: bytes, name: str) -> tuple[Any, bytearray]:
    layout = kvd.StateLayout((("ssm",),), STATE_PLANES, 1, slots)
    tensor = bytearray(data)
    return ns.register(layout, [tensor], geom=HYBRID, group="state", name=name), tensor
