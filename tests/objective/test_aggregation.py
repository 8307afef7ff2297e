"""Token weights: fixed over the whole mini-batch, so the cut into micro-batches never shows."""

import math

import pytest
import torch

from stapo_lightning.distributed import Ranks
from stapo_lightning.objective import Clipped, ConstantLength, SequenceMean, TokenMean, policy_loss
from tests.builders import rollout_batch

AGGREGATIONS = [TokenMean(), SequenceMean(), ConstantLength(8)]


def _losses_2_2_and_eight_ones():
    """On policy a token's loss is -A: two tokens of loss 2 in row 0, eight of loss 1 in row 1."""
    return rollout_batch(torch.tensor([-2.0, -1.0], dtype=torch.float64), [2, 8])


def _loss(batch, weights, cut):
    """The loss and its gradient, summed over the micro-batches `cut`."""
    log_probs = batch.old_log_probs.clone().double().requires_grad_()
    total = sum(policy_loss(batch.rows(rows), log_probs[rows], weights[rows], Clipped()).loss for rows in cut)
    total.backward()
    return total.item(), log_probs.grad


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        (TokenMean(), 1.2),  # (2 * 2 + 8 * 1) / 10
        (SequenceMean(), 1.5),  # (2 + 1) / 2
        (ConstantLength(8), 0.75),  # (4 + 8) / (2 * 8)
    ],
)
def test_micro_batches_do_not_show(aggregation, expected):
    batch = _losses_2_2_and_eight_ones()
    weights = aggregation(batch.completion_mask, Ranks())
    whole, gradient = _loss(batch, weights, [torch.tensor([0, 1])])
    parts, summed = _loss(batch, weights, [torch.tensor([0]), torch.tensor([1])])
    assert whole == pytest.approx(expected, abs=1e-12)
    assert parts == pytest.approx(expected, abs=1e-12)
    torch.testing.assert_close(summed, gradient, atol=1e-15, rtol=0)
    # Unclipped, d(-rho A) / d log_prob = -A = 2 or 1 on policy, times the weight.
    expected_gradient = weights * torch.tensor([[2.0], [1.0]])
    torch.testing.assert_close(gradient, expected_gradient, atol=1e-12, rtol=0)


def test_token_mean_drops_silenced_tokens_from_numerator_and_denominator():
    # A = -1: nine tokens on policy with loss 1, one with ratio 100 and loss 100, silenced: 9 / 9 and not 109 / 10.
    old = torch.zeros(1, 10, dtype=torch.float64)
    old[0, 4] = -math.log(100)
    batch = rollout_batch([-1.0], [10], old)
    keep = batch.completion_mask.clone()
    log_probs = torch.zeros_like(old)
    everything = policy_loss(batch, log_probs, TokenMean()(keep, Ranks()), Clipped()).loss
    assert everything.item() == pytest.approx(10.9, abs=1e-12)
    keep[0, 4] = False
    assert policy_loss(batch, log_probs, TokenMean()(keep, Ranks()), Clipped()).loss.item() == pytest.approx(
        1.0, abs=1e-12
    )


KEEP = torch.tensor([[True, False, True], [True, False, False], [False, False, False]])


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        (TokenMean(), [[1 / 3, 0, 1 / 3], [1 / 3, 0, 0], [0, 0, 0]]),
        # Three completions; the mean of a row is over its kept tokens, and a row without any adds 0.
        (SequenceMean(), [[1 / 6, 0, 1 / 6], [1 / 3, 0, 0], [0, 0, 0]]),
        (ConstantLength(5), [[1 / 15, 0, 1 / 15], [1 / 15, 0, 0], [0, 0, 0]]),
    ],
)
def test_weights_by_hand(aggregation, expected):
    weights = aggregation(KEEP, Ranks())
    torch.testing.assert_close(weights, torch.tensor(expected, dtype=torch.float64), atol=1e-15, rtol=0)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_everything_silenced(aggregation):
    # log-ratios that overflow: were they read at all, the loss would be inf or nan.
    old = torch.full((2, 4), -200.0)
    batch = rollout_batch([-1.0, 1.0], [4, 2], old)
    weights = aggregation(torch.zeros_like(batch.completion_mask), Ranks())
    assert torch.equal(weights, torch.zeros(2, 4, dtype=torch.float64))
    log_probs = torch.zeros(2, 4, requires_grad=True)
    loss = policy_loss(batch, log_probs, weights, Clipped()).loss
    loss.backward()
    assert loss.item() == 0.0
    assert torch.equal(log_probs.grad, torch.zeros(2, 4))
