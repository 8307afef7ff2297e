"""Prompts, and the datamodule that turns them into rollouts."""

from stapo_lightning.data.arithmetic import ArithmeticPrompts
from stapo_lightning.data.benchmarks import Benchmark, Benchmarks
from stapo_lightning.data.columns import Columns
from stapo_lightning.data.datamodule import Decoding, RolloutDataModule
from stapo_lightning.data.hf import HFPrompts
from stapo_lightning.data.jsonl import JsonlPrompts
from stapo_lightning.data.parquet import ParquetPrompts
from stapo_lightning.data.prompts import PromptSource
from stapo_lightning.data.reasoning_gym import ReasoningGymPrompts
from stapo_lightning.data.wording import Wording

__all__ = [
    "ArithmeticPrompts",
    "Benchmark",
    "Benchmarks",
    "Columns",
    "Decoding",
    "HFPrompts",
    "JsonlPrompts",
    "ParquetPrompts",
    "PromptSource",
    "ReasoningGymPrompts",
    "RolloutDataModule",
    "Wording",
]
