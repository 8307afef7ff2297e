"""Learning-rate factors."""

import itertools

import pytest

from stapo_lightning.schedule import ConstantWithWarmup, CosineWithWarmup


def test_constant_with_the_papers_warm_up():
    schedule = ConstantWithWarmup(warmup_updates=10)
    found = [schedule(n) for n in range(12)]
    assert found == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.0, 1.0], abs=1e-12)
    assert schedule(10_000) == 1.0


@pytest.mark.parametrize("warmup", [0, 1])
def test_constant_without_warm_up(warmup):
    assert [ConstantWithWarmup(warmup)(n) for n in range(3)] == [1.0, 1.0, 1.0]


def test_cosine():
    # Rise to 1 at update 9, then 0.1 + 0.9 (1 + cos(pi (n - 10) / 100)) / 2: at n = 35 cos(pi / 4) = 0.707107.
    schedule = CosineWithWarmup(total_updates=110, warmup_updates=10, final=0.1)
    found = [schedule(n) for n in (0, 4, 9, 10, 35, 60, 110, 111, 10_000)]
    expected = [0.1, 0.5, 1.0, 1.0, 0.1 + 0.45 * 1.70710678, 0.55, 0.1, 0.1, 0.1]
    assert found == pytest.approx(expected, abs=1e-8)


def test_cosine_never_rises_after_the_warm_up():
    values = [CosineWithWarmup(50, 5)(n) for n in range(4, 60)]
    assert all(later <= earlier for earlier, later in itertools.pairwise(values))
    assert values[-1] == 0.0


def test_cosine_without_warm_up():
    schedule = CosineWithWarmup(total_updates=4, warmup_updates=0)
    assert [schedule(n) for n in range(5)] == pytest.approx([1.0, 0.853553391, 0.5, 0.146446609, 0.0], abs=1e-9)


def test_cosine_of_a_run_shorter_than_its_warm_up():
    assert [CosineWithWarmup(2, warmup_updates=4)(n) for n in range(4)] == [0.25, 0.5, 0.75, 1.0]
