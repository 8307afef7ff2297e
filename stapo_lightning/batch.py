"""What flows between the rooms: prompts, rollouts, token scores, selections. Every field states its shape.

N = completions on this rank, T = longest completion, P = longest prompt. Rows of one group (the completions of one
prompt) stand together, and groups stand in the order of their prompts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from stapo_lightning.prompt import Prompt as Prompt

_Rows = TypeVar("_Rows", "RolloutBatch", "TokenScores")


@dataclass
class PromptBatch:
    """Tokenised prompts on their way to the rollout engine.

    Attributes:
        prompts: The problems, B of them.
        ids: [B, P] token ids, padded on the right.
        lengths: [B] number of tokens of each prompt.
        uids: [B] number of each prompt in the whole run's stream (training) or in its benchmark (evaluation): the same
            for every number of ranks, and what seeds its sampling.

    """

    prompts: list[Prompt]
    ids: Tensor
    lengths: Tensor
    uids: Tensor

    def __len__(self) -> int:
        """Number of prompts."""
        return len(self.prompts)

    def to(self, device: torch.device | str, **_: Any) -> PromptBatch:
        """The same batch with its tensors on `device`."""
        return replace(self, ids=self.ids.to(device), lengths=self.lengths.to(device), uids=self.uids.to(device))

    def rows(self, index: Sequence[int]) -> PromptBatch:
        """The prompts at `index`, in that order."""
        rows = torch.tensor(index, device=self.ids.device)
        return PromptBatch([self.prompts[i] for i in index], self.ids[rows], self.lengths[rows], self.uids[rows])


@dataclass
class Completions:
    """What a rollout engine returns.

    Attributes:
        ids: [N, T] emitted tokens, end token included, padded on the right.
        lengths: [N] number of emitted tokens, at least 1.
        truncated: [N] bool, True where the length limit and not an end token ended the completion.
        log_probs: [N, T] log pi_old of each emitted token at the sampling temperature, before top-p and top-k; 0 at
            padding. nan under top-p or top-k, which no training rollout has, where the engine tells only those after.
        entropy: [N, T] H of the distribution each token was drawn from, before top-p and top-k, in nats; 0 at padding.
            None where the engine does not record it with the exactness of a forward of the policy.
        collision: [N, T] sum of its squared probabilities; 0 at padding. Recorded together with `entropy`.

    """

    ids: Tensor
    lengths: Tensor
    truncated: Tensor
    log_probs: Tensor
    entropy: Tensor | None = None
    collision: Tensor | None = None


@dataclass
class RolloutBatch:
    """Groups of completions with rewards and advantages: all that an update needs.

    Attributes:
        prompt_ids: [N, P] prompt tokens, padded on the right.
        prompt_lengths: [N].
        completion_ids: [N, T] emitted tokens, padded on the right.
        completion_lengths: [N].
        truncated: [N] bool, ended by the length limit.
        old_log_probs: [N, T] log pi_old(y_t) of the behaviour policy at `temperature`; 0 at padding.
        rewards: [N] float32; nan where the reward failed for this row.
        advantages: [N] float32.
        group_ids: [N] int64, equal for the completions of one prompt.
        uids: [N] int64, a number of each completion, unique in its rollout and the same for every number of ranks.
        temperature: Sampling temperature, > 0: scoring divides the logits by it.
        group_size: G.
        prompts: N prompts (repeated within the group); empty in synthetic batches.
        texts: N decoded completions; empty in synthetic batches.
        old_entropy: [N, T] H of the behaviour policy, where the engine recorded it; None elsewhere.
        old_collision: [N, T] collision of the behaviour policy, likewise.
        engine_log_probs: [N, T] log pi_engine(y_t), where `old_log_probs` has become the policy's own and the two are
            told apart (`model.importance`); None elsewhere: then `old_log_probs` is the engine's.
        importance: [N, T] weight of each token's loss, from an `Importance`; None: 1 everywhere.
        reward_errors: Rows whose reward raised or was not a number.
        reward_timeouts: Rows whose reward did not return in time.
        rollout_seconds: Wall time of sampling.
        reward_seconds: Wall time of the reward.

    """

    prompt_ids: Tensor
    prompt_lengths: Tensor
    completion_ids: Tensor
    completion_lengths: Tensor
    truncated: Tensor
    old_log_probs: Tensor
    rewards: Tensor
    advantages: Tensor
    group_ids: Tensor
    uids: Tensor
    temperature: float
    group_size: int
    prompts: list[Prompt] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    old_entropy: Tensor | None = None
    old_collision: Tensor | None = None
    engine_log_probs: Tensor | None = None
    importance: Tensor | None = None
    reward_errors: int = 0
    reward_timeouts: int = 0
    rollout_seconds: float = 0.0
    reward_seconds: float = 0.0

    def __len__(self) -> int:
        """Number of completions N."""
        return len(self.completion_ids)

    @property
    def completion_mask(self) -> Tensor:
        """[N, T] bool, True = emitted by the policy, end token included. From lengths, never from token values."""
        positions = torch.arange(self.completion_ids.shape[1], device=self.completion_ids.device)
        return positions < self.completion_lengths[:, None]

    @property
    def recorded_scores(self) -> TokenScores | None:
        """What the engine recorded while it sampled: scores of the policy until its first update. None: it did not."""
        if self.old_entropy is None or self.old_collision is None:
            return None
        return TokenScores(self.old_log_probs, self.old_entropy, self.old_collision)

    @property
    def sequence_lengths(self) -> Tensor:
        """[N] prompt plus completion tokens."""
        return self.prompt_lengths + self.completion_lengths

    def rows(self, index: Tensor) -> RolloutBatch:
        """The completions at `index` ([n] int64), in that order."""
        return _rows(self, index)

    def mini_batches(self, completions: int) -> Iterator[RolloutBatch]:
        """Consecutive mini-batches of `completions` rows each."""
        for chunk in torch.arange(len(self), device=self.completion_ids.device).split(completions):
            yield self.rows(chunk)


@dataclass
class TokenScores:
    """What the current policy says of each emitted token, at the sampling temperature. All [N, T], 0 at padding.

    Attributes:
        log_probs: log pi_theta(y_t).
        entropy: H_t, nats, over the whole vocabulary.
        collision: sum_v pi_theta(v)^2, the probability that two draws collide; gives the exact logit-gradient norm.

    """

    log_probs: Tensor
    entropy: Tensor
    collision: Tensor

    @property
    def probs(self) -> Tensor:
        """[N, T] pi_theta(y_t); 1 at padding."""
        return self.log_probs.exp()

    def detach(self) -> TokenScores:
        """The same values without a graph."""
        return TokenScores(self.log_probs.detach(), self.entropy.detach(), self.collision.detach())

    def rows(self, index: Tensor) -> TokenScores:
        """The scores of the completions at `index`."""
        return _rows(self, index)


@dataclass
class Selection:
    """What a token selector decided for a mini-batch.

    Attributes:
        silenced: [N, T] bool, True = this token is left out of numerator and denominator.
        candidates: [N, T] bool, the tokens among which the selector chose.
        tau_h: [] threshold on the selector's statistic (entropy for S2T); nan where there was none.

    """

    silenced: Tensor
    candidates: Tensor
    tau_h: Tensor


@dataclass
class LossOutput:
    """The loss of one micro-batch and what was measured beside it.

    Attributes:
        loss: [] sum over this micro-batch's tokens of weight * (surrogate + kl_coef * KL).
        log_ratio: [n, T] log rho, detached; 0 at padding.
        clipped_low: [n, T] bool, A < 0 and rho below the clip range: no gradient.
        clipped_high: [n, T] bool, A > 0 and rho above it, or A < 0 and above the dual clip: no gradient.
        kl: [n, T] KL estimate to the reference, detached; None where there is no reference.

    """

    loss: Tensor
    log_ratio: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    kl: Tensor | None

    @property
    def ratio(self) -> Tensor:
        """[n, T] rho; 1 at padding."""
        return self.log_ratio.exp()


@dataclass
class UpdateRecord:
    """What happened to every token of one rollout batch, for callbacks: `outputs["record"]` in `on_train_batch_end`.

    Rows are those of the RolloutBatch. Each value was taken at the update that the row took part in.

    Attributes:
        scores: Log-probs, entropy and collision of the policy just before the update.
        silenced: [N, T] bool.
        candidates: [N, T] bool.
        log_ratio: [N, T] log pi_theta - log pi_old; 0 at padding.
        clipped: [N, T] bool, low or high.
        updates: The numbers of the first and of the last update, counted from 1.
        tau_h: The selector's threshold at each of these updates, nan where there was none; empty in synthetic records.

    """

    scores: TokenScores
    silenced: Tensor
    candidates: Tensor
    log_ratio: Tensor
    clipped: Tensor
    updates: tuple[int, int]
    tau_h: tuple[float, ...] = ()

    @property
    def update_numbers(self) -> range:
        """The numbers of these updates."""
        return range(self.updates[0], self.updates[1] + 1)

    def by_update(self) -> Iterator[tuple[int, slice]]:
        """The number of each update with the rows that took part in it."""
        rows = len(self.silenced) // len(self.update_numbers)
        for place, number in enumerate(self.update_numbers):
            yield number, slice(place * rows, (place + 1) * rows)

    def is_due(self, every_n_updates: int) -> bool:
        """Whether one of these updates is the first of all or a multiple of `every_n_updates`; 0 is never due."""
        return any(due(number, every_n_updates) for number in self.update_numbers)

    @property
    def ratio(self) -> Tensor:
        """[N, T] rho; 1 at padding."""
        return self.log_ratio.exp()


@dataclass
class EvalCompletion:
    """One completion of a held-out problem.

    Attributes:
        text: The decoded completion, without special tokens.
        answer: Its final answer, normalised as the reward does it; None where there is none.
        correct: The verdict that counts.
        rule_correct: The verdict of the reward, before a second verifier looked at what it rejected.
        tokens: Its length, end token included.
        truncated: True where the length limit ended it.

    """

    text: str
    answer: str | None
    correct: bool
    rule_correct: bool
    tokens: int
    truncated: bool


@dataclass
class EvalSamples:
    """Completions of one decoding for a batch of B held-out prompts.

    Attributes:
        decoding: Name of the decoding, the middle of its tags.
        completions: B lists of k completions.

    """

    decoding: str
    completions: list[list[EvalCompletion]]


@dataclass
class EvalBatch:
    """Held-out prompts of one benchmark with the completions of each decoding.

    Attributes:
        prompts: The problems, B of them.
        uids: Their numbers within the benchmark.
        samples: One entry a decoding.

    """

    prompts: list[Prompt]
    uids: list[int]
    samples: Sequence[EvalSamples]

    def to(self, *_: Any, **__: Any) -> EvalBatch:
        """The batch itself: it is on the CPU already. Lightning moves the predictions of `predict` there."""
        return self


def due(update: int, every_n_updates: int) -> bool:
    """Whether update number `update` (from 1) is the first or a multiple of `every_n_updates`; 0 is never due."""
    return every_n_updates > 0 and (update == 1 or update % every_n_updates == 0)


def pad_rows(tensors: Sequence[Tensor], width: int | None = None) -> Tensor:
    """Stacks [*, T_i] tensors of different T_i along rows, padded with 0 on the right to `width` or the longest."""
    width = max(t.shape[1] for t in tensors) if width is None else width
    return torch.cat([torch.nn.functional.pad(t, (0, width - t.shape[1])) for t in tensors])


def _rows(batch: _Rows, index: Tensor) -> _Rows:
    numbers = index.tolist()
    size = len(batch) if isinstance(batch, RolloutBatch) else len(batch.log_probs)
    changes: dict[str, Any] = {}
    for entry in fields(batch):
        value = getattr(batch, entry.name)
        if isinstance(value, Tensor):
            changes[entry.name] = value[index]
        elif isinstance(value, list) and len(value) == size:
            changes[entry.name] = [value[i] for i in numbers]
    return replace(batch, **changes)
