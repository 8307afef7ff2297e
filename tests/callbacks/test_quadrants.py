"""Probability x entropy: who carries the gradient."""

from types import SimpleNamespace

import pytest
import torch

from callbacks.quadrants import Quadrants
from stapo_lightning.batch import TokenScores, UpdateRecord
from stapo_lightning.distributed import Ranks
from stapo_lightning.errors import ConfigError
from stapo_lightning.objective import S2T, KeepAll, RandomCandidates
from tests.builders import rollout_batch
from tests.doubles import Recorder, datamodule, module, trainer


class Log:
    """A logger that keeps what it is given."""

    def __init__(self):
        self.values = {}

    def log_metrics(self, metrics, step):
        self.values[step] = metrics


def _after(callback, probs, entropy, collision, updates, log, selector=None):
    """What `callback` logs of a row with advantage 1 and, under it, one with advantage -1, for each update."""
    n = len(probs)
    batch = rollout_batch([1.0, -1.0] * (n // 2), [probs.shape[1]] * n, probs.log())
    nothing = torch.zeros_like(probs, dtype=torch.bool)
    record = UpdateRecord(
        TokenScores(probs.log(), entropy, collision), nothing, nothing, torch.zeros_like(probs), nothing, updates
    )
    policy = SimpleNamespace(config=SimpleNamespace(vocab_size=20))
    pl_module = SimpleNamespace(ranks=Ranks(), policy=policy, selector=selector or S2T())
    run = SimpleNamespace(loggers=[log], logger=None, log_every_n_steps=1, is_global_zero=True)
    callback.setup(run, pl_module, "fit")
    callback.on_train_batch_end(run, pl_module, {"record": record}, batch, 0)


def _numbers():
    positive = torch.tensor(
        [[0.001, 0.0005, 0.5, 0.9, 0.0015], [0.1, 0.2, 0.05, 1.0, 0.9], [0.9, 0.8, 0.6, 0.85, 0.5]],
        dtype=torch.float64,
    )
    negative = torch.tensor([[1e-5], [0.01], [0.99]], dtype=torch.float64).expand(3, 5)
    return torch.stack([positive, negative], 1)


def test_quadrants_by_hand():
    log = Log()
    _after(Quadrants(every_n_updates=0), *_numbers(), (1, 1), log)
    # Unlikely: entropies 0.1, 0.2, 0.9; their 0.75-quantile lies at place 1.5: 0.55.
    # Squared gradients 1 - 2p + c: 1.898 and 1.799; 1.497 (entropy 0.9); 0.6; 0.05. In all 5.844.
    assert log.values[1] == pytest.approx(
        {
            "quadrants/tau_h": 0.55,
            "quadrants/low_prob_low_entropy/count": 2,
            "quadrants/low_prob_low_entropy/token_share": 0.4,
            "quadrants/low_prob_low_entropy/grad_share": 3.697 / 5.844,
            "quadrants/low_prob_high_entropy/count": 1,
            "quadrants/low_prob_high_entropy/token_share": 0.2,
            "quadrants/low_prob_high_entropy/grad_share": 1.497 / 5.844,
            "quadrants/high_prob_low_entropy/count": 1,
            "quadrants/high_prob_low_entropy/token_share": 0.2,
            "quadrants/high_prob_low_entropy/grad_share": 0.6 / 5.844,
            "quadrants/high_prob_high_entropy/count": 1,
            "quadrants/high_prob_high_entropy/token_share": 0.2,
            "quadrants/high_prob_high_entropy/grad_share": 0.05 / 5.844,
        },
        abs=1e-6,
    )


def test_an_update_without_unlikely_tokens_keeps_the_threshold():
    log, callback = Log(), Quadrants(every_n_updates=0)
    likely = torch.tensor([[0.5, 0.9]], dtype=torch.float64).expand(2, 2)
    entropy = torch.tensor([[0.6, 0.5]], dtype=torch.float64).expand(2, 2)
    _after(callback, likely, entropy, likely, (1, 1), log)
    assert log.values == {}  # no threshold yet
    _after(callback, *_numbers(), (2, 2), log)
    _after(callback, likely, entropy, likely, (3, 3), log)
    assert log.values[3]["quadrants/tau_h"] == pytest.approx(0.55)
    assert log.values[3]["quadrants/high_prob_high_entropy/count"] == 1
    assert log.values[3]["quadrants/high_prob_low_entropy/count"] == 1
    restored = Quadrants()
    restored.load_state_dict(callback.state_dict())
    assert restored.tau_h == callback.tau_h


def test_each_update_has_its_own_threshold():
    log = Log()
    first, second = _numbers(), _numbers()
    second[1] *= 2  # entropies
    _after(Quadrants(every_n_updates=0), *torch.cat([first, second], 1), (5, 6), log)
    assert log.values[5]["quadrants/tau_h"] == pytest.approx(0.55)
    assert log.values[6]["quadrants/tau_h"] == pytest.approx(1.1)


@pytest.mark.parametrize(
    ("selector", "expected"),
    [(S2T(0.1, 0.5), (0.1, 0.5)), (RandomCandidates(0.1, 0.5), (0.1, 0.75)), (KeepAll(), (0.002, 0.75))],
)
def test_thresholds_follow_the_selector(selector, expected):
    callback = Quadrants(every_n_updates=0)
    _after(callback, *_numbers(), (1, 1), Log(), selector)
    assert (callback.used_tau_p, callback.used_q) == expected
    given = Quadrants(tau_p=0.3, q=0.2, every_n_updates=0)
    _after(given, *_numbers(), (1, 1), Log(), selector)
    assert (given.used_tau_p, given.used_q) == (0.3, 0.2)


def test_picture_holds_every_token_and_the_shares():
    callback = Quadrants(every_n_updates=100)
    log = Log()
    _after(callback, *_numbers(), (2, 2), log)
    assert callback._cells.sum(1).tolist() == pytest.approx([5, 5.844])
    figure = callback._figure(callback._cells.view(2, 64, 64))
    tokens, gradient = figure.axes[0], figure.axes[1]
    written = [{text.get_text() for text in axes.texts} for axes in (tokens, gradient)]
    assert written[0] >= {"40.00%\n2", "20.00%\n1"}
    assert written[1] >= {"63.26%", "25.62%", "10.27%", "0.86%"}  # 3.697, 1.497, 0.6 and 0.05 of 5.844
    assert "update 2" in figure.get_suptitle()


def test_low_low_is_what_s2t_silences(tmp_path):
    log, recorder = Log(), Recorder()
    run = trainer(tmp_path, max_steps=2, callbacks=[Quadrants(every_n_updates=0), recorder], log_every_n_steps=1)
    run.loggers = [_quiet(log)]
    run.fit(module(selector=S2T(tau_p=0.2)), datamodule=datamodule())
    (record,) = recorder.records
    half = len(record.silenced) // 2
    for update, rows in ((1, slice(0, half)), (2, slice(half, None))):
        values = log.values[update]
        assert values["quadrants/low_prob_low_entropy/count"] == int(record.silenced[rows].sum()) > 0
        low = values["quadrants/low_prob_low_entropy/count"] + values["quadrants/low_prob_high_entropy/count"]
        assert low == int(record.candidates[rows].sum())
        assert values["quadrants/tau_h"] == pytest.approx(record.tau_h[update - 1])


def _quiet(log):
    from lightning.pytorch.loggers.logger import DummyLogger

    class Kept(DummyLogger):
        def log_metrics(self, metrics, step):
            if any(tag.startswith("quadrants/") for tag in metrics):
                log.log_metrics(metrics, step)

    return Kept()


def test_all_wrong_arguments_come_in_one_error(tmp_path):
    with pytest.raises(ConfigError) as error:
        wrong = Quadrants(tau_p=0.0, q=1.5, every_n_updates=-2)
        trainer(tmp_path, callbacks=[wrong]).fit(module(), datamodule=datamodule())
    for name in ("tau_p=0.0", "q=1.5", "every_n_updates=-2"):
        assert f"Quadrants.{name}: must be" in str(error.value)
