"""Parquet, and the nested layout of the RL community."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stapo_lightning.data import Columns, ParquetPrompts
from stapo_lightning.errors import ConfigError
from tests.builders import SHARED

BENCHMARKS = SHARED / "data" / "benchmarks"
NESTED = Columns(prompt="prompt", answer="reward_model.ground_truth", source="data_source")


def _nested(question, answer, source="math"):
    return {
        "prompt": [{"role": "user", "content": question}],
        "data_source": source,
        "reward_model": {"ground_truth": answer, "style": "rule"},
        "extra_info": {"index": question},
    }


def _file(folder, rows, name="a.parquet"):
    pq.write_table(pa.Table.from_pylist(rows), folder / name)
    return str(folder / name)


def _problems(path, columns=Columns()):
    with pytest.raises(ConfigError) as raised:
        ParquetPrompts(str(path), columns).load()
    return raised.value.problems


def test_the_nested_layout(tmp_path):
    source = ParquetPrompts(_file(tmp_path, [_nested("a", "1"), _nested("b", "2", "other"), _nested("a", "1")]), NESTED)
    assert [(p.text, p.answer, p.source) for p in source.load()] == [("a", "1", "math"), ("b", "2", "other")]
    assert source.remarks == ["dropped 1 repeated"]


def test_plain_columns_with_numbers(tmp_path):
    path = _file(tmp_path, [{"question": "a", "answer": 1.0}, {"question": "b", "answer": 0.5}])
    assert [prompt.answer for prompt in ParquetPrompts(path).load()] == ["1", "0.5"]


def test_rows_are_numbered_through_row_groups_and_files(tmp_path):
    rows = [{"question": str(i), "answer": "1"} for i in range(25)]
    rows[21]["answer"] = None
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "1.parquet", row_group_size=10)
    second = _file(tmp_path, [{"question": "x", "answer": ""}], "2.parquet")
    first, other = _problems(tmp_path / "*.parquet")
    assert first.startswith(f"{tmp_path}/1.parquet, row 22: the answer")
    assert other.startswith(f"{second}, row 1: the answer")


def test_missing_columns_are_named_once_a_file(tmp_path):
    path = _file(tmp_path, [{"problem": "a", "answer": "1"}] * 3)
    assert _problems(path) == [f"{path}: no column 'question' (columns.prompt); columns found: problem, answer"]


def test_a_missing_nested_column_names_what_is_there(tmp_path):
    path = _file(tmp_path, [{"question": "a", "reward_model": {"style": "rule"}}])
    (problem,) = _problems(path, Columns(answer="reward_model.ground_truth"))
    assert problem == (
        f"{path}, row 1: no column 'reward_model.ground_truth' (columns.answer); columns found: question,"
        " reward_model.style"
    )


def test_what_is_no_parquet_file(tmp_path):
    (tmp_path / "1.parquet").write_text("question,answer\n")
    (tmp_path / "2.parquet").write_bytes(b"")
    good = _file(tmp_path, [{"question": "a", "answer": ""}], "3.parquet")
    problems = _problems(tmp_path / "*.parquet")
    assert len(problems) == 3
    for number, problem in enumerate(problems[:2], start=1):
        assert problem.startswith(f"{tmp_path}/{number}.parquet: no readable Parquet file (")
    assert problems[2].startswith(f"{good}, row 1: the answer")


@pytest.mark.skipif(not BENCHMARKS.is_dir(), reason=f"{BENCHMARKS} is not there")
def test_the_papers_benchmarks():
    source = ParquetPrompts(str(BENCHMARKS / "*.parquet"), NESTED)
    prompts = source.load()
    assert list(source.remarks) == []  # no problem stands in two of them, or twice in one
    assert all(prompt.text and prompt.answer for prompt in prompts)
    sources = [prompt.source for prompt in prompts]
    assert {name: sources.count(name) for name in sources} == {
        "AIME24": 30, "AIME25": 30, "AMC23": 40, "MATH-500": 500, "Minerva": 272, "Olympiad-Bench": 674,
    }  # fmt: skip
