"""Runs four methods one after the other through the command line; test_ranks.py starts it for 1 and for 2 ranks."""

import sys

from stapo_lightning.cli import main

METHODS = ("stapo", "grpo", "entropy20", "random_mask")
# More candidates than the paper's 0.002 gives in so small a run: the quantile over both ranks must matter.
FLAGS = {"stapo": ["--model.selector.tau_p=0.2"], "random_mask": ["--model.selector.tau_p=0.2"]}


def run(method: str, ranks: int, folder: str) -> None:
    """Four updates on two rollouts; the policy lands in <folder>/<method>/run/policy/latest."""
    main(
        [
            "fit",
            "--config=configs/quickstart.yaml",
            f"--config=configs/methods/{method}.yaml",
            f"--trainer.devices={ranks}",
            f"--trainer.strategy={'ddp' if ranks > 1 else 'auto'}",
            "--trainer.max_steps=4",
            "--trainer.limit_val_batches=0",
            # SGD: a parameter's change is its gradient, and rounding is not amplified.
            "--model.optimizer=torch.optim.SGD",
            "--model.optimizer.lr=0.1",
            "--model.schedule.warmup_updates=0",
            # Twice as many micro-batches on one rank as on two, and not the same number on both.
            "--model.tokens_per_micro_batch=300",
            "--model.prompts_per_update=4",
            "--data.prompts_per_batch=8",
            f"--trainer.logger.save_dir={folder}",
            f"--trainer.logger.name={method}",
            "--trainer.logger.version=run",
            *FLAGS.get(method, []),
        ]
    )


if __name__ == "__main__":
    for name in METHODS:
        run(name, ranks=int(sys.argv[1]), folder=sys.argv[2])
