"""Matrix FLOP of an update, and what this machine's matrix products reach."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.benchmarks.settings import Setting, prompt_texts


def update_flops(setting: Setting, policy: Path) -> float:
    """Of one forward and one backward (twice a forward) over completions of full length: what cannot be left out.

    Two for each weight of the layers and each token, with every prompt once and without padding, two for each weight of
    the head and each completion token, and the lower triangle of the attention.
    """
    config = AutoConfig.from_pretrained(policy)
    tokenizer = AutoTokenizer.from_pretrained(policy)
    prompts = [len(tokenizer(text)["input_ids"]) for text in prompt_texts(256)]
    prompt = sum(prompts) / len(prompts)
    length = prompt + setting.limit
    tokens = setting.prompts * prompt + setting.completions * setting.limit
    with torch.device("meta"):
        layers = AutoModelForCausalLM.from_config(config).base_model.layers
    weights = sum(p.numel() for p in layers.parameters() if p.dim() == 2)
    attention = (
        2
        * length
        * setting.completions
        * setting.limit
        * config.num_hidden_layers
        * config.num_attention_heads
        * config.head_dim
    )
    head = 2 * config.hidden_size * config.vocab_size
    return 3 * (tokens * 2 * weights + attention + setting.completions * setting.limit * head)


def matrix_peak(size: int = 2048, repetitions: int = 3) -> float:
    """FLOP/s of the fastest of a few float32 products of `size` x `size` matrices."""
    left, right = torch.randn(size, size), torch.randn(size, size)
    best = float("inf")
    for _ in range(repetitions + 1):
        started = time.perf_counter()
        left @ right
        best = min(best, time.perf_counter() - started)
    return 2 * size**3 / best
