"""Runs of a study that were never made: written as a run writes them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from stapo_lightning.study.runner import Outcome
from stapo_lightning.study.study import Method, PlannedRun, Regime, Study

ACCURACY = "val/x/sampled/avg@1"


def study(folder: Path, **changes) -> Study:
    """Two regimes and two methods on two seeds; the config files are empty."""
    for name in ("mild", "wild", "stapo", "grpo"):
        (folder / f"{name}.yaml").write_text("{}\n")
    settings = dict(
        regimes=[Regime(name, [str(folder / f"{name}.yaml")]) for name in ("mild", "wild")],
        methods=[
            Method(name, "main", [str(folder / f"{file}.yaml")], seeds=[1, 2], drawn=True)
            for name, file in (("STAPO", "stapo"), ("GRPO", "grpo"))
        ],
        reference="STAPO",
        accuracy=ACCURACY,
        folder=str(folder / "runs"),
        warmup_updates=1,
        window=2,
    )
    return Study(**(settings | changes))


def write_run(run: PlannedRun, scalars: dict[str, dict[int, float]], code: int = 0, seconds: float = 90.0) -> None:
    """Event file and outcome of a run that has ended."""
    run.folder.mkdir(parents=True)
    with SummaryWriter(run.folder) as writer:
        for tag, values in scalars.items():
            for update, value in values.items():
                writer.add_scalar(tag, value, update)
    outcome = Outcome(code, seconds, run.fingerprint(), run.command, "abc1234")
    (run.folder / "outcome.json").write_text(json.dumps(asdict(outcome)))
    (run.folder / "log.txt").write_text("first line\nValueError: nan\n")


def logged(accuracies: list[float], entropies: list[float], silenced: float = 0.0, **more) -> dict:
    """Scalars of a run: an evaluation every second update, an entropy at each from the first on."""
    return {
        ACCURACY: {2 * i: value for i, value in enumerate(accuracies)},
        "policy/entropy": {i + 1: value for i, value in enumerate(entropies)},
        "s2t/silenced_fraction": {i + 1: silenced for i in range(len(entropies))},
        **more,
    }
