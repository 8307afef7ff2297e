"""Rewards of a group -> one advantage a completion (paper, section 2)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

# Rewards closer than this share of their size are equal: eight float32 values of 0.7 have a std of 6e-8, not 0.
EQUAL_REWARDS_TOLERANCE = 1e-6


@dataclass
class GroupStatistics:
    """Statistics of each completion's own group. All [N].

    Attributes:
        mean: Mean of the group's valid rewards, float64.
        std: Their sample standard deviation (ddof = 1), float64; 0 with fewer than two valid rewards.
        valid: bool, the row's reward is a finite number.
        zero_std: bool, fewer than two valid rewards in the group, or all of them equal within the tolerance.

    """

    mean: Tensor
    std: Tensor
    valid: Tensor
    zero_std: Tensor


def group_statistics(rewards: Tensor, group_ids: Tensor) -> GroupStatistics:
    """Mean, sample std and equality of the rewards within each group, rows with a non-finite reward left out.

    Args:
        rewards: [N]; nan or inf marks a row without a reward.
        group_ids: [N] int64; completions with the same id are one group, wherever they stand.

    """
    rewards = rewards.to(torch.float64)
    valid = torch.isfinite(rewards)
    values = torch.where(valid, rewards, 0.0)
    _, group = group_ids.unique(return_inverse=True)
    zeros = rewards.new_zeros(int(group.max()) + 1 if len(group) else 0)

    count = zeros.scatter_add(0, group, valid.double())
    mean = zeros.scatter_add(0, group, values) / count.clamp(min=1)
    deviation = torch.where(valid, values - mean[group], 0.0)
    std = (zeros.scatter_add(0, group, deviation.square()) / (count - 1).clamp(min=1)).sqrt()

    highest = zeros.scatter_reduce(0, group, torch.where(valid, rewards, -torch.inf), "amax", include_self=False)
    lowest = zeros.scatter_reduce(0, group, torch.where(valid, rewards, torch.inf), "amin", include_self=False)
    tolerance = EQUAL_REWARDS_TOLERANCE * torch.maximum(highest.abs(), lowest.abs())
    zero_std = (count < 2) | (highest - lowest <= tolerance)
    return GroupStatistics(mean[group], std[group], valid, zero_std[group])


class AdvantageEstimator(ABC):
    """One advantage a completion, shared by all of its tokens."""

    @abstractmethod
    def __call__(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        """Advantages [N] in the dtype of `rewards` [N]; groups by `group_ids` [N]; 0 for a row without a reward."""


class GroupNormalized(AdvantageEstimator):
    """A_i = (R_i - mean) / (std + eps) within the group, sample std; equal rewards give exactly 0 (paper, section 2).

    Args:
        eps: Added to the standard deviation, > 0.

    """

    def __init__(self, eps: float = 1e-6) -> None:
        self.eps = eps

    def __call__(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        group = group_statistics(rewards, group_ids)
        advantages = (rewards.double() - group.mean) / (group.std + self.eps)
        return torch.where(group.valid & ~group.zero_std, advantages, 0.0).to(rewards.dtype)


class GroupCentered(AdvantageEstimator):
    """A_i = R_i - mean within the group, not divided by the std (Dr. GRPO, arXiv 2503.20783)."""

    def __call__(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        group = group_statistics(rewards, group_ids)
        return torch.where(group.valid & ~group.zero_std, rewards.double() - group.mean, 0.0).to(rewards.dtype)
