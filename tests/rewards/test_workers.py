"""Rewards in processes of their own: what each kind of hostile row costs, and what is left behind."""

import math
import os
import subprocess
import sys
import time

import psutil
import pytest

from stapo_lightning.errors import ConfigError, RewardError
from stapo_lightning.rewards import BoxedMatch, Reward, RewardWorkers, score_completions
from tests.builders import completions
from tests.cli import ROOT
from tests.doubles import Recorder, datamodule, module, trainer
from tests.rewards.hostile import DiesWhenIdle, Fixed, HangsOnce, HoldsLambda, Obeys, Raises, Unloadable

NAN = float("nan")


@pytest.fixture
def pool():
    """Makes pools, and checks that they leave nothing behind."""
    before, made = _children(), []

    def make(reward=None, workers=2, timeout_s=10.0):
        made.append(RewardWorkers(reward or Obeys(), workers, timeout_s))
        return made[-1]

    yield make
    for workers in made:
        workers.close()
    assert _children() == before  # no zombie either


def _children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def _gone(pid: int, within_s: float = 3.0) -> bool:
    """Ended; a zombie that its new parent has not collected yet has ended too."""
    ends = time.monotonic() + within_s
    while time.monotonic() < ends:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False


def _values(scored, nan=-1.0):
    return [nan if math.isnan(v) else v for v in scored.values]


# ---- good rows ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2])
def test_values_are_those_of_the_training_process_in_order(pool, workers):
    rows = completions([rf"\boxed{{{i % 5}}}" for i in range(501)], answer="3")
    there = pool(BoxedMatch(), workers)
    for count in (501, 0, 1, 2, 3, 100):  # one pool, call after call
        assert there.score(rows[:count]) == score_completions(BoxedMatch(), rows[:count])
    assert len(_children()) == workers


def test_order_is_kept_where_rows_take_different_times(pool):
    texts = [f"sleep {0.2 if i % 7 == 0 else 0}" if i % 3 == 0 else str(i) for i in range(40)]
    assert pool().score(completions(texts)).values == [1.0 if i % 3 == 0 else i for i in range(40)]


def test_slow_rows_are_shared(pool):
    there = pool()
    there.score(completions(["0"] * 500))  # quick rows, so that the first chunk after them is a large one
    started = time.perf_counter()
    there.score(completions(["sleep 0.25"] * 8))
    assert time.perf_counter() - started < 8 * 0.25 * 0.75


def test_processes_are_kept_and_no_more_are_started_than_there_are_rows(pool):
    there = pool()
    assert not _children()
    first = there.score(completions(["pid"])).values
    assert len(_children()) == 1
    both = {pid for _ in range(5) for pid in there.score(completions(["pid"] * 50)).values}
    assert len(_children()) == 2
    assert set(first) | both <= _children()


def test_processes_are_small_and_run_the_reward_on_their_main_thread(pool):
    there = pool(workers=1)
    started = time.perf_counter()
    scored = there.score(completions(["torch", "threads", "alarm", "interrupt"]))
    assert scored.values == [0.0, 1.0, 0.25, 1.0] and scored.errors == 0
    assert time.perf_counter() - started < 3.0
    (child,) = psutil.Process().children()
    assert child.num_threads() == 1
    assert child.memory_info().rss < 100e6


def test_large_completions_pass(pool):
    texts = [f"length {'{' * n}" for n in (1_000_000, 100_000, 3_000_000, 0)]
    assert pool(workers=1).score(completions(texts)).values == [1_000_000, 100_000, 3_000_000, 0]


# ---- rows that cost themselves alone --------------------------------------------------------------------------------


def test_a_row_that_sleeps_60_s_costs_its_limit(pool):
    there = pool(timeout_s=2.0)
    there.score(completions(["0"] * 8))
    before = _children()
    started = time.perf_counter()
    scored = there.score(completions(["1", "0", "sleep 60", "1", "0", "1"]))
    assert 1.9 < time.perf_counter() - started < 3.0
    assert _values(scored) == [1, 0, -1, 1, 0, 1]
    assert (scored.errors, scored.timeouts) == (0, 1)
    assert len(before & _children()) == 1  # the other process went on
    assert there.score(completions(["1", "0"])).values == [1.0, 0.0]


@pytest.mark.parametrize("text", ["bignum", "regex"])
def test_a_row_that_holds_the_interpreter_is_killed(pool, text):
    started = time.perf_counter()
    scored = pool(timeout_s=1.0).score(completions(["1", text, "0"]))
    assert time.perf_counter() - started < 3.0
    assert _values(scored) == [1, -1, 0] and (scored.errors, scored.timeouts) == (0, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("exit 3", "worker process died (exit code 3)"),
        ("exit 0", "worker process died (exit code 0)"),
        ("segfault", "worker process died (SIGSEGV)"),
        ("overflow", ""),  # RecursionError or SIGSEGV, as the interpreter has it
        ("sysexit 3", "SystemExit: 3"),
        ("no.number", "ValueError: could not convert string to float: 'no.number'"),
        ("none", ""),
        ("nan", ""),
        ("inf", ""),
    ],
)
def test_a_row_without_a_reward_is_an_error_of_that_row(pool, caplog, text, message):
    texts = ["1", "0"] * 10
    texts[7] = text
    scored = pool(workers=1).score(completions(texts))
    assert _values(scored) == [-1 if i == 7 else 1 - i % 2 for i in range(20)]
    assert (scored.errors, scored.timeouts) == (1, 0)
    assert message in caplog.text


def test_the_first_traceback_is_logged_once(pool, caplog):
    there = pool(Raises())
    assert there.score(completions(["1", "zero", "one"])).errors == 2
    assert "Raises raised on 2 of 3 completions" in caplog.text
    assert "ValueError: could not convert string to float: 'zero'" in caplog.text
    assert caplog.text.count("Traceback") == 1 and "return [float(c.text) for c in completions]" in caplog.text
    there.score(completions(["1", "two"]))
    assert caplog.text.count("Traceback") == 1 and "'two'" in caplog.text


@pytest.mark.parametrize("verb", ["child", "orphan"])
def test_what_a_row_started_is_gone_with_it(pool, tmp_path, verb):
    scored = pool(timeout_s=1.0).score(completions(["1", f"{verb} {tmp_path / 'pid'}"]))
    assert _values(scored) == [1, -1]
    assert (scored.errors, scored.timeouts) == ((0, 1) if verb == "child" else (1, 0))
    assert _gone(int((tmp_path / "pid").read_text()))


def test_the_completions_of_one_poisonous_prompt_cost_themselves_alone(pool):
    # Eight neighbours: twice as many as make one process give up where it meets nothing else.
    scored = pool(workers=1, timeout_s=0.3).score(completions(["1"] * 16 + ["sleep 60"] * 8 + ["1"] * 40))
    assert _values(scored) == [1] * 16 + [-1] * 8 + [1] * 40
    assert (scored.errors, scored.timeouts) == (0, 8)


def test_a_reward_that_hangs_on_every_row_does_not_stall_the_run(pool, caplog):
    there = pool(timeout_s=0.4)
    started = time.perf_counter()
    scored = there.score(completions(["sleep 60"] * 300))
    assert time.perf_counter() - started < 4 * (0.4 + 0.5)
    assert _values(scored) == [-1] * 300 and (scored.errors, scored.timeouts) == (0, 300)
    assert "gave up 292 of 300 completions" in caplog.text
    assert there.score(completions(["1", "0"])).values == [1.0, 0.0]


def test_a_good_row_is_not_scored_again_and_again_while_others_hang(pool):
    there = pool(workers=1, timeout_s=0.3)
    there.score(completions(["0"] * 500))  # so that the first chunk is a large one
    started = time.perf_counter()
    scored = there.score(completions(["1"] + ["sleep 60"] * 99))
    assert time.perf_counter() - started < 5 * (0.3 + 0.5)
    assert _values(scored) == [1] + [-1] * 99 and scored.timeouts == 99


def test_a_process_that_dies_between_two_calls_is_replaced(pool):
    there = pool(DiesWhenIdle(), workers=1)
    for value in (0.0, 1.0):
        scored = there.score(completions([str(value)]))
        assert scored.values == [value] and scored.errors == 0
        time.sleep(0.3)


# ---- what stops the run ---------------------------------------------------------------------------------------------


def test_every_row_raising_stops_the_run_with_the_last_traceback(pool):
    with pytest.raises(RewardError) as caught:
        pool(Raises()).score(completions([f"text {i}" for i in range(8)]))
    text = str(caught.value)
    assert "reward tests.rewards.hostile.Raises raised on every one of 8 completions" in text
    assert "the last time ValueError: could not convert string to float: 'text 7'\nTraceback" in text
    assert "return [float(c.text) for c in completions]" in text
    assert not _children()


def test_every_row_crashing_stops_the_run(pool):
    with pytest.raises(RewardError, match=r"on every one of 50 completions.*worker process died \(exit code 4\)"):
        pool().score(completions(["exit 4"] * 50))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (0.5, "returned float 0.5 for 1 completions"),
        (None, "returned NoneType None for 1 completions"),
        ([], "returned 0 values for 1 completions"),
        ([0.5, 0.5, 0.5], "returned 3 values for 1 completions"),
        ([1.0], "returned 1 values for 2 completions"),
    ],
)
def test_wrong_shape_stops_the_run(pool, value, message):
    with pytest.raises(RewardError) as caught:
        pool(Fixed(value)).score(completions(["a"] * 8))
    assert f"reward tests.rewards.hostile.Fixed {message}" in str(caught.value)
    assert "return a list with one float for each completion" in str(caught.value)


def test_a_reward_that_cannot_be_pickled_is_refused_with_the_way_out():
    class Local(Reward):
        def __call__(self, completions):
            return [1.0] * len(completions)

    for reward in (Local(), HoldsLambda()):
        with pytest.raises(RewardError, match=rf"{type(reward).__name__} cannot be pickled.*data\.reward_workers: 0"):
            RewardWorkers(reward, 1, 1.0)


def test_a_reward_that_cannot_be_loaded_is_refused_with_the_way_out(pool):
    with pytest.raises(RewardError) as caught:
        pool(Unloadable()).score(completions(["a"]))
    assert "Unloadable cannot be loaded in a worker process; set data.reward_workers: 0" in str(caught.value)
    assert "OSError: the file of rules is missing" in str(caught.value)


# ---- what is left behind --------------------------------------------------------------------------------------------

_PARENT = """
import sys
from tests.rewards.hostile import Obeys
from stapo_lightning.prompt import Prompt
from stapo_lightning.rewards import Completion, RewardWorkers
pool = RewardWorkers(Obeys(), 2, 100.0)
rows = [Completion(Prompt("?", "1"), text, 1, False) for text in sys.argv[1:]]
print([int(value) for value in pool.score([rows[0]] * 20).values], flush=True)
pool.score(rows[1:])
"""


def _parent(*texts):
    return subprocess.Popen([sys.executable, "-c", _PARENT, *texts], stdout=subprocess.PIPE, cwd=ROOT, text=True)


@pytest.mark.parametrize("text", ["bignum", "sleep 300"])
def test_processes_die_with_a_parent_that_is_killed(tmp_path, text):
    parent = _parent("pid", f"child {tmp_path / 'pid'}", text)
    parent.stdout.readline()
    ends = time.monotonic() + 10
    while not (tmp_path / "pid").exists() and time.monotonic() < ends:
        time.sleep(0.05)
    time.sleep(0.3)
    family = psutil.Process(parent.pid).children(recursive=True)
    assert len(family) == 3  # two processes, and what one of them started
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert all(_gone(process.pid) for process in family)


def test_processes_end_with_the_interpreter():
    parent = _parent("pid", "1")
    pids = {int(pid) for pid in parent.stdout.readline().strip("[]\n").split(",")}
    assert parent.wait(20) == 0
    parent.stdout.close()
    assert pids and all(_gone(pid) for pid in pids)


def test_a_script_that_defines_its_own_reward_is_told_to_move_it(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "from stapo_lightning.rewards import Reward, RewardWorkers\n"
        "class Mine(Reward):\n    def __call__(self, completions):\n        return [1.0 for _ in completions]\n"
        "RewardWorkers(Mine(), 1, 1.0)\n"
    )
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert "move it into a module of its own, or set data.reward_workers: 0" in done.stderr


# ---- in a run -------------------------------------------------------------------------------------------------------


def test_a_run_goes_on_over_a_row_that_hangs(tmp_path):
    recorder = Recorder()
    data = datamodule(reward=HangsOnce(str(tmp_path / "lock")), reward_workers=2, reward_timeout_s=2.0)
    trainer(tmp_path, max_steps=4, callbacks=[recorder]).fit(module(), datamodule=data)
    assert [m["reward/timeouts"] for m in recorder.metrics] == [1, 0]
    assert [m["reward/errors"] for m in recorder.metrics] == [0, 0]
    first, second = recorder.batches
    assert first.rewards.isnan().sum() == 1 and not second.rewards.isnan().any()
    assert (first.advantages[first.rewards.isnan()] == 0).all()
    assert 2.0 <= first.reward_seconds < 4.0 and second.reward_seconds < 1.0
    assert not _children()  # ended by teardown


def test_workers_change_nothing_but_where_the_reward_runs(tmp_path):
    rewards = []
    for workers in (0, 2):
        recorder = Recorder()
        data = datamodule(reward_workers=workers)
        trainer(tmp_path, callbacks=[recorder]).fit(module(), datamodule=data)
        rewards.append(recorder.batches[0].rewards.tolist())
    assert rewards[0] == rewards[1]


def test_a_row_that_hangs_counts_as_wrong_in_evaluation(tmp_path):
    data = datamodule(reward=HangsOnce(str(tmp_path / "lock")), reward_workers=1, reward_timeout_s=1.0)
    (hung,) = trainer(tmp_path, limit_val_batches=1.0).validate(module(), datamodule=data, verbose=False)
    (whole,) = trainer(tmp_path, limit_val_batches=1.0).validate(module(), datamodule=datamodule(), verbose=False)
    assert 12 * (whole["val/arithmetic/greedy/avg@1"] - hung["val/arithmetic/greedy/avg@1"]) == pytest.approx(1)


def test_problems_are_listed_before_anything_runs(tmp_path):
    data = datamodule(reward=HoldsLambda(), reward_workers=1, reward_timeout_s=NAN)
    with pytest.raises(ConfigError) as caught:
        trainer(tmp_path).fit(module(), datamodule=data)
    for expected in ("data.reward_timeout_s=nan: must be above 0", "HoldsLambda cannot be pickled"):
        assert expected in str(caught.value)
    with pytest.raises(ConfigError, match=r"data\.reward_workers=-1: must be at least 0"):
        trainer(tmp_path).fit(module(), datamodule=datamodule(reward_workers=-1))
