"""How much memory tensors take at their peak."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Peak(TorchDispatchMode):
    """Adds up the storages that operations make while it is entered; those that were there before do not count.

    Attributes:
        now: Bytes that are held.
        peak: The most they were.

    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in given and storage._cdata not in self._seen:
                    self._seen.add(storage._cdata)
                    self._add(storage._cdata, storage.nbytes())
                    weakref.finalize(storage, self._drop, storage._cdata, storage.nbytes())
        return result

    def _add(self, key: int, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)

    def _drop(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size
