"""Paired differences between two methods over their common seeds, with bootstrap intervals."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

# n^n resamples of n seeds: 3,125 of 5. More seeds than this are resampled at random.
_ENUMERATED = 6
_RESAMPLES = 20_000


@dataclass(frozen=True)
class Interval:
    """A mean over seeds with the ends of its 95 % interval.

    Attributes:
        mean: Over the seeds.
        low: 2.5 % quantile of the resampled means.
        high: 97.5 % quantile.
        seeds: How many.

    """

    mean: float
    low: float
    high: float
    seeds: int

    @property
    def excludes_zero(self) -> bool:
        """Whether 0 lies outside."""
        return self.low > 0 or self.high < 0


def paired_difference(method: Mapping[int, float], reference: Mapping[int, float]) -> Interval | None:
    """The mean over common seeds of method - reference, and the percentile-bootstrap interval of it.

    Of few seeds the percentile bootstrap is too narrow: with 5, and values that are normal, it holds the true
    difference in 84 of 100 studies and not in 95 (`tests/study/test_intervals.py` counts it).

    Args:
        method: Seed -> value.
        reference: Seed -> value.

    Returns:
        None without a common seed; a single one has no width.

    """
    seeds = sorted(method.keys() & reference.keys())
    if not seeds:
        return None
    return bootstrap(np.array([method[seed] - reference[seed] for seed in seeds]))


def bootstrap(values: np.ndarray) -> Interval:
    """The mean of [n] values with its 95 % percentile-bootstrap interval.

    Up to six values all n^n resamples are enumerated; with more 20,000 are drawn, always the same ones.
    """
    means = values[_resamples(len(values))].mean(1)
    low, high = np.quantile(means, [0.025, 0.975])
    return Interval(float(values.mean()), float(low), float(high), len(values))


def _resamples(count: int) -> np.ndarray:
    if count <= _ENUMERATED:
        return np.array(list(itertools.product(range(count), repeat=count)))
    return np.random.default_rng(0).integers(count, size=(_RESAMPLES, count))
