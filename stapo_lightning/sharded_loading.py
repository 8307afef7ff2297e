"""Weights read once, by one rank, and dealt out: no other rank ever holds a whole model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from stapo_lightning.sharding import Sharding, shard


def load_sharded(
    load: Callable[[], PreTrainedModel], shapes: Callable[[], PreTrainedModel], mesh: DeviceMesh, sharding: Sharding
) -> PreTrainedModel:
    """A sharded model with the weights that rank 0 loads into its CPU's memory; a collective.

    Args:
        load: The model with its weights, called on rank 0 alone.
        shapes: The same model on the meta device, called on every rank.
        mesh: One dimension, all ranks.
        sharding: How they share the weights.

    """
    source = load() if dist.get_rank() == 0 else None
    model = shapes()
    shard(model, mesh, sharding)
    device = torch.device(mesh.device_type)
    model.to_empty(device="cpu" if sharding.cpu_offload else device)
    model.tie_weights()  # each of two tied modules got memory of its own
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, source.state_dict() if source is not None else {}, options=options)
    # Buffers that checkpoints leave out, such as the frequencies of rotary positions.
    for module, name, buffer in _buffers(model):
        value = source.get_buffer(name).to(device) if source is not None else torch.empty_like(buffer, device=device)
        dist.broadcast(value, 0)
        module._buffers[name.rpartition(".")[2]] = value
    # Read from a file of its own, which only `load` looks at; it holds the ids that end a completion.
    model.generation_config = _from_rank_0(getattr(source, "generation_config", None))
    return model


def _buffers(model: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    return [
        (model.get_submodule(name.rpartition(".")[0]), name, buffer) for name, buffer in list(model.named_buffers())
    ]


def _from_rank_0(value: Any) -> Any:
    box = [value]
    dist.broadcast_object_list(box, 0)
    return box[0]
