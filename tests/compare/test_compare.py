"""stapo-compare: grouping, alignment, errors, and what page and picture hold."""

import html
import re
from pathlib import Path

import numpy as np
import pytest
from torch.utils.tensorboard import SummaryWriter

from stapo_lightning.compare import Run, find_runs, html_page, method_of, panels
from stapo_lightning.compare.cli import compare, main
from stapo_lightning.compare.curves import trailing_mean
from stapo_lightning.compare.style import number, ticks
from stapo_lightning.errors import ConfigError


def log(folder, **tags):
    """A run's event file; tags with "__" for "/", each a dictionary update -> value."""
    writer = SummaryWriter(str(folder))
    for tag, values in tags.items():
        for update, value in values.items():
            writer.add_scalar(tag.replace("__", "/"), value, update)
    writer.close()
    return folder


def run(method, tag="reward/mean", **values):
    return Run(method, Path(f"{method}-folder"), {tag: {int(update[1:]): value for update, value in values.items()}})


# ---- which runs, which method ---------------------------------------------------------------------------------------


def test_the_method_is_the_name_the_folder_or_the_one_above_a_version(tmp_path):
    for place in ("a/version_0", "a/version_1", "b/plain"):
        log(tmp_path / place, reward__mean={1: 0.0})
    found = find_runs([str(tmp_path / "a"), str(tmp_path / "b" / "plain")])
    assert [(r.method, r.folder.name) for r in found] == [("a", "version_0"), ("a", "version_1"), ("plain", "plain")]
    (named,) = find_runs([f"my method={tmp_path / 'a' / 'version_0'}"])
    assert named.method == "my method"


def test_versions_are_in_the_order_of_their_numbers(tmp_path):
    for version in (10, 2):
        log(tmp_path / "a" / f"version_{version}", reward__mean={1: 0.0})
    assert [r.folder.name for r in find_runs([str(tmp_path / "a")])] == ["version_2", "version_10"]


def test_a_folder_may_have_an_equals_sign_in_its_name(tmp_path):
    folder = log(tmp_path / "lr=3", reward__mean={1: 0.0})
    assert find_runs([str(folder)])[0].method == "lr=3"


def test_a_word_like_version_is_no_version():
    assert method_of(Path("/nowhere/version_a")) == "version_a"
    assert method_of(Path("/nowhere/version_12")) == "nowhere"


def test_all_runs_that_cannot_be_read_are_in_one_error(tmp_path):
    good = log(tmp_path / "good", reward__mean={1: 0.0})
    (tmp_path / "empty").mkdir()
    text_only = tmp_path / "text"
    writer = SummaryWriter(str(text_only))
    writer.add_text("config", "x")
    writer.close()
    with pytest.raises(ConfigError) as error:
        find_runs([str(good), str(good), str(tmp_path / "empty"), str(tmp_path / "gone"), str(text_only)])
    problems = error.value.problems
    assert len(problems) == 4
    assert "was given before" in problems[0]
    assert f"{tmp_path / 'empty'}: no event file" in problems[1]
    assert f"{tmp_path / 'gone'}: no such folder" in problems[2]
    assert "hold no scalar" in problems[3]


def test_a_value_that_was_logged_twice_counts_as_the_later_one(tmp_path):
    writer = SummaryWriter(str(tmp_path / "a"))
    for update, value in ((1, 0.25), (2, 0.5), (2, 0.75)):
        writer.add_scalar("reward/mean", value, update)
    writer.close()
    (found,) = find_runs([str(tmp_path / "a")])
    assert found.scalars == {"reward/mean": {1: 0.25, 2: 0.75}}


# ---- curves ---------------------------------------------------------------------------------------------------------


def test_mean_and_band_over_seeds():
    runs = [run("a", u1=1.0, u2=2.0), run("a", u1=3.0, u2=6.0), run("b", u1=5.0)]
    (panel,), remarks = panels(runs, ["reward/*"])
    a, b = panel.curves
    assert (a.seeds, a.updates.tolist()) == (2, [1, 2])
    assert (a.mean.tolist(), a.low.tolist(), a.high.tolist()) == ([2.0, 4.0], [1.0, 2.0], [3.0, 6.0])
    assert (b.seeds, b.mean.tolist()) == (1, [5.0])
    assert remarks == []


def test_seeds_with_unequal_updates_are_interpolated_within_what_they_share():
    # 1..5 by 0, 4, 8 at 1, 3, 5 and 2..6 by 10, 30 at 2, 6: shared from 2 to 5, at 2, 3, 5.
    # First seed there: 2, 4, 8. Second: 10, 15, 25 (5 an update). Means 6, 9.5, 16.5.
    tag = "reward/mean"
    runs = [
        Run("a", Path("one"), {tag: {1: 0.0, 3: 4.0, 5: 8.0}}),
        Run("a", Path("two"), {tag: {2: 10.0, 6: 30.0}}),
    ]
    (panel,), remarks = panels(runs, ["reward/mean"])
    assert panel.curves[0].updates.tolist() == [2, 3, 5]
    assert panel.curves[0].mean.tolist() == [6.0, 9.5, 16.5]
    assert len(remarks) == 1
    assert "(one at update 5, two at update 6)" in remarks[0]


def test_a_tag_that_one_seed_lacks_is_drawn_and_told():
    runs = [
        Run("a", Path("one"), {"reward/mean": {1: 0.0}, "policy/entropy": {1: 0.5}}),
        Run("a", Path("two"), {"reward/mean": {1: 1.0}}),
    ]
    found, remarks = panels(runs, ["reward/mean", "policy/entropy"])
    assert [(panel.tag, panel.curves[0].seeds) for panel in found] == [("reward/mean", 2), ("policy/entropy", 1)]
    assert remarks == ["policy/entropy was not logged by two"]


def test_no_tag_in_common_names_what_each_run_has():
    runs = [run("a", "reward/mean", u1=0.0), run("b", "policy/entropy", u1=0.0)]
    with pytest.raises(ConfigError) as error:
        panels(runs, ["reward/mean", "policy/entropy"])
    assert error.value.problems[1:] == ["a-folder: has reward/mean", "b-folder: has policy/entropy"]


def test_seeds_without_a_shared_update_are_an_error_for_each_tag():
    runs = [
        Run("a", Path("one"), {"x": {1: 0.0, 4: 0.0}, "y": {1: 0.0}}),
        Run("a", Path("two"), {"x": {5: 0.0, 9: 0.0}, "y": {2: 0.0}}),
    ]
    with pytest.raises(ConfigError) as error:
        panels(runs, ["*"])
    assert len(error.value.problems) == 2
    assert "one (1 to 4), two (5 to 9)" in error.value.problems[0]


def test_trailing_mean():
    assert trailing_mean(np.array([1.0, 3.0, 8.0, 1.0]), 2).tolist() == [1.0, 2.0, 5.5, 4.5]
    assert trailing_mean(np.array([1.0, 3.0, 8.0]), 1).tolist() == [1.0, 3.0, 8.0]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.31, 0.62, [0.3, 0.4, 0.5, 0.6, 0.7]),
        (0.0, 4.0, [0.0, 1.0, 2.0, 3.0, 4.0]),
        (-3.0, 5.0, [-4.0, -2.0, 0.0, 2.0, 4.0, 6.0]),
        (0.0, 0.0, [0.0, 0.25, 0.5, 0.75, 1.0]),  # a line at 0 lies on the axis
    ],
)
def test_ticks_are_round_and_reach_over_the_values(low, high, expected):
    assert ticks(low, high) == expected


def test_numbers_have_three_digits():
    assert [number(v) for v in (0, 0.12345, 12345.6, 0.00001234)] == ["0", "0.123", "12,346", "1.2e-05"]


# ---- page and picture -----------------------------------------------------------------------------------------------


@pytest.fixture
def written(tmp_path):
    """Two methods, one with two seeds; the other's name is hostile."""
    log(tmp_path / "a" / "version_0", reward__mean={1: 0.2, 2: 0.6, 3: 0.4}, policy__entropy={1: 1.0, 2: 0.5, 3: 0.8})
    log(tmp_path / "a" / "version_1", reward__mean={1: 0.4, 2: 0.8, 3: 0.6}, policy__entropy={1: 1.0, 2: 0.7, 3: 0.8})
    log(tmp_path / "b", reward__mean={1: 0.1, 2: 0.2, 3: 0.3}, policy__entropy={1: 1.0, 2: 2.0, 3: 3.0})
    hostile = f"<script>alert('$x$')</script>={tmp_path / 'b'}"
    return compare([str(tmp_path / "a"), hostile], output=str(tmp_path / "out" / "page"))


def test_the_page_holds_last_and_best_values(written):
    page, _ = written
    rows = [re.sub(r"<[^>]+>", " ", row).split() for row in re.findall(r"<tr>.*?</tr>", page.read_text())]
    assert rows[1] == ["reward/mean", "last", "0.5", "0.4", "to", "0.6", "0.3"]  # means of 0.4 and 0.6; the single seed
    assert rows[2] == ["best", "0.7", "at", "2", "0.3", "at", "3"]
    assert rows[3] == ["policy/entropy", "last", "0.8", "0.8", "to", "0.8", "3"]
    assert rows[4] == ["smallest", "0.6", "at", "2", "1", "at", "1"]
    assert rows[5] == ["largest", "1", "at", "1", "3", "at", "3"]


def test_the_page_needs_nothing_else_and_escapes_names(written):
    text = written[0].read_text()
    assert "<script" not in text
    assert html.escape("<script>alert('$x$')</script>") in text
    assert not re.search(r"""(?:src|href)=|url\(|@import|https?://""", text)
    assert text.count("<figure>") == 2
    assert text.count('class="band"') == 2  # of the method with two seeds, in each panel
    assert "prefers-color-scheme: dark" in text


def test_the_picture_is_a_png_of_readable_size(written):
    head = written[1].read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = (int.from_bytes(head[at : at + 4], "big") for at in (16, 20))
    # Two panels of 4.4 inches at 120 dots, and one row of 3 inches with the legend's 0.6.
    assert (width, height) == (1056, 432)


def test_smoothing_is_told():
    runs = [run("a", u1=0.0, u2=1.0)]
    found, _ = panels(runs, ["*"], smooth=2)
    assert found[0].curves[0].mean.tolist() == [0.0, 0.5]
    assert "mean of its last 2 values" in html_page(found, runs, [], smooth=2)


def test_the_command_line(tmp_path, capsys):
    log(tmp_path / "a", reward__mean={1: 0.5})
    main([f"x={tmp_path / 'a'}", f"--output={tmp_path / 'page'}", '--tags=["reward/*"]'])
    assert f"page      {tmp_path / 'page.html'}" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        main([str(tmp_path / "gone"), f"--output={tmp_path / 'page'}"])
    assert stop.value.code == 2
    assert "gone: no such folder" in capsys.readouterr().err
