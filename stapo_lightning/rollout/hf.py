"""Rollouts with the Hugging Face model itself: batched sampling with a key-value cache."""

from __future__ import annotations

from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

from stapo_lightning.batch import Completions, PromptBatch, pad_rows
from stapo_lightning.errors import bounded
from stapo_lightning.models import cache_argument, rollout_mode
from stapo_lightning.randomness import uniform
from stapo_lightning.rollout.engine import RolloutEngine, Sampling, Vocabulary
from stapo_lightning.rollout.growing_cache import growing_cache
from stapo_lightning.rollout.packed_weights import packed_weights

# Finished rows leave the batch once this share of it has finished: each departure copies the cache.
COMPACT_SHARE = 0.2
# Asking a GPU how many rows are left stalls its queue, so it is asked only every few tokens.
CUDA_CHECK_INTERVAL = 16


def restrict(log_p: Tensor, top_p: float, top_k: int) -> Tensor:
    """Sets to -inf all but the `top_k` likeliest tokens, then all beyond the smallest set that holds mass `top_p`.

    Args:
        log_p: [B, V] log-probabilities.
        top_p: In (0, 1]; the token that crosses the mass is kept.
        top_k: 0 keeps all.

    """
    if 0 < top_k < log_p.shape[-1]:
        smallest = log_p.topk(top_k, dim=-1).values[:, -1:]
        log_p = log_p.masked_fill(log_p < smallest, -torch.inf)
    if top_p < 1:
        ordered, order = torch.log_softmax(log_p, dim=-1).sort(dim=-1, descending=True)
        mass_before = ordered.exp().cumsum(-1) - ordered.exp()
        outside = torch.zeros_like(log_p, dtype=torch.bool).scatter(-1, order, mass_before >= top_p)
        log_p = log_p.masked_fill(outside, -torch.inf)
    return log_p


def draw(log_p: Tensor, uniforms: Tensor) -> Tensor:
    """Inverts the cumulative distribution at `uniforms`: [B] tokens from [B, V] log-probabilities and [B] float64.

    Float64, since the tokens that STAPO is about sit in the tail: a float32 sum over a large vocabulary rounds away
    probabilities below about 1e-7 and shifts its neighbours.
    """
    # In place: over a large vocabulary each new tensor would cost more than what is computed in it.
    cumulative = log_p.to(torch.float64, copy=True).exp_()
    torch.cumsum(cumulative, -1, out=cumulative)
    total = cumulative[:, -1:]
    target = torch.minimum(uniforms[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target, right=True).squeeze(-1)


class Drawn(NamedTuple):
    """One token a row, and what the policy said of it at the temperature (at 1 for greedy), before top-p and top-k.

    Attributes:
        tokens: [B].
        log_probs: [B].
        entropy: [B] of the distribution, nats.
        collision: [B] sum of its squared probabilities.

    """

    tokens: Tensor
    log_probs: Tensor
    entropy: Tensor
    collision: Tensor


def sample_tokens(logits: Tensor, uniforms: Tensor, sampling: Sampling) -> Drawn:
    """Draws one token a row.

    Args:
        logits: [B, V].
        uniforms: [B] float64 in [0, 1); unused by greedy decoding.
        sampling: Temperature, top-p, top-k.

    """
    logits = logits.float()
    if sampling.temperature not in (0, 1):
        logits = logits / sampling.temperature
    log_p = torch.log_softmax(logits, dim=-1)
    if sampling.temperature == 0:
        tokens = log_p.argmax(-1)
    else:
        tokens = draw(restrict(log_p, sampling.top_p, sampling.top_k), uniforms)
    p = log_p.exp()
    return Drawn(
        tokens=tokens,
        log_probs=log_p.gather(-1, tokens[:, None]).squeeze(-1),
        # Where p is 0 the logarithm may be -inf, and 0 * -inf is nan.
        entropy=-(p * log_p.clamp_min(-1000.0)).sum(-1),
        collision=p.square().sum(-1),
    )


class HFEngine(RolloutEngine):
    """Samples with the policy itself: no second copy of the weights and no mismatch between engine and policy.

    Each prompt is read once for its whole group, and finished completions leave the batch.

    Args:
        max_sequences: Completions sampled at a time, at least one group; bounds the memory of the key-value cache.
        pack_weights: On a CPU, keep a second copy of the large linear layers during a rollout, in a layout that is
            faster to multiply with. Without effect on other devices.

    """

    def __init__(self, max_sequences: int = 512, pack_weights: bool = True) -> None:
        self.max_sequences = max_sequences
        self.pack_weights = pack_weights

    def problems(self) -> list[str]:
        return bounded("HFEngine.max_sequences", self.max_sequences, at_least=1)

    def generate(
        self, policy: nn.Module, prompts: PromptBatch, streams: Tensor, sampling: Sampling, vocabulary: Vocabulary
    ) -> Completions:
        group_size = len(streams) // len(prompts)
        prompts_a_pass = max(1, self.max_sequences // group_size)
        parts = []
        with rollout_mode(policy), packed_weights(policy) if self.pack_weights else nullcontext():
            for start in range(0, len(prompts), prompts_a_pass):
                part = slice(start, start + prompts_a_pass)
                rows = slice(start * group_size, (start + prompts_a_pass) * group_size)
                parts.append(
                    _generate(policy, prompts.ids[part], prompts.lengths[part], streams[rows], sampling, vocabulary)
                )
        if len(parts) == 1:
            return parts[0]
        width = max(part.ids.shape[1] for part in parts)
        ids = [nn.functional.pad(p.ids, (0, width - p.ids.shape[1]), value=vocabulary.pad_id) for p in parts]
        return Completions(
            ids=torch.cat(ids),
            lengths=torch.cat([p.lengths for p in parts]),
            truncated=torch.cat([p.truncated for p in parts]),
            log_probs=pad_rows([p.log_probs for p in parts]),
            entropy=pad_rows([p.entropy for p in parts if p.entropy is not None]),
            collision=pad_rows([p.collision for p in parts if p.collision is not None]),
        )


def _left_padded(ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """[B, P] ids moved to the right edge, and the bool mask of the real ones."""
    width = int(lengths.max())
    offset = torch.arange(width, device=ids.device) - (width - lengths[:, None])
    return ids.gather(1, offset.clamp(min=0)), offset >= 0


def _generate(
    policy: nn.Module,
    prompt_ids: Tensor,
    prompt_lengths: Tensor,
    streams: Tensor,
    sampling: Sampling,
    vocabulary: Vocabulary,
) -> Completions:
    device = prompt_ids.device
    n, group_size = len(streams), len(streams) // len(prompt_ids)
    end_ids = torch.tensor(vocabulary.end_ids, device=device)
    cache_name = cache_argument(policy)

    ids, mask = _left_padded(prompt_ids, prompt_lengths)
    padded = not bool(mask.all())
    cache = growing_cache(policy.config, ids.shape[1] + sampling.max_new_tokens)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = policy(
        input_ids=ids,
        attention_mask=mask.long() if padded else None,
        position_ids=positions,
        use_cache=True,
        logits_to_keep=1,
        **{cache_name: cache},
    ).logits[:, -1]
    logits = logits.repeat_interleave(group_size, dim=0)
    cache.batch_repeat_interleave(group_size)
    width = ids.shape[1]
    limit = sampling.max_new_tokens
    # Room for the emitted tokens is made once, so that a step does not copy the mask.
    attended = torch.ones(n, width + limit, dtype=torch.long, device=device)
    attended[:, :width] = mask.repeat_interleave(group_size, dim=0)
    position = prompt_lengths.repeat_interleave(group_size)[:, None]

    emitted = torch.full((n, limit), vocabulary.pad_id, dtype=torch.int64, device=device)
    recorded = torch.zeros(3, n, limit, dtype=torch.float32, device=device)  # log-probs, entropy, collision
    lengths = torch.zeros(n, dtype=torch.int64, device=device)
    truncated = torch.zeros(n, dtype=torch.bool, device=device)
    rows = torch.arange(n, device=device)  # which completion each row of the running batch is
    active = torch.ones(n, dtype=torch.bool, device=device)
    check_interval = CUDA_CHECK_INTERVAL if device.type == "cuda" else 1

    for step in range(limit):
        uniforms = uniform(0, streams, torch.full((), step, dtype=torch.int64, device=device))
        tokens, *scores = sample_tokens(logits, uniforms, sampling)
        emitted[rows, step] = tokens
        recorded[:, rows, step] = torch.stack(scores)
        lengths[rows] += active
        active = active & ~torch.isin(tokens, end_ids)
        if step == limit - 1:
            truncated[rows] = active
            break
        if step % check_interval == check_interval - 1:
            remaining = int(active.sum())
            if remaining == 0:
                break
            if remaining <= (1 - COMPACT_SHARE) * len(rows):
                kept = active.nonzero().squeeze(-1)
                cache.batch_select_indices(kept)
                rows, tokens, streams, active = rows[kept], tokens[kept], streams[kept], active[kept]
                attended, position = attended[kept], position[kept]
        logits = policy(
            input_ids=tokens[:, None],
            attention_mask=attended[:, : width + step + 1] if padded else None,
            position_ids=position + step,
            use_cache=True,
            logits_to_keep=1,
            **{cache_name: cache},
        ).logits[:, -1]

    longest = int(lengths.max())
    inside = torch.arange(longest, device=device) < lengths[:, None]
    log_probs, entropy, collision = recorded[:, :, :longest].masked_fill(~inside, 0.0)
    return Completions(
        ids=emitted[:, :longest].masked_fill(~inside, vocabulary.pad_id),
        lengths=lengths,
        truncated=truncated,
        log_probs=log_probs,
        entropy=entropy,
        collision=collision,
    )
