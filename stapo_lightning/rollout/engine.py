"""The interface of a rollout engine, and how a completion is sampled."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor, nn

from stapo_lightning.batch import Completions, PromptBatch
from stapo_lightning.byte_sizes import Need
from stapo_lightning.errors import bounded


@dataclass(frozen=True)
class Sampling:
    """How completions are drawn.

    Attributes:
        temperature: The logits are divided by it; 0 is greedy (the likeliest token).
        top_p: Smallest share of probability mass kept before drawing, in (0, 1]; 1 keeps all.
        top_k: Number of likeliest tokens kept before drawing; 0 keeps all.
        max_new_tokens: Longest completion in tokens, end token included.

    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 1024

    def problems(self, option: str) -> list[str]:
        """What is out of range, with `option` as the name of this argument."""
        return [
            *bounded(f"{option}.temperature", self.temperature, at_least=0),
            *bounded(f"{option}.top_p", self.top_p, above=0, at_most=1),
            *bounded(f"{option}.top_k", self.top_k, at_least=0),
            *bounded(f"{option}.max_new_tokens", self.max_new_tokens, at_least=1),
        ]


@dataclass(frozen=True)
class Vocabulary:
    """The token ids that steer a completion.

    Attributes:
        end_ids: Each of them ends a completion and belongs to it.
        pad_id: Fills rows on the right; never decides where a completion ends.

    """

    end_ids: tuple[int, ...]
    pad_id: int


@dataclass(frozen=True)
class RolloutLoad:
    """What one rank samples in one rollout, at most.

    Attributes:
        completions: Completions, >= 1.
        group_size: Of them for each prompt.
        cache_bytes: Keys and values of one of them at its longest, prompt included.
        layers: Decoder layers.
        vocab_size: Logits of a token.
        gpu_memory: Of the rank's GPU, in bytes.

    """

    completions: int
    group_size: int
    cache_bytes: int
    layers: int
    vocab_size: int
    gpu_memory: int


class RolloutEngine(ABC):
    """Samples groups of completions from the current policy.

    An engine is awake while it samples: `wake`, `generate` as often as there are batches, `sleep`. Every rank wakes and
    puts to sleep together, and the policy does not change in between.
    """

    def wake(self, policy: nn.Module) -> None:  # noqa: B027 - nothing to do is a good default
        """Takes the policy's weights as they are now; nothing to do where the policy itself samples.

        What all ranks have to do together belongs here: `generate` is called more often on one than on another.
        """

    @abstractmethod
    def generate(
        self, policy: nn.Module, prompts: PromptBatch, streams: Tensor, sampling: Sampling, vocabulary: Vocabulary
    ) -> Completions:
        """Samples `len(streams) / len(prompts)` completions of each prompt, those of one prompt side by side.

        Args:
            policy: The causal language model; its mode is the same after the call.
            prompts: B prompts.
            streams: [N] int64, one for each completion: a completion's random numbers depend on its stream alone, so
                it is the same for every batch composition and number of ranks.
            sampling: Temperature, top-p, top-k, length limit.
            vocabulary: End and pad ids.

        """

    def sleep(self) -> None:  # noqa: B027
        """Frees what is not needed while the policy updates."""

    def problems(self) -> list[str]:
        """Arguments out of range, one sentence each; read before a run starts."""
        return []

    def needs(self, load: RolloutLoad) -> list[Need]:
        """Memory of a rank's GPU that sampling takes beside the policy; read by `stapo plan`."""
        return []
