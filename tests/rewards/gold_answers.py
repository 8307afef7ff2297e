"""The gold answers of public benchmarks, where this checkout has them beside it."""

import json

import pyarrow.parquet as pq
import pytest

from tests.builders import SHARED

BENCHMARKS = ["aime24", "aime25", "amc23", "math500", "minerva", "olympiadbench"]


def benchmark(name):
    """All gold answers of one benchmark, in order."""
    path = SHARED / "data" / "benchmarks" / f"{name}.parquet"
    if not path.exists():
        pytest.skip(f"{path} is not there")
    return [row["ground_truth"] for row in pq.read_table(path, columns=["reward_model"])["reward_model"].to_pylist()]


def gsm8k():
    """The 8,792 gold answers of GSM8K, each behind #### as its solutions end."""
    answers = []
    for split in ("train", "test"):
        path = SHARED / "data" / "gsm8k" / f"{split}.jsonl"
        if not path.exists():
            pytest.skip(f"{path} is not there")
        answers += [json.loads(line)["answer"] for line in path.read_text().splitlines()]
    return answers
