"""The loss of one micro-batch, in formula order; only the last line reduces."""

from __future__ import annotations

import torch
from torch import Tensor

from stapo_lightning.batch import LossOutput, RolloutBatch
from stapo_lightning.objective.kl import KLEstimator
from stapo_lightning.objective.surrogate import Surrogate


def policy_loss(
    batch: RolloutBatch,
    log_probs: Tensor,
    weights: Tensor,
    surrogate: Surrogate,
    ref_log_probs: Tensor | None = None,
    kl: KLEstimator | None = None,
    kl_coef: float = 0.0,
) -> LossOutput:
    """sum_it weight_it (l_it + kl_coef KL_it) over the tokens of one micro-batch (paper, equation of L_STAPO).

    Args:
        batch: The micro-batch, n completions.
        log_probs: [n, T] log pi_theta with its graph.
        weights: [n, T] from an `Aggregation`; exactly 0 where a token is padding or silenced, and then nothing of that
            token reaches loss or gradient, whatever its log-prob.
        surrogate: l_it.
        ref_log_probs: [n, T] of the reference, or None.
        kl: KL estimator, needed with `ref_log_probs`.
        kl_coef: Weight of the KL term; 0 measures it only.

    """
    trained = weights != 0
    # Masked before exp: a padded or silenced token may overflow, and 0 * inf in backward is nan.
    log_ratio = (log_probs - batch.old_log_probs).masked_fill(~batch.completion_mask, 0.0)
    per_token = surrogate(log_ratio.masked_fill(~trained, 0.0), batch.advantages[:, None])
    measured = surrogate(log_ratio.detach(), batch.advantages[:, None])
    loss = per_token.loss

    kl_values = None
    if ref_log_probs is not None and kl is not None:
        measured_kl = kl(log_probs.detach(), ref_log_probs)
        kl_values = torch.where(batch.completion_mask, measured_kl, 0.0)
        if kl_coef:
            loss = loss + kl_coef * kl(log_probs.masked_fill(~trained, 0.0), ref_log_probs.masked_fill(~trained, 0.0))

    return LossOutput(
        loss=(torch.where(trained, loss, 0.0) * weights.to(loss.dtype)).sum(),
        log_ratio=log_ratio.detach(),
        clipped_low=measured.clipped_low & batch.completion_mask,
        clipped_high=measured.clipped_high & batch.completion_mask,
        kl=kl_values,
    )
