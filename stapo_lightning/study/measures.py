"""The primary measures of a run, from what it logged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from stapo_lightning.errors import StapoError

Scalars = Mapping[str, Mapping[int, float]]


@dataclass(frozen=True)
class Measures:
    """What a run came to.

    Attributes:
        final_accuracy: Held-out accuracy of the last evaluation, in [0, 1].
        best_accuracy: Of the best evaluation.
        largest_fall: Largest difference between an evaluation and the best one before it, >= 0.
        entropy_start: Mean `policy/entropy` of the first `window` updates after warm-up, nats a token.
        entropy_end: Of the last `window` updates.
        entropy_ratio: The end over the start: below 1 the policy became more certain, far above it explodes.
        silenced_share: Mean of `s2t/silenced_fraction` over all updates.
        idle_updates: Share of the updates that silence no token, in [0, 1].

    """

    final_accuracy: float
    best_accuracy: float
    largest_fall: float
    entropy_start: float
    entropy_end: float
    entropy_ratio: float
    silenced_share: float
    idle_updates: float


def measure(scalars: Scalars, accuracy: str, warmup_updates: int, window: int) -> Measures:
    """The measures of one run.

    Args:
        scalars: Tag -> update -> value.
        accuracy: Tag of the held-out accuracy.
        warmup_updates: Updates left out of the entropy at the start.
        window: Updates that an entropy is averaged over.

    Raises:
        StapoError: A tag is missing, or there are fewer updates than two windows and the warm-up.

    """
    missing = [tag for tag in (accuracy, "policy/entropy", "s2t/silenced_fraction") if not scalars.get(tag)]
    if missing:
        raise StapoError(f"the run logged no {', '.join(missing)}; was it cut off before its first evaluation?")
    evaluations = _in_order(scalars[accuracy])
    entropy = _in_order(scalars["policy/entropy"])
    if len(entropy) < warmup_updates + 2 * window:
        raise StapoError(
            f"the run logged {len(entropy)} updates: fewer than the warm-up of {warmup_updates} and two windows of"
            f" {window} (study.warmup_updates, study.window)"
        )
    silenced = _in_order(scalars["s2t/silenced_fraction"])
    start = float(entropy[warmup_updates : warmup_updates + window].mean())
    end = float(entropy[-window:].mean())
    return Measures(
        final_accuracy=float(evaluations[-1]),
        best_accuracy=float(evaluations.max()),
        largest_fall=float((np.maximum.accumulate(evaluations) - evaluations).max()),
        entropy_start=start,
        entropy_end=end,
        entropy_ratio=end / start,
        silenced_share=float(silenced.mean()),
        idle_updates=float((silenced == 0).mean()),
    )


def window_means(scalars: Scalars, tag: str, warmup_updates: int, window: int) -> tuple[float, float]:
    """Means of a tag over the first `window` updates after warm-up and over the last; nan where it was not logged.

    A quadrant's shares are only logged from the first update with a threshold on.
    """
    values = scalars.get(tag, {})
    last = max(scalars["policy/entropy"])
    first = [v for u, v in values.items() if warmup_updates < u <= warmup_updates + window]
    end = [v for u, v in values.items() if last - window < u <= last]
    return float(np.mean(first)) if first else float("nan"), float(np.mean(end)) if end else float("nan")


def _in_order(values: Mapping[int, float]) -> np.ndarray:
    return np.array([values[update] for update in sorted(values)], dtype=np.float64)
