"""Generated tasks, and their own verifiers behind the prompt's metadata."""

import pickle

import pytest

from stapo_lightning.data import ReasoningGymPrompts, Wording
from stapo_lightning.errors import ConfigError
from stapo_lightning.rewards import Completion, ReasoningGym
from stapo_lightning.rewards.reasoning_gym import decode, encode, final_answer
from tests.builders import completions


def _scores(prompt, *texts):
    return ReasoningGym()([Completion(prompt, text, 1, False) for text in texts])


def _problems(**settings):
    with pytest.raises(ConfigError) as raised:
        ReasoningGymPrompts(**settings).load()
    return raised.value.problems


def test_prompts_carry_question_answer_and_words():
    source = ReasoningGymPrompts(
        "chain_sum", 5, settings=["min_terms=2", "max_terms=2"], wording=Wording(suffix=" Go.")
    )
    prompts = source.load()
    assert len(prompts) == 5
    for prompt in prompts:
        left, operator, right = prompt.text.removesuffix(" Go.").split(":")[1].split("=")[0].split()
        assert prompt.answer == str(int(left) + int(right) * {"+": 1, "-": -1}[operator])
        assert prompt.source == "chain_sum"
    assert source.load() == prompts


def test_seeds_that_differ_by_more_than_the_size_share_no_problem():
    found = [{p.text for p in ReasoningGymPrompts("chain_sum", 200, seed=seed).load()} for seed in (0, 10_000)]
    assert len(found[0] & found[1]) <= 1
    shifted = {p.text for p in ReasoningGymPrompts("chain_sum", 200, seed=100).load()}
    assert len(found[0] & shifted) >= 99


def test_repeated_problems_are_dropped_with_a_count():
    settings = ["min_terms=2", "max_terms=2", "min_digits=1", "max_digits=1"]
    source = ReasoningGymPrompts("chain_sum", 500, settings=settings)
    prompts = source.load()
    assert len({prompt.text for prompt in prompts}) == len(prompts) < 500
    assert source.remarks == [f"dropped {500 - len(prompts)} repeated"]


# Plain answers, partial credit, tuples and sets inside the entry, several right answers, answers with braces.
@pytest.mark.parametrize(
    "task",
    [
        "chain_sum",
        "gsm_symbolic",
        "maze",
        "knights_knaves",
        "countdown",
        "spiral_matrix",
        "word_sorting",
        "zebra_puzzles",
    ],
)
def test_gold_answers_are_right_and_others_are_not(task):
    for prompt in ReasoningGymPrompts(task, 5).load():
        again = pickle.loads(pickle.dumps(prompt))
        gold = ReasoningGym().gold(prompt)
        right, wrong, empty = _scores(again, f"So it is {gold}.", "<answer>banana</answer>", "")
        assert right > 0.5, (task, prompt.answer)
        assert wrong < 0.5 and empty < 0.5


def test_a_task_without_a_named_answer_has_no_gold():
    (prompt,) = ReasoningGymPrompts("graph_color", 1).load()
    assert prompt.answer == "" and ReasoningGym().gold(prompt) == ""


def test_an_answer_that_the_verifier_fails_on_is_wrong_and_not_left_out():
    # Its verifier calls int() on every factor.
    (prompt,) = ReasoningGymPrompts("prime_factorization", 1).load()
    right, wrong = _scores(prompt, f"<answer>{prompt.answer}</answer>", "<answer>banana</answer>")
    assert right == 1.0
    assert wrong < 0.5


def test_a_broken_verifier_still_raises():
    (prompt,) = ReasoningGymPrompts("chain_sum", 1).load()
    prompt.metadata = '{"task": "chain_sum", "settings": [], "entry": {"dict": []}}'
    with pytest.raises(KeyError):
        _scores(prompt, "<answer>1</answer>")


def test_what_a_model_writes_is_never_run_as_code(tmp_path):
    witness = tmp_path / "ran"
    code = f"__import__('pathlib').Path({str(witness)!r}).touch()"
    for task in ("countdown", "puzzle24", "spiral_matrix", "n_queens", "binary_matrix", "string_insertion"):
        (prompt,) = ReasoningGymPrompts(task, 1).load()
        (score,) = _scores(prompt, f"<answer>{code}</answer>")
        assert score < 0.5
    assert not witness.exists()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<answer>1</answer> no: <answer> 2 </answer>", "2"),
        (r"<answer>\boxed{3}</answer>", "3"),
        (r"so \boxed{4}", "4"),
        ("just 5 ", "just 5"),
        ("<answer>6", "<answer>6"),
        ("", ""),
    ],
)
def test_the_final_answer(text, expected):
    assert final_answer(text) == expected


def test_entries_survive_json():
    entry = {"a": (1, [2, "3"]), 4: {5, 6}, "n": None, "x": 0.5, "t": True, "inner": {"dict": {}, "tuple": ()}}
    assert decode(encode(entry)) == entry
    assert type(decode(encode(entry))["a"]) is tuple
    with pytest.raises(TypeError, match="complex"):
        encode({"z": 1j})


def test_the_reward_needs_its_source():
    with pytest.raises(ValueError, match="use ReasoningGymPrompts as its source"):
        ReasoningGym()(completions(["1"]))


def test_mistakes_name_what_there_is():
    (task,) = _problems(task="chain_sums", size=3)
    assert "task='chain_sums': reasoning-gym has no such task; did you mean chain_sum" in task
    size, option, shape = _problems(task="chain_sum", size=0, settings=["min_term=2", "max_terms"])
    assert size == "size=0: must be at least 1"
    assert "'min_term=2' is not name=value; the options of chain_sum are min_terms, max_terms" in option
    assert "'max_terms' is not name=value" in shape
    (value,) = _problems(task="chain_sum", size=3, settings=["min_terms=5", "max_terms=2"])
    assert "task='chain_sum' with settings=['min_terms=5', 'max_terms=2']" in value
    (words,) = _problems(task="chain_sum", size=3, wording=Wording(remove_suffix="Remember."))
    assert words.startswith("wording.remove_suffix='Remember.': generated problems carry no instructions to take off")
    (refused,) = _problems(task="simple_integration", size=3)
    assert "evaluates the answer as Python" in refused
