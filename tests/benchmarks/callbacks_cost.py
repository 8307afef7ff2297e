"""What the callbacks that look at tokens cost, as shares of the wall time of a quickstart's rollout and update.

    python tests/benchmarks/callbacks_cost.py

Each callback's hooks are timed inside one run of configs/quickstart.yaml's sizes: an ordinary update, on which only
scalars and lines are written, and one on which entry, picture or page are due.
"""

import argparse
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import lightning as L
from lightning.pytorch.loggers import TensorBoardLogger

from callbacks import EntropyProfile, Quadrants, SilencedTokens, TokenViewer
from stapo_lightning.data import ArithmeticPrompts
from stapo_lightning.rollout import Sampling
from tests.doubles import datamodule, module, trainer


def timed(callback: L.Callback, seconds: dict[int, float]) -> L.Callback:
    """The callback, with the time of its hooks added up by update."""

    def around(hook: Any) -> Any:
        def call(*args: Any) -> None:
            update = args[-1] if hook.__name__ == "on_selection" else args[2]["record"].updates[1]
            started = time.perf_counter()
            hook(*args)
            seconds[update] += time.perf_counter() - started

        return call

    for name in ("on_train_batch_end", "on_selection"):
        if hasattr(callback, name):
            setattr(callback, name, around(getattr(callback, name)))
    return callback


class Clock(L.Callback):
    """Wall time of each rollout with its update."""

    def __init__(self) -> None:
        self.seconds: dict[int, float] = {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seconds[outputs["record"].updates[1]] = float(trainer.callback_metrics["time/step_s"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--every", type=int, default=20, help="updates between two pictures")
    arguments = parser.parse_args()
    kinds = (SilencedTokens, Quadrants, EntropyProfile, TokenViewer)
    times: dict[str, dict[int, float]] = {kind.__name__: defaultdict(float) for kind in kinds}
    callbacks = [timed(kind(every_n_updates=arguments.every), times[kind.__name__]) for kind in kinds]
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        run = trainer(
            Path(folder),
            max_steps=arguments.updates,
            logger=TensorBoardLogger(folder),
            log_every_n_steps=1,
            callbacks=[*callbacks, clock],
        )
        data = datamodule(
            train_prompts=ArithmeticPrompts("train", 4096),
            prompts_per_batch=16,
            group_size=8,
            sampling=Sampling(max_new_tokens=64),
        )
        run.fit(module(prompts_per_update=16), datamodule=data)
    ordinary = [u for u in clock.seconds if u > 1 and u % arguments.every and u != arguments.updates]
    pictures = [u for u in clock.seconds if u > 1 and u not in ordinary]
    whole = median(clock.seconds[u] for u in ordinary)
    print(f"rollout and update {whole:.3f} s (median of {len(ordinary)})")
    print("callback          ordinary ms   share    with picture, entry or page ms")
    total = 0.0
    for name, seconds in times.items():
        usual = median(seconds[u] for u in ordinary)
        total += usual
        drawn = median(seconds[u] for u in pictures)
        print(f"{name:15s}   {1e3 * usual:11.2f}   {usual / whole:6.2%}   {1e3 * drawn:9.1f}")
    print(f"{'together':15s}   {1e3 * total:11.2f}   {total / whole:6.2%}")


if __name__ == "__main__":
    main()
