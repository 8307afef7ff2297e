"""DAPO's soft punishment of overlong completions (arXiv 2503.14476, equation 13)."""

from __future__ import annotations

from collections.abc import Sequence

from stapo_lightning.errors import bounded, raise_problems
from stapo_lightning.prompt import Prompt
from stapo_lightning.rewards.reward import Completion, Reward


class Overlong(Reward):
    """0 up to `max_tokens - buffer` tokens, from there falling linearly to -1 at `max_tokens`, and -1 beyond.

    To be added to a verifier by WeightedSum.

    Args:
        max_tokens: Length in tokens, end token included, from which the penalty is full, at least 1; the sampling's
            max_new_tokens punishes those that the limit cut off.
        buffer: Tokens before it over which the penalty grows, above 0 and at most `max_tokens`.

    Raises:
        ConfigError: A bound is not kept.

    """

    def __init__(self, max_tokens: int, buffer: int) -> None:
        raise_problems(
            bounded("Overlong.max_tokens", max_tokens, at_least=1),
            bounded("Overlong.buffer", buffer, above=0, at_most=max_tokens),
        )
        self.max_tokens = max_tokens
        self.buffer = buffer

    def __call__(self, completions: Sequence[Completion]) -> list[float | None]:
        return [self._penalty(c.num_tokens) for c in completions]

    def gold(self, prompt: Prompt) -> str:
        """Empty: no text is correct by its length."""
        return ""

    def answer(self, completion: Completion) -> str | None:
        """None: a length is no answer."""
        return None

    def _penalty(self, num_tokens: int) -> float:
        over = num_tokens - (self.max_tokens - self.buffer)
        return -min(max(over, 0), self.buffer) / self.buffer
