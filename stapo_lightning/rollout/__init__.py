"""Rollout engines: how groups of completions are sampled."""

from stapo_lightning.rollout.engine import RolloutEngine, RolloutLoad, Sampling, Vocabulary
from stapo_lightning.rollout.hf import HFEngine

__all__ = ["HFEngine", "RolloutEngine", "RolloutLoad", "Sampling", "Vocabulary"]
