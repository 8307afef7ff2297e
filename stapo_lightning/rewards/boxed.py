"""Exact comparison of the final boxed answer."""

from __future__ import annotations

from collections.abc import Sequence

from stapo_lightning.rewards.answers import last_boxed
from stapo_lightning.rewards.reward import Completion, Reward


class BoxedMatch(Reward):
    r"""1 where the last `\boxed{...}` equals the gold answer, whitespace aside, else 0.

    For answers with one spelling, such as the integers of the generated arithmetic.
    """

    def __call__(self, completions: Sequence[Completion]) -> list[float | None]:
        return [float(self._correct(c)) for c in completions]

    def answer(self, completion: Completion) -> str | None:
        """The last boxed content without whitespace."""
        found = last_boxed(completion.text)
        return None if found is None else "".join(found.split())

    def _correct(self, completion: Completion) -> bool:
        return self.answer(completion) == "".join(completion.prompt.answer.split())
