"""Two small runs over two processes, which write down what lies in their memory; test_dry_run.py starts it."""

import json
import sys
from pathlib import Path

import lightning as L
import torch
from torch.distributed.tensor import DTensor

STRATEGIES = ("ddp", "fsdp2")
# The reference is loaded for its KL to be logged, and every update takes several micro-batches.
ARGUMENTS = (
    "--config=configs/quickstart.yaml",
    "--model.log_kl=true",
    "--model.tokens_per_micro_batch=300",
    "--model.prompts_per_update=4",
    "--data.prompts_per_batch=8",
)


class Weigh(L.Callback):
    """Adds up the tensors of a run on each rank.

    Args:
        folder: Takes one JSON file of each rank.

    """

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.found: dict[str, int] = {}

    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        parameters = list(pl_module.policy.parameters())
        self.found["parameters"] = _held(parameters)
        self.found["gradients"] = _held([p.grad for p in parameters])
        self.found["reference"] = sum(_held(model.parameters()) for model in pl_module.reference)

    def on_train_end(self, trainer, pl_module) -> None:
        states = trainer.optimizers[0].state.values()
        self.found["optimiser state"] = _held(v for state in states for v in state.values() if torch.is_tensor(v))
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / f"{trainer.global_rank}.json").write_text(json.dumps(self.found))


def _held(tensors) -> int:
    """Bytes of the memory that the tensors' own parts lie in."""
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in local}.values())


def fit(strategy: str, devices: int, folder: str) -> None:
    """Two updates; <folder>/<strategy> takes what was weighed."""
    from stapo_lightning.cli import main

    main(
        [
            "fit",
            *ARGUMENTS,
            f"--trainer.devices={devices}",
            f"--trainer.strategy={strategy}",
            "--trainer.max_steps=2",
            "--trainer.limit_val_batches=0",
            "--trainer.logger=false",
            f"--trainer.default_root_dir={folder}/{strategy}",
            "--trainer.callbacks=tests.plan_worker.Weigh",
            f"--trainer.callbacks.folder={folder}/{strategy}",
        ]
    )


if __name__ == "__main__":
    for name in STRATEGIES:
        fit(name, 2, sys.argv[1])
