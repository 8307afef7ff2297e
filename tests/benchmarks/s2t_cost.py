"""What S2T and its statistics cost, as shares of an update's forward and backward.

    python tests/benchmarks/s2t_cost.py

Three pieces, timed in turns: the update itself (scores, loss, backward; no optimiser); the sums over the vocabulary
that entropy and collision need beyond the log-probs; the selection with the squared gradient norms that are logged.
Tokens are random, so that most of those with a positive advantage are candidates: the most that a selection can cost.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from stapo_lightning.batch import RolloutBatch, TokenScores
from stapo_lightning.distributed import Ranks
from stapo_lightning.models import backbone, load_causal_lm, output_head
from stapo_lightning.objective import S2T, Clipped, policy_loss
from stapo_lightning.objective.gradient import logit_gradient_weight, squared_logit_gradient_norm
from stapo_lightning.scoring import part_elements, score
from stapo_lightning.softmax import tally_
from stapo_lightning.states import joined

GROUP_SIZE = 8


def tiny_qwen3() -> PreTrainedModel:
    return load_causal_lm("stapo_lightning/assets/tiny_qwen3", "sdpa")


def smollm2_135m() -> PreTrainedModel:
    """Random weights in the shape of SmolLM2-135M."""
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()


MODELS: dict[str, Callable[[], PreTrainedModel]] = {"tiny_qwen3": tiny_qwen3, "smollm2_135m": smollm2_135m}


def random_batch(completions: int, length: int, vocabulary: int) -> RolloutBatch:
    """Completions of `length` tokens to prompts of one, half of them with a positive advantage."""
    return RolloutBatch(
        prompt_ids=torch.randint(vocabulary, (completions, 1)),
        prompt_lengths=torch.ones(completions, dtype=torch.int64),
        completion_ids=torch.randint(vocabulary, (completions, length)),
        completion_lengths=torch.full((completions,), length),
        truncated=torch.zeros(completions, dtype=torch.bool),
        old_log_probs=torch.full((completions, length), -float(torch.tensor(vocabulary).log())),
        rewards=torch.zeros(completions),
        advantages=torch.tensor([1.0, -1.0]).repeat(completions // 2),
        group_ids=torch.arange(completions) // GROUP_SIZE,
        uids=torch.arange(completions),
        temperature=1.0,
        group_size=GROUP_SIZE,
    )


def update(model: PreTrainedModel, batch: RolloutBatch) -> TokenScores:
    model.zero_grad()
    scores = score(batch, joined(backbone(model))(batch), output_head(model), model.config.vocab_size)
    weights = torch.full_like(scores.log_probs, 1 / scores.log_probs.numel())
    policy_loss(batch, scores.log_probs, weights, Clipped()).loss.backward()
    return scores.detach()


def select(batch: RolloutBatch, scores: TokenScores) -> Tensor:
    selection = S2T()(batch, scores, Ranks(), 0)
    ratio = (scores.log_probs - batch.old_log_probs).exp()
    weight = logit_gradient_weight(ratio, batch.advantages[:, None], torch.zeros_like(selection.silenced))
    squared = squared_logit_gradient_norm(weight, scores.probs, scores.collision)
    return squared[selection.silenced].sum() / squared.sum()


def normaliser_(z: Tensor) -> Tensor:
    """What log-probs alone need of one part of the vocabulary."""
    peak = z.amax(-1)
    return z.sub_(peak[:, None]).exp_().sum(-1).log() + peak


def seconds(function: Callable[..., object], *arguments: object) -> float:
    started = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--completions", type=int, default=64)
    parser.add_argument("--length", type=int, nargs="+", default=[255, 31], help="tokens, one number for each model")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    print("model            tokens   update s   statistics   selection   both")
    for name, length in zip(arguments.models, arguments.length, strict=True):
        model = MODELS[name]()
        vocabulary = model.config.vocab_size
        batch = random_batch(arguments.completions, length, vocabulary)
        tokens = arguments.completions * length
        scores = update(model, batch)
        part = torch.randn(tokens, max(1, min(vocabulary, part_elements(torch.device("cpu")) // tokens)))
        parts = vocabulary / part.shape[1]
        rounds = []
        for _ in range(arguments.repeats):
            of_update = seconds(update, model, batch)
            # One part of the vocabulary is over so soon that the difference is taken from many of them.
            extra = [seconds(tally_, part.clone()) - seconds(normaliser_, part.clone()) for _ in range(20)]
            of_selection = median(seconds(select, batch, scores) for _ in range(20))
            rounds.append((of_update, median(extra) * parts / of_update, of_selection / of_update))
        of_update, statistics, selection = (median(column) for column in zip(*rounds, strict=True))
        print(
            f"{name:15s}   {tokens:6d}   {of_update:8.3f}   {statistics:10.3%}   {selection:9.3%}"
            f"   {statistics + selection:.3%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
