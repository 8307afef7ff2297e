"""Per-token estimators of KL(pi_theta || pi_ref) from one sampled token (Schulman 2020, "Approximating KL")."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor


class KLEstimator(ABC):
    """Estimates the KL divergence to the reference at one token."""

    @abstractmethod
    def __call__(self, log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
        """[N, T] estimate, differentiable in `log_probs` [N, T]; `ref_log_probs` [N, T] is the frozen reference's."""


class K1(KLEstimator):
    """k1 = log pi_theta - log pi_ref: unbiased, may be negative. Its expected gradient is 0: for monitoring only."""

    def __call__(self, log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
        return log_probs - ref_log_probs


class K2(KLEstimator):
    """k2 = (log pi_theta - log pi_ref)^2 / 2: biased value, unbiased gradient of the KL on policy."""

    def __call__(self, log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
        return 0.5 * (log_probs - ref_log_probs).square()


class K3(KLEstimator):
    """k3 = exp(d) - d - 1 with d = log pi_ref - log pi_theta: unbiased and never negative (GRPO)."""

    def __call__(self, log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
        difference = ref_log_probs - log_probs
        return torch.expm1(difference) - difference
