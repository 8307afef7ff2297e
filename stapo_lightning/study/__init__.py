"""Methods x seeds x regimes in one command, and the report of what came out."""

from stapo_lightning.study.intervals import Interval, paired_difference
from stapo_lightning.study.measures import Measures, measure
from stapo_lightning.study.runner import run_all
from stapo_lightning.study.study import Method, PlannedRun, Regime, Study

__all__ = [
    "Interval",
    "Measures",
    "Method",
    "PlannedRun",
    "Regime",
    "Study",
    "measure",
    "paired_difference",
    "run_all",
]
