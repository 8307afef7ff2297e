"""Counts the collectives that a piece of code starts."""

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_NAMES = {"_allgather_base_": "all_gather", "_reduce_scatter_base_": "reduce_scatter", "allreduce_": "all_reduce"}


class Traffic(TorchDispatchMode):
    """Number of collectives by kind, and the bytes of what they take (reduce_scatter) or give (all_gather), whole."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function.namespace == "c10d":
            kind = function.overloadpacket.__name__
            name = _NAMES.get(kind, kind)
            self.calls[name] += 1
            tensors = [value for value in args if isinstance(value, torch.Tensor)]
            self.bytes[name] += max((value.nbytes for value in tensors), default=0)
        return function(*args, **(kwargs or {}))
