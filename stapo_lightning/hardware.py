"""The machines that a configuration is for, read from it without asking for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy

from stapo_lightning.strategy import ShardedStrategy, strategy_problems

# The dtypes of trainer.precision: of the weights, and of autocast.
_PRECISIONS: dict[str, tuple[torch.dtype, torch.dtype | None]] = {
    "32-true": (torch.float32, None),
    "32": (torch.float32, None),
    "bf16-mixed": (torch.float32, torch.bfloat16),
    "bf16": (torch.float32, torch.bfloat16),
    "bf16-true": (torch.bfloat16, None),
}
_ON_GPU = ("auto", "gpu", "cuda")
_DDP = ("ddp", "ddp_spawn", "ddp_fork", "ddp_notebook", "DDPStrategy")
_SHARDED = ("fsdp2", "ShardedStrategy")


@dataclass(frozen=True)
class Hardware:
    """What `trainer` asks for.

    Attributes:
        gpu: Whether the ranks run on GPUs; "auto" counts as one.
        devices: Ranks on each node, >= 1.
        nodes: Machines, >= 1.
        strategy: "single", "ddp" or "sharded".
        strategy_name: As the configuration names it, or its class.
        precision: Lightning's name of it.
        weights: Dtype of the parameters between updates.
        autocast: Dtype of the products where it is not that of the weights, or None.

    """

    gpu: bool
    devices: int
    nodes: int
    strategy: Literal["single", "ddp", "sharded"]
    strategy_name: str
    precision: str
    weights: torch.dtype
    autocast: torch.dtype | None

    @property
    def world_size(self) -> int:
        """Ranks of the run."""
        return self.devices * self.nodes

    @property
    def device_type(self) -> str:
        """Of the ranks: "cuda" or "cpu"."""
        return "cuda" if self.gpu else "cpu"


class PlannedStrategy(SingleDeviceStrategy):
    """One process on the CPU that knows what the real run will have; it never trains.

    Args:
        hardware: Of the real run.
        problems: What of it a plan cannot use.

    """

    def __init__(self, hardware: Hardware, problems: list[str]) -> None:
        super().__init__(device="cpu")
        self.hardware = hardware
        self.problems = problems
        self.world_size = hardware.world_size  # what `trainer.world_size` says


def real_strategy(strategy: Strategy) -> tuple[str, bool]:
    """What a run trains with, or would where it is only planned: the strategy's name, and whether it shards."""
    if isinstance(strategy, PlannedStrategy):
        return strategy.hardware.strategy_name, strategy.hardware.strategy == "sharded"
    return type(strategy).__name__, isinstance(strategy, ShardedStrategy)


def read_hardware(trainer: Any) -> tuple[Hardware, list[str]]:
    """The hardware of the `trainer` section of a parsed configuration, and what of it a plan cannot use.

    Args:
        trainer: Namespace with the arguments of Lightning's Trainer, before anything is built from it.

    """
    found: list[str] = []
    gpu = trainer.accelerator in _ON_GPU
    devices = _devices(trainer.devices)
    if devices is None:
        found.append(
            f"trainer.devices={trainer.devices}: a plan does not look at this machine; give the number of devices of"
            " each node of the real run"
        )
        devices = 1
    nodes = int(trainer.num_nodes)
    name = trainer.strategy if isinstance(trainer.strategy, str) else trainer.strategy.class_path
    name = name.rsplit(".", 1)[-1]
    strategy: Literal["single", "ddp", "sharded"] = "single"
    if name in _DDP or (name == "auto" and devices * nodes > 1):
        strategy = "ddp"
    elif name in _SHARDED:
        strategy = "sharded"
    elif name not in ("auto", "SingleDeviceStrategy") and not strategy_problems(name):
        found.append(f"trainer.strategy={name}: a plan knows auto, ddp and fsdp2 (configs/scale/fsdp.yaml)")
    precision = str(trainer.precision or ("bf16-mixed" if gpu else "32-true"))
    if precision not in _PRECISIONS:
        found.append(f"trainer.precision={precision}: a plan knows {', '.join(_PRECISIONS)}")
    weights, autocast = _PRECISIONS.get(precision, (torch.float32, None))
    return Hardware(gpu, devices, nodes, strategy, name, precision, weights, autocast), found


def _devices(devices: Any) -> int | None:
    if isinstance(devices, str) and "," in devices:
        return len([part for part in devices.split(",") if part.strip()])
    if isinstance(devices, list):
        return len(devices)
    try:
        number = int(devices)
    except (TypeError, ValueError):
        return None
    return number if number > 0 else None
