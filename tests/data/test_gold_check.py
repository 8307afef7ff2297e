"""Gold answers are scored before training, with the reward and the processes that training will use."""

import json
import math
from contextlib import contextmanager

import psutil
import pytest

from stapo_lightning.data import JsonlPrompts
from stapo_lightning.data.gold_check import gold_problems
from stapo_lightning.errors import ConfigError, RewardError
from stapo_lightning.prompt import Prompt
from stapo_lightning.rewards import BoxedMatch, Completion, Reward, ScoredRows, score_completions
from tests.cli import stapo
from tests.doubles import datamodule, module, trainer
from tests.rewards.hostile import Fixed

PROMPTS = [Prompt(f"question {i}", str(i)) for i in range(20)]


class Knows(Reward):
    """Finds the answers below a number correct, and keeps what it was asked."""

    def __init__(self, below):
        self.below = below
        self.asked = []

    def __call__(self, completions):
        self.asked += completions
        return [float(int(c.prompt.answer) < self.below) for c in completions]


class Mute(Knows):
    """Cannot say what a right completion looks like."""

    def gold(self, prompt):
        return ""


def _check(reward, prompts=PROMPTS, sample_size=20, min_share=0.9, values=None):
    def score(used, completions):
        return score_completions(used, completions) if values is None else ScoredRows(values, 0)

    return gold_problems("data.train_prompts", prompts, reward, score, sample_size, min_share)


def test_what_is_scored_is_the_gold_completion_of_a_sample():
    reward = Knows(20)
    assert _check(reward, sample_size=6) == []
    assert len(reward.asked) == 6
    assert len({completion.prompt.text for completion in reward.asked}) == 6
    for completion in reward.asked:
        assert completion == Completion(completion.prompt, f"\\boxed{{{completion.prompt.answer}}}", 1, False)
    again = Knows(20)
    _check(again, sample_size=6)
    assert again.asked == reward.asked


@pytest.mark.parametrize(("below", "stops"), [(20, False), (18, False), (17, True), (0, True)])
def test_the_share_that_must_be_correct(below, stops):
    # 18 of 20 are the 0.9 that is asked for.
    assert bool(_check(Knows(below))) == stops


def test_the_problem_shows_examples_and_ways_out():
    (problem,) = _check(Knows(16))
    assert problem.startswith(
        "data.train_prompts: reward tests.data.test_gold_check.Knows finds only 16 of 20 sampled gold answers correct"
        " (at least data.gold_check_share=0.9 must be)"
    )
    assert "prompt 'question 16', answer '16', completion '\\\\boxed{16}': 0; prompt 'question 17'" in problem
    assert "question 19" not in problem  # three examples are enough
    for option in ("data.reward", "the answer column of data.train_prompts", "data.gold_check: 0"):
        assert option in problem


def test_a_row_without_a_value_is_not_correct():
    (problem,) = _check(Knows(20), values=[math.nan] * 3 + [1.0] * 17)
    assert "17 of 20" in problem and ": no value" in problem


def test_a_reward_that_fails_on_all_is_a_problem_too():
    class Fails(BoxedMatch):
        def __call__(self, completions):
            raise KeyError("rules")

    (problem,) = _check(Fails())
    assert problem.startswith("data.train_prompts: the gold answers could not be scored")
    assert "raised on every one of 20 completions" in problem and "rules" in problem


def test_nothing_to_check():
    assert _check(Mute(0)) == []
    assert _check(Knows(0), sample_size=0) == []
    assert _check(Knows(0), prompts=[]) == []


# ---- in a run -------------------------------------------------------------------------------------------------------


@pytest.fixture
def unreadable(tmp_path):
    """Answers that no box can hold: `\\boxed{3}}` ends at its first closing brace."""
    path = tmp_path / "prompts.jsonl"
    rows = [{"question": f"From 1: +{i}.\n", "answer": f"{i}}}"} for i in range(10)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return JsonlPrompts(str(path))


@contextmanager
def _no_process_left():
    """To be left while the datamodule still lives: its end would be the end of its processes."""
    before = _children()
    yield
    assert _children() == before


def _children():
    return {child.pid for child in psutil.Process().children(recursive=True)}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_stops_before_training(workers, unreadable, tmp_path):
    data = datamodule(train_prompts=unreadable, val_prompts=unreadable, reward_workers=workers, gold_check=64)
    with _no_process_left(), pytest.raises(ConfigError) as raised:
        trainer(tmp_path).fit(module(), datamodule=data)
    assert [problem.split(": reward")[0] for problem in raised.value.problems] == [
        "data.train_prompts",
        "data.val_prompts",
    ]
    assert "finds only 0 of 10 sampled gold answers correct" in raised.value.problems[0]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_whose_answers_are_read_trains(workers, tmp_path):
    run, data = trainer(tmp_path, max_steps=2), datamodule(reward_workers=workers, gold_check=64)
    with _no_process_left():
        run.fit(module(), datamodule=data)
    assert run.global_step == 2


def test_the_command_exits_with_2_and_leaves_no_process(unreadable, tmp_path, monkeypatch):
    monkeypatch.setenv("STAPO_TEST_RUN", str(tmp_path))  # by which its processes are known
    done = stapo(
        "fit", "--config", "configs/quickstart.yaml", "--data.reward_workers=2", "--data.train_prompts=JsonlPrompts",
        f"--data.train_prompts.path={unreadable.path}", f"--trainer.logger.save_dir={tmp_path}",
    )  # fmt: skip
    assert done.returncode == 2
    assert "1 problem in the configuration" in done.stderr and "finds only 0 of 10" in done.stderr
    assert "Traceback" not in done.stderr
    left = [process for process in psutil.process_iter(["environ"]) if _belongs(process, str(tmp_path))]
    assert not left


def _belongs(process, run):
    return (process.info["environ"] or {}).get("STAPO_TEST_RUN") == run


def test_processes_end_where_something_else_stops_the_run(tmp_path):
    # The gold answers are scored by then: the module's own check comes after the datamodule's setup.
    data = datamodule(reward_workers=2)
    with _no_process_left(), pytest.raises(ConfigError, match=r"model\.prompts_per_update=3 does not divide"):
        trainer(tmp_path).fit(module(prompts_per_update=3), datamodule=data)


def test_processes_end_where_the_reward_breaks_its_contract(tmp_path):
    data = datamodule(reward=Fixed([1.0, 0.0]), reward_workers=2, gold_check=0)
    with _no_process_left(), pytest.raises(RewardError, match="returned 2 values for 1 completions"):
        trainer(tmp_path).fit(module(), datamodule=data)


def test_the_check_costs_its_sample(tmp_path):
    class Counts(BoxedMatch):
        calls = ()

        def __call__(self, completions):
            self.calls = (*self.calls, len(completions))
            return super().__call__(completions)

    reward = Counts()
    data = datamodule(reward=reward, gold_check=7)
    trainer(tmp_path, max_steps=2).fit(module(), datamodule=data)
    assert reward.calls == (7, 7, 32)  # train, held-out, and the one rollout of 8 x 4


def test_it_can_be_left_out(unreadable, tmp_path):
    run = trainer(tmp_path, max_steps=2)
    run.fit(module(), datamodule=datamodule(train_prompts=unreadable, gold_check=0))
    assert run.global_step == 2


def test_predict_and_test_do_not_check(unreadable, tmp_path):
    data = datamodule(test_prompts=unreadable, predict_prompts=unreadable)
    assert trainer(tmp_path).predict(module(), datamodule=data)
    assert trainer(tmp_path).test(module(), datamodule=data, verbose=False)


def test_the_values_of_the_check_are_bounded(tmp_path):
    data = datamodule(gold_check=-1, gold_check_share=1.5)
    with pytest.raises(ConfigError) as raised:
        trainer(tmp_path).fit(module(), datamodule=data)
    assert raised.value.problems == [
        "data.gold_check=-1: must be at least 0",
        "data.gold_check_share=1.5: must be at least 0 and at most 1",
    ]
