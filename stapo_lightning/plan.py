"""The derived sizes of a run, and the checks that need module, data and trainer together."""

from __future__ import annotations

from dataclasses import dataclass

from stapo_lightning.errors import bounded


@dataclass(frozen=True)
class Plan:
    """How one rollout becomes updates.

    Attributes:
        world_size: Ranks.
        prompts_per_batch: Prompts of one rollout over all ranks.
        prompts_per_update: Prompts of one optimiser step over all ranks.
        group_size: Completions of each prompt.
        max_prompt_tokens: Longest prompt.
        max_new_tokens: Longest completion.
        tokens_per_micro_batch: Budget of one forward and backward on each rank.

    """

    world_size: int
    prompts_per_batch: int
    prompts_per_update: int
    group_size: int
    max_prompt_tokens: int
    max_new_tokens: int
    tokens_per_micro_batch: int

    def problems(self) -> list[str]:
        """Sizes that do not fit together, one sentence each."""
        found = bounded("model.tokens_per_micro_batch", self.tokens_per_micro_batch, at_least=1)
        too_small = bounded("model.prompts_per_update", self.prompts_per_update, at_least=1)
        found += too_small
        if too_small:
            return found
        if self.prompts_per_batch % self.prompts_per_update:
            found.append(
                f"model.prompts_per_update={self.prompts_per_update} does not divide"
                f" data.prompts_per_batch={self.prompts_per_batch}: a rollout must hold a whole number of updates"
            )
        if self.prompts_per_update % self.world_size:
            found.append(
                f"model.prompts_per_update={self.prompts_per_update}: must be a multiple of the {self.world_size} ranks"
            )
        return found

    @property
    def updates_per_rollout(self) -> int:
        """Optimiser steps on each rollout batch."""
        return self.prompts_per_batch // self.prompts_per_update

    def lines(self) -> list[str]:
        """What is printed once at the start."""
        rollout = self.prompts_per_batch * self.group_size
        update = self.prompts_per_update * self.group_size
        longest = self.max_prompt_tokens + self.max_new_tokens
        return [
            f"rollout   {self.prompts_per_batch} prompts x {self.group_size} completions = {rollout:,} sequences,"
            f" at most {rollout * self.max_new_tokens:,} new tokens",
            f"update    {self.prompts_per_update} prompts = {update:,} sequences;"
            f" {self.updates_per_rollout} update{'s' if self.updates_per_rollout > 1 else ''} per rollout",
            f"each rank {update // self.world_size:,} sequences per update in micro-batches of at most"
            f" {self.tokens_per_micro_batch:,} tokens (longest sequence {longest:,}); {self.world_size} rank"
            f"{'s' if self.world_size > 1 else ''}",
        ]
