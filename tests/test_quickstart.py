"""The quickstart, whole, on one seed; tests/benchmarks/quickstart_seeds.py runs five and takes the time."""

import re

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from stapo_lightning.data import ArithmeticPrompts
from tests.cli import parse, stapo


@pytest.mark.slow
def test_accuracy_rises_from_about_40_to_at_least_70_percent(tmp_path):
    done = stapo("fit", "--config", "configs/quickstart.yaml", f"--trainer.logger.save_dir={tmp_path}", timeout=900)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    before, after = (
        float(x) for x in re.search(r"val/arithmetic/sampled/avg@4\W+([\d.]+)%\W+([\d.]+)%", done.stdout).groups()
    )
    assert 35 <= before <= 47
    assert after >= 70
    silenced, tokens = (
        float(x.replace(",", "")) for x in re.search(r"silenced +([\d,]+) of ([\d,]+) tokens", done.stdout).groups()
    )
    assert 1e-5 < silenced / tokens < 1e-2

    events = EventAccumulator(str(tmp_path / "quickstart" / "version_0"), size_guidance={"scalars": 0})
    events.Reload()
    values = {
        tag: [event.value for event in events.Scalars(tag)]
        for tag in ("s2t/silenced_count", "policy/entropy", "rollout/logprob_diff_max", "policy/skipped_steps")
    }
    assert sum(values["s2t/silenced_count"]) == silenced  # the terminal and TensorBoard agree
    assert (
        sum(values["s2t/silenced_count"][:50]) > sum(values["s2t/silenced_count"][-50:]) > 0
    )  # the tail is learnt away
    assert 0.1 < values["policy/entropy"][-1] < values["policy/entropy"][0]
    assert max(values["rollout/logprob_diff_max"]) < 1e-4
    assert values["policy/skipped_steps"][-1] == 0


def test_evaluation_problems_are_disjoint_from_training_and_warm_start():
    config = parse("configs/quickstart.yaml").data
    texts = {}
    for name in ("train_prompts", "val_prompts", "test_prompts"):
        texts[name] = {prompt.text for prompt in ArithmeticPrompts(**config[name].init_args).load()}
    texts["warmstart"] = {prompt.text for prompt in ArithmeticPrompts("warmstart", 40000, slips=0.2).load()}
    for held_out in ("val_prompts", "test_prompts"):
        for other in texts.keys() - {held_out}:
            assert not texts[held_out] & texts[other], (held_out, other)
