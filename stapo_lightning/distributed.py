"""Collectives over the ranks of a run: the identity where there is one process."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class Ranks:
    """All ranks of the default process group. Each method is a collective: every rank must call it."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1

    def sum(self, values: Tensor) -> Tensor:
        """The elementwise sum over ranks; the same on each."""
        if self.size == 1:
            return values
        values = values.clone()
        dist.all_reduce(values)
        return values

    def max(self, values: Tensor) -> Tensor:
        """The elementwise maximum over ranks; the same on each."""
        if self.size == 1:
            return values
        values = values.clone()
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values

    def gather(self, values: Tensor) -> Tensor:
        """Concatenates 1-D `values` of every rank, in rank order; their lengths may differ, 0 included."""
        if self.size == 1:
            return values
        lengths = values.new_zeros(self.size, dtype=torch.int64)
        lengths[dist.get_rank()] = len(values)
        counts = self.sum(lengths).tolist()
        padded = values.new_zeros(max(max(counts), 1))
        padded[: len(values)] = values
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
