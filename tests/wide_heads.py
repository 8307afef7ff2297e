"""The tiny policy with attention heads twice as wide that compute the same: vLLM's CPU kernels start at 32."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel


def widened(model: PreTrainedModel) -> PreTrainedModel:
    """A Qwen3 with heads of 2d instead of d: every second half-dimension is 0 and stays 0, as its gradient is 0.

    RoPE turns dimension i with i + d/2 at the rate theta^(-2i/d), which in heads of 2d is the rate of 2i with 2i + d.
    Of a vector with as many zeros as entries the RMS norm makes sqrt(2) times what it made before, in queries and in
    keys; the scores are divided by sqrt(2d). So sqrt(2) too much is left, which the norm of the keys takes.
    """
    config = copy.deepcopy(model.config)
    d = config.head_dim
    config.head_dim = 2 * d
    wide = AutoModelForCausalLM.from_config(config)
    half = torch.arange(d // 2)
    place = torch.cat([2 * half, 2 * half + d])  # of each old dimension in the new head
    state = {}
    for name, value in model.state_dict().items():
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            heads = value.view(-1, d, value.shape[1])
            new = value.new_zeros(len(heads), 2 * d, value.shape[1])
            new[:, place] = heads
            value = new.flatten(0, 1)
        elif name.endswith("o_proj.weight"):
            heads = value.view(len(value), -1, d)
            new = value.new_zeros(len(value), heads.shape[1], 2 * d)
            new[:, :, place] = heads
            value = new.flatten(1)
        elif name.endswith(("q_norm.weight", "k_norm.weight")):
            new = value.new_ones(2 * d)
            new[place] = value / (math.sqrt(2) if name.endswith("k_norm.weight") else 1)
            value = new
        state[name] = value
    wide.load_state_dict(state)
    return wide


def save_widened(policy: str, folder: Path) -> str:
    """Saves the widened `policy` with its tokenizer; returns the folder."""
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    wide = widened(model)
    wide.generation_config = model.generation_config
    wide.save_pretrained(folder)
    AutoTokenizer.from_pretrained(policy).save_pretrained(folder)
    return str(folder)
