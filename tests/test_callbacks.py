"""What callbacks write, on small honest inputs."""

import html
import re

import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from callbacks import CompletionLogger, ExportHF, RunSummary
from stapo_lightning.batch import Prompt
from stapo_lightning.errors import ConfigError
from tests.doubles import datamodule, module, trainer

HOSTILE = "<script>alert(1)</script> 2*3=6, 2*1=2 | `x` _y_ \\boxed{6}\n# head &amp; [a](b)"


@pytest.fixture
def logged(tmp_path):
    """The text that CompletionLogger wrote for a completion that is hostile to Markdown, HTML and tables."""

    class Hostile(CompletionLogger):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            batch.texts[1] = HOSTILE
            batch.prompts[0] = Prompt("From <b>1</b>: *1.\n", "1")
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    logger = TensorBoardLogger(str(tmp_path), name="run", version=0)
    run = trainer(
        tmp_path, max_steps=2, logger=logger, callbacks=[Hostile(every_n_rollouts=1, prompts=1, completions=2)]
    )
    run.fit(module(), datamodule=datamodule())
    logger.finalize("success")
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    (event,) = events.Tensors("completions/text_summary")
    return event.tensor_proto.string_val[0].decode()


def test_completions_are_shown_as_they_are(logged):
    cells = [html.unescape(cell) for cell in re.findall(r"<code>(.*?)</code>", logged)]
    assert cells[0] == "From <b>1</b>: *1. ↵ "
    assert cells[1] == "1"  # the gold answer
    assert HOSTILE.replace("\n", " ↵ ") in cells


def test_nothing_the_policy_wrote_acts_as_markup(logged):
    inside = "".join(re.findall(r"<code>(.*?)</code>", logged))
    for sign in "<>|*_`[]\\#\n":
        assert sign not in inside.replace("&#", ""), sign
    row = re.compile(r"\* \*\*reward \d\.00\*\*, advantage [+-]\d\.\d\d, \d+ tokens: <code>[^<]*</code>")
    assert len([line for line in logged.splitlines() if row.fullmatch(line)]) == 2


def test_long_completions_are_cut():
    assert CompletionLogger(max_chars=3)._code("abcdef") == "<code>abc &#46;&#46;&#46;</code>"


def test_the_summary_keeps_what_it_saw_over_a_resume():
    before = RunSummary()
    before.before, before.after, before.update, before.silenced, before.tokens = (
        {"val/a@1": 0.4},
        {"val/a@1": 0.8},
        7,
        3.0,
        90.0,
    )
    before.log = torch.nn.Module()  # as Lightning does; no checkpoint could hold it
    after = RunSummary()
    after.load_state_dict(before.state_dict())
    assert (after.before, after.after, after.update, after.silenced, after.tokens) == (
        {"val/a@1": 0.4}, {"val/a@1": 0.8}, 7, 3.0, 90.0,
    )  # fmt: skip
    assert not hasattr(after, "log")


def test_the_summary_prints_before_and_after(tmp_path, capsys):
    summary = RunSummary()
    run = trainer(
        tmp_path, max_steps=2, limit_val_batches=1.0, num_sanity_val_steps=-1, val_check_interval=1, callbacks=[summary]
    )
    policy = module()
    run.fit(policy, datamodule=datamodule())
    printed = capsys.readouterr().out
    assert summary.after == policy.eval_results
    row = re.search(r"val/arithmetic/sampled/avg@2\W+([\d.]+)%\W+([\d.]+)%", printed)
    assert float(row[1]) == pytest.approx(100 * summary.before["val/arithmetic/sampled/avg@2"], abs=0.05)
    assert float(row[2]) == pytest.approx(100 * summary.after["val/arithmetic/sampled/avg@2"], abs=0.05)
    assert "held-out results after 2 updates" in printed
    assert f"run          {tmp_path}" in printed


def test_the_summary_names_the_exported_policy(tmp_path, capsys):
    run = trainer(tmp_path, callbacks=[ExportHF(folder="exported"), RunSummary()])
    run.fit(module(), datamodule=datamodule())
    printed = capsys.readouterr().out
    assert f"policy       {tmp_path / 'exported' / 'latest'}" in printed
    assert "best" not in printed


def test_options_of_the_completion_logger_are_checked(tmp_path):
    run = trainer(tmp_path, callbacks=[CompletionLogger(every_n_rollouts=0, max_chars=-1)])
    with pytest.raises(ConfigError, match=r"(?s)2 problems.*every_n_rollouts=0: must be at least 1.*max_chars=-1"):
        run.fit(module(), datamodule=datamodule())


def test_without_a_validation_ahead_of_the_first_update_there_is_no_before(tmp_path, capsys):
    run = trainer(tmp_path, max_steps=2, limit_val_batches=1.0, val_check_interval=1, callbacks=[RunSummary()])
    run.fit(module(), datamodule=datamodule())
    printed = capsys.readouterr().out
    assert re.search(r"val/arithmetic/sampled/avg@2\W+[\d.]+%\W+\n", printed)
    assert "before" not in printed
