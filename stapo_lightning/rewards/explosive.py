r"""What would keep computer algebra busy for ever, seen in the text before anything is computed.

The guard is cheap and not complete; the wall time of a worker process is what ends the rest.
"""

from __future__ import annotations

import re

from stapo_lightning.rewards.structure import deepest

# In characters and in brackets: more than any answer that is worth comparing.
_LENGTH, _DEPTH = 600, 12

_UNEVALUATED = re.compile(r"\\(?:int|iint|iiint|oint|sum|prod|lim)(?![A-Za-z])")
_BIG_EXPONENT = re.compile(r"\^\{?[({+-]*\d{5,}")
_TOWER = re.compile(r"\^[{(]*(\d+)[)}]*(?:\^|!)[{(]*(\d*)|!\s*!|![)}]*\^")
_BIG_FACTORIAL = re.compile(r"\d{5,}\s*!|[\d!][)}]+\s*!")
_BIG_BINOMIAL = re.compile(r"\\d?t?binom\{?\d{5,}")


def explosive(value: str) -> bool:
    """True for towers of powers, huge exponents and factorials, sums and integrals, and very long or deep text."""
    return (
        len(value) > _LENGTH
        or deepest(value) > _DEPTH
        or any(p.search(value) for p in (_UNEVALUATED, _BIG_EXPONENT, _BIG_FACTORIAL, _BIG_BINOMIAL))
        or any(_tall(tower) for tower in _TOWER.finditer(value))
    )


def _tall(tower: re.Match[str]) -> bool:
    base, exponent = tower[1], tower[2]
    if not base or not exponent:
        return True
    return len(base) > 2 or len(exponent) > 1 or int(base) ** int(exponent) >= 10_000
