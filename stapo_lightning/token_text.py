"""How single tokens are shown to a reader: their text, its blanks made visible, and nothing of it taken for markup."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_BLANKS = str.maketrans({" ": "␣", "\n": "↵", "\t": "⇥", "\r": "␍"})


def token_texts(tokenizer: Any, ids: Iterable[int]) -> dict[int, str]:
    """What each token adds to a text: its spaces included, special tokens by their name.

    A token that is a part of a character is shown as the replacement character.

    Args:
        tokenizer: Of transformers.
        ids: Token ids, each as often as you like.

    """
    distinct = sorted(set(ids))
    settings = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    # Some tokenizers drop the space of a text's first token: a token behind itself keeps it.
    once = tokenizer.batch_decode([[i] for i in distinct], **settings)
    twice = tokenizer.batch_decode([[i, i] for i in distinct], **settings)
    return {
        i: both[len(one) :] if both.startswith(one) else one for i, one, both in zip(distinct, once, twice, strict=True)
    }


def visible(text: str) -> str:
    """The text with its spaces, line ends and tabs as signs."""
    return text.translate(_BLANKS)


def as_code(text: str) -> str:
    """The text as an HTML code element inside Markdown: every sign of it is an entity, so none of it acts as markup."""
    return f"<code>{''.join(c if c.isalnum() or c == ' ' else f'&#{ord(c)};' for c in text)}</code>"
