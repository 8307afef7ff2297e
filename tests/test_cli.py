"""What a user types and what comes back."""

import json
import os
import re

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from stapo_lightning.cli import StapoCLI, resume_last, run
from stapo_lightning.data import ArithmeticPrompts
from stapo_lightning.errors import ConfigError, StapoError
from tests.cli import ROOT, parse, stapo

QUICK = "configs/quickstart.yaml"


@pytest.mark.parametrize(
    "flag",
    [
        "--model.eps_hihg=0.3",
        "--model.surrogate.clip_hihg=0.3",
        "--data.sampling.temprature=1",
        "--trainer.max_stepz=3",
    ],
)
def test_a_typo_exits_with_2_and_names_the_key(flag, capfd):
    with pytest.raises(SystemExit) as stopped:
        parse(QUICK, flags=(flag,))
    assert stopped.value.code == 2
    key = flag.split("=")[0].rsplit(".", 1)[1]
    assert key in capfd.readouterr().err


def test_a_typo_inside_a_file_exits_with_2_and_names_the_key(tmp_path, capfd):
    overlay = tmp_path / "typo.yaml"
    overlay.write_text("model: {selector: {class_path: stapo_lightning.objective.S2T, init_args: {tau_q: 0.1}}}")
    with pytest.raises(SystemExit) as stopped:
        parse(QUICK, str(overlay))
    assert stopped.value.code == 2
    assert "tau_q" in capfd.readouterr().err


def test_a_wrong_type_is_refused(capfd):
    with pytest.raises(SystemExit):
        parse(QUICK, flags=("--data.group_size=eight",))
    assert "group_size" in capfd.readouterr().err


def test_interpolation_follows_the_command_line(tmp_path):
    # The trap of parser_mode "omegaconf": each file is resolved alone, and the override would come too late.
    overlay = tmp_path / "linked.yaml"
    overlay.write_text("model: {prompts_per_update: 16}\ndata: {prompts_per_batch: '${model.prompts_per_update}'}")
    config = parse(QUICK, str(overlay), flags=("--model.prompts_per_update=4",))
    assert (config.model.prompts_per_update, config.data.prompts_per_batch) == (4, 4)


def test_callbacks_can_be_appended():
    config = parse(QUICK, flags=("--trainer.callbacks+=lightning.pytorch.callbacks.Timer",))
    paths = [callback.class_path for callback in config.trainer.callbacks]
    assert paths[0] == "lightning.pytorch.callbacks.RichProgressBar"
    assert paths[-1] == "lightning.pytorch.callbacks.Timer"


def test_short_class_names_are_enough():
    config = parse(QUICK, flags=("--model.selector=AllCandidates", "--model.selector.tau_p=0.01"))
    assert config.model.selector.class_path.endswith("AllCandidates")
    assert config.model.selector.init_args.tau_p == 0.01


def test_every_argument_of_ours_is_described():
    printed = stapo("fit", "--help").stdout
    # An option, its metavariable, and what stands right of them or on the next line.
    entries = dict(re.findall(r"^  (--(?:model|data)\.[\w.]+)[^\n]*?(?:\n {20,}|  +)(\S[^\n]*)", printed, re.MULTILINE))
    assert {"--model.policy", "--model.kl_coef", "--data.group_size", "--data.sampling.temperature"} <= set(entries)
    assert len(entries) > 30
    undescribed = [option for option, text in entries.items() if text.startswith("(")]
    assert not undescribed


@pytest.mark.parametrize(
    ("base", "name"),
    [
        ("model.selector", "S2T"),
        ("model.surrogate", "DualClipped"),
        ("data.engine", "HFEngine"),
        ("data.train_prompts", "JsonlPrompts"),
        ("data.train_prompts", "ParquetPrompts"),
        ("data.train_prompts", "HFPrompts"),
        ("data.train_prompts", "ReasoningGymPrompts"),
    ],
)
def test_arguments_of_components_are_described(base, name):
    printed = stapo("fit", f"--{base}.help", name).stdout
    entries = dict(re.findall(r"^  (--[\w.]+)[^\n]*?(?:\n {20,}|  +)(\S[^\n]*)", printed, re.MULTILINE))
    assert any(option.startswith(f"--{base}.") for option in entries), printed
    assert not [option for option, text in entries.items() if text.startswith("(")]


def test_top_level_help_names_the_subcommands():
    printed = stapo("--help").stdout
    for subcommand in ("fit", "validate", "test", "predict", "plan"):
        assert subcommand in printed


def test_all_problems_come_in_one_error_without_a_traceback(tmp_path):
    done = stapo(
        "fit", "--config", QUICK, "--data.group_size=1", "--model.prompts_per_update=5",
        "--model.policy=/no/such/model", f"--trainer.logger.save_dir={tmp_path}",
    )  # fmt: skip
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "3 problems in the configuration" in done.stderr
    for expected in (
        "data.group_size=1: must be at least 2",
        "model.prompts_per_update=5 does not divide data.prompts_per_batch=16",
        "model.policy='/no/such/model': no such folder",
    ):
        assert expected in done.stderr


def test_a_value_out_of_range_names_value_bound_and_option(tmp_path):
    done = stapo("fit", "--config", QUICK, "--model.selector.tau_p=2", "--model.selector.q=-1")
    assert done.returncode == 2
    assert "S2T.tau_p=2.0: must be above 0 and at most 1" in done.stderr
    assert "S2T.q=-1.0: must be at least 0 and at most 1" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_interpolation_that_finds_nothing_is_named():
    done = stapo("fit", "--config", QUICK, "--data.group_size=${data.no_such_size}")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "data.no_such_size" in done.stderr


def test_gradient_clipping_of_the_trainer_is_refused_with_our_option(tmp_path):
    done = stapo("fit", "--config", QUICK, "--trainer.gradient_clip_val=1.0", f"--trainer.logger.save_dir={tmp_path}")
    assert done.returncode == 2
    assert "model.max_grad_norm" in done.stderr


def test_accumulation_of_the_trainer_is_refused_with_our_option(tmp_path):
    done = stapo(
        "fit", "--config", QUICK, "--trainer.accumulate_grad_batches=2", f"--trainer.logger.save_dir={tmp_path}"
    )
    assert done.returncode == 2
    assert "model.tokens_per_micro_batch" in done.stderr


@pytest.mark.parametrize("strategy", ["fsdp", "deepspeed"])
def test_another_way_to_shard_is_refused_with_the_line_to_write(strategy):
    with pytest.raises(ConfigError, match=rf"trainer\.strategy={strategy}.*`trainer\.strategy: fsdp2`"):
        run(["fit", f"--config={ROOT / QUICK}", f"--trainer.strategy={strategy}"])


def _last(config, subcommand="fit"):
    config.ckpt_path = "last"
    resume_last(config, subcommand)
    return config


def _fake_run(root, name, checkpoint=True, config=True):
    run = root / "quickstart" / name
    (run / "checkpoints").mkdir(parents=True)
    if config:
        (run / "config.yaml").write_text("")
    if checkpoint:
        torch.save({"global_step": 7}, run / "checkpoints" / "last.ckpt")
    return run


def test_last_is_the_newest_run(tmp_path):
    _fake_run(tmp_path, "version_2")
    newest = _fake_run(tmp_path, "version_10")
    _fake_run(tmp_path, "version_11", config=False)  # made by `stapo test`, not by a fit
    config = _last(parse(QUICK, flags=(f"--trainer.logger.save_dir={tmp_path}",)))
    assert config.ckpt_path == str(newest / "checkpoints" / "last.ckpt")
    assert config.trainer.logger.init_args.version == "version_10"
    assert config.trainer.logger.init_args.purge_step == 8


def test_last_never_falls_back_to_an_older_run(tmp_path):
    _fake_run(tmp_path, "version_0")
    _fake_run(tmp_path, "version_1", checkpoint=False)
    config = _last(parse(QUICK, flags=(f"--trainer.logger.save_dir={tmp_path}",)))
    assert config.ckpt_path is None
    assert config.trainer.logger.init_args.version == "version_1"
    with pytest.raises(StapoError, match=r"no checkpoint in .*version_1/checkpoints"):
        _last(parse(QUICK, flags=(f"--trainer.logger.save_dir={tmp_path}",)), "test")


def test_last_is_the_newest_file_of_its_run(tmp_path):
    run = _fake_run(tmp_path, "version_0")
    torch.save({"global_step": 9}, run / "checkpoints" / "step=9.ckpt")  # killed before last.ckpt followed
    config = _last(parse(QUICK, flags=(f"--trainer.logger.save_dir={tmp_path}",)))
    assert config.ckpt_path == str(run / "checkpoints" / "step=9.ckpt")
    assert config.trainer.logger.init_args.purge_step == 10


def test_last_finds_the_folder_of_a_sharded_run(tmp_path):
    run = _fake_run(tmp_path, "version_0")
    folder = run / "checkpoints" / "step=9.ckpt"
    folder.mkdir()
    torch.save({"global_step": 9}, folder / "meta.pt")
    config = _last(parse(QUICK, flags=(f"--trainer.logger.save_dir={tmp_path}",)))
    assert config.ckpt_path == str(folder)
    assert config.trainer.logger.init_args.purge_step == 10


def test_last_finds_a_folder_that_a_kill_caught_between_two_renames(tmp_path):
    run = _fake_run(tmp_path, "version_0", checkpoint=False)
    aside = run / "checkpoints" / ".last.ckpt.previous"
    aside.mkdir()
    torch.save({"global_step": 9}, aside / "meta.pt")
    config = _last(parse(QUICK, flags=(f"--trainer.logger.save_dir={tmp_path}",)))
    assert config.ckpt_path == str(run / "checkpoints" / "last.ckpt")
    assert config.trainer.logger.init_args.purge_step == 10


def test_last_without_a_run_says_so(tmp_path):
    with pytest.raises(StapoError, match="no run under"):
        _last(parse(QUICK, flags=(f"--trainer.logger.save_dir={tmp_path}",)))


def test_the_cli_links_nothing():
    # A value written in a config for the target of a link would be ignored in silence.
    assert StapoCLI.add_arguments_to_parser.__code__.co_names == ()


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """A short run of the quickstart through all four subcommands."""
    folder = tmp_path_factory.mktemp("cli")
    small = (
        "--config", QUICK, f"--trainer.logger.save_dir={folder}", "--data.val_prompts.size=8",
        "--data.test_prompts.size=8", "--data.predict_prompts.size=4",
    )  # fmt: skip
    outputs = {"fit": stapo("fit", *small, "--trainer.max_steps=4", "--trainer.val_check_interval=2")}
    for subcommand in ("validate", "test", "predict"):
        outputs[subcommand] = stapo(subcommand, *small, "--ckpt_path=last")
    for name, done in outputs.items():
        assert done.returncode == 0, (name, done.stdout[-2000:], done.stderr[-2000:])
    return folder / "quickstart" / "version_0", {name: done.stdout + done.stderr for name, done in outputs.items()}


def test_fit_prints_sizes_results_and_where_things_lie(fitted):
    run, outputs = fitted
    text = outputs["fit"]
    assert text.count("16 prompts x 8 completions = 128 sequences") == 1
    for expected in (
        "val/arithmetic/sampled/avg@4",
        "before",
        "after",
        "after 4 updates",
        "silenced",
        str(run),
    ):
        assert expected in text, text
    assert f"tensorboard --logdir {run.parent}" in text
    assert "Warning" not in text
    assert "warn" not in text.lower(), text


def test_validate_and_test_print_their_results(fitted):
    run, outputs = fitted
    for subcommand in ("validate", "test"):
        text = outputs[subcommand]
        assert re.search(r"sampled .*\d+\.\d%", text), text
        assert "maj@4" in text
        assert "Test metric" not in text  # Lightning's table would say it all again
    (folder,) = (run / "test").iterdir()
    assert f"results      {folder / 'results.json'}" in outputs["test"]
    assert f"completions  {folder / 'completions.jsonl'}" in outputs["test"]


def test_the_results_are_those_of_the_completions(fitted):
    run, outputs = fitted
    (folder,) = (run / "test").iterdir()
    rows = [json.loads(line) for line in (folder / "completions.jsonl").read_text().splitlines()]
    results = json.loads((folder / "results.json").read_text())
    assert results["update"] == 4
    assert results["checkpoint"].endswith(".ckpt")
    for result in results["results"]:
        mine = [row for row in rows if row["decoding"] == result["decoding"]]
        assert len(mine) == result["problems"] * result["samples"]
        accuracy = result["estimates"][f"avg@{result['samples']}"]
        assert accuracy["value"] == pytest.approx(sum(row["correct"] for row in mine) / len(mine))
        assert accuracy["low"] <= accuracy["value"] <= accuracy["high"]
        assert f"{accuracy['value']:.1%}" in outputs["test"]
        for row in mine:
            assert row["correct"] == (row["answer"] == row["gold"])


def test_predict_writes_jsonl(fitted):
    run, _ = fitted
    rows = [json.loads(line) for line in (run / "predictions.jsonl").read_text().splitlines()]
    assert len(rows) == 4
    assert set(rows[0]) == {
        "source", "prompt_number", "prompt", "answer", "completion", "extracted", "correct", "tokens",
        "truncated",
    }  # fmt: skip
    for row in rows:
        assert row["correct"] == (f"\\boxed{{{row['answer']}}}" in row["completion"])


def test_the_run_folder_holds_the_whole_configuration(fitted):
    run, _ = fitted
    config = parse(str(run / "config.yaml"))
    assert config.model.selector.init_args.tau_p == 0.002
    assert config.trainer.max_steps == 4


def test_the_exported_policy_loads_and_generates_in_transformers(fitted):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run, _ = fitted
    model = AutoModelForCausalLM.from_pretrained(run / "policy" / "latest")
    tokenizer = AutoTokenizer.from_pretrained(run / "policy" / "latest")
    trained = torch.load(run / "checkpoints" / "last.ckpt")["state_dict"]["policy.model.embed_tokens.weight"]
    assert torch.equal(model.get_input_embeddings().weight, trained)
    encoded = tokenizer("From 7: +5, *3.\n", return_tensors="pt")
    generated = model.generate(**encoded, max_new_tokens=40, do_sample=False)
    text = tokenizer.decode(generated[0, encoded["input_ids"].shape[1] :], skip_special_tokens=True)
    assert "Answer \\boxed{" in text
    assert tokenizer.pad_token_id != tokenizer.eos_token_id


def test_tensorboard_holds_every_tag(fitted):
    run, _ = fitted
    events = EventAccumulator(str(run))
    events.Reload()
    expected = {
        "reward/mean", "reward/std", "reward/zero_std_groups", "reward/errors", "reward/timeouts",
        "policy/entropy", "policy/loss", "policy/ppo_kl", "policy/clip_fraction_low", "policy/clip_fraction_high",
        "policy/grad_norm", "policy/lr", "policy/skipped_steps",
        "s2t/silenced_fraction", "s2t/silenced_count", "s2t/candidate_fraction", "s2t/tau_h", "s2t/mean_probability",
        "s2t/mean_entropy", "s2t/grad_share",
        "completion/length_mean", "completion/length_max", "completion/truncated_fraction",
        "rollout/logprob_diff_mean", "rollout/logprob_diff_max", "rollout/tokens_per_second",
        "time/rollout_s", "time/reward_s", "time/score_s", "time/update_s", "time/step_s",
        "val/arithmetic/greedy/avg@1", "val/arithmetic/sampled/avg@4", "val/arithmetic/sampled/pass@4",
    }  # fmt: skip
    assert expected <= set(events.Tags()["scalars"]), expected - set(events.Tags()["scalars"])
    steps = [event.step for event in events.Scalars("val/arithmetic/sampled/avg@4")]
    assert steps[:3] == [0, 2, 4]  # before the first update, then every second rollout
    assert [event.step for event in events.Scalars("reward/mean")] == [1, 2, 3, 4]
    assert any("config" in tag for tag in events.Tags()["tensors"])
    assert any("completions" in tag for tag in events.Tags()["tensors"])


def test_a_second_run_gets_its_own_folder(fitted):
    run, _ = fitted
    folder = run.parents[1]
    done = stapo(
        "fit",
        "--config",
        QUICK,
        f"--trainer.logger.save_dir={folder}",
        "--trainer.max_steps=1",
        "--trainer.limit_val_batches=0",
    )
    assert done.returncode == 0, done.stderr
    assert os.path.exists(run.parent / "version_1" / "config.yaml")


def test_all_that_is_wrong_with_the_files_comes_in_the_same_error(tmp_path):
    train, val = tmp_path / "train.jsonl", tmp_path / "val.jsonl"
    train.write_text(
        '{"question": "From 1: +2.", "answer": "3"}\n{"question": "From\n{"question": " ", "answer": null}\n'
    )
    val.write_text('{"problem": "From 1: +2.", "answer": "3"}\n')
    done = stapo(
        "fit", "--config", QUICK, "--data.train_prompts=JsonlPrompts", f"--data.train_prompts.path={train}",
        "--data.val_prompts=JsonlPrompts", f"--data.val_prompts.path={val}", "--model.prompts_per_update=5",
        "--model.policy=/no/such/model", f"--trainer.logger.save_dir={tmp_path}",
    )  # fmt: skip
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "6 problems in the configuration" in done.stderr
    for expected in (
        f"data.train_prompts: {train}, row 2: not one JSON object (",
        f"data.train_prompts: {train}, row 3: the prompt (column 'question', columns.prompt) is empty",
        f"data.train_prompts: {train}, row 3: the answer (column 'answer', columns.answer) is empty",
        f"data.val_prompts: {val}, row 1: no column 'question' (columns.prompt); columns found: problem, answer",
        "model.policy='/no/such/model': no such folder",
        "model.prompts_per_update=5 does not divide data.prompts_per_batch=16",
    ):
        assert expected in done.stderr


def test_a_jsonl_file_with_its_own_column_names_trains(tmp_path):
    prompts = ArithmeticPrompts("train", 40).load()
    rows = [{"task": {"text": prompt.text}, "gold": int(prompt.answer)} for prompt in prompts]
    path = tmp_path / "train.jsonl"
    path.write_text(
        "".join(json.dumps(row) + "\n" for row in [*rows, rows[0], {"task": {"text": "1" * 50}, "gold": 1}])
    )
    config = tmp_path / "my_data.yaml"
    config.write_text(f"""
data:
  train_prompts:
    class_path: stapo_lightning.data.JsonlPrompts
    init_args:
      path: {path}
      columns: {{prompt: task.text, answer: gold}}
      wording: {{suffix: "\\n"}}
""")
    done = stapo(
        "fit", "--config", QUICK, "--config", str(config), "--config", "configs/debug.yaml",
        "--data.val_prompts.size=8", "--data.reward_workers=1", f"--trainer.logger.save_dir={tmp_path}",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    text = "data.train_prompts: 40 prompts; dropped 1 repeated, dropped 1 longer than data.max_prompt_tokens=32"
    assert done.stdout.count(text) == 1
    assert "held-out results after 4 updates" in done.stdout
    events = EventAccumulator(str(tmp_path / "quickstart" / "version_0"))
    events.Reload()
    # What the policy reads is, with the line break of the suffix, what it has learnt to read: it solves some.
    assert max(event.value for event in events.Scalars("reward/mean")) > 0.1
