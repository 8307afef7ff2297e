"""The per-token surrogate l_it (`method.md`, "Objective")."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class SurrogateOutput:
    """All [N, T].

    Attributes:
        loss: l_it.
        ratio: rho_it, detached.
        clipped_low: bool, A < 0 and rho < 1 - clip_low.
        clipped_high: bool, A > 0 and rho > 1 + clip_high, or A < 0 and rho beyond the dual clip.
    """

    loss: Tensor
    ratio: Tensor
    clipped_low: Tensor
    clipped_high: Tensor


class Surrogate(ABC):
    """Turns log-ratio and advantage into a per-token loss."""

    @abstractmethod
    def __call__(self, log_ratio: Tensor, advantages: Tensor) -> SurrogateOutput:
        """l_it for `log_ratio` = log pi_theta - log pi_old [N, T] (0 where masked) and `advantages` [N, 1]."""


def _flat_where(clipped: Tensor, bound: Tensor, log_ratio: Tensor, advantages: Tensor) -> Tensor:
    # The ratio of a clipped token may overflow; its logarithm is masked before exp, since 0 * inf in backward is nan.
    return torch.where(clipped, -bound * advantages, -log_ratio.masked_fill(clipped, 0.0).exp() * advantages)


class Clipped(Surrogate):
    """l = -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A); clip-higher with the defaults.

    Args:
        clip_low: eps_low, in [0, 1).
        clip_high: eps_high, >= 0.
    """

    def __init__(self, clip_low: float = 0.2, clip_high: float = 0.28) -> None:
        self.clip_low = clip_low
        self.clip_high = clip_high

    def __call__(self, log_ratio: Tensor, advantages: Tensor) -> SurrogateOutput:
        ratio = log_ratio.detach().exp()
        low = (advantages < 0) & (ratio < 1 - self.clip_low)
        high = (advantages > 0) & (ratio > 1 + self.clip_high)
        bound = torch.full_like(ratio, 1 + self.clip_high).masked_fill(low, 1 - self.clip_low)
        return SurrogateOutput(_flat_where(low | high, bound, log_ratio, advantages), ratio, low, high)


class DualClipped(Surrogate):
    """`Clipped`, with tokens of negative advantage bounded as well: l = min(l, -dual_clip * A) (arXiv 1912.09729; JustRL).

    Args:
        clip_low: eps_low, in [0, 1).
        clip_high: eps_high, >= 0.
        dual_clip: Largest ratio c of a token with negative advantage, > 1 + clip_high.
    """

    def __init__(self, clip_low: float = 0.2, clip_high: float = 0.28, dual_clip: float = 10.0) -> None:
        self.clip_low = clip_low
        self.clip_high = clip_high
        self.dual_clip = dual_clip

    def __call__(self, log_ratio: Tensor, advantages: Tensor) -> SurrogateOutput:
        ratio = log_ratio.detach().exp()
        low = (advantages < 0) & (ratio < 1 - self.clip_low)
        high = (advantages > 0) & (ratio > 1 + self.clip_high)
        dual = (advantages < 0) & (ratio > self.dual_clip)
        bound = torch.full_like(ratio, 1 + self.clip_high).masked_fill(low, 1 - self.clip_low).masked_fill(dual, self.dual_clip)
        return SurrogateOutput(_flat_where(low | high | dual, bound, log_ratio, advantages), ratio, low, high | dual)
