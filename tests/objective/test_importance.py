"""Weights for the tokens of an engine that is not quite the policy."""

import math

import pytest
import torch

from stapo_lightning.objective import Clipped, TruncatedImportance, policy_loss
from tests.builders import rollout_batch


def test_weights_are_the_ratio_up_to_the_cap():
    # pi_old / pi_engine = 1, 0.5, 1.9, 2.5, exp(200): the last two are cut at 2, and nothing overflows.
    log_ratio = torch.tensor([[0.0, math.log(0.5), math.log(1.9), math.log(2.5), 200.0]], dtype=torch.float64)
    output = TruncatedImportance()(log_ratio)
    assert output.weights[0].tolist() == pytest.approx([1.0, 0.5, 1.9, 2.0, 2.0], abs=1e-12)
    assert output.truncated.tolist() == [[False, False, False, True, True]]


def test_an_impossible_token_of_the_policy_has_no_weight():
    assert TruncatedImportance()(torch.tensor([[-math.inf]])).weights.tolist() == [[0.0]]


def test_the_cap_is_at_least_one():
    assert TruncatedImportance(1.0).problems() == []
    assert TruncatedImportance(0.9).problems() == ["TruncatedImportance.cap=0.9: must be at least 1"]


def test_expectation_over_the_engine_becomes_that_over_the_policy():
    # Two tokens, policy 0.6 and 0.4, engine 0.5 and 0.5, advantages 1 and -1. Over the policy, the gradient with
    # respect to log pi_0 of -E[rho A] is -0.6, to log pi_1 +0.4; each token, seen with the engine's probability 0.5,
    # has weight 0.6 / 0.5 and 0.4 / 0.5.
    policy, engine = torch.tensor([[0.6], [0.4]]).log(), torch.tensor([[0.5], [0.5]]).log()
    weights = TruncatedImportance()(policy - engine).weights
    batch = rollout_batch([1.0, -1.0], [1, 1], policy)
    log_probs = policy.clone().requires_grad_()
    policy_loss(batch, log_probs, 0.5 * weights, Clipped()).loss.backward()
    assert log_probs.grad.flatten().tolist() == pytest.approx([-0.6, 0.4], abs=1e-6)
