"""Names and reductions of all that is logged. Every mean is a sum over a sum, over all tokens and all ranks.

The first segment of a tag is its card in TensorBoard.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torchmetrics import Metric

from stapo_lightning.batch import EvalSamples, RolloutBatch, UpdateRecord
from stapo_lightning.evaluation import Evaluation
from stapo_lightning.objective import ImportanceOutput, group_statistics, squared_logit_gradients


class _Sums(Metric):
    """A torchmetrics Metric whose state is one vector of named sums and one of named maxima: one collective each."""

    full_state_update = False
    sum_names: tuple[str, ...] = ()
    max_names: tuple[str, ...] = ()
    sums: Tensor
    maxima: Tensor

    def __init__(self) -> None:
        # The synchronising is torchmetrics' own; without the cache a step's value is computed once and dropped.
        super().__init__(compute_with_cache=False)
        self.add_state("sums", torch.zeros(len(self.sum_names), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("maxima", torch.full((max(len(self.max_names), 1),), -torch.inf, dtype=torch.float64), "max")

    def _add(self, sums: Sequence[Tensor | float], maxima: Sequence[Tensor | float] = ()) -> None:
        self.sums += torch.stack([torch.as_tensor(v, dtype=torch.float64, device=self.sums.device) for v in sums])
        for place, value in enumerate(maxima):
            self.maxima[place] = torch.maximum(self.maxima[place], torch.as_tensor(value, device=self.sums.device))

    def _totals(self) -> dict[str, float]:
        named = dict(zip(self.sum_names, self.sums.tolist(), strict=True))
        return named | dict(zip(self.max_names, self.maxima.tolist(), strict=False))


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else 0.0


class RolloutMetrics(_Sums):
    """What one rollout batch looked like: reward/*, completion/*, rollout/tokens_per_second, time/*."""

    sum_names = (
        "completions", "valid", "reward", "reward_squared", "groups", "zero_std", "errors", "timeouts", "tokens",
        "truncated",
    )  # fmt: skip
    max_names = ("length", "rollout_seconds", "reward_seconds")

    def update(self, batch: RolloutBatch) -> None:
        """Adds one rollout batch of this rank."""
        group = group_statistics(batch.rewards, batch.group_ids)
        rewards = torch.where(group.valid, batch.rewards, 0.0).double()
        # Rows of one group are `group_size` neighbours: every group is counted once.
        zero_std = group.zero_std[:: batch.group_size]
        lengths = batch.completion_lengths
        self._add(
            [len(batch), group.valid.sum(), rewards.sum(), rewards.square().sum(), len(zero_std), zero_std.sum(),
             batch.reward_errors, batch.reward_timeouts, lengths.sum(), batch.truncated.sum()],
            [lengths.max(), batch.rollout_seconds, batch.reward_seconds],
        )  # fmt: skip

    def compute(self) -> dict[str, float]:
        """Tag -> value over all ranks."""
        t = self._totals()
        mean = _ratio(t["reward"], t["valid"])
        variance = max(0.0, t["reward_squared"] - t["valid"] * mean * mean) / max(t["valid"] - 1, 1)
        return {
            "reward/mean": mean,
            "reward/std": variance**0.5,
            "reward/zero_std_groups": _ratio(t["zero_std"], t["groups"]),
            "reward/errors": t["errors"],
            "reward/timeouts": t["timeouts"],
            "completion/length_mean": _ratio(t["tokens"], t["completions"]),
            "completion/length_max": t["length"],
            "completion/truncated_fraction": _ratio(t["truncated"], t["completions"]),
            "rollout/tokens_per_second": _ratio(t["tokens"], t["rollout_seconds"]),
            "time/rollout_s": t["rollout_seconds"],
            "time/reward_s": t["reward_seconds"],
        }


class UpdateMetrics(_Sums):
    """What one optimiser step did to its tokens: policy/*, s2t/*."""

    sum_names = (
        "tokens", "entropy", "ppo_kl", "low", "high", "kl", "silenced", "candidates", "silenced_prob",
        "silenced_entropy", "gradient", "silenced_gradient",
    )  # fmt: skip

    def update(self, batch: RolloutBatch, record: UpdateRecord, clipped_low: Tensor, kl: Tensor | None) -> None:
        """Adds the mini-batch of this rank.

        Args:
            batch: The mini-batch.
            record: Its scores, log-ratios and selection.
            clipped_low: [N, T] bool; the clipped tokens that are not low are high.
            kl: [N, T] KL estimate to the reference, or None.

        """
        mask, silenced, scores = batch.completion_mask, record.silenced, record.scores
        gradient = squared_logit_gradients(batch, record)
        difference = ((scores.log_probs - batch.old_log_probs) * mask).double()
        self._add(
            [mask.sum(), (scores.entropy * mask).double().sum(), -difference.sum(), clipped_low.sum(),
             (record.clipped & ~clipped_low).sum(), 0.0 if kl is None else kl.double().sum(), silenced.sum(),
             record.candidates.sum(), scores.probs[silenced].double().sum(), scores.entropy[silenced].double().sum(),
             gradient.sum(), gradient[silenced].sum()],
        )  # fmt: skip

    def compute(self) -> dict[str, float]:
        """Tag -> value over all ranks; the means over silenced tokens only where there is one."""
        t = self._totals()
        values = {
            "policy/entropy": _ratio(t["entropy"], t["tokens"]),
            "policy/ppo_kl": _ratio(t["ppo_kl"], t["tokens"]),
            "policy/clip_fraction_low": _ratio(t["low"], t["tokens"]),
            "policy/clip_fraction_high": _ratio(t["high"], t["tokens"]),
            "policy/kl_ref": _ratio(t["kl"], t["tokens"]),
            "s2t/silenced_fraction": _ratio(t["silenced"], t["tokens"]),
            "s2t/silenced_count": t["silenced"],
            "s2t/candidate_fraction": _ratio(t["candidates"], t["tokens"]),
            "s2t/grad_share": _ratio(t["silenced_gradient"], t["gradient"]),
        }
        if t["silenced"]:
            values["s2t/mean_probability"] = t["silenced_prob"] / t["silenced"]
            values["s2t/mean_entropy"] = t["silenced_entropy"] / t["silenced"]
        return values


class MismatchMetrics(_Sums):
    """rollout/logprob_diff_*: |log pi_theta - log pi_engine| before the first update of a rollout.

    Where the engine recorded its scores, over the rows that have an advantage: the others are not scored again.
    """

    sum_names = ("tokens", "diff")
    max_names = ("diff",)

    def update(self, batch: RolloutBatch, log_ratio: Tensor) -> None:
        """Adds the first mini-batch of a rollout; `log_ratio` [N, T] of its update, 0 where it was not scored."""
        mask, difference = batch.completion_mask, log_ratio.double()
        if batch.engine_log_probs is not None:
            difference = difference + (batch.old_log_probs - batch.engine_log_probs)
        elif batch.recorded_scores is not None:
            mask = mask & (batch.advantages != 0)[:, None]
        difference = difference.abs().masked_fill(~mask, 0.0)
        self._add([mask.sum(), difference.sum()], [difference.max()])

    def compute(self) -> dict[str, float]:
        """Tag -> value over all ranks."""
        tokens, total = self.sums.tolist()
        return {
            "rollout/logprob_diff_mean": _ratio(total, tokens),
            "rollout/logprob_diff_max": float(self.maxima[0]),
        }


class ImportanceMetrics(_Sums):
    """rollout/importance_*: the weights pi_old / pi_engine of a rollout's tokens."""

    sum_names = ("tokens", "weight", "truncated")
    max_names = ("negative",)

    def update(self, mask: Tensor, output: ImportanceOutput) -> None:
        """Adds a rollout of this rank; `mask` [N, T] is True at its completion tokens."""
        weights = output.weights[mask].double()
        lowest = weights.min() if len(weights) else torch.inf
        self._add([len(weights), weights.sum(), output.truncated[mask].sum()], [-lowest])

    def compute(self) -> dict[str, float]:
        """Tag -> value over all ranks."""
        t = self._totals()
        return {
            "rollout/importance_mean": _ratio(t["weight"], t["tokens"]),
            "rollout/importance_min": -t["negative"],
            "rollout/importance_truncated_fraction": _ratio(t["truncated"], t["tokens"]),
        }


class ProblemTable(Metric):
    """A row of values for each problem of a benchmark, whichever rank evaluated it.

    Args:
        evaluation: The benchmark and the decoding.

    """

    full_state_update = False
    rows: Tensor

    def __init__(self, evaluation: Evaluation) -> None:
        super().__init__(compute_with_cache=False)
        self.evaluation = evaluation
        # The first column says that the problem was reached. A problem is one rank's: the others add zeros.
        shape = (evaluation.problems, 1 + len(evaluation.measures))
        self.add_state("rows", torch.zeros(shape, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, numbers: Sequence[int], samples: EvalSamples) -> None:
        """Adds problems of this rank by their `numbers` in the benchmark."""
        for number, completions in zip(numbers, samples.completions, strict=True):
            self.rows[number] = torch.tensor([1.0, *self.evaluation.values(completions)], device=self.rows.device)

    def compute(self) -> Tensor:
        """[n, c] on the CPU: the values of the problems that were reached, over all ranks."""
        rows = self.rows.cpu()
        return rows[rows[:, 0] > 0, 1:]
