"""CompletionLogger: a few prompts with completions and rewards as text."""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch.loggers import TensorBoardLogger

from stapo_lightning.errors import bounded
from stapo_lightning.token_text import as_code


class CompletionLogger(L.Callback):
    """Writes prompts with their completions, rewards and advantages to TensorBoard's Text tab.

    Args:
        every_n_rollouts: Rollouts between two entries, at least 1.
        prompts: Prompts an entry, at least 1.
        completions: Completions of each prompt, at least 1.
        max_chars: Longest prompt or completion shown, at least 1.

    """

    def __init__(
        self, every_n_rollouts: int = 50, prompts: int = 2, completions: int = 4, max_chars: int = 2000
    ) -> None:
        self.every_n_rollouts = every_n_rollouts
        self.prompts = prompts
        self.completions = completions
        self.max_chars = max_chars

    def problems(self, trainer: L.Trainer) -> list[str]:
        """What is wrong with the options."""
        options = ("every_n_rollouts", "prompts", "completions", "max_chars")
        return [p for name in options for p in bounded(f"CompletionLogger.{name}", getattr(self, name), at_least=1)]

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.fit_loop.total_batch_idx % self.every_n_rollouts or not isinstance(
            trainer.logger, TensorBoardLogger
        ):
            return
        lines = []
        for first in range(0, min(self.prompts * batch.group_size, len(batch)), batch.group_size):
            prompt = batch.prompts[first]
            lines += [f"**prompt** {self._code(prompt.text)} **answer** {self._code(prompt.answer)}", ""]
            for row in range(first, first + min(self.completions, batch.group_size)):
                # No table: TensorBoard breaks the words of its narrow columns.
                lines.append(
                    f"* **reward {batch.rewards[row]:.2f}**, advantage {batch.advantages[row]:+.2f},"
                    f" {batch.completion_lengths[row]} tokens: {self._code(batch.texts[row])}"
                )
            lines.append("")
        trainer.logger.experiment.add_text("completions", "\n".join(lines), trainer.global_step)

    def _code(self, text: str) -> str:
        shown = text if len(text) <= self.max_chars else text[: self.max_chars] + " ..."
        return as_code(shown.replace("\n", " ↵ "))
