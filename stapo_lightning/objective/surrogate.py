"""The per-token surrogate l_it (paper, section 2)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from stapo_lightning.errors import bounded


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

    def problems(self) -> list[str]:
        """Arguments out of range, one sentence each; read before a run starts."""
        return []


def _flat_where(clipped: Tensor, bound: Tensor, log_ratio: Tensor, advantages: Tensor) -> Tensor:
    # The ratio of a token without gradient may overflow; its logarithm is masked before exp, since 0 * inf is nan.
    flat = clipped | (advantages == 0)
    return torch.where(clipped, -bound * advantages, -log_ratio.masked_fill(flat, 0.0).exp() * advantages)


class Clipped(Surrogate):
    """l = -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A); clip-higher with the defaults.

    Args:
        clip_low: eps_low, in [0, 1).
        clip_high: eps_high, >= 0.

    """

    def __init__(self, clip_low: float = 0.2, clip_high: float = 0.28) -> None:
        self.clip_low = clip_low
        self.clip_high = clip_high

    def problems(self) -> list[str]:
        return [
            *bounded("Clipped.clip_low", self.clip_low, at_least=0, below=1),
            *bounded("Clipped.clip_high", self.clip_high, at_least=0),
        ]

    def __call__(self, log_ratio: Tensor, advantages: Tensor) -> SurrogateOutput:
        ratio = log_ratio.detach().exp()
        low = (advantages < 0) & (ratio < 1 - self.clip_low)
        high = (advantages > 0) & (ratio > 1 + self.clip_high)
        bound = torch.full_like(ratio, 1 + self.clip_high).masked_fill(low, 1 - self.clip_low)
        return SurrogateOutput(_flat_where(low | high, bound, log_ratio, advantages), ratio, low, high)


class DualClipped(Surrogate):
    """`Clipped`, and l = min(l, -dual_clip * A) for tokens of negative advantage (arXiv 1912.09729; JustRL).

    Args:
        clip_low: eps_low, in [0, 1).
        clip_high: eps_high, >= 0.
        dual_clip: Largest ratio c of a token with negative advantage, > 1 + clip_high.

    """

    def __init__(self, clip_low: float = 0.2, clip_high: float = 0.28, dual_clip: float = 10.0) -> None:
        self.clip_low = clip_low
        self.clip_high = clip_high
        self.dual_clip = dual_clip

    def problems(self) -> list[str]:
        clip = Clipped(self.clip_low, self.clip_high).problems()
        return clip + bounded("DualClipped.dual_clip", self.dual_clip, above=1 + self.clip_high)

    def __call__(self, log_ratio: Tensor, advantages: Tensor) -> SurrogateOutput:
        ratio = log_ratio.detach().exp()
        dual = (advantages < 0) & (ratio > self.dual_clip)
        single = Clipped(self.clip_low, self.clip_high)(log_ratio.masked_fill(dual, 0.0), advantages)
        loss = torch.where(dual, -self.dual_clip * advantages, single.loss)
        return SurrogateOutput(loss, ratio, single.clipped_low, single.clipped_high | dual)
