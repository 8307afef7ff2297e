"""Bytes of a model and of what a run keeps beside it, counted on tensors without memory.

No weights are loaded and no GPU is asked for: parameters live on the meta device, forwards run on fake tensors, and the
ranks that a model is sharded over are a process group in which nothing is sent.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode  # torch has no public module for it
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from stapo_lightning.models import backbone, cache_argument
from stapo_lightning.rollout.growing_cache import growing_cache

# Three lengths fix the parabola; longer ones would only take longer.
_COUNTED_LENGTHS = (64, 128, 256)


# On fake tensors "sdpa" would be given a mask that it does without in a real forward.
_MASKLESS = "sdpa_without_mask"
AttentionInterface.register(_MASKLESS, ALL_ATTENTION_FUNCTIONS["sdpa"])
AttentionMaskInterface.register(_MASKLESS, lambda *args, **kwargs: None)


@contextlib.contextmanager
def fake_ranks(world_size: int) -> Iterator[None]:
    """A default process group in which this process is rank 0 of `world_size`, and collectives do nothing."""
    # The backend "fake" comes with torch, but only this module of its tests registers it.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def meta_model(config: Any, dtype: torch.dtype) -> PreTrainedModel:
    """The causal language model of `config`, its parameters without memory."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def local_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of this rank's shards, or of the whole tensors where they are not sharded; nothing is counted twice."""
    found = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        found[id(tensor)] = local.numel() * local.element_size()
    return sum(found.values())


def optimizer_bytes(optimizer: Callable[[list[Tensor]], Optimizer], parameters: Iterable[Tensor]) -> int:
    """Bytes of an optimiser's state on this rank after its first step, which is taken on tensors without memory.

    Args:
        optimizer: Parameters -> optimiser.
        parameters: Those that train.

    """
    return sum(_state_bytes(optimizer, p.to_local() if isinstance(p, DTensor) else p) for p in parameters)


def _state_bytes(optimizer: Callable[[list[Tensor]], Optimizer], parameter: Tensor) -> int:
    try:
        return _stepped_bytes(optimizer, torch.empty_like(parameter, device="meta"))
    except RuntimeError:  # some read a number back, which needs memory
        return _stepped_bytes(optimizer, torch.zeros_like(parameter, device="cpu"))


def _stepped_bytes(optimizer: Callable[[list[Tensor]], Optimizer], parameter: Tensor) -> int:
    parameter.requires_grad_()
    parameter.grad = torch.zeros_like(parameter)
    stepped = optimizer([parameter])
    stepped.step()
    state = [value for values in stepped.state.values() for value in values.values() if isinstance(value, Tensor)]
    return sum(value.numel() * value.element_size() for value in state)


@dataclass(frozen=True)
class Activations:
    """What one forward of the backbone keeps for its backward, in bytes.

    Attributes:
        constant: Whatever the length: the copies of the weights that autocast makes, above all.
        per_token: For each token, over all layers.
        per_pair: For each pair of tokens of a sequence, over all layers: scores, where attention keeps them.
        hidden: One hidden state, the input of a layer.
        layers: Decoder layers.

    """

    constant: int
    per_token: float
    per_pair: float
    hidden: int
    layers: int

    def whole(self, sequences: int, length: int) -> int:
        """Without activation checkpointing, and without `constant`."""
        return int(sequences * length * (self.per_token + self.per_pair * length))

    def checkpointed(self, sequences: int, length: int) -> int:
        """With activation checkpointing: the input of every layer, and all of the layer that is computed again."""
        return sequences * length * self.hidden * self.layers + self.whole(sequences, length) // self.layers


def count_activations(
    config: Any, weights: torch.dtype, autocast: torch.dtype | None, attention: str = "sdpa"
) -> Activations:
    """Counts what is saved for the backward in three short forwards on fake tensors.

    Args:
        config: Of a causal language model.
        weights: Dtype in which the layers get their weights.
        autocast: Dtype of autocast, or None for none.
        attention: As the run has it. All but "eager" keep nothing for each pair of tokens.

    """
    # Flash attention is not there on a machine without a GPU, and keeps what "sdpa" keeps.
    implementation = attention if attention == "eager" else _MASKLESS
    with FakeTensorMode():
        model = AutoModelForCausalLM.from_config(config, dtype=weights, attn_implementation=implementation).train()
        parameters = {p.untyped_storage()._cdata for p in model.parameters()}
        counts, hidden = [], 0
        for length in _COUNTED_LENGTHS:
            ids, lengths = torch.zeros(1, length, dtype=torch.int64), torch.full((1,), length)
            with _autocast(autocast), _saved_bytes(ignored=parameters) as saved:
                states = backbone(model)(ids, lengths)
            hidden = states.shape[-1] * states.element_size()
            counts.append(sum(saved.values()))
    constant, per_token, per_pair = _parabola(counts)
    text_config = config.get_text_config()
    return Activations(int(constant), per_token, per_pair, hidden, text_config.num_hidden_layers)


def cache_bytes(config: Any, weights: torch.dtype, autocast: torch.dtype | None, tokens: int) -> int:
    """Bytes of the key-value cache of one sequence of `tokens` tokens, from a forward on fake tensors."""
    with FakeTensorMode(), torch.no_grad(), _autocast(autocast):
        model = AutoModelForCausalLM.from_config(config, dtype=weights, attn_implementation=_MASKLESS)
        cache = growing_cache(config, tokens)
        ids = torch.zeros(1, tokens, dtype=torch.int64)
        model(input_ids=ids, use_cache=True, logits_to_keep=1, **{cache_argument(model): cache})
        return sum(t.nbytes for layer in cache.layers for t in (layer.keys, layer.values))


def _autocast(dtype: torch.dtype | None) -> Any:
    return torch.autocast("cpu", dtype) if dtype is not None else contextlib.nullcontext()


@contextlib.contextmanager
def _saved_bytes(ignored: set[int]) -> Iterator[dict[int, int]]:
    """Storage -> bytes of what autograd saves meanwhile, each once, but for `ignored`."""
    saved: dict[int, int] = {}
    kept = []  # a storage that is freed would lend its number to the next

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in ignored:
            saved[storage._cdata] = storage.nbytes()
            kept.append(storage)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


def _parabola(counts: list[int]) -> tuple[float, float, float]:
    """c, b, a of c + b n + a n^2 through the counts at `_COUNTED_LENGTHS`."""
    (x, y, z), (f, g, h) = _COUNTED_LENGTHS, counts
    first, second = (g - f) / (y - x), (h - g) / (z - y)
    square = (second - first) / (z - x)
    linear = first - square * (x + y)
    return f - linear * x - square * x * x, linear, square


def group_sizes(model: nn.Module) -> tuple[int, list[int]]:
    """Parameters that FSDP2 gathers together: of the outermost group, and of each inner one.

    Args:
        model: Sharded by `fully_shard`; of any other, every parameter is in the outermost group.

    """
    sizes: dict[nn.Module, int] = {}
    seen: set[int] = set()
    inner = [module for module in model.modules() if isinstance(module, FSDPModule) and module is not model]
    for module in reversed([model, *inner]):  # children stand behind their parents
        own = [p for p in module.parameters() if id(p) not in seen]
        seen.update(map(id, own))
        sizes[module] = sum(p.numel() for p in own)
    return sizes.pop(model), [size for size in sizes.values() if size]
