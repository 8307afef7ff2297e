"""Sizes of memory as a user writes and reads them."""

from __future__ import annotations

import re
from dataclasses import dataclass

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


@dataclass(frozen=True)
class Need:
    """Memory that one rank needs for one thing.

    Attributes:
        what: What it is for.
        size: Bytes.
        change: The option that makes it smaller, and how; empty where there is none.
        always: Of what a rollout needs: whether it stays there while the policy updates.

    """

    what: str
    size: int
    change: str = ""
    always: bool = False


def parse_bytes(text: str) -> int:
    """The bytes of a size such as "80GiB", "96 GB" or "1.5e9".

    Raises:
        ValueError: It is no number above 0 with one of the units B, KB, KiB, MB, MiB, GB, GiB, TB, TiB (none: bytes).

    """
    found = re.fullmatch(r"\s*([\d.]+(?:e\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = found[2].upper() or "B" if found else ""
    try:
        size = int(float(found[1]) * _UNITS[unit]) if found else 0
    except (ValueError, KeyError):
        size = 0
    if size <= 0:
        raise ValueError(f"{text!r} is no size of memory; write a number above 0 with a unit, such as 80GiB or 96GB")
    return size


def human_bytes(size: float) -> str:
    """Three digits and a binary unit, such as "13.8 GiB"."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(size) >= 1000 and len(units) > 1:
        size /= 1024
        units.pop(0)
    digits = 0 if units[0] == "B" or size >= 100 else 1 if size >= 10 else 2
    return f"{size:.{digits}f} {units[0]}"
