"""The output head of a causal language model."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, CohereConfig, Gemma2Config, GraniteConfig

from stapo_lightning.linear_scores import LinearHead
from stapo_lightning.models import backbone, output_head
from tests.builders import tiny_qwen3

SIZES = {
    "vocab_size": 20,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "initializer_range": 0.4,
    "pad_token_id": 0,
}
# (scale, cap) of the logits
ARCHITECTURES = {
    "soft-capped": (Gemma2Config(**SIZES, final_logit_softcapping=2.0), 1.0, 2.0),
    "divided": (GraniteConfig(**SIZES, logits_scaling=4.0), 0.25, None),
    "multiplied": (CohereConfig(**SIZES, logit_scale=0.5), 0.5, None),
}
IDS = torch.tensor([[3, 1, 4, 1, 5]])
LENGTHS = torch.tensor([5])


@pytest.mark.parametrize(("config", "scale", "cap"), ARCHITECTURES.values(), ids=ARCHITECTURES)
def test_scale_and_cap_of_an_architecture(config, scale, cap):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
    head = output_head(model)
    assert (head.scale, head.cap) == (scale, cap)
    torch.testing.assert_close(head(backbone(model)(IDS, LENGTHS)), model(IDS).logits, atol=1e-6, rtol=0)


class Adapted(nn.Linear):
    """A linear layer that does more than its weight says."""

    def forward(self, hidden):
        return super().forward(hidden) + 1.0


def test_only_a_plain_layer_is_taken_apart():
    model = tiny_qwen3()
    hidden = backbone(model)(IDS, LENGTHS)
    plain = output_head(model)
    assert isinstance(plain, LinearHead) and plain.weight is model.lm_head.weight
    adapted = Adapted(16, 20, bias=False)
    adapted.weight = model.lm_head.weight
    model.lm_head = adapted
    assert torch.equal(output_head(model)(hidden), plain(hidden) + 1.0)
