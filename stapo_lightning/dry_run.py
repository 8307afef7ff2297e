"""`stapo plan`: what a run needs in bytes on each rank, before there are GPUs, weights or data.

Counted on tensors without memory: parameters, gradients, optimiser state, reference and key-value cache. Estimated:
what is marked so in the table, by the formulas of `DryRun`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig, PreTrainedModel

from stapo_lightning.adapters import add_adapter
from stapo_lightning.byte_sizes import Need, human_bytes, parse_bytes
from stapo_lightning.data import RolloutDataModule
from stapo_lightning.errors import ConfigError, StapoError
from stapo_lightning.hardware import Hardware, PlannedStrategy
from stapo_lightning.memory import (
    Activations,
    cache_bytes,
    count_activations,
    fake_ranks,
    group_sizes,
    local_bytes,
    meta_model,
    optimizer_bytes,
)
from stapo_lightning.models import freeze, resolve_policy
from stapo_lightning.module import StapoModule
from stapo_lightning.plan import Plan
from stapo_lightning.rollout import RolloutLoad
from stapo_lightning.scoring import scoring_bytes
from stapo_lightning.sharding import Sharding, shard

# What CUDA, NCCL and the gaps of the caching allocator take of a GPU: an assumption, not a measurement.
RESERVED = 3 * 2**30

# Bytes of an element of a gradient while ranks add it up: `shard` has it done in float32.
REDUCED = 4

PHASES = ("rollout", "update", "step")


class DoesNotFit(StapoError):
    """A run needs more memory than its GPUs have."""


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        need: What, how much, and how to change it.
        phases: When it is there: while completions are sampled, while gradients are taken, while the optimiser steps.
        estimate: Whether it follows from a formula rather than from counted tensors.
        on_host: Whether it lies in the memory of the machine rather than in the GPU's.

    """

    need: Need
    phases: tuple[str, ...] = PHASES
    estimate: bool = False
    on_host: bool = False


class DryRun:
    """The memory of rank 0, which holds the largest shard of every parameter.

    Args:
        module: As configured; it loads nothing.
        data: As configured; it reads nothing.
        hardware: Of the real run.
        gpu_memory: Of one GPU, in bytes, > 0.

    """

    def __init__(self, module: StapoModule, data: RolloutDataModule, hardware: Hardware, gpu_memory: int) -> None:
        self.module = module
        self.data = data
        self.hardware = hardware
        self.gpu_memory = gpu_memory
        self.sharding: Sharding = (module.sharding or Sharding()).under(hardware.precision)
        self.config: Any = AutoConfig.from_pretrained(resolve_policy(module.policy_name))
        self.text_config: Any = self.config.get_text_config()

    # ---- sizes ------------------------------------------------------------------------------------------------------

    @cached_property
    def plan(self) -> Plan:
        """The derived sizes."""
        return self.module.plan()

    @property
    def completions(self) -> int:
        """Of one rank in one update."""
        return self.plan.prompts_per_update // self.hardware.world_size * self.plan.group_size

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return self.plan.max_prompt_tokens + self.plan.max_new_tokens

    @property
    def sequences(self) -> int:
        """Of the longest sequences, those that share a micro-batch."""
        return max(1, min(self.completions, self.plan.tokens_per_micro_batch // self.longest))

    @property
    def micro_batches(self) -> int:
        """Of one rank in one update, at most."""
        return math.ceil(self.completions / self.sequences)

    def size_lines(self) -> list[str]:
        """What is one rollout, one update, one micro-batch."""
        rollout = self.plan.prompts_per_batch // self.hardware.world_size * self.plan.group_size
        return [
            *self.plan.lines(),
            f"          at most {self.completions * self.longest:,} tokens per update in {self.micro_batches}"
            f" micro-batch{'es' if self.micro_batches > 1 else ''} of {self.sequences} x {self.longest:,};"
            f" {rollout:,} completions per rollout",
        ]

    # ---- the model --------------------------------------------------------------------------------------------------

    @cached_property
    def policy(self) -> PreTrainedModel:
        """The policy on the meta device, adapted and sharded as the run will."""
        model, adapter = meta_model(self.config, self.hardware.weights), self.module.adapter
        return self._sharded(model if adapter is None else add_adapter(model, adapter, self.module.policy_name))

    def _sharded(self, model: PreTrainedModel) -> PreTrainedModel:
        if self.hardware.strategy == "sharded":
            shard(model, init_device_mesh("cpu", (self.hardware.world_size,)), self.sharding)
        return model

    @property
    def _compute_dtype(self) -> torch.dtype:
        """Of the weights as the layers get them."""
        gathered = self.hardware.strategy == "sharded" and self.sharding.gathered == "bfloat16"
        return torch.bfloat16 if gathered else self.hardware.weights

    @cached_property
    def activations(self) -> Activations:
        """Of one forward."""
        return count_activations(self.config, self._compute_dtype, self.hardware.autocast, self.module.attention)

    # ---- what lies in memory ----------------------------------------------------------------------------------------

    @cached_property
    def rows(self) -> list[Row]:
        """Every need, those that are counted first."""
        with fake_ranks(self.hardware.world_size):
            return [*self._states(), *self._collectives(), *self._update(), *self._rollout(), self._reserved()]

    def _states(self) -> list[Row]:
        """Parameters, gradients, optimiser state and reference, as they lie between forwards."""
        trained = [p for p in self.policy.parameters() if p.requires_grad]
        sharded, offloaded = self.hardware.strategy == "sharded", self._offloaded
        more = "shard the policy over several GPUs (configs/scale/fsdp.yaml)"
        if sharded:
            more = "raise trainer.num_nodes, or set model.sharding.cpu_offload=true"
        parameters = Need("parameters", local_bytes(self.policy.parameters()), more)
        gradients = Need("gradients", local_bytes(trained), more)
        state = Need("optimiser state", optimizer_bytes(self.module.optimizer, trained), more)
        rows = [
            Row(parameters, on_host=offloaded),
            Row(gradients, ("update", "step"), on_host=offloaded),
            Row(state, on_host=offloaded),
        ]
        if self.hardware.gpu and not offloaded:
            # The optimisers of torch take all parameters at once on a GPU, and one after the other elsewhere.
            rows.append(Row(Need("optimiser's own copies", gradients.size, more), ("step",), estimate=True))
        if self.module.needs_reference and self.module.adapter is None:
            reference = local_bytes(self._sharded(freeze(meta_model(self.config, self.hardware.weights))).parameters())
            change = "set model.log_kl=false" if not self.module.kl_coef else "set model.kl_coef=0"
            rows.append(Row(Need("reference", reference, change), on_host=offloaded))
        return rows

    @property
    def _offloaded(self) -> bool:
        return self.hardware.strategy == "sharded" and bool(self.sharding.cpu_offload)

    def _collectives(self) -> list[Row]:
        """What DDP and FSDP2 hold of whole tensors."""
        trained = sum(p.numel() for p in self.policy.parameters() if p.requires_grad)
        if self.hardware.strategy == "ddp":
            # Lightning leaves gradient_as_bucket_view off: gradients are copied into the buckets that are sent.
            buckets = Need("buckets of gradients", trained * self.hardware.weights.itemsize)
            return [Row(buckets, ("rollout", "update", "step"), True)]
        if self.hardware.strategy == "single":
            return []
        outer, inner = group_sizes(self.policy)
        width, largest = self._compute_dtype.itemsize, max(inner, default=0)
        if self.sharding.reshard_after_forward:
            # The outermost group stays; one group is at work, the next is fetched, and a buffer receives it.
            gathered = Need("gathered weights", (outer + sum(sorted(inner)[-3:])) * width)
        else:
            change = "set model.sharding.reshard_after_forward=true"
            gathered = Need("gathered weights", (outer + sum(inner) + largest) * width, change)
        rows = [Row(gathered, ("rollout", "update"), True)]
        if self.micro_batches > 1 and self.sharding.reduce == "once":
            change = "set model.sharding.reduce=every_pass, or raise model.tokens_per_micro_batch or trainer.num_nodes"
            whole = Need(f"whole gradients of {self.micro_batches} micro-batches", trained * REDUCED, change)
            rows.append(Row(whole, ("update",), True))
        # Gradients of the group at work as they come, in float32, and as they are sent.
        sent = Need("gradients being reduced", max(largest, outer) * (width + 2 * REDUCED))
        return [*rows, Row(sent, ("update",), True)]

    def _update(self) -> list[Row]:
        found, layers = self.activations, self.activations.layers
        rows = []
        if found.constant:
            rows.append(Row(Need("bf16 copies of the weights (autocast)", found.constant), ("update",), True))
        if self.module.activation_checkpointing:
            kept = found.checkpointed(self.sequences, self.longest)
            change = (
                "lower model.tokens_per_micro_batch" if self.sequences > 1 else "lower data.sampling.max_new_tokens"
            )
        else:
            kept, change = found.whole(self.sequences, self.longest), "set model.activation_checkpointing=true"
        rows.append(Row(Need("activations", kept, change), ("update",), True))
        # While a layer's backward runs, gradients of about all that it kept.
        working = found.whole(self.sequences, self.longest) // layers
        rows.append(Row(Need("gradients of one layer's activations", working, change), ("update",), True))
        emitted = self.sequences * self.plan.max_new_tokens
        chunk = scoring_bytes(
            emitted,
            self.text_config.vocab_size,
            self.text_config.hidden_size,
            (self.hardware.autocast or self._compute_dtype).itemsize,
            self._compute_dtype.itemsize,
            self.hardware.device_type,
        )
        rows.append(Row(Need("logits chunk, gradient of the head", chunk), ("update",), True))
        return rows

    def _rollout(self) -> list[Row]:
        rollout = self.plan.prompts_per_batch // self.hardware.world_size * self.plan.group_size
        load = RolloutLoad(
            completions=rollout,
            group_size=self.plan.group_size,
            cache_bytes=cache_bytes(self.config, self._compute_dtype, self.hardware.autocast, self.longest),
            layers=self.text_config.num_hidden_layers,
            vocab_size=self.text_config.vocab_size,
            gpu_memory=self.gpu_memory,
        )
        return [Row(need, PHASES if need.always else ("rollout",)) for need in self.data.engine.needs(load)]

    def _reserved(self) -> Row:
        return Row(Need("CUDA, NCCL, gaps (assumed)", RESERVED if self.hardware.gpu else 0), PHASES, True)

    # ---- the result -------------------------------------------------------------------------------------------------

    def total(self, phase: str, on_host: bool = False) -> int:
        """Bytes at the peak of a phase."""
        return sum(row.need.size for row in self.rows if phase in row.phases and row.on_host == on_host)

    def lines(self) -> list[str]:
        """The report."""
        rows = self.rows
        count = sum(p.numel() for p in self.policy.parameters())
        hardware = self.hardware
        split = {
            "single": "one rank",
            "ddp": f"a copy on each of {hardware.world_size} ranks",
            "sharded": f"sharded over {hardware.world_size} ranks",
        }[hardware.strategy]
        activations = "input of each layer + all of one layer" if self.module.activation_checkpointing else "all layers"
        return [
            f"policy    {self.module.policy_name}: {count:,} parameters, {split}",
            *self.size_lines(),
            "",
            f"memory of one rank, its longest case ({human_bytes(self.gpu_memory)} a GPU; ~ is an estimate)",
            *_table(rows, [(phase, self.total(phase)) for phase in PHASES]),
            *([f"on the host: {human_bytes(self.total('step', on_host=True))} a rank"] if self._offloaded else []),
            f"activations: {activations}, {human_bytes(self.activations.per_token)} a token without checkpointing and"
            f" {human_bytes(self.activations.hidden * self.activations.layers)} with; counted on a forward without"
            " memory",
        ]

    def problems(self) -> list[str]:
        """What does not fit, with the options that would change most."""
        found = []
        for phase in PHASES:
            total = self.total(phase)
            if total > self.gpu_memory:
                there = [row.need for row in self.rows if phase in row.phases and not row.on_host]
                largest = sorted((n for n in there if n.change), key=lambda need: -need.size)[:3]
                found.append(
                    f"{phase}: {human_bytes(total)} do not fit into the {human_bytes(self.gpu_memory)} of a GPU. "
                    + "; ".join(f"{need.what} {human_bytes(need.size)}: {need.change}" for need in largest)
                )
        return found


def _table(rows: Sequence[Row], totals: Sequence[tuple[str, int]]) -> list[str]:
    width = max(len(row.need.what) for row in rows) + 2
    lines = [" " * width + "".join(f"{phase:>13}" for phase, _ in totals)]
    for row in rows:
        mark = "~" if row.estimate else ""
        cells = [f"{mark}{human_bytes(row.need.size)}" if phase in row.phases else "" for phase, _ in totals]
        lines.append(f"{row.need.what:<{width}}" + "".join(f"{cell:>13}" for cell in cells) + " host" * row.on_host)
    return [*lines, f"{'sum':<{width}}" + "".join(f"{human_bytes(total):>13}" for _, total in totals)]


class PlanningTrainer(Trainer):
    """Lightning's Trainer with the subcommand `plan`.

    Attributes:
        planned: What the last `plan` found; None where none was made.

    """

    planned: DryRun | None = None

    def plan(
        self,
        model: StapoModule,
        datamodule: RolloutDataModule,
        gpu_memory: str = "80GiB",
        ckpt_path: str | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """Checks the configuration of a fit and prints what it needs in memory, without GPUs, weights or data.

        Takes every argument of `fit`; model.policy may be a folder with nothing but config.json.

        Args:
            model: The module.
            datamodule: The datamodule.
            gpu_memory: Memory of one GPU, such as 80GiB or 96GB.
            ckpt_path: Without effect, so that the config.yaml of a run can be planned again.
            weights_only: Without effect, as above.

        Raises:
            ConfigError: What keeps `fit` from starting on that hardware.
            DoesNotFit: After the report: what needs more memory than there is.

        """
        strategy = self.strategy
        assert isinstance(strategy, PlannedStrategy)
        # Nothing is attached otherwise, as no loop is run; with both the module's checks are those of a fit.
        model.trainer = datamodule.trainer = self
        self.datamodule = datamodule
        found = [*strategy.problems, *model.problems("fit")]
        try:
            memory = parse_bytes(gpu_memory)
        except ValueError as error:
            found.append(f"gpu_memory: {error}")
        if found:
            raise ConfigError(list(dict.fromkeys(found)))
        self.planned = run = DryRun(model, datamodule, strategy.hardware, memory)
        print("\n".join(run.lines()), flush=True)
        problems = run.problems()
        if problems:
            raise DoesNotFit("\n".join(["this run does not fit:", *(f"  * {problem}" for problem in problems)]))
        print("it fits")
