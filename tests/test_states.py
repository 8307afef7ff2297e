"""The ways through the policy: the same states, whatever is computed with what."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, MambaConfig, Qwen3Config

from stapo_lightning.models import backbone, load_causal_lm, packed_backbone
from stapo_lightning.states import join_sequences, joined, shared, shares_prompts
from tests.builders import rollout_batch
from tests.doubles import TINY
from tests.test_models import SIZES

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11]]
# Completions of each prompt; the groups are told apart by their ids alone.
GROUPS = [1, 0, 2, 0, 1, 2, 2, 0]
LENGTHS = [4, 1, 9, 2, 3, 1, 4, 5]


def _batch(groups=GROUPS, lengths=LENGTHS, extra=0, filler=0):
    batch = rollout_batch([1.0] * len(groups), lengths)
    batch.group_ids = torch.tensor([7 * group for group in groups])
    width = max(map(len, PROMPTS)) + extra
    batch.prompt_ids = torch.tensor([PROMPTS[g] + [filler] * (width - len(PROMPTS[g])) for g in groups])
    batch.prompt_lengths = torch.tensor([len(PROMPTS[g]) for g in groups])
    places = torch.arange(len(groups))[:, None] * 5 + torch.arange(max(lengths) + extra) * 3
    batch.completion_ids = torch.where(
        torch.arange(max(lengths) + extra) < batch.completion_lengths[:, None], places % 20, filler
    )
    return batch


def _model(config):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config).double().train()


CONFIGS = {
    "qwen3": Qwen3Config(**SIZES | {"num_hidden_layers": 3}, tie_word_embeddings=True),
    "llama, eager": LlamaConfig(**SIZES | {"num_hidden_layers": 2}, attn_implementation="eager"),
}


class Refuses(nn.Module):
    """The way that must not be taken."""

    def forward(self, batch):
        raise AssertionError("sharing was not worth it")


def _gradients(model, states):
    weights = torch.arange(states.numel(), dtype=states.dtype).reshape(states.shape).cos()
    return torch.autograd.grad((states * weights).sum(), list(model.base_model.parameters()))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("way", ["shared", "packed"])
def test_every_way_gives_the_states_and_gradients_of_the_plain_one(way, config):
    model, batch = _model(config), _batch()
    plain = joined(backbone(model))(batch)
    found = {"shared": shared(model, Refuses()), "packed": joined(packed_backbone(model))}[way](batch)
    assert found.shape == (sum(LENGTHS), 16)
    # Weights are float64, but norms and softmax of transformers are taken in float32.
    torch.testing.assert_close(found, plain, atol=3e-6, rtol=0)
    for mine, expected in zip(_gradients(model, found), _gradients(model, plain), strict=True):
        torch.testing.assert_close(mine, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("filler", [0, 12])
def test_padding_is_never_seen(filler):
    model = _model(CONFIGS["qwen3"])
    plain = joined(backbone(model))(_batch())
    wide = shared(model, Refuses())(_batch(extra=3, filler=filler))
    torch.testing.assert_close(wide, plain, atol=3e-6, rtol=0)


def test_prompts_of_one_length_and_completions_of_one_token():
    # No mask is needed, and no completion token goes through: what predicts it is the prompt's last state.
    model, batch = _model(CONFIGS["qwen3"]), _batch(groups=[2, 2, 2], lengths=[1, 1, 1])
    found = shared(model, Refuses())(batch)
    torch.testing.assert_close(found, joined(backbone(model))(batch), atol=3e-6, rtol=0)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


class CountsTokens:
    """Adds up the tokens that the embedding looks up."""

    def __init__(self, model):
        self.tokens = 0
        model.get_input_embeddings().register_forward_pre_hook(self.count)

    def count(self, module, args):
        self.tokens += args[0].numel()


def test_a_prompt_is_computed_once():
    # One prompt of 7 tokens and four completions, of which all but the last token go through; one length, so one part.
    model = _model(CONFIGS["qwen3"])
    counted = CountsTokens(model)
    shared(model, Refuses())(_batch(groups=[2] * 4, lengths=[5] * 4))
    assert counted.tokens == 7 + 4 * 4


def test_completions_of_like_length_go_together():
    # 8 and 1 tokens: padded to 8 that would be 8 * 8 = 64; in 4 parts of two 2 * 8 + 6 * 1 = 22, one less for each row.
    model = _model(CONFIGS["qwen3"])
    counted = CountsTokens(model)
    shared(model, Refuses())(_batch(groups=[0, 1] * 4, lengths=[1, 8, 1, 1, 8, 1, 1, 1]))
    assert counted.tokens == 2 * 3 + 2 * 7  # prompts of 1 and 3 tokens; parts of one token send nothing through


def test_what_saves_little_goes_the_other_way():
    # Eight prompts of one completion each: 8 * (3 + 4) tokens either way.
    model, batch = _model(CONFIGS["qwen3"]), _batch(groups=[0, 0], lengths=[9, 9])
    batch.group_ids = torch.arange(2)
    with pytest.raises(AssertionError, match="not worth it"):
        shared(model, Refuses())(batch)


def test_gradients_repeat_bit_for_bit_with_two_threads():
    # 256 completions of 32 prompts: large enough that threads share the sums over a prompt's completions.
    model = load_causal_lm(TINY, "sdpa")
    lengths = (torch.arange(256) * 37 % 59 + 5).tolist()
    batch = rollout_batch([1.0] * 256, lengths, group_size=8)
    batch.prompt_ids = (torch.arange(32 * 20).view(32, 20) * 7 % 27 + 3).repeat_interleave(8, 0)
    batch.prompt_lengths = torch.full((256,), 20)
    batch.completion_ids = torch.arange(256 * max(lengths)).view(256, -1) * 11 % 27 + 3
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        first, *others = (_gradients(model, shared(model, Refuses())(batch)) for _ in range(4))
    finally:
        torch.set_num_threads(threads)
    for again in others:
        assert all(torch.equal(one, two) for one, two in zip(first, again, strict=True))


def test_a_window_over_the_last_tokens_cannot_share():
    assert not shares_prompts(_model(Gemma2Config(**SIZES, sliding_window=4)))
    assert shares_prompts(_model(CONFIGS["qwen3"]))


def test_a_recurrent_state_cannot_share():
    recurrent = MambaConfig(vocab_size=20, hidden_size=16, state_size=4, num_hidden_layers=1)
    assert not shares_prompts(_model(recurrent))


def test_join_sequences():
    batch = _batch(groups=[0, 1, 2], lengths=[2, 4, 1], extra=2, filler=19)
    assert join_sequences(batch).tolist() == [
        [1, 2, 3, 0, 3, 19, 19, 19],
        [4, 5, 8, 11, 14, 19, 19, 19],
        [5, 6, 7, 8, 9, 10, 11, 10],
    ]
