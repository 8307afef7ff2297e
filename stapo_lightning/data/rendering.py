"""Prompts -> what the policy reads: the chat template, where there is one to apply, and token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from stapo_lightning.data.prompts import TokenizedPrompts
from stapo_lightning.errors import ConfigError
from stapo_lightning.prompt import Prompt


def tokenize(prompts: Sequence[Prompt], tokenizer: Any) -> TokenizedPrompts:
    """Renders the prompts that carry messages, each with a generation prompt, and tokenises all.

    A rendered template holds its own start token, so none is added there; plain text gets what the tokenizer adds.

    Args:
        prompts: The problems.
        tokenizer: The policy's tokenizer.

    Raises:
        ConfigError: There are messages and the tokenizer has no chat template, or the template refuses them.

    """
    rendered = [_rendered(prompt, tokenizer) if prompt.messages else prompt for prompt in prompts]
    ids: list[Sequence[int]] = [()] * len(rendered)
    for chat in (False, True):
        rows = [i for i, prompt in enumerate(rendered) if bool(prompt.messages) == chat]
        if rows:
            texts = [rendered[i].text for i in rows]
            found = tokenizer(texts, add_special_tokens=not chat, return_attention_mask=False)["input_ids"]
            for row, row_ids in zip(rows, found, strict=True):
                ids[row] = row_ids
    return TokenizedPrompts(rendered, ids)


def _rendered(prompt: Prompt, tokenizer: Any) -> Prompt:
    if not tokenizer.chat_template:
        raise ConfigError(
            [
                "wording.chat_template=true, but the policy's tokenizer has no chat template; set it to false, or"
                " model.policy to a model that has one"
            ]
        )
    messages = [{"role": role, "content": content} for role, content in prompt.messages]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # what a template raises is up to its author
        roles = ", ".join(role for role, _ in prompt.messages)
        raise ConfigError(
            [
                f"the policy's chat template refuses the messages ({roles}) of {prompt.messages[-1][1][:60]!r}"
                f" ({type(error).__name__}: {error}); correct the rows or set wording.chat_template to false"
            ]
        ) from error
    return replace(prompt, text=text)
