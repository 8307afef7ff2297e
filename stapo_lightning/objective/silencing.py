"""Which tokens train: S2T (paper, section 4 and Algorithm 1) and the selectors of its baselines and ablations.

A selector sees the whole mini-batch of this rank and reaches the other ranks through `ranks`, so that its quantile is
taken over every completion token of the optimiser step. It returns bools: no gradient runs through a selection.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from stapo_lightning.batch import RolloutBatch, Selection, TokenScores
from stapo_lightning.distributed import Ranks
from stapo_lightning.errors import bounded
from stapo_lightning.randomness import uniform


def linear_quantile(values: Tensor, q: float) -> Tensor:
    """The q-quantile of 1-D `values` with linear interpolation; nan when empty. Unlike torch.quantile of any size."""
    if len(values) == 0:
        return values.new_full((), torch.nan)
    ordered = values.sort().values
    position = q * (len(values) - 1)
    low = int(position)
    high = min(low + 1, len(values) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def positive_tokens(batch: RolloutBatch) -> Tensor:
    """[N, T] bool: emitted tokens with A_i > 0."""
    return batch.completion_mask & (batch.advantages[:, None] > 0)


def low_probability_candidates(batch: RolloutBatch, scores: TokenScores, tau_p: float) -> Tensor:
    """[N, T] bool: emitted tokens with A_i > 0 and pi_theta(y_t) < tau_p, both strict."""
    return positive_tokens(batch) & (scores.probs < tau_p)


def silence_below_quantile(statistic: Tensor, candidates: Tensor, q: float, ranks: Ranks) -> Selection:
    """Silences the candidates whose `statistic` [N, T] lies strictly below its q-quantile over all candidates."""
    tau = linear_quantile(ranks.gather(statistic[candidates]), q)
    return Selection(silenced=candidates & (statistic < tau), candidates=candidates, tau_h=tau)


def _problems(selector: str, tau_p: float, q: float) -> list[str]:
    return [
        *bounded(f"{selector}.tau_p", tau_p, above=0, at_most=1),
        *bounded(f"{selector}.q", q, at_least=0, at_most=1),
    ]


class TokenSelector(ABC):
    """Chooses the tokens of a mini-batch that are silenced."""

    @abstractmethod
    def __call__(self, batch: RolloutBatch, scores: TokenScores, ranks: Ranks, update: int) -> Selection:
        """Selects within one mini-batch.

        Args:
            batch: The mini-batch of this rank.
            scores: [N, T] statistics of the current policy, without a graph.
            ranks: Collectives over all ranks; each rank makes the same calls.
            update: Number of this optimiser step, from 0: seeds a random selector.

        """

    def problems(self) -> list[str]:
        """Arguments out of range, one sentence each; read before a run starts."""
        return []

    def state_dict(self) -> dict[str, Any]:
        """What it remembers from one update to the next, the same on every rank; part of every checkpoint."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes back what `state_dict` gave, on a resume."""
        del state_dict  # of another selector: what that one remembered says nothing here


class S2T(TokenSelector):
    """Silences spurious tokens: A_i > 0, pi_theta < tau_p and H_t < tau_h.

    tau_h is the q-quantile of the entropies of the candidates, the tokens with A_i > 0 and pi_theta < tau_p. Typically
    below 0.01 % of tokens. Source: section 4 and Algorithm 1 of arXiv 2602.15620 (version 5).

    Args:
        tau_p: Probability below which a token of a positive-advantage completion is a candidate, in (0, 1].
        q: Quantile of the candidates' entropies that gives tau_h, in [0, 1].
        pooled_updates: Updates whose candidates give tau_h, this one and those before it, at least 1. 1 is the paper's
            rule, under which the only candidate of an update always stays; beyond it the entropies of earlier
            candidates, as they were then, are part of the quantile.

    """

    def __init__(self, tau_p: float = 0.002, q: float = 0.75, pooled_updates: int = 1) -> None:
        self.tau_p = tau_p
        self.q = q
        self.pooled_updates = pooled_updates
        self._pool: deque[list[float]] = deque(maxlen=max(pooled_updates, 1))

    def problems(self) -> list[str]:
        return _problems("S2T", self.tau_p, self.q) + bounded("S2T.pooled_updates", self.pooled_updates, at_least=1)

    def __call__(self, batch: RolloutBatch, scores: TokenScores, ranks: Ranks, update: int) -> Selection:
        candidates = low_probability_candidates(batch, scores, self.tau_p)
        if self.pooled_updates == 1:
            return silence_below_quantile(scores.entropy, candidates, self.q, ranks)
        self._pool.append(ranks.gather(scores.entropy[candidates]).tolist())
        pooled = scores.entropy.new_tensor([entropy for entropies in self._pool for entropy in entropies])
        tau_h = linear_quantile(pooled, self.q)
        return Selection(silenced=candidates & (scores.entropy < tau_h), candidates=candidates, tau_h=tau_h)

    def state_dict(self) -> dict[str, Sequence[list[float]]]:
        """The entropies of the candidates of the last updates, oldest first."""
        return {"pool": list(self._pool)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes them back; where `pooled_updates` has become smaller, the last of them."""
        self._pool.clear()
        self._pool.extend(state_dict.get("pool", []))


class S2TVersion1(TokenSelector):
    """S2T as in the paper's first version: tau_h is the q-quantile of the entropy of *all* completion tokens.

    Args:
        tau_p: As in S2T.
        q: Quantile over all completion tokens of the mini-batch, in [0, 1].

    """

    def __init__(self, tau_p: float = 0.002, q: float = 0.8) -> None:
        self.tau_p = tau_p
        self.q = q

    def problems(self) -> list[str]:
        return _problems("S2TVersion1", self.tau_p, self.q)

    def __call__(self, batch: RolloutBatch, scores: TokenScores, ranks: Ranks, update: int) -> Selection:
        candidates = low_probability_candidates(batch, scores, self.tau_p)
        tau_h = linear_quantile(ranks.gather(scores.entropy[batch.completion_mask]), self.q)
        return Selection(silenced=candidates & (scores.entropy < tau_h), candidates=candidates, tau_h=tau_h)


class KeepAll(TokenSelector):
    """Silences nothing (GRPO, DAPO, JustRL)."""

    def __call__(self, batch: RolloutBatch, scores: TokenScores, ranks: Ranks, update: int) -> Selection:
        nothing = torch.zeros_like(batch.completion_mask)
        return Selection(silenced=nothing, candidates=nothing, tau_h=scores.entropy.new_full((), torch.nan))


class TopEntropy(TokenSelector):
    """Only the highest-entropy share of the mini-batch's completion tokens trains (20-Entropy, arXiv 2506.01939).

    Args:
        share: Share of the tokens that train, in (0, 1].

    """

    def __init__(self, share: float = 0.2) -> None:
        self.share = share

    def problems(self) -> list[str]:
        return bounded("TopEntropy.share", self.share, above=0, at_most=1)

    def __call__(self, batch: RolloutBatch, scores: TokenScores, ranks: Ranks, update: int) -> Selection:
        return silence_below_quantile(scores.entropy, batch.completion_mask, 1.0 - self.share, ranks)


class AllCandidates(TokenSelector):
    """Every candidate of S2T is silenced, whatever its entropy (JustRL-FullMask; the paper: entropy collapses).

    Args:
        tau_p: As in S2T.

    """

    def __init__(self, tau_p: float = 0.002) -> None:
        self.tau_p = tau_p

    def problems(self) -> list[str]:
        return bounded("AllCandidates.tau_p", self.tau_p, above=0, at_most=1)

    def __call__(self, batch: RolloutBatch, scores: TokenScores, ranks: Ranks, update: int) -> Selection:
        candidates = low_probability_candidates(batch, scores, self.tau_p)
        return Selection(silenced=candidates, candidates=candidates, tau_h=scores.entropy.new_full((), torch.nan))


class HighEntropy(TokenSelector):
    """The candidates with the highest entropy are silenced, the same share q as S2T silences (ablation).

    Args:
        tau_p: As in S2T.
        q: Share of the candidates that is silenced, in [0, 1].

    """

    def __init__(self, tau_p: float = 0.002, q: float = 0.75) -> None:
        self.tau_p = tau_p
        self.q = q

    def problems(self) -> list[str]:
        return _problems("HighEntropy", self.tau_p, self.q)

    def __call__(self, batch: RolloutBatch, scores: TokenScores, ranks: Ranks, update: int) -> Selection:
        candidates = low_probability_candidates(batch, scores, self.tau_p)
        lowest = silence_below_quantile(-scores.entropy, candidates, self.q, ranks)
        return Selection(silenced=lowest.silenced, candidates=candidates, tau_h=-lowest.tau_h)


def _draws(seed: int, update: int, batch: RolloutBatch) -> Tensor:
    """[N, T] uniform numbers that hash (seed, update, completion, position).

    So they are the same for every micro-batch size, order of the rows and number of ranks.
    """
    positions = torch.arange(batch.completion_ids.shape[1], device=batch.completion_ids.device)
    return uniform(seed, torch.full_like(positions, update), batch.uids[:, None], positions)


class RandomCandidates(TokenSelector):
    """A random share q of the candidates is silenced (ablation).

    Args:
        tau_p: As in S2T.
        q: Share of the candidates that is silenced, in [0, 1].
        seed: Seed of the draw.

    """

    def __init__(self, tau_p: float = 0.002, q: float = 0.75, seed: int = 0) -> None:
        self.tau_p = tau_p
        self.q = q
        self.seed = seed

    def problems(self) -> list[str]:
        return _problems("RandomCandidates", self.tau_p, self.q)

    def __call__(self, batch: RolloutBatch, scores: TokenScores, ranks: Ranks, update: int) -> Selection:
        candidates = low_probability_candidates(batch, scores, self.tau_p)
        draws = _draws(self.seed, update, batch)
        selection = silence_below_quantile(draws, candidates, self.q, ranks)
        return Selection(selection.silenced, candidates, scores.entropy.new_full((), torch.nan))


class RandomPositive(TokenSelector):
    """As many tokens as S2T would silence, drawn at random from all tokens with A_i > 0 (control, not in the paper).

    The count is that of S2T on this very mini-batch and policy. What S2T does and this does not is due to *which*
    tokens are silenced, and not to their number or the sign of their advantage.

    Args:
        tau_p: As in S2T.
        q: As in S2T.
        seed: Seed of the draw.

    """

    def __init__(self, tau_p: float = 0.002, q: float = 0.75, seed: int = 0) -> None:
        self.tau_p = tau_p
        self.q = q
        self.seed = seed

    def problems(self) -> list[str]:
        return _problems("RandomPositive", self.tau_p, self.q)

    def __call__(self, batch: RolloutBatch, scores: TokenScores, ranks: Ranks, update: int) -> Selection:
        spurious = S2T(self.tau_p, self.q)(batch, scores, ranks, update).silenced
        count = int(ranks.sum(spurious.sum()))
        positive = positive_tokens(batch)
        draws = _draws(self.seed, update, batch)
        lowest = ranks.gather(draws[positive]).sort().values[:count]
        silenced = positive & (draws <= lowest[-1]) if count else torch.zeros_like(positive)
        return Selection(silenced, positive, scores.entropy.new_full((), torch.nan))


class OneQuadrant(TokenSelector):
    """Silences the tokens with A_i > 0 of one quadrant of probability and entropy (for a study of the mechanism).

    Low and high are told apart by S2T's thresholds: probability below tau_p, entropy below tau_h, the q-quantile of the
    candidates' entropies. The quadrant low/low is S2T itself. Where an update has no candidate nothing is silenced.

    Args:
        probability: "low" or "high".
        entropy: "low" or "high".
        tau_p: As in S2T.
        q: As in S2T.

    """

    def __init__(
        self,
        probability: Literal["low", "high"],
        entropy: Literal["low", "high"],
        tau_p: float = 0.002,
        q: float = 0.75,
    ) -> None:
        self.probability = probability
        self.entropy = entropy
        self.tau_p = tau_p
        self.q = q

    def problems(self) -> list[str]:
        return _problems("OneQuadrant", self.tau_p, self.q)

    def __call__(self, batch: RolloutBatch, scores: TokenScores, ranks: Ranks, update: int) -> Selection:
        candidates = low_probability_candidates(batch, scores, self.tau_p)
        tau_h = linear_quantile(ranks.gather(scores.entropy[candidates]), self.q)
        side = candidates if self.probability == "low" else positive_tokens(batch) & ~candidates
        # Both comparisons with nan, which is tau_h without a candidate, are false.
        within = scores.entropy < tau_h if self.entropy == "low" else scores.entropy >= tau_h
        return Selection(silenced=side & within, candidates=side, tau_h=tau_h)
