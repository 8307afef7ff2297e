"""Rewards: a completion in, a number out."""

from stapo_lightning.rewards.answers import last_boxed
from stapo_lightning.rewards.boxed import BoxedMatch
from stapo_lightning.rewards.by_source import BySource, Rule
from stapo_lightning.rewards.dapo_math import DapoMath
from stapo_lightning.rewards.function_reward import FunctionReward
from stapo_lightning.rewards.math_verify import MathVerify
from stapo_lightning.rewards.model_verifier import ModelVerifier
from stapo_lightning.rewards.overlong import Overlong
from stapo_lightning.rewards.reasoning_gym import ReasoningGym
from stapo_lightning.rewards.reward import Completion, Reward, ScoredRows, reward_name, score_completions
from stapo_lightning.rewards.weighted_sum import Weighted, WeightedSum
from stapo_lightning.rewards.workers import RewardWorkers

__all__ = [
    "BoxedMatch",
    "BySource",
    "Completion",
    "DapoMath",
    "FunctionReward",
    "MathVerify",
    "ModelVerifier",
    "Overlong",
    "ReasoningGym",
    "Reward",
    "RewardWorkers",
    "Rule",
    "ScoredRows",
    "Weighted",
    "WeightedSum",
    "last_boxed",
    "reward_name",
    "score_completions",
]
