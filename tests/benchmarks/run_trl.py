"""One training run with TRL's GRPOTrainer, in a process of its own."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from tests.benchmarks.settings import CLIP_HIGH, CLIP_LOW, LEARNING_RATE, Setting, coin, differences, prompt_texts


def reward(completions: list[str], **_: Any) -> list[float]:
    """The reward in TRL's signature."""
    return [coin(text) for text in completions]


def trainer(setting: Setting, policy: Path, folder: str, callbacks: list[TrainerCallback]) -> GRPOTrainer:
    """TRL set for speed on a CPU: one forward and backward an update, sampling log-probs not scored
    a second time (it leaves them out where updates and rollouts are aligned), no reference, no logging, no saving."""
    config = GRPOConfig(
        output_dir=folder,
        max_steps=setting.warmup + setting.updates,
        per_device_train_batch_size=setting.completions,
        gradient_accumulation_steps=1,
        steps_per_generation=1,
        num_iterations=1,
        num_generations=setting.group_size,
        max_completion_length=setting.limit,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        beta=0.0,
        epsilon=CLIP_LOW,
        epsilon_high=CLIP_HIGH,
        loss_type="dapo",
        scale_rewards="group",
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        gradient_checkpointing=False,
        use_cpu=True,
        bf16=False,
        use_vllm=False,
        model_init_kwargs={"dtype": "float32", "attn_implementation": "sdpa"},
        report_to="none",
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=0,
    )
    return GRPOTrainer(
        model=str(policy),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": prompt_texts(256)}),
        callbacks=callbacks,
    )


class Clock(TrainerCallback):
    """When each update ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.cpu: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.ends.append(time.perf_counter())
        self.cpu.append(time.process_time())


def run(setting: Setting, policy: Path) -> dict[str, Any]:
    """Seconds and completion tokens of every update."""
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        running = trainer(setting, policy, folder, [clock])
        parts: dict[str, list[float]] = {"rollout": [], "reward": [], "update": []}
        rollouts: list[Any] = []
        _timed(running, "_generate", parts["rollout"], rollouts)
        _timed(running, "_calculate_rewards", parts["reward"])
        _timed(running, "training_step", parts["update"])
        running.train()
    tokens = [sum(map(len, completion_ids)) for _, completion_ids, *_ in rollouts]
    # TRL samples inside of its training step.
    parts["update"] = [u - r - w for u, r, w in zip(parts["update"], parts["rollout"], parts["reward"], strict=True)]
    return {
        "seconds": differences(clock.ends),
        "cpu_seconds": differences(clock.cpu),
        "tokens": tokens[1:],
        "parts": {name: values[1:] for name, values in parts.items()},
    }


def _timed(owner: Any, name: str, seconds: list[float], results: list[Any] | None = None) -> None:
    method = getattr(owner, name)

    def timed(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        result = method(*args, **kwargs)
        seconds.append(time.perf_counter() - started)
        if results is not None:
            results.append(result)
        return result

    setattr(owner, name, timed)


def frozen_loss(policy: Path, setting: Setting, batch: dict[str, torch.Tensor]) -> tuple[float, torch.Tensor]:
    """TRL's loss of a frozen batch, and the gradient of all parameters as one vector."""
    with tempfile.TemporaryDirectory() as folder:
        running = trainer(setting, policy, folder, [])
        running.current_gradient_accumulation_steps = 1
        running.model.train()
        loss = running.compute_loss(running.model, batch)
        loss.backward()
        gradients = [p.grad.flatten() for p in running.model.parameters() if p.grad is not None]
        return float(loss.detach()), torch.cat(gradients)
