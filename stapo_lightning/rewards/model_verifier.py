"""A language model that looks again at what a rule rejected."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stapo_lightning.errors import ConfigError, bounded
from stapo_lightning.rewards.reward import Completion

# Labels and the marks around question, gold answer and completion are those that CompassVerifier was trained with
# (arXiv 2508.03686; github.com/open-compass/CompassVerifier, src/prompts.py); the instructions are in our own words.
_LABELS = ("A", "B", "C")
_TEMPLATE = """\
You grade the final answer of a candidate. The question is valid and the standard answer is right; solve nothing \
yourself. Look at the final answer alone and not at the way to it. It is correct if it means the same as the standard \
answer in every part that the question asks for: another notation, an equal value or a unit that goes without saying \
do no harm, and one wrong or missing part makes it incorrect. A completion that breaks off, repeats itself without \
end, or refuses to answer is invalid.
Answer with one letter and nothing else:
A: CORRECT
B: INCORRECT
C: INVALID
<Original Question Begin>:
{question}
<Original Question End>
<Standard Answer Begin>:
{gold_answer}
<Standard Answer End>
<Candidate's Answer Begin>:
{llm_response}
<Candidate's Answer End>
Judging the correctness of the candidate's answer:
"""
_FIELDS = ("{question}", "{gold_answer}", "{llm_response}")
_FIELD = re.compile("|".join(map(re.escape, _FIELDS)))


class ModelVerifier:
    """Asks a language model for one of three labels, A (correct), B (incorrect) or C (invalid); A overrules the rule.

    The label is the likeliest of the three as the first token of the reply, so one forward pass decides and nothing is
    sampled. The paper rechecks with CompassVerifier-3B.

    Args:
        model: Folder or hub id of a causal language model, such as opencompass/CompassVerifier-3B.
        template_file: A text file with {question}, {gold_answer} and {llm_response} to take in place of the built-in
            wording, such as the model's published prompt; "" for the built-in one.
        max_chars: Of a longer completion the last so many characters are shown: the final answer stands there.
        batch_size: Completions judged at a time, at least 1.

    """

    def __init__(self, model: str, template_file: str = "", max_chars: int = 20_000, batch_size: int = 8) -> None:
        self.model = model
        self.template_file = template_file
        self.max_chars = max_chars
        self.batch_size = batch_size
        self._loaded: tuple[Any, Any, list[int]] | None = None

    def problems(self) -> list[str]:
        """What is wrong with the arguments, one sentence each."""
        found = bounded("data.recheck.batch_size", self.batch_size, at_least=1)
        found += bounded("data.recheck.max_chars", self.max_chars, at_least=1)
        if self.template_file and not Path(self.template_file).is_file():
            found.append(f"data.recheck.template_file={self.template_file!r}: no such file")
        elif missing := [name for name in _FIELDS if name not in self._template()]:
            found.append(f"data.recheck.template_file={self.template_file!r}: holds no {', '.join(missing)}")
        return found

    def __call__(self, completions: Sequence[Completion], device: Any) -> list[bool]:
        """One verdict a completion, in order; the model is loaded at the first call."""
        return [label == "A" for label in self.labels(completions, device)]

    def labels(self, completions: Sequence[Completion], device: Any) -> list[str]:
        """One of "A", "B", "C" for each completion, in order.

        Args:
            completions: What to judge.
            device: Where the model goes.

        Raises:
            ConfigError: The model cannot be loaded, or the labels are not three tokens of its tokenizer.

        """
        found: list[str] = []
        for start in range(0, len(completions), self.batch_size):
            texts = [self.request(completion) for completion in completions[start : start + self.batch_size]]
            found += self._judge(texts, device)
        return found

    def request(self, completion: Completion) -> str:
        """What the model is asked about a completion, ahead of its chat template."""
        prompt = completion.prompt
        values = {
            "{question}": prompt.messages[-1][1] if prompt.messages else prompt.text,
            "{gold_answer}": prompt.answer,
            "{llm_response}": completion.text[-self.max_chars :],
        }
        # One pass over the template: what a completion holds is never taken for a field.
        return _FIELD.sub(lambda field: values[field[0]], self._template())

    def _template(self) -> str:
        return Path(self.template_file).read_text(encoding="utf-8") if self.template_file else _TEMPLATE

    def _judge(self, texts: list[str], device: Any) -> list[str]:
        import torch

        model, tokenizer, label_ids = self._load(device)
        if tokenizer.chat_template:
            texts = [
                tokenizer.apply_chat_template(
                    [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
                )
                for text in texts
            ]
        rows = tokenizer(texts, add_special_tokens=not tokenizer.chat_template)["input_ids"]
        width = max(map(len, rows))
        ids = torch.tensor([[0] * (width - len(row)) + row for row in rows], device=device)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        with torch.no_grad():
            logits = model(input_ids=ids, attention_mask=mask, position_ids=positions, logits_to_keep=1).logits[:, -1]
        return [_LABELS[i] for i in logits[:, label_ids].argmax(1).tolist()]

    def _load(self, device: Any) -> tuple[Any, Any, list[int]]:
        if self._loaded is None:
            import torch
            from transformers import AutoModelForCausalLM, AutoTokenizer

            dtype = torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32
            try:
                tokenizer = AutoTokenizer.from_pretrained(self.model)
                model = AutoModelForCausalLM.from_pretrained(self.model, dtype=dtype)
            except (OSError, ValueError) as error:
                reason = (str(error).strip() or type(error).__name__).splitlines()[0]
                raise ConfigError([f"data.recheck.model={self.model!r}: cannot be loaded ({reason})"]) from error
            tokens = [tokenizer.encode(label, add_special_tokens=False) for label in _LABELS]
            # Decoded again: a sign that a tokenizer does not know is one token as well.
            read = [tokenizer.decode(ids) if len(ids) == 1 else "" for ids in tokens]
            if tuple(read) != _LABELS:
                raise ConfigError([f"data.recheck.model={self.model!r}: {_LABELS} are not three of its tokens"])
            self._loaded = model.to(device).eval().requires_grad_(False), tokenizer, [ids[0] for ids in tokens]
        return self._loaded
