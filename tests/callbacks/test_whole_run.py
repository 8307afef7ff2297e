"""A few updates of the quickstart with everything on: what a user finds in the run's folder and in TensorBoard."""

import json
import re
import subprocess
import sys

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from callbacks.quadrants import QUADRANTS
from tests.cli import ROOT, stapo


def test_quickstart_with_the_tokens_overlay(tmp_path):
    done = stapo(
        "fit", "--config", "configs/quickstart.yaml", "--config", "configs/tokens.yaml", "--trainer.max_steps=6",
        "--trainer.limit_val_batches=0", "--trainer.num_sanity_val_steps=0",
        "--model.prompts_per_update=8", f"--trainer.logger.save_dir={tmp_path}",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "Warning" not in done.stderr, done.stderr[-2000:]
    run = tmp_path / "quickstart" / "version_0"
    lines = [json.loads(line) for line in (run / "silenced_tokens.jsonl").read_text().splitlines()]
    assert f"which tokens {run / 'silenced_tokens.jsonl'}" in done.stdout
    assert f"each token   {run / 'token_viewer' / 'update-6.html'}" in done.stdout
    assert sorted(path.name for path in (run / "token_viewer").iterdir()) == ["update-1.html", "update-6.html"]

    events = EventAccumulator(str(run), size_guidance={"scalars": 0})
    events.Reload()
    tags = events.Tags()
    # Which tokens, why, and what share of the gradient: file and curves agree at every update.
    counts = {event.step: event.value for event in events.Scalars("s2t/silenced_count")}
    shares = {event.step: event.value for event in events.Scalars("s2t/grad_share")}
    assert set(counts) == {1, 2, 3, 4, 5, 6}
    for update, count in counts.items():
        mine = [line for line in lines if line["update"] == update]
        assert len(mine) == count
        assert abs(sum(line["gradient_share"] for line in mine) - shares[update]) < 1e-6
        assert all(line["probability"] < 0.002 and line["entropy"] < line["tau_h"] for line in mine)
    assert sum(counts.values()) > 0
    for quadrant in QUADRANTS:
        for measure in ("count", "token_share", "grad_share"):
            assert len(events.Scalars(f"quadrants/{quadrant}/{measure}")) == 6
    low = [event.value for event in events.Scalars("quadrants/low_prob_low_entropy/count")]
    assert low == list(counts.values())  # what S2T silences
    for tag in ("quantile_0.25", "quantile_0.99", "quarter_1", "quarter_4"):
        assert len(events.Scalars(f"entropy_profile/{tag}")) == 6
    assert set(tags["images"]) == {"silenced_tokens/frequency", "quadrants/plane", "entropy_profile/over_training"}
    for tag in tags["images"]:
        assert [event.step for event in events.Images(tag)] == [2, 6]  # after the first rollout, and at the end
    # The first update with silenced tokens, and what was likelier there.
    first = next(update for update, count in counts.items() if count)
    assert [event.step for event in events.Tensors("silenced_tokens/text_summary")] == [first]
    for line in lines:
        if line["update"] == first:
            assert line["likeliest"][0]["probability"] > line["probability"]


def test_a_missing_matplotlib_is_asked_for_before_anything_runs():
    code = (
        "import sys\n"
        "from types import SimpleNamespace\n"
        "from callbacks import EntropyProfile, Quadrants, SilencedTokens\n"
        "from stapo_lightning.errors import ConfigError\n"
        "class Without:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name.split('.')[0] == 'matplotlib':\n"
        "            raise ModuleNotFoundError(name=name)\n"
        # torchmetrics imports it where it is there.
        "for name in [name for name in sys.modules if name.split('.')[0] == 'matplotlib']:\n"
        "    del sys.modules[name]\n"
        "sys.meta_path.insert(0, Without())\n"
        "module = SimpleNamespace(selector=None)\n"
        "for kind in (EntropyProfile, Quadrants, SilencedTokens):\n"
        "    kind(every_n_updates=0).setup(None, module, 'fit')\n"
        "    kind().setup(None, module, 'test')\n"
        "    try:\n"
        "        kind().setup(None, module, 'fit')\n"
        "    except ConfigError as error:\n"
        "        print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    asked = re.findall(
        r'(\w+) \(or every_n_updates: 0\) needs the package matplotlib: .* pip install -e "\.\[plots\]"', done.stdout
    )
    assert asked == ["EntropyProfile", "Quadrants", "SilencedTokens"], done.stdout + done.stderr
