"""Which tokens were silenced, why, and what was likelier: against the record and the weights of that very update."""

import json
import math
import re
from collections import Counter
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from callbacks.silenced_tokens import SilencedTokens, as_markdown, drawable, frequency_chart
from stapo_lightning.data import ArithmeticPrompts
from stapo_lightning.errors import ConfigError
from stapo_lightning.models import load_causal_lm, load_tokenizer
from stapo_lightning.objective import S2T
from tests.doubles import TINY, Recorder, datamodule, module, parameters, trainer


class Weights(L.Callback):
    """Keeps the weights before each update."""

    def __init__(self):
        self.before = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.before.append({name: value.clone() for name, value in pl_module.policy.state_dict().items()})


def _lines(folder):
    return [json.loads(line) for line in (folder / "silenced_tokens.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One rollout of two updates, with more candidates than the paper's tau_p gives in so small a run."""
    folder = tmp_path_factory.mktemp("silenced")
    recorder, weights = Recorder(), Weights()
    logger = TensorBoardLogger(str(folder), name="run", version=0)
    watched = SilencedTokens(every_n_updates=1, examples=5, context_tokens=6)
    policy = module(selector=S2T(tau_p=0.2))
    fitted = trainer(folder, max_steps=2, logger=logger, callbacks=[watched, recorder, weights])
    fitted.fit(policy, datamodule=datamodule())
    logger.finalize("success")
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    return SimpleNamespace(
        lines=_lines(folder / "run" / "version_0"), batch=recorder.batches[0], record=recorder.records[0],
        metrics=recorder.metrics[0], weights=weights.before, events=events, watched=watched, policy=policy,
    )  # fmt: skip


def _row(run, line):
    return run.batch.uids.tolist().index(line["completion"])


def test_every_silenced_token_has_a_line_with_the_numbers_of_the_record(run):
    assert len(run.lines) == int(run.record.silenced.sum()) > 10
    places = set()
    half = len(run.batch) // 2
    for line in run.lines:
        row, step = _row(run, line), line["position"]
        places.add((row, step))
        assert run.record.silenced[row, step]
        assert line["update"] == (1 if row < half else 2)
        assert line["token_id"] == int(run.batch.completion_ids[row, step])
        assert line["probability"] == pytest.approx(float(run.record.scores.probs[row, step]), rel=1e-5)
        assert line["entropy"] == pytest.approx(float(run.record.scores.entropy[row, step]), rel=1e-6)
        assert line["advantage"] == float(run.batch.advantages[row]) > 0
        assert line["ratio"] == pytest.approx(float(run.record.ratio[row, step]), rel=1e-6)
        assert line["clipped"] == bool(run.record.clipped[row, step])
        # Why: both are below their thresholds.
        assert line["probability"] < line["tau_p"] == 0.2
        assert line["entropy"] < line["tau_h"] == run.record.tau_h[line["update"] - 1]
    assert len(places) == len(run.lines)


def test_context_is_what_stands_before_the_token(run):
    tokenizer = load_tokenizer(TINY)
    for line in run.lines:
        row = _row(run, line)
        prompt = run.batch.prompt_ids[row, : run.batch.prompt_lengths[row]].tolist()
        before = prompt + run.batch.completion_ids[row, : line["position"]].tolist()
        assert line["context"] == tokenizer.decode(before[-6:])
        assert line["token"] == tokenizer.decode([line["token_id"]])


def test_gradient_shares_add_up_to_the_logged_share(run):
    second = [line for line in run.lines if line["update"] == 2]
    assert len(second) == second[0]["silenced_in_update"]
    assert sum(line["gradient_share"] for line in second) == pytest.approx(run.metrics["s2t/grad_share"], rel=1e-5)
    shares = [line["gradient_share"] for line in second]
    assert shares == sorted(shares, reverse=True)


def _distribution(weights, batch, row, step):
    """Softmax of the whole model's own logits, from one sequence."""
    model = load_causal_lm(TINY, "sdpa")
    model.load_state_dict(weights)
    prompt = batch.prompt_ids[row, : batch.prompt_lengths[row]]
    ids = torch.cat([prompt, batch.completion_ids[row, :step]])
    with torch.no_grad():
        return model(input_ids=ids[None]).logits[0, -1].softmax(-1)


def test_likeliest_tokens_are_those_of_the_policy_that_silenced(run):
    for update in (1, 2):
        lines = [line for line in run.lines if line["update"] == update]
        assert sum(line["likeliest"] is not None for line in lines) == 5
        moved = []
        for line in lines[:5]:  # those of the largest gradient
            row, step = _row(run, line), line["position"]
            probs = _distribution(run.weights[update - 1], run.batch, row, step)
            top = probs.topk(5)
            assert [entry["token_id"] for entry in line["likeliest"]] == top.indices.tolist()
            assert [entry["probability"] for entry in line["likeliest"]] == pytest.approx(top.values.tolist(), rel=1e-4)
            # The same distribution gave probability and entropy of the record.
            assert line["probability"] == pytest.approx(float(probs[line["token_id"]]), rel=1e-4)
            assert line["entropy"] == pytest.approx(float(-(probs * probs.log()).sum()), rel=1e-4)
            other = _distribution(run.weights[2 - update], run.batch, row, step)
            moved.append(float((other - probs).abs().max()))
        assert max(moved) > 1e-3  # the weights of the other update would have shown something else


def test_tensorboard_has_the_examples_and_the_chart(run):
    texts = run.events.Tensors("silenced_tokens/text_summary")
    assert [event.step for event in texts] == [1, 2]
    shown = texts[1].tensor_proto.string_val[0].decode()
    lines = [line for line in run.lines if line["update"] == 2]
    assert f"update 2: {len(lines)} silenced** by S2T with tau_p = 0.2, tau_h = {lines[0]['tau_h']:.4g}" in shown
    assert shown.count("likeliest:") == 5
    assert f"advantage {lines[0]['advantage']:+.2f}" in shown
    assert [event.step for event in run.events.Images("silenced_tokens/frequency")] == [2]


def test_frequencies_are_those_of_the_record(run):
    silenced = Counter(run.batch.completion_ids[run.record.silenced].tolist())
    surviving = Counter(run.batch.completion_ids[run.record.candidates & ~run.record.silenced].tolist())
    assert run.watched.frequency == {"silenced": silenced, "surviving": surviving}
    restored = SilencedTokens()
    restored.load_state_dict(run.watched.state_dict())
    assert restored.frequency == run.watched.frequency


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_training_is_the_same_without_it(precision, tmp_path):
    found = []
    for callbacks in ([], [SilencedTokens(every_n_updates=1)]):
        policy = module(selector=S2T(tau_p=0.2), prompts_per_update=2)
        data = datamodule(prompts_per_batch=4, train_prompts=ArithmeticPrompts("train", 8))
        trainer(tmp_path, max_steps=4, precision=precision, callbacks=callbacks).fit(policy, datamodule=data)
        found.append(parameters(policy.policy))
        assert policy.selection_observers == []
        assert policy.policy.training
    assert torch.equal(*found)


def test_a_resumed_run_has_each_line_once(tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"

    def fit(folder, steps, checkpoint=None):
        run = trainer(folder, max_steps=steps, callbacks=[watched := SilencedTokens(every_n_updates=2)])
        run.fit(module(selector=S2T(tau_p=0.2)), datamodule=datamodule(), ckpt_path=checkpoint)
        return run, watched

    _, uninterrupted = fit(whole, 4)
    first, _ = fit(cut, 2)
    first.save_checkpoint(cut / "two.ckpt")
    with (cut / "silenced_tokens.jsonl").open("a") as file:  # what a run wrote after its checkpoint until it was killed
        file.write('{"update": 3, "token": "x"}\n{"upda')
    _, resumed = fit(cut, 4, cut / "two.ckpt")
    assert _lines(cut) == _lines(whole)
    assert {line["update"] for line in _lines(cut)} == {1, 2, 3, 4}
    assert resumed.frequency == uninterrupted.frequency


def test_of_many_the_largest_gradients_are_kept(tmp_path, run):
    kept = SilencedTokens(every_n_updates=0, lines_per_update=3)
    trainer(tmp_path, max_steps=2, callbacks=[kept]).fit(module(selector=S2T(tau_p=0.2)), datamodule=datamodule())
    lines = _lines(tmp_path)
    expected = [line for update in (1, 2) for line in [x for x in run.lines if x["update"] == update][:3]]
    assert [(x["completion"], x["position"]) for x in lines] == [(x["completion"], x["position"]) for x in expected]
    assert [x["silenced_in_update"] for x in lines] == [x["silenced_in_update"] for x in expected]
    assert all(line["likeliest"] is None for line in lines)


def test_nothing_the_policy_wrote_acts_as_markup():
    hostile = "</code><script>alert(1)</script> *x* `y`"
    entry = {
        "update": 7, "context": hostile, "token": hostile, "probability": 0.0005, "entropy": 0.25, "advantage": 0.935,
        "gradient_share": 0.012, "silenced_in_update": 3, "tau_p": None, "tau_h": None,
        "likeliest": [{"token": hostile, "probability": 0.855}],
    }  # fmt: skip
    text = as_markdown([entry], "Random")
    outside, codes = re.subn(r"<code>[^<`*]*</code>", "", text)
    assert codes == 3
    assert "script" in text and "script" not in outside and "<" not in outside and "`" not in outside
    assert text.startswith("**update 7: 3 silenced** by Random;")
    assert "probability 0.05 %, entropy 0.25, advantage +0.94; 1.2 % of the update's squared gradient norm" in text
    assert text.endswith("</code> 85.5 %")


def test_chart():
    tokenizer = load_tokenizer(TINY)
    frequency = {"silenced": Counter({20: 6, 9: 2, 26: 2}), "surviving": Counter({40: 1})}
    left, right = frequency_chart(frequency, tokenizer, bars=2, update=9).axes
    # 6 and 2 of 10; the tie goes to the smaller id, 9 "So ".
    assert [bar.get_width() for bar in left.patches] == [0.6, 0.2]
    assert [label.get_text() for label in left.get_yticklabels()] == ["5", "So␣"]
    assert left.get_title() == "silenced: 10"
    assert [label.get_text() for label in right.get_yticklabels()] == ["␣"]


def test_labels_are_drawn_whatever_they_hold(recwarn):
    class Odd:
        def batch_decode(self, lines, **_):
            return ["".join(("$\\frac{", "中", "a" * 40)[i] for i in line) for line in lines]

    figure = frequency_chart({"silenced": Counter({0: 1, 1: 1, 2: 1}), "surviving": Counter()}, Odd(), 3, 1)
    figure.canvas.draw()
    assert not recwarn.list
    assert drawable("中") == "\\u4e2d"
    assert drawable("a" * 40) == "a" * 17 + "…"


def test_all_wrong_arguments_come_in_one_error(tmp_path):
    wrong = SilencedTokens(every_n_updates=-1, examples=0, context_tokens=0, lines_per_update=0, bars=0)
    with pytest.raises(ConfigError) as error:
        trainer(tmp_path, callbacks=[wrong]).fit(module(), datamodule=datamodule())
    for name in ("every_n_updates=-1", "examples=0", "context_tokens=0", "lines_per_update=0", "bars=0"):
        assert f"SilencedTokens.{name}: must be at least" in str(error.value)


def test_nothing_silenced_writes_nothing(tmp_path):
    policy = module(selector=S2T(tau_p=1e-30))
    trainer(tmp_path, callbacks=[SilencedTokens(every_n_updates=1)]).fit(policy, datamodule=datamodule())
    assert _lines(tmp_path) == []
    assert math.isfinite(float(parameters(policy.policy).sum()))
