"""Another reward for each data source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from stapo_lightning.errors import RewardError
from stapo_lightning.prompt import Prompt
from stapo_lightning.rewards.reward import Completion, Reward, checked_values


@dataclass(frozen=True)
class Rule:
    """Which prompts a reward is for.

    Attributes:
        source: Source of the prompts, such as gsm8k, or a pattern with *, ? and [seq], such as AIME*. Upper and lower
            case differ.
        reward: Scores their completions.

    """

    source: str
    reward: Reward


class BySource(Reward):
    """The reward of the first rule that names the source of the prompt.

    Args:
        rules: Asked in this order.
        default: Reward of the prompts that no rule names; None makes such a prompt an error that stops the run.

    """

    def __init__(self, rules: Sequence[Rule], default: Reward | None = None) -> None:
        self.rules = list(rules)
        self.default = default

    def __call__(self, completions: Sequence[Completion]) -> list[float | None]:
        chosen = [self._reward(c.prompt) for c in completions]
        values: dict[int, float] = {}
        for reward in {id(reward): reward for reward in chosen}.values():
            rows = [row for row, its in enumerate(chosen) if its is reward]
            scored = checked_values(reward, [completions[row] for row in rows])
            values |= dict(zip(rows, scored, strict=True))
        return [values[row] for row in range(len(completions))]

    def gold(self, prompt: Prompt) -> str:
        """That of the reward for the prompt's source.

        Raises:
            RewardError: There is none for it.

        """
        return self._reward(prompt).gold(prompt)

    def answer(self, completion: Completion) -> str | None:
        """That of the reward for the prompt's source.

        Raises:
            RewardError: There is none for it.

        """
        return self._reward(completion.prompt).answer(completion)

    def _reward(self, prompt: Prompt) -> Reward:
        for rule in self.rules:
            if fnmatchcase(prompt.source, rule.source):
                return rule.reward
        if self.default is None:
            named = ", ".join(repr(rule.source) for rule in self.rules) or "nothing"
            raise RewardError(
                f"BySource: no rule for the source {prompt.source!r}, the rules name {named}; add one to data.reward's"
                " rules, or set its default"
            )
        return self.default
