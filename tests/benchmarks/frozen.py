"""One batch that both trainers take the loss of: ratios differ from 1 on both sides, and some are clipped."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from stapo_lightning.batch import RolloutBatch
from stapo_lightning.models import backbone, load_causal_lm, load_tokenizer, output_head
from stapo_lightning.scoring import score
from stapo_lightning.states import joined
from tests.benchmarks.settings import Setting, prompt_texts

COMPLETIONS, LIMIT = 8, 24
SPREAD = 0.25  # std of the log-ratio: the clip range is about one of it wide on each side


def frozen_batch(setting: Setting, policy: Path) -> RolloutBatch:
    """Random completions of different lengths; the old log-probs are those of the policy with noise on them."""
    model, tokenizer = load_causal_lm(str(policy), "sdpa"), load_tokenizer(str(policy))
    generator = torch.Generator().manual_seed(0)
    prompts = [tokenizer(text)["input_ids"] for text in prompt_texts(COMPLETIONS)]
    lengths = torch.randint(LIMIT // 2, LIMIT + 1, (COMPLETIONS,), generator=generator)
    prompt_ids = torch.zeros(COMPLETIONS, max(map(len, prompts)), dtype=torch.int64)
    for row, ids in enumerate(prompts):
        prompt_ids[row, : len(ids)] = torch.tensor(ids)
    batch = RolloutBatch(
        prompt_ids=prompt_ids,
        prompt_lengths=torch.tensor([len(ids) for ids in prompts]),
        completion_ids=torch.randint(3, model.config.vocab_size, (COMPLETIONS, LIMIT), generator=generator),
        completion_lengths=lengths,
        truncated=lengths == LIMIT,
        old_log_probs=torch.zeros(COMPLETIONS, LIMIT),
        rewards=torch.zeros(COMPLETIONS),
        advantages=torch.randn(COMPLETIONS, generator=generator),
        group_ids=torch.arange(COMPLETIONS) // 2,
        uids=torch.arange(COMPLETIONS),
        temperature=1.0,
        group_size=2,
    )
    with torch.no_grad():
        log_probs = score(batch, joined(backbone(model))(batch), output_head(model), model.config.vocab_size).log_probs
    noise = SPREAD * torch.randn(log_probs.shape, generator=generator)
    batch.old_log_probs = (log_probs + noise).masked_fill(~batch.completion_mask, 0.0)
    return batch


def for_trl(batch: RolloutBatch) -> dict[str, Tensor]:
    """The same batch as TRL's loss reads it: prompts padded on the left."""
    width = batch.prompt_ids.shape[1]
    offset = torch.arange(width) - (width - batch.prompt_lengths[:, None])
    mask = batch.completion_mask
    return {
        "prompt_ids": batch.prompt_ids.gather(1, offset.clamp(min=0)).masked_fill(offset < 0, 0),
        "prompt_mask": (offset >= 0).long(),
        "completion_ids": batch.completion_ids.masked_fill(~mask, 0),
        "completion_mask": mask.long(),
        "old_per_token_logps": batch.old_log_probs,
        "advantages": batch.advantages,
        "num_items_in_batch": mask.sum(),
    }
