"""Paired differences and their bootstrap intervals."""

import numpy as np
import pytest

from stapo_lightning.study.intervals import bootstrap, paired_difference


def test_differences_are_paired_by_seed():
    # Seeds 1 and 3 are common: 0.5 - 0.25 and 0.75 - 0.25, mean 0.375.
    found = paired_difference({1: 0.5, 2: 0.9, 3: 0.75}, {1: 0.25, 3: 0.25, 4: 0.0})
    assert (found.mean, found.seeds) == (0.375, 2)
    # The four resamples' means are 0.25, 0.375, 0.375, 0.5: place 0.025 * 3 = 0.075 is 0.25 + 0.075 * 0.125.
    assert (found.low, found.high) == pytest.approx((0.259375, 0.490625))
    assert found.excludes_zero


def test_without_a_common_seed_there_is_no_difference():
    assert paired_difference({1: 0.5}, {2: 0.5}) is None


def test_one_seed_has_no_width():
    found = paired_difference({1: 0.5}, {1: 0.25})
    assert (found.low, found.mean, found.high) == (0.25, 0.25, 0.25)


def test_zero_at_an_end_is_not_left_out():
    assert not bootstrap(np.zeros(5)).excludes_zero
    assert not bootstrap(np.array([-1.0, 1.0, 0.5])).excludes_zero
    assert bootstrap(np.array([-1.0, -1.5, -0.5])).excludes_zero


def test_every_resample_of_few_seeds_counts_once():
    # Of 0, 0, 3: the sum is 3k with binomial k of 3 at 1/3. 27 means: 8 at 0, 12 at 1, 6 at 2, 1 at 3.
    # Sorted, place 0.975 * 26 = 25.35 lies between the last 2 (place 25) and 3 (place 26): 2.35.
    found = bootstrap(np.array([0.0, 0.0, 3.0]))
    assert (found.mean, found.low, found.high) == pytest.approx((1.0, 0.0, 2.35))


def test_many_seeds_are_resampled_alike_each_time():
    values = np.arange(10.0)
    first, second = bootstrap(values), bootstrap(values)
    assert first == second
    # The bootstrap's standard error of the mean is 2.872 / sqrt(10) = 0.908; 1.96 of it is 1.78.
    assert (first.low, first.high) == pytest.approx((4.5 - 1.78, 4.5 + 1.78), abs=0.1)


def test_how_often_an_interval_of_five_seeds_holds_the_truth():
    # The docstring's number: normal values, true mean 0. Standard error of the count: sqrt(0.84 * 0.16 / 2000) = 0.008.
    draws = np.random.default_rng(1).normal(size=(2000, 5))
    held = np.mean([not bootstrap(values).excludes_zero for values in draws])
    assert held == pytest.approx(0.84, abs=0.025)
