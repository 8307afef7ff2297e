"""`stapo plan`: its bytes are those of real runs, and a run that does not fit is refused with what would help."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config

from stapo_lightning.cli import run
from stapo_lightning.dry_run import DoesNotFit
from stapo_lightning.errors import ConfigError
from stapo_lightning.models import resolve_policy
from tests.cli import ROOT, stapo
from tests.doubles import TINY
from tests.plan_worker import ARGUMENTS, STRATEGIES, fit
from tests.shapes import save

COUNTED = ("parameters", "gradients", "optimiser state", "reference")
PAPER = ("--config=configs/base.yaml", "--config=configs/scale/fsdp.yaml")


def _plan(*args):
    """The dry run of a command line."""
    return run(["plan", *args]).trainer.planned


def _sizes(planned):
    return {row.need.what: row.need.size for row in planned.rows}


# ---- against real runs ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def weighed(tmp_path_factory):
    """What each rank of a run over two processes (gloo) held: {strategy: [rank 0, rank 1]}."""
    folder = tmp_path_factory.mktemp("weighed")
    done = subprocess.run(
        [sys.executable, "-m", "tests.plan_worker", str(folder)],
        cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return {name: [json.loads((folder / name / f"{r}.json").read_text()) for r in (0, 1)] for name in STRATEGIES}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bytes_are_those_of_two_processes(weighed, strategy, monkeypatch):
    monkeypatch.chdir(ROOT)
    planned = _sizes(_plan(*ARGUMENTS, "--trainer.devices=2", f"--trainer.strategy={strategy}"))
    for what in COUNTED:
        for rank in weighed[strategy]:
            assert planned[what] == pytest.approx(rank[what], rel=0.05), what
    # The tiny policy has 154,016 parameters; two processes share them, or hold them each.
    share = 154_016 * 4 / (2 if strategy == "fsdp2" else 1)
    assert planned["parameters"] == pytest.approx(share, rel=0.01)


def test_bytes_are_those_of_one_process(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    fit("auto", 1, str(tmp_path))
    real = json.loads((tmp_path / "auto" / "0.json").read_text())
    planned = _sizes(_plan(*ARGUMENTS, "--trainer.devices=1"))
    assert {what: planned[what] for what in COUNTED} == {what: real[what] for what in COUNTED}


# ---- the paper's runs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "parameters"), [("qwen3_8b", 8_190_735_360), ("qwen3_14b", 14_768_307_200)])
def test_the_papers_runs_are_planned_for_their_64_gpus(name, parameters, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    planned = _plan(
        *PAPER, f"--config=configs/models/{name}.yaml", f"--model.policy={save(name, tmp_path)}", "--gpu_memory=96GB"
    )
    sizes = _sizes(planned)
    # Float32 shares of 64 ranks: 4 bytes a parameter, twice that for AdamW's moments.
    for what, bytes_each in (("parameters", 4), ("gradients", 4), ("optimiser state", 8)):
        assert sizes[what] == pytest.approx(bytes_each * parameters / 64, rel=0.002)
    assert "reference" not in sizes
    # 64 prompts x 8 completions on 64 ranks are 8 completions each, one of them a micro-batch of 16,384 tokens; a
    # rollout is 4 times as much.
    assert (planned.completions, planned.sequences, planned.micro_batches, planned.longest) == (8, 1, 8, 16384)
    # bf16 keys and values of 8 heads of 128, in 36 or 40 layers, for as many sequences as the config lets be sampled at
    # a time; one layer of them twice.
    layers, rows = {"qwen3_8b": (36, 16), "qwen3_14b": (40, 8)}[name]
    assert sizes["key-value cache"] == rows * 16384 * 2 * 8 * 128 * 2 * (layers + 1)
    # The input of each layer in bf16, and all of one layer.
    hidden = {"qwen3_8b": 4096, "qwen3_14b": 5120}[name]
    assert sizes["activations"] > 16384 * layers * hidden * 2
    assert planned.problems() == []


def test_14b_does_not_fit_where_whole_gradients_wait_for_the_last_micro_batch(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    config = [*PAPER, "--config=configs/models/qwen3_14b.yaml", f"--model.policy={save('qwen3_14b', tmp_path)}"]
    with pytest.raises(DoesNotFit, match=r"set model\.sharding\.reduce=every_pass") as refused:
        _plan(*config, "--gpu_memory=80GiB", "--model.sharding.reduce=once")
    # 14.77e9 float32 gradients are 55 GiB.
    assert "whole gradients of 8 micro-batches 55.0 GiB" in str(refused.value)


def test_the_single_gpu_variant_fits_into_80_gb(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    config = ["--config=configs/base.yaml", "--config=configs/models/qwen3_1_7b_single_gpu.yaml"]
    planned = _plan(*config, f"--model.policy={save('qwen3_1_7b', tmp_path)}", "--gpu_memory=80GB")
    sizes = _sizes(planned)
    assert sizes["parameters"] == 4 * 1_720_574_976
    # Autocast's copies: bf16 of all matrices but the embedding, which is the head and is read by parts.
    assert sizes["bf16 copies of the weights (autocast)"] == pytest.approx(2 * (1_720_574_976 - 311_164_928), rel=0.01)


# ---- what options change --------------------------------------------------------------------------------------------


def _small(tmp_path, *flags):
    config = Qwen3Config(
        vocab_size=3000, hidden_size=128, intermediate_size=384, num_hidden_layers=16, num_attention_heads=8,
        num_key_value_heads=2, head_dim=16, tie_word_embeddings=True,
    )  # fmt: skip
    config.save_pretrained(tmp_path / "small")
    overlays = ["--config=configs/base.yaml", "--config=configs/scale/fsdp.yaml", "--trainer.devices=8"]
    return _plan(*overlays, f"--model.policy={tmp_path / 'small'}", "--gpu_memory=100TB", *flags)


def test_options_change_what_they_say(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    base = _small(tmp_path)
    assert base.total("update", on_host=True) == 0
    offloaded = _small(tmp_path, "--model.sharding.cpu_offload=true", "--model.kl_coef=0.1")
    states = sum(_sizes(base)[what] for what in ("parameters", "gradients", "optimiser state"))
    assert offloaded.total("update", on_host=True) == states + _sizes(base)["parameters"]  # and the reference
    assert offloaded.total("update") == base.total("update") - states
    kept = _small(tmp_path, "--model.sharding.reshard_after_forward=false", "--model.activation_checkpointing=false")
    # A layer has 2 * 128 * 10 * 16 of attention, 3 * 128 * 384 of MLP and 2 * 128 + 2 * 16 of norms: 188,704. With
    # 3000 * 128 of embedding and 128 of the last norm there are 3,403,392. All of it in bf16, and a buffer for a layer.
    assert _sizes(kept)["gathered weights"] == 2 * (3_403_392 + 188_704)
    assert _sizes(base)["gathered weights"] == 2 * (384_128 + 3 * 188_704)
    assert _sizes(kept)["activations"] > 5 * _sizes(base)["activations"]
    # 2048 completions of a rollout over 8 ranks are 256; sampled are whole groups of 8 up to max_sequences.
    few = _small(tmp_path, "--data.engine=HFEngine", "--data.engine.max_sequences=20")
    assert _sizes(few)["key-value cache"] * 16 == _sizes(base)["key-value cache"]


def test_an_adapter_alone_has_gradients_and_its_reference_is_the_policy(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    adapted = _small(tmp_path, "--config=configs/scale/lora.yaml", "--model.adapter.rank=8", "--model.kl_coef=0.1")
    # Rank 8 beside q (128 -> 128), k and v (-> 32), o (128 -> 128), gate and up (-> 384), down (384 ->): the sum of
    # inputs and outputs is 256 + 160 + 160 + 256 + 512 + 512 + 512 = 2,368. 16 layers, 8 ranks, float32.
    trained = 8 * 2_368 * 16
    assert _sizes(adapted)["gradients"] == trained // 8 * 4
    assert _sizes(adapted)["parameters"] == (3_403_392 + trained) // 8 * 4
    assert "reference" not in _sizes(adapted)


# ---- the command ----------------------------------------------------------------------------------------------------


def test_the_command_prints_a_table_on_a_machine_without_gpus_or_data(tmp_path):
    # The shape of the tiny policy alone, for GPUs that are not here.
    (tmp_path / "config.json").write_text((Path(resolve_policy(TINY)) / "config.json").read_text())
    arguments = ("plan", "--config=configs/quickstart.yaml", f"--model.policy={tmp_path}")
    arguments += ("--trainer.accelerator=gpu", "--trainer.devices=2", "--data.train_prompts=JsonlPrompts")
    arguments += ("--data.train_prompts.path=/no/such/file.jsonl",)
    done = stapo(*arguments)
    assert done.returncode == 0, done.stderr
    assert "154,016 parameters, a copy on each of 2 ranks" in done.stdout
    table = done.stdout.splitlines()
    # 154,016 * 4 / 1024 KiB
    assert next(line for line in table if line.startswith("parameters")).split() == ["parameters", *["602", "KiB"] * 3]
    assert table[-1] == "it fits"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json"]

    refused = stapo(*arguments, "--gpu_memory=3GiB")  # which are set aside for CUDA and NCCL
    assert refused.returncode == 2
    assert "Traceback" not in refused.stderr
    assert "step: 3.00 GiB do not fit into the 3.00 GiB of a GPU" in refused.stderr
    assert "shard the policy over several GPUs (configs/scale/fsdp.yaml)" in refused.stderr
    assert "it fits" not in refused.stdout


def test_every_problem_of_a_fit_is_one_of_its_plan(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(ConfigError) as refused:
        _plan(
            "--config=configs/base.yaml",
            f"--model.policy={save('qwen3_8b', tmp_path)}",
            "--trainer.devices=auto",
            "--trainer.num_nodes=3",
            "--trainer.precision=16-mixed",
            "--data.group_size=1",
            "--gpu_memory=much",
        )
    text = str(refused.value)
    for expected in (
        "trainer.devices=auto: a plan does not look at this machine",
        "trainer.precision=16-mixed: a plan knows",
        "data.prompts_per_batch=256: must be a positive multiple of 3 (ranks)",
        "data.group_size=1: must be at least 2",
        "gpu_memory: 'much' is no size of memory",
    ):
        assert expected in text
    assert "train_prompts" not in text  # a plan reads no data


def test_lengths_are_those_that_the_policy_reads(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    config = ("--config=configs/base.yaml", f"--model.policy={save('qwen3_8b', tmp_path)}", "--trainer.devices=1")
    with pytest.raises(ConfigError, match="make 41024 tokens, but the policy reads at most 32768"):
        _plan(*config, "--data.sampling.max_new_tokens=40000")


def test_a_plan_leaves_no_process_group():
    assert not torch.distributed.is_initialized()
