"""The Trainer's strategy for a sharded policy, and what is said of strategies that do not fit."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch.strategies import (
    ModelParallelStrategy,
    StrategyRegistry,
)
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict, set_optimizer_state_dict

from stapo_lightning.checkpoint_io import by_name, finished_folder, is_folder, without_tensors
from stapo_lightning.sharding import is_sharded

_INSTEAD = "write `trainer.strategy: fsdp2`, or lay configs/scale/fsdp.yaml over your config"


def strategy_problems(strategy: str) -> list[str]:
    """What is wrong with a strategy's name, or with the name of its class."""
    name = strategy.rpartition(".")[2].lower()
    if name.startswith("fsdp") and name != "fsdp2":
        return [
            f"trainer.strategy={strategy}: FSDP1 can neither clip by the global norm nor run without a GPU; {_INSTEAD}"
        ]
    if name.startswith("deepspeed"):
        return [
            f"trainer.strategy={strategy}: DeepSpeed keeps backward, gradients and step to itself, where"
            f" model.max_grad_norm would not reach them; {_INSTEAD}"
        ]
    if name in ("modelparallelstrategy", "xlafsdpstrategy", "xla_fsdp"):
        return [
            f"trainer.strategy={strategy}: its checkpoints are not safe from a kill and load with no other strategy;"
            f" {_INSTEAD}, which is Lightning's ModelParallelStrategy with both"
        ]
    return []


class ShardedStrategy(ModelParallelStrategy):
    """Lightning's ModelParallelStrategy over one dimension, all ranks, with checkpoints that are whole or not there.

    A checkpoint is a folder to which each rank writes its share. It loads with any number of ranks and with any other
    strategy, and so do theirs here.

    Args:
        save_distributed_checkpoint: False gathers everything on rank 0 and writes one file.
        process_group_backend: Of torch.distributed, such as "nccl"; null takes that of the devices.
        timeout: A collective that takes longer ends the run. It has to outlast what one rank alone does between two of
            them: its rewards, or rollouts longer than those of the others.

    """

    def __init__(
        self,
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        super().__init__(
            data_parallel_size="auto",
            tensor_parallel_size=1,
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )

    def setup_environment(self) -> None:
        """All ranks share the weights, those of one machine as those of several."""
        # "auto" would be the number of machines; the number of ranks is known from here on.
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    def model_to_device(self) -> None:
        """Moves all but a sharded policy, which is where it has to be: with cpu_offload that is the CPU."""
        module: Any = self.model
        policy = getattr(module, "policy", None)
        if not is_sharded(policy):
            super().model_to_device()
            return
        module.policy = None
        try:
            super().model_to_device()
        finally:
            module.policy = policy

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Saves beside `filepath` and renames once every rank has written."""
        target = Path(self.broadcast(filepath))
        if not self._save_distributed_checkpoint:
            super().save_checkpoint(checkpoint, target, storage_options)
            return
        with finished_folder(target, self.is_global_zero, self.barrier) as folder:
            super().save_checkpoint(checkpoint, folder, storage_options)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Loads a folder of this strategy, or a file of any strategy, into policy and optimiser."""
        path = Path(self.broadcast(checkpoint_path))
        if is_folder(path):
            module: Any = self.lightning_module
            if hasattr(module, "check_checkpoint"):
                module.check_checkpoint(without_tensors(path))
            return super().load_checkpoint(path, weights_only)
        module = self.lightning_module
        assert module is not None
        # Mapped, not read: a rank touches only what it sends or what is small.
        checkpoint = torch.load(path, mmap=True, map_location="cpu", weights_only=weights_only)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=module.strict_loading)
        set_model_state_dict(module, checkpoint.pop("state_dict"), options=options)
        name = {parameter: name for name, parameter in module.named_parameters()}
        for optimizer, state in zip(self.optimizers, checkpoint.pop("optimizer_states", []), strict=False):
            names = [[name[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
            set_optimizer_state_dict(module, optimizer, by_name(state, names), options=options)
        return checkpoint


StrategyRegistry.register("fsdp2", ShardedStrategy, description="FSDP2 over all ranks (torch's fully_shard)")
