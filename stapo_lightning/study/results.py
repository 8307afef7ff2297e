"""The finished runs of a study, measured, and compared with the reference seed by seed."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np

from stapo_lightning.compare.runs import read_scalars
from stapo_lightning.errors import ConfigError, StapoError
from stapo_lightning.study.intervals import Interval, bootstrap, paired_difference
from stapo_lightning.study.measures import Measures, Scalars, measure, window_means
from stapo_lightning.study.runner import Outcome, last_line, read_outcome
from stapo_lightning.study.study import PlannedRun, Study


@dataclass(frozen=True)
class Result:
    """One run that ended.

    Attributes:
        run: Which.
        outcome: How it ended.
        scalars: All that it logged.
        measures: Its primary measures.

    """

    run: PlannedRun
    outcome: Outcome
    scalars: Scalars
    measures: Measures


@dataclass(frozen=True)
class Results:
    """Everything that the report tells.

    Attributes:
        study: The study.
        results: The runs that ended, in the study's order.
        remarks: Runs that stopped before their end, and those that are not there yet.

    """

    study: Study
    results: list[Result]
    remarks: list[str]

    def of(self, regime: str, method: str) -> list[Result]:
        """The runs of one method in one regime."""
        return [r for r in self.results if (r.run.regime, r.run.method) == (regime, method)]

    def by_seed(self, regime: str, method: str, name: str) -> dict[int, float]:
        """Seed -> one measure."""
        return {r.run.seed: float(getattr(r.measures, name)) for r in self.of(regime, method)}

    def mean(self, regime: str, method: str, name: str) -> Interval:
        """Of one measure over all seeds of a method that has some."""
        return bootstrap(_array(self.by_seed(regime, method, name)))

    def difference(self, regime: str, method: str, name: str) -> Interval | None:
        """Of one measure to the reference's, over common seeds; None for the reference itself or without any."""
        if method == self.study.reference:
            return None
        reference = self.by_seed(regime, self.study.reference, name)
        return paired_difference(self.by_seed(regime, method, name), reference)

    def windows(self, regime: str, method: str, tag: str) -> tuple[float, float]:
        """Means of a tag over seeds, in the first window after warm-up and in the last."""
        study = self.study
        found = [window_means(r.scalars, tag, study.warmup_updates, study.window) for r in self.of(regime, method)]
        return float(np.mean([start for start, _ in found])), float(np.mean([end for _, end in found]))


def read_results(study: Study) -> Results:
    """Measures every run that has ended. One that stopped by an error counts with what it logged until then.

    Raises:
        ConfigError: None has, one was made with other options, or runs that came to their end logged too little.

    """
    results, remarks, missing, problems = [], [], [], []
    for run in study.runs():
        outcome = read_outcome(run)
        if outcome is None:
            missing.append(run.name)
            continue
        stopped = f"{run.name} stopped with {outcome.code}: {last_line(run)}" if outcome.code else ""
        scalars = read_scalars(run.folder)
        try:
            measures = measure(scalars, study.accuracy, study.warmup_updates, study.window)
        except StapoError as error:
            if stopped:
                remarks.append(f"{stopped}; it is left out: {error}")
            else:
                problems.append(f"{run.name}: {error}")
            continue
        remarks += [stopped] if stopped else []
        results.append(Result(run, outcome, scalars, measures))
    if problems:
        raise ConfigError(problems)
    if not results:
        raise ConfigError(
            [f"study.folder={study.folder}: no finished run in it; make them with `stapo-study run`", *remarks]
        )
    if missing:
        remarks.append(f"{len(missing)} runs are not finished yet: {', '.join(missing)}")
    return Results(study, results, remarks)


def write_csv(path: Path, results: Sequence[Result]) -> None:
    """A line a run: its measures, its time, the command that makes it."""
    names = [field.name for field in fields(Measures)]
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["regime", "method", "seed", *names, "exit_code", "seconds", "commit", "command"])
        for r in sorted(results, key=lambda r: (r.run.regime, r.run.method, r.run.seed)):
            values = [f"{value:.6g}" for value in asdict(r.measures).values()]
            ended = [r.outcome.code, f"{r.outcome.seconds:.0f}", r.outcome.commit, r.outcome.command]
            writer.writerow([r.run.regime, r.run.method, r.run.seed, *values, *ended])


def _array(values: dict[int, float]) -> np.ndarray:
    return np.array([values[seed] for seed in sorted(values)])
