"""The command line from inside a test."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from jsonargparse import Namespace

from stapo_lightning.cli import StapoCLI, run

ROOT = Path(__file__).parents[1]


class _Parsed(Exception):
    """Carries the configuration out of the command line before anything is built."""

    def __init__(self, config: Namespace) -> None:
        self.config = config


class _ParseOnly(StapoCLI):
    def before_instantiate_classes(self) -> None:
        raise _Parsed(self.config[self.subcommand])


def parse(*configs: str, flags: tuple[str, ...] = (), subcommand: str = "fit") -> Namespace:
    """The configuration that `stapo fit` would run, with nothing built."""
    try:
        run([subcommand, *(f"--config={ROOT / config}" for config in configs), *flags], _ParseOnly)
    except _Parsed as parsed:
        return parsed.config
    raise AssertionError("the command line was not stopped")


def stapo(*args: str, cwd: Path = ROOT, timeout: int = 300) -> subprocess.CompletedProcess[str]:
    """`stapo ARGS` as a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "stapo_lightning", *args],
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
