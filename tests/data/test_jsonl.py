"""JSON Lines as they are found: with byte order marks, Windows line ends, broken lines."""

import json

import pytest

from stapo_lightning.data import Columns, JsonlPrompts
from stapo_lightning.errors import ConfigError
from tests.builders import SHARED

GSM8K = SHARED / "data" / "gsm8k"


def _file(folder, *lines, name="a.jsonl"):
    path = folder / name
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines))
    return str(path)


def _row(question, answer="1"):
    return json.dumps({"question": question, "answer": answer})


def _problems(path, **settings):
    with pytest.raises(ConfigError) as raised:
        JsonlPrompts(str(path), **settings).load()
    return raised.value.problems


def test_rows_keep_their_order(tmp_path):
    prompts = JsonlPrompts(_file(tmp_path, _row("b", 2), _row("a", "1"), ""), name="mine").load()
    assert [(p.text, p.answer, p.source, p.messages) for p in prompts] == [
        ("b", "2", "mine", ()),
        ("a", "1", "mine", ()),
    ]


def test_byte_order_mark_windows_line_ends_and_blank_lines(tmp_path):
    source = JsonlPrompts(
        _file(tmp_path, b"\xef\xbb\xbf" + _row("a").encode() + b"\r", b"  \r", b"\t", _row("é") + "\r")
    )
    assert [prompt.text for prompt in source.load()] == ["a", "é"]
    assert list(source.remarks) == []


def test_separators_of_unicode_do_not_end_a_line(tmp_path):
    row = json.dumps({"question": "one\u2028two\x85three", "answer": "1"}, ensure_ascii=False)
    (prompt,) = JsonlPrompts(_file(tmp_path, row)).load()
    assert prompt.text == "one\u2028two\x85three"


def test_a_pattern_reads_its_files_in_order_and_drops_repeats_across_them(tmp_path):
    _file(tmp_path, _row("c"), _row("a"), name="2.jsonl")
    _file(tmp_path, _row("a"), _row("b"), name="1.jsonl")
    source = JsonlPrompts(str(tmp_path / "*.jsonl"))
    assert [prompt.text for prompt in source.load()] == ["a", "b", "c"]
    assert source.remarks == ["dropped 1 repeated"]


def test_all_problems_of_all_files_come_in_one_error(tmp_path):
    lines = [_row("a"), '{"question": "b", "ans', "", '["c", "1"]', _row("d", ""), '{"question": "e"}']
    first = _file(tmp_path, *lines, name="1.jsonl")
    second = _file(tmp_path, b"\xff\xfe{}", _row("a", "2"), name="2.jsonl")
    problems = _problems(tmp_path / "*.jsonl")
    assert len(problems) == 6
    expected = [
        (f"{first}, row 2: not one JSON object (", '\'{"question": "b", "ans\'; mend the line'),
        (f"{first}, row 4: holds list ['c', '1']; expected an object", ""),
        (f"{first}, row 5: the answer (column 'answer', columns.answer) is empty", ""),
        (f"{first}, row 6: no column 'answer' (columns.answer); columns found: question", ""),
        (f"{second}, row 1: not one JSON object ('utf-8' codec can't decode", ""),
        (f"{second}, row 2: asks the same as row 1 of {first}, but its answer is '2' and not '1'", ""),
    ]
    for problem, (start, end) in zip(problems, expected, strict=True):
        assert problem.startswith(start) and problem.endswith(end)


def test_half_a_surrogate_pair_is_a_broken_line(tmp_path):
    (problem,) = _problems(
        _file(tmp_path, r'{"question": "\ud83d\ude00", "answer": "1"}', r'{"question": "\ud83d", "answer": "1"}')
    )
    assert ", row 2: not one JSON object (" in problem and "surrogates not allowed" in problem


@pytest.mark.parametrize("text", ["[" * 100_000, '{"question": "a", "answer": ' + "9" * 5000 + "}", "{} {}"])
def test_hostile_lines_are_broken_lines(tmp_path, text):
    (problem,) = _problems(_file(tmp_path, text))
    assert ", row 1: not one JSON object (" in problem and problem.endswith("mend the line")


def test_a_number_that_is_none(tmp_path):
    (problem,) = _problems(_file(tmp_path, '{"question": "a", "answer": NaN}'))
    assert "is float nan; expected text or a finite number" in problem


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("absent.jsonl", "no such file"),
        ("*.json", "no file matches this pattern"),
        ("", "is a folder; expected a file or a pattern"),
    ],
)
def test_paths_that_name_no_file(tmp_path, name, expected):
    (problem,) = _problems(f"{tmp_path}/{name}")
    assert problem.startswith(f"path='{tmp_path}/{name}': ") and expected in problem


def test_a_file_that_cannot_be_read_does_not_hide_the_others(tmp_path):
    _file(tmp_path, _row("a", ""), name="2.jsonl")
    # Opening one's own memory file works and reading its start does not, for the superuser too.
    (tmp_path / "1.jsonl").symlink_to("/proc/self/mem")
    if not (tmp_path / "1.jsonl").is_file():
        pytest.skip("this system has no /proc/self/mem")
    problems = _problems(tmp_path / "*.jsonl")
    assert len(problems) == 2
    assert problems[0].startswith(f"{tmp_path}/1.jsonl: cannot be read (")
    assert "columns.answer) is empty" in problems[1]


def test_an_empty_file_has_no_prompts(tmp_path):
    assert JsonlPrompts(_file(tmp_path, "")).load() == []


@pytest.mark.skipif(not GSM8K.is_dir(), reason=f"{GSM8K} is not there")
@pytest.mark.parametrize(("split", "count"), [("train", 7473), ("test", 1319)])
def test_gsm8k(split, count):
    source = JsonlPrompts(str(GSM8K / f"{split}.jsonl"), Columns(answer_after="####", solution="answer"), name="gsm8k")
    prompts = source.load()
    assert len(prompts) == count and list(source.remarks) == []
    assert all(float(prompt.answer.replace(",", "")).is_integer() for prompt in prompts)
    assert prompts[0].answer == {"train": "72", "test": "18"}[split]
    assert prompts[0].solution.endswith(f"#### {prompts[0].answer}")
