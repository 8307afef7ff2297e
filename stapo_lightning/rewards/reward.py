"""The interface of a reward, and the one place that calls it: an error costs its row, a broken contract the run."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from stapo_lightning.errors import RewardError
from stapo_lightning.prompt import Prompt
from stapo_lightning.rewards.answers import last_boxed

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Completion:
    """What a reward sees of one completion.

    Attributes:
        prompt: The problem, with its gold answer.
        text: The decoded completion, without special tokens.
        num_tokens: Its length in tokens, end token included.
        truncated: True where the length limit ended it.

    """

    prompt: Prompt
    text: str
    num_tokens: int
    truncated: bool


class Reward(ABC):
    """Scores completions; a verifier gives 1 for correct and 0 for wrong."""

    @abstractmethod
    def __call__(self, completions: Sequence[Completion]) -> Sequence[float | None]:
        """One value a completion, in order. None or nan: this row could not be scored and is left out of its group."""

    def gold(self, prompt: Prompt) -> str:
        r"""A completion that this reward must find correct; "" where there is no saying. The default is \boxed{answer}.

        Before training, a sample of the prompts is scored with it.
        """
        return prompt.answer if "\\boxed{" in prompt.answer else f"\\boxed{{{prompt.answer}}}"

    def answer(self, completion: Completion) -> str | None:
        r"""The final answer that a completion gives, None where there is none. The default is the last \boxed{...}.

        Evaluation writes it down and counts votes with it: answers that are equal by the rules of this reward should be
        equal strings, as far as rules for strings can see. It runs in the training process, where nothing stops it:
        no computer algebra, and time linear in the text.
        """
        found = last_boxed(completion.text)
        return None if found is None else found.strip()


@dataclass
class ScoredRows:
    """The rewards of some completions.

    Attributes:
        values: One float a completion, in order; nan where there is none.
        errors: Rows whose reward raised, crashed or was not a number.
        timeouts: Rows whose reward did not return in time; only `RewardWorkers` can stop one.

    """

    values: list[float]
    errors: int
    timeouts: int = 0


def score_completions(reward: Reward, completions: Sequence[Completion]) -> ScoredRows:
    """Calls `reward` on all completions, and row by row where that raises, so that one hostile row costs itself alone.

    Runs in this process, where nothing stops a reward that does not return: `RewardWorkers` does.

    Raises:
        RewardError: The number of values differs from the number of completions, or it raised on every row.

    """
    try:
        values = checked_values(reward, completions)
    except RewardError:
        raise
    except Exception:
        values = []
        last: Exception | None = None
        raised = 0
        for completion in completions:
            try:
                values += checked_values(reward, [completion])
            except RewardError:
                raise
            except Exception as error:
                last, raised = error, raised + 1
                values.append(math.nan)
        if last is not None and raised == len(completions):
            raise RewardError(
                f"{reward_name(reward)} raised on every one of {len(completions)} completions, the last time"
                f" {type(last).__name__}: {last}"
            ) from last
        if last is not None:
            _log.warning("%s raised %s: %s (row left out of its group)", reward_name(reward), type(last).__name__, last)
    return ScoredRows(values, sum(math.isnan(v) for v in values))


def checked_values(reward: Reward, completions: Sequence[Completion]) -> list[float]:
    """What `reward` returns for `completions` as floats, nan for None and whatever is not finite.

    Raises:
        RewardError: It is not one value a completion.
        Exception: Whatever the reward raises.

    """
    values = reward(completions)
    try:
        count = len(values)
    except TypeError:
        raise RewardError(
            f"{reward_name(reward)} returned {type(values).__name__} {values!r} for {len(completions)} completions;"
            " return a list with one float for each completion"
        ) from None
    if count != len(completions):
        raise RewardError(
            f"{reward_name(reward)} returned {count} values for {len(completions)} completions;"
            " return a list with one float for each completion"
        )
    return [_number(value) for value in values]


def _number(value: float | None) -> float:
    number = math.nan if value is None else float(value)
    return number if math.isfinite(number) else math.nan


def reward_name(reward: Reward) -> str:
    """How messages call `reward`."""
    return f"reward {type(reward).__module__}.{type(reward).__qualname__}"
