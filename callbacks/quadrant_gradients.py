"""QuadrantGradients: how much of the policy's gradient the tokens of each quadrant of probability and entropy make."""

from __future__ import annotations

from typing import Any, Literal

import lightning as L

from stapo_lightning.batch import RolloutBatch, Selection, TokenScores, due
from stapo_lightning.errors import bounded, raise_problems
from stapo_lightning.hardware import real_strategy
from stapo_lightning.objective import OneQuadrant
from stapo_lightning.objective.silencing import positive_tokens

_SIDES: tuple[Literal["low"], Literal["high"]] = ("low", "high")


class QuadrantGradients(L.Callback):
    """Measures the norm of the gradient in all trainable parameters that the tokens of one quadrant alone give.

    Beside `Quadrants`, whose shares come from the logit gradients of single tokens by a formula, this one goes backward
    through the policy: what tokens have in common adds up, what they disagree on cancels out. Scalars
    `gradients/<quadrant>/share` and, for the tokens with A <= 0, `gradients/negative/share`: the norm of their gradient
    over that of all tokens, with nothing silenced, under the run's own surrogate and aggregation (and KL). Shares of
    norms do not add up to 1. An update without a token below tau_p, which has no tau_h, is left out.

    A measured update takes six backward passes more. Sharded policies are refused.

    Args:
        tau_p: Probability below which a token is unlikely, in (0, 1].
        q: Quantile of their entropies that gives tau_h, in [0, 1].
        every_n_updates: Updates between two measurements, the first update included; at least 1.

    """

    def __init__(self, tau_p: float = 0.002, q: float = 0.75, every_n_updates: int = 50) -> None:
        self.tau_p = tau_p
        self.q = q
        self.every_n_updates = every_n_updates

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        """Checks the arguments, before any weights are loaded, and asks to see every selection."""
        problems = [
            *bounded("QuadrantGradients.tau_p", self.tau_p, above=0, at_most=1),
            *bounded("QuadrantGradients.q", self.q, at_least=0, at_most=1),
            *bounded("QuadrantGradients.every_n_updates", self.every_n_updates, at_least=1),
        ]
        if real_strategy(trainer.strategy)[1]:
            problems.append(
                "QuadrantGradients: not with trainer.strategy=fsdp2, where no rank has a whole gradient; leave it out"
                " of trainer.callbacks, or take callbacks.Quadrants"
            )
        raise_problems(problems)
        if stage == "fit":
            self.module = pl_module
            pl_module.selection_observers.append(self._observe)

    def teardown(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        """Lets go of the module."""
        if self._observe in pl_module.selection_observers:
            pl_module.selection_observers.remove(self._observe)

    def _observe(self, batch: RolloutBatch, scores: TokenScores, selection: Selection, update: int) -> None:
        if not due(update, self.every_n_updates):
            return
        module = self.module
        parts = {"negative": batch.completion_mask & ~positive_tokens(batch)}
        for probability in _SIDES:
            for entropy in _SIDES:
                quadrant = OneQuadrant(probability, entropy, self.tau_p, self.q)(batch, scores, module.ranks, update)
                if quadrant.tau_h.isnan():
                    return
                parts[f"{probability}_prob_{entropy}_entropy"] = quadrant.silenced
        weights = module.aggregation(batch.completion_mask, module.ranks)
        whole = float(module.gradient(batch, weights).norm())
        if whole == 0:
            return
        shares = {
            f"gradients/{name}/share": float(module.gradient(batch, weights * part).norm()) / whole
            for name, part in parts.items()
        }
        for logger in module.loggers:
            logger.log_metrics(shares, step=update)
