"""One expression against another by the package math-verify, with guards for what its version 0.9.0 gets wrong."""

from __future__ import annotations

import functools
import logging
import re
from dataclasses import replace
from typing import Any

from stapo_lightning.optional import optional

_WANTED_BY = "the reward MathVerify"

# Relative difference from which two numbers differ, and the digits with which it is measured.
_TOLERANCE, _DIGITS = 1e-20, 30

# Words, and numerals of other bases such as 204_5: equal where they are spelled alike, and only there.
_SPELLED = re.compile(r"(?<![A-Za-z\\])[A-Za-z][a-z]{2,}|\d_")
_LETTER = re.compile(r"\\[A-Za-z]+|([A-Za-z])")
_DEGREES = re.compile(r"(\d+(?:\.\d+)?)\^\\circ(?![A-Za-z])")

# Read as the function, without its brackets too: gamma + 1 would be 1.
_GAMMA = re.compile(r"\\([gG])amma(?![A-Za-z])")

# What sympy raises on expressions that have no value.
_NO_VALUE = (ArithmeticError, AttributeError, NotImplementedError, RecursionError, TypeError, ValueError)


def equal_expressions(gold: str, found: str) -> bool:
    """Exactly equal, for LaTeX that is one expression, relation or interval; False where either cannot be read."""
    if _SPELLED.search(gold) or _SPELLED.search(found) or _other_case(gold, found):
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
    sympy = optional("sympy", "math", _WANTED_BY)
    return bool(expression.has(sympy.zoo, sympy.nan))


@functools.cache
def _package() -> Any:
    package = optional("math_verify", "math", _WANTED_BY)
    for module in ("parser", "grader"):
        # It warns that its timeouts are off.
        logging.getLogger(f"math_verify.{module}").setLevel(logging.ERROR)
    return package


def _relate_other_variables(left: Any, right: Any) -> bool:
    relational = optional("sympy", "math", _WANTED_BY).core.relational.Relational
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
    sympy = optional("sympy", "math", _WANTED_BY)
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
