"""The panels as one HTML page that needs nothing else: curves as SVG, a legend, a table of values."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np

from stapo_lightning.compare.curves import Curve, Panel
from stapo_lightning.compare.runs import Run
from stapo_lightning.compare.style import Ink, ink, number, ticks, width

_WIDTH, _HEIGHT = 420, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 10, 34
# More points than this would only lie over each other.
_HOVERS = 120

_STYLE = """
:root { color-scheme: light dark;
  --page: #ffffff; --text: #1b1f24; --faint: #5b636d; --line: #d5dae0; --panel: #f8f9fb; }
@media (prefers-color-scheme: dark) {
  :root { --page: #14171b; --text: #e8ebee; --faint: #a4adb8; --line: #353c45; --panel: #1c2026; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.2rem; max-width: 1400px; background: var(--page); color: var(--text);
  font: 15px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.35rem; margin: 0 0 .3rem; }
h2 { font-size: 1rem; margin: 0 0 .2rem; font-family: ui-monospace, monospace; font-weight: 600;
  overflow-wrap: anywhere; }
p, li { color: var(--faint); max-width: 75rem; }
ul.legend { display: flex; flex-wrap: wrap; gap: .3rem 1.4rem; list-style: none; padding: .6rem 0; margin: 0;
  position: sticky; top: 0; background: var(--page); border-bottom: 1px solid var(--line); }
ul.legend li { display: flex; align-items: center; gap: .45rem; color: var(--text); overflow-wrap: anywhere; }
.panels { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(360px, 100%), 1fr)); gap: 1rem;
  margin: 1rem 0; }
figure { margin: 0; padding: .8rem; background: var(--panel); border: 1px solid var(--line); border-radius: 8px; }
svg { display: block; width: 100%; height: auto; overflow: visible; }
.legend svg { width: 30px; flex: none; }
.grid { stroke: var(--line); stroke-width: 1; }
.tick { fill: var(--faint); font: 11px system-ui, sans-serif; }
.mean { fill: none; stroke: currentColor; stroke-width: var(--width); stroke-linejoin: round; }
.band { fill: currentColor; opacity: .18; }
.dot { fill: currentColor; opacity: 0; }
.dot:hover, .few .dot { opacity: 1; }
.table { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .8rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
th.tag { font-family: ui-monospace, monospace; font-weight: 600; }
.table, h2 { margin-bottom: .6rem; }
@media (max-width: 700px) {
  th, td { padding: .3rem .45rem; }
  th.tag { white-space: normal; overflow-wrap: anywhere; min-width: 6.5rem; }
}
small { color: var(--faint); }
"""


def html_page(found: Sequence[Panel], runs: Sequence[Run], remarks: Sequence[str], smooth: int) -> str:
    """The whole page.

    Args:
        found: The panels.
        runs: All runs, for the list at the end.
        remarks: What the reader must know of the alignment.
        smooth: Values of a seed whose trailing mean is drawn.

    """
    methods = list(dict.fromkeys(run.method for run in runs))
    inks = {method: ink(place) for place, method in enumerate(methods)}
    classes = {method: f"m{place}" for place, method in enumerate(methods)}
    seeds = {method: sum(run.method == method for run in runs) for method in methods}
    smoothed = f" Each seed is drawn as the mean of its last {smooth} values." if smooth > 1 else ""
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(' / '.join(methods))}</title>",
        f"<style>{_STYLE}{_colours(inks, classes)}</style></head><body>",
        f"<h1>{len(runs)} run{'s' * (len(runs) > 1)} of {len(methods)} method{'s' * (len(methods) > 1)}</h1>",
        "<p>Lines are means over the seeds of a method, bands reach from the smallest to the largest seed. Seeds are"
        " averaged at every update that one of them logged, up to the last that all of them reached; where a seed"
        f" logged nothing it is interpolated linearly.{smoothed}</p>",
        '<ul class="legend">',
        *(_legend_entry(method, seeds[method], inks[method], classes[method]) for method in methods),
        '</ul><div class="panels">',
        *(_figure(panel, inks, classes) for panel in found),
        "</div>",
        _table(found, methods, classes),
        *([f"<ul>{''.join(f'<li>{escape(remark)}</li>' for remark in remarks)}</ul>"] if remarks else []),
        "<h2>Runs</h2><ul>",
        *(f"<li>{escape(run.method)}: <code>{escape(str(run.folder))}</code></li>" for run in runs),
        "</ul></body></html>",
    ]
    return "\n".join(parts) + "\n"


def _colours(inks: dict[str, Ink], classes: dict[str, str]) -> str:
    light = "".join(
        f".{classes[method]} {{ color: {found.light}; --width: {width(place, len(inks)):.2g}; }}\n"
        for place, (method, found) in enumerate(inks.items())
    )
    dark = "".join(f".{classes[method]} {{ color: {found.dark}; }}\n" for method, found in inks.items())
    return f"{light}@media (prefers-color-scheme: dark) {{\n{dark}}}\n"


def _legend_entry(method: str, seeds: int, drawn: Ink, name: str) -> str:
    line = f'<svg viewBox="0 0 30 8" class="{name}"><path class="mean" d="M0 4H30"{_dash(drawn)}/></svg>'
    return f"<li>{line}{escape(method)} <small>{seeds} seed{'s' * (seeds > 1)}</small></li>"


def _dash(drawn: Ink) -> str:
    return f' stroke-dasharray="{" ".join(map(str, drawn.dash))}"' if drawn.dash else ""


def _figure(panel: Panel, inks: dict[str, Ink], classes: dict[str, str]) -> str:
    label = f"{panel.tag} over updates: " + ", ".join(
        f"{c.method} {number(c.mean[0])} to {number(c.mean[-1])}" for c in panel.curves
    )
    x_marks = ticks(min(c.updates[0] for c in panel.curves), max(c.updates[-1] for c in panel.curves))
    y_marks = ticks(min(c.low.min() for c in panel.curves), max(c.high.max() for c in panel.curves))
    # The plot ends with the curves, whatever the next round update is.
    x_low, x_high = min(c.updates[0] for c in panel.curves), max(c.updates[-1] for c in panel.curves)
    x_high = x_high if x_high > x_low else x_low + 1

    def x(update: float) -> float:
        return _LEFT + (update - x_low) / (x_high - x_low) * (_WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - (value - y_marks[0]) / (y_marks[-1] - y_marks[0]) * (_HEIGHT - _TOP - _BOTTOM)

    parts = [
        f"<figure><h2>{escape(panel.tag)}</h2>",
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(label)}">',
    ]
    for mark in y_marks:
        parts.append(f'<path class="grid" d="M{_LEFT} {y(mark):.1f}H{_WIDTH - _RIGHT}"/>')
        parts.append(
            f'<text class="tick" x="{_LEFT - 6}" y="{y(mark) + 4:.1f}" text-anchor="end">{number(mark)}</text>'
        )
    for mark in x_marks:
        if x_low <= mark <= x_high and mark == int(mark):
            place = f'x="{x(mark):.1f}" y="{_HEIGHT - _BOTTOM + 15}"'
            parts.append(f'<text class="tick" {place} text-anchor="middle">{mark:,.0f}</text>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(f'<text class="tick" x="{middle}" y="{_HEIGHT - 4}" text-anchor="middle">update</text>')
    for curve in panel.curves:
        points = [(x(u), y(v)) for u, v in zip(curve.updates, curve.mean, strict=True)]
        few = " few" if len(points) <= 12 else ""
        parts.append(f'<g class="{classes[curve.method]}{few}">')
        if curve.seeds > 1:
            over = [(x(u), y(v)) for u, v in zip(curve.updates, curve.high, strict=True)]
            under = [(x(u), y(v)) for u, v in zip(curve.updates, curve.low, strict=True)]
            parts.append(f'<path class="band" d="{_path(over + under[::-1])}Z"/>')
        parts.append(f'<path class="mean" d="{_path(points)}"{_dash(inks[curve.method])}/>')
        step = max(1, len(points) // _HOVERS)
        parts += [_dot(curve, place, *points[place]) for place in range(0, len(points), step)]
        parts.append("</g>")
    return "\n".join([*parts, "</svg></figure>"])


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in points)


def _dot(curve: Curve, place: int, a: float, b: float) -> str:
    spread = f" ({number(curve.low[place])} to {number(curve.high[place])})" if curve.seeds > 1 else ""
    title = f"{curve.method}, update {curve.updates[place]:,.0f}: {number(curve.mean[place])}{spread}"
    return f'<circle class="dot" cx="{a:.1f}" cy="{b:.1f}" r="3.5"><title>{escape(title)}</title></circle>'


def _table(found: Sequence[Panel], methods: Sequence[str], classes: dict[str, str]) -> str:
    head = "".join(f'<th class="{classes[method]}">{escape(method)}</th>' for method in methods)
    rows = []
    for panel in found:
        curves = {curve.method: curve for curve in panel.curves}
        last = "".join(f"<td>{_last(curves[m]) if m in curves else ''}</td>" for m in methods)
        rows.append(f'<tr><th class="tag">{escape(panel.tag)}</th><td>last</td>{last}</tr>')
        for word, of in _extremes(panel.tag):
            cells = "".join(f"<td>{_at(curves[m], of(curves[m].mean)) if m in curves else ''}</td>" for m in methods)
            rows.append(f"<tr><td></td><td>{word}</td>{cells}</tr>")
    return (
        f'<h2>Values</h2><div class="table"><table><thead><tr><th></th><th></th>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _extremes(tag: str) -> list[tuple[str, Any]]:
    # More is better for rewards and accuracies; of other measures both ends are told.
    if tag.startswith(("reward/", "val/", "test/")):
        return [("best", np.argmax)]
    return [("smallest", np.argmin), ("largest", np.argmax)]


def _last(curve: Curve) -> str:
    spread = f" <small>{number(curve.low[-1])} to {number(curve.high[-1])}</small>" if curve.seeds > 1 else ""
    return f"{number(curve.mean[-1])}{spread}"


def _at(curve: Curve, place: int) -> str:
    return f"{number(curve.mean[place])} <small>at {curve.updates[place]:,.0f}</small>"
