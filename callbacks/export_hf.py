"""ExportHF: the policy as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L

from stapo_lightning.sharding import is_sharded, whole_weights


class ExportHF(L.Callback):
    """Saves policy and tokenizer at the end of `fit`, so that `AutoModelForCausalLM.from_pretrained(DIR)` loads them.

    Args:
        folder: Where to, relative to the run's folder.

    """

    def __init__(self, folder: str = "policy") -> None:
        self.folder = folder

    def on_fit_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        target = Path(trainer.log_dir or trainer.default_root_dir) / self.folder
        policy = pl_module.policy
        weights = None
        if is_sharded(policy):
            weights = {}
            for name, value in whole_weights(policy):  # every rank takes part, one keeps them
                if trainer.is_global_zero:
                    weights[name] = value.cpu()
        if trainer.is_global_zero:
            policy.save_pretrained(target, state_dict=weights)
            pl_module.tokenizer.save_pretrained(target)
