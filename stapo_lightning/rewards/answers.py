r"""Where a completion states its final answer: the last `\boxed{...}` or `Answer:` line, or else behind `####`.

Everything here takes time linear in the text, whatever a policy writes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_BOX = "\\boxed{"
_HASHES = "####"
_BRACE = re.compile(r"[{}]")

# At the start of a line or of a sentence, Markdown aside. Written so that no text is read twice for two starts.
_ANSWER = re.compile(r"(?:^|(?<=[.!?:;]))[ \t*_#>-]*(?:the )?(?:final )?answer[ \t*_]*:", re.IGNORECASE | re.MULTILINE)

_AROUND = " \t\r*_`"

# Lines behind `Answer:` that are looked at for one that is not empty.
_LINES = 4


def last_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}`, or None where there is none or its braces do not close."""
    start = text.rfind(_BOX)
    if start < 0:
        return None
    return _braced(text, start + len(_BOX))


def stated_answer(text: str) -> str | None:
    r"""The final answer as it stands in the text, or None where there is none.

    Of the last `\boxed{...}` and the last `Answer:` line (also `**Final Answer:**`, its content on the same line or the
    next that is not empty), the one that comes later counts. Without either, the line behind the last `####`. A last
    box that is never closed, as where the length limit cut it off, is no answer.
    """
    box, line = text.rfind(_BOX), _end_of_last(text)
    if box >= 0 and box > line:
        return last_boxed(text)
    if line < 0:
        hashes = text.rfind(_HASHES)
        line = hashes + len(_HASHES) if hashes >= 0 else -1
    return None if line < 0 else next(_filled_lines(text, line), None)


def _braced(text: str, start: int) -> str | None:
    depth = 1
    for brace in _BRACE.finditer(text, start):
        depth += 1 if brace.group() == "{" else -1
        if depth == 0:
            return text[start : brace.start()]
    return None


def _end_of_last(text: str) -> int:
    end = -1
    for match in _ANSWER.finditer(text):
        end = match.end()
    return end


def _filled_lines(text: str, start: int) -> Iterator[str]:
    for _ in range(_LINES):
        end = text.find("\n", start)
        line = text[start:] if end < 0 else text[start:end]
        if line.strip(_AROUND + "$"):
            yield line.strip(_AROUND)
        if end < 0:
            return
        start = end + 1
