"""Linear layers with packed weights: the same products, and nothing left behind."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from stapo_lightning.rollout.packed_weights import PACKED_ELEMENTS, packed_weights

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this build of torch has no oneDNN")
WIDTH = 512  # 512 * 512 = 2**18, just large enough


class Halves(nn.Linear):
    """A linear layer that does more than its weight says."""

    def forward(self, x):
        return super().forward(x) / 2


@pytest.fixture
def single_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _model():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8), Halves(8, WIDTH), nn.Linear(WIDTH, WIDTH))


@pytest.mark.parametrize("shape", [(3, WIDTH), (2, 5, WIDTH), (4, 1, WIDTH)])
@torch.no_grad()
def test_the_same_products(shape):
    model, x = _model(), torch.linspace(-1, 1, 3000).sin()[: 2 * 5 * WIDTH // 2].repeat(4)[: torch.Size(shape).numel()]
    x = x.reshape(shape)
    expected = model(x)
    with packed_weights(model):
        found = model(x)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


def test_only_large_plain_float32_layers_are_packed_and_only_within():
    model = _model()
    model[3].register_forward_hook(lambda module, args, out: None)
    assert WIDTH * WIDTH == PACKED_ELEMENTS
    with packed_weights(model):
        assert ["forward" in vars(layer) for layer in model] == [True, False, False, False]
    assert not any("forward" in vars(layer) for layer in model)
    with packed_weights(model.double()):
        assert not any("forward" in vars(layer) for layer in model)


def test_a_sharded_model_packs_nothing(single_rank):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 8))
    fully_shard(model[1], mesh=init_device_mesh("cpu", (1,)))
    with packed_weights(model):
        assert "forward" not in vars(model[0])


@torch.no_grad()
def test_weights_are_read_anew_each_time():
    model, x = nn.Linear(WIDTH, WIDTH, bias=False), torch.ones(1, WIDTH)
    nn.init.constant_(model.weight, 1.0)
    with packed_weights(model):
        assert model(x)[0, 0] == WIDTH
    model.weight.mul_(2)
    with packed_weights(model):
        assert model(x)[0, 0] == 2 * WIDTH


def test_an_error_within_leaves_nothing_behind():
    model = _model()
    with pytest.raises(KeyError), packed_weights(model):
        raise KeyError
    assert "forward" not in vars(model[0])


@torch.no_grad()
def test_autocast_goes_the_ordinary_way():
    model, x = nn.Linear(WIDTH, WIDTH), torch.ones(1, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(x)
        with packed_weights(model):
            found = model(x)
    assert found.dtype == torch.bfloat16 and torch.equal(found, expected)
