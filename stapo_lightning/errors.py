"""Errors that a user meets: each names the value seen, the bound and the option to change."""

from __future__ import annotations

from collections.abc import Sequence


class StapoError(Exception):
    """A message for the user; the command line prints it without a traceback."""


class ConfigError(StapoError):
    """All problems of a configuration at once.

    Args:
        problems: One sentence each: value seen, bound, option to change.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        noun = "problem" if len(self.problems) == 1 else "problems"
        super().__init__("\n".join([f"{len(self.problems)} {noun} in the configuration:", *(f"  * {p}" for p in self.problems)]))


class RewardError(StapoError):
    """A reward broke its contract: wrong number of values, or every row failed."""


class NonFiniteError(StapoError):
    """Too many updates in a row had a loss or a gradient that was not finite."""
