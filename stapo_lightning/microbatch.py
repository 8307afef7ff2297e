"""A mini-batch cut into micro-batches by a token budget. The cut never changes the gradient, only the memory peak."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from stapo_lightning.distributed import Ranks


@dataclass
class Passes:
    """The forwards in which a mini-batch goes through a model: the same number on every rank.

    Attributes:
        rows: [n] row indices of each pass.
        own: The first so many are this rank's micro-batches. Ranks that have fewer than others repeat a row, which
            counts for nothing, or the others would wait for their collectives for ever.

    """

    rows: list[Tensor]
    own: int

    @property
    def micro_batches(self) -> list[Tensor]:
        """The passes that count."""
        return self.rows[: self.own]


def passes(
    rows: Tensor,
    lengths: Tensor,
    budget: int,
    ranks: Ranks,
    at_least: int = 0,
    cut: Callable[[Tensor, int], list[Tensor]] | None = None,
) -> Passes:
    """Cuts some rows of a mini-batch into micro-batches and agrees with the other ranks on the number of passes.

    Args:
        rows: [n] the rows that go through, n >= 0.
        lengths: [N] tokens of each row of the mini-batch, prompt included, N >= 1.
        budget: Tokens a micro-batch, > 0.
        ranks: Who has to agree.
        at_least: Passes to make even where no rank has a row.
        cut: Lengths and budget -> micro-batches; default `micro_batches`.

    """
    own = [rows[group] for group in (cut or micro_batches)(lengths[rows], budget)]
    count = max(at_least, int(ranks.max(torch.tensor(len(own), device=lengths.device))))
    spare = own[-1][:1] if own else torch.zeros(1, dtype=torch.int64, device=lengths.device)
    return Passes(own + [spare] * (count - len(own)), len(own))


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


def packed_micro_batches(lengths: Tensor, budget: int) -> list[Tensor]:
    """Groups rows so that the tokens of each group, which go through without padding, add up to at most `budget`.

    Rows are taken longest first, as by `micro_batches`, and a single row longer than the budget goes alone.

    Args:
        lengths: [N] tokens of each row, prompt included.
        budget: Tokens a micro-batch, > 0.

    Returns:
        Index tensors [n] that together hold each row once.

    """
    order = torch.argsort(lengths, descending=True, stable=True)
    sizes = lengths[order].tolist()
    groups: list[Tensor] = []
    start = total = 0
    for place, size in enumerate(sizes):
        if place > start and total + size > budget:
            groups.append(order[start:place])
            start, total = place, 0
        total += size
    return groups + ([order[start:]] if sizes else [])
