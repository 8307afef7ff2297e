"""Rewards: a completion in, a number out."""

from stapo_lightning.rewards.boxed import BoxedMatch, last_boxed
from stapo_lightning.rewards.reward import Completion, Reward, ScoredRows, score_completions
from stapo_lightning.rewards.workers import RewardWorkers

__all__ = ["BoxedMatch", "Completion", "Reward", "RewardWorkers", "ScoredRows", "last_boxed", "score_completions"]
