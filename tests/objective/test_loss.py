"""The loss of one micro-batch: masks, KL, measurements."""

import math

import pytest
import torch

from stapo_lightning.objective import K1, K2, K3, Clipped, policy_loss
from tests.builders import rollout_batch

NAN, INF = float("nan"), float("inf")


def _row(values):
    return torch.tensor([values], dtype=torch.float32)


def _loss_and_gradient(batch, log_probs, weights, **options):
    log_probs = log_probs.clone().requires_grad_()
    output = policy_loss(batch, log_probs, weights, Clipped(), **options)
    output.loss.backward()
    return output, log_probs.grad


@pytest.mark.parametrize("length", [1, 2], ids=["padding", "silenced"])
@pytest.mark.parametrize(
    ("log_prob", "old"), [(0.0, -200.0), (-200.0, 0.0), (-INF, 0.0), (0.0, -INF), (NAN, 0.0), (0.0, NAN)]
)
def test_nothing_of_a_token_without_weight_reaches_loss_or_gradient(length, log_prob, old):
    # Token 0 on policy with A = 1: loss -1, gradient -1. Token 1 is left out, whatever stands there.
    batch = rollout_batch([1.0], [length], _row([-1.0, old]))
    output, gradient = _loss_and_gradient(batch, _row([-1.0, log_prob]), _row([1.0, 0.0]))
    assert output.loss.item() == -1.0
    assert gradient.tolist() == [[-1.0, 0.0]]


def test_ratio_is_one_at_padding():
    batch = rollout_batch([1.0], [1], _row([-1.0, -200.0]))
    output, _ = _loss_and_gradient(batch, _row([-1.0, 0.0]), _row([1.0, 0.0]))
    assert output.ratio.tolist() == [[1.0, 1.0]]
    assert output.clipped_high.tolist() == [[False, False]]


def test_silenced_tokens_are_still_measured():
    # Ratio 2 at a silenced token of positive advantage: it would have been clipped, and the record says so.
    batch = rollout_batch([1.0, -1.0], [2, 2], torch.zeros(2, 2))
    log_probs = torch.tensor([[0.0, math.log(2)], [0.0, -math.log(2)]])
    output, gradient = _loss_and_gradient(batch, log_probs, torch.tensor([[0.5, 0.0], [0.5, 0.0]]))
    torch.testing.assert_close(output.ratio, torch.tensor([[1.0, 2.0], [1.0, 0.5]]))
    assert output.clipped_high.tolist() == [[False, True], [False, False]]
    assert output.clipped_low.tolist() == [[False, False], [False, True]]
    assert output.loss.item() == 0.0  # 0.5 * -1 + 0.5 * 1
    assert gradient.tolist() == [[-0.5, 0.0], [0.5, 0.0]]


def test_weights_multiply_each_tokens_loss():
    # A = 2, ratios 1, 0.5: 0.25 * -2 + 0.75 * -1 = -1.25; gradient -w rho A = -0.5, -0.75.
    batch = rollout_batch([2.0], [2], _row([-1.0, -1.0]))
    output, gradient = _loss_and_gradient(batch, _row([-1.0, -1.0 - math.log(2)]), _row([0.25, 0.75]))
    assert output.loss.item() == pytest.approx(-1.25, abs=1e-6)
    assert gradient[0].tolist() == pytest.approx([-0.5, -0.75], abs=1e-6)


# log pi_theta - log pi_ref is 1 at token 0 and -0.5 at token 1.
KL_INPUTS = (torch.tensor([[-1.0, -1.0]]).double(), torch.tensor([[-2.0, -0.5]]).double())


@pytest.mark.parametrize(
    ("estimator", "values", "gradients"),
    [
        (K1(), [1.0, -0.5], [1.0, 1.0]),
        (K2(), [0.5, 0.125], [1.0, -0.5]),
        # d = -1: e^-1 + 1 - 1 = 0.367879, 1 - e^-1 = 0.632121. d = 0.5: e^0.5 - 1.5 = 0.148721, 1 - e^0.5 = -0.648721.
        (K3(), [0.3678794412, 0.1487212707], [0.6321205588, -0.6487212707]),
    ],
)
def test_kl_estimators(estimator, values, gradients):
    log_probs, reference = KL_INPUTS
    log_probs = log_probs.clone().requires_grad_()
    kl = estimator(log_probs, reference)
    assert kl[0].tolist() == pytest.approx(values, abs=1e-9)
    assert torch.autograd.grad(kl.sum(), log_probs)[0][0].tolist() == pytest.approx(gradients, abs=1e-9)


@pytest.mark.parametrize("estimator", [K1(), K2(), K3()])
def test_kl_of_equal_policies_is_zero(estimator):
    assert estimator(KL_INPUTS[0], KL_INPUTS[0]).tolist() == [[0.0, 0.0]]


def test_k3_keeps_small_differences():
    # d = 1e-5: k3 = d^2 / 2 + d^3 / 6 + d^4 / 24 = 5.0000166667e-11; exp(d) - 1 - d would be right to five digits only.
    k3 = K3()(torch.zeros(1, 1).double(), torch.full((1, 1), 1e-5, dtype=torch.float64)).item()
    assert k3 == pytest.approx(5.00001666670833e-11, rel=1e-9, abs=0)


def test_kl_term_of_the_loss():
    # A = 1 on policy, weights 0.5: 0.5 * (-1 + 0.1 * 0.367879) + 0.5 * (-1 + 0.1 * 0.148721) = -0.974170.
    # Gradient 0.5 * (-1 + 0.1 * 0.632121) = -0.468394 and 0.5 * (-1 + 0.1 * -0.648721) = -0.532436.
    log_probs, reference = KL_INPUTS
    batch = rollout_batch([1.0], [2], log_probs)
    weights = torch.full((1, 2), 0.5).double()
    output, gradient = _loss_and_gradient(batch, log_probs, weights, ref_log_probs=reference, kl=K3(), kl_coef=0.1)
    assert output.loss.item() == pytest.approx(-0.9741699644, abs=1e-9)
    assert gradient[0].tolist() == pytest.approx([-0.4683939721, -0.5324360635], abs=1e-9)
    assert output.kl[0].tolist() == pytest.approx([0.3678794412, 0.1487212707], abs=1e-9)
    assert not output.kl.requires_grad


def test_kl_with_coefficient_zero_is_measured_only():
    log_probs, reference = KL_INPUTS
    batch = rollout_batch([1.0], [2], log_probs)
    weights = torch.full((1, 2), 0.5).double()
    output, gradient = _loss_and_gradient(batch, log_probs, weights, ref_log_probs=reference, kl=K2(), kl_coef=0.0)
    assert output.kl[0].tolist() == [0.5, 0.125]
    assert output.loss.item() == -1.0
    assert gradient.tolist() == [[-0.5, -0.5]]


def test_no_reference_no_kl():
    batch = rollout_batch([1.0], [1], _row([-1.0]))
    assert _loss_and_gradient(batch, _row([-1.0]), _row([1.0]), kl=K3(), kl_coef=1.0)[0].kl is None


@pytest.mark.parametrize("length", [1, 2], ids=["padding", "silenced"])
@pytest.mark.parametrize("estimator", [K1(), K2(), K3()])
@pytest.mark.parametrize("reference", [300.0, -300.0, NAN])
def test_kl_of_a_token_without_weight_reaches_nothing(length, estimator, reference):
    # exp(300) overflows. Token 0: log pi_theta equals the reference, so its KL and its KL gradient (but K1's, 1) are 0.
    batch = rollout_batch([1.0], [length], _row([-1.0, 0.0]))
    output, gradient = _loss_and_gradient(
        batch, _row([-1.0, 0.0]), _row([1.0, 0.0]), ref_log_probs=_row([-1.0, reference]), kl=estimator, kl_coef=0.5
    )
    assert output.loss.item() == -1.0
    assert gradient.tolist() == [[-0.5 if isinstance(estimator, K1) else -1.0, 0.0]]
    if length == 1:
        assert output.kl.tolist() == [[0.0, 0.0]]
