r"""Answers in one spelling: LaTeX, spaces, units and names aside, equal answers become equal strings.

The rules know spellings and not values: `1/2` is `\frac{1}{2}`, and 0.5 is another answer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from stapo_lightning.rewards.answers import stated_answer
from stapo_lightning.rewards.spelling import CHARACTERS, MARKUP, SPACES, VALUES, WORDS, rewrite
from stapo_lightning.rewards.structure import closes_last, split_top
from stapo_lightning.rewards.units import split_degrees, split_sign, split_unit

# No final answer is longer, in characters; bounds the work of the rules.
LONGEST = 2000

_STARTS, _ENDS = ",;: \n", ".,;: \n"
_NAME = re.compile(
    r"((?:[A-Za-z]|\\[a-z]+)(?:_(?:\w|\{\\?\w+\}))?(?:\([A-Za-z](?:,[A-Za-z])*\))?)(?:=|\\in(?![a-z]) ?)"
)
_WORDS_ALONE = re.compile(r"[A-Za-z](?:[a-z]|[A-Za-z'-]+[A-Za-z])")
_CHOICE = re.compile(r"\(?([A-Za-z])\)?\.?")


@dataclass(frozen=True)
class NormalForm:
    """An answer in one spelling.

    Attributes:
        value: What counts, such as 5 or (1,2).
        name: What it is the value of, such as x in x = 5; "" where that is left out.
        unit: Symbol of its unit, such as cm^2; "" where that is left out.

    """

    value: str
    name: str = ""
    unit: str = ""


def gold_of(answer: str) -> NormalForm:
    """A gold answer, bare or as a completion states it."""
    return normal_form(_bare(answer))


def boxed_gold(answer: str) -> str:
    """A completion that states a gold answer, itself bare or as a completion states it."""
    return f"\\boxed{{{_bare(answer)}}}"


def found_in(text: str, gold: NormalForm) -> NormalForm | None:
    """The final answer of a completion; None where it states none, an empty one, or one of more than LONGEST.

    A calculation such as a+b=2+3=5 gives its last side, unless the gold answer is an equation itself.
    """
    stated = stated_answer(text)
    if stated is None or len(stated) > LONGEST:
        return None
    form = normal_form(stated)
    if "=" in form.value and "=" not in gold.value and not gold.name and len(split_top(form.value, ",")) == 1:
        form = replace(form, value=form.value.rpartition("=")[2])
    return form if form.value else None


def same_answer(first: NormalForm, second: NormalForm) -> bool:
    """Equal values, under labels that agree."""
    return first.value == second.value and same_labels(first, second)


def same_labels(first: NormalForm, second: NormalForm) -> bool:
    """No two names or units that differ; one side may leave them out."""
    return len({first.name, second.name} - {""}) < 2 and len({first.unit, second.unit} - {""}) < 2


def normal_form(text: str) -> NormalForm:
    """The one spelling of an answer."""
    text = rewrite(MARKUP, text.translate(CHARACTERS)).lstrip(_STARTS).rstrip(_ENDS)
    text, sign = split_sign(text)
    text, unit = split_unit(text)
    text, angle = split_degrees(text)
    name, value = _split_name(rewrite(SPACES, rewrite(WORDS, text)).rstrip(_ENDS))
    return NormalForm(_value(value), name, sign or unit or angle)


def _bare(answer: str) -> str:
    stated = stated_answer(answer)
    return answer if stated is None else stated


def _split_name(text: str) -> tuple[str, str]:
    """("x", "5") for x=5 and ("x", "1,2") for x=1,x=2 or x=1,2; ("", text) where the parts have several names."""
    parts = split_top(text, ",")
    matches = [_NAME.match(part) for part in parts]
    values = [part[match.end() :] if match else part for part, match in zip(parts, matches, strict=True)]
    names = {match[1] for match in matches if match}
    if len(names) != 1 or matches[0] is None or not all(values) or any("=" in value for value in values):
        return "", text
    return names.pop(), ",".join(values)


def _value(text: str) -> str:
    text = _without_braces(text)
    if _WORDS_ALONE.fullmatch(text):
        return text.lower()
    choice = _CHOICE.fullmatch(text)
    return choice[1] if choice else rewrite(VALUES, text)


def _without_braces(text: str) -> str:
    r"""The inside of `{...}` or `\{...\}`, where one pair of braces is around all."""
    if text.startswith(r"\{") and text.endswith(r"\}") and closes_last(text[1:]):
        return text[2:-2]
    return text[1:-1] if text.startswith("{") and closes_last(text) else text
