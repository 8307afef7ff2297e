"""Hidden states -> log-probs, entropy and collision of the emitted tokens."""

import math

import pytest
import torch
from torch import nn

from stapo_lightning.linear_scores import LinearHead
from stapo_lightning.scoring import score, score_hidden, score_logits
from stapo_lightning.states import joined
from tests.builders import rollout_batch

INF = float("inf")


def _one(logits, token, temperature=1.0, dtype=torch.float64):
    log_probs, entropy, collision = score_logits(
        torch.tensor([logits], dtype=dtype), torch.tensor([token]), temperature
    )
    return log_probs.item(), entropy.item(), collision.item()


# ---- score_logits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("temperature", "log_prob", "entropy", "collision"),
    [
        # z / 0.6 = 3.3333, 1.6667, 0: Z = 28.032 + 5.294 + 1 = 34.326; p = 0.81663, 0.15424, 0.02913.
        (0.6, -0.2026, 0.5567, 0.6915),
        # Z = 7.3891 + 2.7183 + 1 = 11.1073; p = 0.66524, 0.24473, 0.09003.
        (1.0, -0.4076, 0.8324, 0.5105),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_temperature(temperature, log_prob, entropy, collision, dtype):
    assert _one([2.0, 1.0, 0.0], 0, temperature, dtype) == pytest.approx((log_prob, entropy, collision), abs=5e-5)


def test_impossible_token_adds_nothing_to_the_entropy():
    # Two equal tokens and an impossible one: entropy ln 2, collision 1/2.
    assert _one([0.0, 0.0, -INF], 0) == pytest.approx((-math.log(2), math.log(2), 0.5), abs=1e-12)


def test_underflowing_token_adds_nothing_to_the_entropy():
    # exp(-2000) is 0 in float32 and float64 alike.
    assert _one([0.0, 0.0, -2000.0], 2, dtype=torch.float32) == pytest.approx((-2000.6931, 0.693147, 0.5), abs=1e-3)


def test_gradient_beside_an_impossible_token():
    # d log p_0 / dz = onehot - p = (1/2, -1/2, 0).
    logits = torch.tensor([[0.0, 0.0, -INF]], requires_grad=True)
    score_logits(logits, torch.tensor([0]), 1.0)[0].sum().backward()
    assert logits.grad.tolist() == [[0.5, -0.5, 0.0]]


def test_only_log_probs_and_entropy_carry_a_graph():
    logits = torch.zeros(2, 3, requires_grad=True)
    log_probs, entropy, collision = score_logits(logits, torch.tensor([0, 1]), 1.0)
    assert log_probs.requires_grad and entropy.requires_grad and not collision.requires_grad


def test_gradients_of_log_probs_and_entropy():
    logits = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    tokens = torch.tensor([0, 4, 2, 2])
    assert torch.autograd.gradcheck(lambda z: score_logits(z, tokens, 0.7)[:2], (logits,))


def test_gradient_of_the_entropy():
    # p = 3/4, 1/4, 0: dH / dz = -p (log p + H), with H = 0.562335: -3/4 (-0.287682 + H) and -1/4 (-1.386294 + H).
    logits = torch.tensor([[math.log(3), 0.0, -INF]], requires_grad=True)
    entropy = score_logits(logits, torch.tensor([0]), 1.0)[1]
    assert entropy.item() == pytest.approx(0.562335, abs=1e-6)
    entropy.backward()
    assert logits.grad[0].tolist() == pytest.approx([-0.205990, 0.205990, 0.0], abs=1e-6)


def test_half_precision_is_widened_first():
    # 256 equal tokens: ln 256 = 5.545177; bfloat16 would give 5.53125 and a collision from 256 rounded squares.
    logits = torch.zeros(1, 256, dtype=torch.bfloat16)
    log_probs, entropy, collision = score_logits(logits, torch.tensor([7]), 1.0)
    assert log_probs.dtype == entropy.dtype == collision.dtype == torch.float32
    assert (log_probs.item(), entropy.item(), collision.item()) == pytest.approx(
        (-5.545177, 5.545177, 1 / 256), abs=2e-6
    )


# ---- chunks ---------------------------------------------------------------------------------------------------------


class CountingHead(nn.Module):
    """A linear head that notes how many rows each call brought."""

    def __init__(self, hidden: int, vocabulary: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.weight = nn.Parameter(torch.randn(vocabulary, hidden, dtype=torch.float64, generator=generator))
        self.rows: list[int] = []

    def forward(self, hidden):
        self.rows.append(len(hidden))
        return hidden @ self.weight.T


def _hidden(rows=11, width=4, vocabulary=9):
    generator = torch.Generator().manual_seed(6)
    hidden = torch.randn(rows, width, dtype=torch.float64, generator=generator).requires_grad_()
    tokens = torch.randint(vocabulary, (rows,), generator=generator)
    coefficients = torch.randn(rows, dtype=torch.float64, generator=generator)
    return hidden, tokens, coefficients, CountingHead(width, vocabulary)


@pytest.mark.parametrize("chunk", [1, 3, 10, 11, 1000])
def test_chunks_change_neither_values_nor_gradients(chunk):
    hidden, tokens, coefficients, head = _hidden()
    expected = score_logits(hidden @ head.weight.T, tokens, 0.8)
    found = score_hidden(hidden, tokens, head, 0.8, chunk)
    for found_values, values in zip(found, expected, strict=True):
        torch.testing.assert_close(found_values, values, atol=1e-13, rtol=1e-13)
    inputs = (hidden, head.weight)
    gradients = torch.autograd.grad((found[0] * coefficients).sum(), inputs)
    expected_gradients = torch.autograd.grad((expected[0] * coefficients).sum(), inputs)
    for found_gradient, gradient in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(found_gradient, gradient, atol=1e-12, rtol=1e-12)


def test_gradcheck():
    hidden, tokens, _, head = _hidden(rows=3, width=2, vocabulary=4)

    def scores(hidden, weight):
        return score_hidden(hidden, tokens, lambda chunk: chunk @ weight.T, 0.7, 2)[:2]

    assert torch.autograd.gradcheck(scores, (hidden, head.weight))


def test_no_call_of_the_head_sees_more_than_a_chunk():
    hidden, tokens, _, head = _hidden()
    log_probs = score_hidden(hidden, tokens, head, 1.0, 4)[0]
    assert head.rows == [4, 4, 3]
    log_probs.sum().backward()
    assert sorted(head.rows) == [3, 3, 4, 4, 4, 4]  # each chunk once more in backward


def test_without_gradients_chunks_are_not_checkpointed():
    hidden, tokens, _, head = _hidden()
    with torch.no_grad():
        log_probs = score_hidden(hidden, tokens, head, 1.0, 4)[0]
    assert not log_probs.requires_grad
    assert head.rows == [4, 4, 3]


# ---- whole sequences ------------------------------------------------------------------------------------------------


class CausalDouble(nn.Module):
    """A causal model without attention: the state at a place is a function of the mean embedding up to it."""

    def __init__(self, vocabulary: int = 13, width: int = 6) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            self.embedding = nn.Embedding(vocabulary, width).double()
            self.head = nn.Linear(width, vocabulary).double()

    def forward(self, ids, lengths=None):
        places = torch.arange(1, ids.shape[1] + 1, dtype=torch.float64)
        return torch.tanh(2 * self.embedding(ids).cumsum(1) / places[:, None])


PROMPTS = [[1, 2, 3], [4], [5, 6]]
COMPLETIONS = [[7, 2], [8, 9, 10, 2], [2]]


def _sequences(extra=0, filler=0):
    """The three sequences, padded with `filler` to `extra` columns more than they need."""
    batch = rollout_batch([1.0, 1.0, 1.0], [len(row) for row in COMPLETIONS])
    batch.prompt_ids = torch.tensor([row + [filler] * (3 + extra - len(row)) for row in PROMPTS])
    batch.prompt_lengths = torch.tensor([len(row) for row in PROMPTS])
    batch.completion_ids = torch.tensor([row + [filler] * (4 + extra - len(row)) for row in COMPLETIONS])
    batch.temperature = 0.7
    return batch


def _score(batch, model, head, vocab_size=13):
    return score(batch, joined(model)(batch), head, vocab_size)


def _naive(model, prompt, completion, temperature):
    """Log-prob, entropy and collision of each token: one full forward a token, and sums written out."""
    rows = []
    for step, token in enumerate(completion):
        logits = model.head(model(torch.tensor([prompt + completion[:step]]))[0, -1]) / temperature
        p = logits.exp() / logits.exp().sum()
        rows.append((p[token].log(), -(p * p.log()).sum(), (p * p).sum()))
    return [torch.stack(column) for column in zip(*rows, strict=True)]


@pytest.mark.parametrize("vocab_size", [13, 2**25], ids=["one chunk", "a chunk for each token"])
@pytest.mark.parametrize("linear", [False, True], ids=["any head", "linear head"])
def test_score_is_the_naive_computation(linear, vocab_size):
    model, batch = CausalDouble(), _sequences()
    head = LinearHead(model.head.weight, model.head.bias) if linear else model.head
    scores = _score(batch, model, head, vocab_size)
    total = 0.0
    for row, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
        expected = _naive(model, prompt, completion, 0.7)
        for found, values in zip((scores.log_probs, scores.entropy, scores.collision), expected, strict=True):
            torch.testing.assert_close(found[row, : len(completion)], values, atol=1e-12, rtol=0)
            assert not found[row, len(completion) :].any()
        total = total + (row + 1) * expected[0].sum()
    weights = torch.tensor([[1.0], [2.0], [3.0]], dtype=torch.float64)
    gradients = torch.autograd.grad((scores.log_probs * weights).sum(), list(model.parameters()))
    for found, values in zip(gradients, torch.autograd.grad(total, list(model.parameters())), strict=True):
        torch.testing.assert_close(found, values, atol=1e-12, rtol=0)


@pytest.mark.parametrize("filler", [0, 12])
def test_padding_is_never_seen(filler):
    model = CausalDouble()
    narrow = _score(_sequences(), model, model.head)
    wide = _score(_sequences(extra=3, filler=filler), model, model.head)
    for name in ("log_probs", "entropy", "collision"):
        torch.testing.assert_close(getattr(wide, name)[:, :4], getattr(narrow, name), atol=1e-14, rtol=0)
        assert not getattr(wide, name)[:, 4:].any()


def test_prompt_and_padding_never_reach_the_head():
    model, head = CausalDouble(), CountingHead(6, 13)
    with torch.no_grad():
        _score(_sequences(extra=3), model, head)
    assert head.rows == [2 + 4 + 1]


def test_rows_are_scored_alike_in_any_company():
    model, batch = CausalDouble(), _sequences()
    whole = _score(batch, model, model.head).log_probs
    for row in range(3):
        alone = _score(batch.rows(torch.tensor([row])), model, model.head).log_probs
        torch.testing.assert_close(alone[0], whole[row], atol=1e-14, rtol=0)
