"""What stands around a problem."""

import pytest

from stapo_lightning.data import Wording

USER = (("user", "1 + 1?"),)


def test_nothing_is_added_unasked():
    assert Wording().dress(USER) == ("1 + 1?", ())


def test_prefix_and_suffix_are_literal():
    assert Wording(prefix="Q: ", suffix="\nA:").dress(USER) == ("Q: 1 + 1?\nA:", ())


def test_with_a_chat_template_the_words_stand_in_the_last_message():
    talk = (("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello"), ("user", "1 + 1?"))
    _, messages = Wording(suffix=" Think.", chat_template=True).dress(talk)
    assert messages == (*talk[:-1], ("user", "1 + 1? Think."))


def test_plain_text_joins_system_and_user():
    assert Wording(prefix="> ").dress((("system", "Be brief."), *USER)) == ("Be brief.\n\n> 1 + 1?", ())


def test_plain_text_cannot_tell_speakers_apart():
    with pytest.raises(ValueError, match=r"messages of assistant.*set wording\.chat_template to true"):
        Wording().dress((("user", "Hi"), ("assistant", "Hello"), *USER))


@pytest.mark.parametrize("prefix", ["Solve.", "Solve.\n\n", "  Solve.\n"])
def test_published_instructions_are_taken_off_whatever_space_is_around_them(prefix):
    wording = Wording(remove_prefix=prefix, remove_suffix="\n\nRemember.\n")
    assert wording.bare((("user", "Solve.\n\n1 + 1?\n\nRemember."),)) == USER
    assert wording.bare(USER) == USER
    assert wording.bare((("user", "Solve.\n\nRemember."),)) == (("user", ""),)


def test_instructions_inside_a_problem_stay():
    text = "To Solve. means what? Remember. it"
    assert Wording(remove_prefix="Solve.", remove_suffix="Remember.").bare((("user", text),)) == (("user", text),)


def test_only_the_last_message_is_stripped_of_them():
    talk = (("system", "Solve. now"), ("user", "Solve. 1 + 1?"))
    assert Wording(remove_prefix="Solve.").bare(talk) == (talk[0], *USER)
