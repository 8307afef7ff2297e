"""Repeated, contradicting and broken rows: dropped with a count, or all in one error."""

import pytest

from stapo_lightning.data import Columns, Wording
from stapo_lightning.data.collector import PromptCollector
from stapo_lightning.errors import ConfigError


def _collect(rows, conflicts="error", wording=Wording(), columns=Columns()):
    collector = PromptCollector(columns, wording, "named", conflicts)
    for number, (question, answer) in enumerate(rows, start=1):
        collector.add("file", number, {"question": question, "answer": answer})
    return collector.finish()


def _problems(*args, **kwargs):
    with pytest.raises(ConfigError) as raised:
        _collect(*args, **kwargs)
    return raised.value.problems


def test_repeated_rows_are_dropped_with_a_count():
    prompts, remarks = _collect([("a", "1"), ("b", "2"), (" a\n", "1"), ("a", 1.0), ("b", "2")])
    assert [(prompt.text, prompt.answer) for prompt in prompts] == [("a", "1"), ("b", "2")]
    assert remarks == ["dropped 3 repeated"]


def test_the_same_problem_with_and_without_instructions_is_one():
    wording = Wording(remove_prefix="Solve.", suffix=" Think.")
    prompts, remarks = _collect([("Solve. a", "1"), ("a", "1"), ("b", "2")], wording=wording)
    assert [prompt.text for prompt in prompts] == ["a Think.", "b Think."]
    assert remarks == ["dropped 1 repeated", "1 without the text of wording.remove_prefix"]


def test_contradicting_answers_are_an_error():
    (problem,) = _problems([("a", "1"), ("b", "2"), ("a", "3")])
    assert problem == (
        "file, row 3: asks the same as row 1, but its answer is '3' and not '1'; take one of the two out, or leave out"
        " all such problems with conflicts: drop"
    )


def test_contradicting_answers_can_be_left_out():
    rows = [("a", "1"), ("b", "2"), ("a", "3"), ("a", "1"), ("c", "4"), ("a", "5")]
    prompts, remarks = _collect(rows, conflicts="drop")
    assert [prompt.text for prompt in prompts] == ["b", "c"]
    assert remarks == ["dropped 1 repeated", "dropped 1 with contradicting answers"]


def test_a_contradiction_in_another_file_names_it():
    collector = PromptCollector(Columns(), Wording(), "", "error")
    collector.add("one", 4, {"question": "a", "answer": "1"})
    collector.add("two", 9, {"question": "a", "answer": "2"})
    with pytest.raises(ConfigError, match="two, row 9: asks the same as row 4 of one"):
        collector.finish()


def test_the_name_is_the_source_of_rows_that_name_none():
    collector = PromptCollector(Columns(source="from"), Wording(), "named", "error")
    collector.add("file", 1, {"question": "a", "answer": "1", "from": "AIME"})
    collector.add("file", 2, {"question": "b", "answer": "1", "from": None})
    assert [prompt.source for prompt in collector.finish()[0]] == ["AIME", "named"]


def test_the_same_problem_of_many_rows_is_one_line():
    assert _problems([("a", "1"), *[("b", None)] * 7]) == [
        "file, rows 2, 3, 4, 5, 6 and 2 more: the answer (column 'answer', columns.answer) is empty; fill it in or take"
        " the row out"
    ]
    assert _problems([("b", None)] * 3)[0].startswith("file, rows 1, 2 and 3: ")
    assert _problems([("b", None)])[0].startswith("file, row 1: ")


def test_a_long_list_is_cut_and_counted():
    problems = _problems([("a", [i]) for i in range(30)])
    assert len(problems) == 21
    assert problems[-1] == "and 10 more"


def test_instructions_that_no_prompt_has_are_an_error():
    wording = Wording(remove_prefix="Solve.", remove_suffix="Remember.")
    prefix, suffix = _problems([("Slove. a", "1"), ("b", "2")], wording=wording)
    assert prefix == (
        "wording.remove_prefix='Solve.': none of 2 prompts has it; correct it or leave it out. The first is 'Slove. a'"
    )
    assert suffix.startswith("wording.remove_suffix='Remember.': none of 2 prompts has it")


def test_a_prompt_of_nothing_but_instructions():
    (problem,) = _problems([("Solve. a", "1"), ("Solve.", "2")], wording=Wording(remove_prefix="Solve."))
    assert problem == "file, row 2: the prompt is empty without wording.remove_prefix and remove_suffix"


def test_a_conversation_needs_a_chat_template():
    talk = [{"role": role, "content": "x"} for role in ("user", "assistant", "user")]
    (problem,) = _problems([(talk, "1")])
    assert problem.startswith("file, row 1: the prompt has messages of assistant")
    (prompt,), _ = _collect([(talk, "1")], wording=Wording(chat_template=True))
    assert prompt.messages == (("user", "x"), ("assistant", "x"), ("user", "x"))
