"""The command line: `stapo fit|validate|test|predict|plan --config ...`. Only links and wires."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jsonargparse import set_parsing_settings
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.trainer.states import TrainerFn
from omegaconf.errors import OmegaConfBaseException
from transformers.utils import logging as transformers_logging

from callbacks import EvaluationReport  # the import also lets a config name the classes of callbacks
from stapo_lightning.checkpoint_io import global_step, recover_all
from stapo_lightning.data import RolloutDataModule
from stapo_lightning.dry_run import PlanningTrainer
from stapo_lightning.errors import StapoError, raise_problems
from stapo_lightning.hardware import PlannedStrategy, read_hardware
from stapo_lightning.module import StapoModule
from stapo_lightning.strategy import strategy_problems


class SaveRunConfig(SaveConfigCallback):
    """Writes the full configuration into the run's folder and, as text, into TensorBoard.

    A run that is resumed keeps its first config.yaml; each later one stands beside it as config-<number>.yaml.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **(kwargs | {"save_to_log_dir": False}))

    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Called on rank zero before anything runs."""
        text = self.parser.dump(self.config, skip_none=False)
        # Not trainer.log_dir: that is a broadcast, and only rank zero comes here.
        logger = trainer.logger
        folder = Path(getattr(logger, "log_dir", None) or trainer.default_root_dir)
        stage = TrainerFn(stage).value  # Lightning passes an enum member, which formats as TrainerFn.FITTING
        name = "config" if stage == "fit" else f"config-{stage}"
        path, number = folder / f"{name}.yaml", 1
        while path.exists():
            number += 1
            path = folder / f"{name}-{number}.yaml"
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_text("config", f"```yaml\n{text}\n```", trainer.global_step)


class StapoCLI(LightningCLI):
    """LightningCLI over StapoModule and RolloutDataModule."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Nothing is linked: module and datamodule meet at the trainer."""

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Lightning's, and `plan`."""
        return LightningCLI.subcommands() | {"plan": {"model", "datamodule"}}

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """A plan does not claim the devices that it is for."""
        if self.subcommand == "plan":
            strategy = PlannedStrategy(*read_hardware(self.config["plan"].trainer))
            kwargs |= {"accelerator": "cpu", "devices": 1, "num_nodes": 1, "strategy": strategy}
            kwargs |= {"precision": None, "logger": False}
        return super().instantiate_trainer(**kwargs)

    def setup_parser(self, *args: Any, **kwargs: Any) -> None:
        """Leaves Lightning's own table of results out where not asked for: EvaluationReport prints one."""
        super().setup_parser(*args, **kwargs)
        for subcommand in ("validate", "test"):
            self._subcommand_parsers[subcommand].set_defaults({"verbose": False})

    def before_instantiate_classes(self) -> None:
        """Finds the run that `--ckpt_path last` means, and picks bf16 where there is a GPU."""
        subcommand = str(self.subcommand)
        config = self.config[subcommand]
        # Before the Trainer is built, whose own error on these names no way out.
        strategy = config.trainer.strategy
        raise_problems(strategy_problems(strategy if isinstance(strategy, str) else str(strategy.get("class_path"))))
        if config.get("ckpt_path") == "last" and subcommand != "plan":
            resume_last(config, subcommand)
        on_gpu = config.trainer.accelerator in ("auto", "gpu", "cuda")
        if on_gpu and config.trainer.precision is None and torch.cuda.is_available() and torch.cuda.is_bf16_supported():
            config.trainer.precision = "bf16-mixed"


def resume_last(config: Any, subcommand: str) -> None:
    """Points `ckpt_path` at the newest checkpoint of the newest run, and the logger at that run's folder.

    The newest run is the highest version_N of the logger that was ever fitted. Where `fit` was stopped before its
    first checkpoint it starts again from the beginning, never from an older run.

    Raises:
        StapoError: There is no run to resume.

    """
    logger = config.trainer.logger
    settings: Any = logger.get("init_args", {}) if hasattr(logger, "get") else {}
    if "save_dir" not in settings:
        return  # another kind of logger: Lightning looks for the checkpoint itself
    root = Path(settings.save_dir) / (settings.get("name") or "")
    wanted = settings.get("version")
    runs = [root / (wanted if isinstance(wanted, str) else f"version_{wanted}")] if wanted is not None else _runs(root)
    runs = [run for run in runs if (run / "config.yaml").exists()]
    if not runs:
        raise StapoError(f"--ckpt_path last: no run under {root}; leave --ckpt_path out to start one")
    run = runs[-1]
    settings.version = run.name
    # A kill may have hit between the first step=<n>.ckpt and its last.ckpt, and last.ckpt can be switched off.
    recover_all(run / "checkpoints")
    newest = max(run.glob("checkpoints/*.ckpt"), key=lambda path: path.stat().st_mtime_ns, default=None)
    if newest is not None:
        config.ckpt_path = str(newest)
        if subcommand == "fit":
            update = global_step(newest)
            # What was logged between the checkpoint and the kill is logged again: TensorBoard drops the first version.
            settings.purge_step = update + 1
            print(f"resuming {run} at update {update}")
    elif subcommand == "fit":
        config.ckpt_path = None
        print(f"{run} was stopped before its first checkpoint: starting it from the beginning")
    else:
        raise StapoError(f"--ckpt_path last: no checkpoint in {run / 'checkpoints'}")


def _runs(root: Path) -> list[Path]:
    found = [run for run in root.glob("version_*") if run.name.removeprefix("version_").isdigit()]
    return sorted(found, key=lambda run: int(run.name.removeprefix("version_")))


def _quieten() -> None:
    """Leaves out the messages of a normal run that no user can act on."""
    for message in (
        ".*does not have many workers.*",  # a loader here yields a few token ids for each rollout
        ".*sync_dist=True.*",  # our metrics are already the same on every rank
        ".*Checkpoint directory .* exists and is not empty.*",  # a resumed run goes on in its own folder
        ".*no pre-optimization state was saved.*",  # the state after the update is the one to resume from
        ".*method of metric ProblemTable was called before.*",  # a rank without problems of a benchmark
        ".*isinstance\\(treespec, LeafSpec\\).*",  # between lightning and torch
    ):
        warnings.filterwarnings("ignore", message=f"(?s){message}")
    rank_zero_log = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    rank_zero_log.addFilter(lambda record: "litlogger" not in record.getMessage())  # an advertisement
    transformers_logging.disable_progress_bar()


def run(args: Sequence[str] | None = None, cli_class: type[StapoCLI] = StapoCLI) -> StapoCLI:
    """Parses, builds and runs; errors come out as exceptions.

    Args:
        args: Command-line arguments; None takes sys.argv.
        cli_class: StapoCLI, or a subclass that changes a step of it.

    """
    # Paths inside a config are read from where the command is started, also with the omegaconf parser.
    set_parsing_settings(omegaconf_absolute_to_relative_paths=True)
    return cli_class(
        StapoModule,
        RolloutDataModule,
        trainer_class=PlanningTrainer,
        save_config_callback=SaveRunConfig,
        seed_everything_default=1,
        trainer_defaults={"use_distributed_sampler": False, "callbacks": [EvaluationReport()]},
        parser_kwargs={"parser_mode": "omegaconf+", "prog": "stapo"},
        auto_configure_optimizers=False,
        args=list(args) if args is not None else None,
    )


def main(args: Sequence[str] | None = None) -> None:
    """Console script `stapo`; also `python -m stapo_lightning`.

    Args:
        args: Command-line arguments; None takes sys.argv.

    """
    _quieten()
    # A reward or selector in a file of the folder where `stapo` is started can be named in a config.
    sys.path.insert(0, str(Path.cwd()))
    try:
        run(args)
    except StapoError as error:
        print(f"stapo: {error}", file=sys.stderr)
        sys.exit(2)
    except OmegaConfBaseException as error:
        print(f"stapo: an interpolation ${{...}} in the configuration finds no value: {error}", file=sys.stderr)
        sys.exit(2)
