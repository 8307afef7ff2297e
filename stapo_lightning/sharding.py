"""PyTorch's FSDP2 over a causal language model: each rank holds a share of every weight, and gathers what it needs.

To compute with such a model is a collective, so every rank has to do it equally often. It goes through `within` (a pass
of an update; their number is agreed on) or through the model's forward (a token of a rollout; `join` makes up for the
ranks that sample fewer). Free of Lightning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Sharding:
    """How the ranks share the weights, gradients and optimiser state of a model.

    Attributes:
        gathered: Precision in which weights are gathered and computed with; each rank's share, the sum of gradients and
            the optimiser stay in float32. "auto" is bfloat16 where trainer.precision is a bf16 one, else float32.
        reshard_after_forward: Free each layer's gathered weights after its forward and gather them again for its
            backward; false keeps all of them until then: less traffic, the memory of a whole model.
        reduce: "once" an update, with its last micro-batch: until then each rank holds the gradient of the whole model
            in float32. "every_pass" holds only its share, and sends a gradient with each micro-batch.
        cpu_offload: Shares of weights, gradients and optimiser state lie in the CPU's memory, where the optimiser runs.

    """

    gathered: Literal["auto", "float32", "bfloat16"] = "auto"
    reshard_after_forward: bool = True
    reduce: Literal["once", "every_pass"] = "once"
    cpu_offload: bool = False

    def under(self, precision: str) -> Sharding:
        """The same with "auto" decided.

        Args:
            precision: Lightning's name of it, such as "bf16-mixed" or "32-true".

        """
        if self.gathered != "auto":
            return self
        return replace(self, gathered="bfloat16" if precision.startswith("bf16") else "float32")


def shard(model: nn.Module, mesh: DeviceMesh, sharding: Sharding) -> None:
    """Shards `model` in place, on whichever device its weights are ("meta" included), layer after layer.

    Each decoder layer is gathered on its own. So is the embedding, unless the output head is tied to it: weights that
    are used in two places belong to one group. The head and whatever is left are the root's group, which stays gathered
    from its forward to its backward, since the head is where a backward begins.

    Args:
        model: A Hugging Face causal language model; a frozen one is sharded as well.
        mesh: One dimension, the ranks that share the weights.
        sharding: "auto" counts as float32: see `Sharding.under`.

    Raises:
        ValueError: The mesh has more than one dimension.

    """
    if mesh.ndim != 1:
        raise ValueError(f"a mesh of {mesh.ndim} dimensions: shard takes one, such as device_mesh['data_parallel']")
    narrow = torch.bfloat16 if sharding.gathered == "bfloat16" else None
    on_gpu = mesh.device_type != "cpu"
    settings: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy(pin_memory=on_gpu) if sharding.cpu_offload else OffloadPolicy(),
    }
    again = sharding.reshard_after_forward
    for layer in decoder_layers(model):
        fully_shard(layer, reshard_after_forward=again, **settings)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    if head is None or embedding.weight is not head.weight:
        fully_shard(embedding, reshard_after_forward=again, **settings)
        embedding.set_unshard_in_backward(False)  # its backward reads the ids alone
    trains = any(parameter.requires_grad for parameter in model.parameters())
    # Nothing frees the root's group of a model that has no backward.
    fully_shard(model, reshard_after_forward=None if trains else True, **settings)
    model._within = MethodType(_call, model)  # type: ignore[assignment]
    register_fsdp_forward_method(model, "_within")
    model._turns = _Turns(model, mesh)  # type: ignore[assignment]
    model._sharding = sharding  # type: ignore[assignment]


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The layers: the module list that holds the most parameters.

    Raises:
        ValueError: There is none.

    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise ValueError(f"{type(model).__name__} has no list of layers to shard")
    return max(lists, key=lambda found: sum(p.numel() for p in found.parameters()))


def is_sharded(model: nn.Module | None) -> bool:
    """Whether `shard` was applied."""
    return isinstance(model, FSDPModule)


# ---- calls -----------------------------------------------------------------------------------------------------------


def within(model: nn.Module, function: Callable[[], _Result]) -> _Result:
    """`function()` as if it were the model's forward: it finds embedding and head gathered, layers as they are called.

    Whatever it does with the head, the collectives are those of one forward, so that they are the same on every rank.

    Args:
        model: Sharded or not.
        function: Returns a tensor or a tuple of tensors; the backward starts from these.

    """
    return model._within(function) if is_sharded(model) else function()  # type: ignore[operator]


def _call(model: nn.Module, function: Callable[[], _Result]) -> _Result:
    return function()


def join(model: nn.Module | None) -> None:
    """Takes part in the forwards of ranks that are still sampling until none is; nothing where weights are not shared.

    A forward of a sharded model is a collective, and ranks sample different numbers of tokens, of batches even.
    """
    if model is not None and is_sharded(model):
        model._turns.join()  # type: ignore[operator, union-attr]


class _Turns:
    """Ahead of each forward the ranks count who makes one. Who has finished makes one too, while the count is not 0."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh) -> None:
        self.model = model
        self.mesh = mesh
        self.joining = False
        # Ahead of FSDP's own hook, which gathers: a rank must know whether to take part before it does.
        model.register_forward_pre_hook(self._announce, prepend=True)

    def _announce(self, *_: Any) -> None:
        if not self.joining:
            self._count(1)  # nobody waits for the number here: a GPU's queue goes on

    def _count(self, mine: int) -> Tensor:
        total = torch.tensor(mine, device=self.mesh.device_type)
        dist.all_reduce(total, group=self.mesh.get_group())
        return total

    def join(self) -> None:
        one = torch.zeros(1, 1, dtype=torch.int64, device=self.mesh.device_type)
        self.joining = True
        try:
            with torch.no_grad():
                while int(self._count(0)):
                    self.model(input_ids=one, use_cache=False)
        finally:
            self.joining = False


# ---- gradients ------------------------------------------------------------------------------------------------------


def reduce_gradients(model: nn.Module, last: bool) -> None:
    """Says whether the next backward sums gradients over the ranks; nothing where weights are not shared.

    Args:
        model: Sharded or not.
        last: Whether it is the last backward of the update.

    """
    if is_sharded(model):
        model.set_requires_gradient_sync(last or model._sharding.reduce == "every_pass")  # type: ignore[operator, union-attr]


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float, device: torch.device) -> float:
    """Scales all gradients down to a global L2 norm of `max_norm` and returns the norm from before.

    Args:
        parameters: All of them are shares of sharded weights, or none.
        max_norm: > 0; infinity measures only.
        device: Of the collective: shares may lie in the CPU's memory where the ranks can talk through GPUs alone.

    """
    found = list(parameters)
    if not any(isinstance(parameter, DTensor) for parameter in found):
        return float(torch.nn.utils.clip_grad_norm_(found, max_norm))
    # A share is on one rank alone, so that the squares add up.
    own = [_own(parameter.grad) for parameter in found if parameter.grad is not None]
    squared = torch.nn.utils.get_total_norm(own).to(device, torch.float64).square()
    dist.all_reduce(squared)
    norm = float(squared.sqrt())
    if norm > max_norm:
        torch._foreach_mul_(own, max_norm / (norm + 1e-6))
    return norm


def _own(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
