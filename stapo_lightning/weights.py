"""The policy's weights on their way to a program of its own: whole, one at a time, under the names of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def stream_weights(policy: nn.Module, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Name and value of each parameter and buffer that a checkpoint of `policy` holds.

    A tied output head comes under its own name as well. Nothing but the tensor at hand exists beside the policy: a
    shard is gathered when its turn comes, so under sharding every rank has to iterate, to the end.

    Args:
        policy: A Hugging Face model, sharded or not.
        dtype: Floating-point values are converted to it; None leaves them.

    """
    for name, value in policy.state_dict().items():
        whole = (value.full_tensor() if isinstance(value, DTensor) else value).detach()
        yield name, whole.to(dtype) if dtype is not None and whole.is_floating_point() else whole
