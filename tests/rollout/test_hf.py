"""Sampling with the Hugging Face model itself: the draw, the end of a completion, and the batch around it."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from stapo_lightning.models import backbone, output_head
from stapo_lightning.rollout import HFEngine, Sampling, Vocabulary
from stapo_lightning.rollout.hf import draw, restrict, sample_tokens
from stapo_lightning.scoring import score
from stapo_lightning.states import joined
from tests.builders import prompt_batch, rollout_batch, tiny_qwen3, tiny_qwen3_config

INF = math.inf
VOCABULARY = Vocabulary(end_ids=(2,), pad_id=2)
# Prompts of different lengths.
PROMPTS = [[3, 4, 5, 6], [7], [8, 9], [10, 11, 12, 13, 14, 15], [16, 17, 18]]


class ChainPolicy(nn.Module):
    """A policy that looks at the last token only: `chain` says which token follows, and it follows for sure."""

    def __init__(self, chain: dict[int, int]) -> None:
        super().__init__()
        self.config = tiny_qwen3_config()
        self.logits = nn.Parameter(torch.zeros(20, 20))
        with torch.no_grad():
            for token, following in chain.items():
                self.logits[token, following] = 1e4
        self.rows: list[int] = []

    def forward(self, input_ids, attention_mask, position_ids, past_key_values, use_cache, logits_to_keep):
        self.rows.append(len(input_ids))
        return SimpleNamespace(logits=self.logits[input_ids[:, -logits_to_keep:]])


class ForwardLog:
    """Notes of every forward: rows and columns of the ids, whether in train mode, whether with gradients."""

    def __init__(self, policy: nn.Module) -> None:
        self.shapes: list[tuple[int, int]] = []
        self.modes: set[tuple[bool, bool]] = set()
        policy.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, policy, args, kwargs):
        self.shapes.append(tuple(kwargs["input_ids"].shape))
        self.modes.add((any(m.training for m in policy.modules()), torch.is_grad_enabled()))


def _generate(policy, prompts, group_size=1, streams=None, vocabulary=VOCABULARY, max_sequences=512, **sampling):
    batch = prompt_batch(prompts)
    streams = torch.arange(len(prompts) * group_size) if streams is None else streams
    return HFEngine(max_sequences).generate(policy, batch, streams, Sampling(**sampling), vocabulary)


def _emitted(completions):
    return [row[:length] for row, length in zip(completions.ids.tolist(), completions.lengths.tolist(), strict=True)]


def _rollout(completions, prompts, group_size, temperature):
    """The completions as a batch that `score` reads."""
    prompt = prompt_batch(prompts)
    n = len(completions.ids)
    batch = rollout_batch(torch.ones(n), completions.lengths, completions.log_probs, group_size=group_size)
    batch.prompt_ids = prompt.ids.repeat_interleave(group_size, dim=0)
    batch.prompt_lengths = prompt.lengths.repeat_interleave(group_size)
    batch.completion_ids = completions.ids
    batch.temperature = temperature
    return batch


# ---- one draw -------------------------------------------------------------------------------------------------------


def _double(values):
    return torch.tensor(values, dtype=torch.float64)


def _log(probs):
    return _double(probs).log()


def test_draw_hits_an_improbable_token_at_its_own_interval():
    # Cumulative 0.5, 0.5 + 1e-9, 1: token 1 owns [0.5, 0.5 + 1e-9) and nothing else.
    log_p = _log([0.5, 1e-9, 0.5 - 1e-9]).expand(6, 3)
    uniforms = _double([0.0, 0.5 - 1e-12, 0.5 + 1e-12, 0.5 + 1e-9 - 1e-12, 0.5 + 1e-9 + 1e-12, 1 - 2**-53])
    assert draw(log_p, uniforms).tolist() == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draw_gives_every_token_its_probability(dtype):
    # The measure of uniforms that give token k or one before it, found by bisection, against the softmax in float64.
    probs = torch.cat([torch.tensor([0.7, 0.2]), 10.0 ** -torch.linspace(3, 9, 30)]).double()
    probs = (probs / probs.sum())[torch.randperm(32, generator=torch.Generator().manual_seed(0))]
    log_p = probs.log().to(dtype).expand(31, 32)
    low, high, tokens = torch.zeros(31).double(), torch.ones(31).double(), torch.arange(31)
    for _ in range(60):
        middle = (low + high) / 2
        before = draw(log_p, middle) <= tokens
        low, high = torch.where(before, middle, low), torch.where(before, high, middle)
    widths = torch.diff(torch.cat([torch.zeros(1), high, torch.ones(1)]).double())
    # A float32 logarithm of 1e-9 is good to 1e-6; a float32 running sum would be off by 6e-8, sixty times the token.
    torch.testing.assert_close(widths, probs, rtol=1e-7 if dtype == torch.float64 else 5e-6, atol=1e-15)


@pytest.mark.parametrize("probs", [[0.0, 0.3, 0.0, 0.7, 0.0], [0.0, 0.0, 0.0, 0.0, 1.0], [1.0, 0.0, 0.0, 0.0, 0.0]])
def test_draw_never_gives_an_impossible_token(probs):
    uniforms = torch.cat([_double([0.0, 2**-53, 0.3, 1 - 2**-53]), torch.linspace(0, 1, 999, dtype=torch.float64)[:-1]])
    for log_p in (_log(probs), torch.log_softmax(_log(probs) + 3, -1), _log(probs).float()):
        tokens = draw(log_p.expand(len(uniforms), 5), uniforms)
        assert set(tokens.tolist()) == {i for i, p in enumerate(probs) if p > 0}


def test_draw_from_probabilities_that_do_not_sum_to_one():
    # What top-p leaves: 0.5 and 0.3 of mass 0.8. The border lies at 0.625.
    log_p = _log([0.5, 0.0, 0.3]).expand(3, 3)
    assert draw(log_p, _double([0.624, 0.626, 1 - 2**-53])).tolist() == [0, 2, 2]


SHUFFLED = _log([[0.15, 0.5, 0.05, 0.3], [0.7, 0.05, 0.05 + 1e-6, 0.2 - 1e-6]])


@pytest.mark.parametrize(
    ("top_p", "top_k", "kept"),
    [
        (1.0, 0, [{0, 1, 2, 3}, {0, 1, 2, 3}]),
        (0.45, 0, [{1}, {0}]),
        (0.75, 0, [{1, 3}, {0, 3}]),  # mass before: 0, 0.5, 0.8; and 0, 0.7, 0.9
        (0.85, 0, [{0, 1, 3}, {0, 3}]),
        (0.94, 0, [{0, 1, 3}, {0, 2, 3}]),
        (1e-9, 0, [{1}, {0}]),
        (1.0, 1, [{1}, {0}]),
        (1.0, 3, [{0, 1, 3}, {0, 2, 3}]),
        (1.0, 4, [{0, 1, 2, 3}, {0, 1, 2, 3}]),
        (1.0, 9, [{0, 1, 2, 3}, {0, 1, 2, 3}]),
        # Of the two likeliest, 0.625 and 0.375 (0.778 and 0.222) of what is left.
        (0.6, 2, [{1}, {0}]),
        (0.65, 2, [{1, 3}, {0}]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_restrict(top_p, top_k, kept, dtype):
    log_p = SHUFFLED.to(dtype)
    restricted = restrict(log_p, top_p, top_k)
    assert [set(row.isfinite().nonzero().flatten().tolist()) for row in restricted] == kept
    assert torch.equal(restricted[restricted.isfinite()], log_p[restricted.isfinite()])


@pytest.mark.parametrize(
    ("sampling", "tokens", "log_probs"),
    [
        # z = 2, 1, 0 at T = 0.6: p = 0.81663, 0.15424, 0.02913; 0.9 falls to token 1 (cumulative 0.97087).
        (Sampling(temperature=0.6), [0, 1], [-0.2026, -1.8692]),
        # At T = 1: p = 0.66524, 0.24473, 0.09003; 0.9 falls to token 1, and to token 2 from 0.90997 on.
        (Sampling(), [0, 1], [-0.4076, -1.4076]),
        # Recorded before top-p and top-k: not 0.
        (Sampling(top_k=1), [0, 0], [-0.4076, -0.4076]),
        (Sampling(top_p=0.5), [0, 0], [-0.4076, -0.4076]),
        # Greedy: the likeliest token, its log-prob at temperature 1.
        (Sampling(temperature=0), [0, 0], [-0.4076, -0.4076]),
    ],
)
def test_sample_tokens(sampling, tokens, log_probs):
    logits = torch.tensor([[2.0, 1.0, 0.0]] * 2)
    found = sample_tokens(logits, _double([0.1, 0.9]), sampling)
    assert found.tokens.tolist() == tokens
    assert found.log_probs.tolist() == pytest.approx(log_probs, abs=5e-5)


def test_sample_tokens_records_the_spread_of_the_distribution():
    # At T = 0.6: entropy 0.5567, collision 0.6915 (test_scoring); two equal tokens beside an impossible one: ln 2, 1/2.
    found = sample_tokens(torch.tensor([[2.0, 1.0, 0.0], [0.0, 0.0, -INF]]), _double([0.1, 0.1]), Sampling(0.6))
    assert found.entropy.tolist() == pytest.approx([0.5567, math.log(2)], abs=5e-5)
    assert found.collision.tolist() == pytest.approx([0.6915, 0.5], abs=5e-5)
    # Before top-k: the ratio of the loss is to the whole distribution.
    cut = sample_tokens(torch.tensor([[2.0, 1.0, 0.0]]), _double([0.1]), Sampling(0.6, top_k=1))
    assert cut.entropy.tolist() == pytest.approx([0.5567], abs=5e-5)


def test_sampling_problems():
    assert Sampling(temperature=0, top_p=0.1, top_k=0, max_new_tokens=1).problems("x") == []
    found = Sampling(temperature=-1.0, top_p=0.0, top_k=-2, max_new_tokens=0).problems("data.sampling")
    for text in ("temperature=-1.0", "top_p=0.0", "top_k=-2", "max_new_tokens=0"):
        assert sum(f"data.sampling.{text}:" in problem for problem in found) == 1
    assert len(found) == 4
    assert len(Sampling(top_p=1.01).problems("x")) == 1


# ---- the end of a completion ----------------------------------------------------------------------------------------


def test_the_end_token_trains():
    # pad = end = 2: the first completion is 5, 6, 2 padded to 5, 6, 2, 2, 2; the second fills the width.
    policy = ChainPolicy({4: 5, 5: 6, 6: 2, 7: 8, 8: 9, 9: 10, 10: 11, 11: 2})
    completions = _generate(policy, [[3, 4], [7]], max_new_tokens=8)
    assert completions.ids.tolist() == [[5, 6, 2, 2, 2], [8, 9, 10, 11, 2]]
    assert completions.lengths.tolist() == [3, 5]
    assert completions.truncated.tolist() == [False, False]
    batch = _rollout(completions, [[3, 4], [7]], 1, 1.0)
    assert batch.completion_mask.tolist() == [[True, True, True, False, False], [True] * 5]


@pytest.mark.parametrize(("end_ids", "finished"), [((1, 16), [True, True, False]), ((1,), [False, True, False])])
def test_every_end_token_ends(end_ids, finished):
    # 4 -> 5 -> 16, 7 -> 1, 8 -> 8 -> ...
    policy = ChainPolicy({4: 5, 5: 16, 16: 16, 7: 1, 8: 8})
    completions = _generate(policy, [[4], [7], [8]], vocabulary=Vocabulary(end_ids, pad_id=0), max_new_tokens=4)
    assert (~completions.truncated).tolist() == finished
    assert _emitted(completions)[0] == ([5, 16] if finished[0] else [5, 16, 16, 16])
    assert _emitted(completions)[1:] == [[1], [8, 8, 8, 8]]
    assert completions.ids.tolist()[1] == [1, 0, 0, 0]


def test_an_end_token_in_the_last_place_is_no_truncation():
    # Four tokens are allowed; the first completion ends with the fourth, the second is cut there.
    policy = ChainPolicy({4: 5, 5: 6, 6: 7, 7: 2, 8: 8})
    completions = _generate(policy, [[4], [8]], max_new_tokens=4)
    assert completions.ids.tolist() == [[5, 6, 7, 2], [8, 8, 8, 8]]
    assert completions.lengths.tolist() == [4, 4]
    assert completions.truncated.tolist() == [False, True]


def test_an_end_token_in_the_prompt_ends_nothing():
    completions = _generate(ChainPolicy({2: 5, 5: 2}), [[2, 2]], max_new_tokens=4)
    assert completions.ids.tolist() == [[5, 2]] and completions.truncated.tolist() == [False]


def test_one_token_allowed():
    completions = _generate(ChainPolicy({4: 2, 5: 5}), [[4], [5]], max_new_tokens=1)
    assert completions.ids.tolist() == [[2], [5]]
    assert completions.truncated.tolist() == [False, True]


def test_completions_of_a_prompt_stand_side_by_side():
    completions = _generate(ChainPolicy({4: 2, 5: 6, 6: 2}), [[4], [5]], group_size=3, max_new_tokens=4)
    assert _emitted(completions) == [[2]] * 3 + [[6, 2]] * 3


# ---- against the model itself ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_recorded_scores_are_those_of_scoring(temperature):
    policy, group_size = tiny_qwen3(), 6
    completions = _generate(policy, PROMPTS, group_size, temperature=temperature, max_new_tokens=24)
    assert completions.lengths.min() < 5 and completions.lengths.max() == 24  # some rows leave the batch, some stay
    batch = _rollout(completions, PROMPTS, group_size, temperature)
    with torch.no_grad():
        scores = score(batch, joined(backbone(policy))(batch), output_head(policy), policy.config.vocab_size)
    for name in ("log_probs", "entropy", "collision"):
        torch.testing.assert_close(getattr(completions, name), getattr(scores, name), atol=1e-5, rtol=0)
        assert not getattr(completions, name)[~batch.completion_mask].any()
    assert scores.log_probs.min() < math.log(0.01)


def test_log_probs_under_top_p_are_those_of_the_whole_distribution():
    policy = tiny_qwen3()
    completions = _generate(policy, PROMPTS, 4, top_p=0.6, top_k=5, max_new_tokens=8)
    batch = _rollout(completions, PROMPTS, 4, 1.0)
    with torch.no_grad():
        scores = score(batch, joined(backbone(policy))(batch), output_head(policy), policy.config.vocab_size)
    torch.testing.assert_close(completions.log_probs, scores.log_probs, atol=1e-5, rtol=0)


def test_greedy_is_that_of_transformers():
    policy = tiny_qwen3().eval()
    end_ids = (2, 6)
    found = _generate(policy, PROMPTS, vocabulary=Vocabulary(end_ids, 0), temperature=0, max_new_tokens=30)
    for number, prompt in enumerate(PROMPTS):
        expected = policy.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=30,
            eos_token_id=list(end_ids),
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        assert _emitted(found)[number] == expected
        assert bool(found.truncated[number]) == (expected[-1] not in end_ids)
    assert len(set(found.lengths.tolist())) > 1


def test_greedy_does_not_read_its_streams():
    policy = tiny_qwen3()
    completions = _generate(policy, PROMPTS, 2, temperature=0, max_new_tokens=10)
    assert torch.equal(completions.ids[::2], completions.ids[1::2])


# ---- whatever the company -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_sequences", [1, 8, 13])
def test_splitting_into_passes_changes_nothing(max_sequences):
    policy = tiny_qwen3()
    whole = _generate(policy, PROMPTS, 4, max_new_tokens=16)
    log = ForwardLog(policy)
    split = _generate(policy, PROMPTS, 4, max_new_tokens=16, max_sequences=max_sequences)
    assert max(rows for rows, _ in log.shapes) <= max(4, max_sequences)
    assert torch.equal(split.ids, whole.ids)
    assert torch.equal(split.lengths, whole.lengths) and torch.equal(split.truncated, whole.truncated)
    torch.testing.assert_close(split.log_probs, whole.log_probs, atol=1e-5, rtol=0)


def test_passes_of_different_width_are_padded_alike():
    # The first pass emits one token a row, the second three.
    policy = ChainPolicy({4: 2, 5: 6, 6: 7, 7: 2})
    completions = _generate(
        policy, [[4], [5]], 2, vocabulary=Vocabulary((2,), pad_id=19), max_sequences=2, max_new_tokens=5
    )
    assert completions.ids.tolist() == [[2, 19, 19]] * 2 + [[6, 7, 2]] * 2
    assert completions.log_probs.tolist() == [[0.0] * 3] * 4


@pytest.mark.parametrize("chosen", [[0], [3], [4, 1], [2, 0, 3]])
def test_a_completion_is_the_same_in_every_batch(chosen):
    policy, group_size = tiny_qwen3(), 4
    streams = torch.arange(100, 100 + len(PROMPTS) * group_size).view(len(PROMPTS), group_size)
    whole = _generate(policy, PROMPTS, group_size, streams.flatten(), max_new_tokens=16)
    part = _generate(policy, [PROMPTS[i] for i in chosen], group_size, streams[chosen].flatten(), max_new_tokens=16)
    rows = [i * group_size + g for i in chosen for g in range(group_size)]
    emitted = _emitted(whole)
    assert _emitted(part) == [emitted[row] for row in rows]
    assert torch.equal(part.truncated, whole.truncated[rows])
    width = part.ids.shape[1]
    torch.testing.assert_close(part.log_probs, whole.log_probs[rows, :width], atol=1e-5, rtol=0)


def test_streams_decide_and_nothing_else():
    policy = tiny_qwen3()
    torch.manual_seed(1)
    first = _generate(policy, [[3, 4]], 8, torch.tensor([5, 5, 5, 6, 6, 7, 8, 9]), max_new_tokens=12)
    torch.manual_seed(2)
    again = _generate(policy, [[3, 4]], 8, torch.tensor([5, 6, 7, 8, 9, 10, 11, 12]), max_new_tokens=12)
    emitted, other = _emitted(first), _emitted(again)
    assert emitted[0] == emitted[1] == emitted[2] == other[0]
    assert emitted[3] == emitted[4] == other[1]
    assert [emitted[i] for i in (5, 6, 7)] == other[2:5]
    assert len({tuple(row) for row in other}) == 8


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_first_tokens_have_the_frequencies_of_the_softmax(temperature):
    policy, draws = tiny_qwen3(), 20_000
    tokens = _generate(policy, [[3, 4, 5, 6]], draws, temperature=temperature, max_new_tokens=1).ids[:, 0]
    with torch.no_grad():
        logits = policy.eval()(torch.tensor([[3, 4, 5, 6]])).logits[0, -1].double()
    expected = draws * torch.softmax(logits / temperature, -1)
    assert expected.min() > 1
    counts = torch.bincount(tokens, minlength=20)
    # 19 degrees of freedom: 43.8 is passed once in a thousand.
    assert ((counts - expected) ** 2 / expected).sum() < 43.8


# ---- cost and state -------------------------------------------------------------------------------------------------


def test_a_prompt_is_read_once_for_its_group():
    policy = tiny_qwen3()
    log = ForwardLog(policy)
    _generate(policy, PROMPTS, 8, vocabulary=Vocabulary((99,), 0), max_new_tokens=6)
    # Five prompts, the longest of six tokens; their last state gives the first token, and no row ever ends.
    assert log.shapes == [(5, 6)] + [(40, 1)] * 5


def test_finished_rows_leave_the_batch():
    # Completions of 1, 2, 3, 4 and 5 tokens: after each step one of them goes, at least a fifth of what is left.
    policy = ChainPolicy({4: 5, 5: 6, 6: 7, 7: 8, 8: 2})
    completions = _generate(policy, [[8], [4], [6], [5], [7]], max_new_tokens=9)
    assert completions.lengths.tolist() == [1, 5, 3, 4, 2]
    assert policy.rows == [5, 4, 3, 2, 1]
    assert _emitted(completions) == [[2], [5, 6, 7, 8, 2], [7, 8, 2], [6, 7, 8, 2], [8, 2]]


def test_a_batch_that_is_done_stops():
    policy = ChainPolicy({4: 5, 5: 2})
    _generate(policy, [[4], [4]], max_new_tokens=1000)
    assert policy.rows == [2, 2]


@pytest.mark.parametrize("training", [True, False])
def test_mode_and_gradients_are_restored(training):
    policy = tiny_qwen3().train(training)
    log = ForwardLog(policy)
    completions = _generate(policy, PROMPTS, 2, max_new_tokens=3)
    assert log.modes == {(False, False)}
    assert all(module.training == training for module in policy.modules())
    assert torch.is_grad_enabled() and all(p.requires_grad and p.grad is None for p in policy.parameters())
    assert not completions.log_probs.requires_grad


def test_the_mode_of_each_module_is_restored():
    # A part that the user keeps in eval mode, such as a frozen layer.
    policy = tiny_qwen3()
    policy.lm_head.eval()
    _generate(policy, PROMPTS, 2, max_new_tokens=2)
    assert policy.training and policy.base_model.training and not policy.lm_head.training


class Failing(ChainPolicy):
    """Raises in its second forward."""

    def forward(self, input_ids, attention_mask, position_ids, past_key_values, use_cache, logits_to_keep):
        output = super().forward(input_ids, attention_mask, position_ids, past_key_values, use_cache, logits_to_keep)
        if len(self.rows) == 2:
            raise RuntimeError("out of memory")
        return output


@pytest.mark.parametrize("training", [True, False])
def test_mode_and_gradients_are_restored_after_an_error(training):
    policy = Failing({4: 5}).train(training)
    with pytest.raises(RuntimeError, match="out of memory"):
        _generate(policy, [[4]], max_new_tokens=5)
    assert policy.training == training and torch.is_grad_enabled()
