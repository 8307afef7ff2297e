"""How single tokens are shown."""

import html
import re

from stapo_lightning.models import load_tokenizer
from stapo_lightning.token_text import as_code, token_texts, visible
from tests.doubles import TINY


class DropsFirstSpace:
    """Decodes as SentencePiece does: words begin with their space, and a text loses that of its first word."""

    words = (" the", " cat", "s", "<end>")

    def batch_decode(self, lines, skip_special_tokens, clean_up_tokenization_spaces):
        assert not skip_special_tokens and not clean_up_tokenization_spaces
        return ["".join(self.words[i] for i in line).removeprefix(" ") for line in lines]


def test_tokens_keep_their_spaces():
    assert token_texts(DropsFirstSpace(), [1, 0, 2, 3, 1]) == {0: " the", 1: " cat", 2: "s", 3: "<end>"}


def test_tokens_of_the_shipped_policy_join_to_its_text():
    tokenizer = load_tokenizer(TINY)
    ids = tokenizer("From 7: -9.\nSo 7-9=8. \\boxed{8}")["input_ids"] + [1]
    texts = token_texts(tokenizer, ids)
    assert "".join(texts[i] for i in ids) == "From 7: -9.\nSo 7-9=8. \\boxed{8}<end>"


def test_blanks_are_visible():
    assert visible(" a\tb\r\n") == "␣a⇥b␍↵"


def test_code_is_the_text_and_no_markup():
    hostile = "</code><script>alert(1)</script> `x` **y** [a](b) &amp; é"
    (inside,) = re.fullmatch(r"<code>(.*)</code>", as_code(hostile)).groups()
    assert html.unescape(inside) == hostile
    assert not set("<>`*[]_") & set(inside)
