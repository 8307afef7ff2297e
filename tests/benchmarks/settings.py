"""The settings that are timed, and the policy of each: random weights in a known shape, with a tokenizer of it."""

from __future__ import annotations

import itertools
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

THREADS = int(os.environ.get("BENCH_THREADS", 2))
LEARNING_RATE = 1e-6  # the paper's: the policy, and so the length of its completions, stays as it is
CLIP_LOW, CLIP_HIGH = 0.2, 0.28


@dataclass(frozen=True)
class Setting:
    """One size of policy and rollout; an update is one rollout.

    Attributes:
        model: "qwen3": width 128, 4 layers, vocabulary 94. "smollm2": the shape of SmolLM2-135M.
        prompts: Prompts of one rollout.
        group_size: Completions of each.
        limit: Longest completion in tokens.
        ends: Whether the policy ever emits an end token (of random weights: 1 in 94); otherwise every completion has
            exactly `limit` tokens.
        warmup: Updates that are not timed.
        updates: Updates that are timed in each process.

    """

    model: str
    prompts: int
    group_size: int
    limit: int
    ends: bool = False
    warmup: int = 2
    updates: int = 6

    @property
    def completions(self) -> int:
        return self.prompts * self.group_size

    @property
    def policy_name(self) -> str:
        """Folder of its policy, shared by settings with the same one."""
        return f"{self.model}-{'ends' if self.ends else 'endless'}-{self.limit if self.limit > 1024 else 1024}"

    def changed(self, **changes: Any) -> Setting:
        """The same with other sizes."""
        return replace(self, **changes)


SETTINGS = {
    "tiny": Setting("qwen3", prompts=32, group_size=8, limit=64, ends=True),
    "tiny-full": Setting("qwen3", prompts=32, group_size=8, limit=64),
    "smollm2": Setting("smollm2", prompts=2, group_size=8, limit=128, warmup=1, updates=2),
}


def coin(text: str, answer: str = "") -> float:
    """The reward of both trainers: half of all completions are right, so nearly every group teaches something."""
    return float(zlib.crc32(text.encode()) % 2)


def prompt_texts(count: int) -> list[str]:
    """Prompts of both trainers."""
    from stapo_lightning.data import ArithmeticPrompts

    return [prompt.text for prompt in ArithmeticPrompts("train", count).load()]


def make_policy(setting: Setting, folder: Path) -> Path:
    """Saves the policy of `setting` under `folder`, unless it is there, and returns where."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

    path = folder / setting.policy_name
    if path.exists():
        return path
    vocabulary = {"qwen3": 94, "smollm2": 49152}[setting.model]
    tokenizer = _tokenizer(vocabulary, setting.ends)
    common = {
        "vocab_size": vocabulary,
        "max_position_embeddings": max(1024, setting.limit) + 128,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": 0,
    }
    config: Any
    if setting.model == "qwen3":
        config = Qwen3Config(
            hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, head_dim=32, **common,
        )  # fmt: skip
    else:
        config = LlamaConfig(
            hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
            num_key_value_heads=3, head_dim=64, **common,
        )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = 0
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def _tokenizer(vocabulary: int, ends: bool) -> Any:
    """The shipped tokenizer, its vocabulary filled up with words; an end token beyond it is one no policy emits."""
    import json

    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    from stapo_lightning.models import resolve_policy

    described = json.loads(Path(resolve_policy("stapo_lightning/assets/tiny_qwen3"), "tokenizer.json").read_text())
    known: dict[str, int] = described["model"]["vocab"]
    for number in range(len(known), vocabulary):
        known[f"w{number} "] = number
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(described)),
        pad_token="<pad>",
        eos_token="<end>" if ends else "<never>",
    )
    assert tokenizer.eos_token_id == (1 if ends else vocabulary)
    return tokenizer


def median(values: Sequence[float]) -> float:
    """The median."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def differences(times: Sequence[float]) -> list[float]:
    """What lies between neighbours."""
    return [after - before for before, after in itertools.pairwise(times)]
