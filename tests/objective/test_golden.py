"""The whole objective against the golden mini-batches, in float64 and float32."""

import pytest
import torch

from stapo_lightning.distributed import Ranks
from stapo_lightning.objective import S2T, Clipped, GroupNormalized, KeepAll, SequenceMean, TokenMean, policy_loss
from tests.builders import golden_cases, rollout_batch, score_dense

CASES = golden_cases()
pytestmark = pytest.mark.skipif(not CASES, reason="shared/golden/objective_cases.json is not here")


def _inputs(case, dtype):
    lengths = torch.tensor(case["lengths"])
    tokens = torch.tensor(case["tokens"])
    rewards = torch.tensor(case["rewards"], dtype=dtype).flatten()
    group_ids = torch.arange(len(rewards)) // case["group_size"]
    advantages = GroupNormalized()(rewards, group_ids)
    logits = torch.tensor(case["logits"], dtype=dtype, requires_grad=True)
    old = score_dense(torch.tensor(case["old_logits"], dtype=dtype), tokens, lengths)
    batch = rollout_batch(advantages, lengths, old.log_probs, logits.shape[1], case["group_size"])
    return batch, logits, score_dense(logits, tokens, lengths)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"seed{c['seed']}")
def test_golden(case, dtype, tolerance):
    expect = case["expect"]
    batch, logits, scores = _inputs(case, dtype)
    close = {"atol": tolerance, "rtol": tolerance}

    def expected(name):
        return torch.tensor(expect[name], dtype=dtype)

    torch.testing.assert_close(batch.advantages, expected("advantages").flatten(), **close)
    mask = batch.completion_mask
    torch.testing.assert_close(scores.log_probs.detach()[mask], expected("logprobs")[mask], **close)
    torch.testing.assert_close(scores.entropy[mask], expected("entropy")[mask], **close)

    selection = S2T(case["tau_p"], case["q"])(batch, scores.detach(), Ranks(), 0)
    keep = mask & ~selection.silenced
    assert torch.equal(keep, torch.tensor(expect["keep"]).bool())
    assert int(selection.silenced.sum()) == expect["silenced"]
    if expect["tau_h"] is None:
        assert torch.isnan(selection.tau_h)
    else:
        assert float(selection.tau_h) == pytest.approx(expect["tau_h"], abs=tolerance)

    surrogate = Clipped(case["clip_low"], case["clip_high"])
    for name, kept, aggregation in (
        ("stapo_loss", keep, TokenMean()),
        ("dapo_loss", mask, TokenMean()),
        ("grpo_sequence_mean_loss", mask, SequenceMean()),
    ):
        output = policy_loss(batch, scores.log_probs, aggregation(kept, Ranks()), surrogate)
        assert output.loss.item() == pytest.approx(expect[name], abs=tolerance), name
        assert torch.isfinite(torch.autograd.grad(output.loss, logits, retain_graph=True)[0]).all()


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"seed{c['seed']}")
def test_keep_all_is_dapo(case):
    batch, _, scores = _inputs(case, torch.float64)
    selection = KeepAll()(batch, scores.detach(), Ranks(), 0)
    weights = TokenMean()(batch.completion_mask & ~selection.silenced, Ranks())
    output = policy_loss(batch, scores.log_probs, weights, Clipped(case["clip_low"], case["clip_high"]))
    assert output.loss.item() == pytest.approx(case["expect"]["dapo_loss"], abs=1e-12)
