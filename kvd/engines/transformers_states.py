"""States that are taken while a model generates, so that an answer of a hybrid model can be stored when it is complete.

A state cannot be cut: it can be stored only as it was at the end of a chunk. `Boundaries` is asked by `generate` after
every token and keeps a copy of the states at the last chunk's end; `cut` gives the cache as it was there. Called by
kvd.engines.transformers only, on the thread that generates. Costs one copy of the states in `chunk_tokens` tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from transformers import StoppingCriteria

from kvd.engines.transformers_cache import Kept
from kvd.layout.geometry import Rule

States = dict[int, tuple[torch.Tensor, torch.Tensor]]
"""Layer → convolution and recurrent state."""


def snapshot(kept: Kept, cache: Any) -> States:
    """Copies of all states of a cache, as they are now."""
    return {
        index: (cache.layers[index].conv_states[0].clone(), cache.layers[index].recurrent_states[0].clone())
        for group in kept.geometry.groups
        if group.rule is Rule.STATE
        for index in group.layers
    }


class Boundaries(StoppingCriteria):  # type: ignore[misc]
    """Never stops. `tokens` and `states` are those of the last chunk's end that generation passed (0: none yet).

    `front`: tokens of the sequence that `generate` was not given. `shield` runs what must not raise into generation.
    """

    def __init__(
        self, kept: Kept, cache: Any, chunk_tokens: int, front: int, shield: Callable[[Callable[[], None]], None]
    ) -> None:  # fmt: skip
        self._kept, self._cache, self._chunk_tokens = kept, cache, chunk_tokens
        self._front, self._shield = front, shield
        self.tokens = 0
        self.states: States = {}

    def __call__(self, input_ids: Any, scores: Any, **_options: Any) -> Any:
        """Asked when a token was chosen, which the cache does not hold yet."""
        tokens = self._front + int(input_ids.shape[1]) - 1
        if tokens % self._chunk_tokens == 0:
            self._shield(lambda: self._take(tokens))
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    def _take(self, tokens: int) -> None:
        if not self._kept.only_states and int(self._cache.get_seq_length()) != tokens:
            return  # a decoding that runs ahead of what it tells
        self.states = snapshot(self._kept, self._cache)
        self.tokens = tokens


def cut(kept: Kept, cache: Any, tokens: int, states: States) -> Any:
    """The cache as it was after `tokens` tokens: shares the memory of `cache` where that only grew."""
    view = copy.copy(cache)
    view.layers = [copy.copy(layer) for layer in cache.layers]
    for group in kept.geometry.groups:
        for index in group.layers:
            layer = view.layers[index]
            if group.rule is Rule.STATE:
                conv, recurrent = states[index]
                layer.conv_states, layer.recurrent_states = [conv], [recurrent]
            elif (extra := int(layer.get_seq_length()) - tokens) > 0:
                layer.keys, layer.values = layer.keys[:, :, :-extra], layer.values[:, :, :-extra]
                if hasattr(layer, "cumulative_length"):
                    layer.cumulative_length = tokens
    return view
