"""Bytes that are counted without memory are those of real tensors."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from stapo_lightning.linear_scores import LinearHead, score_linear
from stapo_lightning.memory import (
    cache_bytes,
    count_activations,
    fake_ranks,
    group_sizes,
    local_bytes,
    meta_model,
    optimizer_bytes,
)
from stapo_lightning.models import backbone, cache_argument, checkpoint_activations
from stapo_lightning.rollout import HFEngine, RolloutLoad, Sampling, Vocabulary
from stapo_lightning.scoring import part_elements, scoring_bytes
from stapo_lightning.sharding import Sharding, shard
from tests.builders import prompt_batch
from tests.peak import Peak
from tests.shapes import qwen3

SIZES = dict(vocab_size=94, hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4)
QWEN3 = Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=16, tie_word_embeddings=True)
LLAMA = LlamaConfig(**SIZES, num_key_value_heads=2, tie_word_embeddings=False)


def _real(config, dtype=torch.float32):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")


# ---- parameters and optimiser ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        # A layer holds attention 2 H (heads + 8) 128, MLP 3 H I, norms 2 H + 2 * 128; a model V H once where the head
        # is tied and twice where not, and a last norm H.
        # 28 (2 * 2048 * 24 * 128 + 3 * 2048 * 6144 + 4352) + 151936 * 2048 + 2048
        ("qwen3_1_7b", 1_720_574_976),
        # 36 (2 * 4096 * 40 * 128 + 3 * 4096 * 12288 + 8448) + 2 * 151936 * 4096 + 4096
        ("qwen3_8b", 8_190_735_360),
        # 40 (2 * 5120 * 48 * 128 + 3 * 5120 * 17408 + 10496) + 2 * 151936 * 5120 + 5120
        ("qwen3_14b", 14_768_307_200),
    ],
)
def test_published_models_have_their_parameters(name, parameters):
    config = qwen3(name)
    hidden, width = config.hidden_size, 128
    layer = 2 * hidden * (config.num_attention_heads + 8) * width + 3 * hidden * config.intermediate_size
    layer += 2 * hidden + 2 * width
    copies = 1 if config.tie_word_embeddings else 2
    assert config.num_hidden_layers * layer + copies * 151936 * hidden + hidden == parameters
    assert local_bytes(meta_model(config, torch.float32).parameters()) == 4 * parameters
    assert local_bytes(meta_model(config, torch.bfloat16).parameters()) == 2 * parameters


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda params: torch.optim.AdamW(params, lr=1e-3),
        lambda params: torch.optim.AdamW(params, lr=1e-3, amsgrad=True),
        lambda params: torch.optim.SGD(params, lr=1e-3),
        lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9),
        lambda params: torch.optim.Adafactor(params),
    ],
    ids=["AdamW", "amsgrad", "SGD", "momentum", "Adafactor"],
)
def test_the_state_of_an_optimiser_is_counted(optimizer):
    model = _real(QWEN3)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    real = optimizer(list(model.parameters()))
    real.step()
    expected = sum(v.nbytes for state in real.state.values() for v in state.values() if isinstance(v, torch.Tensor))
    assert optimizer_bytes(optimizer, meta_model(QWEN3, torch.float32).parameters()) == expected


def test_ranks_hold_their_shares_of_a_sharded_model():
    whole = meta_model(QWEN3, torch.float32)
    size = local_bytes(whole.parameters())
    with fake_ranks(4):
        mesh = torch.distributed.init_device_mesh("cpu", (4,))
        sharded = meta_model(QWEN3, torch.float32)
        shard(sharded, mesh, Sharding())
        share = local_bytes(sharded.parameters())
        state = optimizer_bytes(lambda params: torch.optim.AdamW(params), sharded.parameters())
    # Rank 0 holds the rounded-up quarter of the rows of every tensor: of 94 rows 24, of 16 norms' weights 4.
    assert size / 4 <= share < 1.02 * size / 4
    # Two moments, and a float32 step for each tensor.
    assert state == 2 * share + 4 * len(list(whole.parameters()))
    assert not torch.distributed.is_initialized()


def test_what_is_gathered_together_is_found():
    with fake_ranks(2):
        for config in (QWEN3, LLAMA):
            model = meta_model(config, torch.float32)
            layer = sum(p.numel() for p in model.base_model.layers[0].parameters())
            shard(model, torch.distributed.init_device_mesh("cpu", (2,)), Sharding())
            outer, inner = group_sizes(model)
            # Head and last norm; the embedding too where it is the head, and on its own where not.
            assert outer == 94 * 64 + 64
            assert sorted(inner) == sorted([layer] * 3 + [94 * 64] * (config is LLAMA))


# ---- activations ----------------------------------------------------------------------------------------------------


def _saved(model, sequences, length, autocast):
    """Bytes that a real forward keeps, with and without what does not depend on its length."""
    own = {p.untyped_storage()._cdata for p in model.parameters()}
    kept = {}

    def pack(tensor):
        if tensor.untyped_storage()._cdata not in own:
            kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    ids, lengths = torch.zeros(sequences, length, dtype=torch.int64), torch.full((sequences,), length)
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        backbone(model)(ids, lengths)
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("config", [QWEN3, LLAMA], ids=["qwen3", "llama"])
@pytest.mark.parametrize(
    ("weights", "autocast"),
    [(torch.float32, None), (torch.bfloat16, None), (torch.float32, torch.bfloat16)],
    ids=["float32", "bf16", "autocast"],
)
def test_activations_are_those_of_a_real_forward(config, weights, autocast):
    counted = count_activations(config, weights, autocast)
    real = _saved(_real(config, weights).train(), 3, 200, autocast is not None)
    assert counted.constant + counted.whole(3, 200) == pytest.approx(real, rel=0.02)


def test_eager_attention_keeps_the_pairs():
    counted = count_activations(QWEN3, torch.float32, None, "eager")
    model = AutoModelForCausalLM.from_config(QWEN3, attn_implementation="eager").train()
    assert counted.constant + counted.whole(2, 300) == pytest.approx(_saved(model, 2, 300, False), rel=0.02)
    # One float32 for every pair, head and layer at the least.
    assert counted.per_pair >= 4 * 4 * 3


def test_checkpointed_activations_are_those_at_the_peak_of_a_real_update():
    config = Qwen3Config(**(SIZES | {"num_hidden_layers": 12}), num_key_value_heads=2, head_dim=16)
    model = _real(config).train()
    checkpoint_activations(model)
    ids, lengths = torch.zeros(2, 256, dtype=torch.int64), torch.full((2,), 256)
    for parameter in model.parameters():  # gradients are counted elsewhere
        parameter.grad = torch.zeros_like(parameter)
    with Peak() as memory:
        backbone(model)(ids, lengths).sum().backward()
    counted = count_activations(config, torch.float32, None)
    whole = counted.whole(2, 256)
    estimate = counted.checkpointed(2, 256) + whole // counted.layers  # and the gradients of that one layer
    assert 0.6 * estimate < memory.peak < 1.1 * estimate
    assert memory.peak < 0.5 * whole


# ---- scoring and rollouts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "vocabulary", "hidden", "dtype"),
    [
        (512, 20000, 64, torch.float32),
        (512, 20000, 64, torch.bfloat16),
        (1500, 9000, 256, torch.float32),
        (1500, 9000, 256, torch.bfloat16),
        (40, 300, 16, torch.float32),
    ],
)
def test_scoring_takes_what_it_says(tokens, vocabulary, hidden, dtype):
    weight = torch.randn(vocabulary, hidden, requires_grad=True)
    states = torch.randn(tokens, hidden, requires_grad=True)
    columns = max(1, part_elements(states.device) // tokens)
    with Peak() as memory, torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        ids = torch.zeros(tokens, dtype=torch.int64)
        score_linear(states, ids, LinearHead(weight), 1.0, columns)[0].sum().backward()
    said = scoring_bytes(tokens, vocabulary, hidden, dtype.itemsize, 4, "cpu")
    # Beside it, numbers for each token.
    assert said == pytest.approx(memory.peak, rel=0.05, abs=100 * tokens)


class _Watch:
    """Looks at the cache on its way into a policy."""

    def __init__(self, policy: nn.Module) -> None:
        self.size, self.argument = 0, cache_argument(policy)
        policy.register_forward_hook(self._look, with_kwargs=True)

    def _look(self, policy, args, kwargs, output) -> None:
        layers = kwargs[self.argument].layers
        self.size = max(self.size, sum(t.untyped_storage().nbytes() for x in layers for t in (x.keys, x.values)))


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
def test_the_cache_of_an_engine_is_counted(autocast):
    policy = _real(QWEN3)
    watch = _Watch(policy)
    engine = HFEngine(max_sequences=7)
    prompts = prompt_batch([[1] * 20, [2] * 20, [3] * 20, [4] * 20])
    sampling, nothing_ends = Sampling(max_new_tokens=150), Vocabulary(end_ids=(94,), pad_id=0)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        engine.generate(policy, prompts, torch.arange(12), sampling, nothing_ends)
    cache = cache_bytes(QWEN3, torch.float32, torch.bfloat16 if autocast else None, 20 + 150)
    # 3 completions a prompt, so 2 prompts at a time: 6 sequences. The last token of each is not read any more.
    assert 6 * cache == pytest.approx(watch.size, rel=0.01)
    # 3 layers, 2 key-value heads of 16, keys and values of 170 tokens, in float32. Under autocast keys alone: the norm
    # that Qwen3 gives them has float32 weights.
    assert cache == 3 * 2 * 16 * 170 * (4 + 2 if autocast else 8)


def test_an_engine_says_what_its_rollouts_take():
    def load(completions):
        return RolloutLoad(completions, 4, cache_bytes=1000, layers=10, vocab_size=50, gpu_memory=0)

    def cache(engine, completions):
        return next(need.size for need in engine.needs(load(completions)) if need.what == "key-value cache")

    # Whole groups of 4: of at most 10 sequences 8 are sampled at a time; one group in any case. While a layer grows it
    # is there twice: 1000 + 1000 / 10.
    assert cache(HFEngine(max_sequences=10), 64) == 8 * 1100
    assert cache(HFEngine(max_sequences=2), 64) == 4 * 1100
    assert cache(HFEngine(max_sequences=512), 64) == 64 * 1100


def test_sampling_takes_what_an_engine_says():
    config = Qwen3Config(**(SIZES | {"vocab_size": 40000, "num_hidden_layers": 1}), num_key_value_heads=2, head_dim=16)
    policy, engine = _real(config, torch.bfloat16), HFEngine()
    prompts, sampling = prompt_batch([[1], [2]]), Sampling(max_new_tokens=3)
    with Peak() as memory:
        engine.generate(policy, prompts, torch.arange(8), sampling, Vocabulary(end_ids=(40000,), pad_id=0))
    load = RolloutLoad(8, 4, cache_bytes(config, torch.bfloat16, None, 4), 1, 40000, 0)
    assert sum(need.size for need in engine.needs(load)) == pytest.approx(memory.peak, rel=0.1)
