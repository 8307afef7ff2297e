"""One training run with StapoModule, in a process of its own."""

from __future__ import annotations

import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch

from stapo_lightning.batch import RolloutBatch
from stapo_lightning.data import ArithmeticPrompts, RolloutDataModule
from stapo_lightning.distributed import Ranks
from stapo_lightning.models import backbone, load_causal_lm, output_head
from stapo_lightning.module import StapoModule
from stapo_lightning.objective import S2T, Clipped, KeepAll, TokenMean, policy_loss
from stapo_lightning.rewards import FunctionReward
from stapo_lightning.rollout import Sampling
from stapo_lightning.schedule import ConstantWithWarmup
from stapo_lightning.scoring import score
from stapo_lightning.states import joined
from tests.benchmarks.settings import CLIP_HIGH, CLIP_LOW, LEARNING_RATE, Setting, coin, differences

PARTS = ("rollout", "reward", "score", "update")


class Clock(L.Callback):
    """When each update ended, its completion tokens, and our own time/* metrics."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.cpu: list[float] = []
        self.tokens: list[int] = []
        self.parts: dict[str, list[float]] = {name: [] for name in PARTS}

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.ends.append(time.perf_counter())
        self.cpu.append(time.process_time())
        self.tokens.append(int(batch.completion_lengths.sum()))
        for name, values in self.parts.items():
            values.append(float(trainer.callback_metrics[f"time/{name}_s"]))


def module(setting: Setting, policy: Path, silence: bool) -> StapoModule:
    """The whole update in one micro-batch, as TRL does it, so that its forward is the one whose graph is used."""
    return StapoModule(
        policy=str(policy),
        surrogate=Clipped(CLIP_LOW, CLIP_HIGH),
        selector=S2T() if silence else KeepAll(),
        optimizer=lambda params: torch.optim.AdamW(params, lr=LEARNING_RATE, weight_decay=0.0, fused=True),
        schedule=ConstantWithWarmup(0),
        prompts_per_update=setting.prompts,
        tokens_per_micro_batch=setting.completions * (setting.limit + 64),
        max_grad_norm=1.0,
    )


def run(setting: Setting, policy: Path, silence: bool) -> dict[str, Any]:
    """Seconds and completion tokens of every update; `parts` from our own time/* metrics."""
    warnings.filterwarnings("ignore")
    clock = Clock()
    data = RolloutDataModule(
        reward=FunctionReward(coin),
        train_prompts=ArithmeticPrompts("train", 256),
        sampling=Sampling(max_new_tokens=setting.limit),
        prompts_per_batch=setting.prompts,
        group_size=setting.group_size,
        max_prompt_tokens=64,
        reward_workers=0,
        gold_check=0,
    )
    L.seed_everything(0, verbose=False)
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            accelerator="cpu",
            devices=1,
            max_steps=setting.warmup + setting.updates,
            max_epochs=-1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            limit_val_batches=0,
            default_root_dir=folder,
            callbacks=[clock],
        )
        trainer.fit(module(setting, policy, silence), datamodule=data)
    # time/update_s holds time/score_s.
    clock.parts["update"] = [u - s for u, s in zip(clock.parts["update"], clock.parts["score"], strict=True)]
    return {
        "seconds": differences(clock.ends),
        "cpu_seconds": differences(clock.cpu),
        "tokens": clock.tokens[1:],
        "parts": {name: values[1:] for name, values in clock.parts.items()},
    }


def frozen_loss(policy: Path, batch: RolloutBatch) -> tuple[float, torch.Tensor, float]:
    """Our loss of a frozen batch, the gradient of all parameters as one vector, and the share of clipped tokens."""
    model = load_causal_lm(str(policy), "sdpa")
    scores = score(batch, joined(backbone(model))(batch), output_head(model), model.config.vocab_size)
    weights = TokenMean()(batch.completion_mask, Ranks())
    output = policy_loss(batch, scores.log_probs, weights, Clipped(CLIP_LOW, CLIP_HIGH))
    output.loss.backward()
    clipped = (output.clipped_low | output.clipped_high)[batch.completion_mask].float().mean()
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return float(output.loss.detach()), torch.cat(gradients), float(clipped)
