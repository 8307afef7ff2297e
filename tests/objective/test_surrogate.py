"""The per-token surrogate: values, gradients, flags."""

import math

import pytest
import torch

from stapo_lightning.objective import Clipped, DualClipped


def _evaluate(surrogate, log_ratio, advantage, dtype=torch.float64):
    """loss, gradient with respect to the log-ratio, clipped_low, clipped_high of one token."""
    log_ratio = torch.tensor([[log_ratio]], dtype=dtype, requires_grad=True)
    output = surrogate(log_ratio, torch.tensor([[advantage]], dtype=dtype))
    (gradient,) = torch.autograd.grad(output.loss.sum(), log_ratio)
    assert output.loss.dtype == dtype and not output.ratio.requires_grad
    return output.loss.item(), gradient.item(), bool(output.clipped_low), bool(output.clipped_high)


# l = -min(rho A, clip(rho, 0.8, 1.28) A); dl / d log rho = -rho A, or 0 where flat.
CLIP_HIGHER = [
    # rho, A, loss, gradient, low, high
    (1.5, 1.0, -1.28, 0.0, False, True),
    (1.25, 1.0, -1.25, -1.25, False, False),
    (0.5, 1.0, -0.5, -0.5, False, False),
    (1.5, -1.0, 1.5, 1.5, False, False),
    (0.5, -1.0, 0.8, 0.0, True, False),
    (1.5, 2.5, -3.2, 0.0, False, True),
    (0.5, -2.5, 2.0, 0.0, True, False),
    (0.9, -2.0, 1.8, 1.8, False, False),
    (1.5, 0.0, 0.0, 0.0, False, False),
    (0.5, 0.0, 0.0, 0.0, False, False),
]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
@pytest.mark.parametrize("surrogate", [Clipped(), DualClipped()])
@pytest.mark.parametrize(("ratio", "advantage", "loss", "gradient", "low", "high"), CLIP_HIGHER)
def test_clip_higher(surrogate, ratio, advantage, loss, gradient, low, high, dtype, tolerance):
    found = _evaluate(surrogate, math.log(ratio), advantage, dtype)
    assert found[:2] == pytest.approx((loss, gradient), abs=tolerance)
    assert found[2:] == (low, high)


def test_clipped_leaves_large_ratios_of_bad_tokens_alone():
    # (5, -1): min(-5, 1.28 * -1) = -5, and no dual clip that nobody asked for.
    assert _evaluate(Clipped(), math.log(5), -1.0) == pytest.approx((5.0, 5.0, False, False), abs=1e-12)


@pytest.mark.parametrize(
    ("dual_clip", "ratio", "advantage", "expected"),
    [
        (3.0, 5.0, -1.0, (3.0, 0.0, False, True)),
        (3.0, 5.0, -2.0, (6.0, 0.0, False, True)),
        (3.0, 2.5, -1.0, (2.5, 2.5, False, False)),
        (10.0, 5.0, -1.0, (5.0, 5.0, False, False)),
        (10.0, 12.0, -1.0, (10.0, 0.0, False, True)),
        (3.0, 5.0, 1.0, (-1.28, 0.0, False, True)),  # the clip-higher bound, not the dual one
        (3.0, 0.5, -1.0, (0.8, 0.0, True, False)),
    ],
)
def test_dual_clip(dual_clip, ratio, advantage, expected):
    found = _evaluate(DualClipped(dual_clip=dual_clip), math.log(ratio), advantage)
    assert found == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_the_edge_of_the_clip_range_is_not_clipped(advantage):
    # On policy rho is exactly 1; with a range of [1, 1] the token still trains.
    found = _evaluate(Clipped(clip_low=0.0, clip_high=0.0), 0.0, advantage)
    assert found == (-advantage, -advantage, False, False)


def test_knobs_bound_their_own_side():
    # clip_low 0.5: floor 0.5; clip_high 0.1: ceiling 1.1.
    surrogate = Clipped(clip_low=0.5, clip_high=0.1)
    assert _evaluate(surrogate, math.log(1.2), 1.0)[0] == pytest.approx(-1.1, abs=1e-12)
    assert _evaluate(surrogate, math.log(0.6), -1.0)[0] == pytest.approx(0.6, abs=1e-12)
    assert _evaluate(surrogate, math.log(0.4), -1.0)[0] == pytest.approx(0.5, abs=1e-12)


def test_every_token_of_a_row_has_the_rows_advantage():
    # Row 0 (A = 1): ratios 2 -> 1.28, 1 -> 1. Row 1 (A = -1): 2 -> -2, 0.5 -> -0.8.
    log_ratio = torch.tensor([[2.0, 1.0], [2.0, 0.5]], dtype=torch.float64).log()
    output = Clipped()(log_ratio, torch.tensor([[1.0], [-1.0]], dtype=torch.float64))
    expected = torch.tensor([[-1.28, -1.0], [2.0, 0.8]], dtype=torch.float64)
    torch.testing.assert_close(output.loss, expected, atol=1e-12, rtol=0)
    torch.testing.assert_close(output.ratio, log_ratio.exp(), atol=1e-12, rtol=0)


# exp(200) overflows float32 (and 0 * inf in backward is nan): where the surrogate is flat, it must stay finite.
@pytest.mark.parametrize("surrogate", [Clipped(), DualClipped()])
@pytest.mark.parametrize(
    ("log_ratio", "advantage", "loss"), [(200.0, 1.0, -1.28), (-200.0, -1.0, 0.8), (-200.0, 1.0, 0.0)]
)
def test_overflow_where_flat(surrogate, log_ratio, advantage, loss):
    found = _evaluate(surrogate, log_ratio, advantage, torch.float32)
    assert found[:2] == pytest.approx((loss, 0.0), abs=1e-6)


@pytest.mark.parametrize("surrogate", [Clipped(), DualClipped()])
@pytest.mark.parametrize("log_ratio", [200.0, -200.0])
def test_overflow_without_advantage(surrogate, log_ratio):
    # A = 0 (every row of a zero-variance group): rho A is 0 whatever rho, not inf * 0.
    assert _evaluate(surrogate, log_ratio, 0.0, torch.float32)[:2] == (0.0, 0.0)


def test_overflow_beyond_the_dual_clip():
    found = _evaluate(DualClipped(dual_clip=10.0), 200.0, -1.0, torch.float32)
    assert found == (10.0, 0.0, False, True)
