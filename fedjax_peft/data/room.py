"""The room that a maximum length leaves to the texts inside a request."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from fedjax_peft.data.conversations import Conversation
from fedjax_peft.data.templates import render, template_of
from fedjax_peft.data.text import clean
from fedjax_peft.data.tokens import whole

__all__ = ["Room"]


class Room(NamedTuple):
    """How long a conversation may be."""

    tokenizer: Any
    """A fast tokenizer of ``transformers``."""
    template: str | None
    """See :func:`fedjax_peft.data.templates.template_of`."""
    max_length: int
    """Tokens of a conversation, its answer included."""

    def excess(self, conversations: Sequence[Conversation]) -> list[int]:
        """Returns how many tokens each conversation has too many; 0 where it fits.

        Raises:
          InputError: the template cannot be used.
        """
        template = template_of(self.tokenizer, self.template)
        texts = [
            render(self.tokenizer, template, [{**m, "content": clean(m["content"])} for m in one])
            for one in conversations
        ]
        encodings = whole(self.tokenizer, [one.text for one in texts])
        return [max(len(encoding.ids) - self.max_length, 0) for encoding in encodings]

    def cut(self, text: str, tokens: int) -> str:
        """Returns a text without its last tokens; empty if there are no more than these."""
        text = clean(text)
        [encoding] = whole(self.tokenizer, [text])
        kept = len(encoding.ids) - tokens
        return text[: encoding.offsets[kept][0]].rstrip() if kept > 0 else ""
