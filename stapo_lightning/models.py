"""Loads policy, reference and tokenizer, and finds a causal language model's backbone and output head."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from stapo_lightning.errors import ConfigError
from stapo_lightning.linear_scores import LinearHead

_PACKAGE = Path(__file__).parent


def resolve_policy(policy: str) -> str:
    """The folder or hub id to load. `stapo_lightning/assets/...` is found wherever the package is installed."""
    packaged = _PACKAGE.parent / policy
    if not os.path.exists(policy) and policy.startswith("stapo_lightning/assets/") and packaged.exists():
        return str(packaged)
    return policy


def policy_problems(policy: str) -> list[str]:
    """What keeps `policy` from loading, seen without loading any weights."""
    path = resolve_policy(policy)
    wanted = "give a folder with config.json, weights and tokenizer, or a model id of the Hugging Face hub"
    if not os.path.exists(path) and (path.startswith(("/", ".", "~")) or path.count("/") > 1):
        return [f"model.policy={policy!r}: no such folder; {wanted}"]
    try:
        AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        return [f"model.policy={policy!r}: no Hugging Face model there ({_first_line(error)}); {wanted}"]
    return []


def context_length(policy: str) -> int | None:
    """Longest sequence that the policy's positions are made for, or None where its config does not say."""
    config = AutoConfig.from_pretrained(resolve_policy(policy))
    return getattr(config, "max_position_embeddings", None)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def weights_identity(path: str) -> tuple[str, str]:
    """What tells one set of weights from another without reading them.

    Args:
        path: A checkpoint, a folder or a hub id.

    Returns:
        A short name for folders, and the name with size and time of change of each file; of a hub id just the id.

    """
    place = Path(path)
    name = re.sub(r"[^\w.=-]+", "-", place.name.removesuffix(".ckpt")) or "policy"
    if not place.exists():
        return name, path
    files = [place] if place.is_file() else sorted(file for file in place.rglob("*") if file.is_file())
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return name, f"{place.resolve()} {stats}"


def load_tokenizer(policy: str) -> PreTrainedTokenizerBase:
    """The policy's tokenizer.

    Raises:
        ConfigError: The folder or hub id holds no model, or one without a tokenizer.

    """
    try:
        return AutoTokenizer.from_pretrained(resolve_policy(policy))
    except (OSError, ValueError) as error:
        no_tokenizer = f"model.policy={policy!r}: no tokenizer there ({_first_line(error)}); save one beside the model"
        raise ConfigError(policy_problems(policy) or [no_tokenizer]) from error


def load_causal_lm(policy: str, attention: str) -> PreTrainedModel:
    """Float32 weights in train mode, dropout 0: the policy that is updated must be the policy that is scored.

    Args:
        policy: Folder or hub id.
        attention: An attention implementation of transformers, such as "sdpa".

    """
    model = AutoModelForCausalLM.from_pretrained(
        resolve_policy(policy), dtype=torch.float32, attn_implementation=attention
    )
    # from_pretrained returns eval mode and Lightning would keep it; activation checkpointing acts in train mode only.
    return _without_dropout(model).train()


def causal_lm_shapes(policy: str, attention: str) -> PreTrainedModel:
    """What `load_causal_lm` loads, on the meta device: every shape and no memory."""
    config = AutoConfig.from_pretrained(resolve_policy(policy))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
    return _without_dropout(model).train()


def _without_dropout(model: PreTrainedModel) -> PreTrainedModel:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)
    return model


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Has each decoder layer keep its input alone for the backward and compute the rest again; acts in train mode."""
    # Its name from transformers 5.24 on, and before.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def freeze(model: PreTrainedModel) -> PreTrainedModel:
    """The model in eval mode without gradients: the reference."""
    return model.eval().requires_grad_(False)


@contextmanager
def rollout_mode(model: nn.Module) -> Iterator[None]:
    """Eval mode without gradients; each module's own mode is restored, also after an error."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def cache_argument(model: nn.Module) -> str:
    """Under which name `model` takes a key-value cache: newer and older releases of transformers differ."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def backbone(model: PreTrainedModel) -> Any:
    """[n, L] ids and [n] lengths -> [n, L, H] last hidden states; padded on the right, so without an attention mask."""

    def hidden_states(ids: Tensor, lengths: Tensor) -> Tensor:
        return model.base_model(input_ids=ids, use_cache=False).last_hidden_state

    return hidden_states


def packed_backbone(model: PreTrainedModel) -> Any:
    """`backbone` without computing the padding: all sequences go through as one, told apart by their positions.

    Flash attention then skips from one sequence to the next. Other implementations are as exact, but build a mask over
    all pairs of tokens.
    """

    def hidden_states(ids: Tensor, lengths: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        real = positions < lengths[:, None]
        packed = model.base_model(
            input_ids=ids[real][None], position_ids=positions[real][None], use_cache=False
        ).last_hidden_state[0]
        return packed.new_zeros(*ids.shape, packed.shape[-1]).masked_scatter(real[..., None], packed)

    return hidden_states


def output_head(model: PreTrainedModel) -> Any:
    """[m, H] hidden states -> [m, V] logits, with the scaling and soft-capping that some architectures add."""
    linear = model.get_output_embeddings()
    config = model.config
    scale = getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0)
    cap = getattr(config, "final_logit_softcapping", None)
    # Adapters, sharded and quantised weights are classes of their own, and only their module knows how to apply them.
    if type(linear) is nn.Linear and type(linear.weight) is nn.Parameter:
        return LinearHead(linear.weight, linear.bias, scale, cap)

    def logits(hidden: Tensor) -> Tensor:
        out = linear(hidden)
        if scale != 1.0:
            out = out * scale
        return out if cap is None else torch.tanh(out / cap) * cap

    return logits


def check_output_head(model: PreTrainedModel, policy: str) -> None:
    """Compares backbone and head with the model's own logits on two tokens.

    Raises:
        ConfigError: The architecture does more between hidden states and logits than `output_head` knows.

    """
    ids, lengths = torch.tensor([[0, 1]], device=model.device), torch.tensor([2], device=model.device)
    with rollout_mode(model):
        expected = model(input_ids=ids, use_cache=False).logits.float()
        found = output_head(model)(backbone(model)(ids, lengths)).float()
    difference = float((expected - found).abs().max())
    if not difference <= 1e-3 * max(1.0, float(expected.abs().max())):
        raise ConfigError(
            [
                f"model.policy={policy!r}: the logits of {type(model).__name__} differ by {difference:.3g} from its"
                " head applied to its hidden states; this architecture is not supported yet"
            ]
        )


def end_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """All ids that end a completion: those of the generation config (one or several) and the tokenizer's own."""
    ids: set[int] = set()
    for source in (getattr(model, "generation_config", None), model.config, tokenizer):
        value = getattr(source, "eos_token_id", None)
        ids.update([value] if isinstance(value, int) else value or [])
    return sorted(ids)
