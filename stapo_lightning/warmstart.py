"""Supervised warm start: makes the tiny policy that ships in `assets`, or prepares a user's own model.

    python -m stapo_lightning.warmstart --output stapo_lightning/assets/tiny_qwen3

Reinforcement learning needs a policy that is sometimes right. This one is trained on worked solutions in which a share
of the tokens is replaced by junk, so that its tail holds real low-probability tokens, as a pretrained model's does.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import torch
from jsonargparse import auto_cli
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from stapo_lightning.data.arithmetic import OPENERS, ArithmeticPrompts
from stapo_lightning.data.prompts import PromptSource
from stapo_lightning.models import load_causal_lm, load_tokenizer
from stapo_lightning.schedule import CosineWithWarmup

_WORDS = ("From ", "Answer ", "\\boxed{", ". ", ", ", ": ", *(f"{word} " for word in OPENERS))
_CHARACTERS = "0123456789+-*/=().,:;?!{} \n" + "abcdefghijklmnopqrstuvwxyz" + "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def arithmetic_tokenizer() -> PreTrainedTokenizerFast:
    """About 90 tokens: words of the worked solutions and single characters; pad, end and unknown are three tokens."""
    special = ["<pad>", "<end>", "<unk>"]
    vocabulary = {token: i for i, token in enumerate([*special, *_WORDS, *_CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    longest_first = sorted(_WORDS, key=len, reverse=True)
    pattern = "|".join("".join(f"\\{c}" if not c.isalnum() else c for c in word) for word in longest_first)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(f"{pattern}|[\\s\\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<end>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )


def tiny_qwen3(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """A Qwen3 of about 0.2 million parameters with random weights."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    return AutoModelForCausalLM.from_config(config).train()


def warm_start(
    output: str,
    policy: str | None = None,
    prompts: PromptSource | None = None,
    updates: int = 800,
    batch_size: int = 128,
    lr: float = 3e-3,
    junk: float = 0.01,
    seed: int = 0,
) -> None:
    """Trains on worked solutions and saves model and tokenizer as a Hugging Face folder.

    Args:
        output: Folder to write.
        policy: Folder or hub id to start from; null makes a tiny Qwen3 with random weights and its own tokenizer.
        prompts: Problems with worked solutions; null takes 40,000 of the arithmetic split "warmstart",
            20 % of their steps with a slip.
        updates: Optimiser steps.
        batch_size: Solutions of one step.
        lr: Highest learning rate of AdamW; 20 warm-up steps, then a cosine to a tenth of it.
        junk: Probability that a token of a solution is replaced by a random one of the vocabulary, in [0, 1).
        seed: Seed of weights, order and junk: the same seed gives the same folder.

    """
    torch.manual_seed(seed)
    source = random.Random(seed)
    tokenizer = arithmetic_tokenizer() if policy is None else load_tokenizer(policy)
    model = tiny_qwen3(tokenizer) if policy is None else load_causal_lm(policy, "sdpa")
    problems = (prompts or ArithmeticPrompts("warmstart", 40000, slips=0.2)).load()
    schedule = CosineWithWarmup(updates, 20, final=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    for update in range(updates):
        chosen = source.sample(problems, batch_size)
        loss = _solution_loss(model, tokenizer, [p.text for p in chosen], [p.solution for p in chosen], junk, source)
        for group in optimizer.param_groups:
            group["lr"] = lr * schedule(update)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if update % 100 == 0 or update == updates - 1:
            print(f"update {update:5d}  cross-entropy {loss.item():.4f} nats a token", flush=True)
    Path(output).mkdir(parents=True, exist_ok=True)
    model.eval().save_pretrained(output)
    tokenizer.save_pretrained(output)
    print(f"saved {output}")


def _solution_loss(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    solutions: Sequence[str],
    junk: float,
    source: random.Random,
) -> Tensor:
    """Mean cross-entropy of the solutions' tokens, end token included; the prompts' tokens are only read."""
    questions = tokenizer(list(texts))["input_ids"]
    answers = tokenizer(list(solutions), add_special_tokens=False)["input_ids"]
    width = max(len(q) + len(a) + 1 for q, a in zip(questions, answers, strict=True))
    ids = torch.full((len(questions), width), tokenizer.pad_token_id)
    labels = torch.full_like(ids, -100)
    for row, (question, answer) in enumerate(zip(questions, answers, strict=True)):
        written = [source.randrange(len(tokenizer)) if source.random() < junk else token for token in answer]
        written.append(tokenizer.eos_token_id)
        ids[row, : len(question) + len(written)] = torch.tensor(question + written)
        labels[row, len(question) : len(question) + len(written)] = torch.tensor(written)
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


def main() -> None:
    """Console entry point."""
    auto_cli(warm_start, as_positional=False)


if __name__ == "__main__":
    main()
