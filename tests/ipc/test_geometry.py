"""Geometry against a real daemon: engines of other splits and layouts share objects, and only what is usable is found.

Rows A8, A9, A10, A11, E2, E4 of the field's list. An engine is played by numpy: `Prompt` holds the true KV of every
group, `memory` lays it out as an engine's tensors with noise around it, and every comparison is byte for byte.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from geometry_world import (
    BLOCK,
    CHUNK,
    DIM,
    FULL,
    HEADS,
    HYBRID,
    LATENT,
    LAYERS,
    STATE_PLANES,
    Engine,
    Prompt,
    manifest,
    read,
    state_cache,
    tokens,
    write,
)

import kvd
from kvd.errors import LifecycleError, UsageError


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


def fill(ns: kvd.Namespace, chain: kvd.Chain, geom: kvd.Geometry, split: kvd.Split, rank: Any) -> list[Any]:
    """What publish says of each item of a rank; what is not granted is not filled."""
    with ns.reserve(chain, geom=geom, split=split, rank=rank) as writes:
        for one in writes:
            if one.status is kvd.Granted.GRANTED:
                one.view[:] = b"\1" * len(one.view)
        return list(writes.publish())


def test_a_family_is_never_put_together_from_two_splits(ns: kvd.Namespace) -> None:
    """Half a family of TP 2 and the other half's number from PP 2, of the same size: other bytes under one name.

    Fails if a member is taken by its number alone.
    """
    geom = kvd.Geometry.attention(layers=2, kv_heads=2, head_dim=8, dtype="bfloat16")
    chain = ns.chain(tokens(2 * CHUNK + 1), CHUNK)
    stages, ranks = kvd.Split(pp=2), kvd.Split(tp=2)
    halves = [geom.objects(chunk_tokens=CHUNK, split=split)[1].size_bytes for split in (stages, ranks)]
    assert halves[0] == halves[1]
    assert fill(ns, chain, geom, ranks, kvd.Rank(tp=0)) == [kvd.Published.PUBLISHED] * 2
    assert fill(ns, chain, geom, stages, kvd.Rank(pp=1)) == [kvd.Published.SKIPPED] * 2
    assert ns.match(chain, geom) == ns.match(chain) == 0
    assert fill(ns, chain, geom, ranks, kvd.Rank(tp=1)) == [kvd.Published.PUBLISHED] * 2
    assert ns.match(chain, geom) == 2


def test_a_second_writer_of_another_split_is_told_present_before_it_copies(ns: kvd.Namespace) -> None:
    """Spec 2.3, with groups whose members have other numbers in the other split. Fails if `present` is looked up by
    number alone: then slots are granted, filled and thrown away.
    """
    geom = kvd.Geometry.attention(
        layers=2, kv_heads=4, head_dim=8, dtype="bfloat16", window=32, window_layers=[1]
    )
    chain = ns.chain(tokens(2 * CHUNK + 1), CHUNK)
    for rank in range(2):
        assert fill(ns, chain, geom, kvd.Split(tp=2), rank) == [kvd.Published.PUBLISHED] * 4
    for tp in (4, 1):
        for rank in range(tp):
            assert set(fill(ns, chain, geom, kvd.Split(tp=tp), rank)) == {kvd.Published.SKIPPED}
    assert ns.match(chain, geom) == 2


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
        other = ns.chain(tokens(6 * CHUNK + 1, seed=2), CHUNK)
        with pytest.raises(LifecycleError, match="not of this chain"):
            ns.adopt(exported, other[:6], geom)
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


def test_a_context_rank_may_have_any_block(ns: kvd.Namespace) -> None:
    """Runs of 16 tokens dealt out to two ranks, blocks of 24: chunks are multiples of 96 tokens."""
    geom = kvd.Geometry.attention(layers=1, kv_heads=2, head_dim=4, dtype="bfloat16")
    layout = kvd.PagedLayout("vllm-hnd", geom.groups[0].planes, 1, 8, 24)
    split = kvd.Split(cp=2, cp_interleave_tokens=16)
    ns.register(
        layout, [bytearray(layout.tensor_bytes())], geom=geom, split=split, rank=kvd.Rank(cp=1)
    ).close()


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
