"""Rewards made of rewards, the penalty for length, and a function as a reward."""

import math
import pickle

import pytest
from jsonargparse import ArgumentParser

from stapo_lightning.data.gold_check import gold_problems
from stapo_lightning.errors import ConfigError, RewardError
from stapo_lightning.prompt import Prompt
from stapo_lightning.rewards import (
    BoxedMatch,
    BySource,
    Completion,
    DapoMath,
    FunctionReward,
    MathVerify,
    Overlong,
    ReasoningGym,
    Reward,
    RewardWorkers,
    Rule,
    Weighted,
    WeightedSum,
    score_completions,
)
from tests.rewards.functions import ends_with, length
from tests.rewards.hostile import Fixed


def _row(text="\\boxed{42}", answer="42", source="", num_tokens=1):
    return Completion(Prompt("?", answer, source), text, num_tokens, False)


# ---- length ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_tokens", "penalty"), [(1, 0), (79, 0), (80, 0), (81, -0.05), (90, -0.5), (99, -0.95), (100, -1), (101, -1)]
)
def test_overlong(num_tokens, penalty):
    assert Overlong(100, 20)([_row(num_tokens=num_tokens)]) == [pytest.approx(penalty)]


@pytest.mark.parametrize(
    ("max_tokens", "buffer", "message"),
    [
        (0, 1, "Overlong.max_tokens=0: must be at least 1"),
        (100, 0, "Overlong.buffer=0: must be above 0 and at most 100"),
        (100, 101, "Overlong.buffer=101: must be above 0 and at most 100"),
    ],
)
def test_overlong_bounds(max_tokens, buffer, message):
    with pytest.raises(ConfigError) as caught:
        Overlong(max_tokens, buffer)
    assert message in str(caught.value)


def test_a_length_has_no_gold_and_no_answer():
    assert Overlong(100, 20).gold(Prompt("?", "42")) == ""
    assert Overlong(100, 20).answer(_row()) is None


# ---- sums -----------------------------------------------------------------------------------------------------------


def test_weighted_sum():
    parts = [Weighted(DapoMath(), 2.0), Weighted(Overlong(100, 20), 0.5), Weighted(FunctionReward(length))]
    rows = [_row(num_tokens=90), _row("no", num_tokens=100), _row("\\boxed{42}!")]
    # 2 * 1 + 0.5 * -0.5 + 10, 2 * 0 + 0.5 * -1 + 2, 2 * 1 + 0.5 * 0 + 11
    assert WeightedSum(parts)(rows) == [11.75, 1.5, 13.0]


@pytest.mark.parametrize("missing", [None, math.nan, math.inf])
def test_a_row_without_one_part_has_no_value(missing):
    reward = WeightedSum([Weighted(DapoMath()), Weighted(Fixed([0.25, missing, 0.5]), 0.0)])
    scored = score_completions(reward, [_row(), _row(), _row("no")])
    assert [math.isnan(value) for value in scored.values] == [False, True, False]
    assert (scored.values[0], scored.values[2], scored.errors) == (1.0, 0.0, 1)


def test_a_part_of_the_wrong_shape_is_named():
    with pytest.raises(RewardError, match=r"hostile\.Fixed returned 2 values for 3 completions"):
        WeightedSum([Weighted(DapoMath()), Weighted(Fixed([1.0, 1.0]))])([_row()] * 3)


def test_the_first_part_that_has_one_gives_gold_and_answer():
    reward = WeightedSum([Weighted(Overlong(100, 20)), Weighted(DapoMath()), Weighted(BoxedMatch())])
    assert reward.gold(Prompt("?", "1/2")) == "\\boxed{1/2}"
    assert reward.answer(_row("Answer: $1/2$.")) == r"\frac{1}{2}"
    only_length = WeightedSum([Weighted(Overlong(100, 20))])
    assert only_length.gold(Prompt("?", "1/2")) == "" and only_length.answer(_row()) is None


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([], "WeightedSum.parts=[]: must hold at least one reward"),
        ([Weighted(DapoMath()), Weighted(DapoMath(), math.nan)], "WeightedSum.parts[1].weight=nan: must be finite"),
    ],
)
def test_sums_that_mean_nothing(parts, message):
    with pytest.raises(ConfigError) as caught:
        WeightedSum(parts)
    assert message in str(caught.value)


# ---- functions ------------------------------------------------------------------------------------------------------


def test_a_function_gets_text_and_answer():
    scored = score_completions(FunctionReward(ends_with), [_row(), _row("no"), _row("")])
    assert scored.values[:2] == [1.0, 0.0] and math.isnan(scored.values[2])
    assert FunctionReward(ends_with).gold(Prompt("?", "7")) == "\\boxed{7}"
    assert FunctionReward(ends_with).answer(_row("\\boxed{41} \\boxed{ 42 }")) == "42"


# ---- sources --------------------------------------------------------------------------------------------------------


def _by_source(default=None):
    return BySource([Rule("gsm8k", DapoMath()), Rule("AIME*", FunctionReward(length))], default)


def test_each_row_is_scored_by_the_reward_of_its_source():
    rows = [_row("no", source="AIME24"), _row(source="gsm8k"), _row("none", source="AIME25"), _row("", source="gsm8k")]
    assert _by_source()(rows) == [2.0, 1.0, 4.0, 0.0]


def test_the_first_rule_that_fits_counts():
    reward = BySource([Rule("AIME24", DapoMath()), Rule("*", FunctionReward(length))])
    assert reward([_row(source="AIME24"), _row(source="aime24"), _row("")]) == [1.0, 10.0, 0.0]


def test_an_unknown_source_stops_the_run_and_is_named():
    for ask in (
        lambda: score_completions(_by_source(), [_row(source="gsm8k"), _row(source="Gsm8k")]),
        lambda: _by_source().gold(Prompt("?", "42", "Gsm8k")),
        lambda: _by_source().answer(_row(source="Gsm8k")),
    ):
        with pytest.raises(RewardError, match=r"no rule for the source 'Gsm8k', the rules name 'gsm8k', 'AIME\*'; add"):
            ask()


def test_the_default_takes_the_rest():
    assert _by_source(default=BoxedMatch())([_row(source="new"), _row("AIME", source="AIME")]) == [1.0, 4.0]


def test_a_reward_is_called_once_for_all_its_rows():
    counts = []

    class Counts(Reward):
        def __call__(self, completions):
            counts.append(len(completions))
            return [0.5] * len(completions)

    shared = Counts()
    reward = BySource([Rule("a", shared), Rule("b", DapoMath()), Rule("c", shared)])
    assert reward([_row(source=source) for source in "abca"]) == [0.5, 1.0, 0.5, 0.5]
    assert counts == [3]


def test_gold_and_answer_are_those_of_the_source():
    tags = ReasoningGym()
    reward = BySource([Rule("gym", tags)], DapoMath())
    assert reward.gold(Prompt("?", "{1}", "gym")) == "<answer>{1}</answer>"
    assert reward.gold(Prompt("?", "1", "math")) == "\\boxed{1}"
    assert reward.answer(_row("<answer> x = 5 </answer>", source="gym")) == "x = 5"
    assert reward.answer(_row("Answer: x = 5", source="math")) == "5"


# ---- answers for votes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reward", "text", "expected"),
    [
        (Fixed(1.0), "\\boxed{ 4 2 }", "4 2"),
        (Fixed(1.0), "42", None),
        (BoxedMatch(), "\\boxed{ 4 2 }", "42"),
        (BoxedMatch(), "Answer: 42", None),
        (DapoMath(), "Answer: \\dfrac12.", r"\frac{1}{2}"),
        (DapoMath(), "m+n = 2+40 = \\boxed{m+n=42}", "42"),
        (MathVerify(), "\\boxed{3-2}", "3-2"),
        (ReasoningGym(), "I say <answer>yes </answer>", "yes"),
        (ReasoningGym(), " yes", "yes"),
        (ReasoningGym(), "\n", None),
    ],
)
def test_answer(reward, text, expected):
    assert reward.answer(_row(text)) == expected


# ---- named in YAML, copied to worker processes, checked before training ----------------------------------------------

NESTED = """
class_path: stapo_lightning.rewards.BySource
init_args:
  rules:
    - source: gsm8k
      reward: stapo_lightning.rewards.DapoMath
    - source: AIME*
      reward:
        class_path: stapo_lightning.rewards.WeightedSum
        init_args:
          parts:
            - reward: stapo_lightning.rewards.MathVerify
            - reward: {class_path: stapo_lightning.rewards.Overlong, init_args: {max_tokens: 100, buffer: 20}}
              weight: 0.5
  default:
    class_path: stapo_lightning.rewards.FunctionReward
    init_args: {function: tests.rewards.functions.ends_with}
"""

ROWS = [
    (_row("Answer: 42", source="gsm8k"), 1.0),
    (_row("\\boxed{6 \\cdot 7}", source="gsm8k"), 0.0),
    (_row("\\boxed{6 \\cdot 7}", source="AIME24", num_tokens=90), 0.75),
    (_row("\\boxed{41}", source="AIME24", num_tokens=100), -0.5),
    (_row("So \\boxed{42}", source="other"), 1.0),
    (_row("Answer: 42", source="other"), 0.0),
]


def _from_yaml(text):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--reward", type=Reward)
    return parser.instantiate(parser.parse_args([f"--reward={text}"])).reward


def test_nested_rewards_are_named_in_yaml():
    reward = _from_yaml(NESTED)
    assert reward([row for row, _ in ROWS]) == [value for _, value in ROWS]


@pytest.mark.parametrize(
    ("old", "new"), [("weight: 0.5", "wieght: 0.5"), ("source: gsm8k", "sources: gsm8k"), ("buffer: 20", "buffer: x")]
)
def test_a_typo_in_a_nested_reward_is_an_error(old, new):
    assert old in NESTED
    with pytest.raises(Exception, match=new.split(":")[0]):
        _from_yaml(NESTED.replace(old, new))


def test_nested_rewards_run_in_worker_processes():
    reward = _from_yaml(NESTED)
    assert pickle.loads(pickle.dumps(reward))([row for row, _ in ROWS]) == [value for _, value in ROWS]
    pool = RewardWorkers(reward, 2, 20.0)
    try:
        scored = pool.score([row for row, _ in ROWS])
    finally:
        pool.close()
    assert scored.values == [value for _, value in ROWS]
    assert (scored.errors, scored.timeouts) == (0, 0)


def test_an_unknown_source_stops_the_run_from_a_worker_process():
    pool = RewardWorkers(_by_source(), 1, 20.0)
    try:
        with pytest.raises(RewardError, match="no rule for the source 'new'"):
            pool.score([_row(source="gsm8k"), _row(source="new")])
    finally:
        pool.close()


def test_gold_answers_pass_the_check_before_training():
    reward = _from_yaml(NESTED)
    prompts = [Prompt(f"{n}?", str(n), source) for n, source in enumerate(["gsm8k", "AIME24", "AIME25", "other"] * 5)]
    asked = []

    def score(used, rows):
        assert used is reward
        asked.extend(rows)
        return score_completions(used, rows)

    assert gold_problems("data.train_prompts", prompts, reward, score, 20, 1.0) == []
    assert len(asked) == 20
