"""Checks of a sharded model on two processes. test_sharding.py starts this for each rank and reads what it found.

python -m tests.sharding_worker RANK PORT RESULTS.json
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from stapo_lightning.adapters import merged_weights
from stapo_lightning.linear_scores import LinearHead, score_linear
from stapo_lightning.models import backbone, checkpoint_activations, freeze, output_head
from stapo_lightning.rollout import HFEngine, Sampling, Vocabulary
from stapo_lightning.scoring import score_hidden
from stapo_lightning.sharded_loading import load_sharded
from stapo_lightning.sharding import (
    Sharding,
    clip_gradients,
    decoder_layers,
    join,
    reduce_gradients,
    shard,
    within,
)
from tests.builders import prompt_batch, tiny_qwen3_config
from tests.traffic import Traffic

RANK = int(os.environ.get("STAPO_TEST_RANK", 0))
LAYERS = 2
CPU = torch.device("cpu")


def model(tied: bool = False, seed: int = 0, device: str = "cpu") -> PreTrainedModel:
    config = tiny_qwen3_config()
    config.tie_word_embeddings = tied
    torch.manual_seed(seed)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2,))


def sharded(tied: bool = False, sharding: Sharding | None = None) -> PreTrainedModel:
    found = model(tied)
    shard(found, mesh(), sharding or Sharding())
    return found


def loss(found: PreTrainedModel, rank: int, chunk: int = 0) -> Tensor:
    """A sum of log-probs of one row; the ranks' rows differ in tokens and in length."""
    ids = torch.arange(5 + 4 * rank)[None] * (3 + rank) % 20
    lengths = torch.tensor([ids.shape[1]])

    def forward() -> Tensor:
        hidden, head = backbone(found)(ids, lengths)[0, :-1], output_head(found)
        assert isinstance(head, LinearHead)  # gathered weights, so that the head's products take little memory
        if chunk:  # as many pieces as tokens: not the same number on both ranks
            return score_hidden(hidden, ids[0, 1:], head.__call__, 1.0, chunk)[0]
        return score_linear(hidden, ids[0, 1:], head, 1.0, 7)[0]

    return within(found, forward).sum()


def gradients(tied: bool) -> dict[str, Tensor]:
    """Of the sum of both ranks' losses, in one process."""
    whole = model(tied)
    (loss(whole, 0) + loss(whole, 1)).backward()
    return {name: p.grad for name, p in whole.named_parameters()}


def assert_gradients(found: PreTrainedModel, expected: dict[str, Tensor], tolerance: float, times: int = 1) -> None:
    for name, p in found.named_parameters():
        # FSDP2 averages over the ranks.
        error = (p.grad.full_tensor() * 2 - times * expected[name]).abs().max()
        assert error <= tolerance * expected[name].abs().max(), (name, float(error))


# ---- checks ----------------------------------------------------------------------------------------------------------


def gradient_of_tied_and_untied() -> None:
    for tied in (True, False):
        found = sharded(tied)
        assert all(isinstance(p, DTensor) for p in found.parameters())
        loss(found, RANK).backward()
        assert_gradients(found, gradients(tied), 1e-5)


def gradient_in_chunks_of_different_number() -> None:
    found = sharded()
    loss(found, RANK, chunk=1).backward()
    assert_gradients(found, gradients(False), 1e-5)


def gradient_with_activation_checkpointing() -> None:
    found = model()
    checkpoint_activations(found)
    shard(found, mesh(), Sharding())
    loss(found, RANK).backward()
    assert_gradients(found, gradients(False), 1e-5)


def gradient_with_bfloat16_weights() -> None:
    found = sharded(sharding=Sharding(gathered="bfloat16"))
    loss(found, RANK).backward()
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in found.parameters())
    # 8 bits of mantissa in each of some products one after the other.
    assert_gradients(found, gradients(False), 0.1)
    # Not the float32 gradient: the option does something.
    expected = gradients(False)["model.norm.weight"]
    assert (found.model.norm.weight.grad.full_tensor() * 2 - expected).abs().max() > 1e-4


def gradient_with_cpu_offload() -> None:
    found = sharded(sharding=Sharding(cpu_offload=True))
    loss(found, RANK).backward()
    assert_gradients(found, gradients(False), 1e-5)


def one_reduction_an_update() -> None:
    for tied in (True, False):
        groups = LAYERS + (1 if tied else 2)
        found = sharded(tied)
        loss(found, RANK).backward()  # the first forward finds out which module is the root
        for last in (False, True):
            reduce_gradients(found, last)
            with Traffic() as traffic:
                loss(found, RANK).backward()
            # Each group once for the forward, each layer once more for its backward.
            assert traffic.calls["all_gather"] == groups + LAYERS, traffic.calls
            assert traffic.calls["reduce_scatter"] == (groups if last else 0), traffic.calls
        # The one backward before, and two whose sum was sent with the second.
        assert_gradients(found, gradients(tied), 1e-5, times=3)
        # Float32: all weights go once, and those of the layers once more. Shares are padded to the same size.
        weights = sum(p.numel() for p in found.parameters()) * 4
        layers = sum(p.numel() for p in decoder_layers(found).parameters()) * 4
        assert weights + layers <= traffic.bytes["all_gather"] <= 1.05 * (weights + layers)
        assert weights <= traffic.bytes["reduce_scatter"] <= 1.05 * weights


def a_reduction_a_pass() -> None:
    found = sharded(sharding=Sharding(reduce="every_pass"))
    for last in (False, True):
        reduce_gradients(found, last)
        with Traffic() as traffic:
            loss(found, RANK).backward()
        assert traffic.calls["reduce_scatter"] == LAYERS + 2
    assert_gradients(found, gradients(False), 1e-5, times=2)


def layers_kept_until_the_backward() -> None:
    found = sharded(sharding=Sharding(reshard_after_forward=False))
    loss(found, RANK).backward()
    with Traffic() as traffic:
        loss(found, RANK).backward()
    assert traffic.calls["all_gather"] == LAYERS + 2
    assert_gradients(found, gradients(False), 1e-5, times=2)


def a_frozen_model_gives_the_same_scores_and_keeps_nothing() -> None:
    found = freeze(model())
    shard(found, mesh(), Sharding())
    with torch.no_grad():
        assert torch.allclose(loss(found, RANK), loss(model(), RANK))
    assert all(isinstance(p, DTensor) for p in found.parameters())


def clipping_by_the_global_norm() -> None:
    found = sharded()
    loss(found, RANK).backward()
    whole = [g / 2 for g in gradients(False).values()]
    norm = float(torch.stack([g.square().sum() for g in whole]).sum().sqrt())
    assert abs(clip_gradients(found.parameters(), 0.1 * norm, CPU) / norm - 1) < 1e-5
    assert abs(clip_gradients(found.parameters(), float("inf"), CPU) / (0.1 * norm) - 1) < 1e-5
    for p in found.parameters():
        p.grad = None
    assert clip_gradients(found.parameters(), 1.0, CPU) == 0.0


def weights_from_rank_0_alone() -> None:
    for tied in (True, False):

        def load(tied: bool = tied) -> PreTrainedModel:
            assert RANK == 0
            found = model(tied)
            found.generation_config.eos_token_id = [3, 4]
            return found

        found = load_sharded(load, lambda tied=tied: model(tied, device="meta"), mesh(), Sharding())
        expected = model(tied)
        names = dict(expected.named_parameters())
        weights = {name: weight for name, weight in merged_weights(found) if name in names}
        assert weights.keys() == names.keys()
        assert all(torch.equal(value, names[name]) for name, value in weights.items())
        assert sum(p.to_local().numel() for p in found.parameters()) < 0.6 * sum(p.numel() for p in names.values())
        assert torch.equal(loss(found, RANK), loss(expected, RANK))
        assert found.generation_config.eos_token_id == [3, 4]


def weights_come_whole_while_a_forward_has_them_gathered() -> None:
    found = sharded(tied=True)
    with torch.no_grad():
        loss(found, RANK)
    expected = model(tied=True).state_dict()  # with the head beside the embedding that it is
    weights = dict(merged_weights(found))
    assert weights.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in weights.items())


def rollouts_of_different_length_and_number() -> None:
    """Rank 1 samples twice as many batches, and rank 0 fewer tokens in each."""
    engine, whole = HFEngine(), model()
    found = sharded()
    sampling, vocabulary = Sampling(max_new_tokens=4 + 20 * RANK), Vocabulary(end_ids=(1, 2), pad_id=0)
    for batch in range(1 + RANK):
        prompts = prompt_batch([[5, 6, 7], [8, 9]])
        streams = torch.arange(4) + 10 * RANK + 100 * batch
        one, two = (engine.generate(m, prompts, streams, sampling, vocabulary) for m in (whole, found))
        assert torch.equal(one.ids, two.ids) and torch.allclose(one.log_probs, two.log_probs, atol=1e-5)
    join(found)
    # A rank that has nothing to sample takes part as well.
    if RANK == 1:
        engine.generate(found, prompts, streams, sampling, vocabulary)
    join(found)
    loss(found, RANK).backward()
    assert_gradients(found, gradients(False), 1e-5)


CHECKS: list[Callable[[], None]] = [
    gradient_of_tied_and_untied,
    gradient_in_chunks_of_different_number,
    gradient_with_activation_checkpointing,
    gradient_with_bfloat16_weights,
    gradient_with_cpu_offload,
    one_reduction_an_update,
    a_reduction_a_pass,
    layers_kept_until_the_backward,
    a_frozen_model_gives_the_same_scores_and_keeps_nothing,
    clipping_by_the_global_norm,
    weights_from_rank_0_alone,
    weights_come_whole_while_a_forward_has_them_gathered,
    rollouts_of_different_length_and_number,
]


def main() -> None:
    torch.set_num_threads(1)
    # Half a minute without a partner is a deadlock.
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{sys.argv[1]}", timedelta(seconds=30), rank=RANK, world_size=2)
    found: dict[str, str] = {}
    for check in CHECKS:
        try:
            check()
            found[check.__name__] = ""
        except Exception:
            found[check.__name__] = traceback.format_exc()
        Path(sys.argv[2]).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
