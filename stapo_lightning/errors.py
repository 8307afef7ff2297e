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
        super().__init__(
            "\n".join([f"{len(self.problems)} {noun} in the configuration:", *(f"  * {p}" for p in self.problems)])
        )


def bounded(
    option: str,
    value: float,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
) -> list[str]:
    """The problem with `value`, or an empty list when it keeps every given bound (nan keeps none)."""
    kept = [
        at_least is None or value >= at_least,
        above is None or value > above,
        at_most is None or value <= at_most,
        below is None or value < below,
    ]
    if all(kept):
        return []
    words = (("at least", at_least), ("above", above), ("at most", at_most), ("below", below))
    return [
        f"{option}={value}: must be {' and '.join(f'{word} {bound}' for word, bound in words if bound is not None)}"
    ]


def raise_problems(*problems: list[str]) -> None:
    """Raises one ConfigError with all `problems`, if there are any."""
    found = [problem for part in problems for problem in part]
    if found:
        raise ConfigError(found)


class RewardError(StapoError):
    """A reward broke its contract: wrong number of values, or every row failed."""


class EngineMismatchError(StapoError):
    """The rollout engine samples from another distribution than the policy that trains."""


class EngineServerError(StapoError):
    """The server that samples does not answer, or refuses."""


class NonFiniteError(StapoError):
    """Too many updates in a row had a loss or a gradient that was not finite."""
