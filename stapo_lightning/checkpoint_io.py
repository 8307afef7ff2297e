"""Checkpoints that are whole or not there: a kill during a save leaves the previous one usable.

One process or DDP writes a file, a sharded policy a folder with a share of each rank; either is read anywhere.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from lightning.fabric.plugins import TorchCheckpointIO
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

# Lightning's name for the part of a checkpoint folder that is no weight and no optimiser state.
_REST = "meta.pt"


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes next to the target, flushes to disk and renames.

    Lightning's own writer collects the file in the system's temporary folder; from there to another file system the
    last step is a copy, which a kill can cut in half.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Saves `checkpoint` at `path`; remote paths (with ://) are left to Lightning."""
        if "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        for stale in target.parent.glob(f".{target.name}.*.partial"):
            stale.unlink(missing_ok=True)
        partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
        with partial.open("wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        _put(partial, target)

    def load_checkpoint(
        self, path: str | Path, map_location: Any = lambda storage, _: storage, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Loads a file, or the folder of a sharded run as the file that one process would have written."""
        if is_folder(path):
            return read_folder(Path(path), weights_only)
        return super().load_checkpoint(path, map_location, weights_only)


def is_folder(path: str | Path) -> bool:
    """Whether `path` is the checkpoint of a sharded run."""
    return (Path(path) / _REST).is_file()


def without_tensors(path: str | Path) -> dict[str, Any]:
    """What a checkpoint holds, without reading its weights: those of a folder are left out, those of a file mapped."""
    return torch.load(Path(path) / _REST if is_folder(path) else path, mmap=True, weights_only=True)


def global_step(path: Path) -> int:
    """Updates done at a checkpoint."""
    return int(without_tensors(path)["global_step"])


@contextmanager
def finished_folder(target: Path, writes: bool, barrier: Callable[[], None]) -> Iterator[Path]:
    """A folder to write to that takes the place of `target` once every rank has left the context.

    Args:
        target: A folder or a file, or nothing yet.
        writes: On one rank, which does the renaming.
        barrier: Waits for all ranks.

    """
    partial = target.with_name(f".{target.name}.partial")
    if writes:
        recover(target)
        shutil.rmtree(partial, ignore_errors=True)
    barrier()
    yield partial
    barrier()
    if writes:
        for path in partial.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        _put(partial, target)
    barrier()


def _put(partial: Path, target: Path) -> None:
    """Renames `partial` to `target`. Files are swapped at once; a folder that is in the way steps aside first."""
    if target.is_dir() or (partial.is_dir() and target.exists()):
        aside = _aside(target)
        target.rename(aside)
        partial.rename(target)
        _remove(aside)
    else:
        partial.replace(target)


def recover(target: Path) -> None:
    """Makes up for a kill between the two renames of a folder: what had stepped aside comes back."""
    aside = _aside(target)
    if not target.exists() and aside.exists():
        aside.rename(target)
    elif aside.exists():
        _remove(aside)


def recover_all(folder: Path) -> None:
    """`recover` for every checkpoint of a folder. Ranks may do it at the same time: the first one renames."""
    for aside in folder.glob(".*.previous"):
        target = folder / aside.name.removeprefix(".").removesuffix(".previous")
        if not target.exists():
            try:
                aside.rename(target)
            except FileNotFoundError:
                if not target.exists():  # else another rank was faster
                    raise


def _aside(target: Path) -> Path:
    return target.with_name(f".{target.name}.previous")


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def read_folder(path: Path, weights_only: bool | None = None) -> dict[str, Any]:
    """The folder of a sharded run as one process would have saved it: whole tensors, parameters by number.

    Args:
        path: The folder.
        weights_only: As in torch.load, of all that is no weight and no optimiser state.

    """
    reader = dcp.FileSystemReader(path)
    metadata = reader.read_metadata()
    flat: dict[str, Any] = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype) if isinstance(entry, TensorStorageMetadata) else None
        for key, entry in metadata.state_dict_metadata.items()
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*assuming the intent is to load in a single process.*")
        dcp.load(flat, storage_reader=reader, no_dist=True)
    nested = _nested({place: flat[key] for key, place in metadata.planner_data.items()})
    checkpoint = torch.load(path / _REST, weights_only=weights_only)
    checkpoint["state_dict"] = nested["state_dict"]
    names = sorted((name for name in nested if name.startswith("optimizer_")), key=lambda name: int(name[10:]))
    checkpoint["optimizer_states"] = [by_number(nested[name]) for name in names]
    return checkpoint


def _nested(flat: dict[tuple[str | int, ...], Any]) -> Any:
    """Dictionaries and lists from their innermost values, each under its place; numbers in a place are a list's."""
    if list(flat) == [()]:
        return flat[()]
    parts: dict[str | int, dict[tuple[str | int, ...], Any]] = {}
    for place, value in flat.items():
        parts.setdefault(place[0], {})[place[1:]] = value
    if all(isinstance(name, int) for name in parts):
        return [_nested(parts[number]) for number in sorted(parts)]
    return {name: _nested(part) for name, part in parts.items()}


def by_number(state: dict[str, Any]) -> dict[str, Any]:
    """An optimiser's state with parameters by number, as torch.optim has it, from one by name."""
    groups = state["param_groups"]
    number = {name: i for i, name in enumerate(name for group in groups for name in group["params"])}
    return {
        "state": {number[name]: value for name, value in state.get("state", {}).items()},
        "param_groups": [group | {"params": [number[name] for name in group["params"]]} for group in groups],
    }


def by_name(state: dict[str, Any], names: list[list[str]]) -> dict[str, Any]:
    """The reverse of `by_number`.

    Args:
        state: As torch.optim has it.
        names: The parameters' names, a list for each group.

    """
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    name = dict(zip(numbers, (name for group in names for name in group), strict=True))
    return {
        "state": {name[number]: value for number, value in state["state"].items()},
        "param_groups": [group | {"params": mine} for group, mine in zip(state["param_groups"], names, strict=True)],
    }
