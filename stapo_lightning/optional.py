"""Packages that only some runs need: imported where they are used, and asked for by name where they are missing."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from stapo_lightning.errors import ConfigError


def optional(module: str, extra: str, wanted_by: str) -> Any:
    """The imported module.

    Args:
        module: Name to import.
        extra: The extra of this distribution that installs it.
        wanted_by: Class that needs it.

    Raises:
        ConfigError: It is not installed; the message holds the command that installs it.

    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError([_missing(str(error.name), extra, wanted_by)]) from error


def require(module: str, extra: str, wanted_by: str) -> None:
    """Asks for a package without importing it, for what will need it only later.

    Args:
        module: Top-level name.
        extra: The extra of this distribution that installs it.
        wanted_by: Class that needs it.

    Raises:
        ConfigError: It is not installed; the message holds the command that installs it.

    """
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        found = None
    if found is None:
        raise ConfigError([_missing(module, extra, wanted_by)])


def _missing(module: str, extra: str, wanted_by: str) -> str:
    return (
        f'{wanted_by} needs the package {module}: pip install "stapo-lightning[{extra}]", or in a clone'
        f' pip install -e ".[{extra}]"'
    )
