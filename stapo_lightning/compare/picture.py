"""The panels as one PNG, by matplotlib."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stapo_lightning.compare.curves import Panel
from stapo_lightning.compare.style import ink, ticks, width
from stapo_lightning.optional import optional

_COLUMNS = 3


def write_png(path: Path, found: Sequence[Panel], methods: dict[str, int]) -> None:
    """Draws the panels three in a row, with one legend above.

    Args:
        path: The file.
        found: At least one panel.
        methods: Method -> number of runs, in the order of the legend.

    Raises:
        ConfigError: matplotlib is not installed; the message holds the command that installs it.

    """
    # Figures made this way need no display and leave no state behind.
    Figure = optional("matplotlib.figure", "plots", "stapo-compare").Figure
    columns = min(_COLUMNS, len(found))
    rows = math.ceil(len(found) / columns)
    figure = Figure(figsize=(4.4 * columns, 3.0 * rows + 0.6), dpi=120, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    inks = {method: ink(place) for place, method in enumerate(methods)}
    widths = {method: width(place, len(methods)) for place, method in enumerate(methods)}
    lines: dict[str, Any] = {}
    for axis, panel in zip(axes, found, strict=False):
        for curve in panel.curves:
            colour, _, dash = inks[curve.method]
            style = (0, dash) if dash else "-"
            marker = "o" if len(curve.updates) <= 12 else None
            (line,) = axis.plot(
                curve.updates,
                curve.mean,
                color=colour,
                linestyle=style,
                linewidth=widths[curve.method],
                marker=marker,
                markersize=3,
            )
            if curve.seeds > 1:
                axis.fill_between(curve.updates, curve.low, curve.high, color=colour, alpha=0.18, linewidth=0)
            lines.setdefault(curve.method, line)
        axis.set_title(_plain(panel.tag), fontsize=10, loc="left")
        axis.set_xlabel("update", fontsize=9)
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.25, linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
        if panel.curves:
            marks = ticks(min(c.low.min() for c in panel.curves), max(c.high.max() for c in panel.curves))
            axis.set_yticks(marks)
            axis.set_ylim(marks[0], marks[-1])
    for axis in axes[len(found) :]:
        axis.set_visible(False)
    labels = [f"{_plain(method)} ({methods[method]})" for method in lines]
    # "outside" makes room for it, whatever the number of rows.
    figure.legend(
        lines.values(), labels, loc="outside upper center", ncols=min(len(labels), 5), fontsize=9, frameon=False
    )
    figure.savefig(path)


def _plain(text: str) -> str:
    # matplotlib reads what stands between two dollar signs as mathematics.
    return text.replace("$", r"\$")
