"""Weak scaling: the same work for each process, and more processes. Measured on this machine, and a model of GPUs.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.weak_scaling            # measures 1 and 2 processes
    python -m tests.benchmarks.weak_scaling --model_only                 # prints the table of 8 and 64 GPUs

Measured: a Qwen3 of width 128 (settings.py), 4 prompts a process with 8 completions of 64 tokens each, one thread a
process, gloo. Efficiency is the time of an update on 1 process over that on 2.

Modelled, and not measured: an update of the paper's on N GPUs in M machines of 8. Every GPU has 8 completions of 16,384
tokens, one a micro-batch, as on the paper's 64. Of P parameters, gathered in bf16, B are gathered again for the
backward (layers, not embedding and head); there are k micro-batches, after r of which float32 gradients are summed: the
last one, or every one where the config says so (14B).

    gathered  W = 2 k (2 P + B)      scoring and forward gather all, the backward its layers
    reduced   R = 4 r P
    t_comm    = max((W + R) (N - 1) / N / NVLink, (W + R) (M - 1) / M / InfiniBand)
    t_compute = k tokens 5 (2 P + 2 layers width tokens) / (peak utilisation)
                one forward to score, one for the gradient, one again under checkpointing, and a backward of two; the
                second term is attention, the lower triangle of it, with heads of `width` together
    efficiency: t_compute / (t_compute + t_comm) where nothing overlaps, t_compute / max of both where all does

A ring sends each byte once over every link: NVLink carries (N - 1) / N of a collective for each GPU, the network
cards of a machine together (M - 1) / M. Latencies, sampling, and waiting for the rank with the longest completions are
not in it. A token that HFEngine samples from a sharded policy gathers it once: 2 P bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch

from stapo_lightning.memory import meta_model
from stapo_lightning.rewards import Reward
from tests.benchmarks.settings import SETTINGS, coin, make_policy, median
from tests.shapes import qwen3

# Bytes a second in one direction. 900 GB/s of NVLink 4 are both directions of a GPU; 8 cards of 400 Gb/s a machine.
# Both as in MLCommons' description of an 8 x H200 node: mlcommons/inference_results_v4.1,
# closed/NVIDIA/systems/H200-SXM-141GBx8_TRT_MaxQ.json ("18x 4th Gen NVLink, 900GB/s", "10x 400Gbe Infiniband": 8 of
# the 10 are taken to carry the gradients).
NVLINK = 450e9
INFINIBAND = 8 * 400e9 / 8
# FLOP/s in bf16 without sparsity of an H100 or H200 (https://glennklockwood.com/garden/processors/h100), and the share
# of it that training reaches: an assumption.
PEAK = 989e12
UTILISATION = 0.4

# Whose configs/models/*.yaml reduces after every micro-batch.
EVERY_PASS = ("qwen3_14b",)

PROMPTS, LIMIT = 4, 64


class Coin(Reward):
    """1 for half of all completions, so that nearly every group teaches something."""

    def __call__(self, completions: Any) -> list[float]:
        return [coin(completion.text) for completion in completions]


class Clock(L.Callback):
    """Times updates and rollouts.

    Args:
        path: Takes the seconds as JSON, from rank 0.
        warmup: Rollouts that are left out.

    """

    def __init__(self, path: str, warmup: int = 2) -> None:
        self.path, self.warmup = path, warmup
        self.seconds: dict[str, list[float]] = {"update": [], "whole": []}
        self.last = 0.0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        now = time.perf_counter()
        if batch_idx >= self.warmup:
            metrics = trainer.callback_metrics
            self.seconds["update"].append(float(metrics["time/update_s"]) + float(metrics["time/score_s"]))
            self.seconds["whole"].append(now - self.last)
        self.last = now

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.is_global_zero:
            Path(self.path).write_text(json.dumps(self.seconds))


def measure(processes: int, strategy: str, policy: Path, rollouts: int) -> dict[str, float]:
    """Median seconds of an update, and of a rollout with its update."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "seconds.json"
        command = [
            sys.executable, "-m", "stapo_lightning", "fit", "--config=configs/quickstart.yaml",
            f"--model.policy={policy}",
            "--model.selector=KeepAll",
            "--model.tokens_per_micro_batch=4096",
            f"--model.prompts_per_update={PROMPTS * processes}",
            f"--data.prompts_per_batch={PROMPTS * processes}",
            f"--data.sampling.max_new_tokens={LIMIT}",
            "--data.gold_check=0",
            "--data.reward=tests.benchmarks.weak_scaling.Coin",
            f"--trainer.max_steps={rollouts}",
            "--trainer.limit_val_batches=0",
            "--trainer.logger=false",
            f"--trainer.default_root_dir={folder}",
            f"--trainer.devices={processes}",
            f"--trainer.strategy={strategy}",
            "--trainer.callbacks=tests.benchmarks.weak_scaling.Clock",
            f"--trainer.callbacks.path={path}",
        ]  # fmt: skip
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=170)
        if done.returncode:
            raise SystemExit(done.stdout[-2000:] + done.stderr[-2000:])
        return {name: median(values) for name, values in json.loads(path.read_text()).items()}


def print_measured(rollouts: int, rounds: int) -> None:
    """Measures 1 process and 2 with each strategy, one after the other and that several times over."""
    cases = ((1, "auto"), (2, "ddp"), (1, "fsdp2"), (2, "fsdp2"))
    found: dict[tuple[int, str], list[dict[str, float]]] = {case: [] for case in cases}
    with tempfile.TemporaryDirectory() as folder:
        policy = make_policy(SETTINGS["tiny-full"], Path(folder))
        for _ in range(rounds):
            for case in cases:
                found[case].append(measure(*case, policy, rollouts))
    print(
        f"{'processes':>9} {'strategy':>8} {'update s':>9} {'efficiency':>10} {'with rollout s':>14} {'efficiency':>10}"
    )
    for case in cases:
        update, whole = (median([times[name] for times in found[case]]) for name in ("update", "whole"))
        alone = found[1, "fsdp2" if case[1] == "fsdp2" else "auto"]
        ratios = [median([t[name] for t in alone]) / now for name, now in (("update", update), ("whole", whole))]
        print(f"{case[0]:9} {case[1]:>8} {update:9.3f} {ratios[0]:10.0%} {whole:14.3f} {ratios[1]:10.0%}")


def modelled(name: str, gpus: int, peak: float, utilisation: float) -> dict[str, float]:
    """Bytes and seconds of one update by the formulas above, and of one token that HFEngine samples."""
    config = qwen3(name)
    model = meta_model(config, torch.bfloat16)
    parameters = sum(p.numel() for p in model.parameters())
    again = sum(p.numel() for p in model.base_model.layers.parameters())
    passes, tokens, machines = 8, 16384, max(1, gpus // 8)
    gathered, reduced = 2 * passes * (2 * parameters + again), 4 * parameters * (passes if name in EVERY_PASS else 1)

    def seconds(size: float) -> float:
        return max(size * (gpus - 1) / gpus / NVLINK, size * (machines - 1) / machines / INFINIBAND)

    width = config.num_attention_heads * config.head_dim
    # Embeddings are looked up: their matrix takes part once, as the head.
    matrices = parameters - (0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size)
    flops = passes * tokens * 5 * (2 * matrices + 2 * config.num_hidden_layers * width * tokens)
    return {
        "gathered": gathered,
        "reduced": reduced,
        "t_comm": seconds(gathered + reduced),
        "t_compute": flops / (peak * utilisation),
        "t_token": seconds(2 * parameters),
    }


def print_modelled(peak: float, utilisation: float) -> None:
    """The table."""
    print(
        f"A model, not a measurement: NVLink {NVLINK / 1e9:.0f} GB/s a GPU and direction, InfiniBand"
        f" {INFINIBAND / 1e9:.0f} GB/s a machine, {peak / 1e12:.0f} TFLOP/s at {utilisation:.0%}"
    )
    print(
        f"{'policy':>10} {'GPUs':>5} {'gathered':>10} {'reduced':>9} {'t_comm':>8} {'t_compute':>10}"
        f" {'no overlap':>11} {'all':>6} {'HFEngine, a token':>18}"
    )
    for name in ("qwen3_1_7b", "qwen3_8b", "qwen3_14b"):
        for gpus in (8, 64):
            found = modelled(name, gpus, peak, utilisation)
            work, wait = found["t_compute"], found["t_comm"]
            print(
                f"{name:>10} {gpus:5} {found['gathered'] / 1e9:7.0f} GB {found['reduced'] / 1e9:6.1f} GB {wait:6.2f} s"
                f" {work:8.1f} s {work / (work + wait):11.1%} {work / max(work, wait):6.0%}"
                f" {found['t_token'] * 1e3:15.0f} ms"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model_only", action="store_true", help="print the table of 8 and 64 GPUs and measure nothing"
    )
    parser.add_argument("--rollouts", type=int, default=6, help="of each measurement; the first two are not timed")
    parser.add_argument("--rounds", type=int, default=1, help="times that everything is measured")
    parser.add_argument("--tflops", type=float, default=PEAK / 1e12, help="of one GPU in bf16, without sparsity")
    parser.add_argument("--utilisation", type=float, default=UTILISATION, help="share of them that an update reaches")
    options = parser.parse_args()
    if not options.model_only:
        print_measured(options.rollouts, options.rounds)
    print_modelled(options.tflops * 1e12, options.utilisation)


if __name__ == "__main__":
    main()
