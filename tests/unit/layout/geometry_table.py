"""Expected geometry of real models, with the derivation beside each row.

`per_token` and `state` are bytes in BF16 (states as Transformers keeps them: recurrent FP32, convolution BF16,
the whole kernel wide; lightning states BF16). test_layout_transformers.py sums the tensors of Transformers' own
cache for each row. Widths: KV heads x head size x 2 (K and V) x 2 B, times layers.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One config of ../shared/configs and what must be read from it."""

    file: str
    per_token: int
    state: int
    groups: str
    derivation: str


ROWS = (
    Row("llama-2-7b", 524288, 0, "full 32", "32 layers x 32 heads x 128 x 2 x 2 B"),
    Row("llama-3.1-8b", 131072, 0, "full 32", "32 x 8 x 128 x 4"),
    Row("llama-3.1-70b", 327680, 0, "full 80", "80 x 8 x 128 x 4"),
    Row("smollm2-135m", 23040, 0, "full 30", "30 x 3 x 64 x 4"),
    Row("qwen2.5-7b", 57344, 0, "full 28", "28 x 4 x 128 x 4; the window is switched off"),
    Row("qwen3-0.6b", 114688, 0, "full 28", "28 x 8 x 128 x 4; head size stated, not hidden / heads"),
    Row("qwen3-8b", 147456, 0, "full 36", "36 x 8 x 128 x 4"),
    Row("qwen3-30b-a3b", 98304, 0, "full 48", "48 x 4 x 128 x 4"),
    Row("qwen3-235b-a22b", 192512, 0, "full 94", "94 x 4 x 128 x 4"),
    Row("mistral-7b-v0.1", 131072, 0, "window 4096 32", "32 x 8 x 128 x 4, all layers slide"),
    Row("mixtral-8x7b", 131072, 0, "full 32", "32 x 8 x 128 x 4"),
    Row("phi-3-mini-4k", 393216, 0, "window 2047 32", "32 x 32 x 96 x 4, all layers slide"),
    Row("gemma-2b", 18432, 0, "full 18", "18 x 1 x 256 x 4"),
    Row("falcon-7b", 8192, 0, "full 32", "32 x 1 x 64 x 4; multi_query, whatever num_kv_heads says"),
    Row("falcon-7b-refinedweb", 8192, 0, "full 32", "32 x 1 x 64 x 4"),
    Row("gpt-bigcode-santacoder", 12288, 0, "full 24", "24 x 1 x 128 x 4"),
    Row("gemma-2-2b", 106496, 0, "full 13, window 4096 13", "26 x 4 x 256 x 4"),
    Row("gemma-2-9b", 344064, 0, "full 21, window 4096 21", "42 x 8 x 256 x 4"),
    Row("gemma-2-27b", 376832, 0, "full 23, window 4096 23", "46 x 16 x 128 x 4"),
    Row("gemma-3-1b", 26624, 0, "full 4, window 512 22", "26 x 1 x 256 x 4; every 6th full"),
    Row("gemma-3-4b", 139264, 0, "full 5, window 1024 29", "34 x 4 x 256 x 4; heads from the class, not the file"),
    Row("gemma-3-27b-partial", 507904, 0, "full 10, window 1024 52", "62 x 16 x 128 x 4"),
    Row("gpt-oss-20b", 49152, 0, "full 12, window 128 12", "24 x 8 x 64 x 4"),
    Row("gpt-oss-120b", 73728, 0, "full 18, window 128 18", "36 x 8 x 64 x 4"),
    Row("command-r7b-composed", 131072, 0, "full 8, window 4096 24", "32 x 8 x 128 x 4; every 4th full"),
    Row("command-a-partial", 262144, 0, "full 16, window 4096 48", "64 x 8 x 128 x 4"),
    Row("llama-4-scout", 196608, 0, "full 12, chunked 8192 36", "48 x 8 x 128 x 4; every 4th full"),
    Row("llama-4-maverick", 196608, 0, "full 12, chunked 8192 36", "48 x 8 x 128 x 4"),
    Row("deepseek-v2-lite", 31104, 0, "full 27", "27 x (512 + 64) x 2; once for all heads"),
    Row("deepseek-v2", 69120, 0, "full 60", "60 x (512 + 64) x 2"),
    Row("deepseek-v3", 70272, 0, "full 61", "61 x (512 + 64) x 2; the prediction layer keeps nothing"),
    Row("kimi-k2", 70272, 0, "full 61", "61 x (512 + 64) x 2"),
    Row("jamba-v0.1", 16384, 16515072, "full 4, state 28",
        "4 x 8 x 128 x 4; 28 x 8192 channels x (16 x 4 B + 4 x 2 B)"),
    Row("mamba2-class-default", 0, 273678336, "state 64",
        "64 x (128 x 64 x 128 x 4 + (128 x 64 + 2 x 8 x 128) x 4 x 2)"),
    Row("zamba2-2.7b-composed", 184320, 73046016, "full 9, state 54",
        "9 x 32 x 160 x 4; 54 x (80 x 64 x 64 x 4 + (80 x 64 + 2 x 64) x 4 x 2)"),
    Row("falcon-h1-0.5b", 18432, 28827648, "full 36, state 36",
        "36 x 2 x 64 x 4; 36 x (24 x 64 x 128 x 4 + (24 x 64 + 2 x 128) x 4 x 2)"),
    Row("qwen3-next-80b-a3b", 24576, 77856768, "full 12, state 36",
        "12 x 2 x 256 x 4; 36 x (32 x 128 x 128 x 4 + (2 x 16 x 128 + 32 x 128) x 4 x 2)"),
    Row("minimax-text-01", 40960, 146800640, "full 10, state 70", "10 x 8 x 128 x 4; 70 x 64 x 128 x 128 x 2"),
    Row("minimax-m1", 40960, 146800640, "full 10, state 70", "as MiniMax-Text-01"),
    Row("kimi-linear-48b-a3b", 8064, 43909120, "full 7, state 20",
        "7 x (512 + 64) x 2; 20 x (32 x 128 x 128 x 4 + 3 x 32 x 128 x 4 x 2); layer lists count from 1"),
    Row("nemotron-h-56b", 40960, 914817024, "full 10, state 54",
        "10 x 8 x 128 x 4; 54 x (256 x 64 x 256 x 4 + (256 x 64 + 2 x 8 x 256) x 4 x 2)"),
)  # fmt: skip
