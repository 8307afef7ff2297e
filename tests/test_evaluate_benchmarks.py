"""`stapo test` over several benchmarks: killed and given again, on two ranks, and during training."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.cli import ROOT, stapo

# Two benchmarks with their own numbers of samples, under two decodings; small batches, so that there are many.
CONFIG = """
data:
  test_folder: {folder}
  eval_completions_per_batch: 8
  test_prompts:
    class_path: stapo_lightning.data.Benchmarks
    init_args:
      benchmarks:
        - name: short
          samples: 4
          prompts:
            class_path: stapo_lightning.data.ArithmeticPrompts
            init_args: {{split: test, size: {size}, max_steps: 2}}
        - name: long
          samples: 2
          prompts:
            class_path: stapo_lightning.data.ArithmeticPrompts
            init_args: {{split: test, size: {size}, min_steps: 4}}
  decodings:
    - {{name: T1.0, sampling: {{temperature: 1.0, max_new_tokens: 64}}}}
    - {{name: T0.7, sampling: {{temperature: 0.7, top_p: 0.9, max_new_tokens: 64}}}}
"""


def _arguments(tmp_path: Path, name: str, size: int, *flags: str) -> list[str]:
    config = tmp_path / f"{name}.yaml"
    config.write_text(CONFIG.format(folder=tmp_path / name, size=size))
    quick = f"--config={ROOT / 'configs' / 'quickstart.yaml'}"
    return ["test", quick, f"--config={config}", f"--trainer.logger.save_dir={tmp_path / 'runs'}", *flags]


def _results(folder: Path) -> dict:
    (test,) = folder.iterdir()
    return json.loads((test / "results.json").read_text())


def _lines(folder: Path) -> list[dict]:
    return [json.loads(line) for path in sorted(folder.glob("*/completions*.jsonl")) for line in path.open()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("whole")
    done = stapo(*_arguments(tmp_path, "test", 24))
    assert done.returncode == 0, done.stdout + done.stderr
    return tmp_path / "test", done.stdout


def test_every_benchmark_is_reported_under_every_decoding(whole):
    folder, printed = whole
    found = {(r["benchmark"], r["decoding"]): r for r in _results(folder)["results"]}
    assert set(found) == {(b, d) for b in ("short", "long", "average") for d in ("T1.0", "T0.7")}
    for decoding in ("T1.0", "T0.7"):
        short, long = found["short", decoding], found["long", decoding]
        assert (short["samples"], long["samples"]) == (4, 2)
        assert set(short["estimates"]) == {"avg@4", "pass@1", "pass@2", "pass@4", "maj@4"}
        assert set(long["estimates"]) == {"avg@2", "pass@1", "pass@2", "maj@2"}
        mean = (short["estimates"]["avg@4"]["value"] + long["estimates"]["avg@2"]["value"]) / 2
        assert found["average", decoding]["estimates"]["avg"]["value"] == pytest.approx(mean)
        assert f"{mean:.1%}" in printed
    # Cooler and cut off at 0.9, the shipped policy is right far more often.
    assert found["average", "T0.7"]["estimates"]["avg"]["value"] > found["average", "T1.0"]["estimates"]["avg"]["value"]


def test_the_results_are_in_tensorboard(whole):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, _ = whole
    events = EventAccumulator(str(folder.parent / "runs" / "quickstart" / "version_0"))
    events.Reload()
    value = {(r["benchmark"], r["decoding"]): r for r in _results(folder)["results"]}["short", "T1.0"]
    (event,) = events.Scalars("test/short/T1.0/maj@4")
    assert event.value == pytest.approx(value["estimates"]["maj@4"]["value"])
    assert "test/average/T0.7/avg" in events.Tags()["scalars"]
    (text,) = events.Tensors("results/text_summary")
    assert "short avg@4" in text.tensor_proto.string_val[0].decode()


def test_a_test_that_was_killed_goes_on_without_repeating_finished_problems(whole, tmp_path):
    command = [sys.executable, "-m", "stapo_lightning", *_arguments(tmp_path, "test", 24)]
    process = subprocess.Popen(
        command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("test/*/completions.jsonl")) or len(_lines_so_far(tmp_path)) < 60:
        assert time.monotonic() < deadline
        assert process.poll() is None, process.stderr.read().decode()
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stderr.close()
    (path,) = tmp_path.glob("test/*/completions.jsonl")
    before = path.read_bytes()
    before = before[: before.rfind(b"\n") + 1]
    total = 2 * 24 * (4 + 2)
    assert before.count(b"\n") < total
    assert not (path.parent / "results.json").exists()

    done = stapo(*_arguments(tmp_path, "test", 24))
    assert done.returncode == 0, done.stdout + done.stderr
    after = path.read_bytes()
    assert after.startswith(before)
    rows = _lines(tmp_path / "test")
    # The kill may have parted the lines of one problem: those are sampled again, and are the same.
    assert len(rows) <= total + 4
    assert len({(r["benchmark"], r["decoding"], r["problem"], r["sample"]) for r in rows}) == total
    assert _results(tmp_path / "test")["results"] == _results(whole[0])["results"]


def _lines_so_far(tmp_path: Path) -> list[bytes]:
    return [line for path in tmp_path.glob("test/*/completions.jsonl") for line in path.read_bytes().splitlines()]


def test_two_ranks_find_the_same(whole, tmp_path):
    done = stapo(*_arguments(tmp_path, "test", 24, "--trainer.devices=2", "--trainer.strategy=ddp"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert _results(tmp_path / "test")["results"] == _results(whole[0])["results"]
    assert len(_lines(tmp_path / "test")) == 2 * 24 * (4 + 2)


def test_benchmarks_during_training_choose_the_best_checkpoint(tmp_path):
    config = tmp_path / "best.yaml"
    config.write_text("""
data:
  val_prompts:
    class_path: stapo_lightning.data.Benchmarks
    init_args:
      benchmarks:
        - {name: sums, samples: 4, prompts: {class_path: stapo_lightning.data.ArithmeticPrompts, init_args: {split: val, size: 32}}}
  decodings:
    - {name: T1.0, sampling: {temperature: 1.0, max_new_tokens: 64}}
trainer:
  max_steps: 6
  val_check_interval: 2
  callbacks+:
    class_path: lightning.pytorch.callbacks.ModelCheckpoint
    init_args: {monitor: val/sums/T1.0/avg@4, mode: max, filename: "best-{step}"}
""")  # noqa: E501
    done = stapo(
        "fit", f"--config={ROOT / 'configs' / 'quickstart.yaml'}", f"--config={config}",
        f"--trainer.logger.save_dir={tmp_path}",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "quickstart" / "version_0"
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run))
    events.Reload()
    accuracy = {e.step: e.value for e in events.Scalars("val/sums/T1.0/avg@4") if e.step > 0}
    assert set(accuracy) == {2, 4, 6}
    (best,) = run.glob("checkpoints/best-*.ckpt")
    assert accuracy[torch.load(best, weights_only=True)["global_step"]] == max(accuracy.values())
