"""The quickstart on several seeds: held-out accuracy at T = 1 before and after, silenced share, wall time.

    python tests/benchmarks/quickstart_seeds.py --seeds 1 2 3 4 5

Run it on an otherwise idle machine; each run takes all of its cores.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).parents[2]
COMPLETIONS = 16 * 8  # of one rollout, which is one update in configs/quickstart.yaml


def one_run(seed: int, folder: Path) -> tuple[float, float, float, float, float, float]:
    """(sampled before, after, greedy before, after, silenced share of all tokens, seconds) of one quickstart."""
    started = time.perf_counter()
    subprocess.run(
        [
            sys.executable, "-m", "stapo_lightning", "fit", "--config=configs/quickstart.yaml",
            f"--seed_everything={seed}", f"--trainer.logger.save_dir={folder}",
        ],
        cwd=ROOT, check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    seconds = time.perf_counter() - started
    events = EventAccumulator(str(folder / "quickstart" / "version_0"), size_guidance={"scalars": 0})
    events.Reload()
    sampled, greedy, silenced, length = (
        [event.value for event in events.Scalars(tag)]
        for tag in (
            "val/arithmetic/sampled/avg@4",
            "val/arithmetic/greedy/avg@1",
            "s2t/silenced_count",
            "completion/length_mean",
        )
    )
    tokens = sum(length) * COMPLETIONS
    return sampled[0], sampled[-1], greedy[0], greedy[-1], sum(silenced) / tokens, seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    print("seed   sampled before -> after   greedy before -> after   silenced   seconds")
    for seed in parser.parse_args().seeds:
        with tempfile.TemporaryDirectory() as folder:
            before, after, greedy_before, greedy_after, silenced, seconds = one_run(seed, Path(folder))
        print(
            f"{seed:4d}   {before:14.1%} -> {after:5.1%}   {greedy_before:13.1%} -> {greedy_after:5.1%}"
            f"   {silenced:8.3%}"
            f"   {seconds:7.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
