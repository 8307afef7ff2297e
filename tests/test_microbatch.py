"""A mini-batch cut by a token budget."""

import pytest
import torch

from stapo_lightning.microbatch import micro_batches


def _cut(lengths, budget):
    return [rows.tolist() for rows in micro_batches(torch.tensor(lengths), budget)]


def test_cut_by_hand():
    # Longest first: 10 | 5 4 (2 x 5) | 4 3 (2 x 4); rows of equal length in their order.
    assert _cut([3, 10, 5, 4, 4], budget=10) == [[1], [2, 3], [4, 0]]


def test_a_budget_exactly_filled():
    assert _cut([4, 4, 4, 4], budget=8) == [[0, 1], [2, 3]]
    assert _cut([4, 4, 4, 4], budget=7) == [[0], [1], [2], [3]]


def test_everything_fits():
    assert _cut([1, 3, 2], budget=9) == [[1, 2, 0]]


def test_a_row_longer_than_the_budget_goes_alone():
    assert _cut([2, 50, 2], budget=4) == [[1], [0, 2]]


def test_no_rows():
    assert _cut([], budget=4) == []


@pytest.mark.parametrize("budget", [1, 64, 100, 333, 10_000])
def test_budget_holds_and_is_used(budget):
    lengths = torch.randint(1, 101, (57,), generator=torch.Generator().manual_seed(0))
    groups = micro_batches(lengths, budget)
    assert sorted(torch.cat(groups).tolist()) == list(range(57))
    for number, rows in enumerate(groups):
        longest = int(lengths[rows].max())
        assert len(rows) == 1 or len(rows) * longest <= budget
        assert number == len(groups) - 1 or (len(rows) + 1) * longest > budget
