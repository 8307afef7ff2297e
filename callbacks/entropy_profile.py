"""EntropyProfile: how the entropy of the policy is spread over tokens, over the run and along a completion."""

from __future__ import annotations

import math
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

from stapo_lightning.batch import RolloutBatch, UpdateRecord
from stapo_lightning.errors import bounded, raise_problems
from stapo_lightning.optional import optional, require

# Bins of equal width in the square root of the entropy: fine near 0, where most tokens are.
_BINS = 4096

_QUARTERS = 4


class EntropyProfile(L.Callback):
    """Logs quantiles of the token entropy and its mean in each quarter of a completion, and draws both.

    For each update, over all completion tokens and ranks, before the update: `entropy_profile/quantile_<q>` and
    `entropy_profile/quarter_<1..4>`, the mean over the tokens in that quarter of their own completion. Quantiles are
    read from a histogram, so that ranks exchange one vector of fixed size; at H nats they are right to
    0.0005 sqrt(H ln V). The picture has the quantiles over training (the paper's figure), and the mean by position in
    the completion for each of the periods between pictures.

    Args:
        quantiles: Each in (0, 1), rising.
        positions: Points of the curve by position, at least 2: each is the mean over an equal part of
            data.sampling.max_new_tokens.
        every_n_updates: Updates between two pictures, the first update included; 0 for none. Pictures need matplotlib.

    """

    def __init__(
        self,
        quantiles: tuple[float, ...] = (0.25, 0.5, 0.75, 0.9, 0.95, 0.99),
        positions: int = 64,
        every_n_updates: int = 50,
    ) -> None:
        self.quantiles = tuple(quantiles)
        self.positions = positions
        self.every_n_updates = every_n_updates
        self.history: list[list[float]] = []  # update, then its quantiles
        self.curves: list[tuple[int, list[float]]] = []  # last update of a period, mean entropy by position
        self.last_update = 0
        self._by_position: Tensor | None = None

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        """Checks the arguments, before any weights are loaded."""
        problems = [p for q in self.quantiles for p in bounded("EntropyProfile.quantiles", q, above=0, below=1)]
        if not self.quantiles or list(self.quantiles) != sorted(set(self.quantiles)):
            problems.append(f"EntropyProfile.quantiles={list(self.quantiles)}: must be rising, and at least one")
        raise_problems(
            problems,
            bounded("EntropyProfile.positions", self.positions, at_least=2),
            bounded("EntropyProfile.every_n_updates", self.every_n_updates, at_least=0),
        )
        if self.every_n_updates and stage == "fit":
            require("matplotlib", "plots", "EntropyProfile (or every_n_updates: 0)")

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: RolloutBatch, batch_idx: int
    ) -> None:
        record: UpdateRecord = outputs["record"]
        highest = math.log(pl_module.policy.config.vocab_size)
        mask = batch.completion_mask
        step = torch.arange(mask.shape[1], device=mask.device)
        quarter = _QUARTERS * step // batch.completion_lengths[:, None]
        limit = trainer.datamodule.sampling.max_new_tokens  # type: ignore[attr-defined]
        position = (self.positions * step // limit).clamp(max=self.positions - 1).expand_as(mask)
        for update, rows in record.by_update():
            chosen = mask[rows]
            entropy = record.scores.entropy[rows][chosen]
            histogram = torch.bincount(_bin(entropy, highest), minlength=_BINS).double()
            quarters = _sums(quarter[rows][chosen], entropy, _QUARTERS)
            positions = _sums(position[rows][chosen], entropy, self.positions)
            sizes = (_BINS, 2 * _QUARTERS, 2 * self.positions)
            packed = pl_module.ranks.sum(torch.cat([histogram, quarters.flatten(), positions.flatten()])).cpu()
            histogram, quarters, positions = packed.split(sizes)
            positions = positions.view(2, -1)
            self._by_position = positions if self._by_position is None else self._by_position + positions
            found = quantiles_of(histogram, self.quantiles, highest)
            self.history.append([update, *found])
            if update % max(1, trainer.log_every_n_steps) == 0:  # type: ignore[attr-defined]
                metrics = {f"entropy_profile/quantile_{q:g}": v for q, v in zip(self.quantiles, found, strict=True)}
                for number, (count, total) in enumerate(quarters.view(2, -1).T.tolist(), start=1):
                    metrics |= {f"entropy_profile/quarter_{number}": total / count} if count else {}
                for logger in trainer.loggers:
                    logger.log_metrics(metrics, step=update)
        self.last_update = record.updates[1]
        if record.is_due(self.every_n_updates):
            self._draw(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Draws what came after the last picture."""
        if self.every_n_updates and self._by_position is not None:
            self._draw(trainer)

    def _draw(self, trainer: L.Trainer) -> None:
        if self._by_position is None:
            return
        counts, totals = self._by_position
        self.curves.append((self.last_update, (totals / counts).tolist()))  # nan where no completion reached
        self._by_position = None
        if trainer.is_global_zero and isinstance(trainer.logger, TensorBoardLogger):
            limit = trainer.datamodule.sampling.max_new_tokens  # type: ignore[attr-defined]
            trainer.logger.experiment.add_figure("entropy_profile/over_training", self._figure(limit), self.last_update)

    def _figure(self, limit: int) -> Any:
        figure = optional("matplotlib.figure", "plots", "EntropyProfile").Figure(
            figsize=(11, 4.6), layout="constrained"
        )
        colormaps = optional("matplotlib", "plots", "EntropyProfile").colormaps
        over_training, by_position = figure.subplots(1, 2)
        updates, *columns = zip(*self.history, strict=True)
        marker = "o" if len(updates) == 1 else None
        for number, (q, values) in enumerate(zip(self.quantiles, columns, strict=True)):
            colour = colormaps["viridis"](0.9 * (1 - number / max(1, len(columns) - 1)))
            over_training.plot(updates, values, color=colour, label=f"{100 * q:g} %", linewidth=1.2, marker=marker)
        over_training.set(title="Quantiles of the token entropy", xlabel="update", ylabel="entropy / nats")
        handles, labels = over_training.get_legend_handles_labels()
        over_training.legend(handles[::-1], labels[::-1], title="quantile", fontsize=8, loc="center right")

        # A handful of periods can be told apart: the first, the last, and some evenly between.
        count = min(6, len(self.curves))
        chosen = sorted({round(i * (len(self.curves) - 1) / max(1, count - 1)) for i in range(count)})
        places = [(number + 0.5) * limit / self.positions for number in range(self.positions)]
        for number, place in enumerate(chosen):
            update, means = self.curves[place]
            first = self.curves[place - 1][0] + 1 if place else int(self.history[0][0])
            label = f"{first} to {update}" if first < update else f"{update}"
            colour = colormaps["plasma"](0.85 * number / max(1, len(chosen) - 1))
            by_position.plot(places, means, color=colour, label=label, linewidth=1.4, marker=".", markersize=3)
        by_position.set(
            title="Mean entropy by position in the completion", xlabel="position / tokens", ylabel="entropy / nats"
        )
        by_position.legend(title="updates", fontsize=8)
        # Most tokens have next to no entropy and some have a lot: a square-root scale shows both.
        over_training.set_yscale("function", functions=(lambda h: abs(h) ** 0.5, lambda root: root**2))
        for axes in (over_training, by_position):
            axes.set_ylim(bottom=0)
            axes.grid(alpha=0.3)
            axes.spines[["top", "right"]].set_visible(False)
        return figure

    def state_dict(self) -> dict[str, Any]:
        """The curves: a picture shows the whole run, also over a resume."""
        return {"history": self.history, "curves": self.curves}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the curves."""
        self.history, self.curves = state_dict["history"], state_dict["curves"]


def _bin(entropy: Tensor, highest: float) -> Tensor:
    return (_BINS * (entropy.double() / highest).clamp(0, 1).sqrt()).long().clamp(max=_BINS - 1)


def _sums(place: Tensor, values: Tensor, size: int) -> Tensor:
    """[2, size] number of values and their sum in each place."""
    return torch.stack(
        [torch.bincount(place, minlength=size).double(), torch.bincount(place, values.double(), minlength=size)]
    )


def quantiles_of(histogram: Tensor, quantiles: tuple[float, ...], highest: float) -> list[float]:
    """Quantiles of entropies that are counted in bins of equal width in their square root.

    Args:
        histogram: [B] counts.
        quantiles: Each in (0, 1).
        highest: Entropy of the last bin's end.

    Returns:
        One entropy each, within the bin that holds the token of that rank; nan where nothing was counted.

    """
    total = float(histogram.sum())
    if not total:
        return [math.nan] * len(quantiles)
    reached = histogram.cumsum(0)
    # The token of rank q (n - 1), counted from 0, lies in the first bin that holds more than so many.
    ranks = torch.tensor(quantiles, dtype=torch.float64) * (total - 1)
    bins = torch.searchsorted(reached, ranks, right=True).clamp(max=len(histogram) - 1)
    before = reached[bins] - histogram[bins]
    within = (ranks - before + 0.5) / histogram[bins]
    ends = (bins + within.clamp(0, 1)) / len(histogram)
    return (highest * ends.square()).tolist()
