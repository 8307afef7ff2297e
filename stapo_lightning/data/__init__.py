"""Prompts, and the datamodule that turns them into rollouts."""

from stapo_lightning.data.arithmetic import ArithmeticPrompts
from stapo_lightning.data.datamodule import Decoding, RolloutDataModule
from stapo_lightning.data.prompts import PromptSource

__all__ = ["ArithmeticPrompts", "Decoding", "PromptSource", "RolloutDataModule"]
