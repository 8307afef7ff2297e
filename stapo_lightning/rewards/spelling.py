"""Rules that rewrite LaTeX and Unicode in one spelling; each table is applied from top to bottom."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

Rule = tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]


def rules(*pairs: tuple[str, str | Callable[[re.Match[str]], str]]) -> list[Rule]:
    """(pattern, replacement) pairs, compiled."""
    return [(re.compile(pattern), replacement) for pattern, replacement in pairs]


def rewrite(table: Iterable[Rule], text: str) -> str:
    """Applies a table."""
    for pattern, replacement in table:
        text = pattern.sub(replacement, text)
    return text


CHARACTERS = str.maketrans(
    {
        "−": "-", "–": "-", "—": "-", "‐": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": "/", "π": r"\pi ",
        "∞": r"\infty ", "√": r"\sqrt ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup ", "∩": r"\cap ",
        "∈": r"\in ", "±": r"\pm ", "∓": r"\mp ", "°": r"^\circ ", "²": "^2", "³": "^3", "½": r"\frac{1}{2}",
        "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "∅": r"\emptyset ",
        "\u00a0": " ", "\u2009": " ", "\u202f": " ", "，": ",", "（": "(", "）": ")", "’": "'",
    }
)  # fmt: skip

# What changes how an answer looks, and not what it says.
MARKUP = rules(
    (r"(?<!\\)\\[()\[\]]", ""),
    (r"^[\s*_`$]+|(?<![\s*_`$\\])[\s*_`$]+$", ""),
    (r"\\(?:left|right|[bB]igg?[lrm]?)(?![A-Za-z])", ""),
    (r"\\(?:displaystyle|textstyle|limits|nolimits)(?![A-Za-z])", ""),
    (r"(?:,|\{,\})\s*\\!\s*(?=\d)|(?<=\d)\{,\}(?=\d)", ""),  # 10,\!080
    (r"(?<=\d)(?:\\[,;:! ]|[ ~])(?=\d{3}(?!\d))", ""),  # 10\,080
    (r"(?<!\\)\\[,;:! ]|~|\\q?quad(?![A-Za-z])", " "),
    (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
    (r"\\(?:leqslant|leq)(?![A-Za-z])|<=", r"\\le "),
    (r"\\(?:geqslant|geq)(?![A-Za-z])|>=", r"\\ge "),
    (r"\\neq(?![A-Za-z])|!=", r"\\ne "),
    (r"\\lt(?![A-Za-z])", "<"),
    (r"\\gt(?![A-Za-z])", ">"),
    (r"\\varnothing(?![A-Za-z])", r"\\emptyset "),
    (r"\\[lc]?dots(?![A-Za-z])", r"\\ldots "),
    (r"\\lbrace(?![A-Za-z])", r"\\{"),
    (r"\\rbrace(?![A-Za-z])", r"\\}"),
    (r"\\(begin|end)\{(?:[bvBV]|small)?matrix\}", r"\\\1{pmatrix}"),
    (r"\\\\\s*(?=\\end)", ""),
    (r"^([^\d,(\[{]*)(\d{1,3}(?:,\d{3})+)(?!\d)([^,]*)$", lambda m: m[1] + m[2].replace(",", "") + m[3]),
)

# Text in its braces, and the words between values.
WORDS = rules(
    (r"\\(?:text(?:bf|it|rm|sf|tt)?|mbox|emph|math(?:bf|rm|it|sf)|boldsymbol|bm|operatorname)\s*\{([^{}]*)\}", r"\1"),
    (r",?\s+(?:and|or)\s+", ","),
    (r"\\?[$%]", ""),
    (r"\^\s*\{\s*\\prime\s*\}|\^\s*\\prime(?![A-Za-z])", "'"),
)

# A space matters behind a command, and between two numbers: 3 1/2 is not 31/2.
SPACES = rules(
    (r"(\\[A-Za-z]+)\s+(?=[A-Za-z])", "\\1\x01"),
    (r"(?<=\d)\s+(?=[\d.])", "\x01"),
    (r"\s+", ""),
    ("\x01", " "),
)


def _number(match: re.Match[str]) -> str:
    whole, _, decimals = match[0].partition(".")
    whole, decimals = whole.lstrip("0") or "0", decimals.rstrip("0")
    return f"{whole}.{decimals}" if decimals else whole


def _fraction(match: re.Match[str]) -> str:
    over, under = (part if part.startswith("{") else f"{{{part}}}" for part in match.groups())
    return rf"\frac{over}{under}"


def _slash(match: re.Match[str]) -> str:
    over = match[2]
    return rf"{match[1]}\frac{{{over}}}{{{match[3]}}}" if over.count("{") == over.count("}") else match[0]


def _power_of_ten(match: re.Match[str]) -> str:
    factor = "" if match[1] in ("1", "-1") else rf"{match[1].removeprefix('-')}\cdot"
    sign = "-" if match[1].startswith("-") else ""
    return rf"{sign}{factor}10^{{{int(match[2])}}}"


_ARGUMENT = r"(\d|[A-Za-z]|\\pi|\{(?:[^{}]|\{[^{}]*\})*\})"

# Numbers, fractions, roots, powers and products; for text without spaces.
VALUES = rules(
    (r"\d+(?:\.\d+|\.(?!\\))?|\.\d+", _number),
    (r"^\+|(?<![\w})\] ])\+(?=\\infty)", ""),
    (r"(?<![A-Za-z\\])pi(?![A-Za-z])", r"\\pi"),
    (r"\\?(?<![A-Za-z])sqrt\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"\\sqrt ?(\d|[A-Za-z])", r"\\sqrt{\1}"),
    (rf"\\frac ?{_ARGUMENT} ?{_ARGUMENT}", _fraction),
    (r"\\frac\{-([^{}+-]*)\}\{([^{}+-]*)\}", r"-\\frac{\1}{\2}"),
    (r"^(-?\d+) (\d+)/(\d+)$", r"\1\\frac{\2}{\3}"),
    (r"(?<![\w}.)\]^/\\ ])(\d+)/(\d+)(?![\w{.(^/\\])", r"\\frac{\1}{\2}"),
    (r"^(-?)([^/+\-,()<>= ]+)/(\d+|[A-Za-z]|\\[A-Za-z]+)$", _slash),
    (r"([\^_])\{(\w)\}", r"\1\2"),
    (r"\\times ?|\*", r"\\cdot "),
    (r"\\cdot (?![A-Za-z])", r"\\cdot"),
    (r"(?<=[\w})])\\cdot ?(?=[A-Za-z]|\\(?!frac))", ""),
    (r"^(-?\d+(?:\.\d+)?)[eE]\+?(-?\d{1,4})$", _power_of_ten),
    (r"^(-?\d+(?:\.\d+)?)(?:\\cdot|x)10\^\{?\+?(-?\d{1,4})\}?$", _power_of_ten),
)
