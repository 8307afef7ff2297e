"""avg@k, pass@k, maj@k and their intervals."""

import itertools
import math

import pytest
import torch

from stapo_lightning.batch import EvalCompletion
from stapo_lightning.evaluation import (
    Evaluation,
    average,
    estimate,
    estimates,
    majority_correct,
    pass_at_k,
    powers_of_two,
    resampled_means,
    summary,
)


def _problem(*answers, gold="1", tokens=5, truncated=False):
    return [EvalCompletion(str(a), a, a == gold, a == gold, tokens, truncated) for a in answers]


def test_pass_at_k_of_cases_md():
    # n = 4, one correct: 1 - C(3, k) / C(4, k) = 1 - 3/4, 1 - 3/6, 1 - 0; k = 8 left out.
    assert [pass_at_k(1, 4, k) for k in (1, 2, 4)] == [0.25, 0.5, 1.0]
    assert powers_of_two(4) == [1, 2, 4]


@pytest.mark.parametrize(
    ("samples", "expected"), [(1, [1]), (2, [1, 2]), (3, [1, 2]), (6, [1, 2, 4]), (32, [1, 2, 4, 8, 16, 32])]
)
def test_powers_of_two(samples, expected):
    assert powers_of_two(samples) == expected


@pytest.mark.parametrize("correct", range(7))
@pytest.mark.parametrize("k", [1, 2, 3, 6])
def test_pass_at_k_counts_all_subsets(correct, k):
    subsets = list(itertools.combinations([True] * correct + [False] * (6 - correct), k))
    assert pass_at_k(correct, 6, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        (["1", "1", "2", "3"], 1.0),  # two votes for the right answer
        (["2", "2", "1", "3"], 0.0),
        (["1", "1", "2", "2"], 0.5),  # a tie of two, one of them right
        (["1", "2", "3"], 1 / 3),
        (["1", None, None, None], 1.0),  # no answer, no vote
        ([None, None], 0.0),
    ],
)
def test_the_majority(answers, expected):
    assert majority_correct(_problem(*answers)) == pytest.approx(expected)


def test_the_majority_takes_the_mean_verdict_of_one_answer():
    # The verifier saw more than the answer's text: of three equal answers it accepted two.
    problem = [EvalCompletion("", "x", verdict, verdict, 1, False) for verdict in (True, True, False)]
    assert majority_correct(problem) == pytest.approx(2 / 3)


def test_a_problem_is_a_row_of_values():
    problem = _problem("1", "2", "2", None, tokens=8)
    problem[0].truncated = True
    evaluation = Evaluation("b", "d", 1, 4)
    assert dict(zip(evaluation.measures, evaluation.values(problem), strict=True)) == {
        "avg@4": 0.25, "pass@1": 0.25, "pass@2": 0.5, "pass@4": 1.0, "maj@4": 0.0, "length_mean": 8.0,
        "truncated_fraction": 0.25,
    }  # fmt: skip


def test_one_sample_has_neither_pass_nor_majority():
    assert Evaluation("b", "d", 1, 1).measures == ["avg@1", "length_mean", "truncated_fraction"]


def test_overruled_verdicts_are_counted_where_there_is_a_second_verifier():
    evaluation = Evaluation("b", "d", 1, 2, rechecked=True)
    problem = [EvalCompletion("", "x", True, False, 1, False), EvalCompletion("", "1", True, True, 1, False)]
    assert dict(zip(evaluation.measures, evaluation.values(problem), strict=True))["rechecked_fraction"] == 0.5


def test_the_summary_has_a_mean_for_each_benchmark_and_over_benchmarks():
    one, two = Evaluation("one", "d", 2, 1), Evaluation("two", "d", 4, 1)
    # avg@1 0.5 of two problems and 0.25 of four: benchmarks count alike, 0.375, and not 2 of 6.
    values = [torch.tensor([[1.0, 3, 0], [0, 5, 1]]), torch.tensor([[1.0, 2, 0], [0, 2, 0], [0, 2, 0], [0, 2, 0]])]
    found = summary([(one, values[0].double()), (two, values[1].double())])
    assert found == {
        "one/d/avg@1": 0.5, "one/d/length_mean": 4.0, "one/d/truncated_fraction": 0.5,
        "two/d/avg@1": 0.25, "two/d/length_mean": 2.0, "two/d/truncated_fraction": 0.0,
        "average/d/avg": 0.375,
    }  # fmt: skip


def test_a_source_without_a_name_leaves_no_gap_in_the_tag():
    assert set(summary([(Evaluation("", "d", 1, 1), torch.zeros(1, 3).double())])) == {
        "d/avg@1", "d/length_mean", "d/truncated_fraction",
    }  # fmt: skip


def test_the_interval_has_the_width_of_the_normal_one():
    # 400 problems, 100 right: the mean's standard deviation is sqrt(0.25 * 0.75 / 400) = 0.02165, 1.96 of it 0.0424.
    values = torch.tensor([1.0] * 100 + [0.0] * 300).double()
    found = estimate(values, resampled_means(values[:, None])[:, 0])
    assert found.value == 0.25
    assert found.low == pytest.approx(0.25 - 0.0424, abs=0.004)
    assert found.high == pytest.approx(0.25 + 0.0424, abs=0.004)


def test_the_interval_is_over_problems_not_over_completions():
    # Ten problems that are always right, ten that never are: 32 samples of each make the mean no surer.
    values = torch.tensor([1.0] * 10 + [0.0] * 10).double()
    found = estimate(values, resampled_means(values[:, None])[:, 0])
    assert found.high - found.low > 0.35  # 2 * 1.96 * sqrt(0.25 / 20) = 0.44; over 640 completions it would be 0.08


def test_the_interval_is_the_same_each_time():
    values = torch.rand(30, 2, dtype=torch.float64)
    assert torch.equal(resampled_means(values), resampled_means(values))


@pytest.mark.parametrize(("right", "low", "high"), [(0, 0.0, 0.1157), (30, 0.8843, 1.0)])
def test_all_wrong_or_all_right_still_has_an_interval(right, low, high):
    # Clopper-Pearson: 1 - 0.025^(1/30) = 0.1157.
    values = torch.full((30,), float(right > 0), dtype=torch.float64)
    found = estimate(values, resampled_means(values[:, None])[:, 0])
    assert (found.low, found.high) == (pytest.approx(low, abs=1e-4), pytest.approx(high, abs=1e-4))


def test_estimates_are_of_shares_only():
    values = torch.tensor([[0.5, 0.5, 1.0, 1.0, 7.0, 0.0], [0.0, 0.0, 0.0, 0.0, 9.0, 0.0]]).double()
    found = estimates(Evaluation("b", "d", 2, 2), values)
    assert {name: value.value for name, value in found.items()} == {
        "avg@2": 0.25, "pass@1": 0.25, "pass@2": 0.5, "maj@2": 0.5,
    }  # fmt: skip


def test_the_interval_of_the_average_is_narrower_than_that_of_a_benchmark():
    values = [torch.tensor([1.0, 0.0] * 20).double() for _ in range(4)]
    found = average(values)
    one = estimate(values[0], resampled_means(values[0][:, None])[:, 0])
    assert found.value == 0.5
    assert found.high - found.low < 0.75 * (one.high - one.low)
    assert not math.isnan(found.low)
