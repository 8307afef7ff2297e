"""What the completions of held-out problems say: avg@k, unbiased pass@k, maj@k, each with a confidence interval.

A problem is one row of values; whatever is reported is a mean over problems.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb

import torch
from torch import Tensor

from stapo_lightning.batch import EvalCompletion

# Bootstrap resamples: enough that the ends of a 95 % interval move by less than 0.001 from seed to seed.
_RESAMPLES = 4000
_CONFIDENCE = 0.95


@dataclass(frozen=True)
class Evaluation:
    """One benchmark under one decoding.

    Attributes:
        benchmark: The source of its prompts; "" where they name none.
        decoding: Name of the decoding.
        problems: Number of problems.
        samples: k, completions of each.
        rechecked: Whether a second verifier looks at what the reward rejects.

    """

    benchmark: str
    decoding: str
    problems: int
    samples: int
    rechecked: bool = False

    @property
    def tag(self) -> str:
        """<benchmark>/<decoding>, the middle of its tags."""
        return f"{self.benchmark}/{self.decoding}" if self.benchmark else self.decoding

    @property
    def measures(self) -> list[str]:
        """Names of a problem's values, in order; pass@k and maj@k only where there are several completions."""
        k = self.samples
        several = [*(f"pass@{n}" for n in powers_of_two(k)), f"maj@{k}"] if k > 1 else []
        second = ["rechecked_fraction"] if self.rechecked else []
        return [f"avg@{k}", *several, "length_mean", "truncated_fraction", *second]

    def values(self, completions: Sequence[EvalCompletion]) -> list[float]:
        """The values of one problem, in the order of `measures`."""
        k = self.samples
        correct = sum(c.correct for c in completions)
        passes = [pass_at_k(correct, k, n) for n in powers_of_two(k)]
        several = [*passes, majority_correct(completions)] if k > 1 else []
        overruled = sum(c.correct and not c.rule_correct for c in completions)
        return [
            correct / k,
            *several,
            sum(c.tokens for c in completions) / k,
            sum(c.truncated for c in completions) / k,
            *([overruled / k] if self.rechecked else []),
        ]


@dataclass(frozen=True)
class Estimate:
    """A mean over problems with the ends of its 95 % confidence interval."""

    value: float
    low: float
    high: float


def pass_at_k(correct: int, samples: int, k: int) -> float:
    """Unbiased chance that one of k samples is correct: 1 - C(n - c, k) / C(n, k) (arXiv 2107.03374, eq. 1)."""
    return 1.0 - comb(samples - correct, k) / comb(samples, k)


def powers_of_two(samples: int) -> list[int]:
    """The k for which pass@k is reported: 1, 2, 4, ... up to the number of samples."""
    return [2**i for i in range(samples.bit_length())]


def majority_correct(completions: Sequence[EvalCompletion]) -> float:
    """Chance, in [0, 1], that the answer given most often is correct; a tie is broken by an even draw.

    Answers are the same where their normalised texts are. Completions without an answer have no vote.
    """
    votes = Counter(c.answer for c in completions if c.answer is not None)
    most = max(votes.values(), default=0)
    leading = [answer for answer, count in votes.items() if count == most]
    # A verifier may read more than the normalised text, so that equal answers can differ in their verdict.
    right = [sum(c.correct for c in completions if c.answer == answer) / most for answer in leading]
    return sum(right) / len(right) if right else 0.0


def resampled_means(values: Tensor, seed: int = 0) -> Tensor:
    """[4000, c] means of as many bootstrap resamples of the problems.

    Args:
        values: [n, c] float64, a row a problem.
        seed: Of the draw; benchmarks that are averaged have different ones, or they would vary together.

    """
    count = len(values)
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for size in [250] * (_RESAMPLES // 250):
        drawn = torch.randint(count, (size, count), generator=generator)
        times = torch.zeros(size, count, dtype=values.dtype).scatter_add_(1, drawn, torch.ones_like(drawn).double())
        parts.append(times @ values / count)
    return torch.cat(parts)


def estimate(values: Tensor, resamples: Tensor) -> Estimate:
    """Mean with a 95 % percentile-bootstrap interval over problems.

    A resample of equal values says nothing. Where all problems are at 0, or all at 1, the interval ends at the exact
    (Clopper-Pearson) bound for as many draws of a coin: 0 of 30 problems gives [0, 0.116].

    Args:
        values: [n] one value a problem.
        resamples: [4000] means of their resamples.

    """
    mean = float(values.mean())
    tail = (1 - _CONFIDENCE) / 2
    low, high = torch.quantile(resamples, torch.tensor([tail, 1 - tail], dtype=resamples.dtype)).tolist()
    bound = tail ** (1 / len(values))
    if bool((values == 0).all()):
        high = 1 - bound
    elif bool((values == 1).all()):
        low = bound
    return Estimate(mean, low, high)


def estimates(evaluation: Evaluation, values: Tensor) -> dict[str, Estimate]:
    """Measure -> estimate, for the measures that are shares of completions or problems.

    Args:
        evaluation: What was evaluated.
        values: [n, c] a row for each problem that was reached, as `Evaluation.values` gives it.

    """
    resamples = resampled_means(values)
    return {
        measure: estimate(values[:, i], resamples[:, i])
        for i, measure in enumerate(evaluation.measures)
        if "@" in measure
    }


def by_decoding(results: Sequence[tuple[Evaluation, Tensor]]) -> dict[str, list[tuple[Evaluation, Tensor]]]:
    """Decoding -> its benchmarks with their values, both in the order they were evaluated."""
    found: dict[str, list[tuple[Evaluation, Tensor]]] = {}
    for evaluation, values in results:
        found.setdefault(evaluation.decoding, []).append((evaluation, values))
    return found


def summary(results: Sequence[tuple[Evaluation, Tensor]]) -> dict[str, float]:
    """<benchmark>/<decoding>/<measure> -> mean over problems; average/<decoding>/avg where there are benchmarks.

    Args:
        results: Each evaluation with [n, c] values, as `Evaluation.values` gives them, n >= 1.

    """
    found: dict[str, float] = {}
    for evaluation, values in results:
        means = values.mean(0).tolist()
        found |= {f"{evaluation.tag}/{measure}": m for measure, m in zip(evaluation.measures, means, strict=True)}
    for decoding, benchmarks in by_decoding(results).items():
        if len(benchmarks) > 1:
            found[f"average/{decoding}/avg"] = sum(float(v[:, 0].mean()) for _, v in benchmarks) / len(benchmarks)
    return found


def average(values: Sequence[Tensor]) -> Estimate:
    """The mean over benchmarks of their avg@k, every benchmark counting alike (the paper's last column).

    Args:
        values: [n_b] avg@k of each problem, a tensor a benchmark.

    """
    means = torch.stack([resampled_means(v[:, None], seed)[:, 0] for seed, v in enumerate(values)]).mean(0)
    tail = (1 - _CONFIDENCE) / 2
    low, high = torch.quantile(means, torch.tensor([tail, 1 - tail], dtype=means.dtype)).tolist()
    return Estimate(float(torch.stack([v.mean() for v in values]).mean()), low, high)
