"""Small honest inputs for tests."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from stapo_lightning.batch import Prompt, PromptBatch, RolloutBatch, TokenScores
from stapo_lightning.data.prompts import collate
from stapo_lightning.rewards import Completion
from stapo_lightning.scoring import score_logits

SHARED = Path(__file__).parents[2] / "shared"


def rollout_batch(
    advantages: list[float] | Tensor,
    lengths: list[int] | Tensor,
    old_log_probs: Tensor | None = None,
    width: int | None = None,
    group_size: int = 2,
) -> RolloutBatch:
    """A batch whose prompts are one token long; all that the objective reads is given by the caller."""
    lengths = torch.as_tensor(lengths)
    n = len(lengths)
    old = torch.zeros(n, width or int(lengths.max())) if old_log_probs is None else old_log_probs
    width = old.shape[1]
    return RolloutBatch(
        prompt_ids=torch.ones(n, 1, dtype=torch.int64),
        prompt_lengths=torch.ones(n, dtype=torch.int64),
        completion_ids=torch.zeros(n, width, dtype=torch.int64),
        completion_lengths=lengths,
        truncated=torch.zeros(n, dtype=torch.bool),
        old_log_probs=old,
        rewards=torch.zeros(n),
        advantages=torch.as_tensor(advantages, dtype=old.dtype),
        group_ids=torch.arange(n) // group_size,
        uids=torch.arange(n),
        temperature=1.0,
        group_size=group_size,
    )


def token_scores(probs: Tensor, entropy: Tensor) -> TokenScores:
    """Scores with the given probabilities and entropies; collision is not used by selectors."""
    return TokenScores(probs.log(), entropy, torch.zeros_like(probs))


def score_dense(logits: Tensor, tokens: Tensor, lengths: Tensor, temperature: float = 1.0) -> TokenScores:
    """Scores of dense logits [N, T, V], 0 at padding."""
    n, width, vocabulary = logits.shape
    flat = score_logits(logits.reshape(-1, vocabulary), tokens.reshape(-1), temperature)
    mask = torch.arange(width) < lengths[:, None]
    log_probs, entropy, collision = (values.view(n, width).masked_fill(~mask, 0.0) for values in flat)
    return TokenScores(log_probs, entropy, collision)


def golden_cases() -> list[dict]:
    """The mini-batches of shared/golden; empty where shared/ is absent."""
    path = SHARED / "golden" / "objective_cases.json"
    return json.loads(path.read_text()) if path.exists() else []


def prompt_batch(token_ids: list[list[int]]) -> PromptBatch:
    """Prompts that are nothing but their token ids, numbered from 0."""
    return collate([(Prompt(text=f"prompt {i}", answer=""), ids, i) for i, ids in enumerate(token_ids)])


def tiny_qwen3_config(**changes) -> Qwen3Config:
    """Two layers of width 16 over 20 tokens; its random weights are wide enough that some tokens are unlikely."""
    settings = dict(
        vocab_size=20,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=128,
        initializer_range=0.4,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return Qwen3Config(**(settings | changes))


def tiny_qwen3(seed: int = 0, **changes) -> PreTrainedModel:
    """A random Qwen3 in train mode, the same for the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(tiny_qwen3_config(**changes)).train()


def completions(texts: list[str], answer: str = "42") -> list[Completion]:
    """Completions with the given texts, all of one problem."""
    return [Completion(Prompt(text="?", answer=answer), text, num_tokens=len(text), truncated=False) for text in texts]
