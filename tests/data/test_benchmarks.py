"""Several benchmarks as one source."""

import pytest

from stapo_lightning.batch import Prompt
from stapo_lightning.data import ArithmeticPrompts, Benchmark, Benchmarks, PromptSource
from stapo_lightning.data.prompts import TokenizedPrompts
from stapo_lightning.errors import ConfigError


class _Given(PromptSource):
    def __init__(self, *texts, remarks=()):
        self.texts = texts
        self.remarks = list(remarks)

    def load(self):
        return [Prompt(text, "1", source="file") for text in self.texts]


def test_each_prompt_carries_its_benchmark_and_number_of_samples():
    source = Benchmarks([Benchmark("one", _Given("a", "b"), 32), Benchmark("two", _Given("c", remarks=["dropped 3"]))])
    found = [(p.text, p.source, p.samples) for p in source.load()]
    assert found == [("a", "one", 32), ("b", "one", 32), ("c", "two", 4)]
    assert source.remarks == ["one 2 x 32", "two 1 x 4", "two dropped 3"]


def test_a_quick_look_takes_fewer_problems_and_samples():
    benchmarks = [Benchmark("one", _Given("a", "b", "c"), 32), Benchmark("two", _Given("d"), 1)]
    source = Benchmarks(benchmarks, max_problems=2, max_samples=4)
    assert [(p.text, p.samples) for p in source.load()] == [("a", 4), ("b", 4), ("d", 1)]
    with pytest.raises(ConfigError, match=r"max_problems=-1: must be at least 0\n.*max_samples=-2: must be at least 0"):
        Benchmarks(benchmarks, max_problems=-1, max_samples=-2).load()


def test_all_problems_of_all_benchmarks_come_at_once():
    source = Benchmarks(
        [
            Benchmark("one", ArithmeticPrompts("test", size=0)),
            Benchmark("one", ArithmeticPrompts("test", size=-1), samples=0),
            Benchmark("a/b", _Given("a")),
        ]
    )
    with pytest.raises(ConfigError) as error:
        source.load()
    assert len(error.value.problems) == 5
    text = str(error.value)
    for expected in (
        "the names ['one', 'one', 'a/b'] must differ",
        "one: ArithmeticPrompts.size=0: must be at least 1",
        "one: ArithmeticPrompts.size=-1: must be at least 1",
        "one: samples=0: must be at least 1",
        "name='a/b' must be a word without /",
    ):
        assert expected in text


def test_prompts_are_put_side_by_side_by_source():
    prompts = [Prompt(text, "1", source=source) for text, source in (("a", "x"), ("b", "y"), ("c", "x"), ("d", "y"))]
    found = TokenizedPrompts(prompts, [[1], [2], [3], [4]]).by_source()
    assert [p.text for p in found.prompts] == ["a", "c", "b", "d"]
    assert found.token_ids == [[1], [3], [2], [4]]
