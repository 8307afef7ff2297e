"""The words around a problem: what the policy reads besides it."""

from __future__ import annotations

from dataclasses import dataclass

from stapo_lightning.data.columns import Messages


@dataclass(frozen=True)
class Wording:
    r"""What stands around each problem. Everything is taken literally: write the line breaks you want.

    Attributes:
        prefix: Written before the problem.
        suffix: Written behind it. The paper's asks for step-by-step reasoning with the final answer in \boxed{}.
        chat_template: Whether the policy's chat template is applied, with a generation prompt; needs a tokenizer that
            has one. False: the policy reads prefix, problem and suffix and nothing else.
        remove_prefix: Text taken off the start of each problem that has it, such as the instructions that a published
            data set carries. That no problem has it is an error.
        remove_suffix: The same at the end.

    """

    prefix: str = ""
    suffix: str = ""
    chat_template: bool = False
    remove_prefix: str = ""
    remove_suffix: str = ""

    def bare(self, messages: Messages) -> Messages:
        """The messages without remove_prefix and remove_suffix."""
        if not (self.remove_prefix or self.remove_suffix):
            return messages
        role, text = messages[-1]
        text = text.removeprefix(self.remove_prefix.strip()).removesuffix(self.remove_suffix.strip())
        return (*messages[:-1], (role, text.strip()))

    def dress(self, messages: Messages) -> tuple[str, Messages]:
        """Text of the prompt and, where a chat template will be applied, its messages.

        Raises:
            ValueError: The messages are a conversation, and plain text cannot say who speaks.

        """
        role, text = messages[-1]
        dressed = (*messages[:-1], (role, f"{self.prefix}{text}{self.suffix}"))
        speakers = {speaker for speaker, _ in dressed} - {"system", "user"}
        if speakers and not self.chat_template:
            raise ValueError(
                f"the prompt has messages of {', '.join(sorted(speakers))}, which plain text cannot tell from the"
                " user's; set wording.chat_template to true"
            )
        return "\n\n".join(content for _, content in dressed), dressed if self.chat_template else ()
