"""How time and memory of an update of ours grow with completion length and with the batch; where the time goes.

    .bench/bin/python -m tests.benchmarks.scaling

The tiny policy of versus_trl.py, every completion of full length, KeepAll, two threads; one process for each point.
Printed are ratios to the first point of a curve, the exponent of a power law fitted to all of them (least squares of
logarithms), the shares of our own time/* metrics, and the matrix FLOP/s of an update over those of one large
float32 product in the same process. Memory is the peak of the process without its imports.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from pathlib import Path
from typing import Any

from tests.benchmarks.versus_trl import child

LENGTHS = (64, 128, 256, 512, 1024, 2048)
PROMPTS = (1, 2, 4, 8, 16, 32)


def exponent(sizes: list[float], values: list[float]) -> float:
    """Slope of log(value) over log(size)."""
    x, y = [math.log(size) for size in sizes], [math.log(value) for value in values]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    covariance = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return covariance / sum((a - mean_x) ** 2 for a in x)


def curve(title: str, trainer: str, points: list[tuple[int, dict[str, Any]]], policies: Path) -> None:
    """Runs every point, then prints the curve."""
    sizes, runs = [], []
    for size, changes in points:
        sizes.append(float(size))
        runs.append(child("tiny-full", trainer, policies, **changes))
        first, last = runs[0], runs[-1]
        shares = " ".join(f"{part} {seconds / last['seconds']:.1%}" for part, seconds in last["parts"].items())
        last["grown"] = last["bytes"] - last["bytes_of_imports"]
        update = last["parts"]["update"] + last["parts"].get("score", 0.0)
        peak = f"  update at {last['update_flops'] / update / last['peak_flops']:.0%} of the matrix peak"
        print(
            f"{title} {size:5}  {trainer:4}  time x{last['seconds'] / first['seconds']:.2f}"
            f"  CPU time x{last['cpu_seconds'] / first['cpu_seconds']:.2f}"
            f"  memory x{last['grown'] / first['grown']:.2f}  {shares}{peak}",
            flush=True,
        )
    found = {key: exponent(sizes, [run[key] for run in runs]) for key in ("seconds", "cpu_seconds", "grown")}
    print(
        f"{title} {trainer}: time ~ size^{found['seconds']:.2f}, CPU time ~ size^{found['cpu_seconds']:.2f},"
        f" memory ~ size^{found['grown']:.2f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lengths", type=int, nargs="*", default=LENGTHS, help="of 4 prompts x 8 completions")
    parser.add_argument("--prompts", type=int, nargs="*", default=PROMPTS, help="each with 8 completions of 64 tokens")
    parser.add_argument("--trainers", nargs="+", choices=("ours", "trl"), default=["ours"])
    parser.add_argument("--policies", type=Path, help="keeps the policies in this folder")
    options = parser.parse_args()
    few = {"warmup": 1, "updates": 2}
    with tempfile.TemporaryDirectory() as temporary:
        policies = options.policies or Path(temporary)
        for trainer in options.trainers:
            if options.lengths:
                points = [(limit, {"limit": limit, "prompts": 4, **few}) for limit in options.lengths]
                curve("tokens ", trainer, points, policies)
            if options.prompts:
                points = [(prompts, {"prompts": prompts, **few}) for prompts in options.prompts]
                curve("prompts", trainer, points, policies)


if __name__ == "__main__":
    main()
