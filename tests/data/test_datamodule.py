"""From the sources to what a run trains on: limits, counts, and every problem in one error."""

import json

import pytest

from stapo_lightning.data import ArithmeticPrompts, Columns, JsonlPrompts, ParquetPrompts, Wording
from stapo_lightning.errors import ConfigError
from stapo_lightning.rewards import BoxedMatch
from tests.doubles import Recorder, datamodule, module, trainer

SHORT = [f"From {i}: +2.\n" for i in range(4)]
LONG = [f"From {i}: {', '.join(['+2'] * 15)}.\n" for i in range(2)]  # 32 tokens are allowed, three an addition


@pytest.fixture
def source(tmp_path):
    """Six prompts, two of them long."""

    def make(texts=(*SHORT, *LONG), **settings):
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join(json.dumps({"question": text, "answer": "1"}) + "\n" for text in texts))
        return JsonlPrompts(str(path), wording=Wording(suffix="\n"), **settings)

    return make


def _problems(tmp_path, **changes):
    with pytest.raises(ConfigError) as raised:
        trainer(tmp_path).fit(module(), datamodule=datamodule(**changes))
    return raised.value.problems


def test_long_prompts_are_dropped_with_a_count(source, tmp_path, capsys):
    data = datamodule(train_prompts=source())
    trainer(tmp_path).fit(module(), datamodule=data)
    printed = capsys.readouterr().out
    assert printed.count("data.train_prompts: 4 prompts; dropped 2 longer than data.max_prompt_tokens=32\n") == 1
    assert printed.count("data.val_prompts: 12 prompts\n") == 1
    assert [prompt.text for prompt in data.loaded["fit"].prompts] == SHORT
    assert all(len(ids) <= 32 for ids in data.loaded["fit"].token_ids)


def test_long_prompts_can_stop_the_run(source, tmp_path):
    (problem,) = _problems(tmp_path, train_prompts=source(), long_prompts="error")
    assert problem.startswith(
        "data.train_prompts: 2 of 6 prompts are longer than data.max_prompt_tokens=32, the longest has "
    )
    assert f"the first is {LONG[0][:60]!r}" in problem


def test_nothing_but_long_prompts_stops_the_run(source, tmp_path):
    (problem,) = _problems(tmp_path, train_prompts=source(LONG))
    assert problem.startswith("data.train_prompts: 2 of 2 prompts are longer than data.max_prompt_tokens=32")


def test_an_empty_file_stops_the_run(source, tmp_path):
    assert _problems(tmp_path, train_prompts=source([])) == ["data.train_prompts: the source holds no prompt"]


def test_no_source_at_all(tmp_path):
    assert _problems(tmp_path, train_prompts=None) == ["data.train_prompts is not set: `stapo fit` has no prompts"]
    with pytest.raises(ConfigError, match=r"data\.predict_prompts is not set: `stapo predict` has no prompts"):
        trainer(tmp_path).predict(module(), datamodule=datamodule())


def test_sources_are_read_where_the_policy_is_missing_too(source, tmp_path):
    data = datamodule(
        train_prompts=source(columns=Columns(prompt="problem")),
        val_prompts=ParquetPrompts(f"{tmp_path}/absent.parquet"),
    )
    with pytest.raises(ConfigError) as raised:
        trainer(tmp_path).fit(module(policy="/no/such/model"), datamodule=data)
    policy, train, val = sorted(raised.value.problems, key=lambda problem: problem.startswith("data"))
    assert policy.startswith("model.policy='/no/such/model'")
    assert train.startswith("data.train_prompts: ") and "no column 'problem'" in train
    assert val.startswith("data.val_prompts: path=") and "no such file" in val


def test_a_chat_template_that_the_policy_has_not(source, tmp_path):
    train = source()
    train.wording = Wording(chat_template=True)
    (problem,) = _problems(tmp_path, train_prompts=train)
    assert problem.startswith("data.train_prompts: wording.chat_template=true, but the policy's tokenizer has no chat")


def test_a_chat_template_reaches_the_policy_and_the_reward(source, tmp_path):
    policy = module()
    policy.tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    train = source([text.strip() for text in SHORT])
    train.wording = Wording(chat_template=True)
    data = datamodule(train_prompts=train, val_prompts=ArithmeticPrompts("val", 4))
    trainer(tmp_path).fit(policy, datamodule=data)
    assert [prompt.text for prompt in data.loaded["fit"].prompts] == SHORT
    assert data.loaded["fit"].token_ids[0] == policy.tokenizer(SHORT[0])["input_ids"]


class _Nothing(BoxedMatch):
    """Right or wrong, no reward: a shaped reward that never comes above 0.5."""

    def __call__(self, completions):
        return [0.0 for _ in completions]


@pytest.mark.parametrize("workers", [0, 1])
def test_held_out_completions_are_judged_by_the_eval_reward(workers, tmp_path):
    data = datamodule(reward=_Nothing(), eval_reward=BoxedMatch(), reward_workers=workers, gold_check=0)
    recorder = Recorder()
    policy = module()
    run = trainer(tmp_path, limit_val_batches=1.0, val_check_interval=1, callbacks=[recorder])
    run.fit(policy, datamodule=data)
    assert recorder.batches[0].rewards.tolist() == [0.0] * 32
    assert policy.eval_results["val/arithmetic/greedy/avg@1"] > 0.7


def test_the_gold_answers_of_held_out_prompts_are_scored_by_the_eval_reward(tmp_path):
    data = datamodule(reward=BoxedMatch(), eval_reward=_Nothing(), gold_check=8)
    with pytest.raises(ConfigError) as raised:
        trainer(tmp_path).fit(module(), datamodule=data)
    (problem,) = raised.value.problems
    assert problem.startswith("data.val_prompts: reward tests.data.test_datamodule._Nothing finds only 0 of 8")
