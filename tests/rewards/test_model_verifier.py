"""The second verifier, with small models made here."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

from stapo_lightning.errors import ConfigError
from stapo_lightning.prompt import Prompt
from stapo_lightning.rewards import Completion, ModelVerifier

CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<reply>{% endif %}"
)


def _completion(text: str, answer: str = "4", messages: tuple = ()) -> Completion:
    return Completion(Prompt("What is 2 + 2?", answer, messages=messages), text, len(text), False)


def _bytes_tokenizer(chat: bool) -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={sign: i for i, sign in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    if chat:
        fast.chat_template = CHAT
    return fast


@pytest.fixture(scope="module", params=[True, False], ids=["chat", "plain"])
def folder(request, tmp_path_factory) -> Path:
    """A random Qwen3 over bytes whose labels differ from completion to completion."""
    path = tmp_path_factory.mktemp("judge")
    torch.manual_seed(1)
    config = Qwen3Config(
        vocab_size=256, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=4096, initializer_range=1.0,
        tie_word_embeddings=False,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    _bytes_tokenizer(request.param).save_pretrained(path)
    return path


def test_the_label_is_the_likeliest_of_three_as_the_first_token_of_the_reply(folder):
    template = folder / "template.txt"
    template.write_text("{question}{gold_answer}{llm_response}")  # short, so that the completion decides
    verifier = ModelVerifier(str(folder), template_file=str(template), batch_size=3)
    completions = [_completion(chr(97 + n) * (12 - n)) for n in range(12)]
    found = verifier.labels(completions, "cpu")
    assert len(set(found)) > 1  # a judge that always said the same would prove nothing

    # One by one, without padding, by the model's own forward.
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    labels = [tokenizer.encode(label)[0] for label in "ABC"]
    for completion, label in zip(completions, found, strict=True):
        text = verifier.request(completion)
        if tokenizer.chat_template:
            text = f"<user>{text}<reply>"
        with torch.no_grad():
            logits = model(torch.tensor([tokenizer.encode(text)])).logits[0, -1]
        assert label == "ABC"[int(logits[labels].argmax())]
    assert verifier(completions, "cpu") == [label == "A" for label in found]


def test_nothing_to_judge_loads_nothing():
    assert ModelVerifier("/no/such/model")([], "cpu") == []


def test_the_request_holds_question_gold_answer_and_completion_between_their_marks():
    request = ModelVerifier("m").request(_completion("It is \\boxed{5}."))
    assert "<Original Question Begin>:\nWhat is 2 + 2?\n<Original Question End>" in request
    assert "<Standard Answer Begin>:\n4\n<Standard Answer End>" in request
    assert "<Candidate's Answer Begin>:\nIt is \\boxed{5}.\n<Candidate's Answer End>" in request
    for label in ("A: CORRECT", "B: INCORRECT", "C: INVALID"):
        assert label in request


def test_a_chat_prompt_is_asked_in_the_users_words():
    chat = (("system", "Be brief."), ("user", "Two and two?"))
    assert "Begin>:\nTwo and two?\n<Original Question End>" in ModelVerifier("m").request(
        _completion("5", messages=chat)
    )


def test_what_a_completion_holds_is_not_taken_for_a_field():
    request = ModelVerifier("m").request(_completion("{gold_answer} {question}"))
    assert "Begin>:\n{gold_answer} {question}\n<Candidate's Answer End>" in request
    assert request.count("What is 2 + 2?") == 1


def test_of_a_long_completion_the_end_is_shown():
    request = ModelVerifier("m", max_chars=10).request(_completion("a" * 100 + "0123456789"))
    assert "Begin>:\n0123456789\n<Candidate's" in request


def test_a_template_of_ones_own(tmp_path):
    path = tmp_path / "template.txt"
    path.write_text("{llm_response}|{gold_answer}|{question}")
    verifier = ModelVerifier("m", template_file=str(path))
    assert verifier.request(_completion("five")) == "five|4|What is 2 + 2?"
    assert verifier.problems() == []


def test_all_problems_are_named(tmp_path):
    path = tmp_path / "template.txt"
    path.write_text("{llm_response}")
    found = ModelVerifier("m", template_file=str(path), batch_size=0, max_chars=0).problems()
    assert [problem.split(":")[0] for problem in found] == [
        "data.recheck.batch_size=0", "data.recheck.max_chars=0", f"data.recheck.template_file='{path}'",
    ]  # fmt: skip
    assert "holds no {question}, {gold_answer}" in found[2]
    assert "no such file" in ModelVerifier("m", template_file="/no/file").problems()[0]


def test_a_model_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match=r"data\.recheck\.model='/no/such/model': cannot be loaded"):
        ModelVerifier("/no/such/model")([_completion("5")], "cpu")


def test_a_tokenizer_without_the_labels_is_refused(folder, tmp_path):
    words = Tokenizer(models.WordLevel(vocab={"A": 0, "B": 1, "[unk]": 2}, unk_token="[unk]"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[unk]").save_pretrained(tmp_path)
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path)
    assert ModelVerifier(str(folder)).labels([_completion("5")], "cpu")
    with pytest.raises(ConfigError, match=r"\('A', 'B', 'C'\) are not three of its tokens"):
        ModelVerifier(str(tmp_path)).labels([_completion("5")], "cpu")
