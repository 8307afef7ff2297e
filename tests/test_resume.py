"""A run that is cut and resumed ends bit for bit where the uninterrupted run ends (CPU, one process).

The prompts are 20, a rollout takes 4 of them and two updates: an epoch ends at update 10, in a warm-up of 14 updates.
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).parents[1]
STEPS = 24


CHECKPOINTS = """
trainer:
  callbacks:
    - class_path: lightning.pytorch.callbacks.ModelCheckpoint
      init_args: {every_n_train_steps: 2, save_last: true}
"""


def _command(folder: Path, *flags: str) -> list[str]:
    folder.mkdir(exist_ok=True)
    overlay = folder / "checkpoints.yaml"
    overlay.write_text(CHECKPOINTS)
    return [
        sys.executable,
        "-m",
        "stapo_lightning",
        "fit",
        "--config=configs/quickstart.yaml",
        f"--config={overlay}",
        f"--trainer.logger.save_dir={folder}",
        f"--trainer.max_steps={STEPS}",
        "--trainer.val_check_interval=4",
        "--model.prompts_per_update=2",
        "--model.schedule.warmup_updates=14",
        "--data.prompts_per_batch=4",
        "--data.train_prompts.size=20",
        "--data.val_prompts.size=8",
        *flags,
    ]


def _environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1"}


def _finish(folder: Path, *flags: str) -> str:
    done = subprocess.run(
        _command(folder, *flags), cwd=ROOT, env=_environment(), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def _run(folder: Path) -> Path:
    (run,) = (folder / "quickstart").glob("version_*")
    return run


def _kill_after(folder: Path, saves: int, delay: float, *flags: str) -> None:
    """Starts the run and kills it `delay` seconds after its checkpoint was written for the `saves`-th time."""
    process = subprocess.Popen(
        _command(folder, *flags), cwd=ROOT, env=_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    seen: set[int] = set()
    deadline = time.monotonic() + 120
    while len(seen) < saves and process.poll() is None and time.monotonic() < deadline:
        for path in folder.glob("quickstart/version_0/checkpoints/last.ckpt"):
            seen.add(path.stat().st_mtime_ns)
        time.sleep(0.002)
    time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "the run ended before it could be killed"


def _state(folder: Path) -> dict:
    return torch.load(_run(folder) / "checkpoints" / "last.ckpt", weights_only=True)


def _scalars(folder: Path) -> dict[str, dict[int, float]]:
    """Tag -> update -> value; wall times and rates are not compared."""
    events = EventAccumulator(str(_run(folder)), size_guidance={"scalars": 0})
    events.Reload()
    tags = [t for t in events.Tags()["scalars"] if not t.startswith("time/") and "per_second" not in t]
    scalars = {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in tags}
    # No update is drawn twice: what was logged after the checkpoint and before the kill has been dropped.
    assert all(len(scalars[tag]) == len(events.Scalars(tag)) for tag in tags)
    return scalars


def _assert_same(left, right, path="state"):
    if isinstance(left, dict):
        assert left.keys() == right.keys(), path
        for key in left:
            _assert_same(left[key], right[key], f"{path}.{key}")
    elif isinstance(left, list | tuple):
        assert len(left) == len(right), path
        for number, (a, b) in enumerate(zip(left, right, strict=True)):
            _assert_same(a, b, f"{path}[{number}]")
    elif isinstance(left, torch.Tensor):
        assert torch.equal(left, right), path
    else:
        assert left == right, path


def _assert_same_end(resumed: Path, whole: Path) -> None:
    left, right = _state(resumed), _state(whole)
    for key in ("state_dict", "optimizer_states", "global_step", "epoch", "RolloutDataModule", "stapo", "selector"):
        _assert_same(left[key], right[key], key)
    _assert_same(_scalars(resumed), _scalars(whole), "scalars")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    _finish(folder)
    return folder


def test_the_whole_run_covers_what_it_should(whole):
    scalars = _scalars(whole)
    assert set(scalars["policy/lr"]) == set(range(1, STEPS + 1))
    assert scalars["policy/lr"][7] == pytest.approx(7 / 14 * scalars["policy/lr"][24])
    assert _state(whole)["RolloutDataModule"] == {"prompts_seen": STEPS * 2}


def test_killed_at_random_points(whole, tmp_path):
    source = random.Random(time.time_ns())
    # Saves come every second update; a delay of up to 0.2 s reaches into the next rollout, update or save.
    points = [(source.randint(1, 3), source.uniform(0, 0.2)) for _ in range(3)]
    print("killed at", points)
    _kill_after(tmp_path, *points[0])
    _kill_after(tmp_path, points[1][0] + 1, points[1][1], "--ckpt_path=last")
    _kill_after(tmp_path, points[2][0] + 1, points[2][1], "--ckpt_path=last")
    _finish(tmp_path, "--ckpt_path=last")
    _assert_same_end(tmp_path, whole)


@pytest.mark.parametrize("cut", [10, 14, 16], ids=["epoch end", "inside an epoch", "at a validation"])
def test_stopped_and_resumed(cut, whole, tmp_path):
    _finish(tmp_path, f"--trainer.max_steps={cut}")
    _finish(tmp_path, "--ckpt_path=last")
    _assert_same_end(tmp_path, whole)


def test_a_pooled_threshold_goes_on(tmp_path):
    # More candidates than the paper's 0.002 gives in so small a run; the eight updates of the pool reach over the cut.
    pooled = ("--model.selector.pooled_updates=8", "--model.selector.tau_p=0.05")
    _finish(tmp_path / "whole", *pooled)
    _finish(tmp_path / "cut", *pooled, "--trainer.max_steps=14")
    _finish(tmp_path / "cut", *pooled, "--ckpt_path=last")
    _assert_same_end(tmp_path / "cut", tmp_path / "whole")
    pool = _state(tmp_path / "whole")["selector"]["pool"]
    assert len(pool) == 8 and sum(map(len, pool)) > 8


def test_killed_between_checkpoint_and_validation(whole, tmp_path):
    # 200 held-out problems make the validation long enough to be hit; the checkpoint of update 8 is the fourth.
    flag = "--data.val_prompts.size=200"
    _kill_after(tmp_path, 4, 0.02, flag)
    assert _state(tmp_path)["global_step"] == 8
    assert 8 not in _scalars(tmp_path)["val/arithmetic/greedy/avg@1"]
    _finish(tmp_path, flag, "--ckpt_path=last")
    assert set(_scalars(tmp_path)["val/arithmetic/greedy/avg@1"]) == {0, 8, 16, 24}
    assert torch.equal(
        *(_state(folder)["state_dict"]["policy.model.embed_tokens.weight"] for folder in (tmp_path, whole))
    )


def test_killed_before_the_first_checkpoint_starts_again(tmp_path):
    process = subprocess.Popen(_command(tmp_path), cwd=ROOT, env=_environment(), stdout=subprocess.DEVNULL)
    while not list(tmp_path.glob("quickstart/version_0/config.yaml")):
        time.sleep(0.002)
    process.kill()
    process.wait()
    assert not (_run(tmp_path) / "checkpoints" / "last.ckpt").exists()
    output = _finish(tmp_path, "--ckpt_path=last", "--trainer.max_steps=2")
    assert "stopped before its first checkpoint" in output
    assert _state(tmp_path)["global_step"] == 2


def test_flags_given_on_resume_count(tmp_path):
    # Trained at 1e-4, resumed at 5e-5: the optimiser state in the checkpoint must not bring the old rate back.
    _finish(tmp_path, "--trainer.max_steps=14")
    _finish(tmp_path, "--ckpt_path=last", "--trainer.max_steps=16", "--model.optimizer.lr=5e-5")
    rates = _scalars(tmp_path)["policy/lr"]
    assert rates[14] == pytest.approx(1e-4)
    assert rates[15] == pytest.approx(5e-5)
    assert sorted(path.name for path in _run(tmp_path).glob("config*.yaml")) == ["config-2.yaml", "config.yaml"]
