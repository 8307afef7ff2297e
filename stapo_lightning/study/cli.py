"""Console script `stapo-study`: run, report."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from jsonargparse import auto_cli

from stapo_lightning.errors import StapoError, bounded, raise_problems
from stapo_lightning.optional import require
from stapo_lightning.study.figures import draw_curves, draw_differences
from stapo_lightning.study.report import markdown
from stapo_lightning.study.results import read_results, write_csv
from stapo_lightning.study.runner import run_all
from stapo_lightning.study.study import Study


def run(study: Study, at_a_time: int = 1, threads: int = 1, only: str = "", dry_run: bool = False) -> None:
    """Makes every run of a study that is not finished. Given again after a kill it goes on where it was.

    Args:
        study: The study, or a YAML file with it.
        at_a_time: Runs side by side.
        threads: CPU threads of each run; at_a_time x threads should not be more than the machine's cores.
        only: Makes only the runs with this in their name "<regime> / <method> / seed <seed>"; "" makes all.
        dry_run: Prints the `stapo fit` line of each run instead.

    Raises:
        StapoError: Runs failed; the message names their logs.

    """
    raise_problems(bounded("--at_a_time", at_a_time, at_least=1), bounded("--threads", threads, at_least=1))
    runs = [planned for planned in study.runs() if only in planned.name]
    if dry_run:
        print("\n".join(planned.command for planned in runs))
        return
    failed = run_all(runs, at_a_time, threads)
    if failed:
        logs = ", ".join(str(planned.folder / "log.txt") for planned in failed)
        raise StapoError(f"{len(failed)} of {len(runs)} runs failed: {logs}; given again, the command retries them")


def report(study: Study, output: str, title: str = "Report of the study", findings: str | None = None) -> None:
    """Measures the finished runs and writes report.md, runs.csv, curves.png and differences.png.

    A picture without anything to draw is left out.

    Args:
        study: The study, or a YAML file with it.
        output: Folder of the report.
        title: Heading of the page.
        findings: A Markdown file that opens the page; null for none.

    Raises:
        StapoError: No run is finished, finished ones logged too little, or matplotlib is not installed.

    """
    require("matplotlib", "plots", "stapo-study report")
    results = read_results(study)
    folder = Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    figures = {"curves.png": draw_curves, "differences.png": draw_differences}
    pictures = [name for name, draw in figures.items() if draw(folder / name, results)]
    write_csv(folder / "runs.csv", results.results)
    opening = Path(findings).read_text() if findings else ""
    (folder / "report.md").write_text(markdown(results, title, opening, pictures))
    for remark in results.remarks:
        print(f"note    {remark}")
    print(f"report  {folder / 'report.md'}")


def main(args: Sequence[str] | None = None) -> None:
    """Console script `stapo-study`; also `python -m stapo_lightning.study`.

    Args:
        args: Command-line arguments; None takes sys.argv.

    """
    try:
        auto_cli([run, report], args=None if args is None else list(args), as_positional=False, prog="stapo-study")
    except StapoError as error:
        print(f"stapo-study: {error}", file=sys.stderr)
        sys.exit(2)
