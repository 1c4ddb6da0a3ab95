"""SGLang's own host pool classes on kvd, in SGLang's environment: `sglang_real_pools.py SOCKET MODEL`.

Run by test_sglang.py as a program of its own. For every class and page layout pages are filled through the pool's own
tensors, stored from one pool, loaded into another pool of another layout, and compared through the classes' own
`get_data_page`. A failed comparison ends the program with an AssertionError; else it prints `RESULT {...}`.
"""

from __future__ import annotations

import hashlib
import json
import sys
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.mem_cache.device_pool_info import (
    KVBufferLayout,
    KVBuffers,
    MambaStateBufferInfo,
    MHABufferInfo,
    MLABufferInfo,
)
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer, count_pool_hits
from sglang.srt.mem_cache.pool_host import base
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import get_mha_host_pool_cls
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

from kvd.engines.sglang import KvdHiCache

PAGE, TOKENS, LAYERS, HEADS = 16, 128, 3, 4
SEED = 20_261_129
CPU = torch.device("cpu")


def pointers(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.uint64)


def common(layout: str) -> dict[str, Any]:
    return {
        "host_to_device_ratio": 1.0, "host_size": 0, "page_size": PAGE, "layout": layout, "pin_memory": False,
        "device_capacity_tokens": TOKENS, "start_layer": 0, "end_layer": LAYERS,
    }  # fmt: skip


def keys_and_values(
    layout: str, *, heads: int = HEADS, dim: int = 8, v_dim: int = 8, layers: int = LAYERS
) -> Any:
    """The pool that SGLang chooses for such keys and values."""
    k = [torch.zeros(TOKENS, heads, dim, dtype=torch.bfloat16) for _ in range(layers)]
    v = [torch.zeros(TOKENS, heads, v_dim, dtype=torch.bfloat16) for _ in range(layers)]
    buffers = KVBuffers(
        k=tuple(k), v=tuple(v), k_data_ptrs=pointers(k), v_data_ptrs=pointers(v), layout=KVBufferLayout.NHD
    )
    info = MHABufferInfo(
        buffers=buffers, page_size=PAGE, head_num=heads, head_dim=dim, v_head_dim=v_dim, dtype=torch.bfloat16,
        device=CPU,
    )  # fmt: skip
    pool = get_mha_host_pool_cls(info)(info, **common(layout))
    return scrambled(pool, list(pool.kv_buffer) if isinstance(pool.kv_buffer, tuple) else [pool.kv_buffer])


def latents(layout: str, *, latent: int = 32, rope: int = 8) -> Any:
    """MLA's host pool."""
    rows = [torch.zeros(TOKENS, 1, latent + rope, dtype=torch.bfloat16) for _ in range(LAYERS)]
    info = MLABufferInfo(
        buffers=tuple(rows), data_ptrs=pointers(rows), layer_indices=tuple(range(LAYERS)), device_layer_num=LAYERS,
        page_size=PAGE, kv_lora_rank=latent, qk_rope_head_dim=rope, kv_cache_dim=latent + rope, dtype=torch.bfloat16,
        device=CPU,
    )  # fmt: skip
    pool = MLATokenToKVPoolHost(info, **common(layout), target_layer_num=LAYERS)
    return scrambled(pool, [pool.kv_buffer])


def states(layout: str, *, side: bool = False) -> Any:
    """Mamba's host pool: states in float32, convolution inputs in bfloat16."""
    info = MambaStateBufferInfo(
        temporal=torch.zeros(2, 8, 4, 6, 5),
        conv=(torch.zeros(2, 8, 24, 3, dtype=torch.bfloat16), torch.zeros(2, 8, 7, 3, dtype=torch.bfloat16)),
        extra_checkpoint_buffers=(torch.zeros(8, 3),) if side else (),
    )
    pool = MambaPoolHost(info, 1.0, 0, device_capacity=8, pin_memory=False, layout=layout)
    return scrambled(pool, [pool.temporal_buffer, *pool.conv_buffer])


_generator = torch.Generator().manual_seed(SEED)


def scrambled(pool: Any, buffers: list[torch.Tensor]) -> Any:
    """Every byte of the pool's memory at random, as small whole numbers (no NaN, which equals nothing)."""
    for buffer in buffers:
        buffer.copy_(torch.randint(-9, 9, buffer.shape, generator=_generator))
    return pool


def page_of(pool: Any, page: int) -> torch.Tensor:
    """The bytes of a page, tokens before layers before heads, by the pool's own description of itself."""
    layout = pool.layout
    if isinstance(pool, MambaPoolHost):
        return pool.get_data_page(page).clone()
    buffers = pool.kv_buffer if isinstance(pool.kv_buffer, tuple) else [pool.kv_buffer]
    at, found = page * PAGE, []
    for buffer in buffers:
        joined = isinstance(pool, MLATokenToKVPoolHost) or isinstance(pool.kv_buffer, tuple)
        one = buffer[None] if joined else buffer  # [planes, …]
        if layout == "layer_first":
            piece = one[:, :, at : at + PAGE].permute(0, 2, 1, 3, 4)
        elif layout == "page_first":
            piece = one[:, at : at + PAGE]
        elif layout == "page_first_direct":
            piece = one[:, page].permute(0, 2, 1, 3, 4)
        else:
            piece = one[:, page].permute(0, 2, 3, 1, 4)
        found.append(piece.contiguous().view(torch.uint8).reshape(-1))
    return torch.cat(found)


def slots(pool: Any, pages: list[int]) -> torch.Tensor:
    return torch.cat([torch.arange(pool.page_size) + page * pool.page_size for page in pages])


def keys(count: int, what: str) -> list[str]:
    return [hashlib.sha256(f"{what}-{n}".encode()).hexdigest() for n in range(count)]


class Bench:
    """Backends on one daemon."""

    def __init__(self, socket: str, model: str) -> None:
        self.socket, self.model = socket, model
        self.made: list[KvdHiCache] = []

    def backend(
        self, pool: Any, *, rank: int = 0, ranks: int = 1, mla: bool = False, **others: Any
    ) -> KvdHiCache:
        config = SimpleNamespace(
            tp_rank=rank, tp_size=ranks, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, dcp_rank=0, dcp_size=1,
            is_mla_model=mla, model_name=self.model, extra_config={"socket": self.socket},
        )  # fmt: skip
        made = KvdHiCache(config, {})
        made.register_mem_pool_host(pool)
        made.register_mem_host_pool_v2(pool, PoolName.KV)
        for name, other in others.items():
            made.register_mem_host_pool_v2(other, PoolName(name))
        made.on_host_pools_registered()
        self.made.append(made)
        return made

    def between(self, what: str, make: Any, layouts: list[str], *, mla: bool = False) -> int:
        """Pages stored from each layout are loaded into every other; how many pairs were compared."""
        compared = 0
        for number, layout in enumerate(layouts):
            chain, source = keys(4, f"{what} {number}"), [5, 0, 3, 6]
            pool = make(layout)
            writer = self.backend(pool, mla=mla)
            assert writer.batch_set_v1(chain, slots(pool, source)) == [True] * 4, (what, layout)
            for other in layouts:
                target = make(other)
                before = page_of(target, 2)
                reader = self.backend(target, mla=mla)
                assert reader.batch_exists(chain) == 4, (what, layout, other)
                assert reader.batch_get_v1(chain, slots(target, [1, 4, 7, 0])) == [True] * 4
                for at, page in zip(source, [1, 4, 7, 0], strict=True):
                    assert torch.equal(page_of(pool, at), page_of(target, page)), (what, layout, other)
                assert torch.equal(page_of(target, 2), before), "a page that nobody asked for was written"
                assert reader.counters.totals()["failures"] == 0
                compared += 1
        return compared


def hybrid(bench: Bench) -> None:
    """A model with full and sliding layers and states: every rule of batch_exists_v2, over SGLang's own types."""
    pools = (
        keys_and_values("page_first"),
        keys_and_values("page_first_direct", layers=2),
        states("page_first"),
    )
    writer = bench.backend(pools[0], swa=pools[1], mamba=pools[2])
    chain = keys(6, "hybrid")
    assert writer.batch_set_v1(chain, slots(pools[0], [0, 1, 2, 3, 4, 5])) == [True] * 6

    def asked(
        name: PoolName, pages: int, policy: PoolHitPolicy = PoolHitPolicy.TRAILING_PAGES
    ) -> PoolTransfer:
        return PoolTransfer(name=name, keys=["-"] * pages, hit_policy=policy)

    wanted = [asked(PoolName.SWA, 2), asked(PoolName.MAMBA, 1)]
    found = writer.batch_exists_v2(chain, wanted)
    assert (found.kv_hit_pages, found.extra_pool_hit_pages, found.restorable_prefix_pages) == (
        0,
        {"kv": 6},
        [],
    )
    stored = writer.batch_set_v2([
        PoolTransfer(name=PoolName.SWA, keys=chain[1:4], host_indices=slots(pools[1], [2, 0, 1])),
        PoolTransfer(name=PoolName.MAMBA, keys=[chain[3]], host_indices=torch.tensor([4])),
    ])  # fmt: skip
    assert stored == {"swa": [True] * 3, "mamba": [True]}
    others = (
        keys_and_values("layer_first"),
        keys_and_values("page_first", layers=2),
        states("page_first_direct"),
    )
    reader = bench.backend(others[0], swa=others[1], mamba=others[2])
    found = reader.batch_exists_v2(chain, wanted[:1])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (4, [3, 4]), (
        "windows of two pages end at 3 and 4"
    )
    found = reader.batch_exists_v2(chain, wanted)
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (4, [4])
    assert found.extra_pool_hit_pages == {PoolName.KV: 6, PoolName.SWA: 4, PoolName.MAMBA: 4}
    assert reader.batch_exists_v2(chain, [asked(PoolName.SWA, 2, PoolHitPolicy.ALL_PAGES)]).kv_hit_pages == 0
    found = reader.batch_exists_v2(chain, [*wanted, asked(PoolName.INDEXER, 1, PoolHitPolicy.ALL_PAGES)])
    assert found.kv_hit_pages == 0, "a pool that is not there has nothing"
    groups = asked(PoolName.DEEPSEEK_V4_C4, 1, PoolHitPolicy.BLOCK_GROUPS)
    assert reader.batch_exists_v2(chain, [*wanted, groups]).kv_hit_pages == 4
    loaded = reader.batch_get_v2([
        PoolTransfer(name=PoolName.SWA, keys=chain[2:4], host_indices=slots(others[1], [5, 7])),
        PoolTransfer(name=PoolName.MAMBA, keys=[chain[3]], host_indices=torch.tensor([6])),
        PoolTransfer(name=PoolName.INDEXER, keys=chain[:1], host_indices=slots(others[0], [0])),
    ])  # fmt: skip
    assert count_pool_hits(loaded) == {"swa": 2, "mamba": 1, "indexer": 0}
    for at, page in ((0, 5), (1, 7)):
        assert torch.equal(page_of(pools[1], at), page_of(others[1], page))
    assert torch.equal(page_of(pools[2], 4), page_of(others[2], 6))
    wrong = [PoolTransfer(name=PoolName.SWA, keys=chain[2:4], host_indices=slots(others[1], [5]))]
    wrong.append(PoolTransfer(name=PoolName.MAMBA, keys=[chain[3]], host_indices=torch.tensor([2])))
    assert reader.batch_get_v2(wrong) == {"swa": [False] * 2, "mamba": [True]}, (
        "trouble of one pool is its own"
    )
    assert reader.counters.totals()["failures"] == 1


def ranks(bench: Bench) -> None:
    """Latents are the same on all ranks, and written by the first; of states every rank has its share."""
    chain = keys(2, "ranks")
    latent, mine = [latents("page_first") for _ in range(2)], [states("page_first") for _ in range(2)]
    both = [bench.backend(latent[n], rank=n, ranks=2, mla=True, mamba=mine[n]) for n in (0, 1)]
    assert both[0].batch_set_v1(chain, slots(latent[0], [0, 1])) == [True] * 2
    assert both[1].batch_exists(chain) == 2
    assert both[1].batch_get_v1(chain, slots(latent[1], [2, 3])) == [True] * 2
    assert torch.equal(page_of(latent[0], 1), page_of(latent[1], 3))
    wanted = [PoolTransfer(name=PoolName.MAMBA, keys=["-"], hit_policy=PoolHitPolicy.TRAILING_PAGES)]
    for rank in (0, 1):
        assert both[0].batch_exists_v2(chain, wanted).kv_hit_pages == 0, (
            "no state before all ranks stored theirs"
        )
        at = PoolTransfer(name=PoolName.MAMBA, keys=[chain[1]], host_indices=torch.tensor([rank]))
        assert both[rank].batch_set_v2([at]) == {"mamba": [True]}
    assert both[1].batch_exists_v2(chain, wanted).kv_hit_pages == 2
    at = PoolTransfer(name=PoolName.MAMBA, keys=[chain[1]], host_indices=torch.tensor([7]))
    assert both[1].batch_get_v2([at]) == {"mamba": [True]}
    assert torch.equal(page_of(mine[1], 7), page_of(mine[1], 1))
    alone = bench.backend(latents("page_first"), mla=True, mamba=states("page_first"))
    assert alone.batch_exists(chain) == 2, "latents are those of any tensor parallelism"
    assert alone.batch_exists_v2(chain, wanted).kv_hit_pages == 0, "states of two ranks are not those of one"


def refused(bench: Bench) -> None:
    """What the classes themselves cannot tell to the byte is not served; the engine has the rest."""
    whole = keys_and_values("page_first")
    one = bench.backend(whole, mamba=states("page_first", side=True))
    chain = keys(1, "refused")
    assert one.batch_set_v1(chain, slots(whole, [0])) == [True]
    at = PoolTransfer(name=PoolName.MAMBA, keys=chain, host_indices=torch.tensor([0]))
    assert one.batch_set_v2([at]) == {"mamba": [False]}
    unified = bench.backend(keys_and_values("page_unified"))
    assert unified.batch_set_v1(chain, slots(whole, [0])) == [False]


def main() -> None:
    """All comparisons, in one process."""
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 1 << 28
    bench = Bench(sys.argv[1], sys.argv[2])
    kv = ["layer_first", "page_first", "page_first_direct", "page_head"]
    told = {
        "seed": SEED,
        "keys and values": bench.between("kv", keys_and_values, kv),
        "different widths": bench.between("wide", lambda layout: keys_and_values(layout, dim=12, v_dim=8), kv[1:3]),
        "latents": bench.between("latent", latents, kv[:3], mla=True),
        "packed latents": bench.between("packed", packed, kv[:3], mla=True),
    }  # fmt: skip
    hybrid(bench)
    ranks(bench)
    refused(bench)
    for made in bench.made:
        made.close()
    print("RESULT " + json.dumps(told), flush=True)


def packed(layout: str) -> Any:
    """MLA whose rows are wider than latent and rotary part: SGLang's packed FP8."""
    rows = [torch.zeros(TOKENS, 1, 52, dtype=torch.uint8) for _ in range(LAYERS)]
    info = MLABufferInfo(
        buffers=tuple(rows), data_ptrs=pointers(rows), layer_indices=tuple(range(LAYERS)), device_layer_num=LAYERS,
        page_size=PAGE, kv_lora_rank=32, qk_rope_head_dim=8, kv_cache_dim=52, dtype=torch.uint8, device=CPU,
        packed_fp8=True,
    )  # fmt: skip
    pool = MLATokenToKVPoolHost(info, **common(layout), target_layer_num=LAYERS, override_kv_cache_dim=52)
    pool.kv_buffer.copy_(torch.randint(0, 255, pool.kv_buffer.shape, generator=_generator))
    return pool


if __name__ == "__main__":
    main()
