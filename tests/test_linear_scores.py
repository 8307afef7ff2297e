"""Hidden states and a linear head -> log-probs, entropy and collision, a part of the vocabulary at a time."""

import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stapo_lightning.linear_scores import LinearHead, score_linear
from stapo_lightning.scoring import score_hidden, score_logits

INF = float("inf")
ROWS, WIDTH, VOCABULARY = 6, 3, 11
HEADS = {
    "plain": {},
    "scaled": {"scale": 0.5},
    "capped": {"cap": 3.0},
    "scaled and capped": {"scale": 2.0, "cap": 1.5},
}


def _naive(logits, tokens, temperature):
    """The sums written out."""
    z = logits / temperature
    p = z.exp() / z.exp().sum(-1, keepdim=True)
    return p[torch.arange(len(tokens)), tokens].log(), -(p * p.log()).sum(-1), (p * p).sum(-1)


def _inputs(dtype=torch.float64, rows=ROWS, width=WIDTH, vocabulary=VOCABULARY):
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocabulary, width, generator=generator, dtype=torch.float64)
    bias = torch.randn(vocabulary, generator=generator, dtype=torch.float64)
    tokens = torch.randint(vocabulary, (rows,), generator=generator)
    return (*(values.to(dtype).requires_grad_() for values in (hidden, weight, bias)), tokens)


@pytest.mark.parametrize("columns", [1, 4, 11, 100])
@pytest.mark.parametrize("form", HEADS.values(), ids=HEADS)
def test_values_are_the_naive_ones(form, columns):
    hidden, weight, bias, tokens = _inputs()
    head = LinearHead(weight, bias, **form)
    for found, expected in zip(
        score_linear(hidden, tokens, head, 0.7, columns), _naive(head(hidden), tokens, 0.7), strict=True
    ):
        torch.testing.assert_close(found, expected, atol=1e-13, rtol=0)


def test_form_of_the_logits():
    # 2 (1 * 3 + 1) = 8; 4 tanh(8 / 4) = 3.85611.
    head = LinearHead(torch.tensor([[3.0]]), torch.tensor([1.0]), scale=2.0, cap=4.0)
    assert head(torch.tensor([[1.0]])).item() == pytest.approx(4 * math.tanh(2))


@pytest.mark.parametrize("form", HEADS.values(), ids=HEADS)
def test_gradients_of_log_probs_and_entropy(form):
    hidden, weight, bias, tokens = _inputs()

    def scores(hidden, weight, bias):
        return score_linear(hidden, tokens, LinearHead(weight, bias, **form), 0.7, 4)[:2]

    assert torch.autograd.gradcheck(scores, (hidden, weight, bias))


@pytest.mark.parametrize("score", [0, 1], ids=["log-prob", "entropy"])
def test_gradient_of_one_score_alone(score):
    hidden, weight, _, tokens = _inputs()
    coefficients = torch.linspace(-1, 2, ROWS, dtype=torch.float64)
    found = score_linear(hidden, tokens, LinearHead(weight), 0.7, 4)[score]
    expected = _naive(hidden @ weight.T, tokens, 0.7)[score]
    for gradient, naive in zip(
        torch.autograd.grad((found * coefficients).sum(), (hidden, weight)),
        torch.autograd.grad((expected * coefficients).sum(), (hidden, weight)),
        strict=True,
    ):
        torch.testing.assert_close(gradient, naive, atol=1e-13, rtol=0)


# ---- what takes part in training ------------------------------------------------------------------------------------


def test_frozen_head():
    hidden, weight, bias, tokens = _inputs()
    trained = torch.autograd.grad(score_linear(hidden, tokens, LinearHead(weight, bias), 1.0, 4)[0].sum(), hidden)[0]
    frozen = LinearHead(weight.detach(), bias.detach())
    score_linear(hidden, tokens, frozen, 1.0, 4)[0].sum().backward()
    assert torch.equal(hidden.grad, trained)


def test_trained_head_on_a_frozen_backbone():
    hidden, weight, bias, tokens = _inputs()
    inputs = (weight, bias)
    expected = torch.autograd.grad(_naive(LinearHead(weight, bias)(hidden), tokens, 1.0)[0].sum(), inputs)
    found = torch.autograd.grad(score_linear(hidden.detach(), tokens, LinearHead(*inputs), 1.0, 4)[0].sum(), inputs)
    for gradient, naive in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, naive, atol=1e-13, rtol=0)


def test_tied_head_gets_one_gradient_from_both_its_uses():
    _, weight, _, tokens = _inputs()
    embedding = nn.Parameter(weight.detach().clone())
    arrivals = []
    embedding.register_post_accumulate_grad_hook(lambda parameter: arrivals.append(parameter.grad.clone()))
    score_linear(torch.tanh(embedding[tokens]), tokens, LinearHead(embedding), 1.0, 4)[0].sum().backward()
    expected = torch.autograd.grad(_naive(torch.tanh(weight[tokens]) @ weight.T, tokens, 1.0)[0].sum(), weight)[0]
    assert len(arrivals) == 1  # what DDP waits for
    torch.testing.assert_close(arrivals[0], expected, atol=1e-13, rtol=0)


def test_only_log_probs_and_entropy_carry_a_graph():
    hidden, weight, _, tokens = _inputs()
    log_probs, entropy, collision = score_linear(hidden, tokens, LinearHead(weight), 1.0, 4)
    assert log_probs.requires_grad and entropy.requires_grad and not collision.requires_grad
    with torch.no_grad():
        assert not any(values.requires_grad for values in score_linear(hidden, tokens, LinearHead(weight), 1.0, 4))


# ---- numbers at the edge --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [1, 2, 4])
def test_impossible_tokens(columns):
    # Logits 0, -inf, 0, -inf: entropy ln 2, collision 1/2; d log p_0 / d bias = onehot - p = (1/2, 0, -1/2, 0).
    # The second row asks for a token that cannot be: log-prob -inf, and the gradient is onehot - p all the same.
    hidden = torch.zeros(2, 1, requires_grad=True)
    bias = torch.tensor([0.0, -INF, 0.0, -INF], requires_grad=True)
    head = LinearHead(torch.ones(4, 1), bias)
    log_probs, entropy, collision = score_linear(hidden, torch.tensor([0, 1]), head, 1.0, columns)
    assert log_probs.tolist() == [pytest.approx(-math.log(2)), -INF]
    assert entropy.tolist() == pytest.approx([math.log(2)] * 2) and collision.tolist() == pytest.approx([0.5, 0.5])
    first = torch.autograd.grad(log_probs[0] + entropy[0], bias, retain_graph=True)[0]
    assert first.tolist() == [0.5, 0.0, -0.5, 0.0]  # the entropy of two equal tokens is at its maximum
    assert torch.autograd.grad(log_probs[1], bias)[0].tolist() == [-0.5, 1.0, -0.5, 0.0]


@pytest.mark.parametrize("columns", [1, 3])
def test_huge_logits_keep_their_differences(columns):
    # 1e4 + (0, -1, -2) are exact in float32 and differ as 2, 1, 0 do: p = 0.66524, 0.24473, 0.09003.
    weight = torch.tensor([[1e4], [1e4 - 1], [1e4 - 2]])
    hidden = torch.ones(1, 1)
    scores = score_linear(hidden, torch.tensor([0]), LinearHead(weight), 1.0, columns)
    assert [values.item() for values in scores] == pytest.approx((-0.407606, 0.832395, 0.510543), abs=2e-6)


def test_entropy_of_a_certain_row_is_zero():
    weight = torch.tensor([[0.0], [200.0], [-200.0]])
    scores = score_linear(torch.ones(1, 1), torch.tensor([1]), LinearHead(weight), 1.0, 1)
    assert [values.item() for values in scores] == [0.0, 0.0, 1.0]


# ---- precision ------------------------------------------------------------------------------------------------------


def _relative_error(found, expected):
    return ((found.double() - expected).norm() / expected.norm()).item()


def _scores_and_gradients(dtype, columns=64):
    """Scores of 40 tokens over 1,000 in `dtype`, and the same computed naively in float64 from the same numbers."""
    hidden, weight, _, tokens = _inputs(dtype, rows=40, width=64, vocabulary=1000)
    weight = (weight.detach() * 0.3).requires_grad_()
    scores = score_linear(hidden, tokens, LinearHead(weight), 0.8, columns)
    gradients = torch.autograd.grad((scores[0] + scores[1]).sum(), (hidden, weight))
    exact_inputs = tuple(values.detach().double().requires_grad_() for values in (hidden, weight))
    exact = _naive(exact_inputs[0] @ exact_inputs[1].T, tokens, 0.8)
    return (*scores, *gradients), (*exact, *torch.autograd.grad((exact[0] + exact[1]).sum(), exact_inputs))


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    # float32: products of 64 terms and sums of 1,000 round by some 1e-7 each. bfloat16: logits and gradients of up to 8
    # bits, 2^-9 of a value each; the errors of single logits average out in sums over the vocabulary.
    [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)],
)
def test_precision(dtype, tolerance):
    found, exact = _scores_and_gradients(dtype)
    for values, expected in zip(found, exact, strict=True):
        assert _relative_error(values, expected) < tolerance
    assert [values.dtype for values in found] == [torch.float32] * 3 + [dtype] * 2


def test_autocast_multiplies_in_its_own_precision_and_adds_in_float32():
    hidden, weight, bias, tokens = _inputs(torch.float32, rows=40, width=64, vocabulary=1000)
    inputs = (hidden, weight, bias)

    def gradients_and_scores(score):
        with torch.autocast("cpu", torch.bfloat16):
            scores = score(LinearHead(weight, bias))
            return (*scores, *torch.autograd.grad((scores[0] + scores[1]).sum(), inputs))

    found = gradients_and_scores(lambda head: score_linear(hidden, tokens, head, 0.8, 64))
    whole = gradients_and_scores(lambda head: score_logits(head(hidden), tokens, 0.8))
    exact = _scores_and_gradients_in_float64(hidden, weight, bias, tokens)
    for values, others, expected in zip(found, whole, exact, strict=True):
        assert values.dtype == torch.float32
        error, error_of_whole = _relative_error(values, expected), _relative_error(others, expected)
        assert 1e-5 < error < 1.2 * error_of_whole


def _scores_and_gradients_in_float64(hidden, weight, bias, tokens):
    inputs = tuple(values.detach().double().requires_grad_() for values in (hidden, weight, bias))
    scores = _naive(inputs[0] @ inputs[1].T + inputs[2], tokens, 0.8)
    return (*scores, *torch.autograd.grad((scores[0] + scores[1]).sum(), inputs))


# ---- memory ---------------------------------------------------------------------------------------------------------


class LargestTensor(TorchDispatchMode):
    """Notes the most elements of any tensor that an operation returns, in forward and backward."""

    elements = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.elements = max([self.elements, *sizes])
        return result


def _largest(score):
    hidden, weight, _, tokens = _inputs(rows=50, width=2, vocabulary=60)
    with LargestTensor() as largest:
        log_probs, entropy, _ = score(hidden, tokens, LinearHead(weight, cap=2.0))
        (log_probs + entropy).sum().backward()
    return largest.elements


def test_the_whole_matrix_never_exists():
    # 50 tokens over 60: 3,000 logits; 4 columns are 200 and 3 rows 180. Hidden states and head have 100 and 120.
    assert _largest(lambda *inputs: score_logits(inputs[2](inputs[0]), inputs[1], 1.0)) == 3000
    assert _largest(lambda *inputs: score_linear(*inputs, 1.0, 4)) == 200
    assert _largest(lambda *inputs: score_hidden(*inputs, 1.0, 3)) == 180
