"""One global denominator and one global quantile: the number of ranks does not change the update."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.doubles import TINY
from tests.ranks_worker import METHODS

ROOT = Path(__file__).parents[1]


def _weights(folder: Path) -> torch.Tensor:
    return torch.cat([value.flatten() for _, value in sorted(load_file(folder / "model.safetensors").items())])


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Policies of every method after four updates on 1 and on 2 processes (gloo, DDP)."""
    folders = {}
    for ranks in (1, 2):
        folders[ranks] = tmp_path_factory.mktemp(f"ranks{ranks}")
        worker = [sys.executable, "-m", "tests.ranks_worker", str(ranks), str(folders[ranks])]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(worker, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folders


@pytest.mark.parametrize("method", METHODS)
def test_two_ranks_update_like_one(runs, method):
    one, two = (_weights(runs[ranks] / method / "run" / "policy") for ranks in (1, 2))
    start = _weights(Path(TINY))
    change = (one - start).abs().max()
    # The updates moved the weights, and the two runs moved them alike to float32 rounding.
    assert change > 1e-3
    assert (one - two).abs().max() < 1e-5
