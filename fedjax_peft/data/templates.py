"""Templates: conversations to text, with the characters that a model learns to write.

A *chat* template is the tokenizer's own (``tokenizer.chat_template``). A *text* template is a
string with ``{prompt}``, for base models that have no chat template; ``plain`` is ours.
"""

import datetime
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from fedjax_peft.data.conversations import Conversation
from fedjax_peft.data.tokens import beginning, whole
from fedjax_peft.support.errors import InputError

PLAIN = "Read the request and answer it.\n\nRequest:\n{prompt}\n\nAnswer:\n"
"""The text template ``plain``."""
_FIELD = "{prompt}"
_PROBE = "b0b"
_TODAY = datetime.date(2024, 7, 26)
_CLOCK = re.compile(r"strftime_now\(\s*(['\"])(.*?)\1\s*\)")
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Rendered(NamedTuple):
    """A conversation as text."""

    text: str
    spans: tuple[tuple[int, int], ...]
    """The first character, and the one after the last, of each answer with its end token."""
    prompt: str
    """The text before the last answer, from which a model writes the answer."""


def template_of(tokenizer: Any, template: str | None) -> str:
    """Returns ``chat``, or a text template.

    Args:
      template: ``chat``: the tokenizer's chat template; ``plain``: :data:`PLAIN`; or an own text
        with ``{prompt}``. None: ``chat`` if the tokenizer has a chat template, else ``plain``.

    Raises:
      InputError: another template, a chat template that the tokenizer does not have, or a tokenizer
        that has no token for the end of a text, which ends the answers of text templates.
    """
    has_chat = bool(getattr(tokenizer, "chat_template", None))
    if template is None:
        template = "chat" if has_chat else "plain"
    if template == "chat":
        if not has_chat:
            raise InputError(
                "template = 'chat' needs a tokenizer with a chat template, and this one has none:"
                " it belongs to a base model. Use template = 'plain', or an own text with {prompt}."
            )
        return "chat"
    text = PLAIN if template == "plain" else template
    if text.count(_FIELD) != 1:
        raise InputError(
            f"The template {template!r} is neither 'chat' nor 'plain' nor a text that contains"
            " {prompt} once."
        )
    if tokenizer.eos_token is None:
        raise InputError(
            f"{type(tokenizer).__name__} has no token for the end of a text (eos_token), which"
            " ends an answer."
        )
    return text


def render(
    tokenizer: Any, template: str, conversation: Conversation, *, where: str = "The conversation"
) -> Rendered:
    """Returns a conversation as text.

    With a text template, an answer and the token for the end of a text follow the filled-in
    template; the next turn comes directly after it. Spaces at the end of the template belong to the
    answer, as in most tokenizers. A system message comes before the first prompt, after which an
    empty line follows.

    With a chat template, an answer begins where the template's generation prompt ends, and ends
    where the template ends if it gets the messages up to this answer. White space after the
    template's end-of-turn token is not a part of it.

    Args:
      conversation: the messages. If the last one is not an answer, ``prompt`` is the whole text.
      where: names the conversation in messages.

    Raises:
      InputError: the chat template refuses the conversation, or it changes earlier turns when a
        later one is added, so that the answers cannot be found in its text.
    """
    if template == "chat":
        return _chat(tokenizer, conversation, where)
    return _text(tokenizer, template, conversation)


def prompt_text(tokenizer: Any, template: str, conversation: Conversation, where: str) -> str:
    """Returns the text from which a model writes the last answer of a conversation.

    A last message that is an answer is not part of it.
    """
    if conversation and conversation[-1]["role"] == "assistant":
        conversation = conversation[:-1]
    if template == "chat":
        return _applied(tokenizer, conversation, True, where)
    return _text(tokenizer, template, conversation).prompt


def end_tokens(tokenizer: Any, template: str) -> tuple[int, ...]:
    """Returns the tokens after which an answer is complete.

    They are the token for the end of a text and, for a chat template, the special token that comes
    after an answer.
    """
    ends = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    if template == "chat":
        probe, where = [("user", "a"), ("assistant", _PROBE)], "A short conversation"
        messages = [{"role": role, "content": content} for role, content in probe]
        text = _applied(tokenizer, messages, False, where)
        rest = text[text.rfind(_PROBE) + len(_PROBE) :]
        after = whole(tokenizer, [rest])[0].ids
        if after and after[0] in {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}:
            ends.append(after[0])
    return tuple(dict.fromkeys(ends))


def apply_chat(tokenizer: Any, conversation: Sequence[Any], **options: Any) -> Any:
    """Returns what the tokenizer's ``apply_chat_template`` does, the same on every day.

    Templates that write the date (Llama 3's) get one day, which Llama 3's has as its default. The
    data have no thoughts, so a template that can think (Qwen3's) ends a prompt after empty ones.
    """
    # Functions cannot be passed to a template, so the calls are replaced by what they return.
    dated = _CLOCK.sub(lambda x: repr(_TODAY.strftime(x[2])), tokenizer.get_chat_template())
    fixed = {"chat_template": dated, "enable_thinking": False}
    return tokenizer.apply_chat_template(list(conversation), **fixed, **options)


def marks_answers(tokenizer: Any) -> bool:
    """Returns whether a chat template marks answers itself, by ``{% generation %}``."""
    return bool(_GENERATION.search(tokenizer.get_chat_template()))


# Text templates.


def _text(tokenizer: Any, template: str, conversation: Conversation) -> Rendered:
    text = prompt = tokenizer.bos_token if beginning(tokenizer) else ""
    spans, system = [], ""
    plain = template.rstrip(" ")
    spaces = template[len(plain) :]
    for message in conversation:
        content = message["content"]
        if message["role"] == "system":
            system = f"{content}\n\n"
        elif message["role"] == "user":
            text += plain.replace(_FIELD, system + content)
            prompt, system = text, ""
        else:
            start = len(text)
            text += f"{spaces}{content}{tokenizer.eos_token}"
            spans.append((start, len(text)))
    return Rendered(text, tuple(spans), prompt)


# Chat templates.


def _chat(tokenizer: Any, conversation: Conversation, where: str) -> Rendered:
    prompt = prompt_text(tokenizer, "chat", conversation, where)
    if conversation[-1]["role"] != "assistant":
        return Rendered(prompt, (), prompt)
    text = _applied(tokenizer, conversation, False, where)
    if marks_answers(tokenizer):
        return Rendered(text, (), prompt)  # the tokenizer finds them
    return Rendered(text, answer_spans(tokenizer, conversation, where), prompt)


def answer_spans(
    tokenizer: Any, conversation: Conversation, where: str
) -> tuple[tuple[int, int], ...]:
    """Returns where the answers are in the text of the chat template, by comparing prefixes.

    Raises:
      InputError: the template changes earlier turns when a later one is added.
    """
    text = _applied(tokenizer, conversation, False, where)
    spans = []
    for number, message in enumerate(conversation):
        if message["role"] != "assistant":
            continue
        before = _applied(tokenizer, conversation[:number], True, where)
        after = _applied(tokenizer, conversation[: number + 1], False, where)
        for part in (before, after):
            if not text.startswith(part):
                raise InputError(
                    f"{where}: the tokenizer's chat template writes the turns up to message"
                    f" {number + 1} differently when later messages follow, so its answers cannot"
                    " be found. Use a chat template with {% generation %} around the answers,"
                    " conversations of a single answer, or template = 'plain'."
                )
        content = message["content"]
        has_end_token = not content.strip() or not after.rstrip().endswith(content.rstrip())
        end = len(after.rstrip()) if has_end_token else len(after)
        spans.append((len(before), max(end, len(before))))
    return tuple(spans)


def _applied(tokenizer: Any, conversation: Sequence[Any], generation: bool, where: str) -> str:
    try:
        return apply_chat(tokenizer, conversation, tokenize=False, add_generation_prompt=generation)
    except Exception as error:  # jinja2 raises many kinds, also for raise_exception()
        raise InputError(
            f"{where} does not fit the tokenizer's chat template:"
            f" {' '.join(str(error).split()) or type(error).__name__}."
        ) from error
