"""Problems that reasoning-gym generates."""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from typing import Any

from stapo_lightning.data.prompts import PromptSource
from stapo_lightning.data.wording import Wording
from stapo_lightning.errors import ConfigError, bounded, raise_problems
from stapo_lightning.optional import optional
from stapo_lightning.prompt import Prompt
from stapo_lightning.rewards.reasoning_gym import REFUSED, create, encode


class ReasoningGymPrompts(PromptSource):
    """Problems of one reasoning-gym task, to be scored by the reward ReasoningGym. Repeated ones are dropped.

    Args:
        task: Name of the task, such as chain_sum.
        size: Problems to generate, at least 1.
        seed: Problem i is drawn from seed + i: the seeds of two sources must differ by more than their sizes, or they
            share problems.
        settings: Difficulty as the task's own options, "name=value" each, such as ["min_terms=2", "max_terms=3"]; the
            value is JSON or else text.
        wording: The words around each problem, and whether the policy's chat template is applied. Its remove_prefix and
            remove_suffix must be empty.

    """

    def __init__(
        self,
        task: str,
        size: int,
        seed: int = 0,
        settings: Sequence[str] = (),
        wording: Wording = Wording(),
    ) -> None:
        self.task = task
        self.size = size
        self.seed = seed
        self.settings = tuple(settings)
        self.wording = wording

    def load(self) -> Sequence[Prompt]:
        raise_problems(bounded("size", self.size, at_least=1), self._task_problems(), self._wording_problems())
        try:
            entries = iter(create(self.task, self.settings, size=self.size, seed=self.seed))
            prompts: dict[str, Prompt] = {}
            for entry in entries:
                prompts.setdefault(entry["question"].strip(), self._prompt(entry))
        except ConfigError:
            raise
        except Exception as error:  # each task checks its settings in its own way
            raise ConfigError(
                [
                    f"task={self.task!r} with settings={list(self.settings)}, size={self.size}, seed={self.seed}:"
                    f" {type(error).__name__}: {error}; its options are {', '.join(self._options())}"
                ]
            ) from error
        repeated = self.size - len(prompts)
        self.remarks = [f"dropped {repeated:,} repeated"] if repeated else []
        return list(prompts.values())

    def _task_problems(self) -> list[str]:
        known = optional("reasoning_gym.factory", "reasoning-gym", "ReasoningGymPrompts").DATASETS
        if self.task not in known:
            near = difflib.get_close_matches(self.task, known, n=3) or sorted(known)[:5]
            return [f"task={self.task!r}: reasoning-gym has no such task; did you mean {', '.join(near)}?"]
        if self.task in REFUSED:
            return [
                f"task={self.task!r}: its verifier evaluates the answer as Python (sympy.parse_expr), which is not done"
                " with what a model writes; choose another task"
            ]
        return [
            f"settings: {setting!r} is not name=value; the options of {self.task} are {', '.join(self._options())}"
            for setting in self.settings
            if setting.partition("=")[0].strip() not in self._options() or "=" not in setting
        ]

    def _wording_problems(self) -> list[str]:
        return [
            f"wording.{option}={value[:60]!r}: generated problems carry no instructions to take off; leave it out"
            for option in ("remove_prefix", "remove_suffix")
            if (value := getattr(self.wording, option))
        ]

    def _options(self) -> list[str]:
        factory = optional("reasoning_gym.factory", "reasoning-gym", "ReasoningGymPrompts")
        _, config = factory.DATASETS[self.task]
        return [name for name in config.__dataclass_fields__ if name not in ("size", "seed")]

    def _prompt(self, entry: dict[str, Any]) -> Prompt:
        text, messages = self.wording.dress((("user", entry["question"].strip()),))
        stored = {"task": self.task, "settings": self.settings, "entry": encode(entry)}
        answer = entry["answer"]
        return Prompt(
            text=text,
            answer="" if answer is None else str(answer),
            source=self.task,
            messages=messages,
            metadata=json.dumps(stored),
        )
