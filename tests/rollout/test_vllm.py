"""Sampling with vLLM in this process, for real: weights, log-probs, ends, seeds, and whole runs."""

import importlib.util
import math
import os
import re

import pytest
import torch
from lightning import seed_everything
from safetensors.torch import load_file

from stapo_lightning.adapters import LoRA, add_adapter
from stapo_lightning.batch import Completions
from stapo_lightning.data import ArithmeticPrompts
from stapo_lightning.errors import ConfigError, EngineMismatchError
from stapo_lightning.models import backbone, load_causal_lm, output_head
from stapo_lightning.objective import TruncatedImportance
from stapo_lightning.rollout import HFEngine, Sampling, VLLMEngine, Vocabulary
from stapo_lightning.rollout.emitted import Emitted
from stapo_lightning.schedule import ConstantWithWarmup
from stapo_lightning.scoring import score
from stapo_lightning.states import joined
from tests.builders import prompt_batch, rollout_batch, tiny_qwen3
from tests.cli import stapo
from tests.doubles import TINY, Recorder, datamodule, module, parameters, trainer
from tests.wide_heads import save_widened

INSTALLED = importlib.util.find_spec("vllm") is not None
needs_vllm = pytest.mark.skipif(not INSTALLED, reason="vLLM is not installed; .ci/run shows how")

PROMPTS = [[3, 4, 5, 6], [7], [8, 9], [10, 11, 12, 13, 14, 15], [16, 17, 18]]
VOCABULARY = Vocabulary(end_ids=(2,), pad_id=19)
# Float32 on both sides, in other orders of summation: differences are about 2e-6 at most, and 2e-7 in the mean.
MEAN, LARGEST = 1e-6, 1e-5


def _policy(tied: bool = False, **changes):
    """Heads of 32, the smallest that vLLM's CPU kernels know, and room for prompts of several cache blocks of 128."""
    return tiny_qwen3(head_dim=32, max_position_embeddings=512, tie_word_embeddings=tied, **changes)


# An engine that is collected takes the process groups of all others with it.
ALIVE: list[VLLMEngine] = []


def _engine(kind: type[VLLMEngine] = VLLMEngine, **changes) -> VLLMEngine:
    ALIVE.append(kind(**({"kv_cache_gib": 0.05, "enforce_eager": True} | changes)))
    return ALIVE[-1]


@pytest.fixture(scope="module")
def engine():
    """One engine for all the policies of this module's tests that look alike."""
    return _engine()


def _generate(engine, policy, prompts=PROMPTS, group_size=1, streams=None, vocabulary=VOCABULARY, **sampling):
    streams = torch.arange(len(prompts) * group_size) if streams is None else streams
    engine.wake(policy)
    completions = engine.generate(policy, prompt_batch(prompts), streams, Sampling(**sampling), vocabulary)
    engine.sleep()
    return completions


def _emitted(completions):
    return [row[:length] for row, length in zip(completions.ids.tolist(), completions.lengths.tolist(), strict=True)]


def differences(policy, completions: Completions, prompts, group_size, temperature=1.0):
    """|log pi - log pi_engine| of each emitted token."""
    prompt = prompt_batch(prompts)
    batch = rollout_batch(
        torch.ones(len(completions.ids)), completions.lengths, completions.log_probs, group_size=group_size
    )
    batch.prompt_ids = prompt.ids.repeat_interleave(group_size, dim=0)
    batch.prompt_lengths = prompt.lengths.repeat_interleave(group_size)
    batch.completion_ids, batch.temperature = completions.ids, temperature
    with torch.no_grad():
        scores = score(batch, joined(backbone(policy))(batch), output_head(policy), policy.config.vocab_size)
    assert not completions.log_probs[~batch.completion_mask].any()
    return (scores.log_probs - completions.log_probs)[batch.completion_mask].abs()


def update(policy, optimizer, seed):
    """One real step, of the loss of a language model on random tokens."""
    tokens = torch.randint(20, (4, 16), generator=torch.Generator().manual_seed(seed))
    policy(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


# ---- weights --------------------------------------------------------------------------------------------------------


@needs_vllm
@pytest.mark.parametrize("tied", [True, False])
def test_after_three_updates_the_engine_has_the_policys_log_probs(tied):
    policy, engine = _policy(tied), _engine()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.02)
    start = parameters(policy)
    for number in range(4):
        completions = _generate(engine, policy, group_size=4, max_new_tokens=24)
        found = differences(policy, completions, PROMPTS, 4)
        assert found.mean() < MEAN and found.max() < LARGEST, number
        if number == 3:
            break
        before = completions
        update(policy, optimizer, number)
    # The updates were large: the tokens that were likely before are others now.
    assert (parameters(policy) - start).abs().max() > 0.04
    assert differences(policy, before, PROMPTS, 4).mean() > 0.1


@needs_vllm
@pytest.mark.parametrize("tied", [True, False])
def test_an_adapter_reaches_the_engine_merged(tied):
    pytest.importorskip("peft", reason='the extra "lora" is not installed')
    policy, engine = add_adapter(_policy(tied), LoRA(rank=4), "base"), _engine()
    frozen = {name: weight.clone() for name, weight in policy.named_parameters() if not weight.requires_grad}
    optimizer = torch.optim.AdamW([weight for weight in policy.parameters() if weight.requires_grad], lr=0.05)
    before = _generate(engine, policy, group_size=4, max_new_tokens=24)
    for number in range(3):
        update(policy, optimizer, number)
    completions = _generate(engine, policy, group_size=4, max_new_tokens=24)
    found = differences(policy, completions, PROMPTS, 4)
    # W + s B A is rounded once, where the policy adds two products.
    assert found.mean() < 10 * MEAN and found.max() < 10 * LARGEST
    assert differences(policy, before, PROMPTS, 4).mean() > 0.1
    assert all(torch.equal(weight, policy.get_parameter(name)) for name, weight in frozen.items())


class WithoutTheHead(VLLMEngine):
    """Syncs what named_parameters() holds, in which a tied head is not named."""

    def _take_weights(self, policy) -> None:
        weights = ((name, parameter.detach()) for name, parameter in policy.named_parameters())
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        self._llm.reset_prefix_cache()


@needs_vllm
@pytest.mark.parametrize("tied", [True, False])
def test_a_head_that_is_not_named_is_stale_where_it_is_tied(tied):
    # What makes naming it necessary: vLLM's CPU kernels multiply by weights that they packed at loading, and a head
    # that is not reloaded is not packed again, although the embedding whose tensor it shares is new.
    policy = _policy(tied)
    completions = _generate(_engine(WithoutTheHead), policy, max_new_tokens=24)
    assert bool(differences(policy, completions, PROMPTS, 1).mean() > 0.1) == tied


@needs_vllm
def test_the_prefix_cache_forgets_what_older_weights_computed(engine):
    policy = _policy()
    long = [[3 + i % 13 for i in range(300)]]  # two whole blocks of 128 are kept
    _generate(engine, policy, long, 2, max_new_tokens=8)
    update(policy, torch.optim.SGD(policy.parameters(), lr=1.0), 0)
    completions = _generate(engine, policy, long, 2, max_new_tokens=8)
    assert differences(policy, completions, long, 2).max() < LARGEST


@needs_vllm
def test_the_engine_starts_in_a_validation_and_goes_on_under_autocast(engine):
    # Lightning validates in inference mode, and samples inside the autocast of its precision.
    policy, fresh = _policy(), _engine()
    with torch.inference_mode():
        _generate(fresh, policy, max_new_tokens=4)
    with torch.autocast("cpu", torch.bfloat16):
        completions = _generate(fresh, policy, group_size=4, max_new_tokens=24)
    assert differences(policy, completions, PROMPTS, 4).max() < LARGEST
    assert policy.training and all(p.requires_grad for p in policy.parameters())


@needs_vllm
def test_starting_the_engine_leaves_generators_and_environment_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    environment = dict(os.environ)
    fresh, policy = _engine(), _policy()
    fresh._llm = fresh._create(policy)
    assert torch.equal(torch.rand(3), expected)
    changed = {name for name in os.environ if environment.get(name) != os.environ[name]} | (
        environment.keys() - os.environ.keys()
    )
    assert not changed & {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}


# ---- log-probs and draws --------------------------------------------------------------------------------------------


@needs_vllm
@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.6])
def test_log_probs_are_at_the_temperature(temperature, engine):
    policy = _policy()
    completions = _generate(engine, policy, group_size=4, temperature=temperature, max_new_tokens=24)
    found = differences(policy, completions, PROMPTS, 4, temperature)
    assert found.mean() < MEAN and found.max() < LARGEST
    assert completions.log_probs.min() < math.log(0.02)
    assert completions.entropy is None and completions.collision is None


@needs_vllm
@pytest.mark.parametrize("cut", [{"top_p": 0.6}, {"top_k": 3}])
def test_log_probs_after_a_cut_are_not_taken_for_those_before(cut, engine):
    completions = _generate(engine, _policy(), group_size=4, max_new_tokens=8, **cut)
    mask = torch.arange(completions.ids.shape[1]) < completions.lengths[:, None]
    assert completions.log_probs[mask].isnan().all() and not completions.log_probs[~mask].any()


@needs_vllm
@pytest.mark.parametrize(("cut", "kept"), [({"top_k": 3}, 3), ({"top_p": 0.6}, None)])
def test_cuts_are_those_of_the_other_engine(cut, kept, engine):
    policy, draws = _policy(), 300
    first = {}
    for name, sampler in (("vllm", engine), ("hf", HFEngine())):
        first[name] = _generate(sampler, policy, [[3, 4, 5, 6]], draws, max_new_tokens=1, **cut).ids[:, 0].tolist()
    # 300 draws miss none of the few tokens that are left: the rarest has more than 5 %.
    assert set(first["vllm"]) == set(first["hf"])
    assert kept is None or len(set(first["vllm"])) == kept


@needs_vllm
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_first_tokens_have_the_frequencies_of_the_softmax(temperature, engine):
    policy, draws = _policy(), 4000
    tokens = _generate(engine, policy, [[3, 4, 5, 6]], draws, temperature=temperature, max_new_tokens=1).ids[:, 0]
    with torch.no_grad():
        logits = policy(torch.tensor([[3, 4, 5, 6]])).logits[0, -1].double()
    expected = draws * torch.softmax(logits / temperature, -1)
    common = expected > 5
    observed = torch.bincount(tokens, minlength=20).double()
    # Rare tokens are one class together. 43.8 is passed once in a thousand with 19 degrees of freedom, less with fewer.
    observed = torch.cat([observed[common], observed[~common].sum()[None]])
    expected = torch.cat([expected[common], expected[~common].sum()[None].clamp(min=1e-9)])
    assert len(expected) >= 8 and ((observed - expected) ** 2 / expected.clamp(min=1)).sum() < 43.8


# ---- ends -----------------------------------------------------------------------------------------------------------


@needs_vllm
@pytest.mark.parametrize("end_ids", [(2,), (2, 6), (99 % 20, 7, 11)])
def test_greedy_completions_end_where_those_of_the_other_engine_end(end_ids, engine):
    policy, vocabulary = _policy(seed=1), Vocabulary(end_ids, pad_id=0)
    found = _generate(engine, policy, vocabulary=vocabulary, temperature=0, max_new_tokens=30)
    expected = _generate(HFEngine(), policy, vocabulary=vocabulary, temperature=0, max_new_tokens=30)
    for name in ("ids", "lengths", "truncated"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    torch.testing.assert_close(found.log_probs, expected.log_probs, atol=LARGEST, rtol=0)


@needs_vllm
def test_ends_in_sampled_completions(engine):
    vocabulary = Vocabulary((2, 6), pad_id=19)
    completions = _generate(engine, _policy(), group_size=40, vocabulary=vocabulary, max_new_tokens=6)
    lasts = set()
    for row, truncated in zip(_emitted(completions), completions.truncated.tolist(), strict=True):
        assert not {2, 6} & set(row[:-1])
        assert truncated == (row[-1] not in (2, 6))
        assert not truncated or len(row) == 6
        lasts.add((row[-1] if not truncated else None, len(row) == 6))
    # Each end token ends some, and some end with the last token that is allowed, which is no truncation.
    assert {2, 6, None} == {last for last, _ in lasts}
    assert {(2, True), (6, True)} & lasts


@needs_vllm
def test_completions_of_a_prompt_stand_side_by_side(engine):
    policy = _policy()
    whole = _generate(engine, policy, temperature=0, group_size=3, max_new_tokens=5)
    single = _generate(engine, policy, temperature=0, max_new_tokens=5)
    assert _emitted(whole) == [row for row in _emitted(single) for _ in range(3)]


# ---- seeds ----------------------------------------------------------------------------------------------------------


@needs_vllm
def test_streams_decide(engine):
    policy = _policy()
    streams = torch.tensor([5, -1, 2**40 + 3, 9 - 2**63, 5, 17])  # -1 would ask vLLM for no seed at all
    first = _emitted(_generate(engine, policy, [[3, 4]], 6, streams, max_new_tokens=12))
    torch.manual_seed(1)
    assert _emitted(_generate(engine, policy, [[3, 4]], 6, streams, max_new_tokens=12)) == first
    other = _engine()
    assert _emitted(_generate(other, policy, [[3, 4]], 6, streams, max_new_tokens=12)) == first
    assert first[0] == first[4] and len({tuple(row) for row in first}) == 5


# ---- whole runs -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """The shipped policy, whose heads of 16 vLLM's CPU kernels do not know, with heads of 32 that compute the same."""
    return save_widened(TINY, tmp_path_factory.mktemp("wide"))


def _run(folder, wide, engine, **settings):
    recorder = Recorder()
    policy = module(
        **{"policy": wide, "optimizer": lambda p: torch.optim.SGD(p, lr=1.0), "prompts_per_update": 8} | settings
    )
    trainer(folder, max_steps=4, callbacks=[recorder]).fit(policy, datamodule=datamodule(engine=engine))
    return policy, recorder


@needs_vllm
def test_a_run_is_on_policy_and_repeats(wide, tmp_path):
    first, recorder = _run(tmp_path, wide, _engine())
    for metrics in recorder.metrics:
        assert metrics["rollout/logprob_diff_mean"] < MEAN and metrics["rollout/logprob_diff_max"] < 5 * LARGEST
    again, repeated = _run(tmp_path, wide, _engine())
    assert torch.equal(parameters(first.policy), parameters(again.policy))
    for one, two in zip(recorder.batches, repeated.batches, strict=True):
        assert torch.equal(one.completion_ids, two.completion_ids)
        assert torch.equal(one.old_log_probs, two.old_log_probs)
    assert len({int(batch.completion_lengths.sum()) for batch in recorder.batches}) > 1


@needs_vllm
def test_importance_corrects_an_engine_in_bfloat16(wide, tmp_path):
    _, recorder = _run(tmp_path, wide, _engine(dtype="bfloat16"), importance=TruncatedImportance())
    for metrics in recorder.metrics:
        assert 1e-4 < metrics["rollout/logprob_diff_mean"] < 0.05
        # The mean of pi_old / pi_engine over samples of the engine is 1.
        assert metrics["rollout/importance_mean"] == pytest.approx(1, abs=0.02)
        assert metrics["rollout/importance_min"] < 0.99


class Stale(VLLMEngine):
    """Takes the policy's weights once."""

    taken = False

    def _take_weights(self, policy) -> None:
        if not self.taken:
            super()._take_weights(policy)
        self.taken = True


@needs_vllm
def test_a_stale_engine_stops_the_run_after_the_first_update(wide, tmp_path):
    engine = _engine(Stale)
    with pytest.raises(EngineMismatchError, match=r"before update 2: .*stale"):
        _run(tmp_path, wide, engine, optimizer=lambda p: torch.optim.SGD(p, lr=30.0))


@needs_vllm
def test_heads_that_its_cpu_kernels_do_not_know_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"heads are 16 wide, and vLLM's CPU kernels are made for 32, .*HFEngine"):
        _run(tmp_path, TINY, _engine())


def _fit(folder, wide, *flags, timeout=600):
    done = stapo(
        "fit",
        "--config=configs/quickstart.yaml",
        f"--model.policy={wide}",
        "--data.engine=VLLMEngine",
        "--data.engine.enforce_eager=true",
        "--data.engine.kv_cache_gib=0.25",
        f"--trainer.logger.save_dir={folder}",
        "--trainer.logger.version=run",
        *flags,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@needs_vllm
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_ranks_sample_and_update_like_one(strategy, wide, tmp_path):
    flags = ["--trainer.max_steps=2", "--trainer.limit_val_batches=0", "--data.prompts_per_batch=8"]
    flags += ["--model.prompts_per_update=8", "--model.optimizer=torch.optim.SGD", "--model.optimizer.lr=0.1"]
    _fit(tmp_path, wide, "--trainer.devices=2", f"--trainer.strategy={strategy}", *flags)
    two = load_file(tmp_path / "quickstart" / "run" / "policy" / "latest" / "model.safetensors")

    one = module(policy=wide, prompts_per_update=8, max_grad_norm=1.0, schedule=ConstantWithWarmup(10))
    data = datamodule(
        engine=_engine(),
        train_prompts=ArithmeticPrompts("train", 4096),
        group_size=8,
        sampling=Sampling(max_new_tokens=64),
    )
    run = trainer(tmp_path, max_steps=2)
    seed_everything(1, verbose=False)  # as the quickstart does
    run.fit(one, datamodule=data)
    start, found = load_file(f"{wide}/model.safetensors"), one.policy.state_dict()
    assert max((found[name] - start[name]).abs().max() for name in start) > 1e-4
    assert max((found[name] - two[name]).abs().max() for name in start) < 1e-6


def _accuracies(stdout):
    found = re.search(r"val/arithmetic/sampled/avg@4\W+([\d.]+)%\W+([\d.]+)%", stdout)
    return [float(value) for value in found.groups()]


@needs_vllm
def test_a_third_of_the_quickstart_learns(wide, tmp_path):
    # Half of the held-out problems: the standard error of an accuracy is about 2 points.
    flags = ["--trainer.max_steps=100", "--data.val_prompts.size=128"]
    before, after = _accuracies(_fit(tmp_path, wide, *flags, timeout=900))
    assert 35 <= before <= 50
    assert after >= 64  # 70 over all of the problems; HFEngine: 73 and 74 in two runs


@needs_vllm
@pytest.mark.slow
def test_the_quickstart_reaches_the_accuracy_that_it_reaches_with_the_other_engine(wide, tmp_path):
    before, after = _accuracies(_fit(tmp_path, wide, timeout=900))
    assert 35 <= before <= 47
    assert after >= 70


# ---- around vLLM ----------------------------------------------------------------------------------------------------


class Recording:
    """Stands for vLLM's LLM where it can sleep, and notes what is asked of it."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.llm_engine = self.model_config = self
        self.max_model_len = 64
        self.names: list[str] = []

    def wake_up(self, tags) -> None:
        self.calls.append(f"wake {tags[0]}")

    def sleep(self, level) -> None:
        self.calls.append(f"sleep {level}")

    def collective_rpc(self, method, kwargs) -> None:
        self.calls.append(method)
        self.names = [name for name, _ in kwargs["weights_iterator"]]

    def reset_prefix_cache(self) -> None:
        self.calls.append("reset")


class Sleeper(VLLMEngine):
    """Samples nothing, on a platform that sleeps."""

    def _create(self, policy):
        self._sleeps = True
        return Recording()

    def _sample(self, prompts, streams, sampling, vocabulary):
        self._llm.calls.append("sample")
        return [Emitted([2], [0.0], False) for _ in streams]


@needs_vllm
def test_the_engine_sleeps_between_rollouts():
    # Its weights come back only to be overwritten, and its cache only when that is done.
    engine, policy = Sleeper(), _policy(tied=True)
    _generate(engine, policy, max_new_tokens=4)
    start = ["reload_weights", "reset", "sample", "sleep 2"]
    assert engine._llm.calls == start
    _generate(engine, policy, max_new_tokens=4)
    again = ["wake weights", "reload_weights", "reset", "wake kv_cache", "sample", "sleep 2"]
    assert engine._llm.calls == [*start, *again]
    assert "lm_head.weight" in engine._llm.names
    # Two wakes in a row, as of a validation that was cut off, are one.
    del engine._llm.calls[:]
    engine.wake(policy)
    engine.wake(policy)
    assert engine._llm.calls == [*again[:4], "reload_weights", "reset"]


@needs_vllm
def test_an_engine_that_sleeps_does_not_sample():
    engine, policy = Sleeper(), _policy()
    _generate(engine, policy, max_new_tokens=4)
    with pytest.raises(RuntimeError, match=r"wake\(policy\) comes before generate"):
        engine.generate(policy, prompt_batch(PROMPTS), torch.arange(5), Sampling(max_new_tokens=4), VOCABULARY)


@needs_vllm
def test_sequences_over_the_engines_limit_are_refused():
    with pytest.raises(
        ConfigError, match=r"VLLMEngine\.max_model_len=64: prompts of up to 6 tokens and max_new_tokens=59"
    ):
        _generate(Sleeper(), _policy(), max_new_tokens=59)
    _generate(Sleeper(), _policy(), max_new_tokens=58)


@needs_vllm
def test_engine_problems():
    assert VLLMEngine().problems() == []
    found = VLLMEngine(gpu_memory_utilization=1.1, kv_cache_gib=0.0, max_model_len=1, max_sequences=0).problems()
    for text in ("gpu_memory_utilization=1.1", "kv_cache_gib=0.0", "max_model_len=1", "max_sequences=0"):
        assert sum(f"VLLMEngine.{text}:" in problem for problem in found) == 1
    assert len(found) == 4


@pytest.mark.skipif(INSTALLED, reason="vLLM is installed")
def test_a_missing_vllm_is_asked_for_before_anything_runs():
    with pytest.raises(
        ConfigError, match=r'the engine VLLMEngine needs the package vllm: pip install "stapo-lightning\[vllm\]"'
    ):
        VLLMEngine()


def test_widened_heads_compute_the_same(wide):
    narrow, wider = (load_causal_lm(folder, "sdpa") for folder in (TINY, wide))
    ids = torch.randint(94, (4, 40), generator=torch.Generator().manual_seed(0))
    outputs = [model(input_ids=ids, labels=ids) for model in (narrow, wider)]
    # The eps in the norms counts twice as much; logits are up to 9.
    torch.testing.assert_close(outputs[0].logits, outputs[1].logits, atol=1e-4, rtol=0)
    for output in outputs:
        output.loss.backward()
    # The entries that were added do not learn: the two policies stay the same.
    for name, parameter in wider.named_parameters():
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            assert not parameter.grad.view(-1, 32, parameter.shape[1])[:, 1::2].any(), name
    embedding = narrow.get_input_embeddings().weight.grad
    torch.testing.assert_close(wider.get_input_embeddings().weight.grad, embedding, atol=1e-5, rtol=1e-3)
