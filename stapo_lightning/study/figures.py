"""Pictures of a study: curves of the drawn methods, and every difference to the reference with its interval."""

from __future__ import annotations

from pathlib import Path

from stapo_lightning.compare.curves import Panel, panels
from stapo_lightning.compare.picture import write_png
from stapo_lightning.compare.runs import Run
from stapo_lightning.compare.style import ink
from stapo_lightning.optional import optional
from stapo_lightning.study.results import Results

# (measure, title, factor)
_DIFFERENCES = (
    ("final_accuracy", "final accuracy, points", 100.0),
    ("largest_fall", "largest fall, points", 100.0),
    ("entropy_ratio", "entropy, end / start", 1.0),
)
_SMOOTH = 10


def draw_curves(path: Path, results: Results) -> bool:
    """Accuracy, entropy, and the gradient share of spurious tokens over updates: a row of panels a regime.

    Returns:
        Whether there was anything to draw: finished runs of a method with `drawn: true`. Otherwise no file is written.

    Raises:
        ConfigError: matplotlib is not installed; the message holds the command that installs it.

    """
    study = results.study
    spurious = "quadrants/low_prob_low_entropy/grad_share"
    drawn = [method.name for method in study.methods if method.drawn]
    found: list[Panel] = []
    for regime in study.regimes:
        runs = [
            Run(r.run.method, r.run.folder, {tag: dict(values) for tag, values in r.scalars.items()})
            for name in drawn
            for r in results.of(regime.name, name)
        ]
        for tag, smooth in ((study.accuracy, 1), ("policy/entropy", _SMOOTH), (spurious, _SMOOTH)):
            if runs and all(tag in run.scalars for run in runs):
                (panel,), _ = panels(runs, [tag], smooth)
                found.append(Panel(f"{regime.name}: {tag}", panel.curves))
    counts = {name: max(len(results.of(regime.name, name)) for regime in study.regimes) for name in drawn}
    if found:
        write_png(path, found, counts)
    return bool(found)


def draw_differences(path: Path, results: Results) -> bool:
    """Paired differences to the reference with their 95 % intervals: a row a regime, a column a measure.

    Returns:
        Whether there was anything to draw: a method with a seed in common with the reference. Otherwise no file is
        written.

    Raises:
        ConfigError: matplotlib is not installed; the message holds the command that installs it.

    """
    Figure = optional("matplotlib.figure", "plots", "stapo-study report").Figure
    study = results.study
    names = {
        regime.name: [m.name for m in study.methods if results.difference(regime.name, m.name, "final_accuracy")]
        for regime in study.regimes
    }
    names = {regime: methods for regime, methods in names.items() if methods}
    if not names:
        return False
    heights = [len(methods) + 2 for methods in names.values()]
    figure = Figure(figsize=(12, 0.24 * sum(heights) + 1), dpi=120, layout="constrained")
    axes = figure.subplots(len(names), len(_DIFFERENCES), squeeze=False, height_ratios=heights)
    groups = list(dict.fromkeys(method.group for method in study.methods))
    group_of = {method.name: groups.index(method.group) for method in study.methods}
    for row, (regime, methods) in zip(axes, names.items(), strict=True):
        for axis, (measure, title, factor) in zip(row, _DIFFERENCES, strict=True):
            for place, method in enumerate(methods):
                interval = results.difference(regime, method, measure)
                assert interval is not None
                colour = ink(group_of[method]).light
                axis.plot([factor * interval.low, factor * interval.high], [place, place], color=colour, linewidth=2)
                axis.plot([factor * interval.mean], [place], "o", color=colour, markersize=4)
            axis.axvline(0, color="#1e293b", linewidth=0.8)
            axis.set_ylim(len(methods) - 0.5, -0.5)
            axis.set_yticks(range(len(methods)), methods if axis is row[0] else [""] * len(methods), fontsize=8)
            axis.set_title(f"{regime}: {title}", fontsize=9, loc="left")
            axis.tick_params(labelsize=8)
            axis.grid(axis="x", alpha=0.25, linewidth=0.6)
            axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"Difference to {study.reference}, paired by seed, 95 % bootstrap intervals", fontsize=10)
    figure.savefig(path)
    return True
