"""Answers compared by the package math-verify, with guards for what its version 0.9.0 gets wrong."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from stapo_lightning.optional import optional
from stapo_lightning.prompt import Prompt
from stapo_lightning.rewards.explosive import explosive
from stapo_lightning.rewards.normal_form import NormalForm, boxed_gold, found_in, gold_of, same_answer, same_labels
from stapo_lightning.rewards.reward import Completion, Reward
from stapo_lightning.rewards.structure import structure_of

# Parts of a list that are compared in any order; more are compared as they stand.
_MOST_PARTS = 30

# Relative difference from which two numbers differ, and the digits with which it is measured.
_TOLERANCE, _DIGITS = 1e-20, 30

_WORD = re.compile(r"(?<![A-Za-z\\])[A-Za-z][a-z]{2,}")
_IN_BASE = re.compile(r"^\d+_")

# What a percentage and an angle are without their sign.
_SCALES = {"%": r"\frac{%s}{100}", "°": r"\frac{(%s)\pi}{180}"}

# Read as the function, without its brackets too: gamma + 1 would be 1.
_GAMMA = re.compile(r"\\([gG])amma(?![A-Za-z])")

_RELATION = re.compile(r"\\(?:le|ge|ne)(?![A-Za-z]) ?|[=<>]")
_DEGREES = re.compile(r"(\d+(?:\.\d+)?)\^\\circ(?![A-Za-z])")
_LETTER = re.compile(r"\\[A-Za-z]+|([A-Za-z])")
_BRACKETS = {"()", "[]", "(]", "[)"}

# What sympy raises on expressions that have no value.
_NO_VALUE = (ArithmeticError, AttributeError, NotImplementedError, RecursionError, TypeError, ValueError)


class MathVerify(Reward):
    r"""1 where the final answer equals the gold answer mathematically, else 0.

    Takes the same final answer as DapoMath, and accepts what DapoMath accepts. What is left is cut into the parts of
    lists and unions (in any order), and of tuples, intervals and matrices (in order), which math-verify 0.9.0 compares.
    Equality is exact: 0.333 is wrong where the gold answer is 1/3, and so is 1/2^99 where it is 1/2^98. A percentage
    equals both its number and its value: 50 % is 50 or 0.5, as 180° is 180 or pi. Units, and the names before "=", may
    be left out and must otherwise agree. An answer that math-verify cannot read is wrong, and so are towers of powers,
    huge factorials and sums or integrals left unevaluated, unless they are spelled like the gold answer.

    Nothing a policy writes is evaluated as code. Computer algebra can take for ever: keep data.reward_workers above 0.
    Needs the extra "math".
    """

    def __call__(self, completions: Sequence[Completion]) -> list[float | None]:
        return [float(self._correct(c)) for c in completions]

    def gold(self, prompt: Prompt) -> str:
        r"""The gold answer in \boxed{}, without the solution that leads to it where the answer column holds one."""
        return boxed_gold(prompt.answer)

    def answer(self, completion: Completion) -> str | None:
        """The final answer in the spelling of DapoMath."""
        found = found_in(completion.text, gold_of(completion.prompt.answer))
        return None if found is None else found.value

    @staticmethod
    def _correct(completion: Completion) -> bool:
        gold = gold_of(completion.prompt.answer)
        found = found_in(completion.text, gold)
        if found is None:
            return False
        if same_answer(gold, found):
            return True
        if explosive(gold.value) or explosive(found.value):
            return False
        return any(_equal(g, f) for g, f in _readings(gold, found))


def _readings(gold: NormalForm, found: NormalForm) -> list[tuple[str, str]]:
    """The pairs of values of which one must be equal."""
    scale = next((unit for unit in (gold.unit, found.unit) if unit in _SCALES), "")
    if scale and "" in (gold.unit, found.unit):
        return [(gold.value, found.value), (_scaled(gold), _scaled(found))]
    if not same_labels(gold, found):
        return []
    return [(_equation(gold, found), _equation(found, gold))]


def _scaled(form: NormalForm) -> str:
    return _SCALES[form.unit] % form.value if form.unit else form.value


def _equation(form: NormalForm, other: NormalForm) -> str:
    """Its value alone, as 2x for y=2x; with its name where the other is an equation such as 2x-y=0."""
    return f"{form.name}={form.value}" if form.name and not other.name and "=" in other.value else form.value


def _equal(gold: str, found: str) -> bool:
    if gold == found:
        return True
    left, right = structure_of(gold), structure_of(found)
    if left.kind != right.kind:
        # An interval may be written as a relation.
        return {left.kind, right.kind} & _BRACKETS != set() and "" in (left.kind, right.kind) and _verified(gold, found)
    if len(left.parts) != len(right.parts):
        return False
    if left.kind == "":
        return _equal_parts(gold, found)
    if left.kind in ("list", "union") and len(left.parts) <= _MOST_PARTS:
        return _equal_in_any_order(left.parts, right.parts)
    return all(map(_equal, left.parts, right.parts))


def _equal_parts(gold: str, found: str) -> bool:
    """Relations with the same left side differ as their other sides do; all else is math-verify's."""
    left, right = _RELATION.split(gold), _RELATION.split(found)
    if len(left) > 1 and _RELATION.findall(gold) == _RELATION.findall(found) and left[0] == right[0]:
        return all(map(_equal, left[1:], right[1:]))
    if ("=" in gold) != ("=" in found):
        return False
    return _verified(gold, found)


def _equal_in_any_order(gold: Sequence[str], found: Sequence[str]) -> bool:
    left = list(found)
    for part in gold:
        place = next((i for i, other in enumerate(left) if _equal(part, other)), None)
        if place is None:
            return False
        del left[place]
    return True


def _verified(gold: str, found: str) -> bool:
    if _WORD.search(gold) or _WORD.search(found) or _IN_BASE.match(gold) or _IN_BASE.match(found):
        return False  # words and numerals of other bases are equal where they are spelled alike
    if _other_case(gold, found):
        return False
    left, right = _parsed(gold), _parsed(found)
    if left is None or right is None:
        return False
    # Both are quick. The first is right where math-verify's absolute tolerance is not, the second spares it a search.
    if _differ_at_some_point(left, right) or _relate_other_variables(left, right):
        return False
    return bool(_package().verify(left, right, allow_set_relation_comp=True, timeout_seconds=None))


def _other_case(gold: str, found: str) -> bool:
    """The same letters but for upper and lower case, which math-verify takes for the same variables."""
    left, right = ({m[1] for m in _LETTER.finditer(text) if m[1]} for text in (gold, found))
    return left != right and {letter.lower() for letter in left} == {letter.lower() for letter in right}


@functools.lru_cache(maxsize=256)
def _parsed(value: str) -> Any | None:
    package = _package()
    # LaTeX only: the reader of plain expressions calls eval. No timeout of its own: it is a signal, which raises off
    # the main thread, and the worker process has one.
    whole = package.LatexExtractionConfig()
    config = replace(whole, normalization_config=replace(whole.normalization_config, units=False))
    text = _GAMMA.sub(r"\\xi_{\1}", _DEGREES.sub(r"{(\\frac{\1\\pi}{180})}", value))
    found = package.parse(f"${text}$", [config], fallback_mode="no_fallback", parsing_timeout=None)
    return None if not found or _without_value(found[0]) else found[0]


def _without_value(expression: Any) -> bool:
    """It holds a pole, as 1/0 does. Two poles are not equal."""
    sympy = optional("sympy", "math", "the reward MathVerify")
    return bool(expression.has(sympy.zoo, sympy.nan))


@functools.cache
def _package() -> Any:
    package = optional("math_verify", "math", "the reward MathVerify")
    for module in ("parser", "grader"):
        # It warns that its timeouts are off.
        logging.getLogger(f"math_verify.{module}").setLevel(logging.ERROR)
    return package


def _relate_other_variables(left: Any, right: Any) -> bool:
    relational = optional("sympy", "math", "the reward MathVerify").core.relational.Relational
    if not (isinstance(left, relational) and isinstance(right, relational)):
        return False
    return {s.name for s in left.free_symbols} != {s.name for s in right.free_symbols}


def _differ_at_some_point(left: Any, right: Any) -> bool:
    """Two expressions whose values there differ, by more than rounding if they are not exact."""
    first, second = _at_some_point(left), _at_some_point(right)
    if first is None or second is None:
        return False
    if first.is_Rational and second.is_Rational:
        return bool(first != second)
    first, second = first.evalf(_DIGITS), second.evalf(_DIGITS)
    if not (first.is_finite and second.is_finite):
        return False
    return bool(abs(first - second) > _TOLERANCE * max(abs(first), abs(second)))


def _at_some_point(expression: Any) -> Any | None:
    """The value of an expression where each variable has a value of its own; None where that is no number."""
    sympy = optional("sympy", "math", "the reward MathVerify")
    if not isinstance(expression, sympy.Expr):
        return None
    try:
        names = sorted({symbol.name for symbol in expression.free_symbols})
        values = {name: sympy.Rational(3 * place + 4, 3 * place + 5) for place, name in enumerate(names)}
        exact = expression.replace(lambda part: part.is_Float, lambda part: sympy.Rational(str(part)))
        value = exact.subs({s: values[s.name] for s in exact.free_symbols}).doit()
        return value if value.is_number and value.evalf(_DIGITS).is_number else None
    except _NO_VALUE:
        return None
