"""A row becomes a problem, or a sentence that says what it should have been."""

from decimal import Decimal

import pytest

from stapo_lightning.data import Columns
from stapo_lightning.data.columns import read_row

NESTED = Columns(prompt="prompt", answer="reward_model.ground_truth", source="data_source")


def _problem(row, columns=Columns()):
    problem, wrong = read_row(row, columns)
    assert not wrong
    return problem


def _wrong(row, columns=Columns()):
    problem, wrong = read_row(row, columns)
    assert problem is None
    return wrong


def _answer(value, **columns):
    return _problem({"question": "q", "answer": value}, Columns(**columns)).answer


def test_plain_columns():
    problem = _problem({"question": " 1 + 1? \n", "answer": " 2\n", "extra": None})
    assert (problem.messages, problem.answer) == ((("user", "1 + 1?"),), "2")
    assert (problem.source, problem.solution) == ("", "")


def test_the_nested_layout():
    problem = _problem(
        {
            "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " 1 + 1? "}],
            "reward_model": {"ground_truth": "2", "style": "rule"},
            "data_source": "math",
        },
        NESTED,
    )
    assert problem.messages == (("system", "Be brief."), ("user", "1 + 1?"))
    assert (problem.answer, problem.source) == ("2", "math")


def test_a_worked_solution_with_the_answer_behind_a_marker():
    row = {"question": "q", "answer": "#### is the mark.\n48/2 = <<48/2=24>>24\n#### 1,024 "}
    problem = _problem(row, Columns(solution="answer", answer_after="####"))
    assert problem.answer == "1,024"
    assert problem.solution == row["answer"].strip()


def test_messages_as_json_text():
    row = {"question": '[{"role": "user", "content": "1 + 1?"}]', "answer": "2"}
    assert _problem(row).messages == (("user", "1 + 1?"),)


@pytest.mark.parametrize("text", ["[1, 2] has which sum?", "[3, 4]", "[" * 100_000])
def test_a_problem_may_begin_with_a_bracket(text):
    assert _problem({"question": text, "answer": "3"}).messages == (("user", text),)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (18, "18"), (-3, "-3"), (18.0, "18"), (0.5, "0.5"), (1e22, "1" + "0" * 22), (1e-7, "0.0000001"),
        (Decimal("18.50"), "18.5"), (Decimal("120"), "120"), (Decimal("1E+2"), "100"), (10**30, "1" + "0" * 30),
    ],
)  # fmt: skip
def test_numbers_are_written_as_by_hand(value, expected):
    assert _answer(value) == expected


@pytest.mark.parametrize("text", ["18.0", "1e-07", "007", r"\frac{1}{2}", "x = 0"])
def test_text_is_left_as_it_is(text):
    assert _answer(text) == text


def test_dotted_names_reach_into_lists_and_yield_to_a_column_of_that_name():
    assert _answer(["7", "8"], answer="answer.1") == "8"
    assert _problem({"question": "q", "a.b": "1", "a": {"b": "2"}}, Columns(answer="a.b")).answer == "1"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), True, ["18"], {"value": 18}, b"18"])
def test_what_is_no_answer(value):
    (wrong,) = _wrong({"question": "q", "answer": value})
    assert "the answer (column 'answer', columns.answer)" in wrong
    assert "expected text or a finite number" in wrong and type(value).__name__ in wrong


@pytest.mark.parametrize("value", [None, "", " \n"])
def test_an_empty_prompt_and_an_empty_answer_are_both_reported(value):
    prompt, answer = _wrong({"question": value, "answer": value})
    assert prompt == "the prompt (column 'question', columns.prompt) is empty; fill it in or take the row out"
    assert answer == "the answer (column 'answer', columns.answer) is empty; fill it in or take the row out"


def test_an_empty_parent_is_an_empty_answer():
    (wrong,) = _wrong({"prompt": "q", "reward_model": None, "data_source": None}, NESTED)
    assert "columns.answer) is empty" in wrong


@pytest.mark.parametrize("answer", ["no marker", "#### "])
def test_no_answer_behind_the_marker(answer):
    (wrong,) = _wrong({"question": "q", "answer": answer}, Columns(answer_after="####"))
    assert "expected an answer behind '####' (columns.answer_after)" in wrong


def test_missing_columns_are_all_named_with_those_there_are():
    wrong = _wrong({"problem": "q", "reward_model": {"style": "rule"}}, NESTED)
    found = "columns found: problem, reward_model.style"
    assert wrong == [
        f"no column 'prompt' (columns.prompt); {found}",
        f"no column 'reward_model.ground_truth' (columns.answer); {found}",
        f"no column 'data_source' (columns.source); {found}",
    ]


@pytest.mark.parametrize("row", [["q", "a"], "q", 3, None])
def test_a_row_that_is_no_object(row):
    (wrong,) = _wrong(row)
    assert "expected an object" in wrong


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": [{"type": "text", "text": "q"}]}],
        ["q"],
        {"role": "user", "content": "q"},
        7,
    ],
)
def test_what_are_no_messages(messages):
    (wrong,) = _wrong({"question": messages, "answer": "1"})
    assert "expected text or chat messages" in wrong


def test_the_user_has_the_last_word():
    (wrong,) = _wrong(
        {"question": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], "answer": "1"}
    )
    assert "ends with a message of 'assistant'" in wrong


def test_only_the_columns_that_are_named_are_read():
    found = ["prompt", "reward_model", "data_source", "extra_info"]
    assert NESTED.top_level(found) == ["prompt", "reward_model", "data_source"]
    assert NESTED.missing(found) == []
    assert NESTED.missing(["prompt", "extra_info"]) == [
        "no column 'reward_model.ground_truth' (columns.answer); columns found: prompt, extra_info",
        "no column 'data_source' (columns.source); columns found: prompt, extra_info",
    ]
