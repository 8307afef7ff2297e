"""PredictionWriter: the completions of `stapo predict` as JSONL."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import BasePredictionWriter


class PredictionWriter(BasePredictionWriter):
    """Writes one JSON line a completion.

    It holds source, number, prompt and gold answer of the problem; completion, extracted answer, verdict, tokens and
    whether the length limit cut it. Each rank of a run with several ranks writes its own file, with `.rank<r>` before
    the ending.

    Args:
        path: The file; null puts predictions.jsonl into the run's folder.

    """

    def __init__(self, path: str | None = None) -> None:
        super().__init__(write_interval="batch")
        self.path = path

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Starts an empty file."""
        super().setup(trainer, pl_module, stage)
        if stage != "predict":
            return
        path = Path(self.path) if self.path else Path(trainer.log_dir or trainer.default_root_dir) / "predictions.jsonl"
        if trainer.world_size > 1:
            path = path.with_suffix(f".rank{trainer.global_rank}{path.suffix}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
        self.file = path

    def write_on_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        prediction: Any,
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Appends the completions of a batch."""
        with self.file.open("a") as file:
            for samples in prediction.samples:
                for row, (prompt, uid) in enumerate(zip(prediction.prompts, prediction.uids, strict=True)):
                    for completion in samples.completions[row]:
                        entry = {
                            "source": prompt.source,
                            "prompt_number": uid,
                            "prompt": prompt.text,
                            "answer": prompt.answer,
                            "completion": completion.text,
                            "extracted": completion.answer,
                            "correct": completion.correct,
                            "tokens": completion.tokens,
                            "truncated": completion.truncated,
                        }
                        file.write(json.dumps(entry, ensure_ascii=False) + "\n")

    def on_predict_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Says where the file lies."""
        print(f"predictions  {self.file}")
