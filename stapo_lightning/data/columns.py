"""One row of a file -> the messages, answer and source of a problem."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

Messages = tuple[tuple[str, str], ...]

# Longest part of a value that a message shows.
_SHOWN = 80


@dataclass(frozen=True)
class Columns:
    """Where a row holds what. A dotted name reaches into nested columns, as in reward_model.ground_truth or answers.0.

    Attributes:
        prompt: Column of the problem: text, or chat messages (a list of {role, content}, or JSON text of one).
        answer: Column of the gold answer: text or a number, which is written without exponent and trailing zeros.
        source: Column that names the data set or benchmark of a row; "" gives every row the source's `name`.
        solution: Column of a worked solution for the supervised warm start; "" for none.
        answer_after: Marker behind whose last occurrence the gold answer stands, such as "####" in GSM8K's worked
            solutions; "" takes the whole column.

    """

    prompt: str = "question"
    answer: str = "answer"
    source: str = ""
    solution: str = ""
    answer_after: str = ""

    def top_level(self, found: Sequence[str]) -> list[str]:
        """Those of the columns `found` in a file that have to be read."""
        wanted = [name for name in (self.prompt, self.answer, self.source, self.solution) if name]
        wanted = [name if name in found else name.split(".")[0] for name in wanted]
        return [name for name in found if name in wanted]

    def missing(self, found: Sequence[str]) -> list[str]:
        """A problem for each column that is not among the top-level columns `found`."""
        return [
            _no_column(option, name, found)
            for option, name in self._named()
            if name not in found and name.split(".")[0] not in found
        ]

    def _named(self) -> list[tuple[str, str]]:
        options = ("prompt", "answer", "source", "solution")
        return [(option, name) for option in options if (name := getattr(self, option))]


@dataclass(frozen=True)
class Problem:
    """What a row holds.

    Attributes:
        messages: (role, content) pairs, stripped; text is one message of the user.
        answer: Gold answer, stripped.
        source: "" where the row names none.
        solution: "" where there is none.

    """

    messages: Messages
    answer: str
    source: str
    solution: str


def read_row(row: Any, columns: Columns) -> tuple[Problem | None, list[str]]:
    """The problem of a row, or None with everything that is wrong with the row."""
    if not isinstance(row, Mapping):
        return None, [f"holds {_shown(row)}; expected an object with one value for each column"]
    missing = [_no_column(option, name, _names(row)) for option, name in columns._named() if not _reachable(row, name)]
    if missing:
        return None, missing
    found: list[str] = []
    messages = _messages(reach(row, columns.prompt), columns.prompt, found)
    answer = _answer(reach(row, columns.answer), columns, found)
    if found:
        return None, found
    source = _optional_text(row, columns.source)
    return Problem(messages, answer, source, _optional_text(row, columns.solution)), []


def reach(row: Mapping[str, Any], name: str) -> Any:
    """The value of a column or, by a dotted name, inside one; None inside an empty column.

    Raises:
        KeyError: There is no such column.

    """
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        if value is None:
            return None
        if isinstance(value, Mapping):
            value = value[part]
        elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            raise KeyError(name)
    return value


def _reachable(row: Mapping[str, Any], name: str) -> bool:
    try:
        reach(row, name)
    except KeyError:
        return False
    return True


def _names(row: Mapping[str, Any], prefix: str = "") -> list[str]:
    found = []
    for name, value in row.items():
        found += _names(value, f"{prefix}{name}.") if isinstance(value, Mapping) and value else [f"{prefix}{name}"]
    return found


def _no_column(option: str, name: str, found: Sequence[str]) -> str:
    listed = ", ".join(map(str, found)) if found else "none"
    return f"no column {name!r} (columns.{option}); columns found: {listed}"


def _messages(value: Any, column: str, found: list[str]) -> Messages:
    where = f"the prompt (column {column!r}, columns.prompt)"
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = _parsed(value)
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if value is None or value == []:
        found.append(f"{where} is empty; fill it in or take the row out")
        return ()
    if not _is_chat(value):
        found.append(f"{where} is {_shown(value)}; expected text or chat messages, a list of {{role, content}}")
        return ()
    messages = tuple((message["role"], message["content"].strip()) for message in value)
    if not messages[-1][1]:
        found.append(f"{where} is empty; fill it in or take the row out")
    elif messages[-1][0] != "user":
        found.append(f"{where} ends with a message of {messages[-1][0]!r}; expected the user to have the last word")
    return messages


def _is_chat(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) > 0
        and all(
            isinstance(message, Mapping)
            and isinstance(message.get("role"), str)
            and isinstance(message.get("content"), str)
            for message in value
        )
    )


def _parsed(text: str) -> Any:
    """Chat messages written as JSON text; a problem that only begins with a bracket stays as it is."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if _is_chat(value) else text


def _answer(value: Any, columns: Columns, found: list[str]) -> str:
    where = f"the answer (column {columns.answer!r}, columns.answer)"
    text = "" if value is None else value if isinstance(value, str) else _digits(value)
    if text is None:
        found.append(f"{where} is {_shown(value)}; expected text or a finite number (a dotted name reaches into it)")
        return ""
    text = text.strip()
    if not text:
        found.append(f"{where} is empty; fill it in or take the row out")
        return ""
    if columns.answer_after:
        _, marker, text = text.rpartition(columns.answer_after)
        text = text.strip()
        if not marker or not text:
            found.append(
                f"{where} is {_shown(value)}; expected an answer behind {columns.answer_after!r} (columns.answer_after)"
            )
    return text


def _digits(value: Any) -> str | None:
    """A number as one writes it by hand; None for what is not a finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float, Decimal)):
        return None
    number = Decimal(str(value))
    if not number.is_finite():
        return None
    digits = f"{number:f}"
    return digits.rstrip("0").rstrip(".") if "." in digits else digits


def _optional_text(row: Mapping[str, Any], name: str) -> str:
    value = reach(row, name) if name else None
    return "" if value is None else str(value).strip()


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= _SHOWN else text[:_SHOWN] + '...'}"
