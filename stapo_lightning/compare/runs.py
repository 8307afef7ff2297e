"""Finds runs, says which method each belongs to, and reads what they logged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from stapo_lightning.errors import ConfigError

_EVENTS = "events.out.tfevents.*"


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        method: What it is averaged with: all runs of this name are seeds of one method.
        folder: Where its event files lie.
        scalars: Tag -> update -> value. Where an update was logged twice, the later value.

    """

    method: str
    folder: Path
    scalars: dict[str, dict[int, float]]


def find_runs(arguments: Sequence[str]) -> list[Run]:
    """The runs that are meant by the command line.

    Args:
        arguments: `FOLDER` or `NAME=FOLDER`. A folder without event files of its own stands for all runs right in it.

    Raises:
        ConfigError: Folders that are missing, empty or given twice, all of them.

    """
    problems: list[str] = []
    runs: dict[Path, Run] = {}
    for argument in arguments:
        name, folder = _split(argument)
        found = list(_folders(folder))
        if not found:
            why = f"no event file ({_EVENTS}) in it or one folder below" if folder.is_dir() else "no such folder"
            problems.append(f"{argument}: {why}; give the folder of a run, such as runs/quickstart/version_0")
        for path in found:
            if path.resolve() in runs:
                problems.append(f"{argument}: {path} was given before; leave one of the two out")
                continue
            run = Run(name or method_of(path), path, read_scalars(path))
            runs[path.resolve()] = run
            if not run.scalars:
                problems.append(f"{argument}: the event files of {path} hold no scalar; did the run log anything?")
    if problems:
        raise ConfigError(problems)
    return list(runs.values())


def method_of(folder: Path) -> str:
    """The name of the folder; for the folders `version_<n>` of Lightning's logger, of the one above."""
    folder = folder.resolve()
    numbered = folder.name.removeprefix("version_").isdigit() and folder.name.startswith("version_")
    return folder.parent.name if numbered else folder.name


def read_scalars(folder: Path) -> dict[str, dict[int, float]]:
    """Tag -> update -> value."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})  # 0 keeps all
    events.Reload()
    return {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def _split(argument: str) -> tuple[str, Path]:
    name, sign, folder = argument.partition("=")
    # A folder may have a "=" in its name.
    return (name, Path(folder)) if sign and name and not Path(argument).exists() else ("", Path(argument))


def _folders(folder: Path) -> Iterator[Path]:
    if any(folder.glob(_EVENTS)):
        yield folder
    elif folder.is_dir():
        yield from sorted((path for path in folder.iterdir() if any(path.glob(_EVENTS))), key=_number)


def _number(folder: Path) -> tuple[int, str]:
    digits = "".join(c for c in folder.name if c.isdigit())
    return int(digits or 0), folder.name
