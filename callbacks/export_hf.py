"""ExportHF: the policy as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L


class ExportHF(L.Callback):
    """Saves policy and tokenizer at the end of `fit`, so that `AutoModelForCausalLM.from_pretrained(DIR)` loads them.

    Args:
        folder: Where to, relative to the run's folder.

    """

    def __init__(self, folder: str = "policy") -> None:
        self.folder = folder

    def on_fit_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        target = Path(trainer.log_dir or trainer.default_root_dir) / self.folder
        if trainer.is_global_zero:
            pl_module.policy.save_pretrained(target)
            pl_module.tokenizer.save_pretrained(target)
