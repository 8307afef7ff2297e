from pathlib import Path

import pytest
import torch

from stapo_lightning.data import ArithmeticPrompts
from stapo_lightning.models import load_tokenizer
from stapo_lightning.warmstart import arithmetic_tokenizer, warm_start
from tests.doubles import TINY


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_the_same_seed_makes_the_same_folder(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        warm_start(str(tmp_path / name), updates=2, batch_size=8, seed=seed)
    a, b, c = (_files(tmp_path / name) for name in "abc")
    assert a == b
    assert a["model.safetensors"] != c["model.safetensors"]


def test_a_users_model_can_be_the_start(tmp_path):
    warm_start(str(tmp_path / "more"), policy=TINY, prompts=ArithmeticPrompts("warmstart", 64), updates=1, batch_size=8)
    assert _files(tmp_path / "more")["tokenizer.json"] == _files(Path(TINY))["tokenizer.json"]
    assert _files(tmp_path / "more")["model.safetensors"] != _files(Path(TINY))["model.safetensors"]


def test_the_shipped_policy_is_small_and_has_its_own_pad_and_end_tokens():
    assert sum(len(content) for content in _files(Path(TINY)).values()) < 5_000_000
    tokenizer = load_tokenizer(TINY)
    assert len({tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id}) == 3
    assert tokenizer.get_vocab() == arithmetic_tokenizer().get_vocab()


@pytest.mark.parametrize("split", ["train", "val"])
def test_the_tokenizer_loses_nothing(split):
    tokenizer = arithmetic_tokenizer()
    for prompt in ArithmeticPrompts(split, 50).load():
        for text in (prompt.text, prompt.solution):
            ids = tokenizer(text)["input_ids"]
            assert tokenizer.unk_token_id not in ids
            assert tokenizer.decode(ids) == text
            assert torch.tensor(ids).max() < len(tokenizer)
