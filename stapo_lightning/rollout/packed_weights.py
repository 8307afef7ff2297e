"""Linear layers in the layout that products with few rows read fastest: a rollout on a CPU, where every token of a
completion multiplies few rows with all weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

# Smaller layers stay in the cache and gain nothing.
PACKED_ELEMENTS = 2**18


@contextmanager
def packed_weights(model: nn.Module) -> Iterator[None]:
    """Within it, large linear layers of `model` on a CPU multiply by a packed copy of their weights.

    The same products in the same precision, summed in another order. The copies live as long as the context, so the
    weights must not change within it. Layers on other devices, of other precision, of a subclass (adapters), sharded or
    with hooks stay as they are, and so does all where this build of torch has no oneDNN.
    """
    layers = [module for module in model.modules() if _can_pack(module)] if _can_pack_any(model) else []
    for layer in layers:
        layer.forward = _packed(layer)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _can_pack_any(model: nn.Module) -> bool:
    # A sharded model may hold whole weights from before the last step, and gathers them anew in its forward.
    sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    return torch.backends.mkldnn.is_available() and not sharded


def _can_pack(module: nn.Module) -> bool:
    if type(module) is not nn.Linear or module._forward_hooks or module._forward_pre_hooks:
        return False
    weight = module.weight
    plain = type(weight) is nn.Parameter and weight.device.type == "cpu" and weight.dtype == torch.float32
    return plain and weight.numel() >= PACKED_ELEMENTS and "forward" not in vars(module)


def _packed(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
    # torch's own operators for compiled models: its public MkldnnLinear packs nothing, and is slower than nn.Linear.
    with torch.no_grad():
        weight = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), None)
    bias = layer.bias

    def forward(x: Tensor) -> Tensor:
        # Under autocast the input may have another precision than the copy.
        if x.dtype != torch.float32 or torch.is_autocast_enabled("cpu"):
            return nn.functional.linear(x, layer.weight, bias)
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")

    return forward
