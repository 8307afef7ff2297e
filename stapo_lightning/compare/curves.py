"""Mean and band of each method's seeds, panel by panel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np

from stapo_lightning.compare.runs import Run
from stapo_lightning.errors import ConfigError


@dataclass(frozen=True)
class Curve:
    """One method in one panel. All arrays [n].

    Attributes:
        method: Its name.
        seeds: Runs that logged the tag.
        updates: Increasing.
        mean: Over the seeds.
        low: Smallest seed.
        high: Largest seed.

    """

    method: str
    seeds: int
    updates: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


@dataclass(frozen=True)
class Panel:
    """One tag.

    Attributes:
        tag: Its name.
        curves: In the order of the methods; a method none of whose runs logged the tag is left out.

    """

    tag: str
    curves: list[Curve]


def panels(runs: Sequence[Run], patterns: Sequence[str], smooth: int = 1) -> tuple[list[Panel], list[str]]:
    """A panel for each tag that matches a pattern, in the order of the patterns, and remarks for the reader.

    A method's seeds are averaged at every update that one of them logged, from the first to the last update that all of
    them reached: where a seed has no value of its own it is interpolated linearly. Methods are not aligned to each
    other.

    Args:
        runs: What to compare.
        patterns: Tags, "*" stands for any characters.
        smooth: Values of a seed whose trailing mean is drawn, at least 1; 1 draws what was logged.

    Raises:
        ConfigError: No tag that every run has, or seeds without an update in common, naming the runs.

    """
    logged = list(dict.fromkeys(tag for run in runs for tag in sorted(run.scalars)))
    tags = list(dict.fromkeys(tag for pattern in patterns for tag in logged if fnmatchcase(tag, pattern)))
    if not any(all(tag in run.scalars for run in runs) for tag in tags):
        lacking = [
            f"{run.folder}: has {', '.join(tag for tag in tags if tag in run.scalars) or 'none of them'}"
            for run in runs
        ]
        raise ConfigError([f"no tag that matches {', '.join(patterns)} (--tags) is in every run", *lacking])
    methods: dict[str, list[Run]] = {}
    for run in runs:
        methods.setdefault(run.method, []).append(run)
    problems: list[str] = []
    remarks = _unequal_ends(methods)
    found = []
    for tag in tags:
        curves = []
        for method, seeds in methods.items():
            having = [run for run in seeds if tag in run.scalars]
            if len(having) < len(seeds):
                missing = ", ".join(str(run.folder) for run in seeds if tag not in run.scalars)
                remarks.append(f"{tag} was not logged by {missing}")
            if not having:
                continue
            first, last = _shared_range(having, tag)
            if first > last:
                spans = ", ".join(
                    f"{run.folder} ({min(run.scalars[tag])} to {max(run.scalars[tag])})" for run in having
                )
                problems.append(
                    f"{tag}: the seeds of {method} have no update in common: {spans}; name them apart with NAME=RUN"
                )
                continue
            curves.append(_curve(method, having, tag, first, last, smooth))
        found.append(Panel(tag, curves))
    if problems:
        raise ConfigError(problems)
    return found, remarks


def _unequal_ends(methods: dict[str, list[Run]]) -> list[str]:
    found = []
    for method, runs in methods.items():
        ends = {
            str(run.folder): max((max(values) for values in run.scalars.values() if values), default=0) for run in runs
        }
        if len(set(ends.values())) > 1:
            ended = ", ".join(f"{folder} at update {end}" for folder, end in ends.items())
            found.append(f"the seeds of {method} end at different updates ({ended}): its curves end with the shortest")
    return found


def _shared_range(runs: Sequence[Run], tag: str) -> tuple[int, int]:
    return max(min(run.scalars[tag]) for run in runs), min(max(run.scalars[tag]) for run in runs)


def _curve(method: str, runs: Sequence[Run], tag: str, first: int, last: int, smooth: int) -> Curve:
    updates = np.array(sorted({u for run in runs for u in run.scalars[tag] if first <= u <= last}))
    rows = []
    for run in runs:
        own = sorted(run.scalars[tag])
        values = trailing_mean(np.array([run.scalars[tag][u] for u in own], dtype=np.float64), smooth)
        rows.append(np.interp(updates, own, values))
    seeds = np.stack(rows)
    return Curve(method, len(runs), updates, seeds.mean(0), seeds.min(0), seeds.max(0))


def trailing_mean(values: np.ndarray, window: int) -> np.ndarray:
    """[n] mean of each value and the `window` - 1 before it; of fewer at the beginning."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - window, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)
