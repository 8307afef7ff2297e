"""A mini-batch cut by a token budget."""

import pytest
import torch

from stapo_lightning.distributed import Ranks
from stapo_lightning.microbatch import micro_batches, packed_micro_batches, passes


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


class TwoRanks(Ranks):
    """The other rank makes `other` passes."""

    def __init__(self, other: int) -> None:
        self.other = other

    def max(self, values):
        return values.clamp(min=self.other)


def test_passes_hold_the_chosen_rows():
    found = passes(torch.tensor([1, 3, 4]), torch.tensor([9, 5, 9, 3, 5]), budget=10, ranks=Ranks())
    # 5 and 5 fill the budget; 3 is left.
    assert [rows.tolist() for rows in found.rows] == [[1, 4], [3]]
    assert found.own == 2


def test_ranks_with_fewer_passes_repeat_a_row():
    found = passes(torch.tensor([0, 1]), torch.tensor([5, 3]), budget=5, ranks=TwoRanks(4))
    assert [rows.tolist() for rows in found.rows] == [[0], [1], [1], [1]]
    assert found.own == 2
    assert [rows.tolist() for rows in found.micro_batches] == [[0], [1]]


@pytest.mark.parametrize(("other", "at_least", "expected"), [(0, 0, []), (2, 0, [[0], [0]]), (0, 1, [[0]])])
def test_a_rank_without_rows(other, at_least, expected):
    none = torch.zeros(0, dtype=torch.int64)
    found = passes(none, torch.tensor([5, 3]), budget=5, ranks=TwoRanks(other), at_least=at_least)
    assert [rows.tolist() for rows in found.rows] == expected
    assert found.own == 0 and found.micro_batches == []


@pytest.mark.parametrize("seed", range(5))
def test_padding_is_at_most_a_tenth_of_the_tokens_on_lengths_like_those_of_completions(seed):
    # Log-normal with median 1,800 and sigma 0.6: a tenth is above 3,900, the longest near 11,000.
    lengths = (torch.randn(512, generator=torch.Generator().manual_seed(seed)) * 0.6 + 7.5).exp().long()
    groups = micro_batches(lengths, 16_384)
    computed = sum(len(rows) * int(lengths[rows].max()) for rows in groups)
    assert (computed - int(lengths.sum())) / computed <= 0.1


def test_packed_by_hand():
    # Longest first: 10 | 5 4 | 4 3: without padding 5 + 4 and 4 + 3 stay below 10.
    assert [g.tolist() for g in packed_micro_batches(torch.tensor([3, 10, 5, 4, 4]), 10)] == [[1], [2, 3], [4, 0]]
    # Padded, 6 and 1 would be 12.
    assert [g.tolist() for g in packed_micro_batches(torch.tensor([1, 6, 3]), 10)] == [[1, 2, 0]]
    assert packed_micro_batches(torch.zeros(0, dtype=torch.int64), 10) == []


@pytest.mark.parametrize("budget", [1, 64, 100, 333, 10_000])
def test_packed_groups_keep_the_budget(budget):
    lengths = torch.randint(1, 101, (57,), generator=torch.Generator().manual_seed(0))
    groups = packed_micro_batches(lengths, budget)
    assert sorted(torch.cat(groups).tolist()) == list(range(57))
    for number, rows in enumerate(groups):
        assert len(rows) == 1 or int(lengths[rows].sum()) <= budget
        if number < len(groups) - 1:
            assert int(lengths[rows].sum()) + int(lengths[groups[number + 1][0]]) > budget
