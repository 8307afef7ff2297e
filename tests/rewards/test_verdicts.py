"""What each verifier says of many pairs of answers, in both directions."""

import subprocess
import sys
import threading

import pytest

from stapo_lightning.prompt import Prompt
from stapo_lightning.rewards import Completion, DapoMath, MathVerify
from tests.cli import ROOT
from tests.rewards.verdicts import GROUPS, UNSTATED

ROWS = [(group, *row) for group, rows in GROUPS.items() for row in rows]
VERIFIERS = [DapoMath(), MathVerify()]


def _completion(text, gold):
    return Completion(Prompt("?", gold), text, 1, False)


def _stated(group, answer):
    return answer if group == "where the answer stands" else f"So it is \\boxed{{{answer}}}."


def _says(verifier, text, gold):
    (value,) = verifier([_completion(text, gold)])
    return {0.0: False, 1.0: True}[value]


def test_the_table_is_large_and_asks_for_both_verdicts():
    assert len({row[1:3] for row in ROWS}) == len(ROWS) >= 150
    assert all({dapo for *_, (dapo, _) in rows} == {True, False} for rows in GROUPS.values())
    assert all(math >= dapo for *_, (dapo, math) in ROWS)


@pytest.mark.parametrize(("group", "answer", "gold", "verdicts"), ROWS, ids=lambda value: ascii(value))
def test_verdict(group, answer, gold, verdicts):
    assert tuple(_says(verifier, _stated(group, answer), gold) for verifier in VERIFIERS) == verdicts


@pytest.mark.parametrize("verifier", VERIFIERS, ids=["DapoMath", "MathVerify"])
@pytest.mark.parametrize("text", UNSTATED)
def test_what_states_no_answer_is_wrong(verifier, text):
    assert not _says(verifier, text, "42")
    assert verifier.answer(_completion(text, "42")) is None


def test_math_verify_works_off_the_main_thread():
    # Its own limits of time are signals, which only the main thread may set.
    said = []

    def ask():
        said.extend(_says(MathVerify(), f"\\boxed{{{text}}}", "$1$") for text in ("$1$", "3-2", "2"))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert said == [True, True, False]


@pytest.mark.parametrize("verifier", VERIFIERS, ids=["DapoMath", "MathVerify"])
def test_answers_that_the_rule_finds_equal_are_equal_strings(verifier):
    spellings = [r"\boxed{x = \dfrac12}", "Answer: $1/2$.", "#### 1 / 2", r"\boxed{\frac{1}{2} \text{ cm}}"]
    assert {verifier.answer(_completion(text, "?")) for text in spellings} == {r"\frac{1}{2}"}


def test_computer_algebra_is_imported_by_the_first_comparison_that_needs_it():
    script = (
        "import sys; from stapo_lightning.prompt import Prompt; from stapo_lightning.rewards import *\n"
        "def ask(text):\n"
        "    row = Completion(Prompt('?', '42'), text, 1, False)\n"
        "    print(MathVerify()([row])[0], 'sympy' in sys.modules)\n"
        "ask(r'\\boxed{42}'); ask(r'\\boxed{6 \\cdot 7}')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.split() == ["1.0", "False", "1.0", "True"]
