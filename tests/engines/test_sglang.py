"""SGLang on kvd without SGLang: the storage backend over host pools of all page layouts.

Rows A8, A9, B1, C2, E2, E4 of the field's list. SGLang's host pools are played by torch tensors laid out as SGLang lays
them out, and compared byte for byte. The real classes and the real engine are in test_sglang_engine.py.
"""

from __future__ import annotations

import json
import signal
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

LAYERS, HEADS, DIM, PAGE, PAGES = 3, 4, 8, 16, 12
LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")


@pytest.fixture(scope="module")
def backend() -> Any:
    """kvd.engines.sglang; where there is no SGLang, over the two names that it takes from it."""
    try:
        import sglang.srt.mem_cache.hicache_storage  # noqa: F401
    except ImportError:
        made = {}
        for name in ("sglang", "sglang.srt", "sglang.srt.mem_cache", "sglang.srt.mem_cache.hicache_storage"):
            made[name] = sys.modules.setdefault(name, types.ModuleType(name))

        class Base:
            def register_mem_pool_host(self, pool: Any) -> None:
                self.mem_pool_host = pool

            def register_mem_host_pool_v2(self, pool: Any, name: str) -> None:
                self.registered_pools = {name: pool}

        class Result(SimpleNamespace):
            def __init__(self, kv: int, extra: dict[str, int], restorable: list[int] | None = None) -> None:
                super().__init__(
                    kv_hit_pages=kv, extra_pool_hit_pages=extra, restorable_prefix_pages=restorable
                )

            @classmethod
            def empty(cls) -> Any:
                return cls(0, {})

        last = made["sglang.srt.mem_cache.hicache_storage"]
        last.HiCacheStorage, last.PoolTransferResult = Base, Result  # type: ignore[attr-defined]
        from kvd.engines import sglang as module

        yield module
        for name in (*made, "kvd.engines.sglang"):
            sys.modules.pop(name, None)
        return
    from kvd.engines import sglang as module

    yield module


class HostPool:
    """A host pool as SGLang makes them: `kv_buffer` and the addresses of pages."""

    def __init__(self, layout: str, heads: int = HEADS, dtype: Any = torch.bfloat16, seed: int = 1) -> None:
        self.layout, self.page_size, self.dtype = layout, PAGE, dtype
        self.layer_num, self.head_num, self.head_dim, self.size = LAYERS, heads, DIM, PAGE * PAGES
        dims = {
            "layer_first": (2, LAYERS, self.size, heads, DIM),
            "page_first": (2, self.size, LAYERS, heads, DIM),
            "page_first_direct": (2, PAGES, LAYERS, PAGE, heads, DIM),
            "page_head": (2, PAGES, heads, PAGE, LAYERS, DIM),
        }[layout]
        generator = torch.Generator().manual_seed(seed)
        self.kv_buffer = torch.randint(-9, 9, dims, generator=generator).to(dtype)

    def view(self) -> Any:
        """The same memory as [2, layers, pages, tokens, heads, dim]."""
        buffer = self.kv_buffer
        if self.layout == "layer_first":
            return buffer.view(2, LAYERS, PAGES, PAGE, self.head_num, DIM)
        if self.layout == "page_first":
            return buffer.view(2, PAGES, PAGE, LAYERS, self.head_num, DIM).permute(0, 3, 1, 2, 4, 5)
        if self.layout == "page_first_direct":
            return buffer.permute(0, 2, 1, 3, 4, 5)
        return buffer.permute(0, 4, 1, 3, 2, 5)

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        view, pointers = self.view(), []
        size = PAGE * self.head_num * DIM * self.dtype.itemsize
        layers = range(LAYERS) if self.layout == "layer_first" else [0]
        for page in (indices[::PAGE] // PAGE).tolist():
            pointers += [view[side, layer, page].data_ptr() for layer in layers for side in (0, 1)]
        return pointers, [size * LAYERS // len(layers)] * len(pointers)


def slots(pages: list[int]) -> Any:
    return torch.cat([torch.arange(PAGE) + page * PAGE for page in pages])


def keys(count: int, seed: int = 0) -> list[str]:
    import hashlib

    return [hashlib.sha256(f"{seed}-{n}".encode()).hexdigest() for n in range(count)]


class StatePool:
    """A pool of states as SGLang's Mamba pool: a slot a snapshot, a buffer each for temporal and convolution states."""

    def __init__(self, seed: int = 1) -> None:
        self.layout, self.page_size, self.num_mamba_layers = "page_first", 1, 2
        generator = torch.Generator().manual_seed(seed)
        self.temporal_buffer = torch.randn((PAGES, 2, 1, 3, 5), generator=generator)
        self.conv_buffer = [torch.randn((PAGES, 2, 1, 7), generator=generator).to(torch.bfloat16)]

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        buffers = [self.temporal_buffer, *self.conv_buffer]
        pieces = [buffer[slot] for slot in indices.tolist() for buffer in buffers]
        return [piece.data_ptr() for piece in pieces], [piece.nbytes for piece in pieces]


def transfer(
    name: str, keys: list[str], indices: Any = None, policy: str = "trailing_pages"
) -> SimpleNamespace:
    return SimpleNamespace(name=name, keys=keys, host_indices=indices, hit_policy=policy)


@pytest.fixture
def make(backend: Any, daemon: Any, tmp_path: Path) -> Any:
    """make(pool, socket=..., tp=(rank, size), **extra config) -> an attached backend."""
    model = tmp_path / "model"
    model.mkdir()
    described = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": LAYERS}
    (model / "config.json").write_text(json.dumps(described))
    (model / "model.safetensors").write_bytes(b"weights")
    made: list[Any] = []

    def build(pool: HostPool, socket: str, tp: tuple[int, int] = (0, 1), **extra: Any) -> Any:
        config = SimpleNamespace(
            tp_rank=tp[0], tp_size=tp[1], pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, dcp_rank=0, dcp_size=1,
            is_mla_model=False, model_name=str(model), extra_config={"socket": socket, "backend_name": "kvd", **extra},
        )  # fmt: skip
        one = backend.KvdHiCache(config, {})
        one.register_mem_pool_host(pool)
        made.append(one)
        return one

    build.model = model  # type: ignore[attr-defined]
    yield build
    for one in made:
        one.close()


@pytest.mark.slow
def test_pages_come_back_in_pools_of_every_layout(make: Any, daemon: Any) -> None:
    """Fails if a layout is described wrongly, pages are mixed up, or anything but the pages asked for is written."""
    running = daemon()
    chain, source = keys(5), [7, 2, 9, 0, 4]
    written = HostPool("layer_first", seed=3)
    writer = make(written, running.socket)
    assert writer.batch_exists(chain) == 0
    assert writer.batch_set_v1(chain[:2], slots(source[:2])) == [True] * 2
    info = SimpleNamespace(prefix_keys=chain[:2])
    assert writer.batch_set_v1(chain[2:], slots(source[2:]), info) == [True] * 3
    for layout in LAYOUTS:
        pool = HostPool(layout, seed=9)
        before = pool.view().clone()
        reader = make(pool, running.socket)
        assert reader.batch_exists([*chain, *keys(1, seed=5)]) == 5
        target = [1, 3, 5, 8, 11]
        assert reader.batch_get_v1([*chain, keys(1, seed=5)[0]], slots([*target, 10])) == [True] * 5 + [False]
        after = pool.view()
        assert torch.equal(after[:, :, target], written.view()[:, :, source])
        others = [page for page in range(PAGES) if page not in target]
        assert torch.equal(after[:, :, others], before[:, :, others])
        page_bytes = 2 * LAYERS * HEADS * DIM * PAGE * 2
        assert reader.counters.totals()["loaded_bytes"] == 5 * page_bytes
        assert reader.batch_set_v1(chain, slots(target)) == [True] * 5, "there already"
        assert reader.counters.totals()["saved_pages"] == 0
        assert reader.counters.totals()["failures"] == 0


@pytest.mark.slow
def test_ranks_store_their_heads_and_engines_of_another_split_read_them(make: Any, daemon: Any) -> None:
    """Row E4. Fails if a page counts as stored before all ranks have stored theirs."""
    running, chain = daemon(), keys(3)
    halves = [HostPool("page_first", heads=HEADS // 2, seed=rank) for rank in (0, 1)]
    ranks = [make(pool, running.socket, tp=(rank, 2)) for rank, pool in enumerate(halves)]
    assert ranks[0].batch_set_v1(chain, slots([0, 1, 2])) == [True] * 3
    assert ranks[1].batch_exists(chain) == 0
    assert ranks[1].batch_set_v1(chain, slots([4, 5, 6])) == [True] * 3
    assert ranks[0].batch_exists(chain) == 3
    whole = HostPool("page_head", seed=7)
    one = make(whole, running.socket)
    assert one.batch_get_v1(chain, slots([2, 3, 4])) == [True] * 3
    expected = torch.cat([halves[0].view()[:, :, 0:3], halves[1].view()[:, :, 4:7]], dim=4)
    assert torch.equal(whole.view()[:, :, 2:5], expected)


@pytest.mark.slow
def test_a_prefix_of_a_hybrid_model_ends_where_every_pool_has_what_it_needs(make: Any, daemon: Any) -> None:
    """Fails if a state is looked for anywhere but at the prefix's end, a window one page short is taken, or pools of
    one form take each other's pages: they have the same keys.
    """
    running, chain = daemon(), keys(6)
    kv, window, state = HostPool("page_first"), HostPool("layer_first", seed=4), StatePool()
    writer = make(kv, running.socket)
    writer.register_mem_host_pool_v2(kv, "kv")
    writer.register_mem_host_pool_v2(window, "swa")
    writer.register_mem_host_pool_v2(state, "mamba")
    assert writer.batch_set_v1(chain, slots(list(range(6)))) == [True] * 6
    wanted = [transfer("swa", ["-"] * 2), transfer("mamba", ["-"])]
    assert writer.batch_exists_v2(chain, wanted).kv_hit_pages == 0, "only the first pool has anything yet"
    stored = writer.batch_set_v2([
        transfer("swa", chain[1:5], slots([3, 0, 1, 2])),
        transfer("mamba", [chain[1]], torch.tensor([5])),
        transfer("mamba-2", [chain[3]], torch.tensor([6])),
    ])  # fmt: skip
    assert stored == {"swa": [True] * 4, "mamba": [True], "mamba-2": [False]}
    assert writer.batch_set_v2([transfer("mamba", [chain[3]], torch.tensor([6]))]) == {"mamba": [True]}
    found = writer.batch_exists_v2(chain, wanted)
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (4, [4]), (
        "at page 2 the window is one short"
    )
    assert found.extra_pool_hit_pages == {"kv": 6, "swa": 5, "mamba": 4}
    assert writer.batch_exists_v2(chain, wanted[1:]).restorable_prefix_pages == [2, 4]
    every = transfer("swa", ["-"], policy="all_pages")
    assert writer.batch_exists_v2(chain, [every]).kv_hit_pages == 0, "its first page is not there"
    expected = state.temporal_buffer[6].clone(), state.conv_buffer[0][6].clone()
    reader_state = StatePool(seed=8)
    reader = make(HostPool("page_head", seed=5), running.socket)
    reader.register_mem_host_pool_v2(reader_state, "mamba")
    assert reader.batch_get_v2([transfer("mamba", [chain[3]], torch.tensor([9]))]) == {"mamba": [True]}
    assert torch.equal(reader_state.temporal_buffer[9], expected[0])
    assert torch.equal(reader_state.conv_buffer[0][9], expected[1])
    assert reader.batch_exists_v2(chain, wanted).kv_hit_pages == 0, "it has no pool of windows"
    assert reader.counters.totals()["failures"] == writer.counters.totals()["failures"] == 0


@pytest.mark.slow
def test_more_than_a_client_may_write_at_once_is_stored_in_parts(
    make: Any, daemon: Any, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if SGLang's batch, whatever its size, is one reservation; order and results are those of the whole."""
    running, chain, pool = daemon(), keys(5), HostPool("page_first")
    one = make(pool, running.socket)
    reserved: list[int] = []
    page_bytes = 2 * LAYERS * HEADS * DIM * PAGE * 2
    monkeypatch.setattr(backend, "BATCH_BYTES", 2 * page_bytes + 1)
    assert one.batch_exists(chain) == 0
    namespace = one._doors["kv"].namespace
    reserve = namespace.reserve
    monkeypatch.setattr(
        namespace, "reserve", lambda part, **named: reserved.append(len(part)) or reserve(part, **named)
    )
    assert one.batch_set_v1(chain, slots([4, 3, 2, 1, 0])) == [True] * 5
    assert reserved == [2, 2, 1]
    reader = HostPool("layer_first", seed=6)
    assert make(reader, running.socket).batch_get_v1(chain, slots([0, 1, 2, 3, 4])) == [True] * 5
    assert torch.equal(reader.view()[:, :, :5], pool.view()[:, :, [4, 3, 2, 1, 0]])


@pytest.mark.slow
def test_what_may_not_meet_does_not_meet(make: Any, daemon: Any) -> None:
    """Rows A8, A9, E2. SGLang's keys name nothing of the model: fails if the namespace does not."""
    running, chain = daemon(), keys(2)
    assert make(HostPool("page_first"), running.socket).batch_set_v1(chain, slots([0, 1])) == [True] * 2
    assert make(HostPool("page_first"), running.socket).batch_exists(chain) == 2
    assert make(HostPool("page_first"), running.socket, salt="s").batch_exists(chain) == 0
    assert make(HostPool("page_first"), running.socket, tenant="t").batch_exists(chain) == 0
    assert make(HostPool("page_first", dtype=torch.float16), running.socket).batch_exists(chain) == 0
    (make.model / "model.safetensors").write_bytes(b"Weights")
    assert make(HostPool("page_first"), running.socket).batch_exists(chain) == 0


@pytest.mark.slow
def test_nothing_raises_whatever_is_wrong(make: Any, daemon: Any, backend: Any) -> None:
    """Rows B1, C2. Fails without the shield around each hook."""
    running, chain = daemon(), keys(2)
    one = make(HostPool("page_first"), running.socket, deadline_s=0.3)
    assert one.batch_set_v1(chain, slots([0, 1])) == [True] * 2
    assert one.batch_get_v1(chain, slots([0, 1])[:-1]) == [False] * 2
    assert one.batch_get_v1(["no hex"], slots([0])) == [False]
    assert one.batch_exists(["no hex"]) == 0
    assert one.batch_set_v1(chain, slots([0, 1]) + 1) == [False] * 2
    assert one.counters.totals()["failures"] == 4
    running.process.send_signal(signal.SIGSTOP)
    try:
        assert one.batch_exists(chain) == 2, "reading needs no daemon"
        assert one.batch_set_v1(keys(2, seed=3), slots([0, 1])) == [False] * 2
        assert one.batch_set_v1(keys(2, seed=4), slots([0, 1])) == [False] * 2
    finally:
        running.process.send_signal(signal.SIGCONT)
    assert one.counters.totals()["failures"] == 5, "the second was not even asked: the daemon rests"
    assert make(HostPool("page_first"), "/nowhere/kvd.sock").batch_exists(chain) == 0
    assert make(HostPool("page_first"), running.socket, unheard_of=1).batch_exists(chain) == 0
    shifted = HostPool("page_first")
    addresses, sizes = shifted.get_page_buffer_meta(slots([0, PAGES - 1]))
    for moved in (([address + 2 for address in addresses], sizes), (addresses, [s // 2 for s in sizes])):
        shifted.get_page_buffer_meta = lambda indices, moved=moved: moved  # type: ignore[method-assign,misc]
        assert make(shifted, running.socket).batch_set_v1(chain, slots([0, 1])) == [False] * 2
    assert one.batch_exists_v2(chain).kv_hit_pages == 2
    assert one.batch_exists_v2(chain, [transfer("swa", ["a"])]).kv_hit_pages == 0
    assert one.batch_set_v2([transfer("swa", ["a", "b"])]) == {"swa": [False, False]}
    assert one.batch_get_v2([transfer("kv", chain)]) == {"kv": [False, False]}
    assert (one.get("x"), one.set("x"), one.batch_get(["x"]), one.batch_set(["x"])) == (
        None,
        False,
        [None],
        False,
    )
