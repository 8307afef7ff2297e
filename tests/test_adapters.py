"""Adapters on one process: what trains, what the policy without them is, and what is saved of them."""

import copy
import json
import math
import re
from dataclasses import asdict

import lightning as L
import pytest
import torch
from peft import PeftModel
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedModel, Qwen3Config

from callbacks import ExportHF
from stapo_lightning.adapters import (
    LoRA,
    adapter_off,
    add_adapter,
    describe,
    merged_weights,
    save_adapter,
    save_merged,
)
from stapo_lightning.batch import RolloutBatch
from stapo_lightning.cli import run
from stapo_lightning.errors import ConfigError
from stapo_lightning.linear_scores import LinearHead, score_linear
from stapo_lightning.models import backbone, freeze, load_causal_lm, output_head, rollout_mode
from stapo_lightning.rollout import HFEngine, Sampling, Vocabulary
from stapo_lightning.rollout.packed_weights import packed_weights
from stapo_lightning.scoring import score
from stapo_lightning.states import joined
from tests.builders import prompt_batch, tiny_qwen3, tiny_qwen3_config
from tests.doubles import TINY, Recorder, datamodule, module, trainer
from tests.test_module import Replay, assert_same_update, rollout  # noqa: F401  a fixture

SMALL = LoRA(rank=4, alpha=8.0)
IDS = torch.arange(12)[None] * 7 % 20
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def moved(model: PreTrainedModel) -> PreTrainedModel:
    """The model after its adapter has learned something."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in trained(model).values():
            p.copy_(0.3 * torch.randn(p.shape, generator=generator))
    return model


def adapted(lora: LoRA = SMALL, base: str = "base") -> PreTrainedModel:
    return moved(add_adapter(tiny_qwen3(), lora, base))


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


@torch.no_grad()
def logits(model: nn.Module, ids: torch.Tensor = IDS) -> torch.Tensor:
    return model(input_ids=ids).logits


def gpt2() -> PreTrainedModel:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=20, n_embd=16, n_layer=1, n_head=2, n_positions=32, initializer_range=0.4)
    return AutoModelForCausalLM.from_config(config).eval()


# ---- in the model ----------------------------------------------------------------------------------------------------


def test_at_first_it_computes_what_the_base_does():
    assert torch.equal(logits(add_adapter(tiny_qwen3(), SMALL, "base")), logits(tiny_qwen3()))


class CountsProducts(TorchDispatchMode):
    """Counts matrix products that are written into memory which is there, as those of a linear head are."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.number += function is torch.ops.aten.addmm_.default
        return function(*args, **(kwargs or {}))


def test_only_the_matrices_train_and_the_head_costs_no_gradient():
    model = adapted()
    head = output_head(model)
    assert isinstance(head, LinearHead)
    hidden = backbone(model)(IDS, torch.tensor([12]))[0, :-1]
    with CountsProducts() as products:
        score_linear(hidden, IDS[0, 1:], head, 1.0, 7)[0].sum().backward()
    # The vocabulary of 20 in three parts, each with a product forward, the same again backward and one for the hidden
    # states; a fourth would be the gradient of the weight.
    assert products.number == 3 * 3
    assert {name for name, p in model.named_parameters() if p.grad is not None} == trained(model).keys()
    assert all(p.grad.abs().max() > 0 for p in trained(model).values())
    # Two layers, seven matrices each, A and B of each.
    assert len(trained(model)) == 2 * 7 * 2
    assert {name.split(".")[-4] for name in trained(model)} == set(PROJECTIONS)
    # The class of the model and the names that the rest of the code looks for are the same.
    assert type(model) is type(tiny_qwen3()) and type(model.base_model) is type(tiny_qwen3().base_model)


def test_off_it_is_the_base_and_on_again_itself():
    model = adapted()
    on = logits(model)
    with adapter_off(model):
        assert torch.equal(logits(model), logits(tiny_qwen3()))
        assert len(trained(model)) == 28
    assert torch.equal(logits(model), on)
    assert (on - logits(tiny_qwen3())).abs().max() > 0.1
    with adapter_off(tiny_qwen3()) as nothing:
        assert nothing is None


def test_its_start_follows_the_seed_and_moves_no_generator():
    found = []
    for draws in (0, 3):
        torch.manual_seed(5)
        torch.rand(draws)
        state = torch.get_rng_state()
        found.append(trained(add_adapter(tiny_qwen3(), SMALL, "base")))
        assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(*(f.values() for f in found), strict=True))
    torch.manual_seed(6)
    other = trained(add_adapter(tiny_qwen3(), SMALL, "base"))
    assert not torch.equal(next(iter(other.values())), next(iter(found[0].values())))


def test_an_adapted_head_goes_in_chunks_and_trains():
    lora = LoRA(rank=2, target_modules=["lm_head", "q_proj"])
    model = adapted(lora)
    batch = _batch()
    found = score(batch, joined(backbone(model))(batch), output_head(model), 20)
    assert not isinstance(output_head(model), LinearHead)
    sequences = torch.cat([batch.prompt_ids, batch.completion_ids], 1)
    log_p = torch.log_softmax(model(input_ids=sequences).logits, -1)[:, :-1]
    torch.testing.assert_close(found.log_probs, log_p.gather(-1, sequences[:, 1:, None])[..., 0], atol=1e-5, rtol=1e-5)
    found.log_probs.sum().backward()
    assert all(p.grad.abs().max() > 0 for p in trained(model).values())
    assert {name.partition(".lora")[0].rpartition(".")[2] for name in trained(model)} == {"lm_head", "q_proj"}


def _batch() -> RolloutBatch:
    """Two completions of five tokens behind a prompt of one."""
    ids = torch.tensor([[4, 7, 1, 12, 3], [5, 5, 19, 0, 8]])
    return RolloutBatch(
        prompt_ids=torch.ones(2, 1, dtype=torch.int64),
        prompt_lengths=torch.ones(2, dtype=torch.int64),
        completion_ids=ids,
        completion_lengths=torch.tensor([5, 5]),
        truncated=torch.zeros(2, dtype=torch.bool),
        old_log_probs=torch.zeros(2, 5),
        rewards=torch.zeros(2),
        advantages=torch.ones(2),
        group_ids=torch.zeros(2, dtype=torch.int64),
        uids=torch.arange(2),
        temperature=1.0,
        group_size=2,
    )


@pytest.mark.parametrize(
    ("lora", "reason"),
    [
        (LoRA(rank=0), r"model\.adapter\.rank=0: must be at least 1"),
        (LoRA(alpha=0.0), r"model\.adapter\.alpha=0\.0: must be above 0"),
        (LoRA(target_modules=[]), r"target_modules=\[\]: no layer would train"),
    ],
)
def test_what_is_out_of_range_is_named(lora, reason):
    (problem,) = lora.problems()
    assert re.search(reason, problem)
    assert SMALL.problems() == []


def test_layers_that_cannot_be_adapted_are_named_together():
    config = tiny_qwen3_config()
    config.tie_word_embeddings = True
    tied = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ConfigError) as raised:
        add_adapter(tied, LoRA(target_modules=["q_proj", "query", "embed_tokens", "lm_head"]), "base")
    query, embedding, head = raised.value.problems
    assert "'query'" in query and "q_proj" in query and "down_proj" in query
    assert "'embed_tokens'" in embedding and "linear" in embedding
    assert "'lm_head'" in head and "tied" in head
    # Nothing was done to the model.
    assert all(p.requires_grad for p in tied.parameters())


# ---- weights and export ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "lora"),
    [
        (tiny_qwen3, SMALL),
        (tiny_qwen3, LoRA(rank=4, alpha=8.0, rank_stabilized=True)),
        (tiny_qwen3, LoRA(rank=2, target_modules=["lm_head", "down_proj"])),
        (gpt2, LoRA(rank=2, target_modules=["c_attn", "c_proj"])),  # weights that are transposed, with a bias
    ],
    ids=["all-linear", "rsLoRA", "head", "transposed"],
)
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")
def test_merged_weights_compute_the_same(make, lora):
    policy = moved(add_adapter(make(), lora, "base"))
    before, on = copy.deepcopy(policy.state_dict()), logits(policy)
    plain = make()
    expected = plain.state_dict()
    weights = dict(merged_weights(policy))
    assert weights.keys() == expected.keys()  # a tied head too
    plain.load_state_dict(weights)
    torch.testing.assert_close(logits(plain), on, atol=2e-4, rtol=1e-5)
    assert (on - logits(make())).abs().max() > 0.1
    assert all(torch.equal(value, before[name]) for name, value in policy.state_dict().items())


def test_merged_weights_of_a_policy_without_adapter_are_its_own():
    model = tiny_qwen3()
    assert all(value.data_ptr() == model.state_dict()[name].data_ptr() for name, value in merged_weights(model))


@pytest.mark.parametrize("tied", [False, True])
def test_the_merged_export_loads_alone(tied, tmp_path):
    config = tiny_qwen3_config()
    config.tie_word_embeddings = tied
    policy = moved(add_adapter(AutoModelForCausalLM.from_config(config), SMALL, "base"))
    save_merged(policy, tmp_path, writes=True)
    assert not (tmp_path / "adapter_config.json").exists()
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    assert loaded.config.tie_word_embeddings == tied
    torch.testing.assert_close(logits(loaded), logits(policy), atol=2e-4, rtol=1e-5)


def test_the_adapter_export_goes_over_the_base(tmp_path):
    tiny_qwen3().save_pretrained(tmp_path / "base")
    policy = adapted(base=str(tmp_path / "base"))
    save_adapter(policy, tmp_path / "adapter", writes=True)
    loaded = PeftModel.from_pretrained(tiny_qwen3(), tmp_path / "adapter")
    assert torch.equal(logits(loaded), logits(policy))
    # The base is noted in it, so that transformers finds it too.
    alone = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter")
    assert torch.equal(logits(alone), logits(policy))
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"], settings["lora_dropout"]) == (4, 8.0, 0.0)


def test_what_trains_is_printed():
    # Layer: q 16x16, k and v 16x8, o 16x16, gate, up and down 16x32; A and B of rank 4 have 4 x (in + out) elements:
    # 4 x (32 + 24 + 24 + 32 + 3 x 48) = 1,024 in each of two layers.
    assert describe(adapted()).startswith("adapter   2,048 of 7,408 parameters train (27.65%)")


# ---- rollouts --------------------------------------------------------------------------------------------------------


def test_the_engine_samples_from_the_adapted_policy():
    policy = adapted()
    prompts, streams = prompt_batch([[5, 6, 7], [8, 9]]), torch.arange(8)
    arguments = (prompts, streams, Sampling(max_new_tokens=12), Vocabulary(end_ids=(1,), pad_id=0))
    found = HFEngine().generate(policy, *arguments)
    for row, ids in enumerate(found.ids):
        prompt = [[5, 6, 7], [8, 9]][row // 4]
        length = int(found.lengths[row])
        sequence = torch.tensor([prompt + ids[:length].tolist()])
        log_p = torch.log_softmax(logits(policy, sequence)[0, len(prompt) - 1 : -1], -1)
        expected = log_p.gather(-1, sequence[0, len(prompt) :, None])[:, 0]
        torch.testing.assert_close(found.log_probs[row, :length], expected, atol=1e-5, rtol=1e-5)
    with adapter_off(policy):
        assert not torch.equal(HFEngine().generate(policy, *arguments).ids, found.ids)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this build of torch has no oneDNN")
def test_large_base_layers_are_packed_below_their_adapter():
    # 512 x 512: the smallest layer that is packed; k and v are smaller.
    config = Qwen3Config(
        vocab_size=20, hidden_size=512, intermediate_size=512, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=1, head_dim=128,
    )  # fmt: skip
    policy = moved(add_adapter(AutoModelForCausalLM.from_config(config), SMALL, "base"))
    with rollout_mode(policy):
        expected = logits(policy)
        with packed_weights(policy):
            packed = [name for name, layer in policy.named_modules() if "forward" in vars(layer)]
            found = logits(policy)
    assert sorted(name.split(".")[-2] for name in packed) == sorted(set(PROJECTIONS) - {"k_proj", "v_proj"})
    assert all(name.endswith(".base_layer") for name in packed)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


# ---- runs ------------------------------------------------------------------------------------------------------------


class Moves(L.Callback):
    """Lets the adapter have learned something before the run."""

    def on_fit_start(self, trainer, pl_module) -> None:
        moved(pl_module.policy)


class LoadsReference(L.Callback):
    """Gives the module a second copy of the base as its reference."""

    def on_fit_start(self, trainer, pl_module) -> None:
        pl_module.reference = [freeze(load_causal_lm(TINY, "sdpa"))]


class CountsParameters(L.Callback):
    """Notes whether the reference is the policy itself."""

    def on_train_start(self, trainer, pl_module) -> None:
        self.same = pl_module.reference[0] is pl_module.policy


def update(folder, batch, callbacks=(), **settings):
    """The adapter's change in one update (SGD: the gradient), and its metrics."""
    recorder = Recorder()
    settings = {"optimizer": lambda params: torch.optim.SGD(params, lr=1.0), "adapter": SMALL} | settings
    policy = module(prompts_per_update=len(batch) // batch.group_size, max_logprob_diff=math.inf, **settings)
    start = Start()
    fit = trainer(folder, max_steps=1, callbacks=[Moves(), *callbacks, start, recorder])
    fit.fit(policy, datamodule=Replay(copy.deepcopy(batch)))
    change = torch.cat([(p - start.weights[name]).flatten() for name, p in trained(policy.policy).items()]).detach()
    for name, p in policy.policy.named_parameters():
        assert p.requires_grad or torch.equal(p, start.weights[name])
    assert change.abs().max() > 1e-3
    return change, recorder.metrics[0]


class Start(L.Callback):
    """Keeps the weights that a run begins with."""

    def on_train_start(self, trainer, pl_module) -> None:
        self.weights = {name: p.detach().clone() for name, p in pl_module.policy.named_parameters()}


@pytest.fixture(scope="module")
def plain(rollout, tmp_path_factory):  # noqa: F811
    return update(tmp_path_factory.mktemp("plain"), rollout, tokens_per_micro_batch=100_000, share_prompts=False)


@pytest.mark.parametrize(
    "settings",
    [
        {"tokens_per_micro_batch": 333},
        {"tokens_per_micro_batch": 333, "share_prompts": False, "activation_checkpointing": True},
        {"tokens_per_micro_batch": 333, "packing": True},
        {"tokens_per_micro_batch": 100_000, "share_prompts": True},
    ],
    ids=["micro-batches", "checkpointing", "packing", "shared prompts"],
)
def test_how_it_is_computed_does_not_change_the_update(settings, rollout, plain, tmp_path):  # noqa: F811
    change, metrics = update(tmp_path, rollout, **settings)
    assert (change - plain[0]).abs().max() <= 1e-5 * plain[0].abs().max()
    assert metrics["policy/grad_norm"] == pytest.approx(plain[1]["policy/grad_norm"], rel=1e-4)


def test_a_compiled_policy_makes_the_same_update_and_has_the_same_reference(rollout, tmp_path):  # noqa: F811
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    # One pass, so that there is one graph to compile.
    settings = {"kl_coef": 0.1, "tokens_per_micro_batch": 100_000}
    found = [update(tmp_path / str(on), rollout, compile=on, **settings) for on in (False, True)]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert (found[0][0] - found[1][0]).abs().max() <= 1e-4 * found[0][0].abs().max()
    assert found[1][1]["policy/kl_ref"] == pytest.approx(found[0][1]["policy/kl_ref"], rel=1e-4)


@pytest.mark.parametrize("budget", [333, 100_000])
@pytest.mark.parametrize("share", [False, True])
def test_the_reference_is_the_base(budget, share, rollout, tmp_path):  # noqa: F811
    same = CountsParameters()
    settings = {"kl_coef": 0.5, "tokens_per_micro_batch": budget, "share_prompts": share}
    off = update(tmp_path / "off", rollout, [same], **settings)
    loaded = update(tmp_path / "loaded", rollout, [LoadsReference()], **settings)
    assert same.same
    assert off[1]["policy/kl_ref"] == pytest.approx(loaded[1]["policy/kl_ref"], rel=1e-5)
    assert off[1]["policy/kl_ref"] > 0.01
    assert_same_update(off[0], loaded[0])


def test_bfloat16_keeps_the_gradient_over_the_reference_between_forward_and_backward(rollout, tmp_path):  # noqa: F811
    found = []
    for precision in ("32-true", "bf16-mixed"):
        recorder = Recorder()
        policy = module(
            adapter=SMALL, kl_coef=0.5, prompts_per_update=8, tokens_per_micro_batch=333, max_logprob_diff=math.inf
        )
        fit = trainer(tmp_path, max_steps=1, callbacks=[Moves(), recorder], precision=precision)
        fit.fit(policy, datamodule=Replay(copy.deepcopy(rollout)))
        found.append(recorder.metrics[0]["policy/grad_norm"])
    # 8 bits of mantissa.
    assert found[1] == pytest.approx(found[0], rel=0.05)


def test_it_learns_only_beside_the_weights_and_saves_nothing_else(tmp_path):
    first, second = (module(adapter=SMALL, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2)) for _ in range(2))
    fit = trainer(tmp_path, max_steps=2)
    fit.fit(first, datamodule=datamodule())
    fit.save_checkpoint(tmp_path / "half.ckpt")
    base = dict(load_causal_lm(TINY, "sdpa").named_parameters())
    frozen = {n: p for n, p in first.policy.named_parameters() if not p.requires_grad}
    assert all(torch.equal(p, base[name.replace(".base_layer", "")]) for name, p in frozen.items())

    state = torch.load(tmp_path / "half.ckpt", weights_only=True)
    assert state["state_dict"].keys() == {f"policy.{name}" for name in trained(first.policy)}
    assert all(value.abs().max() > 0 for value in state["state_dict"].values())
    moments = state["optimizer_states"][0]["state"]
    assert len(moments) == len(trained(first.policy))
    size = sum(p.numel() for p in trained(first.policy).values()) * 4
    # A and B, two moments of each, and some 60 kB of names and counters; the policy alone takes ten times A and B.
    assert (tmp_path / "half.ckpt").stat().st_size < 3 * size + 100_000
    assert state["adapter"] == asdict(SMALL)

    torch.manual_seed(99)  # another start of A, which the checkpoint must replace
    again = trainer(tmp_path, max_steps=4)
    torch.manual_seed(99)
    again.fit(second, datamodule=datamodule(), ckpt_path=tmp_path / "half.ckpt")
    whole = module(adapter=SMALL, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2))
    trainer(tmp_path, max_steps=4).fit(whole, datamodule=datamodule())
    pairs = zip(trained(second.policy).values(), trained(whole.policy).values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_a_state_that_is_not_this_adapters_is_refused(tmp_path):
    policy = module(adapter=SMALL)
    fit = trainer(tmp_path)
    fit.fit(policy, datamodule=datamodule())
    state = policy.state_dict()
    policy.load_state_dict(state)
    with pytest.raises(RuntimeError, match="Missing key"):
        policy.load_state_dict(dict(list(state.items())[1:]))
    with pytest.raises(RuntimeError, match="Unexpected key"):
        policy.load_state_dict(state | {"policy.nonsense": torch.zeros(1)})


def test_a_checkpoint_of_other_settings_is_refused(tmp_path):
    paths = {}
    for name, adapter in (("whole", None), ("adapter", SMALL)):
        fit = trainer(tmp_path)
        fit.fit(module(adapter=adapter), datamodule=datamodule())
        fit.save_checkpoint(paths.setdefault(name, tmp_path / f"{name}.ckpt"))
    for name, adapter, reason in (
        ("adapter", None, r"holds an adapter alone: set model\.adapter to .*'rank': 4"),
        ("whole", SMALL, r"the checkpoint holds a whole policy; export it"),
        ("adapter", LoRA(rank=4, alpha=16.0), r"'alpha': 16\.0.*the checkpoint's is .*'alpha': 8\.0"),
    ):
        policy = module(adapter=adapter)
        with pytest.raises(ConfigError, match=reason):
            trainer(tmp_path, max_steps=4).fit(policy, datamodule=datamodule(), ckpt_path=paths[name])


@pytest.mark.parametrize("form", ["merged", "adapter"])
def test_a_run_exports_what_it_is_asked_for(form, tmp_path):
    policy = module(adapter=SMALL, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2))
    trainer(tmp_path, callbacks=[ExportHF(form=form)]).fit(policy, datamodule=datamodule())
    folder = tmp_path / "policy" / "latest"
    if form == "merged":
        loaded = AutoModelForCausalLM.from_pretrained(folder)
    else:
        loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(TINY), folder)
    torch.testing.assert_close(logits(loaded), logits(policy.policy), atol=2e-4, rtol=1e-5)
    assert (logits(loaded) - logits(load_causal_lm(TINY, "sdpa"))).abs().max() > 1e-3
    assert (folder / "tokenizer.json").exists()


def test_an_export_of_no_adapter_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"ExportHF\.form=adapter: the policy has none"):
        trainer(tmp_path, callbacks=[ExportHF(form="adapter")]).fit(module(), datamodule=datamodule())


def test_the_overlay_learns(tmp_path):
    run(
        [
            "fit",
            "--config=configs/quickstart.yaml",
            "--config=configs/scale/lora.yaml",
            "--model.optimizer.lr=1e-3",  # ten times the quickstart's
            "--trainer.max_steps=40",
            "--trainer.limit_val_batches=0",
            f"--trainer.logger.save_dir={tmp_path}",
            "--trainer.enable_progress_bar=false",
            "--trainer.callbacks=null",
        ]
    )
    events = EventAccumulator(str(next(tmp_path.glob("quickstart/*/events*"))), size_guidance={"scalars": 0})
    events.Reload()
    rewards = [event.value for event in events.Scalars("reward/mean")]
    first, last = (sum(part) / 10 for part in (rewards[:10], rewards[-10:]))
    print(first, last)
    # 0.46 and 0.67; the mean of ten rollouts of 128 completions is known to about 0.02.
    assert len(rewards) == 40
    assert last > first + 0.1
