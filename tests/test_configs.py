"""Every shipped config parses, and overlays hold what they say."""

import itertools
from pathlib import Path

import datasets
import pytest
import yaml

from stapo_lightning import data, objective
from stapo_lightning.data import Columns, Wording
from stapo_lightning.rewards import Completion, ReasoningGym
from tests.builders import SHARED
from tests.cli import parse

ROOT = Path(__file__).parents[1]
METHODS = sorted(path.stem for path in (ROOT / "configs" / "methods").glob("*.yaml"))
DATA = sorted(path.stem for path in (ROOT / "configs" / "data").glob("*.yaml"))
SCALE = ["fsdp", "lora", "vllm", "vllm_server"]
MODELS = sorted(path.stem for path in (ROOT / "configs" / "models").glob("*.yaml"))
STUDY = ["gentle", "harsh", "measured", "gradients", "remove_high_high", "remove_high_low", "remove_low_high", "study"]
STUDY += ["kl", "replication", "replication_kl"]
STANDALONE = ("quickstart", "base")


def test_every_config_is_covered():
    found = {path.relative_to(ROOT / "configs").with_suffix("").as_posix() for path in ROOT.glob("configs/**/*.yaml")}
    assert found == {
        *STANDALONE,
        "benchmarks",
        "debug",
        "laptop",
        "tokens",
        *(f"methods/{method}" for method in METHODS),
        *(f"data/{data}" for data in DATA),
        *(f"scale/{scale}" for scale in SCALE),
        *(f"models/{model}" for model in MODELS),
        *(f"study/{name}" for name in STUDY),
    }


@pytest.mark.parametrize("name", STANDALONE)
def test_standalone_configs_parse(name):
    assert parse(f"configs/{name}.yaml").data.group_size == 8


# (surrogate with its arguments, selector, aggregation, kl_coef): the table of baselines and ablations in method.md, and
# what the study adds to it.
EXPECTED = {
    "stapo": (("Clipped", 0.2, 0.28), "S2T", "TokenMean", 0.0),
    "dapo": (("Clipped", 0.2, 0.28), "KeepAll", "TokenMean", 0.0),
    "justrl": (("DualClipped", 0.2, 0.28), "KeepAll", "TokenMean", 0.0),
    "grpo": (("Clipped", 0.2, 0.2), "KeepAll", "SequenceMean", 0.04),
    "entropy20": (("Clipped", 0.2, 0.28), "TopEntropy", "TokenMean", 0.0),
    "fullmask": (("Clipped", 0.2, 0.28), "AllCandidates", "TokenMean", 0.0),
    "high_entropy_mask": (("Clipped", 0.2, 0.28), "HighEntropy", "TokenMean", 0.0),
    "random_mask": (("Clipped", 0.2, 0.28), "RandomCandidates", "TokenMean", 0.0),
    "random_positive": (("Clipped", 0.2, 0.28), "RandomPositive", "TokenMean", 0.0),
    "stapo_pooled": (("Clipped", 0.2, 0.28), "S2T", "TokenMean", 0.0),
    "stapo_v1": (("Clipped", 0.2, 0.28), "S2TVersion1", "TokenMean", 0.0),
}


@pytest.mark.parametrize("name", STANDALONE)
def test_the_debug_overlay_shrinks_a_run(name):
    config = parse(f"configs/{name}.yaml", "configs/debug.yaml")
    assert (config.data.prompts_per_batch, config.model.prompts_per_update, config.trainer.max_steps) == (4, 4, 4)


@pytest.mark.parametrize("name", STANDALONE)
def test_the_fsdp_overlay_shards(name):
    config = parse(f"configs/{name}.yaml", "configs/scale/fsdp.yaml", flags=("--model.sharding.cpu_offload=true",))
    assert (config.trainer.strategy, config.trainer.use_distributed_sampler) == ("fsdp2", False)
    assert config.model.activation_checkpointing
    assert config.model.sharding.as_dict() == {
        "gathered": "auto",
        "reshard_after_forward": True,
        "reduce": "once",
        "cpu_offload": True,
    }


@pytest.mark.parametrize("engine", ["VLLMEngine", "VLLMServerEngine"])
def test_an_engine_overlay_replaces_the_other(engine):
    names = ["vllm", "vllm_server"] if engine == "VLLMServerEngine" else ["vllm_server", "vllm"]
    for base in STANDALONE:
        config = parse(f"configs/{base}.yaml", *(f"configs/scale/{name}.yaml" for name in names))
        assert config.data.engine.class_path == f"stapo_lightning.rollout.{engine}"
        assert config.model.max_logprob_diff == 0.1


@pytest.mark.parametrize("name", STANDALONE)
def test_the_tokens_overlay_adds_to_the_callbacks(name):
    before = [callback.class_path for callback in parse(f"configs/{name}.yaml").trainer.callbacks]
    after = [callback.class_path for callback in parse(f"configs/{name}.yaml", "configs/tokens.yaml").trainer.callbacks]
    added = ["SilencedTokens", "Quadrants", "EntropyProfile", "TokenViewer"]
    assert after == [*before, *(f"callbacks.{callback}" for callback in added)]


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
    # Only one of them leaves the paper's threshold.
    assert model.selector.get("init_args.pooled_updates", 1) == (16 if method == "stapo_pooled" else 1)


@pytest.mark.parametrize(
    ("name", "probability", "entropy"),
    [("remove_low_high", "low", "high"), ("remove_high_low", "high", "low"), ("remove_high_high", "high", "high")],
)
def test_a_mechanism_overlay_silences_one_quadrant_of_s2ts(name, probability, entropy):
    model = parse("configs/quickstart.yaml", "configs/methods/grpo.yaml", f"configs/study/{name}.yaml").model
    assert (model.surrogate.class_path.rsplit(".", 1)[1], model.surrogate.init_args.clip_high) == ("Clipped", 0.28)
    assert model.aggregation.class_path.endswith(".TokenMean") and model.kl_coef == 0.0
    assert model.selector.class_path.endswith(".OneQuadrant")
    assert model.selector.init_args.as_dict() == {
        "probability": probability,
        "entropy": entropy,
        "tau_p": 0.002,
        "q": 0.75,
    }


def _train_prompts(*overlays):
    return parse("configs/base.yaml", *(f"configs/data/{name}.yaml" for name in overlays)).data.train_prompts


# (source, reward) of each overlay.
DATA_EXPECTED = {
    "dapo_math_17k": ("HFPrompts", "DapoMath"),
    "gsm8k": ("HFPrompts", "DapoMath"),
    "gsm8k_jsonl": ("JsonlPrompts", "DapoMath"),
    "reasoning_gym": ("ReasoningGymPrompts", "ReasoningGym"),
}


def test_all_data_overlays_are_there():
    assert set(DATA) == set(DATA_EXPECTED)


# DAPO-Math-17k brings no held-out prompts, and those of reasoning_gym are of the same task as the training prompts.
@pytest.mark.parametrize(
    ("before", "name"), sorted({*itertools.permutations(DATA, 2)} - {("reasoning_gym", "dapo_math_17k")})
)
def test_a_data_overlay_replaces_whatever_came_before(before, name):
    source, reward = DATA_EXPECTED[name]
    data = parse("configs/base.yaml", f"configs/data/{before}.yaml", f"configs/data/{name}.yaml").data
    assert data.train_prompts.class_path == f"stapo_lightning.data.{source}"
    assert data.reward.class_path == f"stapo_lightning.rewards.{reward}"
    alone = _train_prompts(name)
    kept = {"name", "revision"}  # labels of rows and versions, which no overlay of another data set relies on
    for key in set(alone.init_args.keys()) - kept:
        assert data.train_prompts.init_args[key] == alone.init_args[key], key


@pytest.mark.parametrize("name", ["gsm8k", "gsm8k_jsonl", "reasoning_gym"])
def test_held_out_prompts_are_worded_as_those_trained_on(name):
    flags = ("--data.train_prompts.wording.chat_template=true", "--data.train_prompts.wording.suffix= Think.")
    data = parse("configs/base.yaml", f"configs/data/{name}.yaml", flags=flags).data
    for prompts in (data.train_prompts, data.val_prompts, data.test_prompts):
        assert (prompts.init_args.wording.chat_template, prompts.init_args.wording.suffix) == (True, " Think.")


def _source(config):
    """The source of a config whose class has no other classes among its arguments."""
    settings = config.init_args.as_dict()
    settings |= {"wording": Wording(**settings["wording"])}
    settings |= {"columns": Columns(**settings["columns"])} if "columns" in settings else {}
    return getattr(data, config.class_path.rsplit(".", 1)[1])(**settings)


def test_published_dapo_rows_lose_their_instructions(tmp_path):
    # As the hub has them: instructions around each problem, each row many times.
    rows = [
        {
            "data_source": "math_dapo",
            "prompt": [
                {
                    "role": "user",
                    "content": "Solve the following math problem step by step. The last line of your response should be"
                    " of the form Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
                    f'What is {i} + 1?\n\nRemember to put your answer on its own line after "Answer:".',
                }
            ],
            "reward_model": {"ground_truth": str(answer), "style": "rule-lighteval/MATH_v2"},
        }
        for i, answer in [(1, 2), (2, 3), (1, 2), (3, 4), (3, 5)]
    ]
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    config = _train_prompts("dapo_math_17k")
    config.init_args.dataset = str(tmp_path / "saved")
    source = _source(config)
    prompts = source.load()
    suffix = "\nPlease reason step by step, and put your final answer within \\boxed{}."
    assert [(p.text, p.answer, p.source, p.messages) for p in prompts] == [
        (f"What is 1 + 1?{suffix}", "2", "math_dapo", ()),
        (f"What is 2 + 1?{suffix}", "3", "math_dapo", ()),
    ]
    assert source.remarks == ["dropped 1 repeated", "dropped 1 with contradicting answers"]


@pytest.mark.parametrize("name", ["gsm8k", "gsm8k_jsonl"])
@pytest.mark.skipif(not (SHARED / "data" / "gsm8k").is_dir(), reason=f"{SHARED}/data/gsm8k is not there")
def test_gsm8k_loads_from_its_files(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    config = parse("configs/base.yaml", f"configs/data/{name}.yaml").data
    for prompts, count, answer in ((config.train_prompts, 7473, "72"), (config.test_prompts, 1319, "18")):
        if name == "gsm8k":  # the folder stands in for the hub, and has no configurations
            prompts.init_args.dataset, prompts.init_args.config_name = str(SHARED / "data" / "gsm8k"), ""
        loaded = _source(prompts).load()
        assert (len(loaded), loaded[0].answer, loaded[0].source) == (count, answer, "gsm8k")
        assert loaded[0].text.endswith("?\nPlease reason step by step, and put your final answer within \\boxed{}.")


def test_reasoning_gym_holds_problems_out():
    config = parse(
        "configs/base.yaml", "configs/data/reasoning_gym.yaml", flags=("--data.train_prompts.size=3000",)
    ).data
    train, val, test = (_source(c).load() for c in (config.train_prompts, config.val_prompts, config.test_prompts))
    assert (len(val), len(test)) == (256, 512)
    held_out = {prompt.text for prompt in (*val, *test)}
    assert len(train) == 3000 and len(held_out) == 768
    assert not held_out & {prompt.text for prompt in train}
    golds = [Completion(prompt, ReasoningGym().gold(prompt), 1, False) for prompt in val]
    assert ReasoningGym()(golds) == [1.0] * 256


def test_defaults_of_the_code_are_the_papers():
    assert (objective.S2T().tau_p, objective.S2T().q) == (0.002, 0.75)
    assert objective.S2TVersion1().q == 0.8
    assert (objective.Clipped().clip_low, objective.Clipped().clip_high) == (0.2, 0.28)
    assert objective.TopEntropy().share == 0.2
    assert objective.DualClipped().dual_clip == 10.0
    assert objective.GroupNormalized().eps == 1e-6


def _paper(name, *overlays):
    return parse("configs/base.yaml", *overlays, "configs/data/dapo_math_17k.yaml", f"configs/models/{name}.yaml")


def test_all_models_are_there():
    assert set(MODELS) == {"qwen3_1_7b", "qwen3_8b", "qwen3_14b", "qwen3_1_7b_single_gpu"}


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("qwen3_1_7b", "Qwen/Qwen3-1.7B-Base"),
        ("qwen3_8b", "Qwen/Qwen3-8B-Base"),
        ("qwen3_14b", "Qwen/Qwen3-14B-Base"),
    ],
)
def test_models_are_the_papers_runs(name, policy):
    config = _paper(name, "configs/scale/fsdp.yaml")
    assert config.model.policy == policy
    assert (config.trainer.devices, config.trainer.num_nodes, config.trainer.strategy) == (8, 8, "fsdp2")
    _is_the_papers_recipe(config)
    # A micro-batch is one completion of full length.
    assert config.model.tokens_per_micro_batch == 1024 + 15360
    assert config.data.train_prompts.init_args.dataset == "BytedTsinghua-SIA/DAPO-Math-17k"
    # 14B does not fit otherwise: tests/test_dry_run.py.
    assert config.model.sharding.reduce == ("every_pass" if name == "qwen3_14b" else "once")


def test_the_single_gpu_variant_has_the_papers_objective_on_an_eighth_of_its_batch():
    config = _paper("qwen3_1_7b_single_gpu")
    assert (config.data.prompts_per_batch, config.model.prompts_per_update, config.data.group_size) == (32, 8, 8)
    assert config.data.prompts_per_batch / config.model.prompts_per_update == 256 / 64
    assert (config.trainer.devices, config.trainer.num_nodes, config.trainer.strategy) == (1, 1, "auto")
    assert config.model.optimizer.init_args.lr == 1e-6
    assert config.model.selector.init_args.tau_p == 0.002


def test_base_is_the_papers_recipe():
    _is_the_papers_recipe(parse("configs/base.yaml"))


def _is_the_papers_recipe(config):
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
