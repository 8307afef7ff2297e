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


class _AcceptsEverySecond:
    """A second verifier that remembers what it was asked."""

    def __init__(self):
        self._asked = []

    def problems(self):
        return []

    def __call__(self, completions, device):
        self._asked += completions
        return [number % 2 == 0 for number in range(len(completions))]


def test_the_second_verifier_looks_at_what_the_reward_rejected_in_tests_only(tmp_path):
    recheck = _AcceptsEverySecond()
    held_out = ArithmeticPrompts("test", 12)
    data = datamodule(recheck=recheck, test_prompts=held_out, test_folder=str(tmp_path / "test"))
    policy = module()
    trainer(tmp_path, limit_val_batches=1.0).validate(policy, datamodule=data, verbose=False)
    assert not recheck._asked

    trainer(tmp_path).test(policy, datamodule=data, verbose=False)
    (path,) = (tmp_path / "test").glob("*/completions.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rejected = [row for row in rows if not row["rule_correct"]]
    assert 0 < len(rejected) < len(rows) == 12 * (1 + 2)
    assert [row["text"] for row in rejected] == [completion.text for completion in recheck._asked]
    assert all(row["correct"] for row in rows if row["rule_correct"])
    overruled = sum(row["correct"] for row in rejected)
    # Greedy and sampled completions were judged apart: every second of each, rounded up.
    counts = {name: sum(row["decoding"] == name for row in rejected) for name in ("greedy", "sampled")}
    assert overruled == sum((count + 1) // 2 for count in counts.values())
    shares = {name: policy.eval_results[f"test/arithmetic/{name}/rechecked_fraction"] for name in counts}
    assert 12 * shares["greedy"] + 24 * shares["sampled"] == pytest.approx(overruled)
