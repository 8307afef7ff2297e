"""Small honest stand-ins and builders for whole runs."""

from __future__ import annotations

from pathlib import Path

import lightning as L
import torch

from stapo_lightning.batch import Selection
from stapo_lightning.data import ArithmeticPrompts, Decoding, RolloutDataModule
from stapo_lightning.models import resolve_policy
from stapo_lightning.module import StapoModule
from stapo_lightning.objective import TokenSelector
from stapo_lightning.rewards import BoxedMatch
from stapo_lightning.rollout import Sampling
from stapo_lightning.schedule import ConstantWithWarmup

TINY = resolve_policy("stapo_lightning/assets/tiny_qwen3")


def datamodule(**changes) -> RolloutDataModule:
    """Eight prompts a rollout, four completions each."""
    settings = dict(
        reward=BoxedMatch(),
        train_prompts=ArithmeticPrompts("train", 40),
        val_prompts=ArithmeticPrompts("val", 12),
        sampling=Sampling(max_new_tokens=40),
        prompts_per_batch=8,
        group_size=4,
        max_prompt_tokens=32,
        decodings=[
            Decoding("greedy", 1, Sampling(temperature=0.0, max_new_tokens=40)),
            Decoding("sampled", 2, Sampling(max_new_tokens=40)),
        ],
        reward_workers=0,
        gold_check=0,  # rewards of tests are often no verifiers
    )
    return RolloutDataModule(**(settings | changes))


def module(**changes) -> StapoModule:
    """The tiny policy, SGD so that a parameter's change is its gradient, two updates a rollout."""
    settings = dict(
        policy=TINY,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        schedule=ConstantWithWarmup(0),
        prompts_per_update=4,
        max_grad_norm=0.0,
    )
    return StapoModule(**(settings | changes))


def trainer(folder: Path, **changes) -> L.Trainer:
    """One CPU process, silent, nothing saved unless asked for."""
    settings = dict(
        accelerator="cpu",
        devices=1,
        max_steps=2,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
        use_distributed_sampler=False,
        default_root_dir=str(folder),
    )
    L.seed_everything(0, verbose=False)  # the prompts' order and the sampling follow it
    return L.Trainer(**(settings | changes))


def parameters(model: torch.nn.Module) -> torch.Tensor:
    """All parameters as one vector."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])


class OddPromptsSilenced(TokenSelector):
    """Silences every token of each prompt with an odd number: on two ranks, all that the second one has."""

    def __call__(self, batch, scores, ranks, update) -> Selection:
        silenced = batch.completion_mask & (batch.group_ids % 2 == 1)[:, None]
        return Selection(silenced=silenced, candidates=silenced, tau_h=torch.tensor(float("nan")))


class Recorder(L.Callback):
    """Keeps the batches and outputs of every rollout."""

    def __init__(self) -> None:
        self.batches: list = []
        self.records: list = []
        self.metrics: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.batches.append(batch)
        self.records.append(outputs["record"])
        self.metrics.append({k: float(v) for k, v in trainer.callback_metrics.items()})
