"""Geometry against a real daemon: what does not go together is refused by name, before a byte moves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from geometry_world import (
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
    state_cache,
    tokens,
    write,
)

import kvd
from kvd.errors import CompatibilityError, LifecycleError, UsageError
from kvd.layout.geometry import kv_planes


@pytest.fixture
def store(daemon: Any) -> Any:
    with kvd.connect(daemon().socket, client="test") as opened:
        yield opened


@pytest.fixture
def ns(store: kvd.Store) -> kvd.Namespace:
    return store.namespace(manifest())


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


def test_a_namespace_that_names_no_geometry_keeps_to_the_first(ns: kvd.Namespace) -> None:
    """Fails if each call is believed: objects of one size and another meaning would be scattered."""
    same_size = kvd.Geometry.attention(layers=LAYERS, kv_heads=HEADS // 2, head_dim=2 * DIM, dtype="bfloat16")
    chain = ns.chain(tokens(2 * CHUNK + 1), CHUNK)
    write(ns, chain, Engine(Prompt(FULL, 2)), kvd.Split(), None)
    with pytest.raises(CompatibilityError, match=r'extra=\{"geometry"') as error:
        ns.acquire(chain, same_size)
    assert error.value.code == "KVD-COMPAT-GEOMETRY"
    assert ns.match(chain, FULL) == 2


def test_a_registration_that_is_refused_does_not_choose_the_geometry(ns: kvd.Namespace) -> None:
    """Fails if the geometry is taken before the tensors were looked at: the right one would be refused then."""
    engine = Engine(Prompt(FULL, 2))
    wider = kvd.Geometry.attention(layers=LAYERS, kv_heads=HEADS, head_dim=2 * DIM, dtype="bfloat16")
    with pytest.raises(CompatibilityError, match="planes"):
        ns.register(engine.layout, engine.memory(), geom=wider)
    ns.register(engine.layout, engine.memory(), geom=FULL)


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


def test_a_cache_takes_part_in_its_own_geometry_only(daemon: Any) -> None:
    """Group 0 has the same planes in both, and other layers: their bytes would be published under the wrong name."""
    running = daemon()
    with kvd.connect(running.socket) as one, kvd.connect(running.socket) as two:
        ns, theirs = one.namespace(manifest()), two.namespace(manifest())
        planes, window = kv_planes(HEADS, DIM, DIM, "bfloat16"), (kvd.Rule.WINDOW, 10)
        low, high = (0, 1, 2), (3, 4, 5)
        mine, other = (
            kvd.Geometry(
                [kvd.Group(kvd.Rule.FULL, full, planes), kvd.Group(window[0], slides, planes, window[1])]
            )
            for full, slides in ((low, high), (high, low))
        )
        chain, engine = ns.chain(tokens(2 * CHUNK + 1), CHUNK), Engine(Prompt(mine, 2))
        cache = ns.register(engine.layout, engine.memory(chunks=2), geom=mine, group=0)
        with (
            pytest.raises(CompatibilityError, match=f"registered with geometry {mine.fingerprint}"),
            theirs.reserve(chain, geom=other, groups=[0]) as writes,
        ):
            writes.gather(cache, engine.ids)
        for group in (0, 1):
            write(theirs, chain, Engine(Prompt(other, 2), group=group), kvd.Split(), None, groups=[group])
        with (
            theirs.acquire(chain, other) as leases,
            pytest.raises(CompatibilityError, match=f"these objects are of {other.fingerprint}"),
        ):
            leases.scatter(cache, engine.ids)
        named = kvd.Geometry(mine.groups, mine.layers_count, "llama")
        assert ns.reserve(chain, geom=named, groups=[0]).gather(cache, engine.ids) == 0, (
            "the same, by another name"
        )


def test_nothing_is_scattered_where_one_member_does_not_fit(ns: kvd.Namespace) -> None:
    """Fails if the first member is copied before the size of the second is looked at."""
    chain, tp = ns.chain(tokens(2 * CHUNK + 1), CHUNK), kvd.Split(tp=2)
    good = FULL.objects(chunk_tokens=CHUNK, split=tp)[0].size_bytes
    with ns.reserve(chain, members=[kvd.Member(0, good), kvd.Member(1, 64)], split=tp.code) as writes:
        writes.fill([bytes(good), bytes(64)] * 2)
        writes.publish()
    engine = Engine(Prompt(FULL, 2))
    tensors = engine.memory()
    cache = ns.register(engine.layout, tensors, geom=FULL)
    with (
        ns.acquire(chain, FULL) as leases,
        pytest.raises(CompatibilityError, match="member 1 has 64 B, the geometry says"),
    ):
        leases.scatter(cache, engine.ids)
    assert all(np.array_equal(a, b) for a, b in zip(tensors, engine.memory(), strict=True))


def test_state_tensors_are_compared_with_their_layout(ns: kvd.Namespace) -> None:
    """Row A8. A state of another type, or with others between its slots, would be read and written past its bytes."""
    layout = kvd.StateLayout((("ssm",),), STATE_PLANES, 1, 2)
    for tensor, said in (
        (np.zeros((2, 4, 6), np.float64), "element type is float64"),
        (np.zeros((4, 4, 6), np.float32)[::2], "stride of axis 0"),
        (np.zeros((2, 6, 4), np.float32).transpose(0, 2, 1), "stride of axis 2"),
        (np.zeros((3, 4, 6), np.float32), "shape"),
    ):
        with pytest.raises(CompatibilityError, match=said):
            ns.register(layout, [tensor], geom=HYBRID, group="state")
    with pytest.raises(UsageError, match=r"tensors\[0\] = 'abc'"):
        ns.register(layout, ["abc"], geom=HYBRID, group="state")
    ns.register(layout, [np.zeros((2, 4, 6), np.float32)], geom=HYBRID, group="state").close()


class _Elsewhere:
    """Block ids as torch keeps them on a device."""

    def data_ptr(self) -> int:
        return 0

    def numpy(self) -> None:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")


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
        (lambda ns, e, c: ns.reserve(c, geom=FULL).gather(e, _Elsewhere()), "Tensor.cpu"),
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


def test_no_block_is_written_twice_by_one_scatter(ns: kvd.Namespace) -> None:
    """Fails without the check of distinct ids: the block would hold the later object under both names."""
    prompt = Prompt(FULL, 2)
    engine = Engine(prompt)
    chain = ns.chain(tokens(2 * CHUNK + 1), CHUNK)
    write(ns, chain, engine, kvd.Split(), None)
    memory = engine.memory(chunks=0)
    before = [one.copy() for one in memory]
    cache = ns.register(engine.layout, memory, geom=FULL, name="twice")
    with (
        pytest.raises(UsageError, match=r"block_ids\[3\] = 2: stands at .*\[1\]") as e,
        ns.acquire(chain, FULL) as leases,
    ):
        leases.scatter(cache, [0, 2, 1, 2])
    assert e.value.code == "KVD-USAGE-BLOCK-IDS"
    assert all((now == then).all() for now, then in zip(memory, before, strict=True))


def test_no_block_is_written_twice_where_chunks_are_of_two_splits(ns: kvd.Namespace) -> None:
    """Fails if ids are compared within each split only: each split's chunks are a native call of their own."""
    prompt = Prompt(FULL, 2)
    chain = ns.chain(tokens(2 * CHUNK + 1), CHUNK)
    write(ns, chain[:1], Engine(Prompt(FULL, 1)), kvd.Split(), None)
    for rank in range(2):
        write(ns, chain, Engine(prompt, tp=2, rank=rank), kvd.Split(tp=2), rank)
    engine = Engine(prompt)
    memory = engine.memory(chunks=0)
    before = [one.copy() for one in memory]
    cache = ns.register(engine.layout, memory, geom=FULL, name="twice")
    with ns.acquire(chain, FULL) as leases:
        assert leases.usable_chunks == 2
        for ids, said in (([0, 2, 1, 2], r"block_ids\[3\] = 2: stands at .*\[1\]"), ([0, 1, 2, 999], "999")):
            with pytest.raises(UsageError, match=said) as e:
                leases.scatter(cache, ids)
            assert e.value.code == "KVD-USAGE-BLOCK-IDS"
            assert all((now == then).all() for now, then in zip(memory, before, strict=True))


def test_a_cache_of_what_is_not_reserved_is_refused(store: kvd.Store, ns: kvd.Namespace) -> None:
    """Fails without `EngineCache.stores`: 0 bytes came back and nothing was published, without a word."""
    chain = ns.chain(tokens(2 * CHUNK + 1), CHUNK)
    state, _ = state_cache(ns, 3, bytes(3 * HYBRID.state_bytes), "states")
    with (
        ns.reserve(chain, geom=HYBRID, groups=["full"]) as writes,
        pytest.raises(UsageError, match="'state'") as error,
    ):
        writes.gather(state, [0, 1])
    assert error.value.code == "KVD-USAGE-GROUP"
    ns = store.namespace(manifest(revision="r2"))
    engine = Engine(Prompt(FULL, 2), tp=2, rank=1)
    other = ns.register(
        engine.layout, engine.memory(chunks=2), geom=FULL, split=kvd.Split(tp=2), rank=1, name="rank1"
    )
    chain = ns.chain(tokens(2 * CHUNK + 1, 5), CHUNK)
    with (
        ns.reserve(chain, geom=FULL, split=kvd.Split(tp=2), rank=0) as writes,
        pytest.raises(UsageError, match="rank"),
    ):
        writes.gather(other, engine.ids)


def test_a_replica_gathers_nothing_beside_what_it_stores(ns: kvd.Namespace) -> None:
    """A rank whose full group is stored by another, but not its states, runs the same code as all."""
    geom = kvd.Geometry([
        kvd.Group(kvd.Rule.FULL, (0,), (kvd.Plane("latent", 1, 8, "bfloat16"),)),
        kvd.Group(kvd.Rule.STATE, (1,), STATE_PLANES),
    ])  # fmt: skip
    prompt = Prompt(geom, 1)
    engine = Engine(prompt)
    cache = ns.register(
        engine.layout, engine.memory(chunks=1), geom=geom, group="full", split=kvd.Split(tp=2), rank=1
    )
    chain = ns.chain(tokens(CHUNK + 1), CHUNK)
    with ns.reserve(chain, geom=geom, split=kvd.Split(tp=2), rank=1) as writes:
        assert len(writes) == 1  # its half of the state
        assert writes.gather(cache, engine.ids) == 0


def test_memory_is_registered_once_and_a_rank_with_its_split(ns: kvd.Namespace) -> None:
    """Fails by scattering one layer over another, or by taking rank 1 for what the layout says."""
    engine = Engine(Prompt(FULL, 2))
    tensors = engine.memory()
    with pytest.raises(CompatibilityError, match="tensors 0 and 2 are the same memory"):
        ns.register(engine.layout, [tensors[0], tensors[1], tensors[0]], geom=FULL)
    with pytest.raises(UsageError, match=r"rank.*split="):
        ns.register(engine.layout, tensors, geom=FULL, rank=1)


def test_numpy_holds_bfloat16_as_what_has_its_width(ns: kvd.Namespace) -> None:
    engine = Engine(Prompt(FULL, 2))
    words = [np.zeros((*one.shape[:-1], one.shape[-1] // 2), np.uint16) for one in engine.memory()]
    ns.register(engine.layout, words, geom=FULL)
    with pytest.raises(CompatibilityError, match="element type of plane k is int16"):
        ns.register(engine.layout, [one.view(np.int16) for one in words], geom=FULL, name="signed")
