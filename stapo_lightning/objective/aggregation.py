"""How per-token losses become one number: a weight for each token, fixed before any backward.

The weights are taken over the whole mini-batch and all ranks, so the loss is a plain sum of weight * l over
micro-batches and ranks, and neither the number of micro-batches nor that of ranks changes the gradient.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from stapo_lightning.distributed import Ranks
from stapo_lightning.errors import bounded


class Aggregation(ABC):
    """Gives each kept token its weight in the loss."""

    @abstractmethod
    def __call__(self, keep: Tensor, ranks: Ranks) -> Tensor:
        """[N, T] float64 weights for `keep` [N, T] bool (the mini-batch of this rank): 0 where a token is not kept."""

    def problems(self) -> list[str]:
        """Arguments out of range, one sentence each; read before a run starts."""
        return []


class TokenMean(Aggregation):
    """sum keep l / sum keep over every token of the optimiser step (STAPO, DAPO)."""

    def __call__(self, keep: Tensor, ranks: Ranks) -> Tensor:
        kept = ranks.sum(keep.sum())
        return keep.double() / kept.clamp(min=1)


class SequenceMean(Aggregation):
    """Mean over the kept tokens of each completion, then over completions (GRPO)."""

    def __call__(self, keep: Tensor, ranks: Ranks) -> Tensor:
        completions = ranks.sum(keep.new_full((), len(keep), dtype=keep.sum().dtype))
        return keep.double() / keep.sum(dim=1, keepdim=True).clamp(min=1) / completions.clamp(min=1)


class ConstantLength(Aggregation):
    """Sum over kept tokens / (completions * `length`): no weight depends on a length (Dr. GRPO, arXiv 2503.20783).

    Args:
        length: The constant in tokens, > 0; Dr. GRPO takes max_new_tokens.

    """

    def __init__(self, length: int) -> None:
        self.length = length

    def problems(self) -> list[str]:
        return bounded("ConstantLength.length", self.length, at_least=1)

    def __call__(self, keep: Tensor, ranks: Ranks) -> Tensor:
        completions = ranks.sum(keep.new_full((), len(keep), dtype=keep.sum().dtype))
        return keep.double() / (completions.clamp(min=1) * self.length)
