"""Conversations: lists of messages, and the common forms of rows that hold one.

A message is ``{"role": "system" | "user" | "assistant", "content": text}``. A conversation has
perhaps a system message first; then user and assistant take turns.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from fedjax_peft.data.table import Table, brief
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


class _Form(NamedTuple):
    """A form of rows."""

    needed: tuple[tuple[str, ...], ...]
    """One tuple for each column: its possible names, the first that is there counts."""
    optional: tuple[tuple[str, ...], ...]
    """Likewise, of columns that may be missing or have empty values."""
    message: Callable[..., Conversation]
    """(values of the needed columns, values of the optional columns) -> the conversation."""


def two_turns(prompt: str, completion: str) -> Conversation:
    """Returns the conversation of a request and its answer."""
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]


def _single(prompt: str, completion: str, system: str) -> Conversation:
    first = [{"role": "system", "content": system}] if system else []
    return [*first, *two_turns(prompt, completion)]


def _instruction(instruction: str, output: str, given: str) -> Conversation:
    return two_turns(f"{instruction}\n\n{given}" if given.strip() else instruction, output)


_FORMS = (
    _Form((("prompt",), ("completion", "response")), (("system",),), _single),
    _Form((("instruction",), ("output", "response")), (("input", "context"),), _instruction),
)
_LISTS = ("messages", "conversations", "conversation")
"""Columns of lists of messages."""
_OF_FORMS = [name for form in _FORMS for names in (*form.needed, *form.optional) for name in names]
COLUMNS = tuple(dict.fromkeys([*_LISTS, *_OF_FORMS, *OF_TREES]))
"""The columns that any of the forms reads."""


def form_of(columns: Collection[str]) -> tuple[str, ...] | None:
    """Returns the columns by which rows are known to hold conversations, None if there are none."""
    if is_tree(columns):
        return ("message_id", "parent_id", "role", "text")
    for name in _LISTS:
        if name in columns:
            return (name,)
    for form in _FORMS:
        found = [next((n for n in names if n in columns), None) for names in form.needed]
        if None not in found:
            return tuple(name for name in found if name is not None)
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
        conversations = [_checked(table, row, value) for row, value in rows]
        used = {*found}
    else:
        conversations, used = _from_columns(table, found)
    columns = {name: x for name, x in table.columns.items() if name not in used}
    return replace(table, columns={"messages": conversations, **columns})


def _from_columns(table: Table, found: tuple[str, ...]) -> tuple[list[Conversation], set[str]]:
    """Returns the conversations of a table of texts, and the names of its columns."""
    form = next(form for form in _FORMS if found[0] in form.needed[0])
    more = [next((n for n in names if n in table.columns), None) for names in form.optional]
    empty = [""] * len(table)
    columns = [table.columns[name] for name in found]
    columns += [empty if name is None else table.columns[name] for name in more]
    conversations = []
    for row, *values in table.numbered(*columns):
        texts = [
            _text(table, row, name, "" if value is None and name in more else value)
            for name, value in zip((*found, *more), values, strict=True)
        ]
        conversations.append(form.message(*texts))
    return conversations, {*found, *(name for name in more if name is not None)}


def _text(table: Table, row: int, name: str | None, value: Any) -> str:
    if not isinstance(value, str):
        raise table.error(row, f"has {brief(value)} in place of a text in the column {name!r}.")
    return value


def _checked(table: Table, row: int, value: Any) -> Conversation:
    """Returns the conversation of a row, up to its last answer."""
    where = table.place(row)
    if not isinstance(value, Sequence) or isinstance(value, str) or not len(value):
        raise InputError(f"{where} has {brief(value)} in place of a list of messages.")
    messages = [_message(f"{where}: message {i}", item) for i, item in enumerate(value, 1)]
    before = None
    for number, message in enumerate(messages, 1):
        role, allowed = message["role"], _NEXT[before]
        if role not in allowed:
            place = "first" if before is None else f"after one of the role {before!r}"
            raise InputError(
                f"{where}: message {number} has the role {role!r} and comes {place}; the role there"
                f" must be {' or '.join(map(repr, allowed))}."
            )
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
