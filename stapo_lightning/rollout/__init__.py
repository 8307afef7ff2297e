"""Rollout engines: how groups of completions are sampled."""

from stapo_lightning.rollout.engine import RolloutEngine, RolloutLoad, Sampling, Vocabulary
from stapo_lightning.rollout.hf import HFEngine
from stapo_lightning.rollout.vllm import VLLMEngine
from stapo_lightning.rollout.vllm_server import VLLMServerEngine

__all__ = ["HFEngine", "RolloutEngine", "RolloutLoad", "Sampling", "VLLMEngine", "VLLMServerEngine", "Vocabulary"]
