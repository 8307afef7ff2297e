"""reasoning-gym's own verifiers, and the entry of a problem as text that a prompt can carry."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from stapo_lightning.optional import optional
from stapo_lightning.prompt import Prompt
from stapo_lightning.rewards.answers import last_boxed
from stapo_lightning.rewards.reward import Completion, Reward

# Nothing a model writes may be evaluated as code. These verifiers call eval or sympy.parse_expr on the answer; they are
# given it only where it can be nothing but what the task asks for. No small letter, bracket or brace: no keyword, no
# call. No power of powers: no number that takes for ever. Integrals and polynomials need too much for such a rule.
_LISTS = re.compile(r"[A-Z0-9_\s,.'\"\[\]-]{0,4000}")
_ARITHMETIC = re.compile(r"(?!.*\*\*)[0-9+*/().\s-]{0,200}", re.DOTALL)
_ALLOWED = {
    "binary_matrix": _LISTS,
    "n_queens": _LISTS,
    "spiral_matrix": _LISTS,
    "string_insertion": _LISTS,
    "countdown": _ARITHMETIC,
    "puzzle24": _ARITHMETIC,
}
REFUSED = ("intermediate_integration", "polynomial_multiplication", "simple_integration")

_OPEN, _CLOSE = "<answer>", "</answer>"


class ReasoningGym(Reward):
    r"""The score in [0, 1] that a task's own verifier gives to the final answer, for prompts of ReasoningGymPrompts.

    The final answer is the last <answer>...</answer>, in it or else in the whole completion the last \boxed{...}, and
    without either the whole completion. Many verifiers give a small score to a wrong answer in the right format.
    Answers that a verifier would evaluate as code, or that it fails on, count as none.
    """

    def __call__(self, completions: Sequence[Completion]) -> list[float | None]:
        return [self._score(completion) for completion in completions]

    def gold(self, prompt: Prompt) -> str:
        """The answer in tags, as it may hold braces; "" for the tasks that have many right answers and name none."""
        return f"{_OPEN}{prompt.answer}{_CLOSE}" if prompt.answer else ""

    def answer(self, completion: Completion) -> str | None:
        """The final answer as the task's verifier gets it; None where the completion is empty."""
        return final_answer(completion.text) or None

    @staticmethod
    def _score(completion: Completion) -> float:
        if not completion.prompt.metadata:
            raise ValueError("the prompt carries no reasoning-gym entry; use ReasoningGymPrompts as its source")
        stored = json.loads(completion.prompt.metadata)
        task = stored["task"]
        answer: str | None = final_answer(completion.text)
        if task in REFUSED or (task in _ALLOWED and not _ALLOWED[task].fullmatch(answer or "")):
            answer = None
        verifier, entry = _verifier(task, tuple(stored["settings"])), decode(stored["entry"])
        try:
            return float(verifier(answer, entry))
        except Exception:
            # Some verifiers parse without care, so that "banana" for a number raises; one that is broken does so again.
            return float(verifier(None, entry))


def final_answer(text: str) -> str:
    r"""What a completion gives as its answer: in <answer> tags, in \boxed{}, or all of it."""
    _, opened, behind = text.rpartition(_OPEN)
    inside = behind.partition(_CLOSE)[0] if opened and _CLOSE in behind else text
    boxed = last_boxed(inside)
    return inside.strip() if boxed is None else boxed.strip()


@functools.lru_cache(maxsize=64)
def _verifier(task: str, settings: tuple[str, ...]) -> Callable[[str | None, Any], float]:
    return create(task, settings).score_answer


def create(task: str, settings: Sequence[str], **sizes: int) -> Any:
    """The data set of a task.

    Args:
        task: Its name in reasoning-gym.
        settings: "name=value" each, the value as JSON or else text.
        sizes: seed and size.

    """
    factory = optional("reasoning_gym.factory", "reasoning-gym", "the task source and reward ReasoningGym")
    named = (setting.partition("=") for setting in settings)
    return factory.create_dataset(task, **{name.strip(): _value(value) for name, _, value in named}, **sizes)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text.strip()


def encode(value: Any) -> Any:
    """An entry as JSON values that `decode` turns back exactly: verifiers tell tuples from lists, and 1 from "1".

    Raises:
        TypeError: It holds something else than text, numbers, lists, tuples, sets and dicts.

    """
    if value is None or type(value) in (str, bool, int, float):
        return value
    if type(value) is list:
        return [encode(item) for item in value]
    if type(value) in (tuple, set):
        return {type(value).__name__: [encode(item) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[encode(key), encode(item)] for key, item in value.items()]}
    if hasattr(value, "item"):  # a number of numpy
        return encode(value.item())
    raise TypeError(f"{type(value).__name__} {str(value)[:60]!r}")


def decode(value: Any) -> Any:
    """The reverse of `encode`."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if isinstance(value, dict):
        ((kind, items),) = value.items()
        if kind == "dict":
            return {decode(key): decode(item) for key, item in items}
        return (tuple if kind == "tuple" else set)(decode(item) for item in items)
    return value
