r"""A generated, verifiable task: chains of additions, subtractions and multiplications of last digits.

From 7: +5, *3, -4.
So 7+5=2. Then 2*3=6. Next 6-4=2. Answer \boxed{2}.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from typing import Literal

from stapo_lightning.data.prompts import PromptSource
from stapo_lightning.errors import ConfigError, bounded, raise_problems
from stapo_lightning.prompt import Prompt

Split = Literal["warmstart", "train", "val", "test"]

# Each problem belongs to one split by a hash of its text, so no split ever shares a problem with another.
_SHARES: dict[Split, range] = {
    "warmstart": range(0, 40),
    "train": range(40, 80),
    "val": range(80, 90),
    "test": range(90, 100),
}

# Draws in a row without a new problem after which a split counts as exhausted.
_MISSES = 20_000

# How a worked solution may open a step; the policy learns to choose among them freely.
OPENERS = ("So", "Then", "Now", "Next", "Let", "Thus")


def split_of(text: str) -> Split:
    """The split that a problem belongs to."""
    bucket = zlib.crc32(text.encode()) % 100
    return next(name for name, share in _SHARES.items() if bucket in share)


def apply(left: int, operator: str, right: int) -> int:
    """The last digit of `left operator right`, always in 0..9."""
    return {"+": left + right, "-": left - right, "*": left * right}[operator] % 10


class ArithmeticPrompts(PromptSource):
    """Distinct chains of last-digit arithmetic, with worked solutions.

    Args:
        split: Which disjoint part of all problems to draw from.
        size: Number of problems, at least 1.
        min_steps: Shortest chain, at least 1.
        max_steps: Longest chain, at least min_steps.
        slips: Probability that a step of a worked solution has a random digit as its result; the chain goes on from it.
            The gold answer stays right.
        seed: Seed of the draw.

    """

    def __init__(
        self, split: Split, size: int, min_steps: int = 2, max_steps: int = 4, slips: float = 0.0, seed: int = 0
    ) -> None:
        self.split = split
        self.size = size
        self.min_steps = min_steps
        self.max_steps = max_steps
        self.slips = slips
        self.seed = seed

    def load(self) -> Sequence[Prompt]:
        raise_problems(
            bounded("ArithmeticPrompts.size", self.size, at_least=1),
            bounded("ArithmeticPrompts.min_steps", self.min_steps, at_least=1),
            bounded("ArithmeticPrompts.max_steps", self.max_steps, at_least=self.min_steps),
            bounded("ArithmeticPrompts.slips", self.slips, at_least=0, at_most=1),
        )
        source = random.Random(f"{self.split} {self.seed}")
        found: dict[str, Prompt] = {}
        misses = 0
        while len(found) < self.size:
            prompt = _problem(source, source.randint(self.min_steps, self.max_steps), self.slips)
            new = split_of(prompt.text) == self.split and prompt.text not in found
            misses = 0 if new else misses + 1
            if new:
                found[prompt.text] = prompt
            elif misses == _MISSES:
                raise ConfigError(
                    [
                        f"ArithmeticPrompts.size={self.size}: the split {self.split!r} has only about {len(found)}"
                        f" problems of {self.min_steps} to {self.max_steps} steps; ask for fewer or raise max_steps"
                    ]
                )
        return list(found.values())


def _problem(source: random.Random, steps: int, slips: float) -> Prompt:
    start = source.randrange(10)
    answer = written = start
    asked, worked = [], []
    for _ in range(steps):
        operator, operand = source.choice("+-*"), source.randrange(10)
        result = source.randrange(10) if source.random() < slips else apply(written, operator, operand)
        asked.append(f"{operator}{operand}")
        worked.append(f"{source.choice(OPENERS)} {written}{operator}{operand}={result}. ")
        answer, written = apply(answer, operator, operand), result
    return Prompt(
        text=f"From {start}: {', '.join(asked)}.\n",
        answer=str(answer),
        source="arithmetic",
        solution=f"{''.join(worked)}Answer \\boxed{{{written}}}",
    )
