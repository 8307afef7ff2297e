"""A function of yours as a reward."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stapo_lightning.rewards.reward import Completion, Reward


class FunctionReward(Reward):
    r"""What a function of the completion's text and the gold answer returns.

    Write it at the top level of a file in the folder where `stapo` is started, and name it by its import path:

        def my_function(text: str, answer: str) -> float | None: ...   # in my_file.py: my_file.my_function

    For more than text and answer, or to score many completions at once, subclass Reward instead.

    Args:
        function: Takes the decoded completion and the gold answer. Returns the reward, above 0.5 for correct; None or
            nan where it cannot tell. \boxed{answer} must be correct, or set data.gold_check: 0.

    """

    def __init__(self, function: Callable[[str, str], float | None]) -> None:
        self.function = function

    def __call__(self, completions: Sequence[Completion]) -> list[float | None]:
        return [self.function(c.text, c.prompt.answer) for c in completions]
