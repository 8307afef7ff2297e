"""ExportHF: every saved checkpoint also as a Hugging Face folder, the latest and the best."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any, Literal

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_warn

from stapo_lightning.adapters import has_adapter, save_adapter, save_merged
from stapo_lightning.errors import ConfigError

LATEST, BEST = "latest", "best"

# Written into each folder: the update it is from and, where there is an option `monitor`, what that was.
_NOTE = "export.json"


class ExportHF(L.Callback):
    """Keeps policy and tokenizer as `<folder>/latest` and `<folder>/best`, which `from_pretrained` loads.

    `latest` follows every saved checkpoint and the end of `fit`; `best` follows the first ModelCheckpoint that has a
    `monitor`, or the option of this name. Both are links to folders `update=<n>`, which are written beside and renamed,
    and so are the links: a kill leaves the ones before. Folders that no link names are removed, so at most two stay and
    three are there while one is written. Checkpoints with `save_weights_only: true` reach no callback.

    Args:
        folder: Where to, relative to the run's folder.
        monitor: Tag that decides on `best`, looked at whenever a checkpoint is saved, such as reward/mean; tags that
            begin with val/ count at the update of their validation. Null follows the first ModelCheckpoint with a
            `monitor`; where there is none, there is no `best`.
        mode: Whether the largest ("max") or the smallest ("min") value of the option `monitor` is best.
        form: Of a policy with an adapter (model.adapter): "merged" is a whole model that computes the same; "adapter"
            the adapter alone, which `PeftModel.from_pretrained(model, DIR)` puts over the model that the run began
            with. The policy itself stays as it is.

    """

    def __init__(
        self,
        folder: str = "policy",
        monitor: str | None = None,
        mode: Literal["max", "min"] = "max",
        form: Literal["merged", "adapter"] = "merged",
    ) -> None:
        self.folder = folder
        self.form = form
        self.monitor = monitor
        self.mode = mode
        self.exported: int | None = None
        self.best_score: float | None = None
        self.followed: tuple[str, float | None] = ("", None)
        self.seen = False

    def path(self, trainer: L.Trainer) -> Path:
        """Folder of the two links; a broadcast, so that every rank has to ask."""
        return Path(trainer.log_dir or trainer.default_root_dir) / self.folder

    def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        if self.form == "adapter" and not has_adapter(pl_module.policy):
            raise ConfigError(
                [
                    "ExportHF.form=adapter: the policy has none; write form: merged, or lay configs/scale/lora.yaml"
                    " over your config"
                ]
            )

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """What a resumed run has exported as its best."""
        self.exported, self.seen = None, False
        self.followed = _best_of(trainer)
        note = self.path(trainer) / BEST / _NOTE
        kept = json.loads(note.read_text()) if trainer.is_global_zero and note.exists() else {}
        kept = trainer.strategy.broadcast(kept)
        self.best_score = kept.get("score") if kept.get("monitor") == self.monitor else None

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """The weights that are being saved."""
        if trainer.state.fn != "fit":
            return
        links = [LATEST] if self.exported != trainer.global_step else []
        if self._is_best(trainer, pl_module):
            links.append(BEST)
        if links:
            self._export(trainer, pl_module, links)

    def on_fit_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        if self.exported != trainer.global_step:
            self._export(trainer, pl_module, [LATEST])
        if self.monitor is not None and not self.seen:
            rank_zero_warn(
                f"ExportHF.monitor={self.monitor}: no checkpoint was saved when it had been measured, so there is no"
                f" `best`. Measured were {', '.join(sorted(trainer.callback_metrics)) or 'none'}; a tag that begins"
                " with val/ needs a ModelCheckpoint that saves where trainer.val_check_interval validates"
            )

    def _is_best(self, trainer: L.Trainer, pl_module: Any) -> bool:
        if self.monitor is None:
            # ModelCheckpoint names its new best just before it saves it: what changed is what is being saved.
            before, self.followed = self.followed, _best_of(trainer)
            return self.followed != before
        stale = self.monitor.startswith("val/") and pl_module.validated_update != trainer.global_step
        if self.monitor not in trainer.callback_metrics or stale:
            return False
        self.seen = True
        score, best = float(trainer.callback_metrics[self.monitor]), self.best_score
        better = score == score and (best is None or (score > best if self.mode == "max" else score < best))
        if better:
            self.best_score = score
        return better

    def _export(self, trainer: L.Trainer, pl_module: Any, links: list[str]) -> None:
        """Points `links` at the policy as it is now. Every rank comes here."""
        root = self.path(trainer)
        if self.exported != trainer.global_step:
            note = {"update": trainer.global_step, "policy": pl_module.policy_name}
            if BEST in links and self.monitor is not None:
                note |= {"monitor": self.monitor, "score": self.best_score}
            self._write(trainer, pl_module, root, note)
            self.exported = trainer.global_step
        elif BEST in links and self.monitor is not None and trainer.is_global_zero:
            _annotate(root / LATEST, {"monitor": self.monitor, "score": self.best_score})
        if not trainer.is_global_zero:
            return
        for name in links:
            _link(root, name, self._written)
        _prune(root)

    def _write(self, trainer: L.Trainer, pl_module: Any, root: Path, note: dict[str, Any]) -> None:
        number, target = 1, root / f"update={trainer.global_step}"
        while target.exists():  # a run that was killed comes to the same update again
            number += 1
            target = root / f"update={trainer.global_step}-{number}"
        partial = root / f".{target.name}.partial"
        if trainer.is_global_zero:
            shutil.rmtree(partial, ignore_errors=True)
        save = save_adapter if self.form == "adapter" else save_merged
        save(pl_module.policy, partial, writes=trainer.is_global_zero)
        if not trainer.is_global_zero:
            return
        pl_module.tokenizer.save_pretrained(partial)
        (partial / _NOTE).write_text(json.dumps(note) + "\n")
        for path in partial.iterdir():
            _flush(path)
        partial.rename(target)
        self._written = target.name


def _best_of(trainer: L.Trainer) -> tuple[str, float | None]:
    """Path and score of the best checkpoint of the first ModelCheckpoint that has a monitor."""
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.monitor is not None:
            score = callback.best_model_score
            return callback.best_model_path, None if score is None else float(score)
    return "", None


def _annotate(folder: Path, more: dict[str, Any]) -> None:
    path, partial = folder / _NOTE, folder / f".{_NOTE}"
    partial.write_text(json.dumps(json.loads(path.read_text()) | more) + "\n")
    partial.replace(path)


def _link(root: Path, name: str, target: str) -> None:
    """Points `root/name` at `root/target`, at once."""
    beside = root / f".{name}.link"
    beside.unlink(missing_ok=True)
    beside.symlink_to(target, target_is_directory=True)
    beside.replace(root / name)


def _prune(root: Path) -> None:
    """Removes the folders that no link names, and what a kill left half written."""
    kept = {(root / name).resolve().name for name in (LATEST, BEST)}
    for path in [*root.glob("update=*"), *root.glob(".update=*.partial")]:
        if path.name not in kept:
            shutil.rmtree(path)


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
