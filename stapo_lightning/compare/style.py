"""Colours, ticks and numbers that picture and page share."""

from __future__ import annotations

import math
from typing import NamedTuple


class Ink(NamedTuple):
    """How a method is drawn.

    Attributes:
        light: Colour on white.
        dark: Colour on a dark page.
        dash: Lengths of dashes and gaps in points; empty for a whole line.

    """

    light: str
    dark: str
    dash: tuple[float, ...]


# Okabe and Ito's colours, told apart by the colour-blind; darker on white and lighter on black where they must be read.
_COLOURS = (
    ("#0072b2", "#56b4e9"),
    ("#c14f00", "#ff9d5c"),
    ("#00805e", "#3ecfa3"),
    ("#a8497f", "#ec9cc6"),
    ("#7a6200", "#e8d44d"),
    ("#555555", "#c0c0c0"),
)
_DASHES: tuple[tuple[float, ...], ...] = ((), (6, 3), (2, 2), (8, 3, 2, 3))


def ink(number: int) -> Ink:
    """Of the method of this number; after six the colours come again, dashed."""
    light, dark = _COLOURS[number % len(_COLOURS)]
    return Ink(light, dark, _DASHES[number // len(_COLOURS) % len(_DASHES)])


def ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Round numbers from the last one not above `low` to the first one not below `high`, about `about` steps."""
    if not high > low:
        # A line that does not move, and one at 0 lies on the axis: most measures have no values below.
        low, high = low - abs(low) / 2, high + (abs(high) / 2 or 1.0)
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def width(place: int, methods: int) -> float:
    """Of the line of the method at `place`: earlier ones are wider, so that they show under later ones."""
    return 1.5 + 1.5 * (methods - 1 - place) / max(methods - 1, 1)


def number(value: float) -> str:
    """Three significant digits, without a needless exponent."""
    return (
        f"{value:.3g}"
        if value == 0 or 1e-4 <= abs(value) < 1e3
        else f"{value:,.0f}"
        if abs(value) >= 1e3
        else f"{value:.1e}"
    )
