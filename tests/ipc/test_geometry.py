"""Geometry against a real daemon: engines of other splits and layouts share objects, and only what is usable is found.

Rows A8, A9, A10, A11, E2, E4 of the field's list. An engine is played by numpy: `Prompt` holds the true KV of every
group, `memory` lays it out as an engine's tensors with noise around it, and every comparison is byte for byte.
"""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest

import kvd
from kvd.errors import CompatibilityError, LifecycleError, UsageError
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


@pytest.fixture
def store(daemon: Any) -> Any:
    with kvd.connect(daemon().socket, client="test") as opened:
        yield opened


@pytest.fixture
def ns(store: kvd.Store) -> kvd.Namespace:
    return store.namespace(manifest())


def test_four_ranks_write_and_engines_of_any_split_and_layout_read(daemon: Any) -> None:
    running = daemon()
    prompt, split = Prompt(FULL, 5), kvd.Split(tp=4)
    with kvd.connect(running.socket) as writer, kvd.connect(running.socket, access="read") as reader:
        ns, theirs = writer.namespace(manifest()), reader.namespace(manifest())
        chain = ns.chain(tokens(5 * CHUNK + 1), CHUNK)
        for rank in range(4):
            assert ns.match(chain, FULL) == 0, "nothing is usable before the last rank has written"
            order = ("vllm-hnd", "vllm-nhd", "transformers", "sglang-layer-first")[rank]
            results = write(ns, chain, Engine(prompt, tp=4, rank=rank, order=order), split, rank)
            assert results == [kvd.Published.PUBLISHED] * 5
        assert ns.match(chain, FULL) == ns.match(chain) == 5
        for order, tp in (
            ("vllm-hnd", 2),
            ("sglang-page-first", 2),
            ("transformers", 1),
            ("vllm-nhd", 8),
            ("vllm-hnd", 4),
        ):
            for rank in range(tp):
                assert read(theirs, chain, Engine(prompt, tp=tp, rank=rank, order=order)) == 5


@pytest.mark.parametrize(
    "split",
    [kvd.Split(pp=3), kvd.Split(cp=2), kvd.Split(cp=4, cp_interleave_tokens=1), kvd.Split(tp=2, pp=2, cp=2)],
    ids=lambda split: split.name,
)  # fmt: skip
def test_stages_and_context_ranks_are_put_together(ns: kvd.Namespace, split: kvd.Split) -> None:
    from kvd.layout import paged

    prompt = Prompt(FULL, 3)
    chain = ns.chain(tokens(3 * CHUNK + 1), CHUNK)
    whole, objects = Engine(prompt), FULL.objects(chunk_tokens=CHUNK, split=split)
    one = FULL.objects(chunk_tokens=CHUNK)
    from kvd.layout import shards, strided

    plan = shards.reshard(one, objects)
    with ns.reserve(chain, geom=FULL, split=split) as writes:
        for chunk in range(3):
            source = bytearray(one[0].size_bytes)
            flat = [t.tobytes() for t in whole.memory(chunks=3)]
            ids = [int(i) for i in whole.ids[2 * chunk : 2 * chunk + 2]]
            paged.plan(whole.layout, FULL.groups[0], one[0]).gather_reference(flat, ids, source)
            made = {part.index: bytearray(part.size_bytes) for part in objects}
            strided.run_reference(plan, lambda _, s=source: bytes(s), made.__getitem__)
            for part in objects:
                writes[chunk * len(objects) + part.index].fill(made[part.index])
        writes.publish()
    assert ns.match(chain, FULL) == 3
    assert read(ns, chain, whole) == 3
    assert read(ns, chain, Engine(prompt, tp=2, rank=1, order="vllm-nhd")) == 3
    assert read(ns, chain, Engine(prompt, layers=(1, 3))) == 3


def test_a_latent_cache_is_stored_once_for_all_ranks(store: kvd.Store, ns: kvd.Namespace) -> None:
    """Row E4. Fails if a rank that shares its heads with an earlier one stores them again."""
    prompt, split = Prompt(LATENT, 4), kvd.Split(tp=4)
    chain = ns.chain(tokens(4 * CHUNK + 1), CHUNK)
    for rank in range(4):
        results = write(ns, chain, Engine(prompt, order="vllm-nhd"), split, rank)
        assert results == ([kvd.Published.PUBLISHED] * 4 if rank == 0 else [])
    with ns.acquire(chain, LATENT) as leases:
        assert len(leases) == 4
        with pytest.raises(UsageError, match="no member 1"):
            leases[0].member_view(1)
    for _ in range(3):
        assert read(ns, chain, Engine(prompt, order="sglang-mla-page-first")) == 4


def state_cache(ns: kvd.Namespace, slots: int, data: bytes, name: str) -> tuple[Any, bytearray]:
    layout = kvd.StateLayout((("ssm",),), STATE_PLANES, 1, slots)
    tensor = bytearray(data)
    return ns.register(layout, [tensor], geom=HYBRID, group="state", name=name), tensor


def test_a_hybrid_is_usable_where_every_group_is_there(ns: kvd.Namespace) -> None:
    """Row A10. Fails if completeness is that of the attention layers alone."""
    prompt, chunks = Prompt(HYBRID, 6), 6
    chain = ns.chain(tokens(chunks * CHUNK + 1), CHUNK)
    full, window = Engine(prompt, group=0), Engine(prompt, group=1, order="vllm-nhd")
    write(ns, chain, full, kvd.Split(), None, groups=["full"])
    assert ns.match(chain) == 6, "families are complete with their mandatory members"
    assert ns.match(chain, HYBRID) == 0
    write(ns, chain, window, kvd.Split(), None, groups=["window 10"])
    assert ns.match(chain, HYBRID) == 0, "attention everywhere, no state"
    size = STATE_PLANES[0].size_bytes
    states = np.random.default_rng(5).integers(0, 256, 2 * size, dtype=np.uint8).tobytes()
    cache, _ = state_cache(ns, 2, states, "writer")
    for slot, boundary in enumerate((3, 5)):
        with ns.reserve(chain[boundary - 1 : boundary], geom=HYBRID, groups=["state"]) as writes:
            writes.gather(cache, [slot])
            assert writes.publish() == [kvd.Published.PUBLISHED]
        assert ns.match(chain, HYBRID) == boundary
    assert ns.match(chain[:5], HYBRID) == 5
    assert ns.match(chain[:4], HYBRID) == 3, "a state of a longer prefix is none of this one"
    assert read(ns, chain, full) == 5
    assert read(ns, chain, window) == 5
    back, tensor = state_cache(ns, 3, bytes(3 * size), "reader")
    with ns.acquire(chain, HYBRID) as leases:
        assert [leases.chunks(g) for g in ("full", "window 10", "state")] == [
            range(5),
            range(3, 5),
            range(4, 5),
        ]
        assert leases.scatter(back, [2]) == size
    assert bytes(tensor) == bytes(2 * size) + states[size:]


def test_a_window_model_leases_only_what_it_still_sees(ns: kvd.Namespace) -> None:
    geom = kvd.Geometry.attention(layers=2, kv_heads=4, head_dim=DIM, dtype="bfloat16", window=10)
    prompt = Prompt(geom, 6)
    chain = ns.chain(tokens(6 * CHUNK + 1), CHUNK)
    engine = Engine(prompt)
    write(ns, chain[3:], engine, kvd.Split(), None)
    assert ns.match(chain) == 0
    assert ns.match(chain, geom) == 6
    with ns.acquire(chain, geom) as leases:
        assert (leases.first_chunk, leases.usable_chunks, len(leases)) == (4, 6, 2)
        assert leases.tokens_count == 6 * CHUNK
        exported = leases.export()
        with ns.adopt(exported, chain[:6], geom) as adopted:
            assert adopted.chunks() == range(4, 6)
        with pytest.raises(LifecycleError, match="2 adopted leases"):
            ns.adopt(exported, chain[:1], geom)
    assert read(ns, chain, engine) == 6


def test_the_last_token_is_always_computed(ns: kvd.Namespace) -> None:
    prompt, engine = Prompt(FULL, 4), Engine(Prompt(FULL, 4))
    whole = ns.chain(tokens(4 * CHUNK), CHUNK)
    write(ns, whole, engine, kvd.Split(), None)
    assert ns.match(whole) == 4, "without a geometry: what is there"
    assert ns.match(whole, FULL) == 3
    assert ns.match(ns.chain(tokens(4 * CHUNK + 1), CHUNK), FULL) == 4
    named = ns.chain_of(bytes(whole.identities), CHUNK)
    assert ns.match(named, FULL) == 3
    assert ns.match(named, FULL, prompt_tokens=4 * CHUNK + 1) == 4
    assert ns.match(named, FULL, prompt_tokens=CHUNK) == 0
    assert len(ns.acquire(whole, FULL)) == 3
    with pytest.raises(UsageError, match="from its beginning"):
        ns.match(whole[1:], FULL)
    assert prompt.chunks == 4


def test_a_changed_layout_is_refused_where_it_is_registered(ns: kvd.Namespace) -> None:
    """Row A8. Fails if a registration does not compare layouts, or a tensor is not compared with its layout."""
    engine = Engine(Prompt(FULL, 2))
    cache = ns.register(engine.layout, engine.memory(), geom=FULL)
    ns.register(engine.layout, engine.memory(), geom=FULL)
    other = Engine(Prompt(FULL, 2), order="vllm-nhd")
    with pytest.raises(CompatibilityError, match="axes: 'LBHNPD' registered, 'LBNHPD' now") as caught:
        ns.register(other.layout, other.memory(), geom=FULL)
    assert caught.value.fields["registered"] == cache.fingerprint
    again = ns.register(other.layout, other.memory(), geom=FULL, name="another engine")
    assert again.fingerprint != cache.fingerprint
    with pytest.raises(CompatibilityError, match="shape"):
        ns.register(engine.layout, other.memory(), geom=FULL)
    with pytest.raises(CompatibilityError, match="2 tensors for a layout of 3"):
        ns.register(engine.layout, engine.memory()[:2], geom=FULL)
    transposed = [t.transpose(0, 2, 1, 3) for t in other.memory()]
    with pytest.raises(CompatibilityError, match="stride"):
        ns.register(engine.layout, transposed, geom=FULL)
    again.close()
    with (
        pytest.raises(LifecycleError, match="closed"),
        ns.acquire(ns.chain(tokens(9), CHUNK), FULL) as leases,
    ):
        leases.scatter(again, [])


def test_a_state_tensor_with_gaps_is_refused_where_it_is_registered(ns: kvd.Namespace) -> None:
    """Fails if tensors of states are not compared with their layout: the bytes between slots would be stored."""
    wide = np.zeros((4, 2 * STATE_PLANES[0].size_bytes // 4), np.float32)
    layout = kvd.StateLayout((("ssm",),), STATE_PLANES, 1, 4)
    with pytest.raises(CompatibilityError, match="stride of axis 0"):
        ns.register(layout, [wide[:, : wide.shape[1] // 2]], geom=HYBRID, group="state")
    with pytest.raises(CompatibilityError, match="stride of axis 1"):
        ns.register(layout, [wide[:, ::2]], geom=HYBRID, group="state")
    with pytest.raises(UsageError, match="tensor 0 is a NoneType"):
        ns.register(layout, [None], geom=HYBRID, group="state")
    ns.register(layout, [np.ascontiguousarray(wide[:, ::2])], geom=HYBRID, group="state")


@pytest.mark.parametrize(
    ("geom", "said"),
    [
        (kvd.Geometry.attention(layers=3, kv_heads=8, head_dim=DIM, dtype="float16"), "bfloat16"),
        (kvd.Geometry.attention(layers=3, kv_heads=8, head_dim=4, dtype="bfloat16"), "planes"),
        (kvd.Geometry.attention(layers=2, kv_heads=8, head_dim=DIM, dtype="bfloat16"), "layers 0 … 2"),
        (kvd.Geometry.attention(layers=3, kv_heads=4, head_dim=DIM, dtype="bfloat16"), "heads 0 … 7"),
        (HYBRID, "group None"),
    ],
)
def test_a_layout_of_another_geometry_is_refused(ns: kvd.Namespace, geom: kvd.Geometry, said: str) -> None:
    engine = Engine(Prompt(FULL, 2))
    with pytest.raises((CompatibilityError, UsageError), match=said):
        ns.register(engine.layout, engine.memory(), geom=geom)


def test_another_revision_salt_or_tenant_finds_nothing(store: kvd.Store, ns: kvd.Namespace) -> None:
    """Rows A9, E2."""
    chain = ns.chain(tokens(2 * CHUNK + 1), CHUNK)
    write(ns, chain, Engine(Prompt(FULL, 2)), kvd.Split(), None)
    assert ns.match(chain, FULL) == 2
    for change in ({"revision": "r2"}, {"salt": "s"}, {"tenant": "t"}, {"dtype": "float16"}):
        other = store.namespace(manifest(**change))
        assert other.match(other.chain(tokens(2 * CHUNK + 1), CHUNK), FULL) == 0
    with pytest.raises(UsageError, match="salt"):
        kvd.Manifest(model="m", revision="r1", dtype="bfloat16", tenant="", fixed="*")


def test_a_manifest_that_names_its_geometry_takes_no_other(store: kvd.Store) -> None:
    ns = store.namespace(manifest(extra={"geometry": FULL.fingerprint}))
    chain = ns.chain(tokens(2 * CHUNK), CHUNK)
    assert ns.match(chain, FULL) == 0
    for action in (
        lambda: ns.match(chain, LATENT),
        lambda: ns.reserve(chain, geom=LATENT),
        lambda: ns.acquire(chain, LATENT),
    ):
        with pytest.raises(CompatibilityError, match=LATENT.fingerprint):
            action()


def test_objects_of_another_geometry_are_not_scattered(ns: kvd.Namespace) -> None:
    chain = ns.chain(tokens(2 * CHUNK + 1), CHUNK)
    with ns.reserve(chain, nbytes=64) as writes:
        writes.fill([bytes(64)] * 2)
        writes.publish()
    engine = Engine(Prompt(FULL, 2))
    cache = ns.register(engine.layout, engine.memory(), geom=FULL)
    with (
        ns.acquire(chain, FULL) as leases,
        pytest.raises(CompatibilityError, match="64 B, the geometry says"),
    ):
        leases.scatter(cache, engine.ids)


def test_what_a_rank_did_not_fill_is_not_published(store: kvd.Store, ns: kvd.Namespace) -> None:
    """Fails if every granted slot of a geometry is published: its bytes would be whatever lay there before."""
    prompt = Prompt(FULL, 2)
    chain = ns.chain(tokens(2 * CHUNK + 1), CHUNK)
    engine = Engine(prompt, tp=2, rank=0)
    results = write(ns, chain, engine, kvd.Split(tp=2), None)  # reserved for both ranks, filled by one
    assert results == [kvd.Published.PUBLISHED, kvd.Published.SKIPPED] * 2
    assert ns.match(chain, FULL) == 0
    failed = ns.register(engine.layout, engine.memory(), geom=FULL, name="failing")
    other = ns.chain(tokens(2 * CHUNK + 1, 2), CHUNK)
    with ns.reserve(other, geom=FULL, split=kvd.Split(tp=2), rank=0) as writes:
        with pytest.raises(UsageError, match="block_ids"):
            writes.gather(failed, [0, 1, 2, 10_000])
        assert writes.publish() == [kvd.Published.SKIPPED] * 2
    assert store.status()["core"]["reservations"] == 0


COUNTS = [1, 2, 63, 114, 127, 128, 129, 512, 1024]


@pytest.mark.slow
@pytest.mark.parametrize("chunks", COUNTS)
def test_long_prefixes_come_back_byte_for_byte(ns: kvd.Namespace, chunks: int) -> None:
    """Row A11, with chunked prefill: the prompt is stored in stretches of uneven length, each as it was computed."""
    geom = kvd.Geometry.attention(layers=2, kv_heads=2, head_dim=4, dtype="bfloat16")
    prompt, ids = Prompt(geom, chunks), tokens(chunks * CHUNK + 1)
    rng = np.random.default_rng(chunks)
    chain = ns.chain(ids[:0], CHUNK)
    done = 0
    while chain.tokens_count < len(ids):
        chain.extend(ids[chain.tokens_count : chain.tokens_count + int(rng.integers(1, 90 * CHUNK))])
        if len(chain) > done:
            for rank in range(2):
                part = chain[done:]
                published = write(ns, part, Engine(prompt, tp=2, rank=rank), kvd.Split(tp=2), rank)
                assert published == [kvd.Published.PUBLISHED] * len(part)
            done = len(chain)
    assert ns.match(chain, geom) == chunks
    assert read(ns, chain, Engine(prompt, order="vllm-nhd", seed=8)) == chunks
    assert read(ns, chain, Engine(prompt, tp=2, rank=1, order="transformers")) == chunks


def test_some_chunks_can_be_left_out_of_a_read(ns: kvd.Namespace) -> None:
    prompt = Prompt(FULL, 5)
    chain = ns.chain(tokens(5 * CHUNK + 1), CHUNK)
    engine = Engine(prompt)
    write(ns, chain, engine, kvd.Split(tp=2), None)
    tensors = engine.memory()
    cache = ns.register(engine.layout, tensors, geom=FULL)
    with ns.acquire(chain, FULL) as leases:
        leases.scatter(cache, list(map(int, engine.ids[4:8])), chunks=range(2, 4))
        with pytest.raises(UsageError, match="not within"):
            leases.scatter(cache, [], chunks=range(4, 6))
    expected = engine.memory(chunks=range(2, 4))
    assert all(np.array_equal(a, b) for a, b in zip(tensors, expected, strict=True))


@pytest.mark.slow
def test_torch_tensors_in_bfloat16_with_strides(ns: kvd.Namespace) -> None:
    torch = pytest.importorskip("torch")
    planes = FULL.groups[0].planes
    storage = torch.zeros(LAYERS, 6, 2, HEADS, BLOCK, 2 * DIM, dtype=torch.bfloat16)
    tensors = [storage[layer, :, 1] for layer in range(LAYERS)]  # every second: not contiguous
    stride = tensors[0].stride(0) * 2
    layout = kvd.PagedLayout("vllm-hnd", planes, LAYERS, 6, BLOCK, strides={"B": stride})
    for tensor in tensors:
        tensor.copy_(torch.randn(tensor.shape))
    cache = ns.register(layout, tensors, geom=FULL)
    chain = ns.chain(tokens(2 * CHUNK + 1), CHUNK)
    with ns.reserve(chain, geom=FULL) as writes:
        writes.gather(cache, torch.tensor([[0, 1], [2, 3]]))
        writes.publish()
    kept = [tensor.clone() for tensor in tensors]
    for tensor in tensors:
        tensor.zero_()
    with ns.acquire(chain, FULL) as leases:
        leases.scatter(cache, torch.tensor([3, 2, 1, 0], dtype=torch.int32))
    for tensor, before in zip(tensors, kept, strict=True):
        assert torch.equal(tensor[:4].flip(0), before[:4])
        assert not tensor[4:].any()
    assert not storage[:, :, 0].any()


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda ns, e, c: ns.reserve(c, geom=FULL, split=kvd.Split(tp=3)), "8 heads of group full"),
        (lambda ns, e, c: ns.reserve(c, geom=FULL, nbytes=64), "what the members are"),
        (lambda ns, e, c: ns.reserve(c, nbytes=64, rank=1), "only with geom="),
        (lambda ns, e, c: ns.reserve(c, geom=FULL, groups=["state"]), "0: 'full'"),
        (lambda ns, e, c: ns.reserve(c, geom=FULL, split=kvd.Split(tp=2), rank=2), "tp_rank is 2"),
        (lambda ns, e, c: ns.reserve(c, members=[kvd.Member(1, 64)]), "family_members="),
        (lambda ns, e, c: ns.reserve(c, nbytes=64).gather(e, []), "geom="),
        (lambda ns, e, c: ns.reserve(c, geom=FULL).gather(e, [1, 2, 3]), "3 block ids for 2 chunks of 2"),
        (lambda ns, e, c: ns.reserve(c, geom=FULL).gather(e, [1, 2, 3, 99]), "99"),
        (lambda ns, e, c: ns.reserve(c, geom=FULL).gather(e, [1, 2, 3, -1]), "-1"),
        (lambda ns, e, c: ns.reserve(c, geom=FULL).gather(e, [0.5] * 4), "integers"),
        (lambda ns, e, c: ns.reserve(ns.chain(tokens(12), 6), geom=FULL).gather(e, [1] * 4), "not a multiple"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_name(ns: kvd.Namespace, act: Any, said: str) -> None:
    engine = Engine(Prompt(FULL, 2))
    cache = ns.register(engine.layout, engine.memory(), geom=FULL)
    with pytest.raises(UsageError, match=said):
        act(ns, cache, ns.chain(tokens(2 * CHUNK), CHUNK))


def test_a_piece_of_an_object_is_not_gathered(ns: kvd.Namespace) -> None:
    engine = Engine(Prompt(FULL, 2), tp=4, rank=1)
    cache = ns.register(engine.layout, engine.memory(), geom=FULL)
    chain = ns.chain(tokens(2 * CHUNK), CHUNK)
    writes = ns.reserve(chain, geom=FULL, split=kvd.Split(tp=2))
    with writes, pytest.raises(CompatibilityError, match="of member 0"):
        writes.gather(cache, engine.ids)
    with pytest.raises(CompatibilityError, match="Rank"):
        ns.register(engine.layout, engine.memory(), geom=FULL, split=kvd.Split(tp=2), rank=0)


@pytest.mark.slow
def test_break_even_measures_the_daemon_and_leaves_nothing_behind(daemon: Any) -> None:
    import json

    from typer.testing import CliRunner

    from kvd.kvctl.plan import app

    running = daemon()
    line = ["breakeven", "--bytes", "1GiB", "--prefill-saved", "7s", "--measure", "--socket", running.socket]
    result = CliRunner().invoke(app, [*line, "--json"])
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    measured = answer["measured"]
    assert measured["chunks"] == 4  # a sixteenth of the pool
    assert 0 < measured["lookup_ns"] < 1_000_000_000
    assert min(measured["load_bytes_per_s"], measured["copy_bytes_per_s"]) > 10_000_000
    assert "Break-even" in answer["ledgers"]
    with kvd.connect(running.socket) as store:
        assert store.status()["core"]["families"] == 0
    shown = CliRunner().invoke(app, line)
    assert "Measured now" in shown.stdout
