"""How large one token's gradient is, from quantities already scored (paper, section 3)."""

from __future__ import annotations

from torch import Tensor

from stapo_lightning.batch import RolloutBatch, UpdateRecord


def logit_gradient_weight(ratio: Tensor, advantages: Tensor, clipped: Tensor) -> Tensor:
    """W = rho A, or 0 where clipped: [N, T] from `ratio` [N, T], `advantages` [N, 1], `clipped` [N, T] bool."""
    return (ratio * advantages).masked_fill(clipped | (advantages == 0), 0.0)


def squared_logit_gradient_norm(weight: Tensor, probs: Tensor, collision: Tensor) -> Tensor:
    """|w|^2 (1 - 2 pi + sum_v pi_v^2), exactly the squared norm of d l / d (logits / temperature). All [N, T]."""
    return weight.square() * (1 - 2 * probs + collision)


def squared_logit_gradients(batch: RolloutBatch, record: UpdateRecord) -> Tensor:
    """[N, T] float64 squared logit-gradient norm of every token of `batch`; 0 at padding.

    A silenced token has the norm that it would have had in the loss.
    """
    weight = logit_gradient_weight(record.ratio, batch.advantages[:, None], record.clipped)
    weight = weight if batch.importance is None else weight * batch.importance
    norms = squared_logit_gradient_norm(weight, record.scores.probs, record.scores.collision)
    return norms.double() * batch.completion_mask
