"""Quadrants: probability x entropy of the tokens of positive-advantage completions, and who carries the gradient."""

from __future__ import annotations

import math
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

from stapo_lightning.batch import RolloutBatch, UpdateRecord
from stapo_lightning.errors import bounded, raise_problems
from stapo_lightning.objective import S2T, squared_logit_gradients
from stapo_lightning.objective.silencing import linear_quantile
from stapo_lightning.optional import optional, require

QUADRANTS = ("low_prob_low_entropy", "low_prob_high_entropy", "high_prob_low_entropy", "high_prob_high_entropy")

# Cells of the picture: log10 of the probability from this to 0, and the cube root of the entropy from 0 to that of
# ln V: tau_h may be a hundredth of the highest entropy.
_LOWEST = -8.0
_CELLS = (64, 64)
_TICKS = (0.0, 0.001, 0.01, 0.05, 0.2, 0.5, 1.0, 2.0, 4.0, 8.0)


class Quadrants(L.Callback):
    """Counts the tokens with A > 0 in the four quadrants of probability and entropy, and measures their gradients.

    For each update and over all ranks, scalars `quadrants/<quadrant>/count`, `/token_share` and `/grad_share`: the last
    is the quadrant's share of the squared logit-gradient norm |w|^2 (1 - 2 pi + sum_v pi_v^2) of these tokens, as if
    none was silenced (`s2t/grad_share` is a share of the norm of *all* tokens). A probability is low below tau_p, an
    entropy below tau_h, the q-quantile of the entropies of the low-probability tokens: with S2T's own values, and
    pooled_updates 1, the low/low quadrant is what S2T silences. An update without a low-probability token keeps the
    tau_h of the one before.
    The picture shows the tokens and the gradient since the last one in the plane of both.

    Args:
        tau_p: Probability below which a token is unlikely, in (0, 1]; null takes the selector's, or 0.002 where it has
            none.
        q: Quantile of their entropies that gives tau_h, in [0, 1]; null takes 0.75, or that of S2T where it selects.
        every_n_updates: Updates between two pictures, the first update included; 0 for none. Pictures need matplotlib.

    """

    def __init__(self, tau_p: float | None = None, q: float | None = None, every_n_updates: int = 50) -> None:
        self.tau_p = tau_p
        self.q = q
        self.every_n_updates = every_n_updates
        self.tau_h = math.nan
        self.first_update = 0
        self.last_update = 0
        self._cells: Tensor | None = None
        self._totals = torch.zeros(2, 4, dtype=torch.float64)

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        """Checks the arguments, before any weights are loaded."""
        selector = pl_module.selector
        self.used_tau_p = getattr(selector, "tau_p", 0.002) if self.tau_p is None else self.tau_p
        # The q of other selectors is a quantile of something else.
        default = selector.q if isinstance(selector, S2T) else 0.75
        self.used_q = default if self.q is None else self.q
        raise_problems(
            bounded("Quadrants.tau_p", self.used_tau_p, above=0, at_most=1),
            bounded("Quadrants.q", self.used_q, at_least=0, at_most=1),
            bounded("Quadrants.every_n_updates", self.every_n_updates, at_least=0),
        )
        if self.every_n_updates and stage == "fit":
            require("matplotlib", "plots", "Quadrants (or every_n_updates: 0)")

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: RolloutBatch, batch_idx: int
    ) -> None:
        record: UpdateRecord = outputs["record"]
        gradient = squared_logit_gradients(batch, record)
        chosen = batch.completion_mask & (batch.advantages[:, None] > 0)
        log_probs, entropy = record.scores.log_probs, record.scores.entropy
        for update, rows in record.by_update():
            mine = chosen[rows]
            totals = self._quadrants(log_probs[rows][mine], entropy[rows][mine], gradient[rows][mine], pl_module.ranks)
            if totals is not None and update % max(1, trainer.log_every_n_steps) == 0:  # type: ignore[attr-defined]
                for logger in trainer.loggers:
                    logger.log_metrics(self._scalars(totals), step=update)
        self.first_update = self.first_update or record.updates[0]
        self.last_update = record.updates[1]
        if self.every_n_updates:
            self._add_to_picture(
                log_probs[chosen], entropy[chosen], gradient[chosen], pl_module.policy.config.vocab_size
            )
            if record.is_due(self.every_n_updates):
                self._draw(trainer, pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Draws what came after the last picture."""
        if self._cells is not None:
            self._draw(trainer, pl_module)

    def _quadrants(self, log_probs: Tensor, entropy: Tensor, gradient: Tensor, ranks: Any) -> Tensor | None:
        """[2, 4] number of tokens and squared gradient of each quadrant over all ranks; None without a threshold."""
        unlikely = log_probs.exp() < self.used_tau_p
        found = float(linear_quantile(ranks.gather(entropy[unlikely]), self.used_q))
        self.tau_h = self.tau_h if math.isnan(found) else found
        if math.isnan(self.tau_h):
            return None
        quadrant = 2 * (~unlikely).long() + (entropy >= self.tau_h).long()
        counts = torch.bincount(quadrant, minlength=4).double()
        totals = ranks.sum(torch.stack([counts, torch.bincount(quadrant, gradient, minlength=4).double()]))
        self._totals = self._totals.to(totals.device) + totals
        return totals

    def _scalars(self, totals: Tensor) -> dict[str, float]:
        counts, gradients = totals.tolist()
        values = {"quadrants/tau_h": self.tau_h}
        for name, count, gradient in zip(QUADRANTS, counts, gradients, strict=True):
            values[f"quadrants/{name}/count"] = count
            values[f"quadrants/{name}/token_share"] = _share(count, sum(counts))
            values[f"quadrants/{name}/grad_share"] = _share(gradient, sum(gradients))
        return values

    def _add_to_picture(self, log_probs: Tensor, entropy: Tensor, gradient: Tensor, vocabulary: int) -> None:
        self.highest = math.log(vocabulary)
        columns, lines = _CELLS
        column = (columns * (1 - log_probs / math.log(10) / _LOWEST)).long().clamp(0, columns - 1)
        line = (lines * (entropy / self.highest).clamp(min=0) ** (1 / 3)).long().clamp(0, lines - 1)
        cell = column * lines + line
        cells = torch.stack(
            [torch.bincount(cell, minlength=columns * lines).double(), torch.bincount(cell, gradient, columns * lines)]
        )
        self._cells = cells if self._cells is None else self._cells + cells

    def _draw(self, trainer: L.Trainer, pl_module: Any) -> None:
        cells = pl_module.ranks.sum(self._cells).view(2, *_CELLS)
        if trainer.is_global_zero and isinstance(trainer.logger, TensorBoardLogger):
            figure = self._figure(cells.cpu())
            trainer.logger.experiment.add_figure("quadrants/plane", figure, self.last_update)
        self._cells = None
        self._totals = torch.zeros_like(self._totals)
        self.first_update = 0

    def _figure(self, cells: Tensor) -> Any:
        figure = optional("matplotlib.figure", "plots", "Quadrants").Figure(figsize=(10, 5), layout="constrained")
        colors = optional("matplotlib.colors", "plots", "Quadrants")
        span = f"update {self.last_update}"
        if self.first_update < self.last_update:
            span = f"updates {self.first_update} to {self.last_update}"
        figure.suptitle(f"Tokens with A > 0, {span}")
        highest = self.highest ** (1 / 3)
        tau_h = self.tau_h ** (1 / 3)
        reached = cells[0].sum(0).nonzero()
        top = highest * (float(reached.max()) + 2 if len(reached) else 1.0) / _CELLS[1]
        top = min(highest, max(top, 1.3 * (0.0 if math.isnan(tau_h) else tau_h)))
        names = ("tokens", "squared logit-gradient norm")
        for axes, values, totals, name in zip(figure.subplots(1, 2), cells, self._totals.cpu(), names, strict=True):
            shown = torch.where(values > 0, values / values.sum(), torch.nan).T.numpy()
            norm = colors.LogNorm(vmin=1e-5, vmax=1.0, clip=True)
            image = axes.imshow(
                shown, origin="lower", aspect="auto", extent=(_LOWEST, 0, 0, highest), cmap="YlOrRd", norm=norm
            )
            figure.colorbar(image, ax=axes, label="share")
            axes.set_title(name)
            axes.set_xlabel("probability")
            axes.set_ylabel("entropy / nats")
            axes.set_ylim(0, top)
            ticks = [h for h in _TICKS if h ** (1 / 3) <= top]
            axes.set_yticks([h ** (1 / 3) for h in ticks], [f"{h:g}" for h in ticks])
            axes.set_xticks([-8, -6, -4, -2, 0], ["1e-8", "1e-6", "1e-4", "1e-2", "1"])
            tau_p = math.log10(self.used_tau_p)
            axes.axvline(tau_p, color="#1e293b", linewidth=1.2)
            if math.isnan(tau_h):
                continue
            axes.axhline(tau_h, color="#1e293b", linewidth=1.2)
            box = {"facecolor": "white", "alpha": 0.85, "edgecolor": "none", "pad": 2}
            for number, total in enumerate(totals.tolist()):
                right, upper = number >= 2, number % 2
                low, high = (tau_h, top) if upper else (0, tau_h)
                text = f"{_share(total, float(totals.sum())):.2%}" + (f"\n{total:,.0f}" if name == "tokens" else "")
                axes.annotate(
                    text,
                    # Where fewest tokens are: those on the right stand near probability 1.
                    (tau_p if right else _LOWEST, (low + high) / 2),
                    xytext=(6, 0),
                    textcoords="offset points",
                    va="center",
                    bbox=box,
                )
            axes.annotate(
                f"tau_p = {self.used_tau_p:g}", (tau_p, top), xytext=(4, -5), textcoords="offset points", va="top"
            )
            axes.annotate(
                f"tau_h = {self.tau_h:.2g}", (tau_p, tau_h), xytext=(4, 3), textcoords="offset points", va="bottom"
            )
        return figure

    def state_dict(self) -> dict[str, Any]:
        """The threshold, for an update that finds none of its own. A picture starts anew at a resume."""
        return {"tau_h": self.tau_h}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the threshold."""
        self.tau_h = state_dict["tau_h"]


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
