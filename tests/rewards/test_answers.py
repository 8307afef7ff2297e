"""Where the final answer of a completion stands, and that hostile text is read in linear time."""

import time

import pytest

from stapo_lightning.rewards import DapoMath, MathVerify
from stapo_lightning.rewards.answers import stated_answer
from stapo_lightning.rewards.normal_form import LONGEST, normal_form
from stapo_lightning.rewards.structure import structure_of
from tests.builders import completions


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\boxed{42}", "42"),
        (r"\boxed{41} and \boxed{42}", "42"),
        (r"\boxed{41} and \boxed{42", None),
        (r"\boxed{}", ""),
        ("Answer: 42", "42"),
        ("answer : 42\nThat was it.", "42"),
        ("  > **The final answer:** `42`  ", "42"),
        ("It adds up. Answer: 42", "42"),
        ("Answer:\n\n  42", "42"),
        ("Answer:\n\n\n\n\n42", None),
        ("Answer: $$\n42\n$$", "42"),
        ("Answer: 41\nAnswer: 42", "42"),
        ("the answer to it: 42", None),
        ("My answer: 42", None),
        ("#### 42", "42"),
        ("#### 41\n#### 42\n", "42"),
        ("Answer: 42\n#### 41", "42"),
        ("\\boxed{42}\n#### 41", "42"),
        ("\\boxed{41}\n**Answer:** 42", "42"),
        ("Answer: 41\n\\boxed{42}", "42"),
        ("####", None),
        ("42", None),
        ("", None),
    ],
)
def test_stated_answer(text, expected):
    assert stated_answer(text) == expected


MILLION = 1_000_000
HUGE = {
    "braces": "{" * MILLION,
    "boxes": "\\boxed{" * 100_000,
    "nested": "\\boxed{" + "{" * 100_000 + "}" * 100_000 + "}",
    "never closed": "\\boxed{" + "{" * MILLION,
    "one long answer": "\\boxed{" + "1" * MILLION + "}",
    "answers": "Answer: " * 100_000,
    "lines of answers": "Answer:\n" * 100_000,
    "one long line": "Answer: " + "x" * MILLION,
    "hashes": "#" * MILLION,
    "spaces": " " * MILLION,
    "newlines": "\n" * MILLION,
    "spaces behind stops": ". " * 500_000,
    "spaces behind a stop": "." + " " * MILLION + "answer",
    "stars": "*" * MILLION,
    "almost": "the final answer " * 60_000,
    "lone surrogates": "\\boxed{\ud800}" * 50_000,
    "zeros": "\\boxed{\x00}" * 50_000,
    "fractions": "\\boxed{" + "\\frac{" * 160_000,
}


@pytest.mark.parametrize("verifier", [DapoMath(), MathVerify()], ids=["DapoMath", "MathVerify"])
@pytest.mark.parametrize("text", HUGE.values(), ids=HUGE)
def test_a_huge_completion_is_read_in_linear_time(verifier, text):
    row = completions([text], answer="42")
    started = time.perf_counter()
    assert verifier(row) == [0.0]
    verifier.answer(row[0])
    assert time.perf_counter() - started < 2.0  # what is quadratic takes hours


PIECES = [
    *("{", "}", "(", "[", "1,", "1 ", "1/", "a/", "\\frac", "\\frac{", "\\frac{1", "\\sqrt", "\\pm", "^{", "_{a}", "="),
    *("x=", "x=1,", "\\text{", "\\text{a}", " and ", "\\$", "^\\circ", "\\cup", "\\\\", "&", "e1", ".", "\\cdot ", "+"),
]


@pytest.mark.parametrize("piece", PIECES)
def test_the_longest_answers_are_spelled_in_time(piece):
    text = (piece * LONGEST)[:LONGEST]
    started = time.perf_counter()
    structure_of(normal_form(text).value)
    assert time.perf_counter() - started < 0.5


def test_an_answer_longer_than_any_is_none():
    verifier = DapoMath()
    longest, longer = completions([f"\\boxed{{{'1' * n}}}" for n in (LONGEST, LONGEST + 1)])
    assert verifier.answer(longest) == "1" * LONGEST
    assert verifier.answer(longer) is None
