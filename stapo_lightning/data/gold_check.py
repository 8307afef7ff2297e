"""Scores gold answers before training: a reward that cannot read them teaches nothing, and nothing else says so."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

from stapo_lightning.errors import RewardError
from stapo_lightning.prompt import Prompt
from stapo_lightning.rewards import Completion, Reward, ScoredRows, reward_name

# Failing gold answers that the message shows.
_EXAMPLES = 3


def gold_problems(
    option: str,
    prompts: Sequence[Prompt],
    reward: Reward,
    score: Callable[[Reward, Sequence[Completion]], ScoredRows],
    sample_size: int,
    min_share: float,
) -> list[str]:
    """The problem, if there is one, with the reward of the gold answers of a sample of the prompts.

    Args:
        option: Where the prompts come from, such as data.train_prompts.
        prompts: The problems; the sample is the same for the same number of them.
        reward: Says in `gold` what a right completion of a prompt looks like; prompts where that is "" are left out.
        score: Scores completions with a reward, as the run does; above 0.5 is correct.
        sample_size: Prompts to score; 0 or less scores none.
        min_share: Share, in [0, 1], that must be correct.

    """
    chosen = sorted(random.Random(0).sample(range(len(prompts)), min(max(sample_size, 0), len(prompts))))
    # As short as can be: a penalty for length must not count against a gold answer.
    golds = [Completion(prompts[i], gold, 1, False) for i in chosen if (gold := reward.gold(prompts[i]))]
    if not golds:
        return []
    ways_out = (
        f"set data.reward to one that reads these answers, correct the answer column of {option}, or leave the check"
        " out with data.gold_check: 0"
    )
    try:
        values = score(reward, golds).values
    except RewardError as error:
        return [f"{option}: the gold answers could not be scored; {ways_out}. {error}"]
    wrong = [(gold, value) for gold, value in zip(golds, values, strict=True) if not value > 0.5]
    correct = len(golds) - len(wrong)
    if correct >= min_share * len(golds):
        return []
    examples = "; ".join(_example(gold, value) for gold, value in wrong[:_EXAMPLES])
    return [
        f"{option}: {reward_name(reward)} finds only {correct} of {len(golds)} sampled gold answers correct (at least"
        f" data.gold_check_share={min_share} must be), so right completions would go unrewarded. {examples}; {ways_out}"
    ]


def _example(gold: Completion, value: float) -> str:
    shown = "no value" if math.isnan(value) else f"{value:g}"
    return f"prompt {gold.prompt.text[:60]!r}, answer {gold.prompt.answer!r}, completion {gold.text[:60]!r}: {shown}"
