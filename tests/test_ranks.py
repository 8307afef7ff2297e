"""One global denominator and one global quantile: the number of ranks does not change the update."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.doubles import TINY
from tests.ranks_worker import METHODS

SHARED = ("ddp", "fsdp2")
ROOT = Path(__file__).parents[1]


def _weights(folder: Path) -> torch.Tensor:
    return torch.cat([value.flatten() for _, value in sorted(load_file(folder / "model.safetensors").items())])


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Every method after four updates, by strategy: on 1 process ("auto"), and on 2 (gloo) with DDP and with FSDP2."""
    folder = tmp_path_factory.mktemp("ranks")
    for ranks, strategies in ((1, ["auto"]), (2, list(SHARED))):
        worker = [sys.executable, "-m", "tests.ranks_worker", str(ranks), str(folder), *strategies]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(worker, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder


def _scalars(folder: Path) -> dict[str, list[float]]:
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    kept = [tag for tag in events.Tags()["scalars"] if not tag.startswith("time/") and "per_second" not in tag]
    return {tag: [event.value for event in events.Scalars(tag)] for tag in kept}


@pytest.mark.parametrize("strategy", SHARED)
@pytest.mark.parametrize("method", METHODS)
def test_two_ranks_measure_what_one_measures(runs, method, strategy):
    one, two = (_scalars(runs / name / method) for name in ("auto", strategy))
    if strategy == "fsdp2":  # which QuadrantGradients refuses
        one = {tag: values for tag, values in one.items() if not tag.startswith("gradients/")}
    elif method == "random_mask":
        assert len(one["gradients/low_prob_low_entropy/share"]) == 4
    assert one.keys() == two.keys()
    assert ("quadrants/tau_h" in one) == ("entropy_profile/quantile_0.5" in one) == (method == "stapo")
    for tag, values in one.items():
        # logprob_diff is itself float32 rounding, of about 1e-6.
        assert two[tag] == pytest.approx(values, rel=1e-3, abs=1e-5), tag
    assert len(one["policy/grad_norm"]) == 4
    if method not in ("grpo", "dapo", "justrl"):
        assert sum(one["s2t/silenced_count"]) >= 10
        assert one["s2t/silenced_count"] == two["s2t/silenced_count"]


@pytest.mark.parametrize("strategy", SHARED)
def test_two_ranks_record_the_silenced_tokens_of_one(runs, strategy):
    folders = [runs / name / "stapo" for name in ("auto", strategy)]
    one, two = (
        [json.loads(line) for line in (folder / "silenced_tokens.jsonl").read_text().splitlines()] for folder in folders
    )
    assert len(one) == sum(_scalars(folders[0])["s2t/silenced_count"])
    # Gradients that are equal to rounding may change places: by update, completion and position.
    one, two = (sorted(lines, key=lambda x: (x["update"], x["completion"], x["position"])) for lines in (one, two))
    assert len(one) == len(two)
    # The likeliest tokens are found for the largest gradients, one rank's or both's.
    assert sum(line["likeliest"] is not None for line in one) == 4 * 8
    for a, b in zip(one, two, strict=True):
        for name, value in a.items():
            if isinstance(value, float):
                assert b[name] == pytest.approx(value, rel=1e-3, abs=1e-6), name
            elif name != "likeliest":
                assert b[name] == value, name
            elif value and b[name]:
                assert [x["token"] for x in value] == [x["token"] for x in b[name]]
                expected = [x["probability"] for x in value]
                assert [x["probability"] for x in b[name]] == pytest.approx(expected, rel=1e-3)
    for folder in folders:
        assert (folder / "token_viewer" / "update-4.html").exists()


@pytest.mark.parametrize("strategy", SHARED)
@pytest.mark.parametrize("method", METHODS)
def test_two_ranks_update_like_one(runs, method, strategy):
    one, two = (_weights(runs / name / method / "policy" / "latest") for name in ("auto", strategy))
    start = _weights(Path(TINY))
    change = (one - start).abs().max()
    # The updates moved the weights, and the two runs moved them alike to float32 rounding. The rate is 0.1: gradients,
    # added over the updates, to 1e-5.
    assert change > 1e-3
    assert (one - two).abs().max() < 1e-6
