"""Conversations: lists of messages, and the common forms of rows that hold one.

A message is ``{"role": "system" | "user" | "assistant", "content": text}``. A conversation has
perhaps a system message first; then user and assistant take turns.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fedjax_peft.data.table import Table, brief, require
from fedjax_peft.data.trees import COLUMNS as OF_TREES
from fedjax_peft.data.trees import is_tree, with_conversations
from fedjax_peft.support.errors import InputError, nearest

Message = dict[str, str]
Conversation = list[Message]

_ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
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


def with_messages(table: Table) -> Table:
    """Returns the table with one column ``messages`` in place of the columns of its form.

    The forms, tried in this order, are: ``messages`` (a list of ``role`` and ``content``);
    ``conversations`` (ShareGPT: a list of ``from`` and ``value``); ``prompt`` and ``completion``
    (or ``response``), perhaps ``system``; ``instruction`` and ``output`` (or ``response``), perhaps
    ``input`` (or ``context``), which follows the instruction after an empty line. Rows may also be
    the messages of trees (:mod:`fedjax_peft.data.trees`), which come first. Messages after the last
    answer are left out.

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
    if found[0] in _LISTS:
        rows = table.numbered(table.columns[found[0]])
        conversations, used = [_checked(table.place(row), value) for row, value in rows], {*found}
    else:
        conversations, used = _from_columns(table, *found)
    columns = {name: x for name, x in table.columns.items() if name not in used}
    return replace(table, columns={"messages": conversations, **columns})


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


def _checked(where: str, value: Any) -> Conversation:
    """Returns the conversation of a row, up to its last answer."""
    if not isinstance(value, Sequence) or isinstance(value, str) or not len(value):
        raise InputError(f"{where} has {brief(value)} in place of a list of messages.")
    messages, before = [], None
    for number, item in enumerate(value, 1):
        message = _message(f"{where}: message {number}", item)
        role, allowed = message["role"], _NEXT[before]
        if role not in allowed:
            place = "first" if before is None else f"after one of the role {before!r}"
            raise InputError(
                f"{where}: message {number} has the role {role!r} and comes {place}; the role there"
                f" must be {' or '.join(map(repr, allowed))}."
            )
        messages.append(message)
        before = role
    while messages and messages[-1]["role"] != "assistant":
        messages.pop()
    if not messages:
        raise InputError(f"{where} has no message of the role 'assistant', so nothing to learn.")
    return messages


_NEXT: dict[str | None, tuple[str, ...]] = {
    None: ("system", "user"),
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user",),
}
"""A role -> the roles that may follow; None: the start."""


def _message(where: str, item: Any) -> Message:
    if not isinstance(item, Mapping):
        raise InputError(f"{where} is {brief(item)}, not an object with role and content.")
    keys = next((keys for keys in _KEYS if all(item.get(k) is not None for k in keys)), None)
    if keys is None:
        raise InputError(
            f"{where} has the fields {', '.join(map(str, item)) or 'none'}; it needs 'role' and"
            " 'content', or 'from' and 'value', with a text in each."
        )
    role, content = (item[key] for key in keys)
    if not isinstance(role, str) or role.lower() not in _ROLES:
        raise InputError(f"{where} has the role {brief(role)}. {nearest(str(role), _ROLES)}")
    if not isinstance(content, str):
        raise InputError(f"{where} has {brief(content)} in place of a text.")
    return {"role": _ROLES[role.lower()], "content": content}
