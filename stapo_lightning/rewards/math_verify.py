"""Answers compared by their value: cut into parts, which computer algebra compares."""

from __future__ import annotations

import re
from collections.abc import Sequence

from stapo_lightning.optional import require
from stapo_lightning.prompt import Prompt
from stapo_lightning.rewards.explosive import explosive
from stapo_lightning.rewards.expressions import equal_expressions
from stapo_lightning.rewards.normal_form import NormalForm, boxed_gold, found_in, gold_of, same_answer, same_labels
from stapo_lightning.rewards.reward import Completion, Reward
from stapo_lightning.rewards.structure import structure_of

# Parts of a list that are compared in any order; more are compared as they stand.
_MOST_PARTS = 30

# What a percentage and an angle are without their sign.
_SCALES = {"%": r"\frac{%s}{100}", "°": r"\frac{(%s)\pi}{180}"}

_RELATION = re.compile(r"\\(?:le|ge|ne)(?![A-Za-z]) ?|[=<>]")
_BRACKETS = {"()", "[]", "(]", "[)"}


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

    Raises:
        ConfigError: It is not installed.

    """

    def __init__(self) -> None:
        # It is imported by the first comparison that needs it: gold answers are equal as text and would not miss it.
        require("math_verify", "math", "the reward MathVerify")

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
        return (
            {left.kind, right.kind} & _BRACKETS != set()
            and "" in (left.kind, right.kind)
            and equal_expressions(gold, found)
        )
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
    return equal_expressions(gold, found)


def _equal_in_any_order(gold: Sequence[str], found: Sequence[str]) -> bool:
    left = list(found)
    for part in gold:
        place = next((i for i, other in enumerate(left) if _equal(part, other)), None)
        if place is None:
            return False
        del left[place]
    return True
