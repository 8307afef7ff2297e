"""Several benchmarks as one prompt source, each with its own number of samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from stapo_lightning.data.prompts import PromptSource
from stapo_lightning.errors import ConfigError, bounded
from stapo_lightning.prompt import Prompt


@dataclass(frozen=True)
class Benchmark:
    """A named set of held-out problems.

    Attributes:
        name: The second part of its tags, such as test/<name>/<decoding>/avg@32.
        prompts: Its problems.
        samples: k, completions of each problem under every decoding, at least 1 (paper: 32 for AIME and AMC, 4 else).

    """

    name: str
    prompts: PromptSource
    samples: int = 4


class Benchmarks(PromptSource):
    """The problems of several benchmarks one after the other, reported apart and as an average over benchmarks.

    Args:
        benchmarks: The benchmarks; their names differ.
        max_problems: For a quick look: so many problems of each benchmark, from its start; 0 takes all.
        max_samples: For a quick look: no more than so many completions of each problem; 0 takes what each benchmark
            says.

    """

    def __init__(self, benchmarks: list[Benchmark], max_problems: int = 0, max_samples: int = 0) -> None:
        self.benchmarks = benchmarks
        self.max_problems = max_problems
        self.max_samples = max_samples

    def load(self) -> Sequence[Prompt]:
        names = [benchmark.name for benchmark in self.benchmarks]
        found = [] if len(set(names)) == len(names) else [f"benchmarks: the names {names} must differ"]
        found += bounded("max_problems", self.max_problems, at_least=0)
        found += bounded("max_samples", self.max_samples, at_least=0)
        prompts: list[Prompt] = []
        remarks: list[str] = []
        for benchmark in self.benchmarks:
            found += bounded(f"{benchmark.name}: samples", benchmark.samples, at_least=1)
            if not benchmark.name or "/" in benchmark.name:
                found.append(f"benchmarks: name={benchmark.name!r} must be a word without /, it is part of a tag")
            try:
                loaded = benchmark.prompts.load()
            except ConfigError as error:
                found += [f"{benchmark.name}: {problem}" for problem in error.problems]
                continue
            taken = loaded[: self.max_problems or None]
            samples = min(benchmark.samples, self.max_samples or benchmark.samples)
            prompts += [replace(prompt, source=benchmark.name, samples=samples) for prompt in taken]
            remarks.append(f"{benchmark.name} {len(taken):,} x {samples}")
            remarks += [f"{benchmark.name} {remark}" for remark in benchmark.prompts.remarks]
        if found:
            raise ConfigError(found)
        self.remarks = remarks
        return prompts
