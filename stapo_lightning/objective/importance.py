"""Weights for tokens that another program sampled than the one that trains: engines round differently.

The objective is an expectation over completions of pi_old, the policy before the first update of a rollout. An engine
with its own kernels and precision samples from pi_engine, close to pi_old but not equal to it. Weighting each token by
pi_old / pi_engine takes the expectation over pi_old again; the ratio that is clipped stays pi_theta / pi_old.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from stapo_lightning.errors import bounded


@dataclass
class ImportanceOutput:
    """All [N, T].

    Attributes:
        weights: What each token's loss is multiplied by; 1 where the engine agrees with the policy.
        truncated: bool, the weight is not the whole pi_old / pi_engine.

    """

    weights: Tensor
    truncated: Tensor


class Importance(ABC):
    """Turns the log-ratio of policy to engine into a weight for each token's loss."""

    @abstractmethod
    def __call__(self, log_ratio: Tensor) -> ImportanceOutput:
        """Weights for `log_ratio` = log pi_old - log pi_engine [N, T], 0 at padding; no gradient goes through them."""

    def problems(self) -> list[str]:
        """Arguments out of range, one sentence each; read before a run starts."""
        return []


class TruncatedImportance(Importance):
    """w = min(pi_old / pi_engine, cap): the cap trades a small bias for a bounded variance.

    Source: truncated importance sampling, Ionides 2008; for rollout engines, Yao et al. 2025, "Your efficient RL
    framework secretly brings you off-policy RL training".

    Args:
        cap: Largest weight C, >= 1.

    """

    def __init__(self, cap: float = 2.0) -> None:
        self.cap = cap

    def problems(self) -> list[str]:
        return bounded("TruncatedImportance.cap", self.cap, at_least=1)

    def __call__(self, log_ratio: Tensor) -> ImportanceOutput:
        limit = math.log(self.cap)
        # Cut before exp, which may overflow.
        return ImportanceOutput(log_ratio.clamp(max=limit).exp(), log_ratio > limit)
