"""What a study plans, and what is wrong with one."""

from pathlib import Path

import pytest
import yaml
from jsonargparse import auto_cli

from stapo_lightning.errors import ConfigError
from stapo_lightning.study.study import Method, Regime, Study
from tests.cli import ROOT, parse
from tests.study.builders import study


def _shipped() -> Study:
    def planned(study: Study) -> Study:
        return study

    return auto_cli(planned, args=["--study=configs/study/study.yaml"], as_positional=False)


def test_seeds_come_one_after_the_other_for_all_methods(tmp_path):
    runs = study(tmp_path).runs()
    assert [run.name for run in runs] == [
        f"{regime} / {method} / seed {seed}"
        for seed in (1, 2)
        for regime in ("mild", "wild")
        for method in ("STAPO", "GRPO")
    ]
    assert runs[1].folder == tmp_path / "runs" / "mild" / "GRPO" / "seed_1"
    assert runs[1].options == (
        f"--config={tmp_path}/mild.yaml",
        f"--config={tmp_path}/grpo.yaml",
        "--seed_everything=1",
        f"--trainer.logger.init_args.save_dir={tmp_path}/runs/mild",
        "--trainer.logger.init_args.name=GRPO",
        "--trainer.logger.init_args.version=seed_1",
    )


def test_a_command_quotes_what_has_spaces(tmp_path):
    (run,) = study(tmp_path, regimes=[Regime("mild", [])], methods=[Method("with a space", "main", seeds=[3])],
                   reference="with a space").runs()  # fmt: skip
    assert "'--trainer.logger.init_args.name=with a space'" in run.command
    assert run.command.startswith("stapo fit --seed_everything=3")


def test_a_method_runs_in_its_regimes_with_its_options(tmp_path):
    methods = [Method("STAPO", "main", seeds=[1]), Method("a", "b", [], ["--x=1"], [2], ["wild"])]
    runs = study(tmp_path, methods=methods).runs()
    assert [run.name for run in runs] == ["mild / STAPO / seed 1", "wild / STAPO / seed 1", "wild / a / seed 2"]
    assert runs[2].options[:3] == (f"--config={tmp_path}/wild.yaml", "--x=1", "--seed_everything=2")


def test_a_fingerprint_follows_options_and_the_text_of_files(tmp_path):
    first, second = study(tmp_path).runs()[:2]
    before = first.fingerprint()
    assert before != second.fingerprint()
    assert before == study(tmp_path).runs()[0].fingerprint()
    (tmp_path / "stapo.yaml").write_text("{a: 1}\n")
    assert before != first.fingerprint()


def test_every_mistake_comes_at_once(tmp_path):
    methods = [
        Method("a", "main", ["nowhere.yaml"], seeds=[1, 1]),
        Method("a", "main", regimes=["odd"]),
        Method("b/c", "main", seeds=[]),
    ]
    wrong = study(tmp_path, regimes=[], methods=methods, reference="d", warmup_updates=-1, window=0)
    with pytest.raises(ConfigError) as error:
        wrong.runs()
    for part in (
        "study.warmup_updates=-1",
        "study.window=0",
        "study.regimes: give at least one",
        "study.methods: 'a' is there twice",
        "'b/c' is no name of a folder",
        "study.reference=d: no method of that name; there are a, a, b/c",
        "a.regimes: no regime 'odd'",
        "a.seeds=[1, 1]",
        "b/c.seeds=[]",
        f"nowhere.yaml: no such config file below {Path.cwd()}",
    ):
        assert part in str(error.value), part


def test_the_shipped_study_is_what_the_protocol_says(monkeypatch):
    monkeypatch.chdir(ROOT)
    shipped = _shipped()
    assert [regime.name for regime in shipped.regimes] == ["gentle", "harsh"]
    seeds = {method.name: method.seeds for method in shipped.methods}
    five = [method.name for method in shipped.methods if method.seeds == [1, 2, 3, 4, 5]]
    assert five == [
        "STAPO", "GRPO", "20-Entropy", "JustRL", "DAPO", "FullMask", "high-entropy mask", "random mask",
        "matched random mask", "pooled threshold",
    ]  # fmt: skip
    assert {name for name, given in seeds.items() if given == [1, 2, 3]} == {
        "tau_p 0.0006", "tau_p 0.006", "q 0.25", "q 0.5", "q 0.9", "q 1.0", "version 1", "without low-high",
        "without high-low", "without high-high",
    }  # fmt: skip
    # 9 methods in both regimes and DAPO in one, 5 seeds each; 10 methods in both, 3 seeds each; one run of DAPO.
    assert len(shipped.runs()) == 5 * (9 * 2 + 1) + 3 * 10 * 2 + 1
    # All overlays of configs/methods are there.
    overlays = {Path(file).name for method in shipped.methods for file in method.configs if "/methods/" in file}
    assert overlays == {path.name for path in Path("configs/methods").glob("*.yaml")}


def test_every_method_differs_from_stapo_in_its_objective_alone(monkeypatch):
    monkeypatch.chdir(ROOT)
    own = {"surrogate", "selector", "aggregation", "kl_coef", "kl"}
    shipped = _shipped()
    for regime in shipped.regimes:
        reference = None
        for method in shipped.methods:
            files = [*regime.configs, *method.configs]
            config = parse(*files, flags=tuple(method.options)).as_dict()
            config["model"] = {key: value for key, value in config["model"].items() if key not in own}
            callbacks = [callback["class_path"] for callback in config["trainer"].pop("callbacks")]
            looked = ["callbacks.QuadrantGradients"] if method.name == "JustRL" else []
            assert callbacks[3:] == looked and len(callbacks) == 3 + len(looked)
            config.pop("config")
            reference = reference or config
            assert config == reference, (regime.name, method.name)


def test_regimes_are_those_of_the_protocol(monkeypatch):
    monkeypatch.chdir(ROOT)
    found = {}
    for regime in _shipped().regimes:
        config = parse(*regime.configs, "configs/methods/justrl.yaml")
        updates = config.data.prompts_per_batch // config.model.prompts_per_update
        found[regime.name] = (config.model.optimizer.init_args.lr, updates, config.trainer.max_steps)
        # An evaluation of 512 held-out problems, one completion each at T = 1, the last one at the end of the run.
        (decoding,) = config.data.decodings
        assert (decoding.name, decoding.samples, decoding.sampling.temperature) == ("sampled", 1, 1.0)
        assert (config.data.val_prompts.init_args.split, config.data.val_prompts.init_args.size) == ("val", 512)
        assert config.trainer.max_steps % (config.trainer.val_check_interval * updates) == 0
    assert found == {"gentle": (1e-4, 1, 240), "harsh": (7e-4, 8, 240)}


def test_the_evaluations_tag_is_one_that_is_logged(monkeypatch):
    monkeypatch.chdir(ROOT)
    measured = yaml.safe_load(Path("configs/study/measured.yaml").read_text())
    (decoding,) = measured["data"]["decodings"]
    assert _shipped().accuracy == f"val/arithmetic/{decoding['name']}/avg@{decoding['samples']}"
