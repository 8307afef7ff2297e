"""Every gold answer of the benchmarks is right for its own problem, also in other dress, and wrong for the next."""

import re

import pytest

from stapo_lightning.prompt import Prompt
from stapo_lightning.rewards import Completion, DapoMath, MathVerify
from stapo_lightning.rewards.normal_form import gold_of, normal_form
from tests.rewards.gold_answers import BENCHMARKS, benchmark, gsm8k

VERIFIERS = {"DapoMath": DapoMath(), "MathVerify": MathVerify()}

# Pairs of neighbours whose answers are spelled differently and are equal.
EQUAL = {("5", "x=5"), ("x=5", "5")}


def _share(verifier, golds, dressed=lambda text: text):
    rows = [Completion(Prompt("?", gold), dressed(verifier.gold(Prompt("?", gold))), 1, False) for gold in golds]
    return sum(verifier(rows)) / len(rows)


def _accepted_of_others(verifier, golds):
    found = []
    for place, gold in enumerate(golds):
        others = (golds[(place + step) % len(golds)] for step in range(1, len(golds)))
        other = next(answer for answer in others if _bare(answer) != _bare(gold))
        row = Completion(Prompt("?", gold), verifier.gold(Prompt("?", other)), 1, False)
        if (_bare(gold), _bare(other)) not in EQUAL and verifier([row]) == [1.0]:
            found.append((gold, other))
    return found


def _bare(answer):
    return answer.rpartition("####")[2].strip()


def _dressed(text):
    """The same answer as another hand would write it."""
    text = text.replace(r"\frac", r"\dfrac").replace("+", " + ").replace("=", " = ").replace(r"^\circ", r"^{\circ}")
    text = re.sub(r"(?<!\\left)(?<!\\)\((.*?)(?<!\\right)(?<!\\)\)", r"\\left(\1\\right)", text)
    return f"So it is\n$$\n{text}.\n$$\nDone."


@pytest.mark.parametrize("verifier", VERIFIERS.values(), ids=VERIFIERS)
@pytest.mark.parametrize("name", BENCHMARKS)
def test_benchmark(verifier, name):
    golds = benchmark(name)
    assert _share(verifier, golds) == 1.0
    assert _share(verifier, golds, _dressed) == 1.0
    assert _accepted_of_others(verifier, golds) == []


@pytest.mark.parametrize("verifier", VERIFIERS.values(), ids=VERIFIERS)
def test_gsm8k(verifier):
    whole = gsm8k()
    bare = [_bare(answer) for answer in whole]
    assert len(bare) == 8792
    assert _share(verifier, bare) == 1.0
    assert _share(verifier, whole) == 1.0  # worked solutions
    assert _accepted_of_others(verifier, bare) == []


# Gold answers of a benchmark to which the rule for strings gives one value; names and units may still tell them apart.
SAME_VALUE = {
    "math500": [
        {"90", r"90^\circ"},
        {"5", "x=5"},
        {"120", r"120^\circ"},
        {r"36^\circ", r"\$36", "36"},
        {r"\frac14", r"\frac{1}{4}"},
        {"30", r"30^\circ"},
        {"10080", r"10,\!080"},
        {"15", r"15\mbox{ cm}^2"},
        {r"2 \sqrt{5}", r"2\sqrt{5}"},
    ],
    "minerva": [{"+2", "2"}],
    "olympiadbench": [
        {"$2n$", "$2 n$"},
        {"$f(x)=1$", "$k=1$", "1"},
        {"$N=n$", "$f(n)=n$"},
        {"$k=3$", "3"},
        {r"$4^{\circ}$", "4"},
        {r"$8 \%$", "8"},
        {"45", r"$45^{\circ}$"},
        {"$1/3$", r"$\frac{1}{3}$"},
        {"44", "$44$"},
    ],
}


@pytest.mark.parametrize("name", BENCHMARKS)
def test_answers_of_one_spelling_have_one_value(name):
    spelled = {}
    for gold in benchmark(name):
        spelled.setdefault(gold_of(gold).value, set()).add(gold)
    assert [golds for golds in spelled.values() if len(golds) > 1] == SAME_VALUE.get(name, [])


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_spelling_is_spelled_like_itself(name):
    values = [gold_of(gold).value for gold in benchmark(name)]
    assert [normal_form(value).value for value in values] == values
