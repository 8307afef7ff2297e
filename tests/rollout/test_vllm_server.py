"""Sampling on a vLLM server: against a real one on this machine, and what is said where there is none."""

import importlib.util
import math
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
import torch

from stapo_lightning.errors import ConfigError, EngineServerError
from stapo_lightning.rollout import HFEngine, Sampling, VLLMServerEngine, Vocabulary
from tests.builders import prompt_batch, tiny_qwen3
from tests.doubles import datamodule, module, trainer
from tests.rollout.test_vllm import LARGEST, MEAN, PROMPTS, differences, update

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed; .ci/run shows how"
)
VOCABULARY = Vocabulary(end_ids=(2, 6), pad_id=19)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _policy():
    return tiny_qwen3(head_dim=32, max_position_embeddings=512, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The address of a server of a tied tiny Qwen3 with random weights."""
    folder = tmp_path_factory.mktemp("server")
    tiny_qwen3(9, head_dim=32, max_position_embeddings=512, tie_word_embeddings=True).save_pretrained(folder)
    port = _free_port()
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", f"--model={folder}", f"--port={port}"),
        *("--dtype=float32", "--enforce-eager", "--skip-tokenizer-init"),
        *(
            "--generation-config=vllm",
            "--enable-scale-out",
            "--logprobs-mode=processed_logprobs",
            "--kv-cache-memory-bytes=50000000",
        ),
    ]
    environment = os.environ | {"VLLM_SERVER_DEV_MODE": "1", "OMP_NUM_THREADS": "1"}
    with open(folder / "log", "w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        url = f"http://127.0.0.1:{port}"
        for _ in range(180):
            assert process.poll() is None, (folder / "log").read_text()[-3000:]
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5)
                break
            except (urllib.error.URLError, OSError):
                time.sleep(1)
        else:
            raise AssertionError((folder / "log").read_text()[-3000:])
        yield url
    finally:
        process.terminate()
        process.wait(60)


@pytest.fixture
def engine(server, tmp_path):
    return VLLMServerEngine(server, str(tmp_path / "weights"), dtype="float32", timeout_s=120)


def _generate(engine, policy, prompts=PROMPTS, group_size=1, streams=None, **sampling):
    streams = torch.arange(len(prompts) * group_size) if streams is None else streams
    engine.wake(policy)
    completions = engine.generate(policy, prompt_batch(prompts), streams, Sampling(**sampling), VOCABULARY)
    engine.sleep()
    return completions


@needs_vllm
def test_after_three_updates_the_server_has_the_policys_log_probs(engine, tmp_path):
    assert engine.problems() == []
    policy = _policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.02)
    for number in range(4):
        completions = _generate(engine, policy, group_size=4, temperature=0.7, max_new_tokens=24)
        found = differences(policy, completions, PROMPTS, 4, 0.7)
        assert found.mean() < MEAN and found.max() < LARGEST, number
        before = completions
        if number < 3:
            update(policy, optimizer, number)
    assert differences(_policy(), before, PROMPTS, 4, 0.7).mean() > 0.1
    assert [path.name for path in (tmp_path / "weights").iterdir()] == ["weights-3"]


@needs_vllm
def test_greedy_completions_end_where_those_of_the_other_engine_end(engine):
    policy = _policy()
    found = _generate(engine, policy, temperature=0, max_new_tokens=30)
    expected = _generate(HFEngine(), policy, temperature=0, max_new_tokens=30)
    for name in ("ids", "lengths", "truncated"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    assert found.truncated.any() and not found.truncated.all()


@needs_vllm
def test_streams_decide(engine):
    policy = _policy()
    streams = torch.tensor([5, -1, 2**40 + 3, 9 - 2**63, 5, 17])
    first, again = (_generate(engine, policy, [[3, 4]], 6, streams, max_new_tokens=12) for _ in range(2))
    assert torch.equal(first.ids, again.ids)
    assert torch.equal(first.ids[0], first.ids[4]) and len({tuple(row) for row in first.ids.tolist()}) == 5


@needs_vllm
def test_log_probs_after_a_cut_are_not_taken_for_those_before(engine):
    completions = _generate(engine, _policy(), top_p=0.5, max_new_tokens=1)
    assert completions.log_probs.isnan().all()


@needs_vllm
def test_what_the_server_refuses_is_shown(engine):
    with pytest.raises(EngineServerError, match=r"/inference/v1/generate answered 4\d\d: .*512"):
        _generate(engine, _policy(), [[3] * 600], max_new_tokens=2)


def test_a_server_that_is_not_there_is_told_before_the_run(tmp_path):
    engine = VLLMServerEngine(f"http://127.0.0.1:{_free_port()}/", str(tmp_path), max_requests=0, timeout_s=math.nan)
    with pytest.raises(ConfigError) as error:
        trainer(tmp_path).fit(module(), datamodule=datamodule(engine=engine))
    requests, timeout, url = error.value.problems
    assert requests == "VLLMServerEngine.max_requests=0: must be at least 1"
    assert timeout == "VLLMServerEngine.timeout_s=nan: must be above 0"
    assert url.startswith(f"VLLMServerEngine.url={engine.url}: {engine.url}/openapi.json does not answer")


def test_an_address_has_a_scheme(tmp_path):
    assert VLLMServerEngine("localhost:8000", str(tmp_path)).problems() == [
        "VLLMServerEngine.url='localhost:8000': must start with http:// or https://"
    ]
