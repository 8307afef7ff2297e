"""Where prompts come from, and the endless, resumable, rank-aware order in which training reads them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from stapo_lightning.batch import Prompt, PromptBatch


class PromptSource(ABC):
    """A finite list of problems.

    Attributes:
        remarks: What the last `load` did besides reading, such as "dropped 12 repeated"; printed once.

    """

    remarks: Sequence[str] = ()

    @abstractmethod
    def load(self) -> Sequence[Prompt]:
        """All prompts, in a fixed order.

        Raises:
            ConfigError: With every problem of the source's files at once.

        """


class PromptStream(Sampler[list[tuple[int, int]]]):
    """Batches of (index of the prompt, its number in the stream), each rank taking its share of every batch.

    The stream is one shuffled pass over the prompts after another, so every prompt is read once a pass and none is left
    over. Position n is a pure function of (seed, n): to resume, only the position is needed. Rank r of R takes places
    r, r + R, ... of a batch, so a batch cut into mini-batches holds the same prompts for every number of ranks.

    Args:
        num_prompts: Prompts of the source.
        prompts_per_batch: Prompts of one batch over all ranks; a multiple of `world_size`.
        seed: Seed of the order.
        rank: This rank.
        world_size: Number of ranks.

    """

    def __init__(self, num_prompts: int, prompts_per_batch: int, seed: int, rank: int, world_size: int) -> None:
        self.num_prompts = num_prompts
        self.prompts_per_batch = prompts_per_batch
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.position = 0

    def __len__(self) -> int:
        """Batches of one Lightning epoch: about one pass."""
        return max(1, self.num_prompts // self.prompts_per_batch)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        """Batches from the position on."""
        start = self.position
        while True:
            numbers = range(start + self.rank, start + self.prompts_per_batch, self.world_size)
            yield [(self._index(number), number) for number in numbers]
            start += self.prompts_per_batch

    def _index(self, number: int) -> int:
        stream_pass, place = divmod(number, self.num_prompts)
        if getattr(self, "_pass", None) != stream_pass:
            generator = torch.Generator().manual_seed((self.seed * 1_000_003 + stream_pass) & 0x7FFFFFFFFFFFFFFF)
            self._pass, self._order = stream_pass, torch.randperm(self.num_prompts, generator=generator).tolist()
        return self._order[place]


class PromptLoader(DataLoader[Any]):
    """A DataLoader whose position the datamodule keeps.

    Lightning takes a loader with these two methods for a resumable one; there is nothing left for them to hold, since
    the stream's position is in the datamodule's own state.
    """

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing."""


class TokenizedPrompts:
    """Prompts with their token ids, indexed by (index, number) pairs.

    Args:
        prompts: The problems.
        token_ids: Token ids of each.

    """

    def __init__(self, prompts: Sequence[Prompt], token_ids: Sequence[Sequence[int]]) -> None:
        self.prompts = prompts
        self.token_ids = token_ids

    def __getitem__(self, key: tuple[int, int]) -> tuple[Prompt, Sequence[int], int]:
        """(prompt, token ids, number)."""
        index, number = key
        return self.prompts[index], self.token_ids[index], number

    def __len__(self) -> int:
        """Number of prompts."""
        return len(self.prompts)

    def by_source(self) -> TokenizedPrompts:
        """The same prompts with those of one source side by side, sources in the order of their first prompt."""
        first: dict[str, int] = {}
        for prompt in self.prompts:
            first.setdefault(prompt.source, len(first))
        order = sorted(range(len(self)), key=lambda i: first[self.prompts[i].source])  # stable within a source
        return TokenizedPrompts([self.prompts[i] for i in order], [self.token_ids[i] for i in order])


def collate(items: Sequence[tuple[Prompt, Sequence[int], int]]) -> PromptBatch:
    """Pads the token ids on the right with 0; no item makes a batch of no prompt."""
    if not items:
        return PromptBatch([], torch.zeros(0, 0, dtype=torch.int64), *torch.zeros(2, 0, dtype=torch.int64))
    prompts, token_ids, numbers = zip(*items, strict=True)
    lengths = torch.tensor([len(ids) for ids in token_ids])
    ids = torch.zeros(len(items), int(lengths.max()), dtype=torch.int64)
    for row, values in enumerate(token_ids):
        ids[row, : len(values)] = torch.tensor(values)
    return PromptBatch(list(prompts), ids, lengths, torch.tensor(numbers))
