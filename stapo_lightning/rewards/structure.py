"""The outer structure of an answer: lists, tuples, intervals and unions, cut where no bracket is open."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_DEPTH = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}

_BEGIN, _END = r"\begin{pmatrix}", r"\end{pmatrix}"


@dataclass(frozen=True)
class Structure:
    """An answer cut into its parts.

    Attributes:
        kind: "list" and "union" for parts in any order; the two brackets, such as "(]", or the shape of a matrix, such
            as "2x3", for parts in a fixed order; "" for an answer that is one part.
        parts: At least one.

    """

    kind: str
    parts: Sequence[str]


def structure_of(value: str) -> Structure:
    r"""Cuts once, at the outermost level. `1 \pm a` is the list of both values."""
    for kind, separator in (("list", ","), ("union", r"\cup")):
        parts = split_top(value, separator)
        if len(parts) > 1:
            return Structure(kind, [sign for part in parts for sign in _both_signs(part)])
    if value[:1] in ("(", "[") and value[-1:] in (")", "]") and closes_last(value):
        parts = split_top(value[1:-1], ",")
        if len(parts) > 1:
            return Structure(value[0] + value[-1], parts)
    if value.startswith(_BEGIN) and value.endswith(_END) and value.count(_BEGIN) == 1:
        rows = [split_top(row, "&") for row in split_top(value[len(_BEGIN) : -len(_END)], r"\\")]
        return Structure(f"{len(rows)}x{len(rows[0])}", [entry for row in rows for entry in row])
    signs = _both_signs(value)
    return Structure("list" if len(signs) > 1 else "", signs)


def split_top(text: str, separator: str) -> list[str]:
    """The pieces of `text` between the separators that stand in no bracket, stripped."""
    pieces, depth, start, place = [], 0, 0, 0
    while place < len(text):
        if depth == 0 and text.startswith(separator, place):
            pieces.append(text[start:place].strip())
            place = start = place + len(separator)
            continue
        depth += _DEPTH.get(text[place], 0)
        place += 1
    return [*pieces, text[start:].strip()]


def deepest(text: str) -> int:
    """How many brackets are open at once, at most."""
    depth = most = 0
    for character in text:
        depth += _DEPTH.get(character, 0)
        most = max(most, depth)
    return most


def closes_last(text: str) -> bool:
    """The bracket that opens `text` is closed by its last character."""
    depth = 0
    for place, character in enumerate(text):
        depth += _DEPTH.get(character, 0)
        if depth == 0:
            return place == len(text) - 1
    return False


def _both_signs(part: str) -> list[str]:
    if r"\pm" not in part:
        return [part]
    upper = part.replace(r"\pm", "+").replace(r"\mp", "-")
    lower = part.replace(r"\pm", "-").replace(r"\mp", "+")
    return [upper.removeprefix("+"), lower]
