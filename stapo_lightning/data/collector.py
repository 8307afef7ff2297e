"""Rows of files -> distinct prompts, with everything that is wrong with the files in one error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from stapo_lightning.data.columns import Columns, Messages, read_row
from stapo_lightning.data.wording import Wording
from stapo_lightning.errors import ConfigError
from stapo_lightning.prompt import Prompt

Conflicts = Literal["error", "drop"]

# Problems that one error lists, and row numbers that each of them names.
_LISTED = 20
_ROWS = 5


class PromptCollector:
    """Turns rows into prompts and keeps the first of those that ask the same, whitespace around them aside.

    Args:
        columns: Where a row holds what.
        wording: The words around each problem.
        name: Source of the rows that name none.
        conflicts: Rows that ask the same with different answers: "error", or "drop" leaves such problems out.

    """

    def __init__(self, columns: Columns, wording: Wording, name: str, conflicts: Conflicts) -> None:
        self.columns = columns
        self.wording = wording
        self.name = name
        self.conflicts = conflicts
        self._seen: dict[Messages, tuple[str, str, int]] = {}  # problem -> answer, file, row
        self._prompts: dict[Messages, Prompt] = {}
        self._repeated = 0
        self._disputed: set[Messages] = set()
        self._with_prefix = 0
        self._with_suffix = 0
        self._found: dict[tuple[str, str], list[int]] = {}  # (file, problem) -> rows
        self._unlisted = 0

    def add(self, where: str, number: int, row: Any) -> None:
        """One row.

        Args:
            where: File or data set.
            number: Number of the row there, from 1.
            row: Its columns by name.

        """
        problem, wrong = read_row(row, self.columns)
        if problem is None:
            for message in wrong:
                self.complain(where, message, number)
            return
        key = self.wording.bare(problem.messages)
        first = self._seen.get(key)
        if first is not None:
            self._repeat(where, number, key, problem.answer, first)
            return
        self._seen[key] = (problem.answer, where, number)
        if not key[-1][1]:
            self.complain(where, "the prompt is empty without wording.remove_prefix and remove_suffix", number)
            return
        try:
            text, messages = self.wording.dress(key)
        except ValueError as error:
            self.complain(where, str(error), number)
            return
        raw = problem.messages[-1][1]
        self._with_prefix += raw.startswith(self.wording.remove_prefix.strip())
        self._with_suffix += raw.endswith(self.wording.remove_suffix.strip())
        self._prompts[key] = Prompt(
            text, problem.answer, problem.source or self.name, problem.solution, messages=messages
        )

    def _repeat(self, where: str, number: int, key: Messages, answer: str, first: tuple[str, str, int]) -> None:
        kept, file, row = first
        if answer == kept:
            self._repeated += 1
        elif self.conflicts == "drop":
            self._disputed.add(key)
        else:
            self.complain(
                where,
                f"asks the same as row {row}{'' if file == where else f' of {file}'}, but its answer is {answer!r} and"
                f" not {kept!r}; take one of the two out, or leave out all such problems with conflicts: drop",
                number,
            )

    def complain(self, where: str, problem: str, number: int | None = None) -> None:
        """Adds a problem of a file or, with a row number, of a row; the same problem of many rows is one."""
        key = (where, problem)
        if key not in self._found and len(self._found) == _LISTED:
            self._unlisted += 1
            return
        rows = self._found.setdefault(key, [])
        if number is not None:
            rows.append(number)

    def finish(self) -> tuple[list[Prompt], list[str]]:
        """The prompts, and what was done besides reading, such as "dropped 1,773,909 repeated".

        Raises:
            ConfigError: With every problem that was found.

        """
        found = [f"{where}{_rows(rows)}: {problem}" for (where, problem), rows in self._found.items()]
        if self._unlisted:
            found.append(f"and {self._unlisted:,} more")
        if self._prompts:
            for option, having in (("remove_prefix", self._with_prefix), ("remove_suffix", self._with_suffix)):
                if having == 0:
                    found.append(
                        f"wording.{option}={getattr(self.wording, option)[:60]!r}: none of {len(self._prompts):,}"
                        f" prompts has it; correct it or leave it out. The first is {self._first()!r}"
                    )
        if found:
            raise ConfigError(found)
        return [prompt for key, prompt in self._prompts.items() if key not in self._disputed], self._remarks()

    def _first(self) -> str:
        return next(iter(self._seen))[-1][1][:60]

    def _remarks(self) -> list[str]:
        total = len(self._prompts)
        counts = [
            (self._repeated, "dropped {:,} repeated"),
            (len(self._disputed), "dropped {:,} with contradicting answers"),
            (total - self._with_prefix, "{:,} without the text of wording.remove_prefix"),
            (total - self._with_suffix, "{:,} without the text of wording.remove_suffix"),
        ]
        return [text.format(count) for count, text in counts if count]


def _rows(numbers: Sequence[int]) -> str:
    if not numbers:
        return ""
    shown = [f"{number:,}" for number in numbers[:_ROWS]]
    rest = len(numbers) - len(shown)
    last = f"{rest:,} more" if rest else shown.pop()
    return f", row{'s' if len(numbers) > 1 else ''} {', '.join(shown)}{' and ' if shown else ''}{last}"
