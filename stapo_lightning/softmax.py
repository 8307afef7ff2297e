"""Sums over the vocabulary of a softmax, taken part by part, and the gradient of what they give.

z are logits divided by the temperature. The sums are relative to the largest z, so neither huge logits nor -inf make
them overflow, cancel or turn into nan.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# exp of it is 0 in float64 too, so nothing is lost; and 0 * -inf would be nan.
_FLOOR = -1000.0


@dataclass
class Tally:
    """What one pass over (a part of) the vocabulary leaves of each row. All [M], float32 or wider.

    Attributes:
        peak: max_v z_v, finite even where every z_v of the part is -inf.
        total: sum_v exp(z_v - peak).
        moment: sum_v exp(z_v - peak) (z_v - peak), <= 0.
        square: sum_v exp(2 (z_v - peak)).

    """

    peak: Tensor
    total: Tensor
    moment: Tensor
    square: Tensor

    def log_probs(self, z: Tensor) -> Tensor:
        """[M] log p of the tokens whose z [M] are given; -inf where z is."""
        return z - self.peak - self.total.log()

    def entropy(self) -> Tensor:
        """[M] -sum_v p_v log p_v, nats. Both terms of it are >= 0: nothing cancels in a nearly certain row."""
        return self.total.log() - self.moment / self.total

    def collision(self) -> Tensor:
        """[M] sum_v p_v^2."""
        return self.square / self.total.square()


def tally_(z: Tensor) -> Tally:
    """The sums over z [M, C]; z itself is overwritten."""
    peak = z.amax(-1).clamp_min_(torch.finfo(z.dtype).min)
    z.sub_(peak[:, None]).clamp_min_(_FLOOR)
    weights = z.exp()
    # No dot product for the moment: on a GPU it may be rounded to TF32.
    return Tally(
        peak=peak,
        total=weights.sum(-1),
        moment=z.mul_(weights).sum(-1),
        square=torch.linalg.vector_norm(weights, dim=-1).square(),
    )


def empty_tally(zeros: Tensor) -> Tally:
    """The sums of M = len(zeros) rows over nothing."""
    return Tally(torch.full_like(zeros, torch.finfo(zeros.dtype).min), zeros, zeros, zeros)


def merge(left: Tally, right: Tally) -> Tally:
    """The sums over the union of two disjoint parts of the vocabulary."""
    peak = torch.maximum(left.peak, right.peak)
    left, right = _moved(left, peak), _moved(right, peak)
    return Tally(peak, left.total + right.total, left.moment + right.moment, left.square + right.square)


def _moved(tally: Tally, peak: Tensor) -> Tally:
    """The same sums relative to another, larger peak."""
    shift = tally.peak - peak
    weight = shift.exp()
    # exp(z - peak') (z - peak') = exp(shift) exp(z - peak) (z - peak + shift)
    moment = weight * (tally.moment + shift * tally.total)
    return Tally(peak, weight * tally.total, moment, weight.square() * tally.square)


def gradient_(z: Tensor, tally: Tally, by_log_prob: Tensor | None, by_entropy: Tensor | None) -> Tensor:
    """Turns z [M, C] into the gradient of g log p + g_H H by it, for a token that is not among these C columns.

    In the column of the token itself g has to be added.

    Args:
        z: [M, C], any part of the vocabulary.
        tally: Of the whole vocabulary.
        by_log_prob: g [M], the gradient by log p; None where there is none.
        by_entropy: g_H [M], the gradient by the entropy H; None where there is none.

    """
    if by_log_prob is None:
        by_log_prob = torch.zeros_like(tally.total)
    if by_entropy is None:
        return _log_prob_gradient_(z, tally, by_log_prob)
    return _scores_gradient_(z, tally, by_log_prob, by_entropy)


def _log_prob_gradient_(z: Tensor, tally: Tally, by_log_prob: Tensor) -> Tensor:
    """-g p."""
    return z.sub_(tally.peak[:, None]).exp_().mul_((-by_log_prob / tally.total)[:, None])


def _scores_gradient_(z: Tensor, tally: Tally, by_log_prob: Tensor, by_entropy: Tensor) -> Tensor:
    """-g p - g_H p (log p + H), where log p + H = z - peak - moment / total."""
    z.sub_(tally.peak[:, None]).clamp_min_(_FLOOR)
    constant = by_entropy * tally.moment / tally.total - by_log_prob
    factor = torch.addcmul((constant / tally.total)[:, None], (-by_entropy / tally.total)[:, None], z)
    return z.exp_().mul_(factor)
