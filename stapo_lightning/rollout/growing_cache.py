"""A key-value cache that is written in place: transformers' own copies all of it for every token."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

# Room is made for this many tokens at least, and for this share of those that are there: copies stay rare, and at most
# a fifth of the memory is unused.
GROWTH_TOKENS = 64
GROWTH_SHARE = 0.25


class GrowingLayer(DynamicLayer):
    """Keys and values of one layer as views of buffers with room for more tokens.

    Args:
        limit: No more tokens than these will come.

    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Appends the states of new tokens, and returns those of all."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._buffers = (key_states, value_states)
            self.keys, self.values = self._buffers
            return self._buffers
        seen = self.get_seq_length()
        needed = seen + key_states.shape[-2]
        if needed > self._buffers[0].shape[-2]:
            room = needed + max(GROWTH_TOKENS, int(needed * GROWTH_SHARE))
            room = max(needed, min(room, self.limit))
            self._buffers = (_grown(self._buffers[0], room), _grown(self._buffers[1], room))
        keys, values = self._buffers
        keys[:, :, seen:needed] = key_states
        values[:, :, seen:needed] = value_states
        self.keys, self.values = keys[:, :, :needed], values[:, :, :needed]
        return self.keys, self.values

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.get_seq_length() > 0:
            super().batch_repeat_interleave(repeats)
            self._buffers = (self.keys, self.values)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the rows at `indices`, which ascend: they move up within the buffer."""
        rows, seen = len(indices), self.get_seq_length()
        if seen == 0:
            return
        for buffer in self._buffers:
            buffer[:rows, :, :seen] = buffer[indices, :, :seen]
        self._buffers = (self._buffers[0][:rows], self._buffers[1][:rows])
        self.keys, self.values = (buffer[:, :, :seen] for buffer in self._buffers)


def _grown(buffer: Tensor, room: int) -> Tensor:
    grown = buffer.new_empty(*buffer.shape[:2], room, buffer.shape[-1])
    grown[:, :, : buffer.shape[2]] = buffer
    return grown


def growing_cache(config: Any, limit: int) -> DynamicCache:
    """The cache that `config` asks for, with its ordinary layers written in place.

    Args:
        config: The model's; layers with a sliding window or a recurrent state stay as they are.
        limit: Longest sequence, prompt and completion, in tokens.

    """
    cache = DynamicCache(config=config)
    cache.layers = [GrowingLayer(limit) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def cache_argument(model: nn.Module) -> str:
    """What the forward of a model calls its cache: the name in newer releases of transformers, or in older ones."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
