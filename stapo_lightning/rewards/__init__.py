"""Rewards: a completion in, a number out."""

from stapo_lightning.rewards.boxed import BoxedMatch, last_boxed
from stapo_lightning.rewards.reasoning_gym import ReasoningGym
from stapo_lightning.rewards.reward import Completion, Reward, ScoredRows, score_completions

__all__ = ["BoxedMatch", "Completion", "ReasoningGym", "Reward", "ScoredRows", "last_boxed", "score_completions"]
