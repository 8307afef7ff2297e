"""Makes the runs of a study, a fixed number at a time, each in a process of its own; what is finished stays."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

from stapo_lightning.errors import ConfigError
from stapo_lightning.study.study import PlannedRun

_OUTCOME = "outcome.json"
_LOG = "log.txt"
# Exit code for a run that another process is making.
_IN_USE = 75


@dataclass(frozen=True)
class Outcome:
    """How a run ended; `outcome.json` in its folder.

    Attributes:
        code: Exit code of `stapo fit`; 0 for a run that came to its end.
        seconds: Wall time, of all attempts together.
        fingerprint: Of its options and config files.
        command: The line that makes it by itself.
        commit: Of the checkout; "" outside of one.

    """

    code: int
    seconds: float
    fingerprint: str
    command: str
    commit: str


def read_outcome(run: PlannedRun) -> Outcome | None:
    """How the run ended; None where it has not.

    Raises:
        ConfigError: It was made with other options or config files.

    """
    path = run.folder / _OUTCOME
    if not path.exists():
        return None
    outcome = Outcome(**json.loads(path.read_text()))
    if outcome.fingerprint != run.fingerprint():
        raise ConfigError(
            [f"{run.folder} was made with other options or config files than the study's now; delete it to run it anew"]
        )
    return outcome


def run_all(runs: Sequence[PlannedRun], at_a_time: int, threads: int) -> list[PlannedRun]:
    """Makes the runs that are not finished; one that was cut off goes on from its last checkpoint.

    Args:
        runs: Of one study.
        at_a_time: Runs side by side, at least 1.
        threads: Of each, at least 1.

    Returns:
        The runs that did not come to their end.

    """
    waiting = [run for run in runs if (outcome := read_outcome(run)) is None or outcome.code != 0]
    print(f"{len(runs)} runs, {len(runs) - len(waiting)} of them finished before; {at_a_time} at a time", flush=True)
    failed = []
    commit = _commit()
    # Forked from a server that has imported everything: a run of a minute does not begin with ten seconds of it.
    os.environ["OMP_NUM_THREADS"] = str(threads)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["stapo_lightning.cli"])
    started = time.perf_counter()
    with ProcessPoolExecutor(at_a_time, mp_context=context, max_tasks_per_child=1) as pool:
        jobs = {pool.submit(_fit, run, threads, commit): run for run in waiting}
        for done, job in enumerate(_until_interrupted(pool, jobs), 1):
            run, outcome = jobs[job], job.result()
            left = (time.perf_counter() - started) / done * (len(waiting) - done)
            why = "another process is making it" if outcome.code == _IN_USE else last_line(run)
            ended = "" if outcome.code == 0 else f"  FAILED with {outcome.code}: {why} ({run.folder / _LOG})"
            print(
                f"[{done}/{len(waiting)}] {run.name}  {outcome.seconds:.0f} s, about {left / 60:.0f} min left{ended}",
                flush=True,
            )
            failed += [run] if outcome.code else []
    return failed


def _until_interrupted(pool: ProcessPoolExecutor, jobs: Iterable[Future[Outcome]]) -> Iterator[Future[Outcome]]:
    """The jobs as they end. Ctrl-C reaches the runs as well, which save nothing more; those that wait do not begin."""
    try:
        yield from as_completed(jobs)
    except KeyboardInterrupt:
        pool.shutdown(cancel_futures=True)
        raise


def last_line(run: PlannedRun) -> str:
    """Of what a run printed."""
    path = run.folder / _LOG
    lines = path.read_text().strip().splitlines() if path.exists() else []
    return lines[-1] if lines else ""


def _fit(run: PlannedRun, threads: int, commit: str) -> Outcome:
    import torch  # in the run's own process

    from stapo_lightning.cli import main

    started = time.perf_counter()
    torch.set_num_threads(threads)
    run.folder.mkdir(parents=True, exist_ok=True)
    with (run.folder / _LOG).open("a") as log:
        try:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # The process of a study that was killed may still be at it.
            return Outcome(_IN_USE, 0.0, run.fingerprint(), run.command, commit)
        # The streams themselves: loggers that were set up before hold on to them.
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        sys.argv = ["stapo"]  # Lightning warns where it holds another command's arguments
        # A folder without a checkpoint is started from the beginning.
        resumed = ["--ckpt_path=last"] if (run.folder / "config.yaml").exists() else []
        before = _seconds_before(run)
        try:
            main(["fit", *run.options, *resumed])
            code = 0
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
        except Exception:
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
        seconds = before + time.perf_counter() - started
        outcome = Outcome(code, seconds, run.fingerprint(), run.command, commit)
        (run.folder / _OUTCOME).write_text(json.dumps(asdict(outcome), indent=1) + "\n")
    return outcome


def _seconds_before(run: PlannedRun) -> float:
    path: Path = run.folder / _OUTCOME
    return float(json.loads(path.read_text())["seconds"]) if path.exists() else 0.0


def _commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip()
