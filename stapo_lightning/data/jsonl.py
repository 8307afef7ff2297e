"""Prompts from JSON Lines."""

from __future__ import annotations

import codecs
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
        conflicts: Rows that ask the same with different answers: "error", or "drop" leaves such problems out with a
            count, as none of the answers can be trusted. Rows that repeat the answer as well are dropped with a count.

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
            try:
                for number, line in _lines(path):
                    _add(collector, path, number, line)
            except OSError as error:
                collector.complain(path, f"cannot be read ({error.strerror}); correct path or permissions")
        prompts, self.remarks = collector.finish()
        return prompts


def _lines(path: str) -> Iterator[tuple[int, bytes]]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            text = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if stripped := text.strip():
                yield number, stripped


def _add(collector: PromptCollector, path: str, number: int, line: bytes) -> None:
    try:
        row = _parsed(line)
    except (ValueError, RecursionError) as error:
        shown = line.decode(errors="replace")[:60]
        collector.complain(path, f"not one JSON object ({_reason(error)}): {shown!r}; mend the line", number)
    else:
        collector.add(path, number, row)


def _parsed(line: bytes) -> Any:
    text = line.decode()
    row = json.loads(text)
    if "\\ud" in text.lower():  # half of a surrogate pair: JSON may hold one, no tokenizer takes it
        json.dumps(row, ensure_ascii=False).encode()
    return row


def _reason(error: Exception) -> str:
    return "brackets nested too deep" if isinstance(error, RecursionError) else str(error)
