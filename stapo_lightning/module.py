"""StapoModule: the policy, its frozen reference, and Algorithm 1 of the paper as `training_step`.

Departures from the paper's recipe, all optional and off by default: (1) dual clip, (2) KL to a reference,
(3) aggregations other than the token mean.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn
from torch import Tensor
from torch.optim import AdamW, Optimizer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from stapo_lightning.adapters import (
    LoRA,
    adapter_off,
    add_adapter,
    checkpoint_problems,
    describe,
    has_adapter,
    keep_only_adapters,
)
from stapo_lightning.batch import EvalBatch, LossOutput, RolloutBatch, Selection, TokenScores, UpdateRecord, pad_rows
from stapo_lightning.checkpoint_io import AtomicCheckpointIO
from stapo_lightning.distributed import Ranks
from stapo_lightning.errors import ConfigError, EngineMismatchError, NonFiniteError, bounded, raise_problems
from stapo_lightning.evaluation import Evaluation, summary
from stapo_lightning.hardware import real_strategy
from stapo_lightning.metrics import ImportanceMetrics, MismatchMetrics, ProblemTable, RolloutMetrics, UpdateMetrics
from stapo_lightning.microbatch import Passes, micro_batches, packed_micro_batches, passes
from stapo_lightning.models import (
    backbone,
    causal_lm_shapes,
    check_output_head,
    checkpoint_activations,
    context_length,
    end_token_ids,
    freeze,
    load_causal_lm,
    load_tokenizer,
    output_head,
    packed_backbone,
    policy_problems,
    resolve_policy,
    weights_identity,
)
from stapo_lightning.objective import (
    K3,
    S2T,
    Aggregation,
    Clipped,
    Importance,
    KLEstimator,
    Surrogate,
    TokenMean,
    TokenSelector,
    policy_loss,
)
from stapo_lightning.plan import Plan
from stapo_lightning.schedule import ConstantWithWarmup, Schedule
from stapo_lightning.scoring import score
from stapo_lightning.sharded_loading import load_sharded
from stapo_lightning.sharding import Sharding, clip_gradients, is_sharded, join, reduce_gradients, within
from stapo_lightning.states import States, joined, shared, shares_prompts
from stapo_lightning.strategy import strategy_problems

# Kept over a resume: updates skipped, skipped in a row, and the update of the last validation that was finished.
_COUNTERS = ("skipped_updates", "skipped_in_a_row", "validated_update")

PROGRESS_BAR = ("reward/mean", "policy/entropy", "s2t/silenced_fraction")


@dataclass
class _Outcome:
    """What one optimiser step leaves behind to be measured; shapes as in UpdateRecord and LossOutput."""

    record: UpdateRecord
    clipped_low: Tensor
    kl: Tensor | None
    loss: float
    grad_norm: float
    score_seconds: float
    update_seconds: float


class StapoModule(L.LightningModule):
    """Trains a causal language model with STAPO (arXiv 2602.15620) or one of its baselines.

    The objective is four choices that do not depend on each other: the advantage estimator (in the datamodule),
    `surrogate`, `selector` and `aggregation`.

    Args:
        policy: Folder or hub id of a Hugging Face causal language model with its tokenizer.
        surrogate: Per-token loss; default clip range [0.8, 1.28].
        selector: Which tokens are silenced; default S2T with tau_p = 0.002, q = 0.75.
        aggregation: How tokens become one loss; default the token mean over the whole optimiser step.
        kl_coef: Weight of the KL to the frozen initial policy, >= 0 (paper: 0).
        kl: Estimator of that KL; default k3.
        log_kl: Load the reference and log policy/kl_ref even with kl_coef 0; costs a second copy of the weights, or
            none with an `adapter`.
        importance: Weights that correct for an engine whose probabilities are not the policy's, such as
            `TruncatedImportance`; each rollout is scored once more before its first update. Null leaves it out.
        max_logprob_diff: Largest rollout/logprob_diff_mean, nats, > 0: an engine further from the policy than this
            samples from stale weights or computes something else, and stops the run. `.inf` only measures.
        optimizer: Optimiser of the policy's parameters; default AdamW with the paper's learning rate 1e-6.
        schedule: Learning-rate factor over updates; default 10 warm-up updates, then constant.
        max_grad_norm: Gradients are scaled down to this global L2 norm; 0 does not clip (paper: 1.0).
        prompts_per_update: Prompts of one optimiser step over all ranks; divides data.prompts_per_batch (paper: 64).
        tokens_per_micro_batch: Tokens, prompt and padding included, of one forward and backward on each rank. Changes
            memory and speed, never the gradient.
        packing: Micro-batches without padding, all their sequences behind each other. Null: where `attention` is flash
            attention, which skips from one sequence to the next; others would compute a mask over all pairs of tokens.
        share_prompts: In an update, read each prompt once for the completions of it that share a micro-batch, wherever
            that saves a tenth of the tokens. Without effect where `packing`, `activation_checkpointing` or `compile`
            is on, on sharded weights, and on layers that do not attend to the whole sequence. Changes time, never the
            gradient.
        activation_checkpointing: Keep only each decoder layer's input for the backward and compute the layer again:
            less memory, about a third more time for an update.
        compile: Compile the policy's forward and backward with torch.compile for updates; rollouts stay as they are.
            The first update of each kind takes minutes.
        max_skipped_updates: Updates with a non-finite loss or gradient are skipped; so many in a row stop the run.
        attention: Attention implementation of transformers: "sdpa", "eager", "flash_attention_2".
        sharding: How the ranks share policy and reference under `trainer.strategy: fsdp2`; null there is the default
            `Sharding`, and with other strategies every rank holds them whole.
        adapter: Train an adapter beside the policy's weights instead of the weights themselves. Checkpoints hold the
            adapter alone, and the reference is the policy without it. Null trains all weights.

    """

    def __init__(
        self,
        policy: str,
        surrogate: Surrogate | None = None,
        selector: TokenSelector | None = None,
        aggregation: Aggregation | None = None,
        kl_coef: float = 0.0,
        kl: KLEstimator | None = None,
        log_kl: bool = False,
        importance: Importance | None = None,
        max_logprob_diff: float = 0.1,
        optimizer: OptimizerCallable = lambda params: AdamW(params, lr=1e-6),
        schedule: Schedule | None = None,
        max_grad_norm: float = 1.0,
        prompts_per_update: int = 64,
        tokens_per_micro_batch: int = 16384,
        packing: bool | None = None,
        share_prompts: bool = True,
        activation_checkpointing: bool = False,
        compile: bool = False,
        max_skipped_updates: int = 10,
        attention: str = "sdpa",
        sharding: Sharding | None = None,
        adapter: LoRA | None = None,
    ) -> None:
        super().__init__()
        # No save_hyperparameters(): it would restore old values over the flags of a resumed run.
        self.automatic_optimization = False
        self.policy_name = policy
        self.surrogate = surrogate or Clipped()
        self.selector = selector or S2T()
        self.aggregation = aggregation or TokenMean()
        self.kl_coef = kl_coef
        self.kl = kl or K3()
        self.log_kl = log_kl
        self.importance = importance
        self.max_logprob_diff = max_logprob_diff
        self.optimizer = optimizer
        self.schedule = schedule or ConstantWithWarmup()
        self.max_grad_norm = max_grad_norm
        self.prompts_per_update = prompts_per_update
        self.tokens_per_micro_batch = tokens_per_micro_batch
        self.packing = attention.startswith("flash") if packing is None else packing
        self.share_prompts = share_prompts
        self.activation_checkpointing = activation_checkpointing
        self.compile_policy = compile
        self.max_skipped_updates = max_skipped_updates
        self.attention = attention
        self.sharding = sharding
        self.adapter = adapter

        self.policy: PreTrainedModel | None = None
        self.reference: list[PreTrainedModel] = []  # in a list: outside the module tree and so outside every checkpoint
        self.ranks = Ranks()
        # For callbacks that ask the policy about a selection: called with mini-batch, scores, selection and the number
        # of the update (from 1) on every rank, before the update moves the weights.
        self.selection_observers: list[Callable[[RolloutBatch, TokenScores, Selection, int], None]] = []
        self.rollout_metrics = RolloutMetrics()
        self.update_metrics = UpdateMetrics()
        self.mismatch_metrics = MismatchMetrics()
        self.importance_metrics = ImportanceMetrics()
        self.problem_tables: torch.nn.ModuleList = torch.nn.ModuleList()
        self.skipped_updates = 0
        self.skipped_in_a_row = 0
        self.validated_update = 0
        # Factor on the learning rate beside the schedule's. A callback may set it, and keeps it over a resume.
        self.lr_scale = 1.0
        self.loaded_update = 0
        self.eval_results: dict[str, float] = {}
        self.eval_values: list[tuple[Evaluation, Tensor]] = []
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._states: States | None = None
        self._warned_of_length = False
        keep_only_adapters(self)

    # ---- setup ------------------------------------------------------------------------------------------------------

    def configure_callbacks(self) -> list[L.Callback]:
        """Adds none. It is the first hook of a run, ahead of Lightning's own check, whose error names no way out.

        Raises:
            ConfigError: The Trainer is asked to do what belongs to this module, as optimisation is manual.

        """
        found = []
        if self.trainer.gradient_clip_val:
            found.append(
                f"trainer.gradient_clip_val={self.trainer.gradient_clip_val}: leave it out and set model.max_grad_norm"
            )
        if self.trainer.accumulate_grad_batches != 1:
            found.append(
                f"trainer.accumulate_grad_batches={self.trainer.accumulate_grad_batches}: leave it out;"
                " model.prompts_per_update sets the size of an update, model.tokens_per_micro_batch how it is cut"
            )
        if found:
            raise ConfigError(found)
        return []

    def setup(self, stage: str) -> None:
        """Checks the whole configuration before any weights are loaded.

        Raises:
            ConfigError: With every problem at once.

        """
        found = self.problems(stage)
        if found:
            raise ConfigError(list(dict.fromkeys(found)))
        if type(self.trainer.strategy.checkpoint_io) is TorchCheckpointIO:
            self.trainer.strategy.checkpoint_io = AtomicCheckpointIO()

    def plan(self) -> Plan:
        """The derived sizes of this run."""
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        return Plan(
            world_size=self.trainer.world_size,
            prompts_per_batch=data.prompts_per_batch,
            prompts_per_update=self.prompts_per_update,
            group_size=data.group_size,
            max_prompt_tokens=data.max_prompt_tokens,
            max_new_tokens=data.sampling.max_new_tokens,
            tokens_per_micro_batch=self.tokens_per_micro_batch,
        )

    def problems(self, stage: str) -> list[str]:
        """Everything that is wrong with this configuration for `stage`, one sentence each; no weights are loaded."""
        found = policy_problems(self.policy_name) + self._sharding_problems()
        found += self.adapter.problems() if self.adapter is not None else []
        data = getattr(self.trainer, "datamodule", None)
        if data is None:
            found.append("no datamodule: pass a RolloutDataModule to trainer.fit(module, datamodule=...)")
            return found
        found += data.problems(self.trainer.world_size)
        found += self.plan().problems() if stage == "fit" else []
        limit = context_length(self.policy_name) if not found else None
        for option, sampling in data.samplings(stage):
            longest = data.max_prompt_tokens + sampling.max_new_tokens
            if limit is not None and longest > limit:
                found.append(
                    f"data.max_prompt_tokens={data.max_prompt_tokens} plus {option}.max_new_tokens="
                    f"{sampling.max_new_tokens} make {longest} tokens, but the policy reads at most {limit}"
                    " (max_position_embeddings); lower one of them"
                )
        if stage != "fit":
            return found
        found += self.surrogate.problems() + self.selector.problems() + self.aggregation.problems()
        found += self.importance.problems() if self.importance is not None else []
        found += bounded("model.kl_coef", self.kl_coef, at_least=0)
        found += bounded("model.max_logprob_diff", self.max_logprob_diff, above=0)
        found += bounded("model.max_grad_norm", self.max_grad_norm, at_least=0)
        found += bounded("model.max_skipped_updates", self.max_skipped_updates, at_least=1)
        return found + self._trainer_problems()

    def _sharding_problems(self) -> list[str]:
        name, sharded = real_strategy(self.trainer.strategy)
        if sharded:
            if not self.compile_policy:
                return []
            return ["model.compile=true: not with trainer.strategy=fsdp2 yet; leave one of them out"]
        found = strategy_problems(name)
        if self.sharding is not None and not found:
            found.append(
                f"model.sharding is set, but trainer.strategy is {name}, where every rank holds the whole policy;"
                " write `trainer.strategy: fsdp2`, or leave model.sharding out"
            )
        return found

    def _trainer_problems(self) -> list[str]:
        found = []
        if self.trainer.precision in ("16-mixed", "16-true"):
            found.append(
                f"trainer.precision={self.trainer.precision}: float16 needs loss scaling, which is not"
                " supported; take bf16-mixed"
            )
        if self.trainer.world_size > 1 and self.trainer._accelerator_connector.use_distributed_sampler:
            found.append(
                "trainer.use_distributed_sampler=true: the prompts are already split over ranks; set it to false"
            )
        updates = self.plan().updates_per_rollout if not self.plan().problems() else 1
        if self.trainer.max_steps > 0 and self.trainer.max_steps % updates:
            found.append(
                f"trainer.max_steps={self.trainer.max_steps}: a run ends between rollouts; make it a multiple of the"
                f" {updates} updates per rollout"
            )
        for callback in self.trainer.checkpoint_callbacks:
            every = getattr(callback, "_every_n_train_steps", 0)
            if every and every % updates:
                found.append(
                    f"ModelCheckpoint.every_n_train_steps={every}: checkpoints are taken between rollouts;"
                    f" make it a multiple of the {updates} updates per rollout"
                )
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            # A callback that has options to check says here what is wrong with them, in one error with all the rest.
            found += callback.problems(self.trainer) if hasattr(callback, "problems") else []
        return found

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The policy's tokenizer, loaded at first use."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self.policy_name)
        return self._tokenizer

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Token ids that end a completion."""
        return tuple(end_token_ids(self._loaded_policy, self.tokenizer))

    @property
    def pad_id(self) -> int:
        """Filler on the right of a completion; masks come from lengths, so any id will do."""
        return self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else self.end_ids[0]

    @property
    def _loaded_policy(self) -> PreTrainedModel:
        if self.policy is None:
            raise RuntimeError("the policy is loaded in configure_model; it is there from trainer.fit/validate/test on")
        return self.policy

    def weights_identity(self) -> tuple[str, str]:
        """A short name of the policy's weights, and what tells them from all others."""
        if self.trainer.ckpt_path is None and self.global_step > 0:
            return f"step={self.global_step}", str(time.time_ns())  # trained in this process and nowhere on disk
        return weights_identity(str(self.trainer.ckpt_path or resolve_policy(self.policy_name)))

    def configure_model(self) -> None:
        """Loads the weights; a second stage of the same process keeps those that are there."""
        if self.policy is None:
            self.policy = self._load(
                self._load_policy, lambda: self._adapted(causal_lm_shapes(self.policy_name, self.attention))
            )
            if self.activation_checkpointing:
                checkpoint_activations(self.policy)
            self._states = self._states_of(self.policy, self.compile_policy)

    @property
    def needs_reference(self) -> bool:
        """Whether updates need the frozen initial policy."""
        return self.kl_coef > 0 or self.log_kl

    def _load_policy(self) -> PreTrainedModel:
        policy = self._adapted(load_causal_lm(self.policy_name, self.attention))
        check_output_head(policy, self.policy_name)
        return policy

    def _adapted(self, policy: PreTrainedModel) -> PreTrainedModel:
        return policy if self.adapter is None else add_adapter(policy, self.adapter, resolve_policy(self.policy_name))

    def _load(self, load: Callable[[], PreTrainedModel], shapes: Callable[[], PreTrainedModel]) -> PreTrainedModel:
        """The model of `load`, or this rank's share of it; `shapes` is the same on the meta device."""
        mesh = self.device_mesh  # of ShardedStrategy alone
        if mesh is None:
            return load()
        sharding = (self.sharding or Sharding()).under(self.trainer.precision)
        return load_sharded(load, shapes, mesh["data_parallel"], sharding)

    def _states_of(self, model: PreTrainedModel, compiled: bool = False) -> States:
        through = packed_backbone(model) if self.packing else backbone(model)
        if compiled:
            through = torch.compile(through, dynamic=True)  # shapes differ from one micro-batch to the next
        states = joined(through)
        # Sharded, a forward is a collective, and how many a rank makes would depend on its completions.
        alone = self.packing or self.compile_policy or self.activation_checkpointing or is_sharded(model)
        return shared(model, states) if self.share_prompts and not alone and shares_prompts(model) else states

    def configure_optimizers(self) -> Optimizer:
        """The configured optimiser over the policy's trainable parameters."""
        optimizer = self.optimizer([p for p in self._loaded_policy.parameters() if p.requires_grad])
        self._configured = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        return optimizer

    def on_fit_start(self) -> None:
        """Loads the reference where it is used, and prints the derived sizes."""
        if self.needs_reference and not self.reference:
            self.reference = [self._loaded_policy if has_adapter(self._loaded_policy) else self._load_reference()]
        self._print_plan()

    def _load_reference(self) -> PreTrainedModel:
        reference = self._load(
            lambda: freeze(load_causal_lm(self.policy_name, self.attention)),
            lambda: freeze(causal_lm_shapes(self.policy_name, self.attention)),
        )
        return reference if is_sharded(reference) else reference.to(self.device)

    @rank_zero_only
    def _print_plan(self) -> None:
        policy = self._loaded_policy
        lines = self.plan().lines() + ([describe(policy)] if has_adapter(policy) else [])
        print("\n".join(lines), flush=True)

    def on_train_start(self) -> None:
        """Puts the configured optimiser settings over those that a checkpoint restored: flags given on resume count.

        Then makes up for a validation that a kill cut off: the checkpoint of an update is taken before its validation,
        and Lightning takes a validation that was due for one that was done.
        """
        self._use_configured()
        if self.trainer.ckpt_path and self.validated_update != self.global_step and self._validation_is_due():
            self.trainer.validating = True
            self.trainer.fit_loop.epoch_loop.val_loop.run()
            self.trainer.training = True

    def _use_configured(self) -> None:
        for group, configured in zip(self._param_groups, self._configured, strict=True):
            group.update(configured)

    def return_to(self, path: str) -> int:
        """Puts weights and optimiser state of a checkpoint into the running fit; every rank has to call it.

        Updates, prompts and the learning-rate schedule go on from where the run is: what follows is sampled from new
        prompts, and no update is counted twice.

        Args:
            path: A checkpoint of this run, with the state of its optimiser.

        Returns:
            The update it was taken at.

        """
        strategy = self.trainer.strategy
        checkpoint = strategy.load_checkpoint(path)
        strategy.load_model_state_dict(checkpoint, strict=self.strict_loading)
        strategy.load_optimizer_state_dict(checkpoint)
        self._use_configured()
        self.skipped_in_a_row = 0
        return int(checkpoint["global_step"])

    def _validation_is_due(self) -> bool:
        loop = self.trainer.fit_loop
        fetcher = loop._data_fetcher
        return self.trainer.enable_validation and fetcher is not None and loop.epoch_loop._should_check_val_fx(fetcher)

    @property
    def _optimizer(self) -> Any:
        return self.optimizers()

    @property
    def _param_groups(self) -> list[dict[str, Any]]:
        # Of the bare optimiser: Lightning's wrapper keeps the groups from before a checkpoint was loaded.
        return self.trainer.optimizers[0].param_groups

    # ---- Algorithm 1 ------------------------------------------------------------------------------------------------

    def training_step(self, batch: RolloutBatch, batch_idx: int) -> Mapping[str, Any]:
        """Algorithm 1 of the paper from line 5 on; the groups were sampled and scored by the datamodule.

        Returns:
            {"record": UpdateRecord} over all rows of `batch`, for callbacks.

        """
        started = time.perf_counter()
        rollout = self._measure_rollout(batch)
        if self.importance is not None:
            batch, weights = self._weighted(batch, self.importance)
            rollout |= weights
        completions = self.prompts_per_update // self.ranks.size * batch.group_size
        records: list[UpdateRecord] = []
        latest: dict[str, float] = {}
        for mini_batch in batch.mini_batches(completions):
            # The first mini-batch meets the policy that sampled it.
            outcome = self._update(mini_batch, mini_batch.recorded_scores if not records else None)
            metrics = rollout | self._measure_update(mini_batch, outcome, first=not records)
            metrics["time/step_s"] = batch.rollout_seconds + batch.reward_seconds + time.perf_counter() - started
            records.append(outcome.record)
            latest |= metrics
            if self.global_step % self._log_interval == 0:
                self._to_loggers(metrics)
        self._to_callbacks(latest)
        return {"record": _join(records)}

    def _update(self, batch: RolloutBatch, known: TokenScores | None) -> _Outcome:
        """One optimiser step on one mini-batch.

        Args:
            batch: The mini-batch.
            known: Scores of the current policy that the engine took while it sampled; None to compute them here.

        """
        started = time.perf_counter()
        # Where the advantage is 0, loss and gradient are: those rows are scored at most. One pass is made in any case,
        # so that there is a gradient of 0 where nothing moves.
        moving = (batch.advantages != 0) | (self.kl_coef > 0)
        gradient = self._passes(batch, moving, at_least=1)
        rest = self._passes(batch, ~moving)

        # Current-policy statistics of every token, without gradient. What fits in one pass is scored by the very
        # forward whose graph the backward uses.
        graph = self._score(batch.rows(gradient.rows[0])) if len(gradient.rows) == 1 else None
        scores = self._current_scores(batch, graph, gradient, rest) if known is None else known
        scored = time.perf_counter()

        # I_S2T over the whole mini-batch and all ranks, then one global denominator.
        selection = self.selector(batch, scores, self.ranks, self.global_step)
        for observe in self.selection_observers:
            observe(batch, scores, selection, self.global_step + 1)
        keep = batch.completion_mask & ~selection.silenced
        weights = self.aggregation(keep, self.ranks)
        weights = weights if batch.importance is None else weights * batch.importance

        outputs = []
        for number, rows in enumerate(gradient.rows):
            last = number == len(gradient.rows) - 1
            reduce_gradients(self._loaded_policy, last)
            with self._optimizer.toggle_model(sync_grad=last):
                log_probs = self._score(batch.rows(rows)).log_probs if graph is None else graph.log_probs
                output = self._loss(batch.rows(rows), log_probs, weights[rows] * (number < gradient.own))
                # The strategy averages gradients over ranks; the loss is a sum over them.
                self.manual_backward(output.loss * self.ranks.size)
            outputs.append(output)

        del outputs[gradient.own :]
        with torch.no_grad():
            resting = [self._loss(batch.rows(rows), scores.rows(rows).log_probs, weights[rows]) for rows in rest.rows]
        outputs += resting[: rest.own]
        loss = float(self.ranks.sum(torch.stack([output.loss.detach().double() for output in outputs]).sum()))
        grad_norm = self._step(loss)
        cut = gradient.micro_batches + rest.micro_batches
        return self._outcome(
            scores, selection, outputs, cut, loss, grad_norm, scored - started, time.perf_counter() - started
        )

    def _weighted(self, batch: RolloutBatch, importance: Importance) -> tuple[RolloutBatch, dict[str, float]]:
        """The rollout with the policy's own old log-probs beside the engine's, each token weighted by their ratio.

        All of it is scored before the first update: later mini-batches meet a policy that has moved.
        """
        everything = self._passes(batch, torch.ones_like(batch.truncated))
        scores = self._current_scores(batch, None, everything, Passes([], 0))
        output = importance((scores.log_probs - batch.old_log_probs).masked_fill(~batch.completion_mask, 0.0))
        self.importance_metrics.update(batch.completion_mask, output)
        metrics = self.importance_metrics.compute()
        self.importance_metrics.reset()
        weighted = replace(
            batch,
            engine_log_probs=batch.old_log_probs,
            old_log_probs=scores.log_probs,
            old_entropy=scores.entropy,
            old_collision=scores.collision,
            importance=output.weights,
        )
        return weighted, metrics

    def _passes(self, batch: RolloutBatch, chosen: Tensor, at_least: int = 0) -> Passes:
        rows = chosen.nonzero().squeeze(1)
        lengths, budget = batch.sequence_lengths, self.tokens_per_micro_batch
        longest = int(lengths.max())
        if longest > budget and not self._warned_of_length:
            self._warned_of_length = True
            rank_zero_warn(
                f"A sequence of {longest:,} tokens is over model.tokens_per_micro_batch={budget:,}: it goes alone"
                " and takes more memory than the budget allows. Raise it to the longest sequence."
            )
        cut = packed_micro_batches if self.packing else micro_batches
        return passes(rows, lengths, budget, self.ranks, at_least, cut)

    def _current_scores(
        self, batch: RolloutBatch, graph: TokenScores | None, gradient: Passes, rest: Passes
    ) -> TokenScores:
        """Scores of all rows, in their order; `graph` is those of the only gradient pass, if it has been made."""
        with torch.no_grad():
            done = [graph.detach()] if graph is not None else [self._score(batch.rows(r)) for r in gradient.rows]
            done = done[: gradient.own] + [self._score(batch.rows(r)) for r in rest.rows][: rest.own]
        return _in_order(done, gradient.micro_batches + rest.micro_batches)

    def _score(self, batch: RolloutBatch) -> TokenScores:
        policy = self._loaded_policy
        states = self._states or self._states_of(policy, self.compile_policy)  # a user's own policy has none yet
        return _scores(batch, policy, states)

    def _loss(self, batch: RolloutBatch, log_probs: Tensor, weights: Tensor) -> LossOutput:
        ref_log_probs = None
        if self.reference:
            reference = self.reference[0]
            with torch.no_grad(), adapter_off(reference):
                ref_log_probs = _scores(batch, reference, self._states_of(reference)).log_probs
        return policy_loss(batch, log_probs, weights, self.surrogate, ref_log_probs, self.kl, self.kl_coef)

    def gradient(self, batch: RolloutBatch, weights: Tensor) -> Tensor:
        """The gradient of this loss under other weights, over all ranks; weights and `.grad` of the policy stay.

        For callbacks that ask which tokens move the policy. Every rank has to call it; not for a sharded policy.

        Args:
            batch: A mini-batch of this rank.
            weights: [N, T] weight of each token's loss, as an `Aggregation` gives it; 0 leaves a token out.

        Returns:
            [p] the trainable parameters' gradients behind each other.

        """
        parameters = [p for group in self._param_groups for p in group["params"]]
        total = torch.zeros(sum(p.numel() for p in parameters), device=self.device)
        chosen = self._passes(batch, (weights != 0).any(1))
        for rows in chosen.rows[: chosen.own]:
            loss = self._loss(batch.rows(rows), self._score(batch.rows(rows)).log_probs, weights[rows]).loss
            found = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
            total += torch.cat([gradient.flatten().float() for gradient in found])
        return self.ranks.sum(total)

    def _step(self, loss: float) -> float:
        """Clips, sets the rate, steps; skips where loss or gradient is not finite. Returns the norm before clipping."""
        optimizer = self._optimizer
        parameters = [p for group in self._param_groups for p in group["params"]]
        norm = clip_gradients(parameters, self.max_grad_norm or math.inf, self.device)
        finite = math.isfinite(norm) and math.isfinite(loss)
        if finite:
            self.skipped_in_a_row = 0
        else:
            # Without gradients the step below changes no parameter and no moment, yet the counters move on alike.
            optimizer.zero_grad(set_to_none=True)
            self.skipped_updates += 1
            self.skipped_in_a_row += 1
        for group, configured in zip(self._param_groups, self._configured, strict=True):
            group["lr"] = configured["lr"] * self.schedule(self.global_step) * self.lr_scale
        optimizer.step()
        # Autocast keeps its narrow copies of weights to the end of the training step: all updates of a rollout.
        torch.clear_autocast_cache()
        optimizer.zero_grad(set_to_none=True)
        if self.skipped_in_a_row >= self.max_skipped_updates:
            raise NonFiniteError(
                f"{self.skipped_in_a_row} updates in a row had a loss ({loss}) or gradient norm ({norm}) that is not"
                f" finite, up to update {self.global_step} (model.max_skipped_updates={self.max_skipped_updates})."
                " Resume from an earlier checkpoint with a lower learning rate (model.optimizer.init_args.lr) or"
                " a smaller model.max_grad_norm; if it happens from the first update on, check trainer.precision"
            )
        return norm

    def _outcome(
        self,
        scores: TokenScores,
        selection: Selection,
        outputs: list[LossOutput],
        cut: list[Tensor],
        loss: float,
        grad_norm: float,
        score_seconds: float,
        update_seconds: float,
    ) -> _Outcome:
        back = torch.cat(cut).argsort()  # from the order of the micro-batches to that of the mini-batch

        def in_order(values: list[Tensor]) -> Tensor:
            return torch.cat(values)[back]

        low = in_order([output.clipped_low for output in outputs])
        high = in_order([output.clipped_high for output in outputs])
        record = UpdateRecord(
            scores=scores,
            silenced=selection.silenced,
            candidates=selection.candidates,
            log_ratio=in_order([output.log_ratio for output in outputs]),
            clipped=low | high,
            updates=(self.global_step, self.global_step),
            tau_h=(float(selection.tau_h),),
        )
        kl = in_order([output.kl for output in outputs if output.kl is not None]) if self.reference else None
        return _Outcome(record, low, kl, loss, grad_norm, score_seconds, update_seconds)

    # ---- measurements -----------------------------------------------------------------------------------------------

    def _measure_rollout(self, batch: RolloutBatch) -> dict[str, float]:
        self.rollout_metrics.update(batch)
        metrics = self.rollout_metrics.compute()
        self.rollout_metrics.reset()
        return metrics

    def _measure_update(self, batch: RolloutBatch, outcome: _Outcome, first: bool) -> dict[str, float]:
        self.update_metrics.update(batch, outcome.record, outcome.clipped_low, outcome.kl)
        metrics = self.update_metrics.compute()
        self.update_metrics.reset()
        if first:  # the policy that is scored is still the one that sampled
            metrics |= self._measure_mismatch(batch, outcome.record)
        if outcome.kl is None:
            del metrics["policy/kl_ref"]
        (tau_h,) = outcome.record.tau_h
        if not math.isnan(tau_h):
            metrics["s2t/tau_h"] = tau_h
        return metrics | {
            "policy/loss": outcome.loss,
            "policy/grad_norm": outcome.grad_norm,
            "policy/lr": self._param_groups[0]["lr"],
            "policy/skipped_steps": float(self.skipped_updates),
            "time/score_s": outcome.score_seconds,
            "time/update_s": outcome.update_seconds,
        }

    def _measure_mismatch(self, batch: RolloutBatch, record: UpdateRecord) -> dict[str, float]:
        self.mismatch_metrics.update(batch, record.log_ratio)
        metrics = self.mismatch_metrics.compute()
        self.mismatch_metrics.reset()
        mean = metrics["rollout/logprob_diff_mean"]
        if not mean <= self.max_logprob_diff:
            raise EngineMismatchError(
                f"rollout/logprob_diff_mean={mean:.3g} in the rollout before update {self.global_step}: the engine's"
                " log-probs of the tokens it sampled are further from the policy's than model.max_logprob_diff="
                f"{self.max_logprob_diff}. Either the engine holds stale or other weights, or it computes the model"
                " differently (its dtype, trainer.precision, quantisation). Where the distance is meant, raise"
                " model.max_logprob_diff and correct for it with model.importance"
            )
        return metrics

    # ---- validate, test, predict ------------------------------------------------------------------------------------

    def on_validation_epoch_start(self) -> None:
        """Empties the tables and wakes the engine."""
        self._empty_tables("validate")
        self._data.wake_engine()

    def on_test_epoch_start(self) -> None:
        """Empties the tables and wakes the engine."""
        self._empty_tables("test")
        self._data.wake_engine()

    def on_predict_epoch_start(self) -> None:
        """Wakes the engine."""
        self._data.wake_engine()

    def validation_step(self, batch: EvalBatch, batch_idx: int) -> None:
        """Enters the problems into the tables."""
        self._enter(batch)

    def test_step(self, batch: EvalBatch, batch_idx: int) -> None:
        """Enters the problems into the tables."""
        self._enter(batch)

    def on_validation_epoch_end(self) -> None:
        """Publishes val/<benchmark>/<decoding>/..."""
        join(self.policy)
        self._data.engine.sleep()
        self._publish("val")

    def on_validation_end(self) -> None:
        """Takes the checkpoint of this update once more, so that it knows of its validation."""
        if self.trainer.state.fn != "fit" or self.trainer.sanity_checking:
            return
        for callback in self.trainer.checkpoint_callbacks:
            path = getattr(callback, "last_model_path", "")
            if path and getattr(callback, "_last_global_step_saved", None) == self.global_step:
                self.trainer.save_checkpoint(path, weights_only=False)

    def on_test_epoch_end(self) -> None:
        """Publishes test/<benchmark>/<decoding>/..."""
        join(self.policy)
        self._data.engine.sleep()
        self._publish("test")

    def on_predict_epoch_end(self) -> None:
        """Waits for the ranks that have more to complete, and puts the engine to sleep."""
        join(self.policy)
        self._data.engine.sleep()

    def predict_step(self, batch: EvalBatch, batch_idx: int) -> EvalBatch:
        """Hands the completions to the prediction writer."""
        return batch

    @property
    def _data(self) -> Any:
        # A RolloutDataModule in practice.
        return self.trainer.datamodule  # type: ignore[attr-defined]

    def _empty_tables(self, stage: str) -> None:
        self.problem_tables = torch.nn.ModuleList(map(ProblemTable, self._data.evaluations(stage))).to(self.device)

    def _enter(self, batch: EvalBatch) -> None:
        tables: Any = self.problem_tables
        for samples in batch.samples:
            key = (batch.prompts[0].source, samples.decoding)
            table = next(t for t in tables if (t.evaluation.benchmark, t.evaluation.decoding) == key)
            table.update(batch.uids, samples)

    def _publish(self, stage: str) -> None:
        tables: Any = self.problem_tables
        # A limit on batches can leave a benchmark out.
        self.eval_values = [(t.evaluation, values) for t in tables if len(values := t.compute())]
        self.eval_results = {f"{stage}/{tag}": value for tag, value in summary(self.eval_values).items()}
        if self.trainer.state.fn == "fit":
            self.validated_update = self.global_step
            self._to_loggers(self.eval_results)
            self._to_callbacks(self.eval_results)
        else:
            # Lightning's own way: it also returns the results.
            self.log_dict(self.eval_results, batch_size=1)

    # ---- logging and state ------------------------------------------------------------------------------------------

    @property
    def _log_interval(self) -> int:
        return max(1, self.trainer.log_every_n_steps)  # type: ignore[attr-defined]

    def _to_loggers(self, metrics: Mapping[str, float]) -> None:
        """Writes metrics at the number of updates done; self.log would count batches, of several updates each."""
        for logger in self.loggers:
            logger.log_metrics(dict(metrics), step=self.global_step)

    def _to_callbacks(self, metrics: Mapping[str, float]) -> None:
        """Hands metrics to callbacks and the progress bar. The values are already the same on every rank."""
        for tag, value in metrics.items():
            self.log(tag, value, logger=False, prog_bar=tag in PROGRESS_BAR, batch_size=1)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds the counters, what the selector remembers, and the adapter's settings."""
        checkpoint["selector"] = self.selector.state_dict()
        checkpoint["stapo"] = {name: getattr(self, name) for name in _COUNTERS}
        checkpoint["adapter"] = asdict(self.adapter) if self.adapter is not None else None

    def check_checkpoint(self, checkpoint: Mapping[str, Any]) -> None:
        """What `on_load_checkpoint` refuses; the sharded strategy asks before it loads weights.

        Args:
            checkpoint: With or without weights.

        Raises:
            ConfigError: Its adapter is not this module's.

        """
        raise_problems(checkpoint_problems(self.adapter, checkpoint.get("adapter")))

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restores the counters and what the selector remembers.

        Raises:
            ConfigError: The checkpoint's adapter is not this module's.

        """
        self.check_checkpoint(checkpoint)
        self.selector.load_state_dict(checkpoint.get("selector", {}))
        self.loaded_update = checkpoint.get("global_step", 0)  # outside of fit the Trainer's own count stays at 0
        for name, value in checkpoint.get("stapo", {}).items():  # absent in checkpoints that other modules saved
            setattr(self, name, value)


def _scores(batch: RolloutBatch, model: PreTrainedModel, states: States) -> TokenScores:
    """`score` through one forward of the whole model, which is where a sharded one gathers its weights."""

    def forward() -> tuple[Tensor, Tensor, Tensor]:
        found = score(batch, states(batch), output_head(model), model.config.vocab_size)
        return found.log_probs, found.entropy, found.collision

    return TokenScores(*within(model, forward))


def _in_order(parts: list[TokenScores], cut: list[Tensor]) -> TokenScores:
    """Scores of the micro-batches back in the order of the mini-batch's rows."""
    back = torch.cat(cut).argsort()
    return TokenScores(
        torch.cat([p.log_probs for p in parts])[back],
        torch.cat([p.entropy for p in parts])[back],
        torch.cat([p.collision for p in parts])[back],
    )


def _join(records: list[UpdateRecord]) -> UpdateRecord:
    """The records of a rollout's updates under each other."""
    return UpdateRecord(
        scores=TokenScores(
            pad_rows([r.scores.log_probs for r in records]),
            pad_rows([r.scores.entropy for r in records]),
            pad_rows([r.scores.collision for r in records]),
        ),
        silenced=pad_rows([r.silenced for r in records]),
        candidates=pad_rows([r.candidates for r in records]),
        log_ratio=pad_rows([r.log_ratio for r in records]),
        clipped=pad_rows([r.clipped for r in records]),
        updates=(records[0].updates[0], records[-1].updates[-1]),
        tau_h=tuple(tau_h for r in records for tau_h in r.tau_h),
    )
