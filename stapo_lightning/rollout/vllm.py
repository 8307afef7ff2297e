"""Rollouts with vLLM in the training process, on the device of the policy, whose weights it is given each time."""

from __future__ import annotations

import copy
import os
import socket
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn

from stapo_lightning.batch import Completions, PromptBatch
from stapo_lightning.byte_sizes import Need
from stapo_lightning.errors import ConfigError, bounded
from stapo_lightning.optional import optional, require
from stapo_lightning.rollout.emitted import Emitted, as_completions, knows_log_probs, prompt_rows, seeds
from stapo_lightning.rollout.engine import RolloutEngine, RolloutLoad, Sampling, Vocabulary
from stapo_lightning.weights import stream_weights

# vLLM samples in this process and leaves its threads alone; it reports errors only, unless asked for more.
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


class VLLMEngine(RolloutEngine):
    """Samples with vLLM, one engine a rank, beside the policy on its device.

    Before each rollout and each validation the engine takes the policy's weights, one tensor at a time, and forgets its
    prefix cache. On a GPU it sleeps afterwards: neither its weights nor its cache take memory while the policy updates.
    vLLM has no sleep on a CPU. Known to work with vLLM 0.32.

    Each completion has a generator of its own, seeded by its stream, so that a run repeats; vLLM's numbers depend on
    what else is in the batch, though, within rounding.

    Args:
        dtype: Of the engine's weights and cache. "auto": bfloat16 on a GPU, float32 elsewhere.
        gpu_memory_utilization: Share of the device's memory (on a CPU: of the machine's) for the engine, in (0, 1];
            what its weights leave is its key-value cache.
        kv_cache_gib: Size of the key-value cache in GiB, > 0, whatever that share; null leaves it to the share.
        max_model_len: Longest prompt and completion together, in tokens; null takes the policy's context length. The
            cache must hold one sequence of it at least.
        max_sequences: Completions sampled at a time; the others wait.
        enforce_eager: Leave out compiled kernels and CUDA graphs: slower, and ready in seconds.
        sleeps: Free the engine's memory between rollouts, where vLLM can (not on a CPU).

    """

    def __init__(
        self,
        dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto",
        gpu_memory_utilization: float = 0.4,
        kv_cache_gib: float | None = None,
        max_model_len: int | None = None,
        max_sequences: int = 256,
        enforce_eager: bool = False,
        sleeps: bool = True,
    ) -> None:
        require("vllm", "vllm", "the engine VLLMEngine")
        self.dtype = dtype
        self.gpu_memory_utilization = gpu_memory_utilization
        self.kv_cache_gib = kv_cache_gib
        self.max_model_len = max_model_len
        self.max_sequences = max_sequences
        self.enforce_eager = enforce_eager
        self.sleeps = sleeps
        self._llm: Any = None
        self._weights_dtype = torch.float32
        self._sleeps = False  # it is asked to, and the platform can
        self._asleep = False
        self._awake = False

    def problems(self) -> list[str]:
        found = bounded("VLLMEngine.gpu_memory_utilization", self.gpu_memory_utilization, above=0, at_most=1)
        found += bounded("VLLMEngine.max_sequences", self.max_sequences, at_least=1)
        if self.kv_cache_gib is not None:
            found += bounded("VLLMEngine.kv_cache_gib", self.kv_cache_gib, above=0)
        if self.max_model_len is not None:
            found += bounded("VLLMEngine.max_model_len", self.max_model_len, at_least=2)
        return found

    def needs(self, load: RolloutLoad) -> list[Need]:
        share = self.gpu_memory_utilization
        change = f"lower data.engine.init_args.gpu_memory_utilization={share}"
        return [Need("vLLM, weights and cache", int(share * load.gpu_memory), change, always=not self.sleeps)]

    def wake(self, policy: nn.Module) -> None:
        with _apart(policy):
            if self._llm is None:
                self._llm = self._create(policy)
            if self._asleep:
                self._llm.wake_up(tags=["weights"])
            self._take_weights(policy)
            if self._asleep:
                self._llm.wake_up(tags=["kv_cache"])
            self._asleep = False
            self._awake = True

    def generate(
        self, policy: nn.Module, prompts: PromptBatch, streams: Tensor, sampling: Sampling, vocabulary: Vocabulary
    ) -> Completions:
        if not self._awake:
            raise RuntimeError("VLLMEngine.wake(policy) comes before generate: the engine has no weights yet")
        self._check_length(prompts, sampling)
        with _apart(policy):
            emitted = self._sample(prompts, streams, sampling, vocabulary)
        return as_completions(emitted, vocabulary.pad_id, prompts.ids.device)

    def sleep(self) -> None:
        if self._sleeps and self._awake:
            # Level 2: the weights are not kept elsewhere, since they come anew with the next call of wake.
            self._llm.sleep(level=2)
            self._asleep = True
        self._awake = False

    def _create(self, policy: nn.Module) -> Any:
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        vllm = optional("vllm", "vllm", "the engine VLLMEngine")
        platform = optional("vllm.platforms", "vllm", "the engine VLLMEngine").current_platform
        _check_heads(policy, platform)
        device = next(policy.parameters()).device
        dtype = self.dtype if self.dtype != "auto" else "bfloat16" if device.type == "cuda" else "float32"
        self._weights_dtype = getattr(torch, dtype)
        self._sleeps = self.sleeps and platform.is_sleep_mode_available()
        if self.sleeps and not self._sleeps:
            rank_zero_info(f"VLLMEngine keeps its memory between rollouts: vLLM has no sleep on {platform.device_type}")
        # Only the architecture is read from the folder: the weights come from the policy, and so do token ids.
        with tempfile.TemporaryDirectory() as folder, isolate_rng(), _launched(device):
            _architecture(policy).save_pretrained(folder)
            return vllm.LLM(
                model=folder,
                skip_tokenizer_init=True,
                generation_config="vllm",
                load_format="dummy",
                dtype=dtype,
                distributed_executor_backend="external_launcher",
                gpu_memory_utilization=self.gpu_memory_utilization,
                kv_cache_memory_bytes=int(self.kv_cache_gib * 2**30) if self.kv_cache_gib is not None else None,
                max_model_len=self.max_model_len,
                max_num_seqs=self.max_sequences,
                enforce_eager=self.enforce_eager,
                enable_sleep_mode=self._sleeps,
                logprobs_mode="processed_logprobs",
                disable_log_stats=True,
                seed=0,
            )

    def _check_length(self, prompts: PromptBatch, sampling: Sampling) -> None:
        limit = self._llm.llm_engine.model_config.max_model_len
        longest = int(prompts.lengths.max()) + sampling.max_new_tokens
        if longest > limit:
            raise ConfigError(
                [
                    f"VLLMEngine.max_model_len={limit}: prompts of up to {int(prompts.lengths.max())} tokens and"
                    f" max_new_tokens={sampling.max_new_tokens} make {longest}; raise it or lower max_new_tokens"
                ]
            )

    def _take_weights(self, policy: nn.Module) -> None:
        # `stream_weights` names a tied head too. Where vLLM packs weights anew (its CPU kernels do), a head that is not
        # named keeps what was packed before.
        weights = stream_weights(policy, self._weights_dtype)
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        self._llm.reset_prefix_cache()

    def _sample(
        self, prompts: PromptBatch, streams: Tensor, sampling: Sampling, vocabulary: Vocabulary
    ) -> list[Emitted]:
        vllm = optional("vllm", "vllm", "the engine VLLMEngine")
        rows = prompt_rows(prompts, len(streams) // len(prompts))
        known = knows_log_probs(sampling)
        settings = [
            vllm.SamplingParams(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                max_tokens=sampling.max_new_tokens,
                seed=seed,
                stop_token_ids=list(vocabulary.end_ids),
                ignore_eos=True,  # vLLM knows of one end token at most; all of them are above
                logprobs=0 if known else None,  # of the sampled token alone
                flat_logprobs=True,
                detokenize=False,
            )
            for seed in seeds(streams)
        ]
        outputs = self._llm.generate([{"prompt_token_ids": row} for row in rows], settings, use_tqdm=False)
        completions = [output.outputs[0] for output in outputs]
        return [
            Emitted(
                ids=list(completion.token_ids),
                log_probs=list(completion.logprobs.logprobs) if known else None,
                truncated=completion.finish_reason == "length",
            )
            for completion in completions
        ]


@contextmanager
def _apart(policy: nn.Module) -> Iterator[None]:
    """The context of vLLM's tensors: they outlive validations, whose tensors are inference's, and know no autocast."""
    device = next(policy.parameters()).device
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


def _check_heads(policy: nn.Module, platform: Any) -> None:
    if not platform.is_cpu():
        return  # its CPU kernels alone fail only in the midst of the first forward
    backend = optional("vllm.v1.attention.backends.cpu_attn", "vllm", "the engine VLLMEngine").CPUAttentionBackend
    config: Any = policy.config
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    sizes = backend.get_supported_head_sizes()
    if size not in sizes:
        raise ConfigError(
            [
                f"VLLMEngine: the policy's attention heads are {size} wide, and vLLM's CPU kernels are made for"
                f" {', '.join(map(str, sizes))}; take HFEngine (data.engine) or a GPU"
            ]
        )


def _architecture(policy: nn.Module) -> Any:
    """The policy's config with the name of its class, which a model made from a config alone does not note."""
    config: Any = copy.deepcopy(policy.config)
    if not config.architectures:
        config.architectures = [type(policy).__name__.removeprefix("FSDP")]
    return config


@contextmanager
def _launched(device: torch.device) -> Iterator[None]:
    """The environment of a process that torchrun started, which tells vLLM to be one engine among the ranks.

    Taken back at the end: Lightning reads the same variables.
    """
    joined = dist.is_initialized()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    alone = {} if joined else {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    rank, size = (dist.get_rank(), dist.get_world_size()) if joined else (0, 1)
    with _environment({"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(device.index or 0), **alone}):
        yield


@contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
