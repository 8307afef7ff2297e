"""Exact comparison of the final boxed answer."""

from __future__ import annotations

from collections.abc import Sequence

from stapo_lightning.rewards.reward import Completion, Reward

_BOX = "\\boxed{"


def last_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}`, or None where there is none or its braces do not close.

    Runs in one pass over what follows the last box, so its time is linear in the text.
    """
    start = text.rfind(_BOX)
    if start < 0:
        return None
    depth = 1
    for position in range(start + len(_BOX), len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start + len(_BOX) : position]
    return None


class BoxedMatch(Reward):
    r"""1 where the last `\boxed{...}` equals the gold answer, whitespace aside, else 0.

    For answers with one spelling, such as the integers of the generated arithmetic.
    """

    def __call__(self, completions: Sequence[Completion]) -> list[float | None]:
        return [float(self._correct(c)) for c in completions]

    @staticmethod
    def _correct(completion: Completion) -> bool:
        found = last_boxed(completion.text)
        return found is not None and "".join(found.split()) == "".join(completion.prompt.answer.split())
