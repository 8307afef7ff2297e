import random
import signal
import subprocess
import sys
import time

import pytest
import torch

from stapo_lightning.checkpoint_io import AtomicCheckpointIO


class Unpicklable:
    """Stands for a save that breaks off in the middle."""

    def __reduce__(self):
        raise RuntimeError("broke off")


def test_a_broken_save_leaves_the_previous_checkpoint(tmp_path):
    path = tmp_path / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint({"update": 1}, path)
    with pytest.raises(RuntimeError, match="broke off"):
        AtomicCheckpointIO().save_checkpoint({"update": 2, "weights": torch.ones(1000), "bad": Unpicklable()}, path)
    assert torch.load(path) == {"update": 1}
    assert len(list(tmp_path.iterdir())) == 2  # the partial file of the broken save is still there ...
    AtomicCheckpointIO().save_checkpoint({"update": 3}, path)
    assert [p.name for p in tmp_path.iterdir()] == ["last.ckpt"]  # ... and the next save takes it away
    assert torch.load(path) == {"update": 3}


SAVER = """
import sys, torch
from stapo_lightning.checkpoint_io import AtomicCheckpointIO
for number in range(1_000_000):
    AtomicCheckpointIO().save_checkpoint({"weights": torch.full((2_000_000,), float(number))}, sys.argv[1])
    print(number, flush=True)
"""


def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path):
    path = tmp_path / "last.ckpt"
    source = random.Random(time.time_ns())
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", SAVER, str(path)], stdout=subprocess.PIPE, text=True)
        process.stdout.readline()
        time.sleep(source.uniform(0, 0.3))
        process.send_signal(signal.SIGKILL)
        finished = [int(line) for line in process.stdout.read().split()]
        process.wait()
        weights = torch.load(path)["weights"]
        assert (weights == weights[0]).all()
        # The last save that was reported, or the one that was about to be.
        last = finished[-1] if finished else 0
        assert weights[0] in (last, last + 1)
