"""The rule of DAPO (arXiv 2503.14476) and of STAPO's recipe: one spelling for answers, compared as strings."""

from __future__ import annotations

from collections.abc import Sequence

from stapo_lightning.prompt import Prompt
from stapo_lightning.rewards.normal_form import boxed_gold, found_in, gold_of, same_answer
from stapo_lightning.rewards.reward import Completion, Reward


class DapoMath(Reward):
    r"""1 where the final answer is spelled like the gold answer, LaTeX, units and the name before "=" aside, else 0.

    The final answer is what the last `\boxed{...}` or `Answer:` line holds, or else the line behind the last `####`.
    No computer algebra: 0.5 is wrong where the gold answer is 1/2, and so is 2,1 where it is 1,2.
    """

    def __call__(self, completions: Sequence[Completion]) -> list[float | None]:
        return [float(self._correct(c)) for c in completions]

    def gold(self, prompt: Prompt) -> str:
        r"""The gold answer in \boxed{}, without the solution that leads to it where the answer column holds one."""
        return boxed_gold(prompt.answer)

    def answer(self, completion: Completion) -> str | None:
        """The final answer in its one spelling."""
        found = found_in(completion.text, gold_of(completion.prompt.answer))
        return None if found is None else found.value

    @staticmethod
    def _correct(completion: Completion) -> bool:
        gold = gold_of(completion.prompt.answer)
        found = found_in(completion.text, gold)
        return found is not None and same_answer(found, gold)
