"""A weighted sum of rewards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from stapo_lightning.errors import ConfigError
from stapo_lightning.prompt import Prompt
from stapo_lightning.rewards.reward import Completion, Reward, checked_values


@dataclass(frozen=True)
class Weighted:
    """One summand.

    Attributes:
        reward: Scores completions.
        weight: Factor of its values, finite; negative turns a score into a penalty.

    """

    reward: Reward
    weight: float = 1.0


class WeightedSum(Reward):
    """The sum of weight * value over its parts; a row that one of them cannot score has no value.

    In evaluation a completion counts as correct where the sum is above 0.5. Give the verifier weight 1; with Overlong
    beside it at weight 1, a right completion that is half into the buffer or longer then counts as wrong.

    Args:
        parts: The rewards and their weights, at least one. The first that names an answer speaks for all: list the
            verifier before what only shapes.

    Raises:
        ConfigError: There is no part, or a weight is not finite.

    """

    def __init__(self, parts: Sequence[Weighted]) -> None:
        if not parts:
            raise ConfigError(["WeightedSum.parts=[]: must hold at least one reward"])
        problems = [
            f"WeightedSum.parts[{place}].weight={part.weight}: must be finite"
            for place, part in enumerate(parts)
            if not math.isfinite(part.weight)
        ]
        if problems:
            raise ConfigError(problems)
        self.parts = list(parts)

    def __call__(self, completions: Sequence[Completion]) -> list[float | None]:
        columns = [[part.weight * value for value in checked_values(part.reward, completions)] for part in self.parts]
        return [sum(row) for row in zip(*columns, strict=True)]  # nan in one part stays nan

    def gold(self, prompt: Prompt) -> str:
        """That of the first part that has one."""
        return next((gold for part in self.parts if (gold := part.reward.gold(prompt))), "")

    def answer(self, completion: Completion) -> str | None:
        """That of the first part that finds one."""
        answers = (part.reward.answer(completion) for part in self.parts)
        return next((answer for answer in answers if answer is not None), None)
