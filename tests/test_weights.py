"""Weights on their way to an engine."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from stapo_lightning.weights import stream_weights
from tests.builders import tiny_qwen3


@pytest.fixture
def one_rank(tmp_path):
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("tied", [True, False])
def test_every_name_of_a_checkpoint_comes_once(tied):
    policy = tiny_qwen3(tie_word_embeddings=tied)
    streamed = list(stream_weights(policy))
    names = [name for name, _ in streamed]
    assert len(names) == len(set(names)) and set(names) == set(policy.state_dict())
    # A tied head too, though it is no parameter of its own.
    assert torch.equal(dict(streamed)["lm_head.weight"], policy.lm_head.weight)
    assert "lm_head.weight" in names and ("lm_head.weight" in dict(policy.named_parameters())) is not tied


def test_values_are_those_of_the_policy_without_a_copy():
    policy = tiny_qwen3()
    parameters = dict(policy.named_parameters())
    for name, value in stream_weights(policy):
        assert value.data_ptr() == parameters[name].data_ptr() and not value.requires_grad


def test_values_are_converted_one_at_a_time():
    policy = tiny_qwen3()
    policy.register_buffer("counts", torch.arange(3))
    streamed = dict(stream_weights(policy, torch.bfloat16))
    assert streamed["counts"].dtype == torch.int64
    assert torch.equal(streamed["lm_head.weight"], policy.lm_head.weight.bfloat16())


@pytest.mark.parametrize("tied", [True, False])
def test_a_sharded_policy_streams_whole_tensors_under_the_same_names(tied, one_rank):
    policy = tiny_qwen3(tie_word_embeddings=tied)
    expected = {name: value.clone() for name, value in stream_weights(policy)}
    for layer in policy.model.layers:
        fully_shard(layer)
    fully_shard(policy)
    streamed = dict(stream_weights(policy))
    assert streamed.keys() == expected.keys()
    assert all(type(value) is torch.Tensor and torch.equal(value, expected[name]) for name, value in streamed.items())
