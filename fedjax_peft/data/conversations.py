"""Conversations: lists of messages, and the common forms of rows that hold one.

A message is ``{"role": "system" | "user" | "assistant" | "tool", "content": text}``. A conversation
has perhaps a system message first; then user and assistant take turns. After an answer, which can
have ``tool_calls``, there may also be answers of tools.
"""

import json
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from fedjax_peft.data.table import Table, brief, require
from fedjax_peft.data.trees import COLUMNS as OF_TREES
from fedjax_peft.data.trees import is_tree, with_conversations
from fedjax_peft.support.errors import InputError, nearest, users_level

Message = dict[str, Any]
Conversation = list[Message]
Turns = Literal["skip", "join"]
"""What becomes of rows whose roles do not alternate."""

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    **dict.fromkeys(("tool", "function", "observation", "ipython"), "tool"),
}
"""The names of roles in files -> ours."""
_KEYS = (("role", "content"), ("from", "value"))
"""Names of the two fields of a message: those of OpenAI and Hugging Face, and ShareGPT's."""


def two_turns(prompt: str, completion: str) -> Conversation:
    """Returns the conversation of a request and its answer."""
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]


_FORMS = {
    "prompt": (("completion", "response"), ("system",)),
    "instruction": (("output", "response"), ("input", "context")),
}
"""Column of the request -> names of the column of the answer, and names of a further column that
may be missing or have empty values. The first name that is there counts."""
_LISTS = ("messages", "conversations", "conversation")
"""Columns of lists of messages."""
_FURTHER = [name for names in _FORMS.values() for some in names for name in some]
COLUMNS = tuple(dict.fromkeys([*_LISTS, *_FORMS, *_FURTHER, *OF_TREES]))
"""The columns that any of the forms reads."""


def form_of(columns: Collection[str]) -> tuple[str, ...] | None:
    """Returns the columns by which rows are known to hold conversations, None if there are none."""
    if is_tree(columns):
        return ("message_id", "parent_id", "role", "text")
    for name in _LISTS:
        if name in columns:
            return (name,)
    for request, (answers, _) in _FORMS.items():
        answer = next((name for name in answers if name in columns), None)
        if request in columns and answer is not None:
            return request, answer
    return None


def with_messages(table: Table, turns: Turns | None = None) -> Table:
    """Returns the table with one column ``messages`` in place of the columns of its form.

    The forms, tried in this order, are: ``messages`` (a list of ``role`` and ``content``);
    ``conversations`` (ShareGPT: a list of ``from`` and ``value``); ``prompt`` and ``completion``
    (or ``response``), perhaps ``system``, or both as lists of messages; ``instruction`` and
    ``output`` (or ``response``), perhaps ``input`` (or ``context``), which follows the instruction
    after an empty line. Rows may also be the messages of trees (:mod:`fedjax_peft.data.trees`),
    which come first. Messages after the last answer are left out.

    Args:
      turns: what becomes of rows whose roles do not alternate. ``skip``: they are left out.
        ``join``: messages of one role in a row become one, with an empty line between them, and
        answers before the first request are left out; a row where this is not enough is left out.
        None: they are an error. A warning, and a note of the table, count the rows.

    Raises:
      InputError: the columns are of no form, or a row (counted from 1) cannot be read.
    """
    if is_tree(table.columns):
        table = with_conversations(table)
    found = form_of(table.columns)
    if found is None:
        raise InputError(
            f"{table.origin} has no conversations, only the columns {', '.join(table.columns)}. It"
            " needs messages; or conversations; or prompt and completion; or instruction and"
            ' output. To use other columns, name them: columns = {prompt = "...", completion ='
            ' "..."}.'
        )
    if found[0] == "prompt" and any(isinstance(x, list) for x in table.columns["prompt"]):
        table, found = _one_list(table, *found), ("messages",)
    if found[0] in _LISTS:
        (table, conversations), used = _read_lists(table, found[0], turns), {*found}
    else:
        conversations, used = _from_columns(table, *found)
    columns = {name: x for name, x in table.columns.items() if name not in used}
    return replace(table, columns={"messages": conversations, **columns})


def _one_list(table: Table, request: str, answer: str) -> Table:
    """Returns a table with the messages of a request and its answer in one list, as TRL has them.

    Raises:
      InputError: a row has something else.
    """
    pairs = zip(
        *(require(table, name, list, "messages") for name in (request, answer)), strict=True
    )
    lists = [[*prompt, *completion] for prompt, completion in pairs]
    others = {name: x for name, x in table.columns.items() if name not in (request, answer)}
    return replace(table, columns={"messages": lists, **others})


def _from_columns(table: Table, request: str, answer: str) -> tuple[list[Conversation], set[str]]:
    """Returns the conversations of a table of texts, and the names of its columns."""
    further = next((name for name in _FORMS[request][1] if name in table.columns), None)
    columns = {name: require(table, name, str, "a text") for name in (request, answer)}
    if further is not None:
        given = ["" if text is None else text for text in table.columns[further]]
        filled = replace(table, columns={further: given})
        columns[further] = require(filled, further, str, "a text")
    conversations = []
    for prompt, completion, *more in zip(*columns.values(), strict=True):
        extra = more[0] if more else ""
        if request == "instruction":
            text = f"{prompt}\n\n{extra}" if extra.strip() else prompt
            conversations.append(two_turns(text, completion))
        else:
            first = [{"role": "system", "content": extra}] if extra else []
            conversations.append([*first, *two_turns(prompt, completion)])
    return conversations, {*columns}


def _read_lists(table: Table, column: str, turns: Turns | None) -> tuple[Table, list[Conversation]]:
    """Returns the rows that are conversations, up to their last answers, with the table's notes."""
    conversations, kept, changed, dropped = [], [], [], []
    for index, (row, value) in enumerate(table.numbered(table.columns[column])):
        messages, where = messages_of(table.place(row), value), table.place(row)
        fault = _fault(messages)
        if fault and turns == "join":
            messages = _alternating(messages)
            changed += [] if _fault(messages) else [row]
            fault = _fault(messages)
        if fault and turns is None:
            raise InputError(f"{where}{fault} {_REMEDY}")
        if fault:
            dropped.append(row)
            continue
        kept.append(index)
        last = max(i for i, x in enumerate(messages) if x["role"] == "assistant")
        conversations.append(messages[: last + 1])
    if not kept and len(table):
        raise InputError(f"No row of {table.origin} is a conversation whose roles alternate.")
    notes = [
        f"{len(rows)} of {len(table)} conversations of {table.origin} {what} The first is row"
        f" {rows[0]}."
        for rows, what in ((dropped, _DROPPED), (changed, _CHANGED))
        if rows
    ]
    for note in notes:
        warnings.warn(note, stacklevel=users_level())
    return replace(table.take(kept) if dropped else table, notes=(*table.notes, *notes)), (
        conversations
    )


_REMEDY = (
    'To leave such rows out, set turns = "skip"; to join messages of one role in a row,'
    ' turns = "join".'
)
_DROPPED = "are left out: their roles do not alternate, or they have no answer."
_CHANGED = (
    "are changed, so that their roles alternate: messages of one role in a row are joined, and"
    " answers before the first request are left out."
)


def messages_of(where: str, value: Any) -> Conversation:
    """Returns the messages of a list, in our roles and with texts as contents.

    Raises:
      InputError: it is not a list of messages.
    """
    if not isinstance(value, Sequence) or isinstance(value, str) or not len(value):
        raise InputError(f"{where} has {brief(value)} in place of a list of messages.")
    return [_message(f"{where}: message {n}", item) for n, item in enumerate(value, 1)]


def _fault(messages: Conversation) -> str:
    """Returns why the roles are not those of a conversation with an answer; empty if they are."""
    before = None
    for number, message in enumerate(messages, 1):
        role, allowed = message["role"], _NEXT[before]
        if role not in allowed:
            place = "first" if before is None else f"after one of the role {before!r}"
            return (
                f": message {number} has the role {role!r} and comes {place}; the role there must"
                f" be {' or '.join(map(repr, allowed))}."
            )
        before = role
    if not any(message["role"] == "assistant" for message in messages):
        return " has no message of the role 'assistant', so nothing to learn."
    return ""


_NEXT: dict[str | None, tuple[str, ...]] = {
    None: ("system", "user"),
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
}
"""A role -> the roles that may follow; None: the start."""


def joined(messages: Sequence[Message], roles: Collection[str]) -> Conversation:
    """Returns messages of which neighbours with the same one of these roles have become one."""
    found: Conversation = []
    for message in messages:
        role = message["role"]
        if not found or found[-1]["role"] != role or role not in roles:
            found.append(message)
            continue
        last = found[-1]
        texts = [text for text in (last["content"], message["content"]) if text]
        calls = [*last.get("tool_calls", ()), *message.get("tool_calls", ())]
        found[-1] = {**last, "content": "\n\n".join(texts)}
        found[-1] |= {"tool_calls": calls} if calls else {}
    return found


def _alternating(messages: Conversation) -> Conversation:
    """Returns messages whose roles alternate, if joining makes them so.

    Answers before the first request are left out, as FastChat does. A system message after the
    first message is one of the user.
    """
    first = next((i for i, x in enumerate(messages) if x["role"] == "user"), len(messages))
    start = [message for message in messages[:first] if message["role"] == "system"]
    later = [{**x, "role": "user"} if x["role"] == "system" else x for x in messages[first:]]
    return joined([*start, *later], ("system", "user", "assistant"))


def _message(where: str, item: Any) -> Message:
    if not isinstance(item, Mapping):
        raise InputError(f"{where} is {brief(item)}, not an object with role and content.")
    calls = _calls(where, item["tool_calls"]) if item.get("tool_calls") else []
    if calls and item.get("content") is None:
        item = {**item, "content": ""}
    keys = next((keys for keys in _KEYS if all(item.get(k) is not None for k in keys)), None)
    if keys is None:
        raise InputError(
            f"{where} has the fields {', '.join(map(str, item)) or 'none'}; it needs 'role' and"
            " 'content', or 'from' and 'value', with a text in each."
        )
    role, content = (item[key] for key in keys)
    if not isinstance(role, str) or role.lower() not in _ROLES:
        raise InputError(f"{where} has the role {brief(role)}. {nearest(str(role), _ROLES)}")
    further = {key: item[key] for key in _FURTHER_KEYS if isinstance(item.get(key), str)}
    message = {"role": _ROLES[role.lower()], "content": _text_of(where, content), **further}
    return message | ({"tool_calls": calls} if calls else {})


_FURTHER_KEYS = ("name", "tool_call_id")
"""Fields of a message that chat templates read, beside the role, the content and the calls."""


def _text_of(where: str, content: Any) -> str:
    """Returns a content as a text; the texts of a list of parts are lines, as in vLLM."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise InputError(f"{where} has {brief(content)} in place of a text.")
    texts = []
    for part in content:
        part = {"type": "text", "text": part} if isinstance(part, str) else part
        kind = part.get("type", "text") if isinstance(part, Mapping) else None
        if kind not in _TEXTS:
            what = f"a part of the type {kind!r}" if kind else f"the part {brief(part)}"
            raise InputError(f"{where} has {what}; only parts that are texts can be read.")
        if not isinstance(part.get("text"), str):
            raise InputError(f"{where} has the part {brief(part)}, which has no text.")
        texts.append(part["text"])
    return "\n".join(texts)


_TEXTS = ("text", "input_text", "output_text")
"""Types of parts that are texts, of OpenAI and Hugging Face."""


def _calls(where: str, calls: Any) -> list[dict[str, Any]]:
    """Returns the calls of tools, with their arguments as templates read them: as objects."""
    if not isinstance(calls, Sequence) or not all(isinstance(call, Mapping) for call in calls):
        raise InputError(f"{where} has {brief(calls)} in place of a list of calls of tools.")
    found = []
    for call in calls:
        function = call.get("function", call)
        if isinstance(function, Mapping) and isinstance(function.get("arguments"), str):
            try:
                parsed = json.loads(function["arguments"])
            except ValueError:
                parsed = function["arguments"]
            function = {**function, "arguments": parsed}
        found.append({**call, "function": function} if "function" in call else {**function})
    return found
