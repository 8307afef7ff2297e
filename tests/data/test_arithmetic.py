"""The generated task: problems, splits, worked solutions."""

import re
import signal
from contextlib import contextmanager

import pytest

from stapo_lightning.data import ArithmeticPrompts
from stapo_lightning.data.arithmetic import OPENERS, apply, split_of
from stapo_lightning.errors import ConfigError
from stapo_lightning.rewards import BoxedMatch, Completion

SPLITS = ("warmstart", "train", "val", "test")


def _steps(text):
    """Start and steps [(operator, operand)] of a problem."""
    start, rest = re.fullmatch(r"From (\d): (.*)\.\n", text).groups()
    return int(start), [(step[0], int(step[1:])) for step in rest.split(", ")]


def _worked(solution):
    """Steps [(opener, left, operator, right, result)] of a worked solution, and its boxed answer."""
    body, answer = re.fullmatch(r"((?:\w+ \d[+*-]\d=\d\. )+)Answer \\boxed\{(\d)\}", solution).groups()
    return re.findall(r"(\w+) (\d)([+*-])(\d)=(\d)\. ", body), answer


def _last_digit(left, operator, right):
    """Of the number written out, ten added to a difference that may be negative."""
    left, right = int(left), int(right)
    return str({"+": left + right, "-": 10 + left - right, "*": left * right}[operator])[-1]


@pytest.mark.parametrize(
    ("left", "operator", "right", "expected"),
    [(7, "+", 5, 2), (2, "*", 3, 6), (6, "-", 4, 2), (2, "-", 5, 7), (9, "*", 9, 1), (0, "-", 9, 1)],
)
def test_apply(left, operator, right, expected):
    assert apply(left, operator, right) == expected


@pytest.mark.parametrize("split", SPLITS)
def test_answers_and_worked_solutions_are_right(split):
    prompts = ArithmeticPrompts(split, size=300).load()
    openers = set()
    for prompt in prompts:
        start, asked = _steps(prompt.text)
        worked, boxed = _worked(prompt.solution)
        assert [(operator, int(right)) for _, _, operator, right, _ in worked] == asked
        value = str(start)
        for opener, left, operator, right, result in worked:
            assert left == value and result == _last_digit(left, operator, right)
            openers.add(opener)
            value = result
        assert boxed == prompt.answer == value
        assert prompt.source == "arithmetic"
        assert BoxedMatch()([Completion(prompt, prompt.solution, 1, False)]) == [1.0]
    assert openers == set(OPENERS)


def test_splits_share_no_problem():
    texts = [{prompt.text for prompt in ArithmeticPrompts(split, size=400, max_steps=2).load()} for split in SPLITS]
    assert [len(found) for found in texts] == [400] * 4
    assert len(set.union(*texts)) == 1600
    for split, found in zip(SPLITS, texts, strict=True):
        assert {split_of(text) for text in found} == {split}


def test_size_and_steps():
    prompts = ArithmeticPrompts("train", size=500, min_steps=3, max_steps=5).load()
    assert len({prompt.text for prompt in prompts}) == 500
    assert {len(_steps(prompt.text)[1]) for prompt in prompts} == {3, 4, 5}


def test_the_same_seed_gives_the_same_problems():
    first = ArithmeticPrompts("train", size=50, seed=1).load()
    assert ArithmeticPrompts("train", size=50, seed=1).load() == first
    assert ArithmeticPrompts("train", size=80, seed=1).load()[:50] == first
    other = ArithmeticPrompts("train", size=50, seed=2).load()
    assert len({p.text for p in first} & {p.text for p in other}) < 10


def test_slips():
    prompts = ArithmeticPrompts("warmstart", size=1000, min_steps=4, max_steps=4, slips=0.3).load()
    wrong = 0
    for prompt in prompts:
        start, asked = _steps(prompt.text)
        worked, boxed = _worked(prompt.solution)
        written = right_answer = str(start)
        for (operator, operand), (_, left, *_, result) in zip(asked, worked, strict=True):
            assert left == written  # the chain goes on from the slip
            wrong += result != _last_digit(left, operator, operand)
            written, right_answer = result, _last_digit(right_answer, operator, operand)
        assert boxed == written
        assert prompt.answer == right_answer  # the gold answer stays right
    # A random digit is right one time in ten: 0.27 of 4000 steps, std 0.007; four of them.
    assert wrong / 4000 == pytest.approx(0.27, abs=0.028)


@contextmanager
def _at_most(seconds):
    """Raises TimeoutError in the main thread after `seconds`."""

    def stop(*_):
        raise TimeoutError(f"still running after {seconds} s")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def test_more_problems_than_there_are():
    # Two steps: 10 starts x (3 operators x 10 operands)^2 = 9000 problems, a tenth of them in val.
    with _at_most(3.0), pytest.raises(ConfigError):
        ArithmeticPrompts("val", size=2000, min_steps=2, max_steps=2).load()
