"""Runs of a study in their own processes: what is finished stays, what was cut off goes on."""

import fcntl
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from stapo_lightning.compare.runs import read_scalars
from stapo_lightning.study.study import Method, PlannedRun, Regime, Study
from tests.cli import ROOT, stapo

SMALL = """
data:
  val_prompts:
    class_path: stapo_lightning.data.ArithmeticPrompts
    init_args: {split: val, size: 8}
trainer:
  enable_progress_bar: false
  callbacks:
    - class_path: lightning.pytorch.callbacks.ModelCheckpoint
      init_args: {filename: "{step}", every_n_train_steps: 2, save_last: true}
"""


def _study(folder: Path) -> Study:
    (folder / "small.yaml").write_text(SMALL)
    configs = ["configs/quickstart.yaml", "configs/debug.yaml", str(folder / "small.yaml")]
    return Study(
        regimes=[Regime("small", configs)],
        methods=[
            Method("STAPO", "main", seeds=[1, 2], drawn=True),
            Method("no KL below 0", "main", options=["--model.kl_coef=-1"], seeds=[1]),
        ],
        reference="STAPO",
        accuracy="val/arithmetic/greedy/avg@1",
        folder=str(folder / "runs"),
        warmup_updates=0,
        window=2,
    )


def _stapo_study(command: str, study: Study, folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump(asdict(study)))
    return subprocess.run(
        [sys.executable, "-m", "stapo_lightning.study", command, f"--study={path}", *flags],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def _outcome(run: PlannedRun) -> dict:
    return json.loads((run.folder / "outcome.json").read_text())


def _losses(run: PlannedRun) -> dict[str, dict[int, float]]:
    scalars = read_scalars(run.folder)
    return {tag: dict(values) for tag, values in scalars.items() if tag.startswith(("policy/", "reward/", "val/"))}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A study of two good runs and one that cannot start."""
    folder = tmp_path_factory.mktemp("study")
    study = _study(folder)
    return folder, study, _stapo_study("run", study, folder, "--at_a_time=2")


def test_good_runs_end_and_a_bad_one_is_named(made):
    _, study, done = made
    first, bad, second = study.runs()
    assert done.returncode == 2, done.stdout + done.stderr
    assert "3 runs, 0 of them finished before; 2 at a time" in done.stdout
    assert f"1 of 3 runs failed: {bad.folder}/log.txt; given again, the command retries them" in done.stderr
    assert "Traceback" not in done.stderr
    assert [_outcome(run)["code"] for run in (first, bad, second)] == [0, 2, 0]
    assert "kl_coef=-1" in (bad.folder / "log.txt").read_text()
    assert set(_losses(first)["policy/entropy"]) == {1, 2, 3, 4}
    assert _outcome(first)["command"] == first.command and _outcome(first)["seconds"] > 1
    # Two seeds are two runs.
    assert _losses(first) != _losses(second)


def test_a_run_of_a_study_is_the_run_of_its_line(made, tmp_path):
    _, study, _ = made
    first = study.runs()[0]
    done = stapo("fit", *first.options, f"--trainer.logger.init_args.save_dir={tmp_path}")
    assert done.returncode == 0, done.stderr[-2000:]
    again = PlannedRun("small", "STAPO", 1, tmp_path / "STAPO" / "seed_1", ())
    assert _losses(again) == _losses(first)


def test_given_again_only_what_is_not_finished_is_made(made):
    folder, study, _ = made
    first, bad, _ = study.runs()
    before, log = (first.folder / "log.txt").stat().st_mtime_ns, (bad.folder / "log.txt").stat().st_size
    done = _stapo_study("run", study, folder)
    assert "3 runs, 2 of them finished before; 1 at a time" in done.stdout
    assert (first.folder / "log.txt").stat().st_mtime_ns == before
    assert (bad.folder / "log.txt").stat().st_size > log


def test_a_run_that_was_cut_off_goes_on(made, tmp_path):
    _, whole, _ = made
    study = _study(tmp_path)
    run = study.runs()[0]
    # As a kill after update 2 leaves it: a folder with a checkpoint, and no outcome.
    assert stapo("fit", *run.options, "--trainer.max_steps=2").returncode == 0
    assert not (run.folder / "outcome.json").exists()
    done = _stapo_study("run", study, tmp_path, "--only=small / STAPO / seed 1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert _losses(run) == _losses(whole.runs()[0])


def test_a_run_that_another_process_makes_is_left_to_it(tmp_path):
    study = _study(tmp_path)
    run = study.runs()[0]
    run.folder.mkdir(parents=True)
    with (run.folder / "log.txt").open("a") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        done = _stapo_study("run", study, tmp_path, "--only=small / STAPO / seed 1")
    assert done.returncode == 2
    assert "FAILED with 75: another process is making it" in done.stdout
    assert sorted(path.name for path in run.folder.iterdir()) == ["log.txt"]


def test_a_finished_run_of_another_config_is_not_taken_for_this_one(made, tmp_path):
    _, study, _ = made
    changed = _study(tmp_path)
    changed.methods[0].options.append("--model.kl_coef=0.5")
    done = _stapo_study("run", Study(**{**vars(changed), "folder": study.folder}), tmp_path)
    assert done.returncode == 2
    assert "was made with other options or config files than the study's now; delete it" in done.stderr


def test_the_report_of_what_was_made(made):
    folder, study, _ = made
    done = _stapo_study("report", study, folder, f"--output={folder / 'report'}", "--title=Small")
    assert done.returncode == 0, done.stderr
    # The run that could not start has logged nothing, and there is no difference to draw.
    assert "seed 1 stopped with 2" in done.stdout and "it is left out: the run logged no val/" in done.stdout
    page = (folder / "report" / "report.md").read_text()
    assert page.startswith("# Small\n") and "| small | STAPO | 2 |" in page and "* small / no KL below 0" in page
    found = sorted(path.name for path in (folder / "report").iterdir())
    assert found == ["curves.png", "report.md", "runs.csv"]
