"""The policy's weights on their way to a program of its own: whole, one at a time, under the names of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel

from stapo_lightning.adapters import merged_weights


def stream_weights(policy: PreTrainedModel, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Name and value of each parameter and buffer that a checkpoint of `policy` holds.

    A tied output head comes under its own name as well. Nothing but the tensor at hand exists beside the policy: a
    shard is gathered when its turn comes, so under sharding every rank has to iterate, to the end.

    Args:
        policy: Sharded or not; an adapter comes merged into the weights beside it.
        dtype: Floating-point values are converted to it; None leaves them.

    """
    for name, whole in merged_weights(policy):
        yield name, whole.to(dtype) if dtype is not None and whole.is_floating_point() else whole
