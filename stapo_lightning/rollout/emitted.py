"""Completions of an engine that returns lists, as the tensors that all engines return."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from stapo_lightning.batch import Completions, PromptBatch
from stapo_lightning.rollout.engine import Sampling


@dataclass
class Emitted:
    """One completion.

    Attributes:
        ids: Its tokens, end token included, at least one.
        log_probs: Of each token at the sampling temperature, before top-p and top-k; None where not known.
        truncated: Ended by the length limit.

    """

    ids: list[int]
    log_probs: list[float] | None
    truncated: bool


def as_completions(emitted: Sequence[Emitted], pad_id: int, device: torch.device) -> Completions:
    """The completions under each other; log-probs that are not known are nan."""
    lengths = [len(row.ids) for row in emitted]
    ids = torch.full((len(emitted), max(lengths)), pad_id, dtype=torch.int64)
    log_probs = torch.zeros(ids.shape, dtype=torch.float32)
    for number, row in enumerate(emitted):
        ids[number, : len(row.ids)] = torch.tensor(row.ids)
        log_probs[number, : len(row.ids)] = torch.nan if row.log_probs is None else torch.tensor(row.log_probs)
    return Completions(
        ids=ids.to(device),
        lengths=torch.tensor(lengths, device=device),
        truncated=torch.tensor([row.truncated for row in emitted], device=device),
        log_probs=log_probs.to(device),
    )


def prompt_rows(prompts: PromptBatch, group_size: int) -> list[list[int]]:
    """The token ids of the prompt of each completion, without padding."""
    lengths = prompts.lengths.tolist()
    rows = [row[:length] for row, length in zip(prompts.ids.tolist(), lengths, strict=True)]
    return [row for row in rows for _ in range(group_size)]


def seeds(streams: torch.Tensor) -> list[int]:
    """[N] int64 streams -> seeds of a torch generator: not negative, as -1 asks vLLM for no seed at all.

    Torch's generators on a CPU read the lower 32 bits; streams are hashes, so that these are as good as all.
    """
    return (streams & torch.iinfo(torch.int64).max).tolist()


def knows_log_probs(sampling: Sampling) -> bool:
    """Whether vLLM's log-probs are those of the whole distribution at the temperature.

    Its `raw` ones are taken before the temperature, its `processed` ones after top-p and top-k: they are those that we
    mean where nothing is cut.
    """
    return sampling.top_p == 1 and sampling.top_k == 0
