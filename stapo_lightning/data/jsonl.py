"""Prompts from JSON Lines."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from stapo_lightning.data.collector import Conflicts, PromptCollector
from stapo_lightning.data.columns import Columns
from stapo_lightning.data.files import matching
from stapo_lightning.data.prompts import PromptSource
from stapo_lightning.data.wording import Wording
from stapo_lightning.errors import ConfigError
from stapo_lightning.prompt import Prompt


class JsonlPrompts(PromptSource):
    """Problems from files with one JSON object a line. Blank lines are left out; rows are numbered by line, from 1.

    Args:
        path: A file, relative to the working directory, or a pattern such as data/*.jsonl, read in alphabetical order.
        columns: Where a line holds what.
        wording: The words around each problem, and whether the policy's chat template is applied.
        name: Source of the rows that name none: evaluation reports one line a source.
        conflicts: A row that asks the same as an earlier one with another answer: "error", or "first" keeps the
            earlier. Rows that repeat the answer as well are dropped with a count.

    """

    def __init__(
        self,
        path: str,
        columns: Columns = Columns(),
        wording: Wording = Wording(),
        name: str = "",
        conflicts: Conflicts = "error",
    ) -> None:
        self.path = path
        self.columns = columns
        self.wording = wording
        self.name = name
        self.conflicts = conflicts

    def load(self) -> Sequence[Prompt]:
        collector = PromptCollector(self.columns, self.wording, self.name, self.conflicts)
        paths, problems = matching(self.path)
        if problems:
            raise ConfigError(problems)
        for path in paths:
            for number, line in _lines(path):
                try:
                    row: Any = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
                except (ValueError, RecursionError) as error:
                    problem = f"not one JSON object ({_reason(error)}): {line[:60]!r}; mend the line"
                    collector.complain(path, problem, number)
                else:
                    collector.add(path, number, row)
        prompts, self.remarks = collector.finish()
        return prompts


def _lines(path: str) -> Iterator[tuple[int, bytes]]:
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if stripped := line.strip():
                    yield number, stripped
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read ({error.strerror}); correct path or permissions"]) from error


def _reason(error: Exception) -> str:
    return "brackets nested too deep" if isinstance(error, RecursionError) else str(error)
