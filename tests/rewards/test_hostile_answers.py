"""What verifiers make of answers that are written to harm them, in the processes that run them."""

import time

import pytest

from stapo_lightning.rewards import DapoMath, MathVerify, RewardWorkers
from stapo_lightning.rewards.explosive import explosive
from tests.builders import completions

LIMIT_S = 2.0

HARMLESS = {
    "one million characters": "x" * 1_000_000 + " \\boxed{41}",
    "one million digits": "\\boxed{" + "1" * 1_000_000 + "}",
    "nested braces": "\\boxed{" + "{" * 100_000 + "}" * 100_000 + "}",
    "nested fractions": "\\boxed{" + "\\frac{1}{" * 200 + "1" + "}" * 200 + "}",
    "nested brackets": "\\boxed{" + "(" * 900 + "1,2" + ")" * 900 + "}",
    "tower": "\\boxed{9^9^9^9}",
    "braced tower": "\\boxed{9^{9^{9^{9}}}}",
    "power of a power": "\\boxed{(9^{9999})^{9999}}",
    "plain tower": "Answer: 9**9**9**9",
    "huge exponent": "\\boxed{2^{99999999999}}",
    "huge factorial": "\\boxed{99999999!}",
    "factorial of a factorial": "\\boxed{(99!)!}",
    "factorial of a power": "\\boxed{(10^9)!}",
    "sum": "\\boxed{\\sum_{i=1}^{10^9} \\frac{1}{i!}}",
    "deep matrix": "\\boxed{" + "\\begin{pmatrix}" * 60 + "1" + "\\end{pmatrix}" * 60 + "}",
    "wide matrix": "\\boxed{\\begin{pmatrix}" + "1&" * 500 + "1\\end{pmatrix}}",
    "lone surrogate": "\\boxed{\ud800}",
    "zero bytes": "\\boxed{4\x002}\x00",
    "division by zero": "\\boxed{\\frac{1}{0}}",
    "not a number": "\\boxed{\\infty - \\infty}",
}
# Nothing cheap sees these coming: the limit of wall time does.
SLOW = {"sum in a power": "\\boxed{(9999!+1)^{9999}}"}


def _code(path):
    calls = [f"__import__('os').system('touch {path}')", f"open('{path}','w')"]
    wrappers = ["\\boxed{%s}", "Answer: %s", "\\boxed{\\text{%s}}", "\\boxed{f(%s)=1}", "\\boxed{1,%s}", "#### %s"]
    return [wrapper % call for wrapper in wrappers for call in calls]


def _score(verifier, texts, answer="42"):
    pool = RewardWorkers(verifier, 1, LIMIT_S)
    try:
        return pool.score(completions(texts, answer=answer))
    finally:
        pool.close()


@pytest.mark.parametrize("verifier", [DapoMath(), MathVerify()], ids=["DapoMath", "MathVerify"])
def test_hostile_rows_cost_nothing_but_themselves(verifier):
    good = "\\boxed{42}"
    texts = [text for hostile in HARMLESS.values() for text in (hostile, good)]
    started = time.perf_counter()
    scored = _score(verifier, texts)
    assert time.perf_counter() - started < 10 * LIMIT_S
    assert dict(zip(HARMLESS, scored.values[::2], strict=True)) == dict.fromkeys(HARMLESS, 0.0)
    assert scored.values[1::2] == [1.0] * len(HARMLESS)


@pytest.mark.parametrize("verifier", [DapoMath(), MathVerify()], ids=["DapoMath", "MathVerify"])
def test_what_a_policy_writes_is_never_run(verifier, tmp_path):
    path = tmp_path / "X"
    texts = _code(path)
    scored = _score(verifier, [*texts, "\\boxed{42}"])
    assert scored.values == [0.0] * len(texts) + [1.0]
    # Where the gold answer is code as well, equal spelling is all there is.
    assert _score(verifier, texts[:2], answer=f"__import__('os').system('touch {path}')").values == [1.0, 0.0]
    assert not path.exists()


@pytest.mark.parametrize("text", SLOW.values(), ids=SLOW)
def test_an_answer_that_takes_for_ever_costs_its_limit(text):
    started = time.perf_counter()
    scored = _score(MathVerify(), ["\\boxed{42}", text, "\\boxed{6 \\cdot 7}"])
    assert time.perf_counter() - started < 4 * LIMIT_S
    assert (scored.values[0], scored.values[2]) == (1.0, 1.0)
    assert (scored.errors, scored.timeouts) == (0, 1)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("2^{2^{10}}", True),
        ("2^{2^{3}}", False),
        ("10^{100}", False),
        ("10^{10000}", True),
        ("e^{x^2}", False),
        ("(x^2)^3", False),
        (r"\frac{100!}{2^{50}}", False),
        ("2004!", False),
        ("20040!", True),
        ("(n-k)!", False),
        ("n!!", True),
        (r"\binom{2n}{n}", False),
        (r"\binom{99999}{5}", True),
        (r"\int_0^1 x", True),
        (r"\infty", False),
        ("((((((1))))))", False),
        ("(" * 20 + ")" * 20, True),
    ],
)
def test_explosive(value, expected):
    assert explosive(value) == expected
