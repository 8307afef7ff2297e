"""Rewards: a completion in, a number out."""

from stapo_lightning.rewards.boxed import BoxedMatch, last_boxed
from stapo_lightning.rewards.model_verifier import ModelVerifier
from stapo_lightning.rewards.reasoning_gym import ReasoningGym
from stapo_lightning.rewards.reward import Completion, Reward, ScoredRows, reward_name, score_completions
from stapo_lightning.rewards.workers import RewardWorkers

__all__ = [
    "BoxedMatch",
    "Completion",
    "ModelVerifier",
    "ReasoningGym",
    "Reward",
    "RewardWorkers",
    "ScoredRows",
    "last_boxed",
    "reward_name",
    "score_completions",
]
