"""ExportHF: the policy as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import lightning as L

from stapo_lightning.adapters import has_adapter, save_adapter, save_merged
from stapo_lightning.errors import ConfigError


class ExportHF(L.Callback):
    """Saves policy and tokenizer at the end of `fit`, so that `AutoModelForCausalLM.from_pretrained(DIR)` loads them.

    Args:
        folder: Where to, relative to the run's folder.
        form: Of a policy with an adapter (model.adapter): "merged" is a whole model that computes the same; "adapter"
            the adapter alone, which `PeftModel.from_pretrained(model, DIR)` puts over the model that the run began
            with. The policy itself stays as it is.

    """

    def __init__(self, folder: str = "policy", form: Literal["merged", "adapter"] = "merged") -> None:
        self.folder = folder
        self.form = form

    def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        if self.form == "adapter" and not has_adapter(pl_module.policy):
            raise ConfigError(
                [
                    "ExportHF.form=adapter: the policy has none; write form: merged, or lay configs/scale/lora.yaml"
                    " over your config"
                ]
            )

    def on_fit_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        target = Path(trainer.log_dir or trainer.default_root_dir) / self.folder
        save = save_adapter if self.form == "adapter" else save_merged
        save(pl_module.policy, target, writes=trainer.is_global_zero)
        if trainer.is_global_zero:
            pl_module.tokenizer.save_pretrained(target)
