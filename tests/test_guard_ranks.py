"""A roll back on two ranks, with DDP and sharded, does what it does on one."""

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM

from tests.cli_worker import run_commands
from tests.doubles import parameters

GUARD = """
trainer:
  callbacks:
    - class_path: lightning.pytorch.callbacks.ModelCheckpoint
      init_args: {filename: "{step}", monitor: reward/mean, mode: max, every_n_train_steps: 1}
    - class_path: callbacks.EntropyGuard
      init_args:
        {action: rollback, start_rollouts: 2, window: 3, patience: 1, explosion_level: 1.35, lr_factor: 0.02,
         collapse_slope: null, explosion_slope: null, reward_fall: null}
    - class_path: callbacks.ExportHF
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Strategy -> folder of a run whose entropy is 1.4 times that of the start at update 6."""
    folder = tmp_path_factory.mktemp("guarded")
    overlay = folder / "guard.yaml"
    overlay.write_text(GUARD)

    def command(strategy: str, devices: int) -> list[str]:
        return [
            "fit",
            "--config=configs/quickstart.yaml",
            f"--config={overlay}",
            f"--trainer.devices={devices}",
            f"--trainer.strategy={strategy}",
            "--trainer.max_steps=8",
            "--trainer.limit_val_batches=0",
            "--model.optimizer.lr=2e-2",
            "--model.schedule.warmup_updates=12",
            "--model.prompts_per_update=8",
            "--data.prompts_per_batch=8",
            "--data.group_size=4",
            f"--trainer.logger.save_dir={folder}",
            f"--trainer.logger.name={strategy}",
            "--trainer.logger.version=run",
        ]

    run_commands(folder, [command("auto", 1)])
    run_commands(folder, [command("ddp", 2), command("fsdp2", 2)])
    return {strategy: folder / strategy / "run" for strategy in ("auto", "ddp", "fsdp2")}


def _values(run: Path, tag: str) -> list[float]:
    events = EventAccumulator(str(run), size_guidance={"scalars": 0})
    events.Reload()
    return [event.value for event in events.Scalars(tag)]


def test_one_rank_rolls_back_at_update_6(runs):
    levels = _values(runs["auto"], "guard/entropy_level")  # from update 2 on
    assert max(levels[:4]) < 1.35 < levels[4]
    assert _values(runs["auto"], "guard/rollbacks") == [1.0]
    # update n of the warm-up has n / 12 of 2e-2, and 0.02 of it from update 7 on
    expected = [2e-2 * n / 12 * (0.02 if n > 6 else 1) for n in range(1, 9)]
    assert _values(runs["auto"], "policy/lr") == pytest.approx(expected)
    assert max(levels[5:]) < 1.35


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_ranks_do_the_same(runs, strategy):
    # Before and after the roll back: weights that were not those of the checkpoint would have another entropy.
    for tag in ("policy/entropy", "policy/lr", "guard/rollbacks"):
        assert _values(runs[strategy], tag) == pytest.approx(_values(runs["auto"], tag), rel=0.01), tag
    one, two = (
        parameters(AutoModelForCausalLM.from_pretrained(runs[name] / "policy" / "latest"))
        for name in ("auto", strategy)
    )
    # Adam's first steps amplify rounding up to the rate, 2e-2 / 12 in the update that the checkpoint was taken at.
    assert (one - two).abs().mean() < 1e-4
