"""Which tokens train: S2T and the selectors of its baselines and ablations."""

import math

import pytest
import torch

from stapo_lightning.batch import TokenScores
from stapo_lightning.distributed import Ranks
from stapo_lightning.objective import (
    S2T,
    AllCandidates,
    HighEntropy,
    KeepAll,
    OneQuadrant,
    RandomCandidates,
    RandomPositive,
    S2TVersion1,
    TopEntropy,
)
from stapo_lightning.objective.silencing import linear_quantile
from tests.builders import rollout_batch, score_dense, token_scores

RANKS = Ranks()


def _select(selector, probs, entropy, advantages=(1.0,), lengths=None, update=0):
    """Selects in a mini-batch whose tokens have the given probabilities and entropies, [N][T]."""
    probs, entropy = torch.tensor(probs, dtype=torch.float64), torch.tensor(entropy, dtype=torch.float64)
    lengths = [probs.shape[1]] * len(probs) if lengths is None else lengths
    batch = rollout_batch(list(advantages), lengths, width=probs.shape[1])
    return selector(batch, token_scores(probs, entropy), RANKS, update)


# ---- the quantile ---------------------------------------------------------------------------------------------------


def test_quantile_interpolates_linearly():
    # sorted 1, 2, 4, 8: place 0.75 * 3 = 2.25 lies between 4 and 8: 4 + 0.25 * 4 = 5.
    assert linear_quantile(torch.tensor([8.0, 1.0, 4.0, 2.0]), 0.75).item() == 5.0


@pytest.mark.parametrize("size", [1, 2, 3, 10, 101])
@pytest.mark.parametrize("q", [0.0, 0.1, 0.5, 0.75, 0.8, 0.999, 1.0])
def test_quantile_is_that_of_torch(size, q):
    values = torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(size))
    torch.testing.assert_close(linear_quantile(values, q), torch.quantile(values, q), atol=1e-13, rtol=0)


def test_quantile_of_nothing_is_nan():
    assert linear_quantile(torch.empty(0), 0.75).isnan()


# ---- S2T ------------------------------------------------------------------------------------------------------------


def _truth_table(advantages):
    """Rows of two tokens, number 1 of 1000 each: the spurious one of cases.md, then the uniform one."""
    peaked = torch.full((1000,), -torch.inf, dtype=torch.float64)
    peaked[:4] = torch.tensor([10.0, 0.0, 0.0, 0.0])
    n = len(advantages)
    logits = torch.stack([peaked, torch.zeros(1000, dtype=torch.float64)]).expand(n, 2, 1000)
    lengths = torch.full((n,), 2)
    return rollout_batch(advantages, lengths), score_dense(logits, torch.ones(n, 2, dtype=torch.int64), lengths)


def test_truth_table():
    batch, scores = _truth_table([1.0, 0.0, -1.0, 0.5])
    # Z = e^10 + 3 = 22029.47: p = 1 / Z = 4.5394e-5, H = ln Z - 10 e^10 / Z = 1.498003e-3. Uniform: H = ln 1000.
    assert scores.probs[0].tolist() == pytest.approx([4.5394e-5, 0.001], rel=1e-4)
    assert scores.entropy[0].tolist() == pytest.approx([1.498003e-3, 6.907755], rel=1e-6)
    selection = S2T(tau_p=0.002, q=0.75)(batch, scores, RANKS, 0)
    assert selection.candidates.tolist() == [[True, True], [False, False], [False, False], [True, True]]
    assert selection.silenced.tolist() == [[True, False], [False, False], [False, False], [True, False]]
    # The candidates' entropies: 0.0015 twice, 6.9078 twice. Place 0.75 * 3 = 2.25 lies between two equal ones.
    assert selection.tau_h.item() == pytest.approx(6.907755, abs=1e-6)


def test_threshold_between_two_candidates():
    batch, scores = _truth_table([1.0, -1.0])
    # 0.001498 + 0.75 * (6.907755 - 0.001498) = 5.181191.
    assert S2T()(batch, scores, RANKS, 0).tau_h.item() == pytest.approx(5.181191, abs=1e-5)


def test_probability_must_lie_strictly_below_tau_p():
    probs, entropy = [[0.25, 0.5, 0.75, 0.25]], [[0.1, 0.2, 0.3, 9.0]]
    threshold = float(torch.tensor(0.5, dtype=torch.float64).log().exp())
    selection = _select(S2T(tau_p=threshold, q=1.0), probs, entropy)
    assert selection.candidates.tolist() == [[True, False, False, True]]
    assert selection.silenced.tolist() == [[True, False, False, False]]


def test_entropy_must_lie_strictly_below_tau_h():
    # Place 0.5 * 2 = 1: tau_h is the middle entropy itself, and that token stays.
    selection = _select(S2T(q=0.5), [[1e-4] * 3], [[0.3, 0.1, 0.2]])
    assert selection.tau_h.item() == 0.2
    assert selection.silenced.tolist() == [[False, True, False]]


def test_advantage_must_lie_strictly_above_zero():
    probs, entropy = [[1e-4, 1e-4]] * 3, [[0.1, 9.0]] * 3
    selection = _select(S2T(), probs, entropy, advantages=[0.0, -1.0, 1e-30])
    assert selection.candidates.tolist() == [[False, False], [False, False], [True, True]]
    assert selection.silenced.tolist() == [[False, False], [False, False], [True, False]]


def test_threshold_is_taken_over_the_candidates_alone():
    # Candidates 0.4, 0.1, 0.3, 0.2: place 0.75 * 3 = 2.25, tau_h = 0.3 + 0.25 * 0.1 = 0.325. The likely tokens of row 0
    # and the whole of row 1 (A < 0), all with entropy 9, do not move it.
    probs = [[1e-4, 0.9, 1e-4, 1e-4, 1e-4, 0.9], [1e-4] * 6]
    entropy = [[0.4, 9.0, 0.1, 0.3, 0.2, 9.0], [9.0] * 6]
    selection = _select(S2T(q=0.75), probs, entropy, advantages=[1.0, -1.0])
    assert selection.tau_h.item() == pytest.approx(0.325, abs=1e-12)
    assert selection.silenced.tolist() == [[False, False, True, True, True, False], [False] * 6]


def test_threshold_spans_the_completions_of_the_mini_batch():
    # Candidates 0.1 (row 0) and 5 (row 1): tau_h = 0.1 + 0.75 * 4.9 = 3.775. A row alone would keep its one candidate.
    selection = _select(S2T(), [[1e-4, 0.5], [1e-4, 0.5]], [[0.1, 0.0], [5.0, 0.0]], advantages=[1.0, 2.0])
    assert selection.tau_h.item() == pytest.approx(3.775, abs=1e-12)
    assert selection.silenced.tolist() == [[True, False], [False, False]]


def test_one_candidate_is_not_below_itself():
    selection = _select(S2T(), [[0.5, 1e-4, 0.5]], [[3.0, 0.1, 3.0]])
    assert selection.candidates.tolist() == [[False, True, False]]
    assert not selection.silenced.any()
    assert selection.tau_h.item() == 0.1


def test_candidates_of_equal_entropy_all_stay():
    selection = _select(S2T(), [[1e-4] * 7], [[0.1] * 7])
    assert selection.candidates.all() and not selection.silenced.any()


@pytest.mark.parametrize(
    "selector", [S2T(), S2T(pooled_updates=3), HighEntropy(), AllCandidates(), RandomCandidates(), KeepAll()]
)
def test_no_candidate_silences_nothing(selector):
    selection = _select(selector, [[0.5, 0.9]], [[0.1, 0.2]])
    assert not selection.candidates.any() and not selection.silenced.any()
    assert selection.tau_h.isnan()


@pytest.mark.parametrize(
    "selector",
    [
        S2T(),
        S2TVersion1(),
        HighEntropy(),
        AllCandidates(),
        RandomCandidates(),
        RandomPositive(),
        OneQuadrant("low", "high"),
        TopEntropy(),
    ],
)
def test_padding_is_never_a_candidate(selector):
    # Lengths 2 and 1 of width 3; at padding an improbable, certain token, and then one of high entropy.
    probs, entropy = [[1e-4, 1e-4, 1e-9], [1e-4, 1e-9, 1e-9]], [[1.0, 2.0, 0.0], [3.0, 0.0, 99.0]]
    selection = _select(selector, probs, entropy, advantages=[1.0, 1.0], lengths=[2, 1])
    assert selection.candidates.tolist() == [[True, True, False], [True, False, False]]
    assert not (selection.silenced & ~selection.candidates).any()
    bare = _select(
        selector, [[1e-4, 1e-4], [1e-4, 0.5]], [[1.0, 2.0], [3.0, 0.5]], advantages=[1.0, 1.0], lengths=[2, 1]
    )
    assert torch.equal(selection.silenced[:, :2], bare.silenced)
    torch.testing.assert_close(selection.tau_h, bare.tau_h, equal_nan=True)


def test_padding_stays_out_of_the_threshold():
    # Candidates 1, 2, 3: place 1.5, tau_h = 2.5.
    probs, entropy = [[1e-4, 1e-4, 1e-9], [1e-4, 1e-9, 1e-9]], [[1.0, 2.0, 0.0], [3.0, 0.0, 0.0]]
    assert _select(S2T(), probs, entropy, advantages=[1.0, 1.0], lengths=[2, 1]).tau_h.item() == 2.5


def test_a_token_without_entropy_is_not_silenced():
    # nan counts as the largest entropy: 0.1, 0.2, nan at place 0.25 * 2 = 0.5 gives 0.15.
    selection = _select(S2T(q=0.25), [[1e-4] * 3], [[0.1, math.nan, 0.2]])
    assert selection.tau_h.item() == pytest.approx(0.15, abs=1e-12)
    assert selection.silenced.tolist() == [[True, False, False]]
    # At place 1.5 the threshold itself is nan, and nothing lies below that.
    assert not _select(S2T(q=0.75), [[1e-4] * 3], [[0.1, math.nan, 0.2]]).silenced.any()


# ---- variants -------------------------------------------------------------------------------------------------------


def test_version_1_takes_the_threshold_over_all_completion_tokens():
    # 0, 0.1, 0.2, 1, 2, 3 (the 9 is padding): place 0.8 * 5 = 4, tau_h = 2. Both candidates of row 0 lie below it; over
    # the candidates alone (0.1, 0.2) it would be 0.175 and spare the second.
    probs = [[0.9, 1e-4, 1e-4, 0.9], [0.9, 1e-4, 0.9, 0.9]]
    entropy = [[0.0, 0.1, 0.2, 3.0], [1.0, 2.0, 9.0, 9.0]]
    options = {"advantages": [1.0, -1.0], "lengths": [4, 2]}
    selection = _select(S2TVersion1(q=0.8), probs, entropy, **options)
    assert selection.tau_h.item() == pytest.approx(2.0, abs=1e-12)
    assert selection.candidates.tolist() == [[False, True, True, False], [False] * 4]
    assert selection.silenced.tolist() == [[False, True, True, False], [False] * 4]
    assert _select(S2T(q=0.75), probs, entropy, **options).silenced.tolist() == [
        [False, True, False, False],
        [False] * 4,
    ]


def test_version_1_without_a_candidate_silences_nothing():
    selection = _select(S2TVersion1(), [[0.5, 0.9]], [[0.1, 0.2]])
    assert not selection.silenced.any()
    assert selection.tau_h.item() == pytest.approx(0.18, abs=1e-12)  # 0.1 + 0.8 * 0.1


def test_top_entropy_trains_the_given_share():
    # Ten tokens, share 0.2: place 0.8 * 9 = 7.2, tau = 0.8 + 0.2 * 0.1 = 0.82; 0.9 and 1.0 train. Neither advantage nor
    # probability matters.
    entropy = [[0.3, 1.0, 0.5, 0.1, 0.7], [0.9, 0.2, 0.6, 0.8, 0.4]]
    selection = _select(TopEntropy(share=0.2), [[0.9] * 5, [1e-4] * 5], entropy, advantages=[-1.0, 1.0])
    assert (~selection.silenced).tolist() == [[False, True, False, False, False], [True, False, False, False, False]]
    assert selection.tau_h.item() == pytest.approx(0.82, abs=1e-12)


def test_top_entropy_with_share_one_trains_everything():
    assert not _select(TopEntropy(share=1.0), [[0.5] * 3], [[0.1, 0.2, 0.3]]).silenced.any()


def test_all_candidates_are_silenced_whatever_their_entropy():
    probs = [[1e-4, 0.5, 1e-4], [1e-4, 0.5, 1e-4]]
    selection = _select(AllCandidates(), probs, [[0.1, 0.1, 9.0]] * 2, advantages=[1.0, -1.0])
    assert selection.silenced.tolist() == [[True, False, True], [False, False, False]]
    assert torch.equal(selection.silenced, selection.candidates)
    assert selection.tau_h.isnan()


def test_high_entropy_silences_the_other_end():
    # Of 0.4, 0.1, 0.3, 0.2 three go, as with S2T, but the three highest: tau = 0.2 - 0.25 * 0.1 = 0.175.
    probs, entropy = [[1e-4, 1e-4, 1e-4, 1e-4, 0.5]], [[0.4, 0.1, 0.3, 0.2, 9.0]]
    selection = _select(HighEntropy(q=0.75), probs, entropy)
    assert selection.silenced.tolist() == [[True, False, True, True, False]]
    assert selection.tau_h.item() == pytest.approx(0.175, abs=1e-12)
    assert selection.silenced.sum() == _select(S2T(q=0.75), probs, entropy).silenced.sum()


# ---- a threshold over several updates -------------------------------------------------------------------------------


def _updates(selector, *entropies):
    """Silenced tokens and tau_h of each update in turn; every token a candidate."""
    found = [_select(selector, [[1e-4] * len(e)], [e]) if e else _select(selector, [[0.5]], [[9.0]]) for e in entropies]
    return [f.silenced.tolist()[0] for f in found], [f.tau_h.item() for f in found]


def test_pooled_threshold_is_taken_over_the_last_updates():
    # Update 0: 1, 3: place 0.75, tau_h = 2.5. Update 1: 1, 2, 3: place 1.5, tau_h = 2.5, and 2 lies below it, though it
    # is alone. Update 2, of two pooled: 2, 8: place 0.75, tau_h = 6.5, and 8 stays.
    silenced, tau_h = _updates(S2T(pooled_updates=2), [1.0, 3.0], [2.0], [8.0])
    assert silenced == [[True, False], [True], [False]]
    assert tau_h == [2.5, 2.5, 6.5]


def test_an_update_without_candidates_takes_a_place_in_the_pool():
    silenced, tau_h = _updates(S2T(pooled_updates=2), [1.0, 3.0], [], [2.0])
    assert silenced == [[True, False], [False], [False]]
    assert tau_h == [2.5, 2.5, 2.0]


def test_one_pooled_update_is_the_papers_rule():
    entropies = ([0.4, 0.1, 0.3, 0.2], [2.0], [5.0, 1.0])
    assert _updates(S2T(pooled_updates=1), *entropies) == _updates(S2T(), *entropies)
    assert S2T().state_dict() == {"pool": []}


def test_the_pool_goes_on_after_a_resume():
    before, after, smaller = S2T(pooled_updates=4), S2T(pooled_updates=4), S2T(pooled_updates=2)
    _updates(before, [1.0, 3.0], [9.0])
    _updates(after, [0.5])  # what it saw before loading, as `fit` after another fit in one process, is forgotten
    assert before.state_dict() == {"pool": [[1.0, 3.0], [9.0]]}
    after.load_state_dict(before.state_dict())
    smaller.load_state_dict(before.state_dict())
    # 1, 2, 3, 9: place 2.25, tau_h = 4.5. Of two: 2, 9: place 0.75, tau_h = 7.25.
    assert _updates(before, [2.0]) == _updates(after, [2.0]) == ([[True]], [4.5])
    assert _updates(smaller, [2.0]) == ([[True]], [7.25])


def test_pooling_must_hold_an_update():
    assert S2T(pooled_updates=0).problems() == ["S2T.pooled_updates=0: must be at least 1"]


# ---- controls -------------------------------------------------------------------------------------------------------


def test_matched_control_silences_as_many_tokens_as_s2t_among_all_positive_ones():
    # A rollout of 40 x 50 tokens: rows with A > 0 are the first 30; their first 4 tokens are candidates, 120 in all, of
    # different entropies: place 0.75 * 119 = 89.25, so S2T silences 90.
    batch = rollout_batch(torch.cat([torch.ones(30), -torch.ones(10)]), torch.full((40,), 50))
    probs = torch.full((40, 50), 0.5)
    probs[:, :4] = 1e-4
    entropy = torch.rand(40, 50, generator=torch.Generator().manual_seed(0))
    scores = TokenScores(probs.log(), entropy, probs)
    selection = RandomPositive()(batch, scores, RANKS, 3)
    assert S2T()(batch, scores, RANKS, 3).silenced.sum() == selection.silenced.sum() == 90
    assert torch.equal(selection.candidates, (batch.advantages > 0)[:, None].expand(40, 50))
    assert not selection.silenced[30:].any()
    # Blind to probability: of 90 drawn from 1500, 90 * 120 / 1500 = 7.2 are candidates, std about 2.5.
    assert selection.silenced[:, :4].sum() < 7.2 + 4.5 * 2.5
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    moved = RandomPositive()(batch.rows(order), scores.rows(order), RANKS, 3)
    assert torch.equal(moved.silenced, selection.silenced[order])
    assert not torch.equal(RandomPositive()(batch, scores, RANKS, 4).silenced, selection.silenced)


def test_matched_control_silences_nothing_where_s2t_does_not():
    assert not _select(RandomPositive(), [[1e-4, 0.5, 0.5]], [[0.1, 0.2, 0.3]]).silenced.any()


def test_quadrants_part_the_positive_tokens():
    # Candidates 0.125, 0.25, 0.5 of row 0: place 1.5, tau_h = 0.375. Row 1 has A < 0.
    probs = [[1e-4, 1e-4, 1e-4, 0.5, 0.9, 0.6], [1e-4] * 6]
    entropy = [[0.125, 0.25, 0.5, 0.37, 0.375, 7.0], [0.1] * 6]
    expected = {
        ("low", "low"): [True, True, False, False, False, False],
        ("low", "high"): [False, False, True, False, False, False],
        ("high", "low"): [False, False, False, True, False, False],
        ("high", "high"): [False, False, False, False, True, True],
    }
    for (probability, height), silenced in expected.items():
        selection = _select(OneQuadrant(probability, height), probs, entropy, advantages=[1.0, -1.0])
        assert selection.silenced.tolist() == [silenced, [False] * 6]
        assert selection.tau_h.item() == 0.375
    low_low = _select(OneQuadrant("low", "low"), probs, entropy, advantages=[1.0, -1.0])
    assert torch.equal(low_low.silenced, _select(S2T(), probs, entropy, advantages=[1.0, -1.0]).silenced)


@pytest.mark.parametrize("probability", ["low", "high"])
@pytest.mark.parametrize("height", ["low", "high"])
def test_a_quadrant_without_a_threshold_is_empty(probability, height):
    assert not _select(OneQuadrant(probability, height), [[0.5, 0.9]], [[0.1, 0.2]]).silenced.any()


# ---- the random ablation --------------------------------------------------------------------------------------------


def _forty_rows():
    """40 completions of 50 tokens, all of them candidates."""
    batch = rollout_batch(torch.ones(40), torch.full((40,), 50))
    probs = torch.full((40, 50), 1e-4)
    return batch, TokenScores(probs.log(), torch.rand(40, 50, generator=torch.Generator().manual_seed(0)), probs)


def test_random_share_is_exact():
    # Place 0.75 * 1999 = 1499.25: exactly the 1500 smallest draws of 2000 lie below it.
    batch, scores = _forty_rows()
    assert RandomCandidates(q=0.75)(batch, scores, RANKS, 3).silenced.sum() == 1500
    assert RandomCandidates(q=0.1)(batch, scores, RANKS, 3).silenced.sum() == 200  # place 199.9


def test_random_draw_is_blind_to_entropy_and_place():
    batch, scores = _forty_rows()
    silenced = RandomCandidates(q=0.5)(batch, scores, RANKS, 0).silenced.double()
    # A row of 50 has mean 0.5 and std 0.07, a column of 40 std 0.08; 4.5 std bounds all ninety.
    assert (silenced.mean(1) - 0.5).abs().max() < 4.5 * 0.0708
    assert (silenced.mean(0) - 0.5).abs().max() < 4.5 * 0.0791
    # Entropy is uniform (std 0.289): the difference of two means of 1000 has std 0.0129.
    difference = scores.entropy[silenced == 1].mean() - scores.entropy[silenced == 0].mean()
    assert abs(difference.item()) < 4.5 * 0.0129


def test_random_draw_belongs_to_the_completion_and_not_to_its_row():
    batch, scores = _forty_rows()
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    selector = RandomCandidates(q=0.75)
    straight = selector(batch, scores, RANKS, 5).silenced
    moved = selector(batch.rows(order), scores.rows(order), RANKS, 5).silenced
    assert torch.equal(moved, straight[order])
    assert not torch.equal(moved, straight)


@pytest.mark.parametrize("other", [(RandomCandidates(q=0.75), 1), (RandomCandidates(q=0.75, seed=1), 0)])
def test_random_draw_changes_with_update_and_seed(other):
    batch, scores = _forty_rows()
    selector, update = other
    first = RandomCandidates(q=0.75)(batch, scores, RANKS, 0).silenced
    second = selector(batch, scores, RANKS, update).silenced
    # Independent draws agree with probability 0.75^2 + 0.25^2 = 0.625; std of the mean of 2000 about 0.011.
    assert (first == second).double().mean().item() == pytest.approx(0.625, abs=0.05)
    assert torch.equal(first, RandomCandidates(q=0.75)(batch, scores, RANKS, 0).silenced)
