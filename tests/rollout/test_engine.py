"""When an engine is woken and put to sleep."""

import pytest
import torch

from stapo_lightning.data import ArithmeticPrompts
from stapo_lightning.rollout import HFEngine, RolloutEngine
from stapo_lightning.rollout.emitted import Emitted, as_completions, seeds
from tests.doubles import datamodule, module, trainer


class Napping(RolloutEngine):
    """Samples as HFEngine does, only while it is awake and only from the weights that it was woken with."""

    def __init__(self) -> None:
        self.inner, self.calls, self.weights = HFEngine(), [], None

    def wake(self, policy) -> None:
        self.calls.append("wake")
        self.weights = [parameter.detach().clone() for parameter in policy.parameters()]

    def generate(self, policy, prompts, streams, sampling, vocabulary):
        if self.calls[-1] != "generate":
            self.calls.append("generate")
        assert all(torch.equal(own, now) for own, now in zip(self.weights, policy.parameters(), strict=True))
        return self.inner.generate(policy, prompts, streams, sampling, vocabulary)

    def sleep(self) -> None:
        self.calls.append("sleep")
        self.weights = None


NIGHT = ["wake", "generate", "sleep"]


def test_an_engine_is_awake_for_each_rollout_and_each_validation(tmp_path):
    # Validation before the first rollout and after the second; several batches of each share one waking.
    engine = Napping()
    run = trainer(
        tmp_path,
        max_steps=4,
        val_check_interval=2,
        limit_val_batches=3,
        num_sanity_val_steps=2,
        check_val_every_n_epoch=None,
    )
    run.fit(module(), datamodule=datamodule(engine=engine, eval_completions_per_batch=4))
    assert engine.calls == NIGHT * 4


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_an_engine_is_awake_for_held_out_prompts(stage, tmp_path):
    engine, prompts = Napping(), ArithmeticPrompts("test", 4)
    run = trainer(tmp_path, limit_val_batches=2)
    data = datamodule(engine=engine, test_prompts=prompts, predict_prompts=prompts, eval_completions_per_batch=4)
    getattr(run, stage)(module(), datamodule=data)
    assert engine.calls == NIGHT


def test_lists_become_completions():
    rows = [Emitted([4, 2], [-0.5, -1.0], False), Emitted([5, 6, 7], None, True)]
    found = as_completions(rows, pad_id=9, device=torch.device("cpu"))
    assert found.ids.tolist() == [[4, 2, 9], [5, 6, 7]]
    assert found.lengths.tolist() == [2, 3] and found.truncated.tolist() == [False, True]
    assert found.log_probs[0].tolist() == [-0.5, -1.0, 0.0] and found.log_probs[1].isnan().all()


def test_seeds_are_not_negative_and_keep_what_tells_streams_apart():
    streams = torch.tensor([0, 5, -1, -(2**63) + 5, 2**63 - 2])
    assert seeds(streams) == [0, 5, 2**63 - 1, 5, 2**63 - 2]
