"""The primary measures of a run."""

import pytest

from stapo_lightning.errors import StapoError
from stapo_lightning.study.measures import measure, window_means

ACCURACY = "val/x/sampled/avg@1"


def _logged(**changes):
    # Entropy of update u is u / 10, 12 updates; silenced in updates 3 and 4 alone.
    scalars = {
        ACCURACY: {0: 0.25, 4: 0.75, 8: 0.5, 12: 0.625},
        "policy/entropy": {u: u / 10 for u in range(12, 0, -1)},  # logged in any order
        "s2t/silenced_fraction": {u: 0.06 if u in (3, 4) else 0.0 for u in range(1, 13)},
    }
    return scalars | changes


def test_measures_by_hand():
    found = measure(_logged(), ACCURACY, warmup_updates=2, window=4)
    assert (found.final_accuracy, found.best_accuracy) == (0.625, 0.75)
    assert found.largest_fall == 0.25  # from 0.75 to 0.5
    assert found.entropy_start == pytest.approx(0.45)  # updates 3 to 6
    assert found.entropy_end == pytest.approx(1.05)  # updates 9 to 12
    assert found.entropy_ratio == pytest.approx(1.05 / 0.45)
    assert found.silenced_share == pytest.approx(0.01)  # 2 * 0.06 / 12
    assert found.idle_updates == pytest.approx(10 / 12)


def test_the_largest_fall_is_from_the_best_before_it():
    # 0.9 comes after 0.2: the largest fall is 0.5 - 0.2, and not 0.9 - 0.2.
    fall = {0: 0.5, 4: 0.2, 8: 0.9, 12: 0.8}
    found = measure(_logged(**{ACCURACY: fall}), ACCURACY, 2, 4)
    assert found.largest_fall == pytest.approx(0.3)
    rising = {0: 0.1, 4: 0.2, 8: 0.3}
    assert measure(_logged(**{ACCURACY: rising}), ACCURACY, 2, 4).largest_fall == 0.0


def test_a_run_that_was_cut_off_says_what_is_missing():
    with pytest.raises(StapoError, match=f"no {ACCURACY}; was it cut off"):
        measure(_logged(**{ACCURACY: {}}), ACCURACY, 2, 4)
    with pytest.raises(StapoError, match="12 updates: fewer than the warm-up of 5 and two windows of 4"):
        measure(_logged(), ACCURACY, 5, 4)


def test_windows_of_a_tag_that_starts_late():
    scalars = _logged(**{"quadrants/a": {5: 1.0, 6: 2.0, 11: 4.0}})
    assert window_means(scalars, "quadrants/a", 2, 4) == (1.5, 4.0)
    first, last = window_means(scalars, "quadrants/b", 2, 4)
    assert first != first and last != last
