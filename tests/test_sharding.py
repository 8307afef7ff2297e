"""A sharded model against a whole one, on two processes (gloo); the checks are in sharding_worker.py."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from stapo_lightning.sharding import Sharding, is_sharded, join, within
from stapo_lightning.strategy import strategy_problems
from tests.builders import tiny_qwen3
from tests.sharding_worker import CHECKS

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each rank found, by check."""
    folder = tmp_path_factory.mktemp("sharding")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    files = [folder / f"rank{rank}.json" for rank in range(2)]
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.sharding_worker", str(port), str(file)],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "STAPO_TEST_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, file in enumerate(files)
    ]
    errors = [worker.communicate(timeout=300)[1] for worker in workers]
    assert all(file.exists() for file in files), errors
    return [json.loads(file.read_text()) for file in files]


@pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])
def test_on_two_ranks(found, check):
    assert [rank.get(check, "not reached") for rank in found] == ["", ""], "\n".join(r.get(check, "") for r in found)


def test_auto_precision_follows_the_trainer():
    assert Sharding().under("bf16-mixed").gathered == "bfloat16"
    assert Sharding().under("32-true").gathered == "float32"
    assert Sharding(gathered="float32").under("bf16-mixed").gathered == "float32"


def test_a_whole_model_needs_no_partner():
    model = tiny_qwen3()
    assert not is_sharded(model) and not is_sharded(None)
    assert within(model, lambda: 3) == 3
    join(model)
    join(None)


@pytest.mark.parametrize(
    ("strategy", "reason"),
    [
        ("fsdp", "FSDP1"),
        ("fsdp_cpu_offload", "FSDP1"),
        ("lightning.pytorch.strategies.FSDPStrategy", "FSDP1"),
        ("deepspeed_stage_2", "DeepSpeed"),
        ("lightning.pytorch.strategies.DeepSpeedStrategy", "DeepSpeed"),
        ("lightning.pytorch.strategies.ModelParallelStrategy", "checkpoints"),
    ],
)
def test_other_ways_to_shard_name_the_line_to_write(strategy, reason):
    (problem,) = strategy_problems(strategy)
    assert f"trainer.strategy={strategy}" in problem
    assert reason in problem
    assert "trainer.strategy: fsdp2" in problem


@pytest.mark.parametrize("strategy", ["auto", "ddp", "fsdp2", "stapo_lightning.strategy.ShardedStrategy", "None"])
def test_what_works_is_let_through(strategy):
    assert strategy_problems(strategy) == []
