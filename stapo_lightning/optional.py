"""Packages that only some runs need: imported where they are used, and asked for by name where they are missing."""

from __future__ import annotations

import importlib
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
        raise ConfigError(
            [f'{wanted_by} needs the package {error.name}: pip install "stapo-lightning[{extra}]"']
        ) from error
