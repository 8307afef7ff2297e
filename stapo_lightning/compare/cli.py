"""Console script `stapo-compare`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from jsonargparse import ArgumentParser

from stapo_lightning.compare.curves import panels
from stapo_lightning.compare.page import html_page
from stapo_lightning.compare.picture import write_png
from stapo_lightning.compare.runs import find_runs
from stapo_lightning.errors import StapoError, bounded, raise_problems

TAGS = (
    "reward/mean",
    "val/*/avg@*",
    "policy/entropy",
    "s2t/silenced_fraction",
    "policy/clip_fraction_low",
    "policy/clip_fraction_high",
    "completion/length_mean",
)


def compare(
    runs: list[str], output: str = "compare", tags: list[str] | None = None, smooth: int = 1
) -> tuple[Path, Path]:
    """Draws the TensorBoard curves of several runs side by side, seeds of one method as mean and band.

    Runs of one NAME are the seeds of one method. Without NAME it is that of the folder, of .../NAME/version_3 that of
    the folder above. A folder that holds no event files stands for all runs right in it: `stapo-compare runs/stapo
    runs/grpo` compares two methods with all their versions.

    Args:
        runs: Folders, each as RUN or NAME=RUN.
        output: Path of the two files without their endings: <output>.html and <output>.png.
        tags: What to draw, such as '[reward/mean, "val/*"]'; "*" stands for any characters. Null draws reward,
            accuracy, entropy, silenced share, clip fractions and length.
        smooth: Draw each seed as the mean of its last values, so many; 1 draws what was logged.

    Returns:
        Paths of page and picture.

    Raises:
        ConfigError: With every problem at once, naming the runs.

    """
    raise_problems(bounded("--smooth", smooth, at_least=1))
    found_runs = find_runs(runs)
    found, remarks = panels(found_runs, tags or TAGS, smooth)
    methods = dict.fromkeys((run.method for run in found_runs), 0)
    for run in found_runs:
        methods[run.method] += 1
    page, picture = Path(f"{output}.html"), Path(f"{output}.png")
    page.parent.mkdir(parents=True, exist_ok=True)
    write_png(picture, found, methods)
    page.write_text(html_page(found, found_runs, remarks, smooth))
    for remark in remarks:
        print(f"note      {remark}")
    return page, picture


def main(args: Sequence[str] | None = None) -> None:
    """Console script `stapo-compare`; also `python -m stapo_lightning.compare`.

    Args:
        args: Command-line arguments; None takes sys.argv.

    """
    parser = ArgumentParser(prog="stapo-compare", description=(compare.__doc__ or "").split("\n\n    Args:")[0])
    parser.add_argument("runs", nargs="+", type=str, metavar="RUN", help="folder of a run, or NAME=FOLDER")
    parser.add_function_arguments(compare, skip={"runs"}, as_group=False)
    options = parser.parse_args(args)
    try:
        page, picture = compare(**options.as_dict())
    except StapoError as error:
        print(f"stapo-compare: {error}", file=sys.stderr)
        sys.exit(2)
    print(f"page      {page}\npicture   {picture}")
