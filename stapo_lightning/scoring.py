"""Hidden states -> log-probs, full-vocabulary entropy and collision of the emitted tokens.

The (tokens x vocabulary) matrix never exists whole: the head runs over chunks of tokens, and in backward each chunk is
computed again. Prompt positions never reach the head. The memory peak of an update lives here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from stapo_lightning.batch import RolloutBatch, TokenScores

# Elements of one chunk of logits: 2**25 float32 values are 128 MiB.
CHUNK_ELEMENTS = 2**25

Head = Callable[[Tensor], Tensor]
Backbone = Callable[[Tensor, Tensor], Tensor]


def score_logits(logits: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Log-prob, entropy and collision of each row, at the temperature, in float32 or wider.

    Args:
        logits: [M, V]; -inf marks an impossible token and adds nothing to the entropy.
        tokens: [M] int64.
        temperature: > 0; the logits are divided by it before anything else.

    Returns:
        log_probs [M] with a graph; entropy [M] (nats) and collision [M] without one.

    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    log_p = torch.log_softmax(logits / temperature, dim=-1)
    log_probs = log_p.gather(-1, tokens[:, None]).squeeze(-1)
    with torch.no_grad():
        p = log_p.exp()
        # p log p -> 0 as p -> 0; where p is 0 the logarithm may be -inf and 0 * -inf is nan.
        entropy = -(p * log_p.masked_fill(p == 0, 0.0)).sum(-1)
        collision = p.square().sum(-1)
    return log_probs, entropy, collision


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


def score(batch: RolloutBatch, backbone: Backbone, head: Head, vocab_size: int) -> TokenScores:
    """Scores every emitted token of `batch` with the current policy.

    Args:
        batch: n completions.
        backbone: [n, L] ids, padded on the right, and [n] lengths -> [n, L, H] last hidden states of a causal model.
        head: [m, H] -> [m, V] logits.
        vocab_size: V; sets how many tokens a chunk holds.

    Returns:
        [n, T] scores, 0 at padding; the log-probs carry the graph where gradients are enabled.

    """
    mask = batch.completion_mask
    hidden = backbone(join_sequences(batch), batch.sequence_lengths)
    row, step = mask.nonzero(as_tuple=True)
    # The state one place before a token predicts it.
    predicting = hidden[row, batch.prompt_lengths[row] + step - 1]
    tokens = batch.completion_ids[row, step]
    flat = score_hidden(predicting, tokens, head, batch.temperature, max(1, CHUNK_ELEMENTS // vocab_size))
    log_probs, entropy, collision = (values.new_zeros(mask.shape).index_put((row, step), values) for values in flat)
    return TokenScores(log_probs, entropy, collision)
