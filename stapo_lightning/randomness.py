"""Random numbers that depend on what they are for, not on when they are drawn.

Each number is a hash of (seed, keys): a completion is sampled alike for every batch composition, number of ranks and
after every resume, and there is no generator state to save.
"""

from __future__ import annotations

import torch
from torch import Tensor

_BITS = 64


def _signed(value: int) -> int:
    value &= (1 << _BITS) - 1
    return value - (1 << _BITS) if value >> (_BITS - 1) else value


# The increments and multipliers of SplitMix64 (Steele, Lea, Flood 2014), as int64.
_GAMMA = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    # Torch shifts int64 arithmetically; the mask takes the sign bits away again.
    return (x >> bits) & ((1 << (_BITS - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def hash_keys(seed: int, *keys: Tensor) -> Tensor:
    """Hashes int64 `keys` (broadcast against each other) with `seed` to int64."""
    state = torch.full((), _signed(seed * 0x9E3779B97F4A7C15 + 1), dtype=torch.int64, device=keys[0].device)
    for key in keys:
        state = _mix(state * _MIX_2 + key * _GAMMA + _GAMMA)
    return _mix(state)


def uniform(seed: int, *keys: Tensor) -> Tensor:
    """Uniform float64 numbers in [0, 1) with 53 random bits, one for each combination of `keys` (int64, broadcast)."""
    return _shift_right(hash_keys(seed, *keys), 11).to(torch.float64) * 2.0**-53
