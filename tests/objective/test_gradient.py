"""The closed form of a token's logit gradient against autograd through the real loss."""

import math

import pytest
import torch

from stapo_lightning.objective import Clipped, logit_gradient_weight, policy_loss, squared_logit_gradient_norm
from tests.builders import rollout_batch, score_dense

VOCABULARY = 7


def _case(temperature=1.0, scale=2.0):
    """Random logits [4, 6, 7] with old ones near them: (batch, logits, scores, output of the loss with weights 1)."""
    generator = torch.Generator().manual_seed(3)
    shape = (4, 6, VOCABULARY)
    logits = scale * torch.randn(shape, dtype=torch.float64, generator=generator)
    old_logits = logits + torch.randn(shape, dtype=torch.float64, generator=generator)
    tokens = torch.randint(VOCABULARY, shape[:2], generator=generator)
    lengths = torch.tensor([6, 3, 6, 5])
    old = score_dense(old_logits, tokens, lengths, temperature).log_probs
    batch = rollout_batch(torch.tensor([1.5, -0.5, -2.0, 0.7], dtype=torch.float64), lengths, old)
    logits.requires_grad_()
    scores = score_dense(logits, tokens, lengths, temperature)
    output = policy_loss(batch, scores.log_probs, batch.completion_mask.double(), Clipped())
    return batch, logits, scores, output


def _closed_form(batch, scores, output):
    clipped = output.clipped_low | output.clipped_high
    weight = logit_gradient_weight(output.ratio, batch.advantages[:, None], clipped)
    return weight, squared_logit_gradient_norm(weight, scores.detach().probs, scores.collision)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_closed_form_is_autograds(temperature):
    batch, logits, scores, output = _case(temperature)
    # The closed form is the gradient in logits / temperature, and d / d(z / T) = T d / dz.
    gradient = temperature * torch.autograd.grad(output.loss, logits)[0]
    norm = gradient.square().sum(-1)
    _, expected = _closed_form(batch, scores, output)
    mask = batch.completion_mask
    torch.testing.assert_close(norm[mask], expected[mask], atol=1e-12, rtol=1e-9)
    assert torch.equal(norm[~mask], torch.zeros_like(norm[~mask]))


def test_clipped_tokens_have_no_gradient():
    batch, logits, scores, output = _case()
    gradient = torch.autograd.grad(output.loss, logits)[0]
    _, expected = _closed_form(batch, scores, output)
    assert output.clipped_low.any() and output.clipped_high.any()
    for clipped in (output.clipped_low, output.clipped_high):
        assert torch.equal(gradient[clipped], torch.zeros_like(gradient[clipped]))
        assert torch.equal(expected[clipped], torch.zeros_like(expected[clipped]))
    trains = batch.completion_mask & ~output.clipped_low & ~output.clipped_high
    assert (expected[trains] > 0).all()


@pytest.mark.parametrize("scale", [0.1, 1.0, 5.0])
def test_bounds(scale):
    # |w|^2 (1 - 2 pi + exp(-H)) <= norm^2 <= |w|^2 (2 - 2 pi - C_V H^2), C_V = (V - 1) / (V ln(V)^2).
    batch, _, scores, output = _case(scale=scale)
    weight, norm = _closed_form(batch, scores, output)
    mask = batch.completion_mask
    weight, norm, scores = weight[mask], norm[mask], (scores.detach().probs[mask], scores.entropy[mask])
    probs, entropy = scores
    constant = (VOCABULARY - 1) / (VOCABULARY * math.log(VOCABULARY) ** 2)
    assert (weight.square() * (1 - 2 * probs + torch.exp(-entropy)) <= norm + 1e-12).all()
    assert (norm <= weight.square() * (2 - 2 * probs - constant * entropy.square()) + 1e-12).all()


def test_largest_where_probability_and_entropy_are_low():
    peaked = torch.full((1000,), -torch.inf, dtype=torch.float64)
    peaked[:4] = torch.tensor([10.0, 0.0, 0.0, 0.0])
    logits = torch.stack([peaked, torch.zeros(1000, dtype=torch.float64), peaked])[None]
    scores = score_dense(logits, torch.tensor([[1, 1, 0]]), torch.tensor([3]))
    norm = squared_logit_gradient_norm(torch.ones(1, 3), scores.probs, scores.collision)[0]
    # Z = e^10 + 3, collision = (e^20 + 3) / Z^2 = 0.999728; low/low: 1 - 2 / Z + 0.999728 = 1.999637.
    # Uniform: 1 - 0.002 + 0.001 = 0.999. The likely token itself: 1 - 2 * 0.999864 + 0.999728 = 2.47e-8.
    assert norm.tolist() == pytest.approx([1.999637, 0.999, 2.4726e-8], abs=1e-6)
    assert norm[2].item() == pytest.approx(2.4726e-8, rel=1e-3)  # (3^2 + 3) / Z^2


def test_weight_of_a_token():
    # rho A: 2 * 1.5 = 3, clipped 0; 0.5 * -1 = -0.5; and 0 without advantage, even where the ratio overflows.
    ratio = torch.tensor([[2.0, 2.0], [0.5, 0.5], [1.0, torch.inf]])
    clipped = torch.tensor([[False, True], [False, False], [False, False]])
    weight = logit_gradient_weight(ratio, torch.tensor([[1.5], [-1.0], [0.0]]), clipped)
    assert weight.tolist() == [[3.0, 0.0], [-0.5, -0.5], [0.0, 0.0]]
