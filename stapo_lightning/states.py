"""Rollout batch -> the hidden states from which its tokens were predicted. What the policy computes is decided here.

Every way gives the same states, [M, H], row after row of the batch and token after token.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from stapo_lightning.batch import RolloutBatch
from stapo_lightning.models import cache_argument

Backbone = Callable[[Tensor, Tensor], Tensor]
States = Callable[[RolloutBatch], Tensor]

# Sharing prompts costs an attention mask and calls of smaller size: this share of the tokens has to be saved by it,
SHARING_SAVES = 0.1
# and the mask over completion tokens and all before them may have so many elements.
SHARING_MASK_ELEMENTS = 2**26
# Completions of like length go through together, in so many parts at most.
SHARING_PARTS = 4


def join_sequences(batch: RolloutBatch) -> Tensor:
    """[N, L] prompt and completion of each row side by side, padded on the right, L the longest of both together.

    With all padding on the right a causal model needs no attention mask: no real token ever sees padding.
    """
    length = int(batch.sequence_lengths.max())
    position = torch.arange(length, device=batch.prompt_ids.device).expand(len(batch), length)
    prompt_length = batch.prompt_lengths[:, None]
    from_prompt = batch.prompt_ids.gather(1, position.clamp(max=batch.prompt_ids.shape[1] - 1))
    offset = (position - prompt_length).clamp(min=0, max=batch.completion_ids.shape[1] - 1)
    from_completion = batch.completion_ids.gather(1, offset)
    return torch.where(position < prompt_length, from_prompt, from_completion)


def joined(backbone: Backbone) -> States:
    """Each completion goes through behind its own copy of the prompt.

    Args:
        backbone: [n, L] ids, padded on the right, and [n] lengths -> [n, L, H] last hidden states of a causal model.

    """

    def states(batch: RolloutBatch) -> Tensor:
        hidden = backbone(join_sequences(batch), batch.sequence_lengths)
        row, step = batch.completion_mask.nonzero(as_tuple=True)
        # The state one place before a token predicts it.
        return hidden[row, batch.prompt_lengths[row] + step - 1]

    return states


def shares_prompts(model: PreTrainedModel) -> bool:
    """Whether all that `model` remembers of a prompt is keys and values of every token of it."""
    if cache_argument(model.base_model) not in inspect.signature(model.base_model.forward).parameters:
        return False
    return all(type(layer) is DynamicLayer for layer in DynamicCache(config=model.config).layers)


def shared(model: PreTrainedModel, otherwise: States) -> States:
    """Each prompt goes through once, its completions behind its keys and values, those of like length together.

    Args:
        model: One for which `shares_prompts` holds.
        otherwise: What takes a batch of which sharing would save little.

    """

    def states(batch: RolloutBatch) -> Tensor:
        parts = list(_parts(batch.completion_lengths))
        return _shared_states(model, batch, parts) if _worth_it(batch, parts) else otherwise(batch)

    return states


def _parts(lengths: Tensor) -> Iterator[Tensor]:
    """Row indices: longest first, in one part or in several of like size where that saves a tenth of the padding."""
    order = lengths.argsort(descending=True, stable=True)
    parts = order.chunk(SHARING_PARTS)
    whole = len(lengths) * int(lengths.max())
    cut = sum(len(part) * int(lengths[part[0]]) for part in parts)
    yield from parts if cut <= (1 - SHARING_SAVES) * whole else (order,)


def _worth_it(batch: RolloutBatch, parts: list[Tensor]) -> bool:
    apart = len(batch) * int(batch.sequence_lengths.max())
    longest = int(batch.prompt_lengths.max())
    together = len(batch.group_ids.unique()) * longest
    mask = 0
    for rows in parts:
        width = int(batch.completion_lengths[rows[0]])
        together += len(rows) * width
        mask = max(mask, len(rows) * width * (longest + width))
    return together <= (1 - SHARING_SAVES) * apart and mask <= SHARING_MASK_ELEMENTS


class _PromptLayer(DynamicLayer):
    """Keys and values of the prompts in one layer. Those of completions are put behind them, and not kept."""

    def __init__(self, keys: Tensor, values: Tensor, prompt_of_row: Tensor) -> None:
        super().__init__()
        self.lazy_initialization(keys, values)
        self.keys, self.values = keys, values
        self.prompt_of_row = prompt_of_row

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        # Not by brackets, whose gradient several threads add up in any order: a run would not repeat.
        keys, values = (states.index_select(0, self.prompt_of_row) for states in (self.keys, self.values))
        return torch.cat([keys, key_states], -2), torch.cat([values, value_states], -2)


def _shared_states(model: PreTrainedModel, batch: RolloutBatch, parts: list[Tensor]) -> Tensor:
    groups, prompt_of_row = batch.group_ids.unique(return_inverse=True)
    first = torch.zeros_like(groups).scatter_reduce(
        0, prompt_of_row, torch.arange(len(batch), device=groups.device), "amin", include_self=False
    )
    lengths = batch.prompt_lengths[first]
    width = int(lengths.max())
    cache = DynamicCache(config=model.config)
    cached = cache_argument(model.base_model)
    prompts = model.base_model(input_ids=batch.prompt_ids[first, :width], use_cache=True, **{cached: cache})
    last = prompts.last_hidden_state[torch.arange(len(first), device=first.device), lengths - 1]
    real = torch.arange(width, device=first.device) < lengths[:, None]
    padded = not bool(real.all())

    pieces, places = [], []
    starts = batch.completion_lengths.cumsum(0) - batch.completion_lengths
    for rows in parts:
        prompt = prompt_of_row[rows]
        # The last token of a completion predicts nothing.
        steps = int(batch.completion_lengths[rows[0]]) - 1
        hidden = last.index_select(0, prompt)[:, None]
        if steps:
            behind = DynamicCache(config=model.config)
            behind.layers = [_PromptLayer(layer.keys, layer.values, prompt) for layer in cache.layers]
            new = torch.ones(len(rows), steps, dtype=torch.long, device=rows.device)
            completions = model.base_model(
                input_ids=batch.completion_ids[rows, :steps],
                attention_mask=torch.cat([real[prompt].long(), new], 1) if padded else None,
                position_ids=lengths[prompt][:, None] + torch.arange(steps, device=rows.device),
                use_cache=True,
                **{cached: behind},
            )
            hidden = torch.cat([hidden, completions.last_hidden_state], 1)
        row, step = batch.completion_mask[rows, : steps + 1].nonzero(as_tuple=True)
        pieces.append(hidden[row, step])
        places.append(starts[rows[row]] + step)
    return torch.cat(pieces)[torch.cat(places).argsort()]
