"""Random numbers that are a pure function of seed and keys."""

import pytest
import torch

from stapo_lightning.randomness import hash_keys, uniform

DRAWS = 100_000
KEYS = torch.arange(DRAWS)


def _chi_square(counts):
    """sum (observed - expected)^2 / expected for cells of equal probability."""
    expected = counts.sum() / counts.numel()
    return float(((counts - expected) ** 2 / expected).sum())


def _reference(seed, *keys):
    """The hash in Python integers: SplitMix64's finaliser over seed and keys."""
    bits = (1 << 64) - 1

    def mix(x):
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & bits
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & bits
        return x ^ (x >> 31)

    state = (seed * 0x9E3779B97F4A7C15 + 1) & bits
    for key in keys:
        state = mix((state * 0x94D049BB133111EB + (key + 1) * 0x9E3779B97F4A7C15) & bits)
    return mix(state)


def test_pinned_values():
    # A change here changes every sampled completion of every recorded run.
    assert hash_keys(0, torch.tensor(0)).item() == -2096887012549359270
    assert hash_keys(1, torch.tensor(2), torch.tensor(5)).item() == 3171363673676284616
    assert uniform(0, torch.tensor([0, 1])).tolist() == [0.8863275272768673, 0.820251050633626]


@pytest.mark.parametrize(
    ("seed", "keys"), [(0, (0,)), (42, (7, 11)), (-1, (-5, 3, 2**62)), (2**63 + 9, (2**63 - 1,)), (10**30, (0, 0))]
)
def test_int64_arithmetic_is_that_of_unsigned_integers(seed, keys):
    value = _reference(seed, *keys)
    assert hash_keys(seed, *map(torch.tensor, keys)).item() % 2**64 == value
    assert uniform(seed, *map(torch.tensor, keys)).item() == (value >> 11) / 2**53


def test_a_number_does_not_depend_on_what_is_drawn_beside_it():
    together = uniform(3, KEYS[:100], torch.tensor(4))
    alone = torch.stack([uniform(3, key, torch.tensor(4)) for key in KEYS[:100]])
    assert torch.equal(together, alone)
    order = torch.randperm(100, generator=torch.Generator().manual_seed(0))
    assert torch.equal(uniform(3, KEYS[:100][order], torch.tensor(4)), together[order])


def test_keys_are_broadcast():
    rows, columns = torch.arange(3)[:, None], torch.arange(4)
    found = uniform(1, rows, columns)
    assert found.shape == (3, 4) and found.dtype == torch.float64
    assert found[2, 3] == uniform(1, torch.tensor(2), torch.tensor(3))
    assert found.unique().numel() == 12


def test_seed_and_the_order_of_keys_matter():
    one, two = torch.tensor(1), torch.tensor(2)
    values = {float(v) for v in (uniform(0, one, two), uniform(0, two, one), uniform(1, one, two), uniform(0, one))}
    assert len(values) == 4


def test_uniform():
    draws = uniform(0, KEYS)
    assert draws.min() >= 0 and draws.max() < 1
    # Mean 1/2 with std sqrt(1 / 12 / n) = 9.1e-4; variance 1/12 with std sqrt(1 / 180 / n) = 2.4e-4. Four of them each.
    assert draws.mean().item() == pytest.approx(0.5, abs=3.7e-3)
    assert draws.var().item() == pytest.approx(1 / 12, abs=9.5e-4)
    # Chi-square with 99 degrees of freedom: 148.2 is passed once in a thousand.
    assert _chi_square(torch.histc(draws, 100, 0.0, 1.0)) < 148.2


def test_all_53_bits_are_random():
    bits = ((uniform(5, KEYS) * 2**53).long()[:, None] >> torch.arange(53)) & 1
    # Each bit's mean has std 0.5 / sqrt(n) = 1.6e-3; four of them.
    assert (bits.double().mean(0) - 0.5).abs().max() < 6.4e-3


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (uniform(0, KEYS), uniform(0, KEYS + 1)),  # neighbouring completions
        (uniform(0, torch.tensor(9), KEYS), uniform(0, torch.tensor(9), KEYS + 1)),  # neighbouring tokens
        (uniform(0, KEYS, torch.tensor(9)), uniform(0, KEYS, torch.tensor(10))),  # the same token, the next step
        (uniform(0, KEYS), uniform(1, KEYS)),  # neighbouring seeds
        (uniform(0, KEYS, KEYS + 1), uniform(0, KEYS + 1, KEYS)),  # keys the other way round
    ],
)
def test_neighbours_are_independent(first, second):
    # The correlation of independent draws has std 1 / sqrt(n) = 3.2e-3.
    assert abs(torch.corrcoef(torch.stack([first, second]))[0, 1].item()) < 4 * 3.2e-3
    # Pairs in 10 x 10 cells: 99 degrees of freedom, as above.
    cells = (first * 10).long() * 10 + (second * 10).long()
    assert _chi_square(torch.bincount(cells, minlength=100).double()) < 148.2


def test_no_collisions():
    # A million distinct keys and steps: 64 bits collide with probability 3e-8.
    hashes = hash_keys(0, torch.arange(1000)[:, None], torch.arange(1000))
    assert hashes.unique().numel() == 1_000_000


def test_one_bit_of_a_key_moves_half_of_the_bits():
    keys = KEYS[:2000]
    for bit in (0, 1, 17, 40, 63):
        flip = torch.tensor(1 << bit if bit < 63 else -(1 << 63))
        changed = (hash_keys(0, keys) ^ hash_keys(0, keys ^ flip))[:, None] >> torch.arange(64) & 1
        # 2000 x 64 bits: std of the mean 1.4e-3.
        assert changed.double().mean().item() == pytest.approx(0.5, abs=5.6e-3)
