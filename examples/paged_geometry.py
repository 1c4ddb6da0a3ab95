"""Two engines with different splits and memory layouts share the KV of one hybrid model.

    kvd serve &
    python examples/paged_geometry.py [SOCKET]

The writer is two tensor-parallel ranks that keep K and V as vLLM does, the reader a single rank that keeps them as
SGLang does. The model is a small Qwen3-Next: one attention layer in four, recurrent states in the others. Numpy plays
the engines.
"""

from __future__ import annotations

import sys

import numpy as np

import kvd

CHUNK, BLOCK = 64, 16
CONFIG = {
    "model_type": "qwen3_next", "num_hidden_layers": 8, "full_attention_interval": 4, "hidden_size": 256,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "linear_num_key_heads": 4,
    "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4,
}  # fmt: skip
TP2 = kvd.Split(tp=2)
RANDOM = np.random.default_rng(7)


def half(plane: kvd.Plane) -> kvd.Plane:
    """What one of two ranks keeps of a plane."""
    return kvd.Plane(plane.name, plane.heads // 2, plane.dim, plane.dtype)


class WriterRank:
    """One of two ranks: blocks of attention as vLLM lays them out, and slots of recurrent states."""

    def __init__(self, ns: kvd.Namespace, geom: kvd.Geometry, rank: int, blocks: int) -> None:
        full, state = geom.groups
        self.ns, self.geom, self.rank = ns, geom, rank
        layout = kvd.PagedLayout(
            "vllm-hnd", tuple(map(half, full.planes)), len(full.layers), blocks, BLOCK,
            first_head=rank * full.heads // 2,
        )  # fmt: skip
        # One tensor a layer: [blocks, heads, tokens of a block, K then V]
        shape = (blocks, full.heads // 2, BLOCK, 2 * full.planes[0].dim)
        self.kv = [RANDOM.standard_normal(shape).astype(np.float16) for _ in full.layers]
        self.cache = ns.register(
            layout, self.kv, geom=geom, group="full", split=TP2, rank=rank, name="writer"
        )
        self.states_layout = kvd.StateLayout(
            (("conv_q", "conv_k", "conv_v"), ("recurrent",)), tuple(map(half, state.planes)), len(state.layers), 2,
            first_heads=tuple(rank * plane.heads // 2 for plane in state.planes),
        )  # fmt: skip
        self.states = self.slots()
        for tensor in self.states:
            tensor[:] = RANDOM.integers(0, 256, len(tensor), dtype=np.uint8)
        self.state_cache = self.register_states("writer", self.states)

    def slots(self) -> list[np.ndarray]:
        """Tensors for the states of every layer, two sequences each; plain bytes, as their planes differ in type."""
        sizes = [self.states_layout.slot_bytes(kind) * self.states_layout.slots for kind in (0, 1)]
        return [np.zeros(size, np.uint8) for size in sizes * self.states_layout.layers]

    def register_states(self, name: str, tensors: list[np.ndarray]) -> kvd.EngineCache:
        """States have a layout of their own: slots, one a sequence."""
        return self.ns.register(
            self.states_layout,
            [memoryview(one) for one in tensors],
            geom=self.geom,
            group="state",
            split=TP2,
            rank=self.rank,
            name=name,
        )

    def publish(self, chain: kvd.Chain, block_ids: list[int], slot: int) -> None:
        """After the prefill: attention of every chunk, and the state, which the engine has at the end only."""
        with self.ns.reserve(chain, geom=self.geom, split=TP2, rank=self.rank, groups=["full"]) as writes:
            writes.gather(self.cache, block_ids)
            writes.publish()
        with self.ns.reserve(
            chain[-1:], geom=self.geom, split=TP2, rank=self.rank, groups=["state"]
        ) as writes:
            writes.gather(self.state_cache, [slot])
            writes.publish()


def main(socket: str | None) -> None:
    """Write with one engine, read with the other, compare every byte."""
    geom = kvd.Geometry.from_hf_config(CONFIG, dtype="float16")
    full = geom.groups[0]
    print(f"groups: {', '.join(f'{g.name} in {len(g.layers)} layers' for g in geom.groups)}")
    print(f"{geom.bytes_per_token:,} B a token, {geom.state_bytes:,} B a snapshot")
    print(geom.objects(chunk_tokens=CHUNK, split=TP2))
    with kvd.connect(socket, client="example") as store:
        ns = store.namespace(
            kvd.Manifest(
                model="small-qwen3-next", revision=str(RANDOM.integers(1 << 60)), dtype="float16", tenant="", salt="",
                fixed="*", extra={"geometry": geom.fingerprint},
            )
        )  # fmt: skip
        chunks = 4
        chain = ns.chain(
            list(range(chunks * CHUNK + 1)), CHUNK
        )  # the last token is computed by whoever reads
        blocks = chunks * CHUNK // BLOCK
        written_ids = [int(block) for block in RANDOM.permutation(blocks + 3)[:blocks]]
        ranks = [WriterRank(ns, geom, rank, blocks + 3) for rank in (0, 1)]
        for rank in ranks:
            print(f"usable before rank {rank.rank} has published: {ns.match(chain, geom)} of {chunks} chunks")
            rank.publish(chain, written_ids, slot=1)
        print(
            f"usable now: {ns.match(chain, geom)} of {chunks} chunks, of a prompt of two: {ns.match(chain[:2], geom)}"
        )

        layout = kvd.PagedLayout("sglang-page-first", full.planes, len(full.layers), blocks, BLOCK)
        # One tensor: [K and V, pages, tokens of a page, layers, heads, dim]
        mine = np.zeros((2, blocks, BLOCK, len(full.layers), full.heads, full.planes[0].dim), np.float16)
        cache = ns.register(layout, [mine], geom=geom, group="full", name="reader")
        again = [rank.slots() for rank in ranks]
        with ns.acquire(chain, geom) as leases:
            copied = leases.scatter(cache, range(blocks))
            for rank, tensors in zip(ranks, again, strict=True):
                copied += leases.scatter(rank.register_states("again", tensors), [0])
        print(f"{copied:,} B copied")

        for layer in range(len(full.layers)):
            theirs = np.concatenate(
                [rank.kv[layer][written_ids] for rank in ranks], axis=1
            )  # block, head, token, K|V
            keys, values = np.split(theirs, 2, axis=-1)
            assert (mine[0, :, :, layer].transpose(0, 2, 1, 3) == keys).all()
            assert (mine[1, :, :, layer].transpose(0, 2, 1, 3) == values).all()
        for rank, tensors in zip(ranks, again, strict=True):
            for before, after in zip(rank.states, tensors, strict=True):
                assert (before.reshape(2, -1)[1] == after.reshape(2, -1)[0]).all()
        print("every byte of K, V and the states is where the reader's engine keeps it")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
