"""Rollouts on a vLLM server that runs on other devices, given the policy's weights through a folder both can see."""

from __future__ import annotations

import json
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

from stapo_lightning.batch import Completions, PromptBatch
from stapo_lightning.errors import EngineServerError, bounded
from stapo_lightning.rollout.emitted import Emitted, as_completions, knows_log_probs, prompt_rows, seeds
from stapo_lightning.rollout.engine import RolloutEngine, Sampling, Vocabulary
from stapo_lightning.weights import stream_weights

# A file of weights is written as soon as it is as large as this: no more of them are held beside the policy.
FILE_BYTES = 2**30


class VLLMServerEngine(RolloutEngine):
    """Samples on a vLLM server, which is started with the policy's folder and four settings.

        VLLM_SERVER_DEV_MODE=1 vllm serve POLICY
            --enable-scale-out --generation-config vllm --logprobs-mode processed_logprobs

    Before each rollout and each validation rank 0 writes the weights to `weights_folder`, and the server reads them in
    place and forgets its prefix cache. Needs no vLLM here. Known to work with servers of version 0.32, whose
    `collective_rpc` (in development mode: keep the port from strangers) and `inference/v1/generate` it calls.

    Args:
        url: Where the server listens, such as http://10.0.0.5:8000.
        weights_folder: A folder on a file system that this machine and the server share under the same path; on one
            machine, one in /dev/shm is fastest. Holds up to two copies of the weights.
        dtype: Of the weights that are written; take the server's.
        max_requests: Completions asked for at a time by each rank; the server queues what it cannot take at once.
        timeout_s: Longest wait for one completion, or for the server to read the weights, in seconds, > 0.

    """

    def __init__(
        self,
        url: str,
        weights_folder: str,
        dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16",
        max_requests: int = 256,
        timeout_s: float = 3600.0,
    ) -> None:
        self.url = url.rstrip("/")
        self.weights_folder = weights_folder
        self.dtype = dtype
        self.max_requests = max_requests
        self.timeout_s = timeout_s
        self._syncs = 0

    def problems(self) -> list[str]:
        found = bounded("VLLMServerEngine.max_requests", self.max_requests, at_least=1)
        found += bounded("VLLMServerEngine.timeout_s", self.timeout_s, above=0)
        if not self.url.startswith(("http://", "https://")):
            return [*found, f"VLLMServerEngine.url={self.url!r}: must start with http:// or https://"]
        try:
            paths = self._call("/openapi.json", timeout_s=30)["paths"]
        except EngineServerError as error:
            return [*found, f"VLLMServerEngine.url={self.url}: {error}"]
        for path in ("/inference/v1/generate", "/collective_rpc", "/reset_prefix_cache"):
            if path not in paths:
                found.append(
                    f"VLLMServerEngine.url={self.url}: the server has no {path}; start one of version 0.32 with"
                    " VLLM_SERVER_DEV_MODE=1 in its environment and --enable-scale-out"
                )
        return found

    def wake(self, policy: nn.Module) -> None:
        writes = not dist.is_initialized() or dist.get_rank() == 0
        # A folder of its own each time: network file systems may go on showing the old contents of one that was there.
        folder = Path(self.weights_folder) / f"weights-{self._syncs}"
        files = _files(policy, getattr(torch, self.dtype))
        if writes:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            config: Any = policy.config
            config.save_pretrained(folder)
            for number, tensors in enumerate(files):
                save_file(tensors, folder / f"model-{number:05d}.safetensors")
            self._call("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
            if not self._call("/reset_prefix_cache", {}).get("success"):
                raise EngineServerError(f"{self.url} did not reset its prefix cache: another client is sampling there")
            shutil.rmtree(Path(self.weights_folder) / f"weights-{self._syncs - 1}", ignore_errors=True)
        else:
            for _ in files:  # shards are gathered by all ranks together
                pass
        self._syncs += 1
        if dist.is_initialized():
            dist.barrier()  # nobody samples before the server has the weights

    def generate(
        self, policy: nn.Module, prompts: PromptBatch, streams: Tensor, sampling: Sampling, vocabulary: Vocabulary
    ) -> Completions:
        known = knows_log_probs(sampling)
        settings = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "max_tokens": sampling.max_new_tokens,
            "stop_token_ids": list(vocabulary.end_ids),
            "ignore_eos": True,  # vLLM knows of one end token at most; all of them are above
            "logprobs": 0 if known else None,  # of the sampled token alone
            "detokenize": False,
        }

        def sample(row: list[int], seed: int) -> Emitted:
            reply = self._call(
                "/inference/v1/generate", {"token_ids": row, "sampling_params": settings | {"seed": seed}}
            )
            choice = reply["choices"][0]
            return Emitted(
                ids=choice["token_ids"],
                log_probs=[entry["logprob"] for entry in choice["logprobs"]["content"]] if known else None,
                truncated=choice["finish_reason"] == "length",
            )

        with ThreadPoolExecutor(self.max_requests) as threads:
            emitted = list(threads.map(sample, prompt_rows(prompts, len(streams) // len(prompts)), seeds(streams)))
        return as_completions(emitted, vocabulary.pad_id, prompts.ids.device)

    def _call(self, path: str, body: dict[str, Any] | None = None, timeout_s: float | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=timeout_s or self.timeout_s) as reply:
                return json.loads(reply.read() or b"{}")
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")[:500]
            raise EngineServerError(f"{self.url}{path} answered {error.code}: {text}") from error
        except (urllib.error.URLError, OSError) as error:
            raise EngineServerError(f"{self.url}{path} does not answer: {error}") from error


def _files(policy: nn.Module, dtype: torch.dtype) -> Iterator[dict[str, Tensor]]:
    """The policy's weights in pieces of FILE_BYTES or of one tensor."""
    tensors: dict[str, Tensor] = {}
    size = 0
    for name, value in stream_weights(policy, dtype):
        if tensors and size + value.nbytes > FILE_BYTES:
            yield tensors
            tensors, size = {}, 0
        tensors[name] = value.to("cpu", copy=True)  # a file holds no two names of one tensor
        size += value.nbytes
    yield tensors
