"""Data sets as `datasets` loads them; folders stand in for the hub, which tests do not reach."""

import json

import datasets
import pytest

from stapo_lightning.data import Columns, HFPrompts
from stapo_lightning.errors import ConfigError
from tests.cli import stapo
from tests.doubles import TINY


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    # The loaded files are cached by path and content, in the user's own folder otherwise.
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def _rows(*questions):
    return [{"question": question, "answer": "1"} for question in questions]


def _folder(tmp_path, **splits):
    folder = tmp_path / "data"
    folder.mkdir()
    for split, rows in splits.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


def _texts(source):
    return [prompt.text for prompt in source.load()]


def _problems(*args, **settings):
    with pytest.raises(ConfigError) as raised:
        HFPrompts(*args, **settings).load()
    return raised.value.problems


def test_a_folder_with_a_file_a_split(tmp_path):
    folder = _folder(tmp_path, train=_rows("a", "b", "a"), test=_rows("c"))
    source = HFPrompts(folder, name="mine")
    assert [(p.text, p.answer, p.source) for p in source.load()] == [("a", "1", "mine"), ("b", "1", "mine")]
    assert source.remarks == ["dropped 1 repeated"]
    assert _texts(HFPrompts(folder, split="test")) == ["c"]
    assert _texts(HFPrompts(folder, split="train[:1]")) == ["a"]


def test_a_saved_data_set_of_several_splits(tmp_path):
    saved = datasets.DatasetDict(
        train=datasets.Dataset.from_list(_rows("a", "b")), test=datasets.Dataset.from_list(_rows("c"))
    )
    saved.save_to_disk(tmp_path / "saved")
    folder = str(tmp_path / "saved")
    assert _texts(HFPrompts(folder)) == ["a", "b"]
    assert _texts(HFPrompts(folder, split="test")) == ["c"]
    assert _problems(folder, split="val") == [f"split='val': {folder} holds the splits train, test"]


def test_a_saved_data_set_without_splits(tmp_path):
    datasets.Dataset.from_list(_rows("a", "b")).save_to_disk(tmp_path / "saved")
    assert _texts(HFPrompts(str(tmp_path / "saved"))) == ["a", "b"]


def test_the_nested_layout_keeps_its_order_through_arrow(tmp_path):
    rows = [
        {"prompt": [{"role": "user", "content": f"q{i}"}], "reward_model": {"ground_truth": str(i)}, "other": i}
        for i in range(5)
    ]
    datasets.Dataset.from_list(rows).select([3, 1, 3, 0]).save_to_disk(tmp_path / "saved")
    columns = Columns(prompt="prompt", answer="reward_model.ground_truth")
    prompts = HFPrompts(str(tmp_path / "saved"), columns=columns).load()
    assert [(prompt.text, prompt.answer) for prompt in prompts] == [("q3", "3"), ("q1", "1"), ("q0", "0")]


def test_bad_rows_and_missing_columns_name_data_set_and_split(tmp_path):
    folder = _folder(tmp_path, train=[*_rows("a"), {"question": "b", "answer": None}])
    (problem,) = _problems(folder)
    assert problem.startswith(f"{folder} [train], row 2: the answer (column 'answer', columns.answer) is empty")
    assert _problems(folder, columns=Columns(prompt="problem")) == [
        f"{folder} [train]: no column 'problem' (columns.prompt); columns found: question, answer"
    ]


def test_what_cannot_be_loaded_is_one_problem_with_the_reason(tmp_path):
    folder = _folder(tmp_path, train=_rows("a"))
    (split,) = _problems(folder, split="dev")
    assert f"dataset='{folder}', config_name='', split='dev': cannot be loaded (ValueError: Unknown split" in split
    (config,) = _problems(folder, config_name="main")
    assert "config_name='main'" in config and "cannot be loaded (ValueError: " in config


def test_a_data_set_that_the_machine_cannot_reach(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    done = stapo(
        "fit", "--config", "configs/base.yaml", "--config", "configs/data/gsm8k.yaml", "--model.policy", TINY,
        "--data.max_prompt_tokens=100", "--data.sampling.max_new_tokens=20", f"--trainer.logger.save_dir={tmp_path}",
        "--trainer.accelerator=cpu",
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "2 problems in the configuration" in done.stderr
    for option, split in (("train_prompts", "train"), ("val_prompts", "test")):
        expected = f"data.{option}: dataset='openai/gsm8k', config_name='main', split='{split}': cannot be loaded ("
        assert expected in done.stderr
    assert "expected a hub id that this machine can reach or has cached, or a folder with data files" in done.stderr
