"""Runs every method overlay through the command line, under one or several strategies; test_ranks.py starts it."""

import sys

from stapo_lightning.cli import main

METHODS = (
    "stapo",
    "dapo",
    "justrl",
    "grpo",
    "entropy20",
    "fullmask",
    "high_entropy_mask",
    "random_mask",
    "random_positive",
    "stapo_pooled",
    "stapo_v1",
    "silenced_rank",  # not a method: all tokens of the second of two ranks are silenced
)
# More candidates than the paper's 0.002 gives in so small a run: the quantile over both ranks must matter.
_MANY = ["--model.selector.tau_p=0.2"]
# What the callbacks write has to be the same as well.
FLAGS = {
    "stapo": [
        *_MANY,
        "--trainer.callbacks+=callbacks.SilencedTokens",
        "--trainer.callbacks.every_n_updates=1",
        "--trainer.callbacks+=callbacks.Quadrants",
        "--trainer.callbacks+=callbacks.EntropyProfile",
        "--trainer.callbacks+=callbacks.TokenViewer",
    ],
    "fullmask": _MANY,
    "high_entropy_mask": _MANY,
    "random_mask": _MANY,
    "random_positive": _MANY,
    "stapo_pooled": _MANY,
    # Its quantile is over all tokens, most of which are sure.
    "stapo_v1": [*_MANY, "--model.selector.q=0.95"],
    "silenced_rank": ["--model.selector=tests.doubles.OddPromptsSilenced", "--model.activation_checkpointing=true"],
}
# Gradients of a sharded policy are refused.
WHOLE = {
    "random_mask": [
        "--trainer.callbacks+=callbacks.QuadrantGradients",
        "--trainer.callbacks.tau_p=0.2",
        "--trainer.callbacks.every_n_updates=1",
    ],
}


def run(method: str, ranks: int, strategy: str, folder: str) -> None:
    """Four updates on two rollouts; the policy lands in <folder>/<strategy>/<method>/policy/latest."""
    overlay = "stapo" if method == "silenced_rank" else method
    main(
        [
            "fit",
            "--config=configs/quickstart.yaml",
            f"--config=configs/methods/{overlay}.yaml",
            f"--trainer.devices={ranks}",
            f"--trainer.strategy={strategy}",
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
            "--data.sampling.max_new_tokens=32",
            f"--trainer.logger.save_dir={folder}",
            f"--trainer.logger.name={strategy}",
            f"--trainer.logger.version={method}",
            *FLAGS.get(method, []),
            *(WHOLE.get(method, []) if strategy != "fsdp2" else []),
        ]
    )


if __name__ == "__main__":
    for name in METHODS:
        for each in sys.argv[3:]:
            run(name, int(sys.argv[1]), each, sys.argv[2])
