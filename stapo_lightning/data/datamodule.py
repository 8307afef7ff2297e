"""RolloutDataModule: prompts in, groups of scored completions out, sampled from the policy as it is at that moment."""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor
from torch.utils.data import DataLoader

from stapo_lightning.batch import (
    Completions,
    EvalBatch,
    EvalCompletion,
    EvalSamples,
    Prompt,
    PromptBatch,
    RolloutBatch,
)
from stapo_lightning.data.completion_store import CompletionStore, described
from stapo_lightning.data.gold_check import gold_problems
from stapo_lightning.data.prompts import PromptLoader, PromptSource, PromptStream, TokenizedPrompts, collate
from stapo_lightning.data.rendering import tokenize
from stapo_lightning.errors import ConfigError, RewardError, bounded
from stapo_lightning.evaluation import Evaluation
from stapo_lightning.objective.advantages import AdvantageEstimator, GroupNormalized
from stapo_lightning.randomness import hash_keys
from stapo_lightning.rewards import Completion, ModelVerifier, Reward, RewardWorkers, ScoredRows, score_completions
from stapo_lightning.rollout import HFEngine, RolloutEngine, Sampling, Vocabulary
from stapo_lightning.sharding import join


@dataclass(frozen=True)
class Decoding:
    """One way of sampling held-out prompts.

    Attributes:
        name: The last but one part of its tags, such as val/<benchmark>/<name>/avg@8.
        samples: k, completions of each prompt whose benchmark does not say how many.
        sampling: Temperature, top-p, top-k, length limit.

    """

    name: str
    samples: int = 1
    sampling: Sampling = field(default_factory=Sampling)


class RolloutDataModule(L.LightningDataModule):
    """Loads prompts and turns each batch into completions, rewards and advantages on its way to the module.

    The completions are sampled in `on_after_batch_transfer`, which runs just before `training_step`: rollouts are
    strictly on-policy, and a batch boundary is always a rollout boundary.

    Args:
        reward: Scores completions. A row whose reward fails or takes too long is left out of its group.
        train_prompts: Problems to train on.
        val_prompts: Held-out problems, disjoint from those trained on; None for no validation.
        test_prompts: Problems of `stapo test`.
        predict_prompts: Problems of `stapo predict`.
        sampling: How training completions are drawn. top_p must be 1 and top_k 0: otherwise the tokens come from
            another distribution than the one whose ratio the loss takes.
        engine: Samples the completions.
        advantage: Rewards of a group -> advantages.
        prompts_per_batch: Prompts of one rollout, over all ranks (paper: 256).
        group_size: G, completions of each prompt, at least 2 (paper: 8).
        max_prompt_tokens: Longest prompt allowed, with its chat template (paper: 1024).
        long_prompts: Prompts over that limit are dropped with a count ("drop") or stop the run ("error").
        decodings: How held-out prompts are sampled in validate and test; default: greedy, and 4 samples at
            temperature 1.
        predict_decoding: How `stapo predict` samples.
        eval_completions_per_batch: Completions of held-out prompts sampled at a time on each rank; those of one prompt
            are never parted.
        eval_reward: Judges held-out completions: correct above 0.5, wrong where it fails or takes too long. Null takes
            `reward`; name the verifier here where that adds shaping to it, such as a length penalty.
        test_folder: Where `stapo test` keeps every completion with its extracted answer and verdict as JSON Lines, a
            folder for each policy; null puts them into the run's folder. A test that was killed goes on from there:
            problems that are finished, for the same weights, prompts, sampling and reward, are not sampled again.
        recheck: A language model that looks again at what the reward rejected in `stapo test`, such as
            CompassVerifier-3B; null for none.
        reward_workers: Processes on each rank that run the reward, one completion at a time, at least 0. 0 calls it
            with all completions at once in the training process, where nothing can stop one that hangs or crashes.
        reward_timeout_s: Longest wall time of one completion's reward in seconds, above 0; a row over it is counted in
            reward/timeouts and its process is replaced. Without effect where reward_workers is 0.
        gold_check: Prompts, of those trained on and of the held-out ones each, whose gold answers are scored before
            training; 0 leaves the check out.
        gold_check_share: Share of them, in [0, 1], that the reward must find correct, or the run stops with examples.

    """

    def __init__(
        self,
        reward: Reward,
        train_prompts: PromptSource | None = None,
        val_prompts: PromptSource | None = None,
        test_prompts: PromptSource | None = None,
        predict_prompts: PromptSource | None = None,
        sampling: Sampling = Sampling(max_new_tokens=15360),
        engine: RolloutEngine | None = None,
        advantage: AdvantageEstimator | None = None,
        prompts_per_batch: int = 256,
        group_size: int = 8,
        max_prompt_tokens: int = 1024,
        long_prompts: Literal["drop", "error"] = "drop",
        decodings: list[Decoding] | None = None,
        predict_decoding: Decoding | None = None,
        eval_completions_per_batch: int = 256,
        eval_reward: Reward | None = None,
        test_folder: str | None = None,
        recheck: ModelVerifier | None = None,
        reward_workers: int = 2,
        reward_timeout_s: float = 10.0,
        gold_check: int = 64,
        gold_check_share: float = 0.9,
    ) -> None:
        super().__init__()
        self.reward = reward
        self.eval_reward = eval_reward or reward
        self.sources = {"fit": train_prompts, "validate": val_prompts, "test": test_prompts, "predict": predict_prompts}
        self.sampling = sampling
        self.engine = engine or HFEngine()
        self.advantage = advantage or GroupNormalized()
        self.prompts_per_batch = prompts_per_batch
        self.group_size = group_size
        self.max_prompt_tokens = max_prompt_tokens
        self.long_prompts = long_prompts
        limit = sampling.max_new_tokens
        self.decodings = decodings or [
            Decoding("greedy", 1, Sampling(temperature=0.0, max_new_tokens=limit)),
            Decoding("sampled", 4, Sampling(temperature=1.0, max_new_tokens=limit)),
        ]
        self.predict_decoding = predict_decoding or Decoding("predict", 1, Sampling(max_new_tokens=limit))
        self.eval_completions_per_batch = eval_completions_per_batch
        self.test_folder = test_folder
        self.recheck = recheck
        self.reward_workers = reward_workers
        self.reward_timeout_s = reward_timeout_s
        self._workers: dict[int, RewardWorkers] = {}  # by the id of the reward that they run
        self._store: CompletionStore | None = None
        self.gold_check = gold_check
        self.gold_check_share = gold_check_share
        self.prompts_seen = 0
        self.loaded: dict[str, TokenizedPrompts] = {}
        self._setup_problems: list[str] = []

    # ---- setup and checks -------------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Loads and tokenises the prompts that `stage` ("fit", "validate", "test", "predict") needs.

        Nothing is raised here: `problems` reports what went wrong together with everything else.
        """
        stage = str(TrainerFn(stage).value)  # Lightning passes an enum member, which formats as TrainerFn.FITTING
        self._setup_problems = []
        if self.sources[stage] is None:
            self._setup_problems.append(f"data.{_option(stage)} is not set: `stapo {stage}` has no prompts")
        names = ("fit", "validate") if stage == "fit" else (stage,)
        sources = {name: source for name in names if (source := self.sources[name]) is not None}
        # All files are read before the tokenizer: where that is missing too, their problems stand in the same error.
        read: dict[str, Sequence[Prompt]] = {}
        for name, source in sources.items():
            with self._noting(f"data.{_option(name)}: "):
                read[name] = source.load()
        with self._noting():
            tokenizer = self._tokenizer
            for name, prompts in read.items():
                with self._noting(f"data.{_option(name)}: "):
                    kept, dropped = self._within_limit(tokenize(prompts, tokenizer))
                    self.loaded[name] = kept if name == "fit" else kept.by_source()
                    _print_counts(f"data.{_option(name)}", len(kept), [*sources[name].remarks, *dropped])
        if self.reward_workers > 0:
            self._add_workers("data.reward", self.reward)
            self._add_workers("data.eval_reward", self.eval_reward)
        self._store = self._open_store() if stage == "test" and not self._setup_problems else None
        if stage == "fit" and not self._setup_problems and not self._worker_problems():
            for name in read:
                self._setup_problems += gold_problems(
                    f"data.{_option(name)}",
                    self.loaded[name].prompts,
                    self.reward if name == "fit" else self.eval_reward,
                    self._score_rows,
                    self.gold_check,
                    self.gold_check_share,
                )

    def _add_workers(self, option: str, reward: Reward) -> None:
        if id(reward) in self._workers:
            return
        try:
            # Starts no process yet.
            self._workers[id(reward)] = RewardWorkers(reward, self.reward_workers, self.reward_timeout_s)
        except RewardError as error:
            self._setup_problems.append(f"{option}: {error}")

    def _open_store(self) -> CompletionStore:
        run = self._trainer.log_dir or self._trainer.default_root_dir
        root = Path(self.test_folder) if self.test_folder else Path(run) / "test"
        terms = described([self.seed, self.eval_reward, self.recheck])
        return CompletionStore(root, self._module.weights_identity(), terms, self._trainer.global_rank)

    @property
    def results_folder(self) -> Path | None:
        """Where `stapo test` keeps the completions, and its report the results; None in other stages."""
        return self._store.folder if self._store else None

    @contextmanager
    def _noting(self, prefix: str = "") -> Iterator[None]:
        """Keeps the problems of a ConfigError for `problems`, each behind `prefix`."""
        try:
            yield
        except ConfigError as error:
            self._setup_problems += [f"{prefix}{problem}" for problem in error.problems]

    def teardown(self, stage: str) -> None:
        """Ends the processes of the reward."""
        self._end_workers()

    def on_exception(self, exception: BaseException) -> None:
        """Ends them too where a run stops with an error, which Lightning does not tear down; also one of `setup`."""
        self._end_workers()

    def _end_workers(self) -> None:
        while self._workers:
            self._workers.popitem()[1].close()

    def _within_limit(self, prompts: TokenizedPrompts) -> tuple[TokenizedPrompts, list[str]]:
        """The prompts of at most max_prompt_tokens, and a remark where others were dropped."""
        if not len(prompts):
            raise ConfigError(["the source holds no prompt"])
        lengths = [len(ids) for ids in prompts.token_ids]
        kept = [i for i, length in enumerate(lengths) if length <= self.max_prompt_tokens]
        dropped = len(lengths) - len(kept)
        if not dropped:
            return prompts, []
        if self.long_prompts == "error" or not kept:
            first = next(i for i, length in enumerate(lengths) if length > self.max_prompt_tokens)
            raise ConfigError(
                [
                    f"{dropped} of {len(lengths)} prompts are longer than data.max_prompt_tokens="
                    f"{self.max_prompt_tokens}, the longest has {max(lengths)} tokens, the first is"
                    f" {prompts.prompts[first].text[:60]!r}; raise the limit or drop them (data.long_prompts: drop)"
                ]
            )
        remark = f"{dropped:,} longer than data.max_prompt_tokens={self.max_prompt_tokens}"
        return TokenizedPrompts([prompts.prompts[i] for i in kept], [prompts.token_ids[i] for i in kept]), [
            f"dropped {remark}"
        ]

    def problems(self, world_size: int) -> list[str]:
        """Everything that is wrong with this configuration, one sentence each; call it after `setup`."""
        found = list(self._setup_problems)
        if self.group_size < 2:
            found.append(
                f"data.group_size={self.group_size}: must be at least 2, an advantage compares completions of a prompt"
            )
        if self.prompts_per_batch < 1 or self.prompts_per_batch % world_size:
            found.append(
                f"data.prompts_per_batch={self.prompts_per_batch}: must be a positive multiple of {world_size} (ranks)"
            )
        found += bounded("data.max_prompt_tokens", self.max_prompt_tokens, at_least=1)
        found += bounded("data.eval_completions_per_batch", self.eval_completions_per_batch, at_least=1)
        found += self._worker_problems()
        found += bounded("data.gold_check", self.gold_check, at_least=0)
        found += bounded("data.gold_check_share", self.gold_check_share, at_least=0, at_most=1)
        found += self.engine.problems()
        found += self.recheck.problems() if self.recheck is not None else []
        found += self.sampling.problems("data.sampling")
        if self.sampling.temperature == 0:
            found.append("data.sampling.temperature=0: greedy completions of one prompt are all equal; set it above 0")
        if self.sampling.top_p < 1 or self.sampling.top_k > 0:
            found.append(
                f"data.sampling.top_p={self.sampling.top_p}, top_k={self.sampling.top_k}: training samples must come"
                " from the whole distribution (top_p 1, top_k 0), or the ratio to the behaviour policy is biased;"
                " set them in data.decodings for evaluation"
            )
        names = [decoding.name for decoding in self.decodings]
        if len(set(names)) < len(names):
            found.append(f"data.decodings: the names {names} must differ, they are the tags of the results")
        for decoding in (*self.decodings, self.predict_decoding):
            found += decoding.sampling.problems(f"data.decodings {decoding.name!r}: sampling")
            found += bounded(f"data.decodings {decoding.name!r}: samples", decoding.samples, at_least=1)
            if not decoding.name or "/" in decoding.name:
                found.append(f"data.decodings: name={decoding.name!r} must be a word without /, it is part of a tag")
        return found

    def samplings(self, stage: str) -> list[tuple[str, Sampling]]:
        """Option and value of each kind of sampling that `stage` does, one for each length limit."""
        decodings = [self.predict_decoding] if stage == "predict" else self.decodings
        found = [(f"data.decodings {decoding.name!r}: sampling", decoding.sampling) for decoding in decodings]
        if stage == "fit":
            found = [("data.sampling", self.sampling), *(found if self.sources["validate"] else [])]
        by_limit = {sampling.max_new_tokens: (option, sampling) for option, sampling in reversed(found)}
        return list(by_limit.values())

    def _worker_problems(self) -> list[str]:
        found = bounded("data.reward_workers", self.reward_workers, at_least=0)
        found += bounded("data.reward_timeout_s", self.reward_timeout_s, above=0)
        if self.reward_workers > 0 and os.name != "posix":
            found.append(f"data.reward_workers={self.reward_workers}: must be 0 on {os.name}, processes need POSIX")
        return found

    @property
    def _trainer(self) -> L.Trainer:
        if self.trainer is None:
            raise RuntimeError(
                "this datamodule belongs to no Trainer yet; pass it to trainer.fit, validate, test or predict"
            )
        return self.trainer

    @property
    def _module(self) -> Any:
        # A StapoModule in practice; the datamodule knows only its policy, tokenizer, end_ids and pad_id.
        return self._trainer.lightning_module

    @property
    def _tokenizer(self) -> Any:
        return self._module.tokenizer

    @property
    def seed(self) -> int:
        """Seed of prompt order and sampling: the value of `seed_everything`, 0 where it was not called."""
        return int(os.environ.get("PL_GLOBAL_SEED", 0))

    # ---- loaders ----------------------------------------------------------------------------------------------------

    def train_dataloader(self) -> PromptLoader:
        """One batch a rollout, from the position of the run on."""
        prompts = self.loaded["fit"]
        self._stream = PromptStream(
            len(prompts),
            self.prompts_per_batch,
            self.seed,
            self._trainer.global_rank,
            self._trainer.world_size,
        )
        self._stream.position = self.prompts_seen
        return PromptLoader(prompts, batch_sampler=self._stream, collate_fn=collate)  # type: ignore[arg-type]

    def val_dataloader(self) -> DataLoader[Any] | list[Any]:
        """This rank's share of the held-out prompts."""
        return self._eval_loader("validate") if "validate" in self.loaded else []

    def test_dataloader(self) -> DataLoader[Any]:
        """This rank's share of the test prompts."""
        return self._eval_loader("test")

    def predict_dataloader(self) -> DataLoader[Any]:
        """This rank's share of the prompts to complete."""
        return self._eval_loader("predict")

    def _eval_loader(self, name: str) -> DataLoader[Any]:
        decodings = [self.predict_decoding] if name == "predict" else self.decodings
        batches: list[list[Any]] = []
        for places in self._benchmarks(name).values():
            mine = places[self._trainer.global_rank :: self._trainer.world_size]
            samples = max(self._samples(name, places, decoding) for decoding in decodings)
            size = max(1, self.eval_completions_per_batch // samples)
            rows = [self.loaded[name][place, place - places[0]] for place in mine]
            batches += [rows[i : i + size] for i in range(0, len(rows), size)]
        # Lightning skips the loop of a rank that has no batch, and with it the collectives at the end.
        batches = batches or [[]]
        return DataLoader(batches, batch_size=None, collate_fn=collate)  # type: ignore[arg-type]

    def evaluations(self, stage: str) -> list[Evaluation]:
        """What "validate" or "test" evaluates, a benchmark after the other and each under every decoding."""
        return [
            Evaluation(
                benchmark,
                decoding.name,
                len(places),
                self._samples(stage, places, decoding),
                rechecked=self.recheck is not None and stage == "test",
            )
            for benchmark, places in self._benchmarks(stage).items()
            for decoding in self.decodings
        ]

    def _benchmarks(self, name: str) -> dict[str, range]:
        """Benchmark -> the places of its prompts, which stand together."""
        prompts = self.loaded[name].prompts
        starts = [i for i in range(len(prompts)) if i == 0 or prompts[i].source != prompts[i - 1].source]
        return {prompts[a].source: range(a, b) for a, b in zip(starts, [*starts[1:], len(prompts)], strict=True)}

    def _samples(self, name: str, places: range, decoding: Decoding) -> int:
        return self.loaded[name].prompts[places[0]].samples or decoding.samples

    def state_dict(self) -> dict[str, Any]:
        """Where the prompt stream stands: all that a resume needs."""
        return {"prompts_seen": self.prompts_seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the position."""
        self.prompts_seen = state_dict["prompts_seen"]

    # ---- rollouts ---------------------------------------------------------------------------------------------------

    def on_after_batch_transfer(self, batch: PromptBatch, dataloader_idx: int) -> RolloutBatch | EvalBatch:
        """Samples and scores completions: a RolloutBatch in training, an EvalBatch elsewhere."""
        if self._trainer.training:
            return self._rollout(batch)
        decodings = [self.predict_decoding] if self._trainer.predicting else self.decodings
        samples = [self._evaluate(batch, decoding) for decoding in decodings if len(batch)]
        return EvalBatch(batch.prompts, batch.uids.tolist(), samples)

    def _rollout(self, batch: PromptBatch) -> RolloutBatch:
        started = time.perf_counter()
        uids = _repeat(batch.uids, self.group_size)
        self.wake_engine()
        completions = self._generate(batch, uids, self.sampling, "train")
        join(self._module.policy)
        self.engine.sleep()
        rows = self._completions([prompt for prompt in batch.prompts for _ in range(self.group_size)], completions)
        sampled = time.perf_counter()
        scored = self._score_rows(self.reward, rows)
        rewards = torch.tensor(scored.values, dtype=torch.float32, device=batch.ids.device)
        group_ids = batch.uids.repeat_interleave(self.group_size)
        advantages = self.advantage(rewards, group_ids)
        finished = time.perf_counter()
        # The position moves on with the rollout: a checkpoint after this batch's updates resumes behind it.
        self.prompts_seen += self.prompts_per_batch
        self._stream.position = self.prompts_seen
        return RolloutBatch(
            prompt_ids=batch.ids.repeat_interleave(self.group_size, dim=0),
            prompt_lengths=batch.lengths.repeat_interleave(self.group_size),
            completion_ids=completions.ids,
            completion_lengths=completions.lengths,
            truncated=completions.truncated,
            old_log_probs=completions.log_probs,
            rewards=rewards,
            advantages=advantages,
            group_ids=group_ids,
            uids=uids,
            temperature=self.sampling.temperature,
            group_size=self.group_size,
            prompts=[row.prompt for row in rows],
            texts=[row.text for row in rows],
            old_entropy=completions.entropy,
            old_collision=completions.collision,
            reward_errors=scored.errors,
            reward_timeouts=scored.timeouts,
            rollout_seconds=sampled - started,
            reward_seconds=finished - sampled,
        )

    def _evaluate(self, batch: PromptBatch, decoding: Decoding) -> EvalSamples:
        k = batch.prompts[0].samples or decoding.samples
        if self._store is None:
            return EvalSamples(decoding.name, self._sample(batch, decoding, k))
        keys = [self._store.key(prompt, decoding, k) for prompt in batch.prompts]
        found = {row: done for row, key in enumerate(keys) if (done := self._store.find(key, k)) is not None}
        missing = [row for row in range(len(batch)) if row not in found]
        if missing:
            for row, completions in zip(missing, self._sample(batch.rows(missing), decoding, k), strict=True):
                found[row] = completions
                self._store.add(keys[row], decoding.name, int(batch.uids[row]), batch.prompts[row], completions)
        return EvalSamples(decoding.name, [found[row] for row in range(len(batch))])

    def _sample(self, batch: PromptBatch, decoding: Decoding, k: int) -> list[list[EvalCompletion]]:
        """K scored completions of each prompt."""
        # The random numbers of a completion depend on its benchmark, and on no other that is evaluated beside it.
        purpose = f"{batch.prompts[0].source}/{decoding.name}"
        sampled = self._generate(batch, _repeat(batch.uids, k), decoding.sampling, purpose)
        rows = self._completions([prompt for prompt in batch.prompts for _ in range(k)], sampled)
        by_rule = [value > 0.5 for value in self._score_rows(self.eval_reward, rows).values]  # nan is not
        correct = list(by_rule)
        if self.recheck is not None and self._trainer.testing:
            rejected = [i for i, verdict in enumerate(by_rule) if not verdict]
            second = self.recheck([rows[i] for i in rejected], self._module.device)
            for i, verdict in zip(rejected, second, strict=True):
                correct[i] = verdict
        scored = [
            EvalCompletion(row.text, self.eval_reward.answer(row), verdict, rule, row.num_tokens, row.truncated)
            for row, verdict, rule in zip(rows, correct, by_rule, strict=True)
        ]
        return [scored[i : i + k] for i in range(0, len(scored), k)]

    def wake_engine(self) -> None:
        """Gives the engine the policy's weights; every rank does, before a rollout and before held-out prompts."""
        self.engine.wake(self._module.policy)

    def _generate(self, batch: PromptBatch, uids: Tensor, sampling: Sampling, purpose: str) -> Completions:
        streams = hash_keys(self.seed, torch.full_like(uids, zlib.crc32(purpose.encode())), uids)
        vocabulary = Vocabulary(self._module.end_ids, self._module.pad_id)
        with self._trainer.precision_plugin.forward_context():
            return self.engine.generate(self._module.policy, batch, streams, sampling, vocabulary)

    def _decode(self, completions: Completions) -> list[str]:
        rows = completions.ids.tolist()
        emitted = [row[:length] for row, length in zip(rows, completions.lengths.tolist(), strict=True)]
        return self._tokenizer.batch_decode(emitted, skip_special_tokens=True)

    def _completions(self, prompts: Sequence[Prompt], sampled: Completions) -> list[Completion]:
        lengths, truncated = sampled.lengths.tolist(), sampled.truncated.tolist()
        texts = self._decode(sampled)
        return [Completion(*row) for row in zip(prompts, texts, lengths, truncated, strict=True)]

    def _score_rows(self, reward: Reward, rows: Sequence[Completion]) -> ScoredRows:
        workers = self._workers.get(id(reward))
        return score_completions(reward, rows) if workers is None else workers.score(rows)


@rank_zero_only
def _print_counts(option: str, count: int, remarks: Sequence[str]) -> None:
    print(f"{option}: {count:,} prompt{'s' if count != 1 else ''}{'; ' if remarks else ''}{', '.join(remarks)}")


def _repeat(uids: Tensor, samples: int) -> Tensor:
    """[N] a number for each sample of each prompt."""
    return (uids[:, None] * samples + torch.arange(samples, device=uids.device)).flatten()


def _option(name: str) -> str:
    return {"fit": "train_prompts", "validate": "val_prompts", "test": "test_prompts", "predict": "predict_prompts"}[
        name
    ]
