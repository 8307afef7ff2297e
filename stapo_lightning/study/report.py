"""The report of a study as Markdown: a summary, tables by regime and group, the quadrants, where it came from."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence

from stapo_lightning.study.intervals import Interval
from stapo_lightning.study.results import Results
from stapo_lightning.study.study import Method

QUADRANTS = ("low_prob_low_entropy", "low_prob_high_entropy", "high_prob_low_entropy", "high_prob_high_entropy")

# (measure, heading, how a value is written, how a difference is written)
_Column = tuple[str, str, Callable[[float], str], Callable[[float], str]]
_COLUMNS: tuple[_Column, ...] = (
    ("final_accuracy", "final accuracy, %", lambda v: f"{100 * v:.1f}", lambda v: f"{100 * v:+.1f}"),
    ("best_accuracy", "best, %", lambda v: f"{100 * v:.1f}", lambda v: f"{100 * v:+.1f}"),
    ("largest_fall", "largest fall, points", lambda v: f"{100 * v:.1f}", lambda v: f"{100 * v:+.1f}"),
    ("entropy_ratio", "entropy, end / start", lambda v: f"{v:.2f}", lambda v: f"{v:+.2f}"),
)


def markdown(results: Results, title: str, findings: str, pictures: Sequence[str]) -> str:
    """The whole page.

    Args:
        results: What came out.
        title: Its heading.
        findings: Markdown by a person, put first; "" for none.
        pictures: Names of picture files beside the page.

    """
    study = results.study
    parts = [f"# {title}", findings.strip(), "## Summary", _reading(results), summary_table(results)]
    parts += [f"![{name}]({name})" for name in pictures]
    groups = list(dict.fromkeys(method.group for method in study.methods))
    for regime in study.regimes:
        parts.append(f"## Regime {regime.name}")
        parts.append("Configs: " + ", ".join(f"`{file}`" for file in regime.configs) + ".")
        for group in groups:
            methods = [m for m in study.methods if m.group == group and results.of(regime.name, m.name)]
            if methods:
                parts += [f"### {regime.name}: {group}", _full_table(results, regime.name, methods)]
        parts += _quadrants(results, regime.name)
    return "\n\n".join(part for part in [*parts, *_provenance(results)] if part) + "\n"


def summary_table(results: Results) -> str:
    """Accuracy and entropy of the methods of the first group, a row a regime and method; the README quotes its rows."""
    study = results.study
    head = [
        "regime", "method", "runs", "final accuracy, %", f"difference to {study.reference}", "largest fall, points",
        "entropy, end / start", "difference", "silenced",
    ]  # fmt: skip
    rows = []
    for regime in study.regimes:
        for method in study.methods:
            if method.group == study.methods[0].group and results.of(regime.name, method.name):
                final, fall, entropy = _COLUMNS[0], _COLUMNS[2], _COLUMNS[3]
                place = (regime.name, method.name)
                rows.append(
                    [
                        regime.name, method.name, str(len(results.of(*place))), _value(results, *place, final),
                        _difference(results, *place, final), _value(results, *place, fall),
                        _value(results, *place, entropy), _difference(results, *place, entropy),
                        _silenced(results, *place),
                    ]
                )  # fmt: skip
    return _table(head, rows)


def _reading(results: Results) -> str:
    window = results.study.window
    return (
        "Accuracies are those of held-out problems at T = 1. Entropy is the mean over the last"
        f" {window} updates over that of the {window} after warm-up. A mean is followed by ± the standard deviation"
        f" over seeds; a difference is paired by seed to {results.study.reference}, with its 95 % bootstrap interval,"
        " bold where that leaves out 0."
    )


def _full_table(results: Results, regime: str, methods: Sequence[Method]) -> str:
    head = ["method", "runs"]
    for _, heading, _, _ in _COLUMNS:
        head += [heading, "difference"]
    head += ["entropy start → end, nats", "silenced", "updates that silence none"]
    rows = []
    for method in methods:
        row = [method.name, str(len(results.of(regime, method.name)))]
        for column in _COLUMNS:
            row += [_value(results, regime, method.name, column), _difference(results, regime, method.name, column)]
        start, end = (results.mean(regime, method.name, name).mean for name in ("entropy_start", "entropy_end"))
        idle = _share(results.mean(regime, method.name, "idle_updates").mean)
        rows.append([*row, f"{start:.3f} → {end:.3f}", _silenced(results, regime, method.name), idle])
    return _table(head, rows)


def _quadrants(results: Results, regime: str) -> list[str]:
    """Who carries the gradient: of every method of the first group whose runs logged it."""
    study = results.study
    rows = []
    for method in study.methods:
        logged = [r for r in results.of(regime, method.name) if f"quadrants/{QUADRANTS[0]}/grad_share" in r.scalars]
        if method.group != study.methods[0].group or not logged:
            continue
        for quadrant in QUADRANTS:
            row = [method.name, quadrant.replace("_", " ")]
            for tag in ("quadrants/{}/token_share", "quadrants/{}/grad_share", "gradients/{}/share"):
                row += [_share(value) for value in results.windows(regime, method.name, tag.format(quadrant))]
            rows.append(row)
    if not rows:
        return []
    head = ["method", "quadrant"]
    for name in ("tokens", "squared logit gradient", "norm of the parameters' gradient"):
        head += [f"{name}, start", "end"]
    said = (
        "Tokens with A > 0 only, the first window after warm-up and the last, mean over seeds. Token and logit-gradient"
        " shares add up to 1 over the quadrants. The last is the norm of the gradient that the quadrant's tokens alone"
        " give to all parameters over that of all tokens; norms do not add up."
    )
    return [f"### {regime}: quadrants of probability and entropy", said, _table(head, rows)]


def _provenance(results: Results) -> Iterable[str]:
    found = results.results
    seconds = sum(r.outcome.seconds for r in found)
    commits = sorted({r.outcome.commit for r in found})
    yield "## Where it comes from"
    yield (
        f"{len(found)} runs, {seconds / 3600:.1f} hours of their own time ({seconds / len(found):.0f} s a run) on a"
        f" machine of {os.cpu_count()} cores; commit{'s' * (len(commits) > 1)} {', '.join(commits) or 'unknown'}."
        " `runs.csv` has every run's measures and the command that makes it by itself."
    )
    if results.remarks:
        yield "\n".join(f"* {remark}" for remark in results.remarks)


def _value(results: Results, regime: str, method: str, column: _Column) -> str:
    name, _, written, _ = column
    values = list(results.by_seed(regime, method, name).values())
    mean = sum(values) / len(values)
    if len(values) == 1:
        return written(mean)
    deviation = (sum((value - mean) ** 2 for value in values) / (len(values) - 1)) ** 0.5
    return f"{written(mean)} ± {written(deviation)}"


def _difference(results: Results, regime: str, method: str, column: _Column) -> str:
    name, _, _, written = column
    found: Interval | None = results.difference(regime, method, name)
    if found is None:
        return ""
    if found.seeds == 1:
        return written(found.mean)
    text = f"{written(found.mean)} [{written(found.low)}, {written(found.high)}]"
    return f"**{text}**" if found.excludes_zero else text


def _silenced(results: Results, regime: str, method: str) -> str:
    return _share(results.mean(regime, method, "silenced_share").mean)


def _share(value: float) -> str:
    if value != value:
        return ""
    percent = 100 * value
    return f"{percent:.1f} %" if percent >= 10 else f"{percent:.2g} %" if percent else "0"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * 2 + ["--:"] * (len(head) - 2), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
