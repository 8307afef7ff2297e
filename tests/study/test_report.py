"""What is read from finished runs, and the page that is made of it."""

import csv
import re
from pathlib import Path

import pytest

from stapo_lightning.errors import ConfigError
from stapo_lightning.study.cli import main, report
from stapo_lightning.study.figures import draw_curves, draw_differences
from stapo_lightning.study.report import markdown, summary_table
from stapo_lightning.study.results import read_results, write_csv
from stapo_lightning.study.study import Method
from tests.cli import ROOT
from tests.study.builders import logged, study, write_run

PAGE = ROOT / "tests" / "benchmarks" / "study" / "report.md"


def _finished(folder: Path):
    """GRPO ends 0.1 and 0.2 below STAPO in the mild regime; the wild one has one seed, and one run that failed."""
    made = study(folder)
    share = "quadrants/low_prob_low_entropy/grad_share"
    for run in made.runs():
        behind = {("GRPO", 1): 0.1, ("GRPO", 2): 0.2}.get((run.method, run.seed), 0.0)
        scalars = logged([0.25, 0.9, 0.8 - behind], [1.0, 0.4, 0.4, 0.3, 0.1, 0.1], 0.001 * run.seed)
        if run.method == "STAPO":
            scalars[share] = {2: 0.25, 3: 0.75, 5: 0.1, 6: 0.3}
        if run.regime == "mild" or run.seed == 1:
            write_run(run, scalars, code=int((run.regime, run.method) == ("wild", "GRPO")))
    return made


def test_results_by_hand(tmp_path):
    results = read_results(_finished(tmp_path))
    assert results.by_seed("mild", "GRPO", "final_accuracy") == pytest.approx({1: 0.7, 2: 0.6})
    difference = results.difference("mild", "GRPO", "final_accuracy")
    # Resampled means of -0.1 and -0.2: -0.2, -0.15, -0.15, -0.1; place 0.075 is -0.2 + 0.075 * 0.05.
    assert (difference.mean, difference.low, difference.high) == pytest.approx((-0.15, -0.19625, -0.10375))
    assert results.difference("mild", "STAPO", "final_accuracy") is None
    # Updates 2 and 3 start, 5 and 6 end: 0.1 over 0.4.
    assert results.by_seed("mild", "STAPO", "entropy_ratio") == pytest.approx({1: 0.25, 2: 0.25})
    assert results.windows("mild", "STAPO", "quadrants/low_prob_low_entropy/grad_share") == pytest.approx((0.5, 0.2))
    assert results.mean("mild", "GRPO", "silenced_share").mean == pytest.approx(0.0015)
    assert results.remarks == [
        "wild / GRPO / seed 1 stopped with 1: ValueError: nan",
        "2 runs are not finished yet: wild / STAPO / seed 2, wild / GRPO / seed 2",
    ]


def test_the_summary_by_hand(tmp_path):
    rows = summary_table(read_results(_finished(tmp_path))).splitlines()[2:]
    assert rows == [
        "| mild | STAPO | 2 | 80.0 ± 0.0 |  | 10.0 ± 0.0 | 0.25 ± 0.00 |  | 0.15 % |",
        # Standard deviation of 70 and 60: 10 / sqrt(2). The fall is from 90 to 70 and 60.
        "| mild | GRPO | 2 | 65.0 ± 7.1 | **-15.0 [-19.6, -10.4]** | 25.0 ± 7.1 | 0.25 ± 0.00 |"
        " +0.00 [+0.00, +0.00] | 0.15 % |",
        "| wild | STAPO | 1 | 80.0 |  | 10.0 | 0.25 |  | 0.1 % |",
        "| wild | GRPO | 1 | 70.0 | -10.0 | 20.0 | 0.25 | +0.00 | 0.1 % |",
    ]


def test_the_page_holds_findings_tables_quadrants_and_where_it_comes_from(tmp_path):
    page = markdown(read_results(_finished(tmp_path)), "A title", "What was found.\n", ["curves.png"])
    assert page.startswith("# A title\n\nWhat was found.\n\n## Summary\n")
    assert "![curves.png](curves.png)" in page
    assert "### mild: main" in page and "| 0.400 → 0.100 | 0.15 % | 0 |" in page
    assert "| STAPO | low prob low entropy |  |  | 50.0 % | 20.0 % |  |  |" in page
    # 6 runs of 90 s: 0.15 hours.
    assert "6 runs, 0.1 hours of their own time (90 s a run)" in page and "commit abc1234" in page
    assert "* wild / GRPO / seed 1 stopped with 1: ValueError: nan" in page


def test_a_line_for_each_run(tmp_path):
    results = read_results(_finished(tmp_path))
    write_csv(tmp_path / "runs.csv", results.results)
    rows = list(csv.DictReader((tmp_path / "runs.csv").open()))
    assert len(rows) == 6
    assert [(r["regime"], r["method"], r["seed"]) for r in rows[:2]] == [("mild", "GRPO", "1"), ("mild", "GRPO", "2")]
    assert (rows[0]["final_accuracy"], rows[0]["seconds"], rows[0]["commit"]) == ("0.7", "90", "abc1234")
    assert rows[0]["command"].startswith("stapo fit --config=")
    assert [r["exit_code"] for r in rows if r["regime"] == "wild"] == ["1", "0"]


def test_pictures_are_drawn(tmp_path):
    results = read_results(_finished(tmp_path))
    for name, draw in (("curves.png", draw_curves), ("differences.png", draw_differences)):
        draw(tmp_path / name, results)
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_a_report_of_other_options_is_refused(tmp_path):
    made = _finished(tmp_path)
    (tmp_path / "grpo.yaml").write_text("{a: 1}\n")
    with pytest.raises(ConfigError, match="made with other options or config files"):
        read_results(made)


def test_without_runs_there_is_no_report(tmp_path):
    with pytest.raises(ConfigError, match="no finished run in it; make them with `stapo-study run`"):
        report(study(tmp_path), str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_runs_that_logged_too_little_are_named(tmp_path):
    made = study(tmp_path)
    first, second, *_ = made.runs()
    write_run(first, logged([0.5], [1.0]))
    with pytest.raises(ConfigError, match=r"mild / STAPO / seed 1: .*1 updates: fewer than the warm-up of 1"):
        read_results(made)
    # One that stopped by an error is left out, and the page says so.
    write_run(second, {}, code=1)
    (first.folder / "outcome.json").unlink()
    with pytest.raises(
        ConfigError, match=r"no finished run.*\n.*GRPO / seed 1 stopped with 1: ValueError: nan; it is left"
    ):
        read_results(made)


def test_what_cannot_be_drawn_is_left_out(tmp_path):
    made = study(tmp_path, methods=[Method("STAPO", "main", seeds=[1])])
    write_run(made.runs()[0], logged([0.5], [1.0] * 5))
    report(made, str(tmp_path / "out"))
    # Nothing to compare with, and no method with `drawn`.
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["report.md", "runs.csv"]
    assert ".png" not in (tmp_path / "out" / "report.md").read_text()


def test_mistakes_on_the_command_line_are_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as stopped:
        main(["run", "--study=configs/study/study.yaml", "--at_a_time=0", "--threads=0"])
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert "--at_a_time=0" in said and "--threads=0" in said and "Traceback" not in said


def test_a_dry_run_prints_the_lines(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    main(["run", "--study=configs/study/study.yaml", "--dry_run=true", "--only=harsh / STAPO / seed 2"])
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("stapo fit --config=configs/quickstart.yaml") and "--seed_everything=2" in line


def test_the_readme_quotes_the_reports_rows():
    readme = (ROOT / "README.md").read_text()
    section = readme[readme.index("## Does it hold?") :]
    rows = re.findall(r"^\| (?:gentle|harsh) \|.*$", section, re.MULTILINE)
    assert len(rows) == 8
    page = PAGE.read_text()
    for row in rows:
        assert row in page, row


@pytest.mark.parametrize(
    ("name", "folder", "count"),
    [
        ("study", ".", 156),
        ("kl", "kl", 25),
        ("replication", "replication", 15),
        ("replication_kl", "replication_kl", 10),
    ],
)
def test_the_page_is_of_every_planned_run(name, folder, count, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    rows = list(csv.DictReader((PAGE.parent / folder / "runs.csv").open()))
    assert len(rows) == count and {row["exit_code"] for row in rows} == {"0"}
    main(["run", f"--study=configs/study/{name}.yaml", "--dry_run=true"])
    assert sorted(row["command"] for row in rows) == sorted(capsys.readouterr().out.splitlines())
