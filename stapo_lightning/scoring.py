"""Hidden states -> log-probs, full-vocabulary entropy and collision of the emitted tokens.

The (tokens x vocabulary) matrix never exists whole: a linear head is applied to parts of the vocabulary, any other to
chunks of tokens, and in backward each piece is computed again. Prompt positions never reach the head. The memory peak
of an update lives here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from stapo_lightning.batch import RolloutBatch, TokenScores
from stapo_lightning.linear_scores import LinearHead, score_linear
from stapo_lightning.softmax import Tally, gradient_, tally_

Head = Callable[[Tensor], Tensor]


# Logits of one chunk of tokens: 128 MiB in float32. Each chunk costs a gradient of the whole head, so not fewer.
CHUNK_ELEMENTS = 2**25


def part_elements(device: torch.device) -> int:
    """Logits of one part of the vocabulary: on a CPU what its cache holds (8 MiB), elsewhere what keeps it busy."""
    return 2**21 if device.type == "cpu" else 2**25


def score_logits(logits: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Log-prob, entropy and collision of each row, at the temperature, in float32 or wider.

    Args:
        logits: [M, V]; -inf marks an impossible token and adds nothing to the entropy.
        tokens: [M] int64.
        temperature: > 0; the logits are divided by it before anything else.

    Returns:
        log_probs [M] and entropy [M] (nats) with a graph; collision [M] without one.

    """
    return _LogitScores.apply(logits, tokens, temperature)


class _LogitScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        z = _widened(logits, temperature)
        z_of_token = z.gather(-1, tokens[:, None])[:, 0]
        tally = tally_(z)
        ctx.save_for_backward(logits, tokens, tally.peak, tally.total, tally.moment, tally.square)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        collision = tally.collision()
        ctx.mark_non_differentiable(collision)
        return tally.log_probs(z_of_token), tally.entropy(), collision

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_log_prob: Tensor | None, by_entropy: Tensor | None, _: None) -> tuple[Tensor, None, None]:
        logits, tokens, *sums = ctx.saved_tensors
        by_log_prob, by_entropy = (g if g is None else g / ctx.temperature for g in (by_log_prob, by_entropy))
        gradient = gradient_(_widened(logits, ctx.temperature), Tally(*sums), by_log_prob, by_entropy)
        if by_log_prob is not None:
            gradient.scatter_add_(1, tokens[:, None], by_log_prob[:, None])
        return gradient.to(logits.dtype), None, None


def _widened(logits: Tensor, temperature: float) -> Tensor:
    """Logits / temperature in memory of their own."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True).div_(temperature)


def score_hidden(
    hidden: Tensor, tokens: Tensor, head: Head, temperature: float, chunk_tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`score_logits(head(hidden), ...)` over chunks of `chunk_tokens` rows: the same values, a smaller peak.

    Args:
        hidden: [M, H] hidden state from which each token was predicted.
        tokens: [M] int64.
        head: [m, H] -> [m, V] logits.
        temperature: > 0.
        chunk_tokens: Rows a chunk, > 0.

    """
    if len(tokens) <= chunk_tokens:
        return score_logits(head(hidden), tokens, temperature)

    def score_chunk(chunk: Tensor, chunk_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return score_logits(head(chunk), chunk_ids, temperature)

    parts = [
        checkpoint(score_chunk, chunk, chunk_ids, use_reentrant=False)
        if torch.is_grad_enabled()
        else score_chunk(chunk, chunk_ids)
        for chunk, chunk_ids in zip(hidden.split(chunk_tokens), tokens.split(chunk_tokens), strict=True)
    ]
    log_probs, entropy, collision = (torch.cat(column) for column in zip(*parts, strict=True))
    return log_probs, entropy, collision


def score(batch: RolloutBatch, states: Tensor, head: Head, vocab_size: int) -> TokenScores:
    """Scores every emitted token of `batch` with the current policy.

    Args:
        batch: n completions of M tokens in all.
        states: [M, H] hidden states from which they were predicted, row after row (`states.py`).
        head: [m, H] -> [m, V] logits. A `LinearHead` takes less memory and time than any other callable.
        vocab_size: V; sets how many tokens a chunk holds.

    Returns:
        [n, T] scores, 0 at padding; log-probs and entropy carry the graph where gradients are enabled.

    """
    mask = batch.completion_mask
    row, step = mask.nonzero(as_tuple=True)
    tokens = batch.completion_ids[row, step]
    if isinstance(head, LinearHead):
        columns = max(1, part_elements(states.device) // len(tokens))
        flat = score_linear(states, tokens, head, batch.temperature, columns)
    else:
        flat = score_hidden(states, tokens, head, batch.temperature, max(1, CHUNK_ELEMENTS // vocab_size))
    log_probs, entropy, collision = (values.new_zeros(mask.shape).index_put((row, step), values) for values in flat)
    return TokenScores(log_probs, entropy, collision)
