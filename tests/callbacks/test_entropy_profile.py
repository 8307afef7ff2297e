"""Entropy quantiles over training, and the mean by position in the completion."""

import math
from types import SimpleNamespace

import pytest
import torch

from callbacks.entropy_profile import _BINS, EntropyProfile, _bin, quantiles_of
from stapo_lightning.batch import TokenScores, UpdateRecord
from stapo_lightning.distributed import Ranks
from stapo_lightning.errors import ConfigError
from tests.builders import rollout_batch
from tests.callbacks.test_quadrants import Log
from tests.doubles import datamodule, module, trainer

VOCABULARY = 20


def _after(callback, entropy, lengths, updates, log, limit=8):
    batch = rollout_batch([0.0] * len(lengths), lengths, torch.zeros_like(entropy))
    nothing = torch.zeros_like(entropy, dtype=torch.bool)
    record = UpdateRecord(TokenScores(entropy, entropy, entropy), nothing, nothing, entropy, nothing, updates)
    policy = SimpleNamespace(config=SimpleNamespace(vocab_size=VOCABULARY))
    data = SimpleNamespace(sampling=SimpleNamespace(max_new_tokens=limit))
    run = SimpleNamespace(loggers=[log], logger=None, log_every_n_steps=1, is_global_zero=True, datamodule=data)
    pl_module = SimpleNamespace(ranks=Ranks(), policy=policy)
    callback.setup(run, pl_module, "fit")
    callback.on_train_batch_end(run, pl_module, {"record": record}, batch, 0)


def _entropy():
    """Four tokens of 0 to 0.3, eight of 0.4 to 1.1."""
    entropy = torch.zeros(2, 8, dtype=torch.float64)
    entropy[0, :4] = torch.tensor([0.0, 0.1, 0.2, 0.3])
    entropy[1] = torch.arange(4, 12) / 10
    return entropy


def test_profile_by_hand():
    log, callback = Log(), EntropyProfile(quantiles=(0.25, 0.5, 0.99), positions=4, every_n_updates=100)
    _after(callback, _entropy(), [4, 8], (2, 2), log)
    # Places 2.75, 5.5 and 10.89 of twelve: the tokens of 0.2, 0.5 and 1.0, to a bin's width.
    # Quarters: (0 + 0.4 + 0.5) / 3, (0.1 + 0.6 + 0.7) / 3, (0.2 + 0.8 + 0.9) / 3, (0.3 + 1.0 + 1.1) / 3.
    assert log.values[2] == pytest.approx(
        {
            "entropy_profile/quantile_0.25": 0.2,
            "entropy_profile/quantile_0.5": 0.5,
            "entropy_profile/quantile_0.99": 1.0,
            "entropy_profile/quarter_1": 0.3,
            "entropy_profile/quarter_2": 1.4 / 3,
            "entropy_profile/quarter_3": 1.9 / 3,
            "entropy_profile/quarter_4": 0.8,
        },
        abs=1e-3,
    )
    # Positions 0 and 1, 2 and 3, ...: (0 + 0.1 + 0.4 + 0.5) / 4, (0.2 + 0.3 + 0.6 + 0.7) / 4, (0.8 + 0.9) / 2, 1.05.
    run = SimpleNamespace(is_global_zero=False, logger=None)
    callback._draw(run)
    assert callback.curves == [(2, pytest.approx([0.25, 0.45, 0.85, 1.05]))]


def test_updates_of_a_rollout_are_told_apart():
    log, callback = Log(), EntropyProfile(quantiles=(0.5,), positions=2, every_n_updates=0)
    entropy = torch.tensor([[0.1, 0.1], [0.1, 0.1], [0.7, 0.7], [0.7, 0.7]], dtype=torch.float64)
    _after(callback, entropy, [2, 2, 2, 2], (3, 4), log)
    assert log.values[3]["entropy_profile/quantile_0.5"] == pytest.approx(0.1, abs=1e-3)
    assert log.values[4]["entropy_profile/quantile_0.5"] == pytest.approx(0.7, abs=1e-3)
    assert [int(line[0]) for line in callback.history] == [3, 4]


def test_short_completions_have_no_later_positions():
    callback = EntropyProfile(positions=4, every_n_updates=100)
    _after(callback, torch.full((2, 2), 0.5, dtype=torch.float64), [2, 1], (2, 2), log := Log())
    # A completion of one token has it in its first quarter, one of two in the first and the third.
    assert "entropy_profile/quarter_2" not in log.values[2]
    assert log.values[2]["entropy_profile/quarter_3"] == pytest.approx(0.5)
    callback._draw(SimpleNamespace(is_global_zero=False, logger=None))
    ((_, means),) = callback.curves
    assert means[0] == 0.5 and all(math.isnan(mean) for mean in means[1:])


def test_quantiles_are_right_to_a_bin():
    torch.manual_seed(0)
    highest = math.log(150_000)
    entropy = highest * torch.rand(20_001, dtype=torch.float64) ** 6  # most of them near 0
    histogram = torch.bincount(_bin(entropy, highest), minlength=_BINS).double()
    quantiles = (0.01, 0.25, 0.5, 0.9, 0.99)
    found = quantiles_of(histogram, quantiles, highest)
    for q, value in zip(quantiles, found, strict=True):
        exact = float(entropy.sort().values[round(q * 20_000)])
        assert abs(value - exact) <= 0.0005 * math.sqrt(exact * highest) + 1e-6
    assert all(math.isnan(value) for value in quantiles_of(torch.zeros(_BINS), quantiles, highest))


def test_picture_has_the_curves_and_the_periods():
    callback = EntropyProfile(quantiles=(0.5, 0.9), positions=4, every_n_updates=2)
    for update in (1, 2, 3, 4):
        _after(callback, _entropy() + 0.1 * update, [4, 8], (update, update), Log())
    over_training, by_position = callback._figure(8).axes
    assert [list(line.get_xdata()) for line in over_training.lines] == [[1, 2, 3, 4]] * 2
    # At update 1 the smallest of the twelve is 0.1 and the middle one 0.6.
    assert over_training.lines[0].get_ydata()[0] == pytest.approx(0.6, abs=2e-3)
    assert [text.get_text() for text in by_position.get_legend().get_texts()] == ["1", "2", "3 to 4"]
    assert list(by_position.lines[0].get_xdata()) == [1, 3, 5, 7]
    restored = EntropyProfile()
    restored.load_state_dict(callback.state_dict())
    assert (restored.history, restored.curves) == (callback.history, callback.curves)


def test_all_wrong_arguments_come_in_one_error(tmp_path):
    wrong = EntropyProfile(quantiles=(0.9, 0.5, 1.0), positions=1, every_n_updates=-1)
    with pytest.raises(ConfigError) as error:
        trainer(tmp_path, callbacks=[wrong]).fit(module(), datamodule=datamodule())
    for name in ("quantiles=1.0: must be", "quantiles=[0.9, 0.5, 1.0]: must be rising", "positions=1: must be"):
        assert f"EntropyProfile.{name}" in str(error.value)
