"""A mini-batch cut into micro-batches by a token budget. The cut never changes the gradient, only the memory peak."""

from __future__ import annotations

import torch
from torch import Tensor


def micro_batches(lengths: Tensor, budget: int) -> list[Tensor]:
    """Groups rows so that each group, padded to its longest row, holds at most `budget` tokens.

    Rows are taken longest first, so that rows of like length share a micro-batch and padding stays small. A single row
    longer than the budget gets a micro-batch of its own.

    Args:
        lengths: [N] tokens of each row, prompt included.
        budget: Padded tokens a micro-batch, > 0.

    Returns:
        Index tensors [n] that together hold each row once.

    """
    order = torch.argsort(lengths, descending=True, stable=True)
    sizes = lengths[order].tolist()
    groups: list[Tensor] = []
    start = 0
    while start < len(sizes):
        rows = max(1, budget // max(sizes[start], 1))
        groups.append(order[start : start + rows])
        start += rows
    return groups
