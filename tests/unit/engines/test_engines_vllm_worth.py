"""What the live break-even of the vLLM connector takes a load to weigh."""

from __future__ import annotations

from test_engines_vllm_sides import BLOCK, DIM, HEADS, SlidingWindowSpec, config, spec

from kvd.engines.vllm_identity import identify


def test_what_a_load_weighs_leaves_out_what_windows_forgot() -> None:
    """Fails if the live break-even counts a window's old chunks, which are never loaded, and so refuses what pays."""
    identity = identify(*config(spec(SlidingWindowSpec, sliding_window=64), spec()))
    layers = 2 * HEADS * 2 * DIM * 4  # of each group: layers, heads, K and V, float32
    assert identity.load_bytes(10 * BLOCK, 10 * BLOCK) == layers * (10 * BLOCK + 64)
    assert identity.load_bytes(10 * BLOCK, 2 * BLOCK) == layers * (2 * BLOCK + 2 * BLOCK)
    plain = identify(*config())
    assert plain.load_bytes(10 * BLOCK, 4 * BLOCK) == 4 * BLOCK * plain.bytes_per_token
