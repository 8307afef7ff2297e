"""Paths and patterns -> the files they name."""

from __future__ import annotations

import glob
from pathlib import Path


def matching(path: str) -> tuple[list[str], list[str]]:
    """The files of a path or pattern in alphabetical order, or none with the reason.

    Args:
        path: A file, or a pattern with * or ?; relative to the working directory.

    """
    expanded = str(Path(path).expanduser())
    if Path(expanded).is_file():
        return [expanded], []
    if Path(expanded).is_dir():
        return [], [f"path={path!r}: is a folder; expected a file or a pattern such as {path.rstrip('/')}/*"]
    found = sorted(name for name in glob.glob(expanded, recursive=True) if Path(name).is_file())
    if found:
        return found, []
    what = "no file matches this pattern" if glob.has_magic(expanded) else "no such file"
    return [], [f"path={path!r}: {what} (looked from {Path.cwd()}); correct the path"]
