"""Log-probs, entropy and collision straight from hidden states and a linear output head.

The vocabulary is cut into parts, each with all tokens: every row of the head's gradient is then written once, and there
is no second copy of it to add up. In backward the logits of each part are computed again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from stapo_lightning.softmax import Tally, empty_tally, gradient_, merge, tally_


@dataclass(frozen=True)
class LinearHead:
    """Logits = curve(scale (hidden weight^T + bias)), with curve(x) = cap tanh(x / cap), or x without a cap.

    Attributes:
        weight: [V, H]; may be tied to the embedding, or frozen.
        bias: [V] or None.
        scale: Factor of the logits before the cap, not 0.
        cap: Soft bound of the logits, > 0, or None.

    """

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    cap: float | None = None

    def __call__(self, hidden: Tensor) -> Tensor:
        """[m, H] -> [m, V] logits, whole."""
        out = torch.nn.functional.linear(hidden, self.weight, self.bias)
        if self.scale != 1.0:
            out = out * self.scale
        return out if self.cap is None else torch.tanh(out / self.cap) * self.cap


def score_linear(
    hidden: Tensor, tokens: Tensor, head: LinearHead, temperature: float, columns: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`score_logits(head(hidden), ...)` without its logits: at most [M, columns] of them exist at a time.

    Products are taken in the precision of autocast or of the weights, all else in float32 or wider.

    Args:
        hidden: [M, H] hidden state from which each token was predicted.
        tokens: [M] int64.
        head: The output head.
        temperature: > 0.
        columns: Tokens of the vocabulary in one part, > 0.

    Returns:
        log_probs [M] and entropy [M] (nats) with a graph; collision [M] without one.

    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else head.weight.dtype
    curve = _Curve(head.scale / temperature) if head.cap is None else _Capped(head.scale, head.cap, temperature)
    return _LinearScores.apply(hidden, head.weight, head.bias, tokens, curve, dtype, columns)


class _Curve:
    """z = gain x, for x = hidden weight^T + bias."""

    def __init__(self, gain: float) -> None:
        self.gain = gain  # applied within the product
        self.slope = gain  # dz / dx, up to what `pull_back_` multiplies

    def values(self, scaled: Tensor) -> Tensor:
        """What z is where `scaled` is gain x."""
        return scaled

    def pull_back_(self, gradient: Tensor, scaled: Tensor) -> Tensor:
        """The gradient by x of one by z that is multiplied by `slope` already; `scaled` as `values` left it."""
        return gradient


class _Capped(_Curve):
    """z = cap / temperature tanh(scale / cap x)."""

    def __init__(self, scale: float, cap: float, temperature: float) -> None:
        self.gain = scale / cap
        self.ceiling = cap / temperature
        self.slope = self.gain * self.ceiling

    def values(self, scaled: Tensor) -> Tensor:
        return scaled.tanh_() * self.ceiling

    def pull_back_(self, gradient: Tensor, scaled: Tensor) -> Tensor:
        return gradient.mul_(scaled.square_().neg_().add_(1.0))  # `values` left the tanh there


class _LinearScores(torch.autograd.Function):
    # The weights are inputs like any other: hooks on them, such as DDP's, see one gradient at the usual time.

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tokens: Tensor,
        curve: _Curve,
        dtype: torch.dtype,
        columns: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        logits = _Logits(hidden.to(dtype), weight, bias, curve, columns)
        z_of_token = logits.new_zeros(len(tokens))
        tally = empty_tally(z_of_token)
        for part in logits:
            place, inside = part.find(tokens)
            z_of_token = torch.where(inside, part.z.gather(1, place[:, None])[:, 0], z_of_token)
            tally = merge(tally, tally_(part.z))
        ctx.save_for_backward(hidden, weight, bias, tokens, tally.peak, tally.total, tally.moment, tally.square)
        ctx.curve, ctx.dtype, ctx.columns = curve, dtype, columns
        ctx.set_materialize_grads(False)
        collision = tally.collision()
        ctx.mark_non_differentiable(collision)
        return tally.log_probs(z_of_token), tally.entropy(), collision

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_log_prob: Tensor | None, by_entropy: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, tokens, *sums = ctx.saved_tensors
        tally = Tally(*sums)
        narrow = hidden.to(ctx.dtype)
        logits = _Logits(narrow, weight, bias, ctx.curve, ctx.columns)
        for_hidden, for_weight, for_bias = ctx.needs_input_grad[:3]
        d_hidden = logits.new_zeros(*hidden.shape) if for_hidden else None
        d_weight = torch.empty_like(weight) if for_weight else None
        d_bias = torch.empty_like(bias) if for_bias else None
        # The factor of dz / dx that all columns share is taken into [M] numbers instead of [M, columns].
        by_log_prob, by_entropy = (g if g is None else g * ctx.curve.slope for g in (by_log_prob, by_entropy))
        for part in logits:
            gradient = gradient_(part.z, tally, by_log_prob, by_entropy)
            if by_log_prob is not None:
                place, inside = part.find(tokens)
                gradient.scatter_add_(1, place[:, None], torch.where(inside, by_log_prob, 0.0)[:, None])
            gradient = ctx.curve.pull_back_(gradient, part.scaled)
            if d_bias is not None:
                d_bias[part.rows] = gradient.sum(0)
            gradient = gradient.to(ctx.dtype)
            if d_hidden is not None:
                _add_product_(d_hidden, gradient, part.weight)
            if d_weight is not None:
                _set_product_(d_weight[part.rows], gradient.T, narrow)
        d_hidden = None if d_hidden is None else d_hidden.to(hidden.dtype)
        return d_hidden, d_weight, d_bias, None, None, None, None


@dataclass
class _Part:
    """Logits of all tokens for some rows of the head: `scaled` before and `z` after the curve, both [M, C]."""

    rows: slice
    weight: Tensor  # [C, H], in the precision of the products
    scaled: Tensor
    z: Tensor

    def find(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Where each of `tokens` [M] stands among these columns, and [M] bool whether it does."""
        place = tokens - self.rows.start
        last = self.z.shape[1] - 1
        return place.clamp(0, last), (place >= 0) & (place <= last)


class _Logits:
    """The parts of hidden weight^T, one after the other in the same memory."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, curve: _Curve, columns: int) -> None:
        self.hidden = hidden
        self.weight = weight
        self.bias = bias
        self.curve = curve
        self.columns = min(columns, len(weight))
        self.wide = torch.promote_types(hidden.dtype, torch.float32)

    def new_zeros(self, *shape: int) -> Tensor:
        """Zeros in float32 or wider."""
        return self.hidden.new_zeros(shape, dtype=self.wide)

    def __iter__(self) -> Iterator[_Part]:
        memory = self.hidden.new_empty(len(self.hidden) * self.columns, dtype=self.wide)
        for start in range(0, len(self.weight), self.columns):
            rows = slice(start, min(start + self.columns, len(self.weight)))
            width = rows.stop - rows.start
            scaled = memory[: len(self.hidden) * width].view(-1, width)
            weight = self.weight[rows].to(self.hidden.dtype)
            _set_product_(scaled, self.hidden, weight.T, self.curve.gain)
            if self.bias is not None:
                scaled.add_(self.bias[rows], alpha=self.curve.gain)
            yield _Part(rows, weight, scaled, self.curve.values(scaled))


def _set_product_(into: Tensor, left: Tensor, right: Tensor, gain: float = 1.0) -> None:
    """Sets `into` to gain left right; the product in the precision of its factors."""
    if into.dtype == left.dtype:
        into.addmm_(left, right, beta=0.0, alpha=gain)
    else:
        into.copy_(left @ right).mul_(gain)


def _add_product_(into: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds left right to `into`, the sum in the precision of `into`."""
    if into.dtype == left.dtype:
        into.addmm_(left, right)
    else:
        into.add_(left @ right)
