import random
import signal
import subprocess
import sys
import time

import pytest
import torch

from stapo_lightning.checkpoint_io import AtomicCheckpointIO, by_name, by_number, finished_folder, recover_all


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


def _save_folder(target, number):
    with finished_folder(target, True, lambda: None) as folder:
        folder.mkdir()
        torch.save({"update": number}, folder / "meta.pt")


def _update(target):
    return torch.load(target / "meta.pt")["update"]


def test_a_folder_takes_the_place_of_the_one_before(tmp_path):
    target = tmp_path / "last.ckpt"
    for number in (1, 2):
        _save_folder(target, number)
        assert _update(target) == number
        assert list(tmp_path.iterdir()) == [target]


def test_a_broken_save_leaves_the_previous_folder(tmp_path):
    target = tmp_path / "last.ckpt"
    _save_folder(target, 1)
    with pytest.raises(RuntimeError, match="broke off"), finished_folder(target, True, lambda: None) as folder:
        folder.mkdir()
        torch.save({"update": 2}, folder / "meta.pt")
        raise RuntimeError("broke off")
    assert _update(target) == 1
    _save_folder(target, 3)
    assert _update(target) == 3
    assert list(tmp_path.iterdir()) == [target]


def test_files_and_folders_take_each_others_place(tmp_path):
    target = tmp_path / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint({"update": 1}, target)
    _save_folder(target, 2)
    assert _update(target) == 2
    AtomicCheckpointIO().save_checkpoint({"update": 3}, target)
    assert torch.load(target) == {"update": 3}
    assert list(tmp_path.iterdir()) == [target]


def test_a_folder_caught_between_two_renames_comes_back(tmp_path):
    target, aside = tmp_path / "last.ckpt", tmp_path / ".last.ckpt.previous"
    _save_folder(target, 1)
    target.rename(aside)
    recover_all(tmp_path)
    assert _update(target) == 1
    # Where the kill came a moment later, the finished one stays and the next save takes the other away.
    aside.mkdir()
    recover_all(tmp_path)
    assert _update(target) == 1
    _save_folder(target, 2)
    assert list(tmp_path.iterdir()) == [target]


FOLDER_SAVER = """
import sys, torch
from pathlib import Path
from stapo_lightning.checkpoint_io import finished_folder
for number in range(1_000_000):
    with finished_folder(Path(sys.argv[1]), True, lambda: None) as folder:
        folder.mkdir()
        for part in range(4):
            torch.save(torch.full((500_000,), float(number)), folder / f"{part}.pt")
        torch.save({"update": number}, folder / "meta.pt")
    print(number, flush=True)
"""


def test_a_kill_at_any_moment_leaves_a_whole_folder(tmp_path):
    target = tmp_path / "last.ckpt"
    source = random.Random(time.time_ns())
    for _ in range(2):
        process = subprocess.Popen([sys.executable, "-c", FOLDER_SAVER, str(target)], stdout=subprocess.PIPE, text=True)
        process.stdout.readline()
        time.sleep(source.uniform(0, 0.1))
        process.send_signal(signal.SIGKILL)
        last = int((process.stdout.read().split() or ["0"])[-1])
        process.wait()
        recover_all(tmp_path)
        # The last save that was reported, or the one that was about to be.
        update = _update(target)
        assert update in (last, last + 1)
        assert all((torch.load(target / f"{part}.pt") == update).all() for part in range(4))


def test_parameters_by_name_and_by_number():
    state = {
        "state": {0: {"step": 1}, 2: {"step": 3}},  # of parameter 1 nothing is known yet
        "param_groups": [{"lr": 0.1, "params": [0, 1]}, {"lr": 0.2, "params": [2]}],
    }
    named = by_name(state, [["a", "b"], ["c"]])
    assert named["state"] == {"a": {"step": 1}, "c": {"step": 3}}
    assert named["param_groups"] == [{"lr": 0.1, "params": ["a", "b"]}, {"lr": 0.2, "params": ["c"]}]
    assert by_number(named) == state
