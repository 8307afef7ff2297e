"""Runs several command lines of `stapo` one after the other: starting processes costs more than what tests do in them.

    python -m tests.cli_worker COMMANDS.json

The file holds lists of arguments. Where they ask for two devices, Lightning starts this module once more.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from stapo_lightning.cli import main

ROOT = Path(__file__).parents[1]


def run_commands(folder: Path, commands: list[list[str]], timeout: int = 600) -> str:
    """The output of `commands`, all run by one process or pair of processes."""
    script = folder / "commands.json"
    script.write_text(json.dumps(commands))
    done = subprocess.run(
        [sys.executable, "-m", "tests.cli_worker", str(script)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


if __name__ == "__main__":
    for command in json.loads(Path(sys.argv[1]).read_text()):
        main(command)
