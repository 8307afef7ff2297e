"""RunSummary: accuracy before and after, and where everything lies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
from rich.console import Console
from rich.table import Table


class RunSummary(L.Callback):
    """Prints held-out accuracy before and after `fit`, the run's folder and the TensorBoard command.

    "Before" is the validation that `trainer.num_sanity_val_steps: -1` runs ahead of the first update. Silenced tokens
    are summed over the whole run.
    """

    def __init__(self) -> None:
        self.before: dict[str, float] = {}
        self.after: dict[str, float] = {}
        self.silenced = 0.0
        self.tokens = 0.0

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.after = dict(pl_module.eval_results)
        if not self.before:
            self.before = dict(self.after)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.silenced += float(outputs["record"].silenced.sum())
        self.tokens += float(batch.completion_lengths.sum())

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        folder = Path(trainer.log_dir or trainer.default_root_dir)
        if not trainer.is_global_zero:
            return
        table = Table(title=f"held-out results, before and after {trainer.global_step} updates", title_justify="left")
        for column in ("", "before", "after"):
            table.add_column(column, justify="left" if not column else "right")
        for tag in self.after:
            if "@" in tag:
                table.add_row(tag, f"{self.before[tag]:.1%}", f"{self.after[tag]:.1%}")
        console = Console()
        if self.after:
            console.print(table)
        share = self.silenced / self.tokens if self.tokens else 0.0
        console.print(f"silenced     {self.silenced:,.0f} of {self.tokens:,.0f} tokens on this rank ({share:.4%})")
        console.print(f"run          {folder}", soft_wrap=True)
        if (folder / "policy").exists():
            console.print(f"policy       {folder / 'policy'}", soft_wrap=True)
        console.print(f"TensorBoard  tensorboard --logdir {folder.parent}", soft_wrap=True)

    def state_dict(self) -> dict[str, Any]:
        """Kept over a resume."""
        return {"before": self.before, "after": self.after, "silenced": self.silenced, "tokens": self.tokens}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what was seen before the resume."""
        self.__dict__.update(state_dict)
