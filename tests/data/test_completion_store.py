"""Completions of finished problems on disk."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from stapo_lightning.batch import EvalCompletion, Prompt
from stapo_lightning.data import Decoding
from stapo_lightning.data.completion_store import CompletionStore, described
from stapo_lightning.rewards import BoxedMatch, FunctionReward
from stapo_lightning.rollout import Sampling

PROMPT = Prompt(text="1 + 1 =", answer="2", source="sums")
DECODING = Decoding("sampled", 2, Sampling(temperature=0.7))
COMPLETIONS = [
    EvalCompletion("so \\boxed{2}", "2", True, True, 4, False),
    EvalCompletion("no idea", None, True, False, 3, True),
]


def _store(root: Path, weights: str = "abc", terms: str = "seed 1", rank: int = 0) -> CompletionStore:
    return CompletionStore(root, ("policy", weights), terms, rank)


def test_what_was_added_is_found_now_and_later(tmp_path):
    store = _store(tmp_path)
    key = store.key(PROMPT, DECODING, 2)
    assert store.find(key, 2) is None
    store.add(key, "sampled", 7, PROMPT, COMPLETIONS)
    assert store.find(key, 2) == COMPLETIONS
    assert _store(tmp_path).find(key, 2) == COMPLETIONS


def test_a_line_says_what_a_reader_wants_to_know(tmp_path):
    store = _store(tmp_path)
    store.add("0123456789abcdef", "sampled", 7, PROMPT, COMPLETIONS)
    lines = [json.loads(line) for line in (store.folder / "completions.jsonl").read_text().splitlines()]
    assert lines[1] == {
        "key": "0123456789abcdef", "benchmark": "sums", "decoding": "sampled", "problem": 7, "prompt": "1 + 1 =",
        "gold": "2", "sample": 1, "text": "no idea", "answer": None, "correct": True, "rule_correct": False,
        "tokens": 3, "truncated": True,
    }  # fmt: skip


@pytest.mark.parametrize("cut", [1, 30, 200])
def test_a_problem_that_a_kill_cut_is_not_found_and_can_be_added_again(tmp_path, cut):
    other = replace(PROMPT, text="2 + 2 =")
    store = _store(tmp_path)
    keys = [store.key(prompt, DECODING, 2) for prompt in (PROMPT, other)]
    store.add(keys[0], "sampled", 0, PROMPT, COMPLETIONS)
    store.add(keys[1], "sampled", 1, other, COMPLETIONS)
    path = store.folder / "completions.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])

    again = _store(tmp_path)
    assert again.find(keys[0], 2) == COMPLETIONS
    assert again.find(keys[1], 2) is None
    again.add(keys[1], "sampled", 1, other, COMPLETIONS)
    assert _store(tmp_path).find(keys[1], 2) == COMPLETIONS
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_every_rank_writes_its_own_file_and_reads_all(tmp_path):
    stores = [_store(tmp_path, rank=rank) for rank in (0, 1)]
    keys = [stores[0].key(replace(PROMPT, text=str(rank)), DECODING, 2) for rank in (0, 1)]
    for rank in (0, 1):
        stores[rank].add(keys[rank], "sampled", rank, PROMPT, COMPLETIONS)
    alone = _store(tmp_path)
    assert [alone.find(key, 2) for key in keys] == [COMPLETIONS, COMPLETIONS]
    assert {path.name for path in alone.folder.iterdir()} == {"completions.jsonl", "completions.rank1.jsonl"}


def test_other_weights_go_to_another_folder(tmp_path):
    assert _store(tmp_path, weights="abc").folder != _store(tmp_path, weights="abd").folder
    assert _store(tmp_path, weights="abc").folder == _store(tmp_path, weights="abc", terms="seed 2").folder


@pytest.mark.parametrize(
    ("prompt", "decoding", "samples", "terms"),
    [
        (replace(PROMPT, text="1 + 1 ="), DECODING, 2, "seed 2"),
        (replace(PROMPT, answer="3"), DECODING, 2, "seed 1"),
        (replace(PROMPT, source="other"), DECODING, 2, "seed 1"),
        (PROMPT, replace(DECODING, sampling=Sampling(temperature=0.8)), 2, "seed 1"),
        (PROMPT, replace(DECODING, sampling=Sampling(temperature=0.7, max_new_tokens=7)), 2, "seed 1"),
        (PROMPT, DECODING, 4, "seed 1"),
    ],
)
def test_the_key_differs_wherever_completions_or_verdicts_could(tmp_path, prompt, decoding, samples, terms):
    before = _store(tmp_path).key(PROMPT, DECODING, 2)
    assert _store(tmp_path, terms=terms).key(prompt, decoding, samples) != before


def test_text_that_has_no_encoding_survives(tmp_path):
    store = _store(tmp_path)
    strange = [EvalCompletion("a\udc80b\x00\n\u2028", "\udc80", False, False, 1, False)]
    store.add("0" * 16, "d", 0, PROMPT, strange)
    assert _store(tmp_path).find("0" * 16, 1) == strange


def ends_in_two(text: str, answer: str) -> float:
    return float(text.endswith("2"))


def ends_in_three(text: str, answer: str) -> float:
    return float(text.endswith("3"))


class _WithLimit(BoxedMatch):
    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._calls = 0


def test_functions_are_told_apart():
    assert described(FunctionReward(ends_in_two)) != described(FunctionReward(ends_in_three))
    assert described(FunctionReward(ends_in_two)) == described(FunctionReward(ends_in_two))


def test_described_goes_down_to_public_values():
    assert described(_WithLimit(3)) == described(_WithLimit(3))
    assert described(_WithLimit(3)) != described(_WithLimit(4))
    assert described([_WithLimit(3), 1.5, None]).endswith("(limit=3), 1.5, None]")
    counted = _WithLimit(3)
    counted._calls = 9
    assert described(counted) == described(_WithLimit(3))
