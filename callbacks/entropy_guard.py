"""EntropyGuard: notices when the policy's entropy collapses or explodes, and warns, stops or rolls back."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger

from stapo_lightning.errors import bounded

log = logging.getLogger(__name__)

_ACCURACY = re.compile(r"val/.+/avg@\d+")

# In the order of `Row`'s values.
_TAGS = ("policy/entropy", "completion/truncated_fraction", "reward/mean")


@dataclass(frozen=True)
class Row:
    """What one rollout and its updates measured.

    Attributes:
        update: Updates done.
        entropy: policy/entropy, nats.
        truncated: completion/truncated_fraction.
        reward: reward/mean.

    """

    update: int
    entropy: float
    truncated: float
    reward: float


@dataclass(frozen=True)
class Reading:
    """One rule applied once.

    Attributes:
        rule: Name of the option that holds its limit.
        tag: Where `value` is logged.
        value: What was measured.
        holds: Whether it is beyond the limit.
        reason: The same as a sentence.

    """

    rule: str
    tag: str
    value: float
    holds: bool
    reason: str


def fitted_change(values: Sequence[float]) -> float:
    """Change from the first to the last value of the least-squares line through `values`, at least two."""
    middle = (len(values) - 1) / 2
    mean = fmean(values)
    covariance = sum((x - middle) * (y - mean) for x, y in enumerate(values))
    return covariance / sum((x - middle) ** 2 for x in range(len(values))) * (len(values) - 1)


class EntropyGuard(L.Callback):
    """Judges every rollout by the rules below; one that holds `patience` rollouts in a row raises the alarm.

    "Start" is the mean over the first `start_rollouts` rollouts, "window" the last `window` ones. A rule set to null is
    off. What each rule measures is logged as guard/*, next to which its limit can be chosen; the alarm comes with its
    reason on the console, in Python's log (`callbacks.entropy_guard`) and in TensorBoard's Text tab.

    A roll back puts weights and optimiser state of the best checkpoint (of the first ModelCheckpoint with a `monitor`)
    into the running fit. Updates and schedule go on from where the run is, and so do the prompts: the next rollout is
    sampled from new ones, at a learning rate lowered by `lr_factor`. A second roll back takes the best that the run was
    not put back to yet, where `save_top_k` kept one. Where no checkpoint from before is kept, or after `max_rollbacks`,
    the run stops instead. A val/ tag is the better monitor: it measures the weights that are saved; reward/mean is
    from before the last rollout's updates.

    Args:
        action: What the alarm does: "warn", "stop" the run, or "rollback".
        start_rollouts: Rollouts whose mean is what later ones are compared with, at least 1. Nothing is judged before.
        window: Rollouts that slopes and means are taken over, at least 2.
        patience: Rollouts in a row that a rule has to hold, at least 1.
        collapse_level: Collapse: policy/entropy is below this share of the start, in (0, 1).
        explosion_level: Explosion: policy/entropy is above this multiple of the start, above 1.
        collapse_slope: Collapse: a line through the entropies of the window falls by more than this share of the
            start, in (0, 1).
        explosion_slope: Explosion: that line rises by more than this share of the start, above 0.
        truncation_rise: Completions do not end: the mean completion/truncated_fraction of the window is above that of
            the start by more than this, in (0, 1).
        reward_fall: The mean reward/mean of the window is below that of the best window so far by more than this, above
            0, in units of the reward.
        accuracy_fall: A validation's accuracy is below the best one so far by more than this, in (0, 1); one validation
            is enough, and a roll back waits for the next rollout.
        accuracy_tag: The accuracy; null takes every val/.../avg@k.
        lr_factor: Factor on the learning rate after each roll back, in (0, 1]. It stays for the rest of the run.
        max_rollbacks: Roll backs of a run, at least 1; the alarm after the last one stops it.

    """

    def __init__(
        self,
        action: Literal["warn", "stop", "rollback"] = "warn",
        start_rollouts: int = 5,
        window: int = 20,
        patience: int = 3,
        collapse_level: float | None = 0.1,
        explosion_level: float | None = 3.0,
        collapse_slope: float | None = 0.7,
        explosion_slope: float | None = 1.0,
        truncation_rise: float | None = 0.3,
        reward_fall: float | None = 0.2,
        accuracy_fall: float | None = 0.15,
        accuracy_tag: str | None = None,
        lr_factor: float = 0.5,
        max_rollbacks: int = 3,
    ) -> None:
        self.action = action
        self.start_rollouts = start_rollouts
        self.window = window
        self.patience = patience
        self.collapse_level = collapse_level
        self.explosion_level = explosion_level
        self.collapse_slope = collapse_slope
        self.explosion_slope = explosion_slope
        self.truncation_rise = truncation_rise
        self.reward_fall = reward_fall
        self.accuracy_fall = accuracy_fall
        self.accuracy_tag = accuracy_tag
        self.lr_factor = lr_factor
        self.max_rollbacks = max_rollbacks

        self.start: list[Row] = []
        self.recent: list[Row] = []
        self.best_reward = -math.inf
        self.best_accuracy: dict[str, float] = {}
        self.held: dict[str, int] = {}
        self.pending: list[str] = []
        self.rollbacks = 0
        self.returned: list[str] = []

    def problems(self, trainer: L.Trainer) -> list[str]:
        """What is wrong with the options."""
        found: list[str] = []
        for name, bounds in {
            "start_rollouts": {"at_least": 1},
            "window": {"at_least": 2},
            "patience": {"at_least": 1},
            "collapse_level": {"above": 0, "below": 1},
            "explosion_level": {"above": 1},
            "collapse_slope": {"above": 0, "below": 1},
            "explosion_slope": {"above": 0},
            "truncation_rise": {"above": 0, "below": 1},
            "reward_fall": {"above": 0},
            "accuracy_fall": {"above": 0, "below": 1},
            "lr_factor": {"above": 0, "at_most": 1},
            "max_rollbacks": {"at_least": 1},
        }.items():
            value = getattr(self, name)
            found += bounded(f"EntropyGuard.{name}", value, **bounds) if value is not None else []
        if self.action == "rollback":
            source = _monitored(trainer)
            if source is None:
                found.append(
                    "EntropyGuard.action=rollback: no ModelCheckpoint knows which checkpoint is best; give one a"
                    " `monitor`, such as reward/mean with `mode: max`"
                )
            elif source.save_weights_only:
                found.append(
                    "EntropyGuard.action=rollback: ModelCheckpoint.save_weights_only=true leaves the optimiser's state"
                    " out, which a roll back needs; set it to false"
                )
        return found

    # ---- the rules --------------------------------------------------------------------------------------------------

    def judge(self, row: Row) -> list[Reading]:
        """Takes in one rollout and applies every rule that can be applied yet."""
        if len(self.start) < self.start_rollouts:
            self.start.append(row)
        self.recent = [*self.recent, row][-self.window :]
        if len(self.start) < self.start_rollouts:
            return []
        start = fmean(r.entropy for r in self.start)
        level = row.entropy / start if start else math.inf
        words = f"policy/entropy is {row.entropy:.3g}, {level:.3g} times that of the start ({start:.3g})"
        # A value that is not a number is beyond every limit.
        found = [
            self._reading("collapse_level", "entropy_level", level, lambda v, limit: not v >= limit, words),
            self._reading("explosion_level", "entropy_level", level, lambda v, limit: not v <= limit, words),
        ]
        if len(self.recent) == self.window:
            found += self._over_window(start)
        return [reading for reading in found if reading is not None]

    def _over_window(self, start: float) -> list[Reading | None]:
        change = fitted_change([r.entropy for r in self.recent])
        slope = change / start if start else math.inf
        words = (
            f"over {self.window} rollouts policy/entropy changed by {change:+.3g} (line of least squares),"
            f" {slope:+.3g} times that of the start ({start:.3g})"
        )
        before, now = (fmean(r.truncated for r in rows) for rows in (self.start, self.recent))
        cut = (
            f"completion/truncated_fraction is {now:.1%} over {self.window} rollouts, at the start it was {before:.1%}"
        )
        reward = fmean(r.reward for r in self.recent)
        self.best_reward = max(self.best_reward, reward)
        fallen = (
            f"reward/mean is {reward:.3g} over {self.window} rollouts, in the best {self.window} it was"
            f" {self.best_reward:.3g}"
        )
        return [
            self._reading("collapse_slope", "entropy_slope", slope, lambda v, limit: not v >= -limit, words),
            self._reading("explosion_slope", "entropy_slope", slope, lambda v, limit: not v <= limit, words),
            self._reading("truncation_rise", "truncation_rise", now - before, lambda v, limit: v > limit, cut),
            self._reading("reward_fall", "reward_fall", self.best_reward - reward, lambda v, limit: v > limit, fallen),
        ]

    def judge_accuracy(self, metrics: dict[str, float]) -> list[Reading]:
        """Takes in one validation: tag -> accuracy in [0, 1]."""
        found = []
        for tag, value in metrics.items():
            best = self.best_accuracy[tag] = max(value, self.best_accuracy.get(tag, value))
            words = f"{tag} is {value:.1%}, the best so far was {best:.1%}"
            found.append(
                self._reading("accuracy_fall", "accuracy_fall", best - value, lambda v, limit: v > limit, words)
            )
        return [reading for reading in found if reading is not None]

    def _reading(self, rule: str, tag: str, value: float, beyond: Any, words: str) -> Reading | None:
        limit = getattr(self, rule)
        if limit is None:
            return None
        reason = f"{words}; the limit is {rule}={limit}"
        return Reading(rule, f"guard/{tag}", value, beyond(value, limit), reason)

    def alarms(self, readings: Iterable[Reading]) -> list[str]:
        """Reasons of the rules that have now held for `patience` rollouts in a row; once each time they begin to."""
        found = []
        for reading in readings:
            self.held[reading.rule] = self.held.get(reading.rule, 0) + 1 if reading.holds else 0
            if self.held[reading.rule] == self.patience:
                often = f" ({self.patience} rollouts in a row)" if self.patience > 1 else ""
                found.append(f"{reading.reason}{often}")
        return found

    # ---- in a run ---------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """A run that was rolled back before it was resumed keeps its lowered rate."""
        pl_module.lr_scale = self.lr_factor**self.rollbacks

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # The same on every rank, and so is all that follows from them.
        values = [float(trainer.callback_metrics[tag]) for tag in _TAGS]
        readings = self.judge(Row(trainer.global_step, *values))
        self._to_loggers(trainer, readings)
        reasons, self.pending = [*self.pending, *self.alarms(readings)], []
        if reasons:
            self._act(trainer, pl_module, reasons)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn != "fit":
            return
        wanted = [self.accuracy_tag] if self.accuracy_tag else filter(_ACCURACY.fullmatch, trainer.callback_metrics)
        measured = {tag: float(trainer.callback_metrics[tag]) for tag in wanted if tag in trainer.callback_metrics}
        readings = self.judge_accuracy(measured)
        if readings and not trainer.sanity_checking:
            self._to_loggers(trainer, [max(readings, key=lambda reading: reading.value)])
        reasons = [reading.reason for reading in readings if reading.holds]
        if reasons and self.action == "rollback":
            # The checkpoint of this update has just been taken, and its validation belongs to these very weights.
            self.pending = reasons
        elif reasons:
            self._act(trainer, pl_module, reasons)

    def _act(self, trainer: L.Trainer, pl_module: Any, reasons: list[str]) -> None:
        because = "; ".join(reasons)
        kept = self._kept_checkpoints(trainer) if self.action == "rollback" else {}
        if self.action == "warn":
            self._say(trainer, f"warning: {because}.")
        elif self.action == "stop":
            self._stop(trainer, f"{because}. The run stops.")
        elif self.rollbacks >= self.max_rollbacks:
            self._stop(
                trainer, f"{because}. The run stops: it was rolled back max_rollbacks={self.max_rollbacks} times."
            )
        elif not kept:
            self._stop(trainer, f"{because}. The run stops: no checkpoint from before it was kept.")
        else:
            self.rollbacks += 1
            path = next((path for path in kept if path not in self.returned), next(iter(kept)))
            self.returned.append(path)
            update = pl_module.return_to(path)
            pl_module.lr_scale = self.lr_factor**self.rollbacks
            self.recent = [row for row in self.recent if row.update <= update]
            self.held = {}
            self._say(
                trainer,
                f"{because}. Rolled back to update {update} ({path}, {kept[path]}), number {self.rollbacks} of"
                f" {self.max_rollbacks}; the learning rate is {pl_module.lr_scale:.3g} times the configured one.",
            )

    def _kept_checkpoints(self, trainer: L.Trainer) -> dict[str, str]:
        """Path -> what made it stay, the best one first; without those whose accuracy had already fallen."""
        source = _monitored(trainer)
        if source is None:
            return {}
        scores = {path: float(score) for path, score in source.best_k_models.items()}
        if self.accuracy_fall is not None and source.monitor in self.best_accuracy:
            least = self.best_accuracy[source.monitor] - self.accuracy_fall
            scores = {path: score for path, score in scores.items() if score >= least}
        order = sorted(scores, key=lambda path: scores[path], reverse=source.mode == "max")
        # One rank looks for all: a folder may be slow to show a file to every machine.
        there = trainer.strategy.broadcast([Path(path).exists() for path in order])
        return {path: f"{source.monitor} {scores[path]:.3g}" for path, found in zip(order, there, strict=True) if found}

    def _stop(self, trainer: L.Trainer, message: str) -> None:
        trainer.should_stop = True
        self.held = {}  # a run that is resumed all the same is judged anew
        self._say(trainer, message)

    def _say(self, trainer: L.Trainer, message: str) -> None:
        if not trainer.is_global_zero:
            return
        log.warning("EntropyGuard at update %d: %s", trainer.global_step, message)
        for logger in trainer.loggers:
            logger.log_metrics({"guard/alarm": 1.0, "guard/rollbacks": float(self.rollbacks)}, step=trainer.global_step)
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_text("guard", message, trainer.global_step)

    def _to_loggers(self, trainer: L.Trainer, readings: Sequence[Reading]) -> None:
        if trainer.global_step % max(1, trainer.log_every_n_steps):  # type: ignore[attr-defined]
            return
        values = {reading.tag: reading.value for reading in readings}
        for logger in trainer.loggers if values else ():
            logger.log_metrics(values, step=trainer.global_step)

    def state_dict(self) -> dict[str, Any]:
        """Kept over a resume."""
        return {
            "start": [_values(row) for row in self.start],
            "recent": [_values(row) for row in self.recent],
            "best_reward": self.best_reward,
            "best_accuracy": self.best_accuracy,
            "held": self.held,
            "pending": self.pending,
            "rollbacks": self.rollbacks,
            "returned": self.returned,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what was seen before the resume."""
        self.start = [Row(*values) for values in state_dict["start"]]
        self.recent = [Row(*values) for values in state_dict["recent"]][-self.window :]
        for name in ("best_reward", "best_accuracy", "held", "pending", "rollbacks", "returned"):
            setattr(self, name, state_dict[name])


def _values(row: Row) -> list[float]:
    return [row.update, row.entropy, row.truncated, row.reward]


def _monitored(trainer: L.Trainer) -> ModelCheckpoint | None:
    """The first ModelCheckpoint that knows which checkpoint is best."""
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.monitor is not None:
            return callback
    return None
