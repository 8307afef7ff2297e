"""The optimiser step: what must not change it, what must be skipped, what must be checked first."""

import copy
import math

import lightning as L
import pytest
import torch

from stapo_lightning.batch import RolloutBatch, UpdateRecord
from stapo_lightning.data import ArithmeticPrompts
from stapo_lightning.errors import ConfigError, EngineMismatchError, NonFiniteError, RewardError
from stapo_lightning.models import load_causal_lm
from stapo_lightning.objective import S2T, RandomCandidates, SequenceMean, Surrogate, TokenMean, TruncatedImportance
from stapo_lightning.objective.surrogate import SurrogateOutput
from stapo_lightning.rewards import BoxedMatch, Reward
from stapo_lightning.rollout import Sampling
from tests.doubles import Recorder, datamodule, module, parameters, trainer


class Replay(L.LightningDataModule):
    """Gives the module one ready RolloutBatch."""

    def __init__(self, batch: RolloutBatch) -> None:
        super().__init__()
        self.batch = batch
        self.prompts_per_batch = len(batch) // batch.group_size
        self.group_size = batch.group_size
        self.max_prompt_tokens = 32
        self.sampling = Sampling(max_new_tokens=40)

    def problems(self, world_size: int) -> list[str]:
        return []

    def samplings(self, stage: str) -> list[tuple[str, Sampling]]:
        return [("data.sampling", self.sampling)]

    def train_dataloader(self):
        return torch.utils.data.DataLoader([0])

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return self.batch


@pytest.fixture(scope="module")
def rollout(tmp_path_factory):
    """A real rollout batch of 8 prompts x 4 completions, off-policy by a little so that ratios differ from 1."""
    recorder = Recorder()
    run = trainer(tmp_path_factory.mktemp("rollout"), max_steps=2, callbacks=[recorder])
    run.fit(module(), datamodule=datamodule())
    batch = recorder.batches[0]
    assert (batch.advantages > 0).any()
    noise = torch.rand(batch.old_log_probs.shape, generator=torch.Generator().manual_seed(0)) - 0.5
    batch.old_log_probs = torch.where(batch.completion_mask, batch.old_log_probs + 0.5 * noise, 0.0)
    batch.old_entropy = batch.old_collision = None  # what the engine recorded is true of the policy that sampled only
    return batch


def update(
    folder, batch: RolloutBatch, callbacks=(), **settings
) -> tuple[torch.Tensor, UpdateRecord, dict[str, float]]:
    """The change of all parameters (SGD: 10 times the gradient), the record and the metrics of one update."""
    recorder = Recorder()
    # A large rate, so that the parameters' own rounding (6e-8 below 1) does not hide the gradient's.
    settings = {"optimizer": lambda params: torch.optim.SGD(params, lr=10.0)} | settings
    # The old log-probs of these tests are not those of the policy.
    settings = {"max_logprob_diff": math.inf, "selector": S2T(tau_p=0.05)} | settings
    settings = {"prompts_per_update": len(batch) // batch.group_size} | settings
    policy = module(**settings)
    before = parameters(load_causal_lm(policy.policy_name, "sdpa"))
    run = trainer(folder, max_steps=1, callbacks=[recorder, *callbacks])
    run.fit(policy, datamodule=Replay(copy.deepcopy(batch)))
    return parameters(policy.policy) - before, recorder.records[0], recorder.metrics[0]


@pytest.fixture(scope="module")
def reference(rollout, tmp_path_factory):
    change, record, metrics = update(tmp_path_factory.mktemp("reference"), rollout, tokens_per_micro_batch=100_000)
    assert record.silenced.sum() > 0
    assert record.clipped.sum() > 0
    assert change.abs().max() > 1e-1
    return change, record, metrics


def assert_same_update(change, reference):
    # float32 rounding of sums in another order.
    assert (change - reference).abs().max() <= 2e-6 * reference.abs().max()


@pytest.mark.parametrize("budget", [40, 333, 1000])
def test_micro_batch_budget_does_not_change_the_update(budget, rollout, reference, tmp_path):
    change, record, metrics = update(tmp_path, rollout, tokens_per_micro_batch=budget)
    assert_same_update(change, reference[0])
    assert torch.equal(record.silenced, reference[1].silenced)
    for tag in ("policy/loss", "policy/entropy", "s2t/grad_share", "policy/clip_fraction_high", "policy/grad_norm"):
        assert metrics[tag] == pytest.approx(reference[2][tag], rel=1e-4, abs=1e-7), tag


def test_padding_width_does_not_change_the_update(rollout, reference, tmp_path):
    wide = copy.deepcopy(rollout)
    for name, value in (("completion_ids", 7), ("old_log_probs", -50.0), ("prompt_ids", 9)):
        setattr(wide, name, torch.nn.functional.pad(getattr(wide, name), (0, 13), value=value))
    assert_same_update(update(tmp_path, wide)[0], reference[0])


@pytest.mark.parametrize("settings", [{}, {"selector": RandomCandidates(tau_p=0.05)}, {"aggregation": SequenceMean()}])
def test_order_inside_a_group_does_not_change_the_update(settings, rollout, tmp_path):
    # Rows 3, 2, 1, 0 of each group of four.
    order = torch.arange(len(rollout)).view(-1, 4).flip(1).flatten()
    straight = update(tmp_path, rollout, **settings)
    flipped = update(tmp_path, rollout.rows(order), **settings)
    assert_same_update(flipped[0], straight[0])
    assert torch.equal(flipped[1].silenced, straight[1].silenced[order])


def test_scores_in_one_pass_equal_those_in_many(rollout, reference, tmp_path):
    # Many micro-batches score in a separate pass without gradient; one micro-batch reuses the forward of the update.
    record = update(tmp_path, rollout, tokens_per_micro_batch=200)[1]
    torch.testing.assert_close(record.scores.log_probs, reference[1].scores.log_probs, atol=1e-5, rtol=0)
    torch.testing.assert_close(record.scores.entropy, reference[1].scores.entropy, atol=1e-5, rtol=0)


@pytest.mark.parametrize("budget", [333, 100_000])
def test_sharing_prompts_changes_what_is_computed_and_not_the_update(budget, rollout, reference, tmp_path):
    tokens = {}
    for share in (False, True):
        counts = CountsForwards()
        settings = {"share_prompts": share, "tokens_per_micro_batch": budget}
        change, record, _ = update(tmp_path, rollout, callbacks=[counts], **settings)
        assert_same_update(change, reference[0])
        assert torch.equal(record.silenced, reference[1].silenced)
        tokens[share] = counts.tokens[True]
    assert tokens[True] < 0.9 * tokens[False]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("budget", [333, 100_000])
def test_packing_does_not_change_the_update(attention, budget, rollout, reference, tmp_path):
    counts = CountsForwards()
    change, record, _ = update(
        tmp_path, rollout, callbacks=[counts], packing=True, attention=attention, tokens_per_micro_batch=budget
    )
    assert_same_update(change, reference[0])
    assert torch.equal(record.silenced, reference[1].silenced)
    # Every token once with gradient, and no padding.
    moving = rollout.advantages != 0
    assert counts.tokens[True] == int(rollout.sequence_lengths[moving].sum())


def test_packing_follows_the_attention():
    assert module(attention="flash_attention_2").packing
    assert not module().packing
    assert not module(attention="flash_attention_2", packing=False).packing


def test_activation_checkpointing_computes_layers_again_and_changes_nothing_else(rollout, reference, tmp_path):
    class CountsLayers(L.Callback):
        calls = 0

        def on_train_start(self, trainer, pl_module) -> None:
            pl_module.policy.model.layers[0].mlp.register_forward_pre_hook(self._count)

        def _count(self, *_) -> None:
            self.calls += torch.is_grad_enabled()

    calls = {}
    for checkpointing in (False, True):
        counter = CountsLayers()
        settings = {"activation_checkpointing": checkpointing, "share_prompts": False}
        change = update(tmp_path, rollout, callbacks=[counter], **settings)[0]
        assert_same_update(change, reference[0])
        calls[checkpointing] = counter.calls
    assert calls == {False: 1, True: 2}


def test_a_compiled_policy_makes_the_same_update(rollout, reference, tmp_path):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    change, record, _ = update(tmp_path, rollout, compile=True)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    # Fused kernels round differently.
    assert (change - reference[0]).abs().max() <= 1e-4 * reference[0].abs().max()
    assert torch.equal(record.silenced, reference[1].silenced)


def test_a_sequence_over_the_budget_is_warned_about_once(rollout, tmp_path):
    with pytest.warns(UserWarning, match=r"is over model\.tokens_per_micro_batch=20: it goes alone") as warned:
        update(tmp_path, rollout, tokens_per_micro_batch=20)
    assert len([w for w in warned if "tokens_per_micro_batch" in str(w.message)]) == 1


def _all_moving(rollout):
    batch = copy.deepcopy(rollout)
    batch.advantages = torch.where(batch.advantages == 0, 0.3, batch.advantages)
    return batch


def _with_resting_groups(rollout):
    """Two of the eight groups teach nothing."""
    batch = _all_moving(rollout)
    batch.advantages[:4] = 0.0
    batch.advantages[12:16] = 0.0
    return batch


class CountsForwards(L.Callback):
    """Counts the rows that go through the policy, with and without gradient."""

    def __init__(self) -> None:
        self.rows = {True: 0, False: 0}
        self.tokens = {True: 0, False: 0}

    def on_train_start(self, trainer, pl_module) -> None:
        pl_module.policy.base_model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, module, args, kwargs) -> None:
        self.rows[torch.is_grad_enabled()] += len(kwargs["input_ids"])
        self.tokens[torch.is_grad_enabled()] += kwargs["input_ids"].numel()


@pytest.mark.parametrize(("budget", "with_gradient", "without"), [(100_000, 24, 8), (333, 24, 32)])
def test_rows_without_advantage_go_through_without_gradient(budget, with_gradient, without, rollout, tmp_path):
    # 32 rows, 8 of them without advantage. One pass: 24 are scored by the forward that trains them, 8 beside it.
    # Many passes: all 32 are scored first.
    counts = CountsForwards()
    settings = {"tokens_per_micro_batch": budget, "share_prompts": False}
    update(tmp_path, _with_resting_groups(rollout), callbacks=[counts], **settings)
    assert counts.rows == {True: with_gradient, False: without}


@pytest.mark.parametrize("budget", [100_000, 333])
def test_rows_without_advantage_still_count(budget, rollout, tmp_path):
    # A surrogate whose loss does not vanish at A = 0 would differ; the paper's are linear in A. The reference keeps all
    # rows in the gradient's passes by a KL of weight 1e-30, which leaves no trace in float32.
    batch = _with_resting_groups(rollout)
    change, record, metrics = update(tmp_path, batch, tokens_per_micro_batch=budget)
    whole, whole_record, whole_metrics = update(tmp_path, batch, tokens_per_micro_batch=budget, kl_coef=1e-30)
    assert_same_update(change, whole)
    torch.testing.assert_close(record.ratio, whole_record.ratio, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(record.scores.entropy, whole_record.scores.entropy, atol=1e-5, rtol=0)
    assert torch.equal(record.silenced, whole_record.silenced)
    for tag in ("policy/loss", "policy/entropy", "s2t/grad_share", "policy/clip_fraction_high", "policy/ppo_kl"):
        assert metrics[tag] == pytest.approx(whole_metrics[tag], rel=1e-4, abs=1e-7), tag


def _recorded(batch, record):
    """The batch as an engine gives it that records its scores: on-policy, as at the first update of a rollout."""
    batch = copy.deepcopy(batch)
    batch.old_log_probs = record.scores.log_probs.clone()
    batch.old_entropy, batch.old_collision = record.scores.entropy.clone(), record.scores.collision.clone()
    return batch


@pytest.mark.parametrize("budget", [100_000, 333])
def test_recorded_scores_take_the_place_of_the_scoring_pass(budget, rollout, reference, tmp_path):
    batch = _recorded(_with_resting_groups(rollout), reference[1])
    counts = CountsForwards()
    settings = {"tokens_per_micro_batch": budget, "share_prompts": False}
    change, record, metrics = update(tmp_path, batch, callbacks=[counts], **settings)
    assert counts.rows == {True: 24, False: 0}  # nothing is scored, and rows without advantage are not even read

    unrecorded = copy.deepcopy(batch)
    unrecorded.old_entropy = unrecorded.old_collision = None
    expected, expected_record, expected_metrics = update(tmp_path, unrecorded, tokens_per_micro_batch=budget)
    assert_same_update(change, expected)
    assert torch.equal(record.silenced, expected_record.silenced)
    for tag in ("policy/entropy", "s2t/grad_share", "s2t/tau_h"):
        assert metrics[tag] == pytest.approx(expected_metrics[tag], rel=1e-4), tag
    assert metrics["rollout/logprob_diff_max"] < 1e-5


def test_a_stale_engine_is_still_seen_where_it_recorded_its_scores(rollout, reference, tmp_path):
    batch = _recorded(_all_moving(rollout), reference[1])
    batch.old_log_probs -= 0.5 * batch.completion_mask
    metrics = update(tmp_path, batch)[2]
    assert metrics["rollout/logprob_diff_mean"] == pytest.approx(0.5, abs=1e-3)


def test_recorded_scores_serve_the_first_update_of_a_rollout_only(rollout, reference, tmp_path):
    counts = CountsForwards()
    batch = _recorded(_all_moving(rollout), reference[1])
    run = trainer(tmp_path, max_steps=2, callbacks=[counts])
    run.fit(module(prompts_per_update=4, tokens_per_micro_batch=333, share_prompts=False), datamodule=Replay(batch))
    # 16 rows an update; the second scores its 16 before it trains them.
    assert counts.rows == {True: 32, False: 16}


# ---- an engine that is not the policy -------------------------------------------------------------------------------


def _by_an_engine(rollout, reference):
    """The batch as an engine gives it whose log-probs lie up to 1 nat off the policy's, and the policy's own."""
    batch = _with_resting_groups(rollout)
    noise = torch.rand(batch.old_log_probs.shape, generator=torch.Generator().manual_seed(1)) * 2 - 1
    policys = reference[1].scores.log_probs
    batch.old_log_probs = (policys + noise).masked_fill(~batch.completion_mask, 0.0)
    return batch, policys


class WeightedTokens(TokenMean):
    """The token mean with a factor for each token."""

    def __init__(self, factors) -> None:
        self.factors = factors

    def __call__(self, keep, ranks):
        return super().__call__(keep, ranks) * self.factors


@pytest.mark.parametrize("budget", [100_000, 333])
def test_importance_multiplies_each_tokens_loss(budget, rollout, reference, tmp_path):
    # w = min(pi_old / pi_engine, 1.5), with |log w| up to 1; the ratio that is clipped is 1, as the policy is pi_old.
    batch, policys = _by_an_engine(rollout, reference)
    settings = dict(importance=TruncatedImportance(1.5), tokens_per_micro_batch=budget)
    change, record, metrics = update(tmp_path, batch, **settings)

    weights = (policys - batch.old_log_probs).exp().clamp(max=1.5).masked_fill(~batch.completion_mask, 1.0)
    plain = copy.deepcopy(batch)
    plain.old_log_probs = policys
    expected, expected_record, _ = update(tmp_path, plain, aggregation=WeightedTokens(weights))
    assert_same_update(change, expected)
    assert torch.equal(record.silenced, expected_record.silenced)
    assert record.log_ratio.abs().max() < 1e-5 and not record.clipped.any()
    assert (change - update(tmp_path, plain)[0]).abs().max() > 1e-2 * change.abs().max()

    mask = batch.completion_mask
    assert metrics["rollout/importance_mean"] == pytest.approx(weights[mask].mean().item(), rel=1e-5)
    assert metrics["rollout/importance_min"] == pytest.approx(weights[mask].min().item(), rel=1e-4)
    assert metrics["rollout/importance_truncated_fraction"] == pytest.approx(
        (weights[mask] == 1.5).double().mean().item(), abs=1e-3
    )
    # Noise that is uniform in [-1, 1] has mean size 0.5.
    assert metrics["rollout/logprob_diff_mean"] == pytest.approx(0.5, abs=0.03)


def test_importance_takes_the_old_policy_before_the_first_update_of_the_rollout(rollout, reference, tmp_path):
    batch, policys = _by_an_engine(rollout, reference)
    recorder, counts = Recorder(), CountsForwards()
    run = trainer(tmp_path, max_steps=2, callbacks=[recorder, counts])
    policy = module(importance=TruncatedImportance(), max_logprob_diff=math.inf, share_prompts=False)
    run.fit(policy, datamodule=Replay(copy.deepcopy(batch)))
    (record,) = recorder.records
    assert record.log_ratio[:16].abs().max() < 1e-5
    # The second update meets a policy that has moved from where the rollout was scored, not from the engine.
    moved = (record.scores.log_probs - policys).masked_fill(~batch.completion_mask, 0.0)[16:]
    assert moved.abs().max() > 1e-4
    torch.testing.assert_close(record.log_ratio[16:], moved, atol=1e-5, rtol=0)
    # 32 rows before the first update, to which the 8 resting ones belong; those of the second are scored as they train.
    assert counts.rows == {True: 24, False: 32}


def test_an_engine_that_agrees_is_not_corrected(rollout, reference, tmp_path):
    batch = _recorded(_all_moving(rollout), reference[1])
    corrected, _, metrics = update(tmp_path, batch, importance=TruncatedImportance())
    assert_same_update(corrected, update(tmp_path, batch)[0])
    assert metrics["rollout/importance_mean"] == pytest.approx(1, abs=1e-5)
    assert metrics["rollout/importance_truncated_fraction"] == 0


@pytest.mark.parametrize("importance", [None, TruncatedImportance()])
def test_an_engine_far_from_the_policy_stops_the_run(importance, rollout, reference, tmp_path):
    batch, _ = _by_an_engine(rollout, reference)
    pattern = r"(?s)rollout/logprob_diff_mean=0\.[45].* before update 1: .*model\.max_logprob_diff=0\.3\..*stale"
    with pytest.raises(EngineMismatchError, match=pattern):
        update(tmp_path, batch, importance=importance, max_logprob_diff=0.3)
    update(tmp_path, batch, importance=importance, max_logprob_diff=0.6)


def test_a_log_prob_that_is_no_number_stops_the_run(rollout, reference, tmp_path):
    batch, _ = _by_an_engine(rollout, reference)
    batch.old_log_probs[0, 0] = math.nan
    with pytest.raises(EngineMismatchError, match="logprob_diff_mean=nan"):
        update(tmp_path, batch)


def test_bounds_of_the_mismatch(tmp_path):
    policy = module(max_logprob_diff=0.0, importance=TruncatedImportance(0.5))
    with pytest.raises(ConfigError) as error:
        trainer(tmp_path).fit(policy, datamodule=datamodule())
    assert error.value.problems == [
        "TruncatedImportance.cap=0.5: must be at least 1",
        "model.max_logprob_diff=0.0: must be above 0",
    ]


def test_equal_rewards_leave_the_policy_alone(rollout, tmp_path):
    batch = copy.deepcopy(rollout)
    batch.advantages = torch.zeros_like(batch.advantages)
    change, _, metrics = update(tmp_path, batch)
    assert change.abs().max() == 0
    assert metrics["policy/loss"] == 0
    assert metrics["policy/skipped_steps"] == 0


def test_gradient_norm_is_clipped_over_all_parameters(rollout, reference, tmp_path):
    # SGD with lr 10: the change has 10 times the norm of the clipped gradient.
    change, _, metrics = update(tmp_path, rollout, max_grad_norm=0.01)
    assert change.double().norm().item() == pytest.approx(10 * 0.01, rel=1e-4)
    assert metrics["policy/grad_norm"] == pytest.approx(reference[0].double().norm().item() / 10, rel=1e-4)


def test_grad_share_is_the_exact_share_of_the_squared_logit_gradient(rollout, reference):
    _, record, metrics = reference
    weight = (record.ratio * rollout.advantages[:, None]).masked_fill(record.clipped, 0.0)
    squared = weight.square() * (1 - 2 * record.scores.probs + record.scores.collision) * rollout.completion_mask
    expected = (squared[record.silenced].sum() / squared.sum()).item()
    assert metrics["s2t/grad_share"] == pytest.approx(expected, rel=1e-5)
    assert 0 < expected < 1


class NaNLoss(Surrogate):
    """Breaks the updates whose numbers (from 0) are listed."""

    def __init__(self, broken: set[int]) -> None:
        self.broken = broken
        self.module: L.LightningModule | None = None

    def __call__(self, log_ratio, advantages) -> SurrogateOutput:
        factor = float("nan") if self.module.global_step in self.broken else 1.0
        nothing = torch.zeros_like(log_ratio, dtype=torch.bool)
        return SurrogateOutput(-log_ratio.exp() * advantages * factor, log_ratio.detach().exp(), nothing, nothing)


def test_an_update_that_is_not_finite_is_skipped_and_counted(tmp_path):
    recorder = Recorder()
    policy = module(
        surrogate=NaNLoss({1}),
        prompts_per_update=8,
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1),
    )
    policy.surrogate.module = policy
    seen = []

    class Snapshots(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
            seen.append(parameters(pl_module.policy))

    run = trainer(tmp_path, max_steps=3, callbacks=[recorder, Snapshots()])
    run.fit(policy, datamodule=datamodule())
    assert torch.equal(seen[0], seen[1])  # update 2 changed nothing: no step, no decay, no moment
    assert not torch.equal(seen[1], seen[2])
    assert torch.isfinite(seen[2]).all()
    assert [m["policy/skipped_steps"] for m in recorder.metrics] == [0, 1, 1]
    assert run.global_step == 3


def test_too_many_skipped_updates_stop_the_run_with_advice(tmp_path):
    policy = module(surrogate=NaNLoss({1, 2, 3}), prompts_per_update=8, max_skipped_updates=3)
    policy.surrogate.module = policy
    with pytest.raises(NonFiniteError, match=r"3 updates in a row.*model\.max_skipped_updates=3.*learning rate"):
        trainer(tmp_path, max_steps=10).fit(policy, datamodule=datamodule())


def test_the_module_leaves_the_policy_in_train_mode_without_dropout(tmp_path):
    policy = module()
    trainer(tmp_path, max_steps=2).fit(policy, datamodule=datamodule())
    assert policy.policy.training
    assert {layer.self_attn.attention_dropout for layer in policy.policy.model.layers} == {0.0}


def test_the_reference_is_loaded_only_when_used_and_never_saved(tmp_path):
    plain, penalised, watched = module(), module(kl_coef=0.1), module(log_kl=True)
    metrics = {}
    for name, policy in (("plain", plain), ("penalised", penalised), ("watched", watched)):
        recorder = Recorder()
        run = trainer(tmp_path, max_steps=4, callbacks=[recorder])
        run.fit(policy, datamodule=datamodule())
        run.save_checkpoint(tmp_path / f"{name}.ckpt")
        metrics[name] = recorder.metrics[-1]
    assert not plain.reference
    assert "policy/kl_ref" not in metrics["plain"]
    assert metrics["penalised"]["policy/kl_ref"] > 0
    assert metrics["watched"]["policy/kl_ref"] > 0
    keys = [set(torch.load(tmp_path / f"{name}.ckpt")["state_dict"]) for name in metrics]
    assert keys[0] == keys[1] == keys[2]
    # The penalty acts; watching alone does not.
    assert torch.equal(parameters(plain.policy), parameters(watched.policy))
    assert not torch.equal(parameters(plain.policy), parameters(penalised.policy))


def test_rollouts_are_on_policy_and_every_update_is_recorded(tmp_path):
    recorder = Recorder()
    run = trainer(tmp_path, max_steps=6, callbacks=[recorder])
    run.fit(module(), datamodule=datamodule())
    assert run.global_step == 6
    assert [record.updates for record in recorder.records] == [(1, 2), (3, 4), (5, 6)]
    for batch, record, metrics in zip(recorder.batches, recorder.records, recorder.metrics, strict=True):
        first = slice(
            0, 16
        )  # the rows of the rollout's first update: the policy that sampled is the one that is scored
        difference = (record.scores.log_probs - batch.old_log_probs)[first].abs().max().item()
        assert difference < 1e-5
        assert "reward/mean" in metrics
        later = (record.scores.log_probs - batch.old_log_probs)[16:].abs().max().item()
        assert later > 1e-4  # the second update sees a policy that has moved


class OneFloat(Reward):
    """Breaks the contract."""

    def __call__(self, completions):
        return [1.0]


def test_a_reward_of_the_wrong_shape_stops_the_run(tmp_path):
    with pytest.raises(RewardError, match=r"OneFloat returned 1 values for 32 completions"):
        trainer(tmp_path).fit(module(), datamodule=datamodule(reward=OneFloat()))


class Sometimes(Reward):
    """No verdict for every fourth completion."""

    def __call__(self, completions):
        return [None if i % 4 == 3 else float(i % 4 == 0) for i in range(len(completions))]


def test_rows_without_a_reward_do_not_train(tmp_path):
    recorder = Recorder()
    trainer(tmp_path, callbacks=[recorder]).fit(module(), datamodule=datamodule(reward=Sometimes()))
    batch = recorder.batches[0]
    assert recorder.metrics[0]["reward/errors"] == 8  # one in each of eight groups
    # Valid rewards of a group: 1, 0, 0. Mean 1/3, sample std sqrt(((2/3)^2 + 2 (1/3)^2) / 2) = 0.57735.
    assert batch.advantages[:4].tolist() == pytest.approx([1.1547, -0.57735, -0.57735, 0.0], abs=1e-4)
    assert recorder.metrics[0]["reward/mean"] == pytest.approx(1 / 3)


def test_one_error_lists_every_problem(tmp_path):
    data = datamodule(
        group_size=1,
        prompts_per_batch=10,
        sampling=Sampling(top_p=0.9, max_new_tokens=0),
        train_prompts=ArithmeticPrompts("train", 40, min_steps=20, max_steps=20),
    )
    policy = module(prompts_per_update=4, kl_coef=-1.0)
    with pytest.raises(ConfigError) as caught:
        trainer(tmp_path).fit(policy, datamodule=data)
    assert policy.policy is None  # no weights were loaded
    text = str(caught.value)
    for expected in (
        "7 problems",
        "data.group_size=1: must be at least 2",
        "model.prompts_per_update=4 does not divide data.prompts_per_batch=10",
        "data.sampling.top_p=0.9",
        "data.sampling.max_new_tokens=0: must be at least 1",
        "prompts are longer than data.max_prompt_tokens=32, the longest has 64 tokens",
        "model.kl_coef=-1.0: must be at least 0",
    ):
        assert expected in text, text


def test_a_policy_is_not_asked_for_more_tokens_than_it_has_positions_for(tmp_path):
    with pytest.raises(ConfigError, match=r"32 plus data\.sampling\.max_new_tokens=300 make 332 tokens.*at most 256"):
        trainer(tmp_path).fit(module(), datamodule=datamodule(sampling=Sampling(max_new_tokens=300)))


@pytest.mark.parametrize(
    ("stage", "option"), [("fit", "train_prompts"), ("test", "test_prompts"), ("predict", "predict_prompts")]
)
def test_a_stage_without_prompts_names_the_option(stage, option, tmp_path):
    data = datamodule(train_prompts=None)
    with pytest.raises(ConfigError, match=rf"data\.{option} is not set: `stapo {stage}` has no prompts"):
        getattr(trainer(tmp_path), stage)(module(), datamodule=data)


def test_a_datamodule_is_needed(tmp_path):
    with pytest.raises(ConfigError, match="no datamodule"):
        trainer(tmp_path).fit(module(), train_dataloaders=torch.utils.data.DataLoader([0]))


def test_validation_counts_held_out_prompts(tmp_path):
    policy = module()
    run = trainer(tmp_path, limit_val_batches=1.0)
    (results,) = run.validate(policy, datamodule=datamodule(reward=BoxedMatch()), verbose=False)
    assert results == {k: pytest.approx(v, abs=1e-6) for k, v in policy.eval_results.items()}
    greedy, sampled = "val/arithmetic/greedy", "val/arithmetic/sampled"
    assert set(results) >= {f"{greedy}/avg@1", f"{sampled}/avg@2", f"{sampled}/pass@1", f"{sampled}/maj@2"}
    # 12 prompts: greedy accuracy is a twelfth's multiple, and the shipped policy is right on most of them.
    assert results[f"{greedy}/avg@1"] * 12 == pytest.approx(round(results[f"{greedy}/avg@1"] * 12))
    assert results[f"{greedy}/avg@1"] > 0.7
    assert results[f"{sampled}/pass@1"] == pytest.approx(results[f"{sampled}/avg@2"])
    assert results[f"{sampled}/pass@2"] >= results[f"{sampled}/pass@1"]


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_bfloat16_trains_close_to_float32(precision, tmp_path):
    metrics = {}
    for name in ("32-true", precision):
        recorder = Recorder()
        run = trainer(tmp_path, max_steps=2, precision=name, callbacks=[recorder])
        run.fit(module(), datamodule=datamodule())
        metrics[name] = recorder.metrics[-1]
        assert recorder.records[0].scores.log_probs.dtype == torch.float32  # log-softmax is never taken in bfloat16
    # bfloat16 keeps 8 bits: log-probs differ by about 1 %, and other tokens may be drawn.
    assert metrics[precision]["policy/entropy"] == pytest.approx(metrics["32-true"]["policy/entropy"], rel=0.25)
    assert metrics[precision]["rollout/logprob_diff_mean"] < 0.05
    assert metrics[precision]["policy/skipped_steps"] == 0


def test_the_second_update_of_a_rollout_sees_the_first_under_autocast(tmp_path):
    moved = {}
    for precision in ("32-true", "bf16-mixed"):
        recorder = Recorder()
        run = trainer(tmp_path, max_steps=2, precision=precision, callbacks=[recorder])
        run.fit(module(optimizer=lambda params: torch.optim.SGD(params, lr=1.0)), datamodule=datamodule())
        # 8 prompts of 4 completions in two updates: the last 16 rows meet a policy that is one update ahead.
        moved[precision] = [float(rows.log().abs().mean()) for rows in recorder.records[0].ratio.split(16)]
    assert moved["32-true"][1] > 5 * moved["bf16-mixed"][0]  # the update stands out from bfloat16's rounding
    assert moved["bf16-mixed"][1] == pytest.approx(moved["32-true"][1], rel=0.5)


def test_float16_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"trainer\.precision=16-true.*bf16-mixed"):
        trainer(tmp_path, precision="16-true").fit(module(), datamodule=datamodule())
