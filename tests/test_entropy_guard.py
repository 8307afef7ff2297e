"""EntropyGuard: each rule on series of numbers, then runs made to explode and to collapse."""

import re

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from callbacks import EntropyGuard
from callbacks.entropy_guard import Row, fitted_change
from stapo_lightning.errors import ConfigError
from stapo_lightning.rewards import Reward
from stapo_lightning.schedule import ConstantWithWarmup
from tests.doubles import Recorder, datamodule, module, parameters, trainer

OFF = dict.fromkeys(
    (
        "collapse_level",
        "explosion_level",
        "collapse_slope",
        "explosion_slope",
        "truncation_rise",
        "reward_fall",
        "accuracy_fall",
    )
)


def guard(**options) -> EntropyGuard:
    """Only the rules that are given, judged at once."""
    return EntropyGuard(**(OFF | {"start_rollouts": 2, "window": 3, "patience": 1} | options))


def alarms(watch: EntropyGuard, entropies=(), truncated=(), rewards=()) -> list[int]:
    """Numbers of the rollouts, from 1, at which a rule raised the alarm."""
    length = max(len(entropies), len(truncated), len(rewards))
    series = [[*values, *[1.0] * length][:length] for values in (entropies, truncated, rewards)]
    return [n for n, values in enumerate(zip(*series, strict=True), 1) if watch.alarms(watch.judge(Row(n, *values)))]


# ---- the rules ------------------------------------------------------------------------------------------------------


def test_explosion_level_is_a_multiple_of_the_start():
    # start (0.4 + 0.6) / 2 = 0.5; the limit is 3 * 0.5 = 1.5, and 1.5 itself is not above it
    assert alarms(guard(explosion_level=3.0), [0.4, 0.6, 1.4, 1.5, 1.51, 1.0, 1.6]) == [5, 7]


def test_collapse_level_is_a_share_of_the_start():
    # 0.25 * 0.5 = 0.125
    assert alarms(guard(collapse_level=0.25), [0.4, 0.6, 0.2, 0.125, 0.12]) == [5]


def test_nothing_is_judged_before_the_start_is_known():
    assert alarms(guard(explosion_level=3.0, start_rollouts=3), [0.1, 9.0]) == []


def test_an_entropy_that_is_no_number_is_beyond_every_limit():
    assert alarms(guard(explosion_level=3.0), [0.5, 0.5, float("nan")]) == [3]
    assert alarms(guard(collapse_level=0.1), [0.5, 0.5, float("nan")]) == [3]


def test_fitted_change():
    assert fitted_change([1.0, 2.0, 3.0, 4.0]) == pytest.approx(3.0)
    # x - 1.5 = -1.5, -0.5, 0.5, 1.5; y - 1 = -1, 1, -1, 1: covariance 1.5 - 0.5 - 0.5 + 1.5 = 2, variance 5: 2/5 a step
    assert fitted_change([0.0, 2.0, 0.0, 2.0]) == pytest.approx(3 * 2 / 5)


def test_slopes_are_taken_over_the_window():
    # start 1; windows of three: (1, 1, 1.4) changes by 0.4, (1, 1.4, 1.6) by 0.6, (1.4, 1.6, 1.8) by 0.4
    assert alarms(guard(explosion_slope=0.5), [1.0, 1.0, 1.4, 1.6, 1.8]) == [4]
    # (1, 1, 0.8) by -0.2, (1, 0.8, 0.4) by -0.6, (0.8, 0.4, 0.3) by -0.5, which is not more than 0.5
    assert alarms(guard(collapse_slope=0.5), [1.0, 1.0, 0.8, 0.4, 0.3]) == [4]


def test_truncation_rise():
    # start 0.1; window means (0.1 + 0.1 + 0.4) / 3 = 0.2, (0.1 + 0.4 + 0.7) / 3 = 0.4, (0.4 + 0.7 + 0.7) / 3 = 0.6
    assert alarms(guard(truncation_rise=0.25), truncated=[0.1, 0.1, 0.4, 0.7, 0.7]) == [4]
    assert alarms(guard(truncation_rise=0.55), truncated=[0.1, 0.1, 0.4, 0.7, 0.7]) == []


def test_reward_fall_is_from_the_best_window():
    # window means 0.5, 0.7, 0.7, 0.4: 0.3 below the best, and a single 0.1 is not enough for 0.35
    series = [0.3, 0.5, 0.7, 0.9, 0.5, -0.2]
    assert alarms(guard(reward_fall=0.29), rewards=series) == [6]
    assert alarms(guard(reward_fall=0.35), rewards=series) == []


def test_accuracy_fall_is_from_the_best_validation():
    watch = guard(accuracy_fall=0.15)
    held = [[r.holds for r in watch.judge_accuracy({"val/a/greedy/avg@1": value})] for value in (0.5, 0.7, 0.56, 0.54)]
    assert held == [[False], [False], [False], [True]]  # 0.7 - 0.56 = 0.14, 0.7 - 0.54 = 0.16


def test_patience_counts_rollouts_in_a_row_and_an_alarm_comes_once():
    series = [1.0, 1.0, 4.0, 4.0, 1.0, 4.0, 4.0, 4.0, 4.0, 1.0, 4.0, 4.0, 4.0]
    assert alarms(guard(explosion_level=3.0, patience=3), series) == [8, 13]


def test_a_rule_that_is_off_says_nothing():
    assert alarms(guard(), [1.0, 1.0, 99.0, 0.0], [0.0, 0.0, 1.0, 1.0], [1.0, 1.0, 0.0, 0.0]) == []


def test_a_resumed_guard_goes_on_where_it_was():
    series = [1.0, 1.0, 4.0, 4.0, 4.0]
    before, after = (guard(explosion_level=3.0, patience=3) for _ in range(2))
    assert alarms(before, series[:4]) == []
    after.load_state_dict(before.state_dict())
    assert after.alarms(after.judge(Row(5, 4.0, 0.0, 0.0)))


def test_every_problem_comes_in_one_error_with_the_rest(tmp_path):
    watch = EntropyGuard(action="rollback", window=1, patience=0, collapse_level=1.5, explosion_level=0.5, lr_factor=0)
    run = trainer(tmp_path, callbacks=[watch])
    with pytest.raises(ConfigError) as error:
        run.fit(module(kl_coef=-1.0), datamodule=datamodule())
    for part in (
        "EntropyGuard.window=1: must be at least 2",
        "EntropyGuard.patience=0: must be at least 1",
        "EntropyGuard.collapse_level=1.5: must be above 0 and below 1",
        "EntropyGuard.explosion_level=0.5: must be above 1",
        "EntropyGuard.lr_factor=0: must be above 0 and at most 1",
        "no ModelCheckpoint knows which checkpoint is best",
        "model.kl_coef=-1.0",
    ):
        assert part in str(error.value)


# ---- runs -----------------------------------------------------------------------------------------------------------


class Ones(Reward):
    """The share of "1" among the signs: the policy learns to write nothing else."""

    def __call__(self, completions):
        return [c.text.count("1") / max(len(c.text), 1) for c in completions]


class Weights(Recorder):
    """Keeps the weights after each rollout as well; it runs behind the guard."""

    def __init__(self):
        super().__init__()
        self.weights, self.numbers = [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self.weights.append(parameters(pl_module.policy))
        self.numbers.append(batch.group_ids.unique().tolist())


def checkpoint(folder, monitor="reward/mean", **options) -> ModelCheckpoint:
    settings = dict(dirpath=folder, filename="{step}", monitor=monitor, mode="max", every_n_train_steps=1)
    return ModelCheckpoint(**(settings | options))


def run(folder, watch, steps, lr, warmup=12, source=None, data=None, **settings):
    """The tiny policy under AdamW, one update a rollout; returns the recorder, the module, and the events."""
    recorder, policy = Weights(), module(
        optimizer=lambda params: torch.optim.AdamW(params, lr=lr),
        prompts_per_update=8,
        schedule=ConstantWithWarmup(warmup),
    )  # fmt: skip
    logger = TensorBoardLogger(str(folder), name="run", version=0)
    fit = trainer(
        folder,
        max_steps=steps,
        logger=logger,
        log_every_n_steps=1,
        enable_checkpointing=source is not None,
        callbacks=[watch, recorder, *([source] if source else [])],
        **settings,
    )
    fit.fit(policy, datamodule=data or datamodule())
    logger.finalize("success")
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    return recorder, policy, events


def said(events) -> list[str]:
    return [event.tensor_proto.string_val[0].decode() for event in events.Tensors("guard/text_summary")]


@pytest.fixture(scope="module")
def exploded(tmp_path_factory):
    """A learning rate of 2e-2, two hundred times the quickstart's, within 12 updates; rolled back with 0.02 of it."""
    folder = tmp_path_factory.mktemp("exploded")
    watch = guard(action="rollback", explosion_level=2.0, lr_factor=0.02)
    recorder, policy, events = run(folder, watch, 9, 2e-2, source=checkpoint(folder / "checkpoints"))
    return folder, watch, recorder, policy, events


def test_an_explosion_is_rolled_back_to_the_best_checkpoint(exploded):
    _, watch, recorder, _, _ = exploded
    entropies = [metrics["policy/entropy"] for metrics in recorder.metrics]
    start = (entropies[0] + entropies[1]) / 2
    at = next(n for n, entropy in enumerate(entropies) if entropy > 2 * start)
    assert watch.rollbacks == 1
    (path,) = watch.returned
    update = int(re.search(r"step=(\d+)", path)[1])
    best = torch.load(path, weights_only=True)
    assert best["global_step"] == update <= at
    rewards = [metrics["reward/mean"] for metrics in recorder.metrics]
    assert rewards[update - 1] == max(rewards[: at + 1])
    # After the alarm's rollout the weights are those of the checkpoint, and they move on from there.
    assert torch.equal(recorder.weights[at], recorder.weights[update - 1])
    assert not torch.equal(recorder.weights[at + 1], recorder.weights[at])
    # The next rollout is sampled from them, and there is no second explosion.
    assert all(entropy < 1.5 * start for entropy in entropies[at + 1 :])
    assert len(entropies) - at > 4


def test_after_a_roll_back_prompts_updates_and_schedule_go_on_and_the_rate_is_lowered(exploded):
    _, _, recorder, policy, _ = exploded
    numbers = [number for rollout in recorder.numbers for number in rollout]
    assert numbers == list(range(9 * 8))  # nothing is replayed
    assert policy.global_step == 9
    rates = [metrics["policy/lr"] for metrics in recorder.metrics]
    lowered = next(n for n, rate in enumerate(rates) if rate < rates[0])
    # update n of the warm-up (from 1) has n / 12 of 2e-2
    assert rates == pytest.approx([2e-2 * (n + 1) / 12 * (0.02 if n >= lowered else 1) for n in range(9)])


def test_a_roll_back_restores_the_optimisers_state(exploded):
    _, watch, recorder, policy, _ = exploded
    steps = {int(state["step"]) for state in policy.trainer.optimizers[0].state.values()}
    at = next(n for n, m in enumerate(recorder.metrics, 1) if m["policy/lr"] < recorder.metrics[0]["policy/lr"]) - 1
    update = int(re.search(r"step=(\d+)", watch.returned[0])[1])
    assert steps == {update + 9 - at}


def test_the_reason_stands_in_tensorboard(exploded):
    _, _, recorder, _, events = exploded
    (text,) = said(events)
    assert re.match(r"policy/entropy is [\d.]+, 2\.\d+ times that of the start \(0\.4\d+\); the limit is", text)
    assert "explosion_level=2.0" in text
    assert re.search(r"Rolled back to update \d \(.*step=\d\.ckpt, reward/mean 0\.\d+\), number 1 of 3", text)
    assert [event.value for event in events.Scalars("guard/rollbacks")] == [1.0]
    levels = [event.value for event in events.Scalars("guard/entropy_level")]
    entropies = [metrics["policy/entropy"] for metrics in recorder.metrics]
    start = sum(entropies[:2]) / 2
    assert levels == pytest.approx([entropy / start for entropy in entropies[1:]], rel=1e-5)  # from the second on


def test_the_lowered_rate_and_the_count_survive_a_resume(exploded, tmp_path):
    folder, watch, _, _, _ = exploded
    last = max((folder / "checkpoints").glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
    resumed, policy = guard(action="rollback", explosion_level=2.0, lr_factor=0.02), module()
    resumed.load_state_dict(watch.state_dict())
    resumed.on_train_start(None, policy)
    assert last.exists()
    assert (resumed.rollbacks, policy.lr_scale) == (1, pytest.approx(0.02))


def test_after_the_last_roll_back_the_run_stops(tmp_path, caplog):
    watch = guard(action="rollback", explosion_level=1.3, lr_factor=1.0, max_rollbacks=1)
    recorder, _, events = run(tmp_path, watch, 30, 2e-2, source=checkpoint(tmp_path / "c", save_top_k=3))
    assert watch.rollbacks == 1
    assert len(recorder.metrics) < 30
    assert "The run stops: it was rolled back max_rollbacks=1 times" in said(events)[-1]
    assert "EntropyGuard at update" in caplog.text  # the log and, through it, the console


def test_without_a_checkpoint_the_run_stops(tmp_path):
    source = checkpoint(tmp_path / "c", every_n_train_steps=100)
    recorder, _, events = run(tmp_path, guard(action="rollback", explosion_level=1.3), 30, 2e-2, source=source)
    assert len(recorder.metrics) < 30
    assert "no checkpoint from before it was kept" in said(events)[0]


def test_a_collapse_stops_the_run(tmp_path):
    watch = guard(action="stop", collapse_level=0.25)
    recorder, _, events = run(tmp_path, watch, 30, 5e-3, warmup=4, data=datamodule(reward=Ones()))
    entropies = [metrics["policy/entropy"] for metrics in recorder.metrics]
    start = sum(entropies[:2]) / 2
    assert len(entropies) < 30
    assert entropies[-1] < 0.25 * start <= min(entropies[:-1])
    assert "the limit is collapse_level=0.25. The run stops" in said(events)[0]


def test_a_warning_changes_nothing(tmp_path, caplog):
    recorder, policy, events = run(tmp_path / "a", guard(explosion_level=1.2), 5, 2e-2)
    plain, _, _ = run(tmp_path / "b", guard(), 5, 2e-2)
    assert "warning: policy/entropy is" in said(events)[0]
    assert torch.equal(recorder.weights[-1], plain.weights[-1])
    assert policy.lr_scale == 1.0


def test_a_checkpoint_whose_accuracy_had_fallen_is_nothing_to_go_back_to(tmp_path):
    # After the first update, at a rate of 2e-2, the accuracy is gone; only checkpoints from then on are kept.
    tag = "val/arithmetic/greedy/avg@1"
    watch = guard(action="rollback", accuracy_fall=0.3, accuracy_tag=tag)
    recorder, _, events = run(
        tmp_path,
        watch,
        4,
        2e-2,
        warmup=0,
        source=checkpoint(tmp_path / "c", monitor=tag, every_n_train_steps=None),
        limit_val_batches=1.0,
        val_check_interval=1,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=-1,
    )
    assert len(recorder.metrics) == 2
    assert list((tmp_path / "c").glob("*.ckpt"))
    assert "no checkpoint from before it was kept" in said(events)[0]


def test_a_fall_of_accuracy_is_rolled_back_with_the_next_rollout(tmp_path):
    tag = "val/arithmetic/greedy/avg@1"
    source = checkpoint(tmp_path / "c", monitor=tag, every_n_train_steps=None)  # after each validation
    watch = guard(action="rollback", accuracy_fall=0.3, accuracy_tag=tag, lr_factor=0.001)
    recorder, _, events = run(
        tmp_path,
        watch,
        8,
        2e-2,
        warmup=80,
        source=source,
        limit_val_batches=1.0,
        val_check_interval=1,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=-1,
    )
    accuracy = {event.step: event.value for event in events.Scalars(tag)}
    assert set(accuracy) == set(range(9))
    fell = next(update for update in accuracy if max(accuracy[u] for u in range(update + 1)) - accuracy[update] > 0.3)
    assert re.match(
        rf"{re.escape(tag)} is [\d.]+%, the best so far was [\d.]+%; the limit is accuracy_fall=0.3", said(events)[0]
    )
    update = int(re.search(r"step=(\d+)", watch.returned[0])[1])
    assert torch.equal(recorder.weights[fell], recorder.weights[update - 1])  # the rollout after it: number fell + 1
    assert accuracy[fell + 1] == accuracy[update] > accuracy[fell]
