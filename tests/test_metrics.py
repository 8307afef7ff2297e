"""What is logged: sums over sums."""

import math

import pytest
import torch

from stapo_lightning.batch import EvalCompletion, EvalSamples, TokenScores, UpdateRecord
from stapo_lightning.evaluation import Evaluation
from stapo_lightning.metrics import (
    ImportanceMetrics,
    MismatchMetrics,
    ProblemTable,
    RolloutMetrics,
    UpdateMetrics,
)
from stapo_lightning.objective import ImportanceOutput
from tests.builders import rollout_batch

NAN = float("nan")


# ---- held-out problems ----------------------------------------------------------------------------------------------


def _problem(correct, tokens=1):
    return [EvalCompletion("", str(c), bool(c), bool(c), tokens, False) for c in correct]


def test_a_table_holds_a_row_for_each_problem_that_was_reached():
    table = ProblemTable(Evaluation("b", "d", problems=5, samples=2))
    table.update([3, 0], EvalSamples("d", [_problem([1, 0], tokens=4), _problem([0, 0], tokens=6)]))
    table.update([1], EvalSamples("d", [_problem([1, 1], tokens=8)]))
    # avg@2, pass@1, pass@2, maj@2 (a tie of 1 and 0 is half), length, truncated; problems 2 and 4 were not reached.
    assert table.compute().tolist() == [
        [0.0, 0.0, 0.0, 0.0, 6.0, 0.0],
        [1.0, 1.0, 1.0, 1.0, 8.0, 0.0],
        [0.5, 0.5, 1.0, 0.5, 4.0, 0.0],
    ]
    table.reset()
    assert len(table.compute()) == 0


def test_tables_of_two_ranks_add_up():
    # What torchmetrics does between ranks: the states are summed.
    evaluation = Evaluation("b", "d", problems=3, samples=1)
    whole, first, second = (ProblemTable(evaluation) for _ in range(3))
    problems = [_problem([1], 3), _problem([0], 4), _problem([1], 5)]
    whole.update([0, 1, 2], EvalSamples("d", problems))
    first.update([0, 2], EvalSamples("d", problems[::2]))
    second.update([1], EvalSamples("d", problems[1:2]))
    first.rows = first.rows + second.rows
    assert torch.equal(first.compute(), whole.compute())


# ---- rollouts -------------------------------------------------------------------------------------------------------


def _rollout():
    batch = rollout_batch([0.0] * 8, [1, 2, 3, 4, 5, 6, 7, 12], group_size=4)
    batch.rewards = torch.tensor([1.0, 0.0, NAN, 1.0, 0.7, 0.7, 0.7, 0.7])
    batch.truncated[7] = True
    batch.reward_errors, batch.reward_timeouts = 1, 2
    batch.rollout_seconds, batch.reward_seconds = 4.0, 0.5
    return batch


def test_rollout():
    metrics = RolloutMetrics()
    metrics.update(_rollout())
    # Seven valid: mean 4.8 / 7 = 0.685714; squares 1 + 1 + 4 * 0.49 = 3.96; (3.96 - 4.8^2 / 7) / 6 = 0.111429.
    assert metrics.compute() == pytest.approx(
        {
            "reward/mean": 4.8 / 7,
            "reward/std": ((3.96 - 4.8**2 / 7) / 6) ** 0.5,
            "reward/zero_std_groups": 0.5,
            "reward/errors": 1,
            "reward/timeouts": 2,
            "completion/length_mean": 5.0,
            "completion/length_max": 12,
            "completion/truncated_fraction": 0.125,
            "rollout/tokens_per_second": 10.0,
            "time/rollout_s": 4.0,
            "time/reward_s": 0.5,
        },
        abs=1e-6,
    )


def test_rollouts_are_pooled_and_not_averaged():
    metrics = RolloutMetrics()
    metrics.update(_rollout())
    second = rollout_batch([0.0] * 4, [10, 10, 10, 20], group_size=4)
    second.rewards = torch.tensor([1.0, 1.0, 1.0, 0.0])
    second.rollout_seconds = 2.0
    metrics.update(second)
    found = metrics.compute()
    # Eleven valid: mean 7.8 / 11, squares 6.96; three groups, one without spread; 90 tokens of twelve completions.
    assert found["reward/mean"] == pytest.approx(7.8 / 11, abs=1e-6)
    assert found["reward/std"] == pytest.approx(((6.96 - 7.8**2 / 11) / 10) ** 0.5, abs=1e-6)
    assert found["reward/zero_std_groups"] == pytest.approx(1 / 3)
    assert found["completion/length_mean"] == 7.5
    assert found["completion/length_max"] == 20
    assert found["time/rollout_s"] == 4.0


def test_rollout_whose_rewards_all_failed():
    batch = rollout_batch([0.0] * 2, [1, 1])
    batch.rewards = torch.tensor([NAN, NAN])
    metrics = RolloutMetrics()
    metrics.update(batch)
    found = metrics.compute()
    assert (found["reward/mean"], found["reward/std"], found["reward/zero_std_groups"]) == (0.0, 0.0, 1.0)


# ---- updates --------------------------------------------------------------------------------------------------------


def _update():
    """Row 0 (A = 1): an ordinary token, a silenced one, one clipped high. Row 1 (A = -2): one clipped low, one not."""
    probs = torch.tensor([[0.5, 0.001, 0.25], [0.4, 0.8, 1.0]], dtype=torch.float64)
    old = torch.tensor([[0.5, 0.002, 0.1], [0.8, 0.8, 1.0]], dtype=torch.float64)
    collision = torch.tensor([[0.5, 0.998, 0.3], [0.5, 0.7, 0.0]], dtype=torch.float64)
    entropy = torch.tensor([[0.7, 0.01, 1.2], [0.6, 0.5, 0.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, True], [True, True, False]])
    batch = rollout_batch([1.0, -2.0], [3, 2], old.log())
    silenced = torch.zeros(2, 3, dtype=torch.bool)
    silenced[0, 1] = True
    clipped_low, clipped_high = torch.zeros_like(silenced), torch.zeros_like(silenced)
    clipped_low[1, 0] = clipped_high[0, 2] = True
    record = UpdateRecord(
        scores=TokenScores(probs.log(), entropy, collision),
        silenced=silenced,
        candidates=silenced.clone(),
        log_ratio=torch.where(mask, (probs / old).log(), 0.0),
        clipped=clipped_low | clipped_high,
        updates=(1, 1),
    )
    return batch, record, clipped_low


def test_update():
    batch, record, clipped_low = _update()
    record.candidates[0, 0] = True
    metrics = UpdateMetrics()
    kl = torch.tensor([[0.1, 0.2, 0.3], [0.4, 0.5, 0.0]])
    metrics.update(batch, record, clipped_low, kl)
    # log-prob differences: 0, -ln 2, ln 2.5, -ln 2, 0. Squared gradients w^2 (1 - 2p + c): 0.5; 0.25 * 1.996 = 0.499,
    # silenced; 0, clipped; 0, clipped; 4 * (1 - 1.6 + 0.7) = 0.4. Share 0.499 / 1.399.
    assert metrics.compute() == pytest.approx(
        {
            "policy/entropy": 3.01 / 5,
            "policy/ppo_kl": (2 * math.log(2) - math.log(2.5)) / 5,
            "policy/clip_fraction_low": 0.2,
            "policy/clip_fraction_high": 0.2,
            "policy/kl_ref": 0.3,
            "s2t/silenced_fraction": 0.2,
            "s2t/silenced_count": 1,
            "s2t/candidate_fraction": 0.4,
            "s2t/grad_share": 0.499 / 1.399,
            "s2t/mean_probability": 0.001,
            "s2t/mean_entropy": 0.01,
        },
        abs=1e-7,
    )


def test_updates_are_weighted_by_their_tokens():
    batch, record, clipped_low = _update()
    metrics = UpdateMetrics()
    metrics.update(batch, record, clipped_low, None)
    # The second row alone: two tokens of entropy 0.6 and 0.5, nothing silenced.
    row = torch.tensor([1])
    alone = UpdateRecord(
        record.scores.rows(row),
        record.silenced[row],
        record.candidates[row],
        record.log_ratio[row],
        record.clipped[row],
        (2, 2),
    )
    metrics.update(batch.rows(row), alone, clipped_low[row], None)
    found = metrics.compute()
    assert found["policy/entropy"] == pytest.approx((3.01 + 1.1) / 7, abs=1e-12)
    assert found["s2t/silenced_fraction"] == pytest.approx(1 / 7, abs=1e-12)
    assert found["s2t/grad_share"] == pytest.approx(0.499 / 1.799, abs=1e-12)


def test_nothing_silenced_has_no_mean():
    batch, record, clipped_low = _update()
    record.silenced.zero_()
    metrics = UpdateMetrics()
    metrics.update(batch, record, clipped_low, None)
    found = metrics.compute()
    assert "s2t/mean_probability" not in found and "s2t/mean_entropy" not in found
    assert found["s2t/silenced_count"] == 0 and found["s2t/grad_share"] == 0.0
    assert found["policy/kl_ref"] == 0.0


def test_mismatch():
    # |differences| 0, ln 2, ln 2.5, ln 2, 0 over five tokens.
    batch, record, _ = _update()
    metrics = MismatchMetrics()
    metrics.update(batch, record.log_ratio)
    assert metrics.compute() == pytest.approx(
        {
            "rollout/logprob_diff_mean": (2 * math.log(2) + math.log(2.5)) / 5,
            "rollout/logprob_diff_max": math.log(2.5),
        },
        abs=1e-7,
    )


def test_mismatch_is_finite_where_the_ratio_is_not():
    # 200 nats: exp(200) is beyond float32.
    batch, record, _ = _update()
    record.log_ratio[0, 0] = 200.0
    metrics = MismatchMetrics()
    metrics.update(batch, record.log_ratio)
    assert metrics.compute()["rollout/logprob_diff_max"] == 200.0
    assert metrics.compute()["rollout/logprob_diff_mean"] == pytest.approx(
        (200 + 2 * math.log(2) + math.log(2.5)) / 5, abs=1e-7
    )


def test_mismatch_is_that_of_the_engine_where_old_log_probs_are_the_policys():
    # The policy moved by ln 3 at one token; the engine was 0.5 off at another, and far off at padding.
    batch, record, _ = _update()
    record.log_ratio = torch.zeros_like(batch.old_log_probs)
    record.log_ratio[0, 0] = math.log(3)
    batch.engine_log_probs = batch.old_log_probs.clone()
    batch.engine_log_probs[1, 1] += 0.5
    batch.engine_log_probs[1, 2] = -9.0
    # Resting rows too: all of the rollout was scored.
    batch.old_entropy = batch.old_collision = torch.zeros_like(batch.old_log_probs)
    batch.advantages = torch.tensor([1.0, 0.0], dtype=torch.float64)
    metrics = MismatchMetrics()
    metrics.update(batch, record.log_ratio)
    assert metrics.compute() == pytest.approx(
        {"rollout/logprob_diff_mean": (math.log(3) + 0.5) / 5, "rollout/logprob_diff_max": math.log(3)}, abs=1e-7
    )


def test_gradient_share_counts_importance():
    batch, record, clipped_low = _update()
    batch.importance = torch.ones_like(batch.old_log_probs)
    batch.importance[0, 1] = 2.0  # the silenced token: 4 * 0.499 beside 0.5 and 0.4
    metrics = UpdateMetrics()
    metrics.update(batch, record, clipped_low, None)
    assert metrics.compute()["s2t/grad_share"] == pytest.approx(1.996 / 2.896, abs=1e-7)


def test_importance():
    # Weights 0.5, 2 (cut), 1.5 over three tokens; padding counts for nothing.
    mask = torch.tensor([[True, True], [True, False]])
    output = ImportanceOutput(
        weights=torch.tensor([[0.5, 2.0], [1.5, 9.0]]), truncated=torch.tensor([[False, True], [False, True]])
    )
    metrics = ImportanceMetrics()
    metrics.update(mask, output)
    assert metrics.compute() == pytest.approx(
        {
            "rollout/importance_mean": 4 / 3,
            "rollout/importance_min": 0.5,
            "rollout/importance_truncated_fraction": 1 / 3,
        }
    )
