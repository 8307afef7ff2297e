"""Every gold answer of the benchmarks is right for its own problem, also in other dress, and wrong for the next."""

import random
import re

import pytest

from stapo_lightning.prompt import Prompt
from stapo_lightning.rewards import Completion, DapoMath, MathVerify
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
    assert _share(verifier, random.Random(0).sample(whole, 500), lambda text: text[len("\\boxed{") : -1]) == 1.0
    assert _accepted_of_others(verifier, bare) == []


def test_no_gold_answer_of_a_benchmark_is_right_for_another_problem():
    # A rule for strings is fast enough to compare all with all: what it takes for equal is equal but for its spelling.
    for name in BENCHMARKS:
        spelled = {}
        for gold in benchmark(name):
            key = DapoMath().answer(Completion(Prompt("?", gold), DapoMath().gold(Prompt("?", gold)), 1, False))
            spelled.setdefault(key, set()).add(gold)
        assert {frozenset(golds) for golds in spelled.values() if len(golds) > 1} == SPELLINGS.get(name, set())


SPELLINGS = {}
