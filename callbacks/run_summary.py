"""RunSummary: accuracy before and after, and where everything lies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
from rich.console import Console
from rich.table import Table

from callbacks.export_hf import BEST, LATEST, ExportHF


class RunSummary(L.Callback):
    """Prints held-out accuracy before and after `fit`, the run's folder and the TensorBoard command.

    "Before" is the validation that `trainer.num_sanity_val_steps: -1` runs ahead of the first update. Silenced tokens
    are summed over the whole run.
    """

    def __init__(self) -> None:
        self.before: dict[str, float] = {}
        self.after: dict[str, float] = {}
        self.update = 0
        self.silenced = 0.0
        self.tokens = 0.0

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.after = dict(pl_module.eval_results)
        self.update = trainer.global_step
        if trainer.global_step == 0:
            self.before = dict(self.after)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.silenced += float(outputs["record"].silenced.sum())
        self.tokens += float(batch.completion_lengths.sum())

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """After the progress bar has gone."""
        folder = Path(trainer.log_dir or trainer.default_root_dir)
        if stage != "fit" or not trainer.is_global_zero:
            return
        console = Console(width=100)
        if self.after:
            table = Table(title=f"held-out results after {self.update} updates", title_justify="left")
            # A run that was not validated ahead of its first update has nothing to compare with.
            columns = {"before": self.before, "after": self.after} if self.before else {"after": self.after}
            table.add_column("")
            for name in columns:
                table.add_column(name, justify="right")
            for tag in self.after:
                if tag.startswith("val/average/") or "@" in tag:
                    table.add_row(tag, *(f"{results[tag]:.1%}" for results in columns.values()))
            console.print(table)
        share = self.silenced / self.tokens if self.tokens else 0.0
        rank = " on this rank" if trainer.world_size > 1 else ""
        console.print(
            f"silenced     {self.silenced:,.0f} of {self.tokens:,.0f} tokens{rank} ({share:.3%})", soft_wrap=True
        )
        console.print(f"run          {folder}", soft_wrap=True)
        exports = [callback for callback in trainer.callbacks if isinstance(callback, ExportHF)]  # type: ignore[attr-defined]
        for path in (folder / export.folder / name for export in exports for name in (LATEST, BEST)):
            if path.exists():
                console.print(f"policy       {path}", soft_wrap=True)
        console.print(f"TensorBoard  tensorboard --logdir {folder.parent}", soft_wrap=True)

    def state_dict(self) -> dict[str, Any]:
        """Kept over a resume."""
        # By name: Lightning hangs methods of its own on a callback, which no checkpoint can hold.
        return {name: getattr(self, name) for name in ("before", "after", "update", "silenced", "tokens")}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what was seen before the resume."""
        for name, value in state_dict.items():
            setattr(self, name, value)
