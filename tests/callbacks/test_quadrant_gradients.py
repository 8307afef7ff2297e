"""Parts of the policy's own gradient by quadrant."""

import pytest
import torch
from lightning.pytorch.loggers import Logger

from callbacks.quadrant_gradients import QuadrantGradients
from stapo_lightning.errors import ConfigError
from stapo_lightning.objective import KeepAll, OneQuadrant, SequenceMean, TokenMean
from stapo_lightning.objective.silencing import positive_tokens
from stapo_lightning.strategy import ShardedStrategy
from tests.doubles import datamodule, module, parameters, trainer

QUADRANTS = [(p, e) for p in ("low", "high") for e in ("low", "high")]
# So many tokens are unlikely, and so low is the threshold, that no quadrant of so small a run is empty.
TAU_P, Q = 0.5, 0.1


class Probe:
    """Looks at a mini-batch as the callback does, and keeps the gradients themselves."""

    def __init__(self, policy):
        self.module = policy
        self.parts = {}

    def __call__(self, batch, scores, selection, update):
        policy = self.module
        self.before = parameters(policy.policy)
        weights = policy.aggregation(batch.completion_mask, policy.ranks)
        self.whole = policy.gradient(batch, weights)
        self.zero = policy.gradient(batch, torch.zeros_like(weights))
        chosen = {"negative": batch.completion_mask & ~positive_tokens(batch)}
        for probability, entropy in QUADRANTS:
            quadrant = OneQuadrant(probability, entropy, TAU_P, Q)(batch, scores, policy.ranks, update)
            chosen[f"{probability}_prob_{entropy}_entropy"] = quadrant.silenced
        self.parts = {name: policy.gradient(batch, weights * tokens) for name, tokens in chosen.items()}
        self.leftovers = [p.grad for p in policy.policy.parameters() if p.grad is not None and p.grad.any()]


class Log(Logger):
    """A logger that keeps what the callback gives it."""

    name, version = "log", "0"

    def __init__(self):
        super().__init__()
        self.values = {}

    def log_metrics(self, metrics, step=None):
        found = {tag: value for tag, value in metrics.items() if tag.startswith("gradients/")}
        if found:
            self.values[step] = found

    def log_hyperparams(self, *_, **__):
        pass


def _run(folder, policy, *callbacks, steps=1):
    log = Log()
    run = trainer(folder, callbacks=list(callbacks), max_steps=steps, logger=log)
    run.fit(policy, datamodule())
    return log.values


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """One update of SGD at rate 0.1, seen by the callback and by the probe."""
    policy = module(selector=KeepAll(), prompts_per_update=8)
    probe = Probe(policy)
    policy.selection_observers.append(probe)
    shares = _run(tmp_path_factory.mktemp("gradients"), policy, QuadrantGradients(TAU_P, Q, every_n_updates=1))
    return policy, probe, shares


def test_the_parts_add_up_to_the_whole(measured):
    _, probe, _ = measured
    for name, part in probe.parts.items():
        assert part.norm() > 1e-3 * probe.whole.norm(), name
    # Every token is in one part, and the gradient is linear in the tokens' weights: float32 rounding alone.
    assert (sum(probe.parts.values()) - probe.whole).abs().max() < 1e-5 * probe.whole.abs().max()
    assert not probe.zero.any()


def test_the_whole_is_the_gradient_that_trains(measured):
    policy, probe, _ = measured
    # SGD: the parameters moved by -0.1 times the gradient of the update.
    moved = (parameters(policy.policy) - probe.before) / -0.1
    assert (moved - probe.whole).abs().max() < 1e-4 * probe.whole.abs().max()
    # Looking left nothing behind that the update would have added to its own.
    assert probe.leftovers == []


def test_shares_are_norms_over_the_norm_of_the_whole(measured):
    _, probe, shares = measured
    expected = {
        f"gradients/{name}/share": float(part.norm() / probe.whole.norm()) for name, part in probe.parts.items()
    }
    assert shares[1] == pytest.approx(expected, rel=1e-5)


def test_the_aggregation_is_the_runs_own(tmp_path):
    shares = []
    for aggregation in (TokenMean(), SequenceMean()):
        policy = module(selector=KeepAll(), prompts_per_update=8, aggregation=aggregation)
        shares.append(_run(tmp_path, policy, QuadrantGradients(TAU_P, Q, every_n_updates=1)))
    token, sequence = (each[1] for each in shares)
    assert token.keys() == sequence.keys()
    assert abs(token["gradients/negative/share"] - sequence["gradients/negative/share"]) > 1e-3


def test_measuring_changes_nothing(tmp_path):
    policies = [module(selector=KeepAll()) for _ in range(2)]
    _run(tmp_path, policies[0], steps=4)
    _run(tmp_path, policies[1], QuadrantGradients(TAU_P, Q, every_n_updates=1), steps=4)
    assert torch.equal(*(parameters(policy.policy) for policy in policies))


def test_only_updates_that_are_due_and_have_a_threshold_are_measured(tmp_path):
    shares = _run(tmp_path, module(), QuadrantGradients(TAU_P, Q, every_n_updates=3), steps=8)
    assert list(shares) == [1, 3, 6]
    # No token has a probability below 1e-30.
    nothing = _run(tmp_path, module(), QuadrantGradients(1e-30, Q, every_n_updates=1), steps=2)
    assert nothing == {}


def test_arguments_out_of_range_come_together(tmp_path):
    with pytest.raises(ConfigError) as error:
        _run(tmp_path, module(), QuadrantGradients(tau_p=0.0, q=1.5, every_n_updates=0))
    for name in ("tau_p=0.0", "q=1.5", "every_n_updates=0"):
        assert f"QuadrantGradients.{name}" in str(error.value)


def test_sharded_policies_are_refused(tmp_path):
    sharded = trainer(tmp_path, strategy=ShardedStrategy())
    with pytest.raises(ConfigError, match=r"not with trainer\.strategy=fsdp2.*callbacks\.Quadrants"):
        QuadrantGradients().setup(sharded, module(), "fit")
