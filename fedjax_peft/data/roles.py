"""Conversations in the roles that a template has.

A chat template that lacks a role refuses it, or leaves its text out without a word. A short
conversation shows which roles a template writes.
"""

import json
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from fedjax_peft.data import templates
from fedjax_peft.data.conversations import Conversation, Message, joined
from fedjax_peft.support.errors import users_level

_PROBE = "b0b"
_CALL = [{"type": "function", "id": "abcdefghi", "function": {"name": _PROBE, "arguments": {}}}]
_ASKED = {"role": "user", "content": "a"}
_SHORT: dict[str, list[Message]] = {
    "system": [{"role": "system", "content": _PROBE}, _ASKED],
    "tool": [
        *(_ASKED, {"role": "assistant", "content": "c"}),
        {"role": "tool", "content": _PROBE, "name": "d", "tool_call_id": "abcdefghi"},
    ],
    "tool_calls": [_ASKED, {"role": "assistant", "content": "", "tool_calls": _CALL}],
}
"""Role, or field of a message -> a conversation in which it has the text of the probe."""
_SAID = {
    "system": "has no role 'system': a system message comes before the first request, and an empty"
    " line between them",
    "tool": "has no role 'tool': what a tool answers is a message of the user",
    "tool_calls": "does not write tool_calls: a call is JSON at the end of the answer",
}


def fitted(
    tokenizer: Any, template: str, conversations: Sequence[Conversation]
) -> tuple[list[Conversation], tuple[str, ...]]:
    """Returns conversations in the roles of a template, and sentences on what has changed.

    A system message comes before the first request, as in Gemma's own use and in llama.cpp; what a
    tool answers becomes a message of the user; a call of a tool becomes JSON. Each sentence is a
    warning too.

    Args:
      template: of :func:`fedjax_peft.data.templates.template_of`.
    """
    used = {what for row in conversations for message in row for what in _uses(message)}
    chat = template == "chat"
    known = {what for what in used if (_writes(tokenizer, what) if chat else what == "system")}
    which = "The tokenizer's chat template" if chat else "A text template"
    said = tuple(f"{which} {_SAID[what]}." for what in _SAID if what in used - known)
    for sentence in said:
        warnings.warn(sentence, stacklevel=users_level())
    lacks = used - known
    return [_without(row, lacks) if lacks else row for row in conversations], said


def _uses(message: Message) -> Iterator[str]:
    if message["role"] in ("system", "tool"):
        yield message["role"]
    if "tool_calls" in message:
        yield "tool_calls"


def _writes(tokenizer: Any, what: str) -> bool:
    """Returns whether the chat template writes the text of a role, or of a field."""
    try:
        return _PROBE in templates.apply_chat(
            tokenizer, _SHORT[what], tokenize=False, add_generation_prompt=True
        )
    except Exception:  # jinja2 raises many kinds, also for raise_exception()
        return False


def _without(conversation: Conversation, lacks: set[str]) -> Conversation:
    found = []
    for message in conversation:
        if "tool_calls" in lacks and "tool_calls" in message:
            message = {**message}
            calls = [call.get("function", call) for call in message.pop("tool_calls")]
            texts = [message["content"], *(json.dumps(x, ensure_ascii=False) for x in calls)]
            message["content"] = "\n".join(text for text in texts if text)
        if message["role"] in lacks:
            message = {"role": "user", "content": message["content"]}
        found.append(message)
    return joined(found, ("user",))
