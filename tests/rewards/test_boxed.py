"""The final boxed answer."""

import time

import pytest

from stapo_lightning.rewards import BoxedMatch, last_boxed
from tests.builders import completions


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\boxed{42}", "42"),
        (r"First \boxed{41}. Then \boxed{42}", "42"),
        (r"\boxed{42}. Then \boxed{}", ""),
        (r"\boxed{\frac{1}{2}} and more }", r"\frac{1}{2}"),
        (r"\boxed{{{a}b}{c}}d}", "{{a}b}{c}"),
        (r"\boxed{\boxed{42}}", "42"),
        (r"\boxed{ 4 2 }", " 4 2 "),
        ("\\boxed{4\n2}", "4\n2"),
        (r"\boxed{42", None),
        (r"\boxed{\frac{1}{2}", None),
        (r"\boxed 42", None),
        (r"boxed{42}", None),
        ("", None),
    ],
)
def test_last_boxed(text, expected):
    assert last_boxed(text) == expected


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        (r"So 40+2=42. Answer \boxed{42}", 1.0),
        (r"\boxed{ 42 }", 1.0),
        (r"\boxed{41} \boxed{42}", 1.0),
        (r"\boxed{42} \boxed{41}", 0.0),
        (r"\boxed{42.0}", 0.0),
        (r"\boxed{}", 0.0),
        (r"\boxed{4242}", 0.0),
        ("42", 0.0),
        (r"\boxed{42", 0.0),  # cut off by the length limit
    ],
)
def test_reward(text, reward):
    assert BoxedMatch()(completions([text], answer="42")) == [reward]


def test_whitespace_of_the_gold_answer_does_not_matter():
    assert BoxedMatch()(completions([r"\boxed{x+1}", r"\boxed{x + 1}", r"\boxed{x+2}"], answer=" x +1\n")) == [
        1.0,
        1.0,
        0.0,
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\\boxed{" + "{" * 100_000 + "}" * 100_000 + "}", "{" * 100_000 + "}" * 100_000),
        ("\\boxed{" + "{" * 100_000, None),
        ("\\boxed{" * 100_000, None),
    ],
    ids=["nested", "never closed", "boxes"],
)
def test_hostile_text_is_read_in_linear_time(text, expected):
    started = time.perf_counter()
    assert last_boxed(text) == expected
    assert time.perf_counter() - started < 2.0
