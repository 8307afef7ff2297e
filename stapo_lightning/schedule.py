"""Learning-rate schedules: the factor on the configured rate as a pure function of the update's number.

A function and not a stateful scheduler, so that resuming and changing the rate on resume need no state to be repaired.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod


class Schedule(ABC):
    """Learning-rate factor over updates."""

    @abstractmethod
    def __call__(self, update: int) -> float:
        """Factor on the learning rate for `update`, counted from 0."""


class ConstantWithWarmup(Schedule):
    """Linear rise over the first updates, then constant: update n (from 0) gets min(1, (n + 1) / warmup_updates).

    Args:
        warmup_updates: Updates of the rise (paper: 10); 0 for none.

    """

    def __init__(self, warmup_updates: int = 10) -> None:
        self.warmup_updates = warmup_updates

    def __call__(self, update: int) -> float:
        return min(1.0, (update + 1) / max(self.warmup_updates, 1))


class CosineWithWarmup(Schedule):
    """Linear rise, then half a cosine down to `final` at `total_updates`.

    Args:
        total_updates: Update at which the factor reaches `final`; normally trainer.max_steps.
        warmup_updates: Updates of the rise.
        final: Last factor, in [0, 1].

    """

    def __init__(self, total_updates: int, warmup_updates: int = 10, final: float = 0.0) -> None:
        self.total_updates = total_updates
        self.warmup_updates = warmup_updates
        self.final = final

    def __call__(self, update: int) -> float:
        if update < self.warmup_updates:
            return (update + 1) / self.warmup_updates
        span = max(self.total_updates - self.warmup_updates, 1)
        progress = min(1.0, (update - self.warmup_updates) / span)
        return self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * progress))
