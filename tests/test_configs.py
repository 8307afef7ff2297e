"""Every shipped config parses, and overlays hold what they say."""

from pathlib import Path

import pytest
import yaml

from stapo_lightning import objective
from tests.cli import parse

ROOT = Path(__file__).parents[1]
METHODS = sorted(path.stem for path in (ROOT / "configs" / "methods").glob("*.yaml"))
STANDALONE = ("quickstart", "base")


def test_every_config_is_covered():
    found = {path.relative_to(ROOT / "configs").with_suffix("").as_posix() for path in ROOT.glob("configs/**/*.yaml")}
    assert found == {*STANDALONE, "debug", *(f"methods/{method}" for method in METHODS)}


@pytest.mark.parametrize("name", STANDALONE)
def test_standalone_configs_parse(name):
    assert parse(f"configs/{name}.yaml").data.group_size == 8


# (surrogate with its arguments, selector, aggregation, kl_coef): the table of baselines and ablations in method.md.
EXPECTED = {
    "stapo": (("Clipped", 0.2, 0.28), "S2T", "TokenMean", 0.0),
    "dapo": (("Clipped", 0.2, 0.28), "KeepAll", "TokenMean", 0.0),
    "justrl": (("DualClipped", 0.2, 0.28), "KeepAll", "TokenMean", 0.0),
    "grpo": (("Clipped", 0.2, 0.2), "KeepAll", "SequenceMean", 0.04),
    "entropy20": (("Clipped", 0.2, 0.28), "TopEntropy", "TokenMean", 0.0),
    "fullmask": (("Clipped", 0.2, 0.28), "AllCandidates", "TokenMean", 0.0),
    "high_entropy_mask": (("Clipped", 0.2, 0.28), "HighEntropy", "TokenMean", 0.0),
    "random_mask": (("Clipped", 0.2, 0.28), "RandomCandidates", "TokenMean", 0.0),
}


@pytest.mark.parametrize("name", STANDALONE)
def test_the_debug_overlay_shrinks_a_run(name):
    config = parse(f"configs/{name}.yaml", "configs/debug.yaml")
    assert (config.data.prompts_per_batch, config.model.prompts_per_update, config.trainer.max_steps) == (4, 4, 4)


def test_all_methods_are_there():
    assert set(METHODS) == set(EXPECTED)


@pytest.mark.parametrize("before", ["stapo", "grpo", "justrl"])
@pytest.mark.parametrize("method", METHODS)
def test_a_method_overlay_replaces_whatever_came_before(method, before):
    model = parse("configs/quickstart.yaml", f"configs/methods/{before}.yaml", f"configs/methods/{method}.yaml").model
    (surrogate, low, high), selector, aggregation, kl_coef = EXPECTED[method]
    assert model.surrogate.class_path == f"stapo_lightning.objective.{surrogate}"
    assert (model.surrogate.init_args.clip_low, model.surrogate.init_args.clip_high) == (low, high)
    assert model.selector.class_path == f"stapo_lightning.objective.{selector}"
    assert model.aggregation.class_path == f"stapo_lightning.objective.{aggregation}"
    assert model.kl_coef == kl_coef


def test_defaults_of_the_code_are_the_papers():
    assert (objective.S2T().tau_p, objective.S2T().q) == (0.002, 0.75)
    assert objective.S2TVersion1().q == 0.8
    assert (objective.Clipped().clip_low, objective.Clipped().clip_high) == (0.2, 0.28)
    assert objective.TopEntropy().share == 0.2
    assert objective.DualClipped().dual_clip == 10.0
    assert objective.GroupNormalized().eps == 1e-6


def test_base_is_the_papers_recipe():
    config = parse("configs/base.yaml")
    assert (config.data.prompts_per_batch, config.model.prompts_per_update, config.data.group_size) == (256, 64, 8)
    assert (config.data.max_prompt_tokens, config.data.sampling.max_new_tokens) == (1024, 15360)
    assert (config.data.sampling.temperature, config.data.sampling.top_p) == (1.0, 1.0)
    assert config.model.optimizer.class_path == "torch.optim.AdamW"
    assert config.model.optimizer.init_args.lr == 1e-6
    assert config.model.schedule.init_args.warmup_updates == 10
    assert config.model.max_grad_norm == 1.0
    assert config.model.kl_coef == 0.0


def test_configs_hold_only_plain_yaml():
    for path in ROOT.glob("configs/**/*.yaml"):
        assert isinstance(yaml.safe_load(path.read_text()), dict), path
