"""Checkpoints that are whole or not there: a kill during a save leaves the previous one usable."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes next to the target, flushes to disk and renames.

    Lightning's own writer collects the file in the system's temporary folder; from there to another file system the
    last step is a copy, which a kill can cut in half.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Saves `checkpoint` at `path`; remote paths (with ://) are left to Lightning."""
        if "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        for stale in target.parent.glob(f".{target.name}.*.partial"):
            stale.unlink(missing_ok=True)
        partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
        with partial.open("wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)
