"""What the policy reads: chat template or plain text, with one start token where there is one."""

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from stapo_lightning.data.rendering import tokenize
from stapo_lightning.errors import ConfigError
from stapo_lightning.prompt import Prompt
from tests.doubles import TINY

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
PLAIN = Prompt("From 1: +2.", "3")
CHAT = Prompt("ignored", "3", source="s", messages=(("system", "Be brief."), ("user", "From 1: +2.")))


@pytest.fixture
def tokenizer():
    """The tiny policy's tokenizer, which then starts every text with a start token as Llama's does."""
    made = AutoTokenizer.from_pretrained(TINY, bos_token="<end>")
    made.add_bos_token = True
    made.backend_tokenizer.post_processor = _starts_with("<end>", made.convert_tokens_to_ids("<end>"))
    made.chat_template = TEMPLATE
    return made


def _starts_with(token, number):
    return TemplateProcessing(single=f"{token} $A", special_tokens=[(token, number)])


def test_plain_text_gets_what_the_tokenizer_adds(tokenizer):
    found = tokenize([PLAIN], tokenizer)
    assert found.prompts == [PLAIN]
    assert found.token_ids[0] == tokenizer(PLAIN.text)["input_ids"]
    assert found.token_ids[0].count(tokenizer.bos_token_id) == 1


def test_a_chat_template_has_its_own_start_token_and_no_second(tokenizer):
    found = tokenize([CHAT], tokenizer)
    assert found.prompts[0].text == "<end>system: Be brief.\nuser: From 1: +2.\nassistant: "
    assert found.token_ids[0].count(tokenizer.bos_token_id) == 1
    messages = [{"role": role, "content": content} for role, content in CHAT.messages]
    assert found.token_ids[0] == tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert (found.prompts[0].answer, found.prompts[0].source) == ("3", "s")


def test_a_mixture_keeps_its_order(tokenizer):
    other = Prompt("From 2: +2.", "4")
    found = tokenize([PLAIN, CHAT, other], tokenizer)
    assert [prompt.answer for prompt in found.prompts] == ["3", "3", "4"]
    assert list(found.token_ids) == [tokenize([prompt], tokenizer).token_ids[0] for prompt in (PLAIN, CHAT, other)]


def test_no_prompts(tokenizer):
    assert len(tokenize([], tokenizer)) == 0


def test_a_policy_without_a_chat_template(tokenizer):
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match=r"wording\.chat_template=true, but the policy's tokenizer has no chat"):
        tokenize([CHAT], tokenizer)
    assert len(tokenize([PLAIN], tokenizer)) == 1


def test_a_template_that_refuses_the_messages(tokenizer):
    tokenizer.chat_template = "{{ raise_exception('no system message') }}"
    with pytest.raises(ConfigError) as raised:
        tokenize([CHAT], tokenizer)
    (problem,) = raised.value.problems
    assert "refuses the messages (system, user) of 'From 1: +2.'" in problem
    assert "no system message" in problem and "set wording.chat_template to false" in problem
