"""Rewards of a group -> advantages."""

import pytest
import torch

from stapo_lightning.objective import GroupCentered, GroupNormalized, group_statistics

NAN, INF = float("nan"), float("inf")


def _advantages(rewards, group_ids=None, estimator=None, dtype=torch.float64):
    rewards = torch.tensor(rewards, dtype=dtype)
    group_ids = torch.zeros(len(rewards), dtype=torch.int64) if group_ids is None else torch.tensor(group_ids)
    return (estimator or GroupNormalized())(rewards, group_ids)


@pytest.mark.parametrize(
    ("correct", "expected"), [(1, 2.47), (2, 1.62), (3, 1.21), (4, 0.94), (5, 0.72), (6, 0.54), (7, 0.35)]
)
def test_sample_std_of_the_papers_tables(correct, expected):
    # k ones among 8: mean k/8, sample variance k (8 - k) / 56, so A = (1 - k/8) / sqrt(k (8 - k) / 56).
    advantages = _advantages([1.0] * correct + [0.0] * (8 - correct))
    assert advantages[0].item() == pytest.approx(expected, abs=0.005)
    assert advantages[0].item() == pytest.approx((1 - correct / 8) / (correct * (8 - correct) / 56) ** 0.5, abs=1e-4)


def test_one_correct_of_eight():
    # mean 1/8, std sqrt(0.875 / 7) = 0.353553: 0.875 / 0.353554 = 2.474867 and -0.125 / 0.353554 = -0.353552.
    expected = torch.tensor([2.474867] + [-0.353552] * 7, dtype=torch.float64)
    torch.testing.assert_close(_advantages([1, 0, 0, 0, 0, 0, 0, 0]), expected, atol=1e-6, rtol=0)


def test_eps_is_added_to_the_standard_deviation():
    # rewards 0, 2: mean 1, sample std sqrt(2); with eps 0.5: 1 / (1.414214 + 0.5) = 0.522408.
    advantages = _advantages([0.0, 2.0], estimator=GroupNormalized(eps=0.5))
    torch.testing.assert_close(advantages, torch.tensor([-0.522408, 0.522408]).double(), atol=1e-6, rtol=0)


@pytest.mark.parametrize("reward", [0.7, 0.1, -0.3, 1e6, 1e-6, 0.0])
@pytest.mark.parametrize("estimator", [GroupNormalized(), GroupCentered()])
def test_equal_float32_rewards_are_equal(reward, estimator):
    # The float32 mean of eight 0.7 is not 0.7: the std would be 6e-8 and the advantage 0.056.
    rewards = torch.full((8,), reward, dtype=torch.float32)
    group_ids = torch.zeros(8, dtype=torch.int64)
    assert torch.equal(estimator(rewards, group_ids), torch.zeros(8))
    assert group_statistics(rewards, group_ids).zero_std.all()


@pytest.mark.parametrize("estimator", [GroupNormalized(), GroupCentered()])
def test_rewards_one_rounding_step_apart_are_equal(estimator):
    # 0.7 in float32 and its neighbour: 6e-8 apart.
    rewards = torch.full((4,), 0.7)
    rewards[0] = torch.nextafter(rewards[0], torch.tensor(1.0))
    assert rewards[0] != rewards[1]
    assert torch.equal(estimator(rewards, torch.zeros(4, dtype=torch.int64)), torch.zeros(4))


def test_small_but_real_differences_count():
    # 1e-3 apart is no rounding: mean 1.0005, sample std 1e-3 / sqrt(2), A = 5e-4 / (7.0711e-4 + 1e-6) = 0.70611.
    advantages = _advantages([1.001, 1.0])
    torch.testing.assert_close(advantages, torch.tensor([0.706108, -0.706108]).double(), atol=1e-5, rtol=0)


def test_groups_are_told_by_id_wherever_their_rows_stand():
    # Group 10^12: 1, 0, 0 (mean 1/3, std 0.57735: 1.15470, -0.57735). Group 3: 2, 4, 6 (mean 4, std 2: -1, 0, 1).
    rewards, group_ids = [1.0, 2.0, 0.0, 6.0, 0.0, 4.0], [10**12, 3, 10**12, 3, 10**12, 3]
    expected = torch.tensor([1.154699, -1.0, -0.577349, 1.0, -0.577349, 0.0], dtype=torch.float64)
    torch.testing.assert_close(_advantages(rewards, group_ids), expected, atol=2e-6, rtol=0)
    for order in ([5, 3, 1, 4, 2, 0], [2, 0, 1, 5, 4, 3]):
        moved = _advantages([rewards[i] for i in order], [group_ids[i] for i in order])
        torch.testing.assert_close(moved, expected[order], atol=2e-6, rtol=0)


def test_one_group_does_not_see_another():
    alone = _advantages([1.0, 0.0, 0.0])
    beside = _advantages([1.0, 0.0, 0.0, 100.0, -5.0, 3.0], [0, 0, 0, 1, 1, 1])
    assert torch.equal(beside[:3], alone)


def test_rows_without_a_number_stay_out_of_mean_and_std():
    # The valid rows 1 and 0: mean 0.5, sample std 0.707107, A = 0.5 / 0.707108 = 0.707106.
    advantages = _advantages([1.0, NAN, 0.0, NAN])
    torch.testing.assert_close(advantages, torch.tensor([0.707106, 0, -0.707106, 0]).double(), atol=1e-6, rtol=0)
    assert advantages[1] == 0 and advantages[3] == 0


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_statistics_of_the_valid_rows(bad):
    group = group_statistics(torch.tensor([1.0, bad, 0.0, bad]), torch.zeros(4, dtype=torch.int64))
    assert group.mean.tolist() == [0.5] * 4
    assert group.std.tolist() == pytest.approx([0.5**0.5] * 4, abs=1e-12)
    assert group.valid.tolist() == [True, False, True, False]
    assert not group.zero_std.any()


@pytest.mark.parametrize("estimator", [GroupNormalized(), GroupCentered()])
@pytest.mark.parametrize("rewards", [[NAN, 1.0, NAN, NAN], [NAN] * 4, [INF, NAN, -INF, 3.0]])
def test_fewer_than_two_valid_rows_have_nothing_to_compare(rewards, estimator):
    values = torch.tensor(rewards)
    group_ids = torch.zeros(4, dtype=torch.int64)
    assert torch.equal(estimator(values, group_ids), torch.zeros(4))
    assert group_statistics(values, group_ids).zero_std.all()


def test_valid_rows_that_are_equal_beside_a_failed_one():
    values = torch.tensor([0.7, NAN, 0.7, 0.7])
    group_ids = torch.zeros(4, dtype=torch.int64)
    assert torch.equal(GroupNormalized()(values, group_ids), torch.zeros(4))
    assert group_statistics(values, group_ids).zero_std.all()


def test_zero_std_is_a_property_of_the_group():
    group = group_statistics(torch.tensor([1.0, 5.0, 1.0, 6.0]), torch.tensor([0, 1, 0, 1]))
    assert group.zero_std.tolist() == [True, False, True, False]


def test_group_centered():
    # mean 1/4 (nan left out of four); not divided by a std.
    advantages = _advantages([1.0, 0.0, 0.0, NAN, 0.0], estimator=GroupCentered())
    assert advantages.tolist() == [0.75, -0.25, -0.25, 0.0, -0.25]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_advantages_have_the_dtype_of_the_rewards(dtype):
    assert _advantages([1, 0], dtype=dtype).dtype == dtype
    assert _advantages([1, 0], estimator=GroupCentered(), dtype=dtype).dtype == dtype
