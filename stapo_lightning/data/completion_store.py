"""Completions of finished problems on disk: the record of a test, and where a killed one goes on."""

from __future__ import annotations

import hashlib
import json
import types
from collections.abc import Sequence
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any

from stapo_lightning.batch import EvalCompletion
from stapo_lightning.prompt import Prompt

_FIELDS = [entry.name for entry in fields(EvalCompletion)]


class CompletionStore:
    """A JSON line for each completion, those of a problem written together and found again by their key.

    Each rank appends to a file of its own and reads those of all, so a test may go on with another number of ranks.
    What a kill left of a problem is not found and, in this rank's file, cut off.

    Args:
        root: Folder of all tests.
        weights: What tells the policy's weights from others; makes the folder of this test.
        terms: What else the completions and verdicts depend on, as text.
        rank: This rank.

    """

    def __init__(self, root: Path, weights: tuple[str, str], terms: str, rank: int) -> None:
        name, details = weights
        self.folder = root / f"{name}-{_digest(details)[:8]}"
        self.terms = f"{details} {terms}"
        self.folder.mkdir(parents=True, exist_ok=True)
        self._path = self.folder / ("completions.jsonl" if rank == 0 else f"completions.rank{rank}.jsonl")
        self._places: dict[str, list[tuple[Path, int]]] = {}
        for path in sorted(self.folder.glob("completions*.jsonl")):
            self._index(path)

    def _index(self, path: Path) -> None:
        end = 0
        with path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                # The key is the first value of a line: {"key": "0123456789abcdef", ...
                self._places.setdefault(line[9:25].decode(), []).append((path, end))
                end += len(line)
        if path == self._path and end < path.stat().st_size:
            with path.open("rb+") as file:
                file.truncate(end)

    def key(self, prompt: Prompt, decoding: Any, samples: int) -> str:
        """16 hexadecimal digits that differ wherever a problem's completions or verdicts could."""
        return _digest(f"{self.terms} {described(decoding)} {samples} {described(prompt)}")[:16]

    def find(self, key: str, samples: int) -> list[EvalCompletion] | None:
        """The `samples` completions of a finished problem; None where it is not finished."""
        places = self._places.get(key, [])
        if len(places) < samples:
            return None
        found = {}
        for path, start in places:
            with path.open("rb") as file:
                file.seek(start)
                entry = json.loads(file.readline())
            found[entry["sample"]] = EvalCompletion(**{name: entry[name] for name in _FIELDS})
        return [found[sample] for sample in range(samples)] if len(found) == samples else None

    def add(self, key: str, decoding: str, number: int, prompt: Prompt, completions: Sequence[EvalCompletion]) -> None:
        """Appends the completions of problem `number` of its benchmark."""
        shared = {
            "key": key,
            "benchmark": prompt.source,
            "decoding": decoding,
            "problem": number,
            "prompt": prompt.text,
            "gold": prompt.answer,
        }
        lines = [
            json.dumps(shared | {"sample": sample} | asdict(completion), ensure_ascii=False) + "\n"
            for sample, completion in enumerate(completions)
        ]
        with self._path.open("ab") as file:
            start = file.tell()
            for line in lines:
                # A lone surrogate, which a byte-level tokenizer can produce, has no encoding of its own.
                encoded = line.encode("utf-8", errors="backslashreplace")
                file.write(encoded)
                self._places.setdefault(key, []).append((self._path, start))
                start += len(encoded)


def described(value: Any) -> str:
    """An object as text: its class and, name by name, its public attributes, down to numbers and strings.

    Private attributes are left out: they hold what is loaded or counted, not what was asked for.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(described, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{described(k)}: {described(v)}' for k, v in value.items())}}}"
    if isinstance(value, types.FunctionType):
        return f"{value.__module__}.{value.__qualname__}"
    names = [f.name for f in fields(value)] if is_dataclass(value) else sorted(getattr(value, "__dict__", {}))
    inside = ", ".join(f"{name}={described(getattr(value, name))}" for name in names if not name.startswith("_"))
    return f"{type(value).__module__}.{type(value).__qualname__}({inside})"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", errors="backslashreplace")).hexdigest()
