"""One problem. Free of torch, so that the processes that run rewards start fast."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass  # not frozen: Lightning's precision plugins copy every dataclass of a batch field by field
class Prompt:
    """One problem.

    Attributes:
        text: What the policy reads: with `messages`, the datamodule puts the rendered chat template here.
        answer: The gold answer that the reward compares with.
        source: Name of the benchmark or data set; evaluation reports one line a source.
        solution: A worked solution, used by the supervised warm start alone; "" where there is none.
        messages: (role, content) pairs to which the policy's chat template is applied; empty for plain text.
        samples: Completions of it that an evaluation draws; 0 leaves their number to the decoding.
        metadata: JSON text for a reward that needs more than the answer; "" where there is none.

    """

    text: str
    answer: str
    source: str = ""
    solution: str = ""
    messages: tuple[tuple[str, str], ...] = ()
    samples: int = 0
    metadata: str = ""
