"""ExportHF: latest and best, whole at every moment, and no more than two of them."""

import json

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from transformers import AutoModelForCausalLM, AutoTokenizer

from callbacks import ExportHF
from callbacks.export_hf import _link
from tests.doubles import datamodule, module, trainer


class Watched(ExportHF):
    """Keeps what the links named, and which folders there were, after each export."""

    def __init__(self, **options):
        super().__init__(**options)
        self.history = []

    def _export(self, trainer, pl_module, links):
        super()._export(trainer, pl_module, links)
        root = self.path(trainer)
        names = {name: (root / name).resolve().name for name in ("latest", "best") if (root / name).exists()}
        self.history.append((trainer.global_step, names, sorted(p.name for p in root.glob("*=*"))))


class Score(ModelCheckpoint):
    """A ModelCheckpoint that is told the monitored values by update."""

    def __init__(self, scores, **options):
        super().__init__(**options)
        self.scores = scores

    def _monitor_candidates(self, trainer):
        return super()._monitor_candidates(trainer) | {"score": torch.tensor(self.scores[trainer.global_step - 1])}


def fit(folder, export, source, steps=4, ckpt_path=None, **settings):
    run = trainer(
        folder,
        max_steps=steps,
        enable_checkpointing=True,
        callbacks=[export, source],
        **settings,
    )
    policy = module(prompts_per_update=8)
    run.fit(policy, datamodule=datamodule(), ckpt_path=ckpt_path)
    return policy


def weights(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    return model.get_input_embeddings().weight


def saved(path):
    return torch.load(path, weights_only=True)["state_dict"]["policy.model.embed_tokens.weight"]


def test_latest_and_best_follow_the_checkpoints(tmp_path):
    export = Watched()
    source = Score(
        [0.3, 0.9, 0.5, 0.7], dirpath=tmp_path / "c", filename="{step}", monitor="score", mode="max",
        every_n_train_steps=1, save_last=True, save_top_k=1,
    )  # fmt: skip
    policy = fit(tmp_path, export, source)
    assert export.history == [
        (1, {"latest": "update=1", "best": "update=1"}, ["update=1"]),
        (2, {"latest": "update=2", "best": "update=2"}, ["update=2"]),
        (3, {"latest": "update=3", "best": "update=2"}, ["update=2", "update=3"]),
        (4, {"latest": "update=4", "best": "update=2"}, ["update=2", "update=4"]),
    ]
    assert torch.equal(weights(tmp_path / "policy" / "best"), saved(source.best_model_path))
    assert torch.equal(weights(tmp_path / "policy" / "latest"), saved(tmp_path / "c" / "last.ckpt"))
    assert torch.equal(weights(tmp_path / "policy" / "latest"), policy.policy.get_input_embeddings().weight)
    assert AutoTokenizer.from_pretrained(tmp_path / "policy" / "best")("7").input_ids


def test_without_a_monitor_there_is_no_best(tmp_path):
    fit(tmp_path, ExportHF(), ModelCheckpoint(dirpath=tmp_path / "c", every_n_train_steps=2), steps=3)
    assert (tmp_path / "policy" / "latest").resolve().name == "update=3"  # the end of fit, one after the checkpoint
    assert sorted(path.name for path in (tmp_path / "policy").iterdir()) == ["latest", "update=3"]


def test_a_monitor_of_its_own_and_a_resume(tmp_path):
    source = ModelCheckpoint(dirpath=tmp_path / "c", every_n_train_steps=1, save_last=True)
    # After the first update a step's entropy is lower or higher; which update is best is read from the notes.
    fit(tmp_path, ExportHF(monitor="policy/entropy", mode="min"), source, steps=3)
    note = json.loads((tmp_path / "policy" / "best" / "export.json").read_text())
    assert note["monitor"] == "policy/entropy"
    again = ExportHF(monitor="policy/entropy", mode="min")
    again_source = ModelCheckpoint(dirpath=tmp_path / "c", every_n_train_steps=1, save_last=True)
    fit(tmp_path, again, again_source, steps=4, ckpt_path=tmp_path / "c" / "last.ckpt")
    assert again.best_score <= note["score"]
    after = json.loads((tmp_path / "policy" / "best" / "export.json").read_text())
    assert after["score"] == again.best_score
    assert (after["update"] == note["update"]) == (after["score"] == note["score"])


def test_a_val_tag_counts_at_its_own_update(tmp_path):
    tag = "val/arithmetic/greedy/avg@1"
    export = Watched(monitor=tag)
    source = ModelCheckpoint(dirpath=tmp_path / "c", every_n_train_steps=1, save_last=True)
    fit(tmp_path, export, source, limit_val_batches=1.0, val_check_interval=2)
    # Checkpoints at 1, 2, 3, 4, validations at 2 and 4: at 3 the value of update 2 is still there and does not count.
    assert json.loads((tmp_path / "policy" / "best" / "export.json").read_text())["update"] in (2, 4)
    assert all("best" not in names for update, names, _ in export.history if update == 1)
    assert all(names.get("best") != "update=3" for _, names, _ in export.history)


def test_a_monitor_that_was_never_measured_is_named(tmp_path):
    source = ModelCheckpoint(dirpath=tmp_path / "c", every_n_train_steps=1)
    with pytest.warns(UserWarning, match="ExportHF.monitor=reward/meen: .*reward/mean"):
        fit(tmp_path, ExportHF(monitor="reward/meen"), source, steps=1)


class Killed(Exception):
    pass


@pytest.mark.parametrize("where", ["while it is written", "before the link", "before the old one goes"])
def test_a_kill_leaves_the_previous_one(where, tmp_path):
    class Dies(ExportHF):
        """Stops at update 2 as a kill would: nothing is cleaned up."""

        def _write(self, trainer, pl_module, root, note):
            if trainer.global_step == 2 and where == "while it is written":
                partial = root / ".update=2.partial"
                pl_module.policy.save_pretrained(partial)
                (partial / "config.json").unlink()
                raise Killed
            super()._write(trainer, pl_module, root, note)
            if trainer.global_step == 2:
                if where == "before the old one goes":
                    _link(root, "latest", self._written)
                raise Killed

    def checkpoints():
        return ModelCheckpoint(dirpath=tmp_path / "c", every_n_train_steps=1, save_last=True)

    with pytest.raises(Killed):
        fit(tmp_path, Dies(), checkpoints())
    left = 2 if where == "before the old one goes" else 1
    assert json.loads((tmp_path / "policy" / "latest" / "export.json").read_text())["update"] == left
    assert weights(tmp_path / "policy" / "latest").isfinite().all()
    # Resumed from the checkpoint of update 1, it comes to update 2 again and leaves nothing of the kill behind.
    fit(tmp_path, ExportHF(), checkpoints(), steps=2, ckpt_path=tmp_path / "c" / "last.ckpt")
    assert json.loads((tmp_path / "policy" / "latest" / "export.json").read_text())["update"] == 2
    assert torch.equal(weights(tmp_path / "policy" / "latest"), saved(tmp_path / "c" / "last.ckpt"))
    assert len(list((tmp_path / "policy").glob("*=*")) + list((tmp_path / "policy").glob(".*"))) == 1
