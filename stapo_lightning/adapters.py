"""Low-rank adapters (LoRA, arXiv 2106.09685) through PEFT: the policy's own weights are frozen, and two thin matrices
beside each of its linear layers train.

The model keeps its class, so that all that computes with a policy computes with an adapted one. Turned off, the
adapter leaves the policy that the run started from: the reference, without a second copy of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from stapo_lightning.errors import ConfigError, bounded
from stapo_lightning.optional import optional, require
from stapo_lightning.sharding import is_sharded

_NAME = "default"  # PEFT's for a model's only adapter
_MATRICES = (f"lora_A.{_NAME}.weight", f"lora_B.{_NAME}.weight")
_EXTRA = ("lora", "model.adapter")
_LINEAR = (nn.Linear, Conv1D)  # the latter, of GPT-2, is one with its weight transposed


@dataclass(frozen=True)
class LoRA:
    """Each adapted layer computes W x + s B A x: W is frozen, A begins random and B at 0. There is no dropout: the
    policy that is updated must be the policy that is scored.

    Attributes:
        rank: Rows of A and columns of B, at least 1.
        alpha: s is alpha / rank, > 0.
        target_modules: Which linear layers: "all-linear" is all but the output head; else the last parts of their
            names, such as [q_proj, v_proj]. An output head (lm_head) can be among them unless it is tied to the
            embedding; its logits then take more memory.
        rank_stabilized: s is alpha / sqrt(rank) instead (rsLoRA, arXiv 2312.03732), for large ranks.

    """

    rank: int = 16
    alpha: float = 32.0
    target_modules: Literal["all-linear"] | list[str] = "all-linear"
    rank_stabilized: bool = False

    def problems(self) -> list[str]:
        """What is out of range or not installed."""
        found = bounded("model.adapter.rank", self.rank, at_least=1)
        found += bounded("model.adapter.alpha", self.alpha, above=0)
        if not self.target_modules:
            found.append("model.adapter.target_modules=[]: no layer would train; name some, or write all-linear")
        try:
            require("peft", *_EXTRA)
        except ConfigError as error:
            found += error.problems
        return found


# ---- in the model ----------------------------------------------------------------------------------------------------


def add_adapter(model: PreTrainedModel, lora: LoRA, base: str) -> PreTrainedModel:
    """Freezes `model` and puts an adapter beside its layers, in place; what it computes is the same until B moves.

    A is drawn from the seed of torch's generator, which itself stays where it is.

    Args:
        model: On any device, "meta" included.
        lora: The adapter.
        base: Folder or hub id of `model`, noted in an exported adapter.

    Raises:
        ConfigError: A name that no linear layer has, or an output head that is tied to the embedding.

    """
    peft = optional("peft", *_EXTRA)
    found = _target_problems(model, lora)
    if found:
        raise ConfigError(found)
    names = lora.target_modules
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=str(Path(base).resolve()) if Path(base).exists() else base,
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=names if isinstance(names, str) else list(names),
        use_rslora=lora.rank_stabilized,
        lora_dropout=0.0,
    )
    with torch.random.fork_rng(devices=[]), model.device:
        torch.manual_seed(torch.initial_seed())
        return peft.inject_adapter_in_model(config, model, _NAME)


def _target_problems(model: PreTrainedModel, lora: LoRA) -> list[str]:
    if isinstance(lora.target_modules, str):
        return []
    found = []
    layers = {name: module for name, module in model.named_modules() if name}
    linear = {name.rpartition(".")[2] for name, module in layers.items() if isinstance(module, _LINEAR)}
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    for target in lora.target_modules:
        option = f"model.adapter.target_modules has {target!r}"
        named = [module for name, module in layers.items() if name == target or name.endswith(f".{target}")]
        if not named or not all(isinstance(module, _LINEAR) for module in named):
            found.append(
                f"{option}, which is not the name of linear layers alone; there are {', '.join(sorted(linear))}"
            )
        elif any(module is head for module in named) and head.weight is embedding.weight:
            found.append(f"{option}, but this policy's output head is tied to its embedding; leave it out")
    return found


def has_adapter(model: nn.Module) -> bool:
    """Whether `add_adapter` was applied."""
    return hasattr(model, "peft_config")


def adapter_off(model: nn.Module) -> AbstractContextManager[None]:
    """Within it `model` computes what it did before `add_adapter`; nothing changes where there is no adapter.

    By a scale of 0 and not by PEFT's own switch, which also turns the adapter's gradients off, in the midst of an
    update and for shares of weights that are about to be gathered.
    """
    if not has_adapter(model):
        return nullcontext()
    return optional("peft.helpers", *_EXTRA).rescale_adapter_scale(model, 0.0)


# ---- its weights -----------------------------------------------------------------------------------------------------


def merged_weights(policy: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Name and value of each weight of a model without adapter that computes what `policy` does: W + s B A.

    Names are those of a checkpoint of the model, a tied output head under its own name as well. The policy stays as it
    is. Nothing but the tensors of one layer exists beside it: shares are gathered when their turn comes, so that under
    sharding every rank has to iterate, to the end.

    Args:
        policy: Sharded or not, with or without adapter.

    """
    state = policy.state_dict()
    for name, value in state.items():
        if name.endswith(_MATRICES):
            continue
        layer, _, own = name.rpartition(".base_layer.")
        weight = _whole(value)
        if layer and own == "weight":
            a, b = (_whole(state[f"{layer}.{matrix}"]) for matrix in _MATRICES)
            weight = weight + _product(policy.get_submodule(layer), a, b)
        yield plain_name(name), weight


def plain_name(name: str) -> str:
    """The name that a weight has in a model without adapter."""
    return name.replace(".base_layer.", ".")


def _product(layer: Any, a: Tensor, b: Tensor) -> Tensor:
    product = (b @ a) * layer.scaling[_NAME]
    return product.T if layer.fan_in_fan_out else product


def _whole(value: Tensor) -> Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach()


def adapter_weights(policy: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Name and whole value of A and B of each layer; under sharding every rank has to iterate, to the end."""
    for name, value in policy.state_dict().items():
        if name.endswith(_MATRICES):
            yield name, _whole(value)


# ---- export ----------------------------------------------------------------------------------------------------------


def save_merged(policy: PreTrainedModel, folder: Path, writes: bool) -> None:
    """A folder that `AutoModelForCausalLM.from_pretrained` loads; every rank has to call it.

    Args:
        policy: Sharded or not, with or without adapter.
        folder: Where to.
        writes: On one rank, the only one that keeps the weights, in its CPU's memory.

    """
    weights = None
    if has_adapter(policy) or is_sharded(policy):
        # Tied weights under their first name only: a file holds them once.
        own = {plain_name(name) for name, _ in [*policy.named_parameters(), *policy.named_buffers()]}
        weights = {name: w.cpu() for name, w in merged_weights(policy) if writes and name in own}
    if writes:
        policy.save_pretrained(folder, state_dict=weights)


def save_adapter(policy: PreTrainedModel, folder: Path, writes: bool) -> None:
    """A folder that `PeftModel.from_pretrained` loads over the model of the run's start; every rank has to call it.

    Args:
        policy: With an adapter, sharded or not.
        folder: Where to.
        writes: On one rank.

    """
    weights = {name: weight.cpu().contiguous() for name, weight in adapter_weights(policy)}
    if not writes:
        return
    from safetensors.torch import save_file

    peft = optional("peft", *_EXTRA)
    saved = peft.get_peft_model_state_dict(policy, weights, _NAME, save_embedding_layers=False)
    folder.mkdir(parents=True, exist_ok=True)
    # PeftModel, which the policy is not, puts two names in front.
    save_file(
        {f"base_model.model.{name}": weight for name, weight in saved.items()},
        folder / "adapter_model.safetensors",
        metadata={"format": "pt"},
    )
    policy.peft_config[_NAME].save_pretrained(str(folder))


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def keep_only_adapters(module: Any) -> None:
    """Has the state of a module hold of its `policy` nothing but the adapter, if there is one, and load such a state.

    Args:
        module: One with an attribute `policy`.

    """
    module.register_state_dict_post_hook(_drop_frozen)
    module.register_load_state_dict_post_hook(_forgive_frozen)


def _frozen(name: str) -> bool:
    return name.startswith("policy.") and not name.endswith(_MATRICES)


def _drop_frozen(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
    if module.policy is not None and has_adapter(module.policy):
        for name in [name for name in state if name.startswith(prefix) and _frozen(name.removeprefix(prefix))]:
            del state[name]


def _forgive_frozen(module: Any, incompatible: Any) -> None:
    if module.policy is not None and has_adapter(module.policy):
        incompatible.missing_keys[:] = [name for name in incompatible.missing_keys if not _frozen(name)]


def checkpoint_problems(lora: LoRA | None, saved: dict[str, Any] | None) -> list[str]:
    """What keeps a checkpoint from being loaded into a policy.

    Args:
        lora: The policy's adapter.
        saved: asdict of that in the checkpoint; None where it holds a whole policy.

    """
    if saved == (asdict(lora) if lora is not None else None):
        return []
    if lora is None:
        return [f"the checkpoint holds an adapter alone: set model.adapter to {saved}, or ckpt_path to another one"]
    if saved is None:
        return [
            f"model.adapter is {asdict(lora)}, but the checkpoint holds a whole policy; export it and name that folder"
            " in model.policy, or leave model.adapter out"
        ]
    return [f"model.adapter is {asdict(lora)}, but the checkpoint's is {saved}; set it to that one"]


def describe(policy: nn.Module) -> str:
    """How much of the policy trains, and what that saves."""
    sizes = [(p.numel(), p.numel() * p.element_size(), p.requires_grad) for p in policy.parameters()]
    count, trained = sum(n for n, _, _ in sizes), sum(n for n, _, trains in sizes if trains)
    total, own = sum(size for _, size, _ in sizes), sum(size for _, size, trains in sizes if trains)
    return (
        f"adapter   {trained:,} of {count:,} parameters train ({trained / count:.2%}); their gradients take"
        f" {own / 2**20:,.1f} MiB instead of {(total - own) / 2**20:,.1f}, each moment of the optimiser as much"
    )
