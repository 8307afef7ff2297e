"""Ours against TRL 1.16's GRPOTrainer: wall time of an update and peak memory, side by side on the same two cores.

    python -m venv .bench && .bench/bin/pip install -e ".[bench]"
    .bench/bin/python -m tests.benchmarks.versus_trl                       # all settings
    .bench/bin/python -m tests.benchmarks.versus_trl --settings tiny --repetitions 5

Both train the same float32 policy with random weights on the same prompts, reward, loss (token mean, clip-higher, no
KL), optimiser (fused AdamW, gradients clipped at norm 1) and two threads, one update a rollout, the whole update in
one forward and backward. Processes run one after another, TRL, ours, ours with S2T, TRL, ... Each gives the median of
its updates after the first ones; a ratio is the median over repetitions of neighbours. Memory is ru_maxrss of the
process, imports and weights included. Before that, both must give the same loss and gradient on one frozen batch.

TRL's settings stand in run_trl.py; its static cache and continuous batching have not been compared. Waiting threads
sleep (OMP_WAIT_POLICY=passive) in both, unless --waiting says otherwise, and beside wall time stands the CPU time of
the process, which other work on the machine disturbs less.

Aims are 0.5 for the tiny policy and 0.7 for SmolLM2's shape. What keeps the tiny one above: its rollout, half of the
time, spends a third of itself in products (of 60 to 80 GFLOP/s on a core, which is all a core has) and a third in
attention over the cache, and both trainers call the same kernels for them. Tried for it and not kept: two halves of a
rollout in two threads (0.65 of its wall time where waiting threads sleep, 1.26 where they spin); weights laid out
transposed or packed (nothing at 128 columns); finished rows leaving earlier (noise); an update in smaller micro-
batches (0.62 to 0.72 of TRL's CPU time, where sharing prompts gives 0.59).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.benchmarks.settings import SETTINGS, THREADS, make_policy, median

ROOT = Path(__file__).parents[2]
TRAINERS = ("trl", "ours", "ours+s2t")
TOLERANCE = 1e-5  # of the loss on the frozen batch


def child(setting: str, trainer: str, policies: Path, **changes: Any) -> dict[str, Any]:
    """What a fresh process measured."""
    command = [
        sys.executable, "-m", "tests.benchmarks.versus_trl", "--child", trainer, "--settings", setting,
        "--policies", str(policies), "--changes", json.dumps(changes),
    ]  # fmt: skip
    threads = {"OMP_NUM_THREADS": str(THREADS), "OMP_WAIT_POLICY": os.environ.get("BENCH_WAITING", "passive")}
    environment = os.environ | threads | {"TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{trainer} on {setting}:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measured(name: str, trainer: str, policies: Path, changes: dict[str, Any]) -> dict[str, Any]:
    """One run in this process: median seconds and tokens of an update, seconds of its parts, peak memory."""
    import torch

    from tests.benchmarks.flops import matrix_peak, update_flops

    torch.set_num_threads(THREADS)
    setting = SETTINGS[name].changed(**changes)
    policy = make_policy(setting, policies)
    if trainer == "trl":
        from tests.benchmarks import run_trl

        before = _peak_bytes()
        result = run_trl.run(setting, policy)
    else:
        from tests.benchmarks import run_ours

        before = _peak_bytes()
        result = run_ours.run(setting, policy, silence=trainer == "ours+s2t")
    peak_bytes = _peak_bytes()
    timed = slice(setting.warmup - 1, None)  # the list starts with the second update
    return {
        "seconds": median(result["seconds"][timed]),
        "cpu_seconds": median(result["cpu_seconds"][timed]),
        "tokens": sum(result["tokens"][timed]) / len(result["tokens"][timed]),
        "parts": {part: median(values[timed]) for part, values in result["parts"].items()},
        "bytes": peak_bytes,
        "bytes_of_imports": before,
        "update_flops": update_flops(setting, policy),
        "peak_flops": matrix_peak(),
    }


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def versus(name: str, repetitions: int, policies: Path, changes: dict[str, Any]) -> None:
    """Runs the processes of one setting in turn and prints their ratios."""
    runs: dict[str, list[dict[str, Any]]] = {trainer: [] for trainer in TRAINERS}
    for _ in range(repetitions):
        for trainer in TRAINERS:
            runs[trainer].append(child(name, trainer, policies, **changes))
    for trainer, results in runs.items():
        ratios = {
            key: [r[key] / t[key] for r, t in zip(results, runs["trl"], strict=True)]
            for key in ("seconds", "cpu_seconds", "tokens", "bytes")
        }
        ratios["per_token"] = [s / t for s, t in zip(ratios["seconds"], ratios["tokens"], strict=True)]
        parts = " ".join(
            f"{part} {median([r['parts'][part] / r['seconds'] for r in results]):.1%}" for part in results[0]["parts"]
        )
        print(
            f"{name:10} {trainer:9} time {median(ratios['seconds']):.3f}"
            f" [{min(ratios['seconds']):.3f}, {max(ratios['seconds']):.3f}]"
            f"   CPU time {median(ratios['cpu_seconds']):.3f}"
            f"   per token {median(ratios['per_token']):.3f}"
            f"   memory {median(ratios['bytes']):.3f}"
            f"   tokens/update {median([r['tokens'] for r in results]):,.0f}"
            f"   of its time: {parts}",
            flush=True,
        )


def agree(name: str, policies: Path) -> dict[str, float]:
    """Both losses and gradients on one frozen batch, whose old log-probs lie beside the current ones."""
    import torch

    from tests.benchmarks import run_ours, run_trl
    from tests.benchmarks.frozen import for_trl, frozen_batch

    torch.set_num_threads(THREADS)
    setting = SETTINGS[name]
    policy = make_policy(setting, policies)
    batch = frozen_batch(setting, policy)
    ours, our_gradient, clipped = run_ours.frozen_loss(policy, batch)
    theirs, their_gradient = run_trl.frozen_loss(policy, setting, for_trl(batch))
    return {
        "ours": ours,
        "trl": theirs,
        "gradient": float((our_gradient - their_gradient).norm() / their_gradient.norm()),
        "clipped": clipped,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--updates", type=int, help="timed updates of each process")
    parser.add_argument("--waiting", choices=["passive", "active"], help="what threads do that wait: sleep or spin")
    parser.add_argument("--policies", type=Path, help="keeps the policies in this folder")
    parser.add_argument("--child", choices=[*TRAINERS, "agree"], help=argparse.SUPPRESS)
    parser.add_argument("--changes", type=json.loads, default={}, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.waiting:
        os.environ["BENCH_WAITING"] = options.waiting
    if options.child == "agree":
        print(json.dumps(agree(options.settings[0], options.policies)))
        return
    if options.child:
        print(json.dumps(measured(options.settings[0], options.child, options.policies, options.changes)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        policies = options.policies or Path(temporary)
        for name in options.settings:
            found = child(name, "agree", policies)
            print(
                f"{name:10} loss on a frozen batch: ours {found['ours']:.8f}, TRL {found['trl']:.8f};"
                f" gradients differ by {found['gradient']:.1e} of their norm; {found['clipped']:.1%} of tokens clipped",
                flush=True,
            )
            if not abs(found["ours"] - found["trl"]) <= TOLERANCE:
                raise SystemExit("the two losses differ: what follows would not compare the same work")
            versus(name, options.repetitions, policies, {"updates": options.updates} if options.updates else {})


if __name__ == "__main__":
    main()
