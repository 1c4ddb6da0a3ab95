"""The model side of the demo: load, prefill, decode, and the two directions between a KV cache and bytes.

Plays the part of an inference engine on top of Transformers. Knows nothing of kvd: whoever calls it brings
buffers. Runs in the worker processes only, on their one thread. Everything is deterministic: float32, greedy,
the same number of threads in each process, so that equal inputs give equal bits.

Shapes: L layers, H KV heads, C tokens of a chunk, D head dimension, V vocabulary.
"""

from __future__ import annotations

import math
import os
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from demo_lib.conversation import turns

THREADS_MAX = 2
FLOAT32_BYTES = 4
WARM_UP_TOKENS = 64


@dataclass(frozen=True, slots=True)
class ChunkShape:
    """What one chunk's bytes are: float32 [layers, kv_heads, 2 (K, V), tokens, head_dim], C-contiguous.

    That is kvd's canonical object (docs/design/layout.md) of an engine that is not split.
    """

    layers: int
    kv_heads: int
    tokens: int
    head_dim: int

    @property
    def dims(self) -> tuple[int, int, int, int, int]:
        return (self.layers, self.kv_heads, 2, self.tokens, self.head_dim)

    @property
    def size_bytes(self) -> int:
        return math.prod(self.dims) * FLOAT32_BYTES


class Engine:
    """A loaded model and its tokenizer.

    `load` is the only constructor to use; it fixes the number of threads of the process.
    """

    def __init__(self, model: Any, tokenizer: Any, threads: int) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self.threads = threads

    @classmethod
    def load(cls, checkpoint: Path) -> Engine:
        """Read the checkpoint as float32 and run one short forward pass; no later one is the first."""
        threads = min(THREADS_MAX, len(os.sched_getaffinity(0)))
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(True)
        model = AutoModelForCausalLM.from_pretrained(str(checkpoint), dtype=torch.float32).eval()
        engine = cls(model, AutoTokenizer.from_pretrained(str(checkpoint)), threads)
        engine.forward(list(range(1, WARM_UP_TOKENS + 1)), engine.new_cache())
        return engine

    def prompt(self) -> array[int]:
        """The demo's conversation as token ids, ready for the assistant's answer."""
        text = self._tokenizer.apply_chat_template(turns(), tokenize=False, add_generation_prompt=True)
        return array("I", self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def text(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def chunk_shape(self, chunk_tokens: int) -> ChunkShape:
        """The bytes that `chunk_tokens` tokens of this model take."""
        config = self._model.config
        return ChunkShape(config.num_hidden_layers, config.num_key_value_heads, chunk_tokens, config.head_dim)

    def new_cache(self) -> DynamicCache:
        return DynamicCache(config=self._model.config)

    def forward(self, tokens: Sequence[int], cache: DynamicCache, logits: int = 1) -> torch.Tensor:
        """Run `tokens` after what `cache` holds, which grows by them; the last `logits` rows, [logits, V].

        `logits` 0 means all of `tokens`.
        """
        with torch.inference_mode():
            ids = torch.tensor([list(tokens)], dtype=torch.long)
            out = self._model(ids, past_key_values=cache, use_cache=True, logits_to_keep=logits)
        result: torch.Tensor = out.logits[0]
        return result

    def greedy(self, first_logits: torch.Tensor, cache: DynamicCache, count: int) -> list[int]:
        """`count` greedy tokens, the first from `first_logits` (last row), the rest by decoding on `cache`.

        It does not stop at an end token: both runs are to be of the same length.
        """
        produced = [int(first_logits[-1].argmax())]
        while len(produced) < count:
            produced.append(int(self.forward(produced[-1:], cache)[-1].argmax()))
        return produced


def pack(cache: DynamicCache, chunk: int, shape: ChunkShape) -> torch.Tensor:
    """The bytes of one chunk of a cache: tokens [chunk × C, (chunk + 1) × C) of every layer, as `shape` says."""
    span = slice(chunk * shape.tokens, (chunk + 1) * shape.tokens)
    packed = torch.empty(shape.dims, dtype=torch.float32)
    for index, layer in enumerate(cache.layers):
        packed[index, :, 0].copy_(layer.keys[0, :, span])
        packed[index, :, 1].copy_(layer.values[0, :, span])
    return packed


def unpack(chunks: Sequence[torch.Tensor], cache: DynamicCache) -> None:
    """Fill an empty cache from chunks in order, each of a `ChunkShape`; the chunks are copied, not kept."""
    with torch.inference_mode():
        for index in range(chunks[0].shape[0]):
            keys = torch.cat([chunk[index, :, 0] for chunk in chunks], dim=1)
            values = torch.cat([chunk[index, :, 1] for chunk in chunks], dim=1)
            cache.update(keys.unsqueeze(0), values.unsqueeze(0), index)
