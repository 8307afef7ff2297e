"""The one place that calls a reward: what errors cost, and which contracts stop the run."""

import math
from decimal import Decimal

import numpy as np
import pytest
import torch

from stapo_lightning.errors import RewardError
from stapo_lightning.rewards import Reward, score_completions
from tests.builders import completions

EIGHT = completions([f"text {i}" for i in range(8)])


class Fixed(Reward):
    """Returns whatever it was given, however many completions there are."""

    def __init__(self, values) -> None:
        self.values = values

    def __call__(self, completions):
        return self.values


class Hostile(Reward):
    """Reads the completion as a number; words such as "zero" raise."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(self, completions):
        self.calls.append(len(completions))
        return [float(c.text) for c in completions]


def _is_nan(values):
    return [math.isnan(v) for v in values]


# ---- the shape ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", [[0.5], [0.5] * 7, [0.5] * 9, [], np.zeros(3), torch.zeros(16)])
def test_wrong_number_of_values(values):
    with pytest.raises(RewardError) as caught:
        score_completions(Fixed(values), EIGHT)
    message = str(caught.value)
    assert "tests.rewards.test_reward.Fixed" in message
    assert f"returned {len(values)} values for 8 completions" in message


@pytest.mark.parametrize(
    ("values", "kind"),
    [(0.5, "float"), (True, "bool"), (None, "NoneType"), (torch.tensor(0.5), "Tensor"), (np.float64(0.5), "float64")],
)
def test_one_number_is_never_broadcast(values, kind):
    with pytest.raises(RewardError) as caught:
        score_completions(Fixed(values), EIGHT)
    message = str(caught.value)
    assert "tests.rewards.test_reward.Fixed" in message
    assert f"returned {kind} " in message and "8 completions" in message


def test_a_generator_is_no_list():
    with pytest.raises(RewardError, match=r"returned generator .* for 8 completions"):
        score_completions(Fixed(0.5 for _ in range(8)), EIGHT)


def test_wrong_shape_shows_also_where_rows_are_scored_one_by_one():
    class RaisesOnMany(Reward):
        def __call__(self, completions):
            if len(completions) > 1:
                raise ValueError("one at a time")
            return [1.0, 1.0]

    with pytest.raises(RewardError, match="returned 2 values for 1 completions"):
        score_completions(RaisesOnMany(), EIGHT)


# ---- the values -----------------------------------------------------------------------------------------------------


def test_values_keep_their_order():
    reward = Hostile()
    scored = score_completions(reward, completions(["3", "1", "2"]))
    assert scored.values == [3.0, 1.0, 2.0] and scored.errors == 0
    assert reward.calls == [3]


@pytest.mark.parametrize(
    "values", [(1, 0), [True, False], np.array([1.0, 0.0]), torch.tensor([1.0, 0.0]), [Decimal(1), np.float32(0)]]
)
def test_anything_that_is_a_sequence_of_numbers(values):
    scored = score_completions(Fixed(values), EIGHT[:2])
    assert scored.values == [1.0, 0.0] and all(type(v) is float for v in scored.values)


def test_rows_that_are_no_number_are_counted():
    scored = score_completions(Fixed([1, None, 0, math.nan]), EIGHT[:4])
    assert _is_nan(scored.values) == [False, True, False, True]
    assert (scored.values[0], scored.values[2], scored.errors) == (1.0, 0.0, 2)


@pytest.mark.parametrize("infinite", [math.inf, -math.inf])
def test_infinity_is_no_reward(infinite):
    scored = score_completions(Fixed([infinite, 2.0]), EIGHT[:2])
    assert _is_nan(scored.values) == [True, False] and scored.errors == 1


# ---- errors ---------------------------------------------------------------------------------------------------------


def test_a_row_that_raises_costs_itself_alone(caplog):
    reward = Hostile()
    with caplog.at_level("WARNING"):
        scored = score_completions(reward, completions(["1", "zero", "0.5", "0"]))
    assert _is_nan(scored.values) == [False, True, False, False]
    assert [scored.values[i] for i in (0, 2, 3)] == [1.0, 0.5, 0.0]
    assert scored.errors == 1
    assert reward.calls == [4, 1, 1, 1, 1]
    assert "Hostile" in caplog.text and "ValueError" in caplog.text and "zero" in caplog.text


def test_a_value_that_is_no_number_costs_its_row_alone():
    class Words(Reward):
        def __call__(self, completions):
            return ["correct" if c.text == "text 1" else 1.0 for c in completions]

    scored = score_completions(Words(), EIGHT[:3])
    assert _is_nan(scored.values) == [False, True, False] and scored.errors == 1


def test_every_row_raising_stops_the_run():
    with pytest.raises(
        RewardError, match=r"Hostile raised on every one of 8 completions.*ValueError.*text 7"
    ) as caught:
        score_completions(Hostile(), EIGHT)
    assert isinstance(caught.value.__cause__, ValueError)


def test_an_interrupt_is_no_error_of_a_row():
    class Interrupted(Reward):
        def __call__(self, completions):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score_completions(Interrupted(), EIGHT)
