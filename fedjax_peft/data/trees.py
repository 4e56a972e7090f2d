"""Trees of messages, as OpenAssistant publishes them, to conversations: one for each tree."""

from dataclasses import replace
from typing import Any

from fedjax_peft.data.spelling import plain, whole_number
from fedjax_peft.data.table import Table, brief, is_missing

_NEEDED = ("message_id", "parent_id", "role", "text")
_OPTIONAL = ("rank", "deleted")
COLUMNS = (*_NEEDED, *_OPTIONAL)
"""The columns of a message."""
_BOOLS = {"True": True, "1": True, "False": False, "0": False}
_LAST = 1 << 30
"""The rank of a message that has none."""


def is_tree(columns: Any) -> bool:
    """Returns whether each row of a table is one message of a tree."""
    return {*_NEEDED} <= {*columns}


def with_conversations(table: Table) -> Table:
    """Returns a table of conversations, in the order of their first messages.

    The rows of the given table are messages: ``message_id``, ``parent_id`` (empty for the first of
    a tree), ``role``, ``text``, and perhaps ``rank`` (0 is the best of the replies to a message)
    and ``deleted``. Each tree gives one conversation: from its first message always on to the best
    reply (without ranks, to the first), as in the data set openassistant-guanaco. A tree without an
    answer gives none. Further columns are those of the first message, such as ``lang`` and
    ``author``.

    Raises:
      InputError: a row (counted from 1) whose parent is missing, whose id is not the only one, or
        whose rank or ``deleted`` has another value.
    """
    ids, parents, roles, texts = (table.columns[name] for name in _NEEDED)
    empty = [None] * len(table)
    ranks, deleted = (table.columns.get(name, empty) for name in _OPTIONAL)
    rows: dict[Any, int] = {}
    for i, name in enumerate(ids):
        rows.setdefault(name, i)
    replies: dict[Any, list[int]] = {}
    for i, (number, name, parent, gone) in enumerate(table.numbered(ids, parents, deleted)):
        parent = None if is_missing(parent) else parent
        if rows[name] != i:
            raise table.error(number, "has a message_id that is not unique.")
        if parent and parent not in rows:
            raise table.error(number, f"answers the message {parent!r}, which is missing.")
        if not _deleted(table, number, gone):
            replies.setdefault(parent or None, []).append(i)

    def rank(row: int) -> tuple[int, int]:
        return (_rank(table, table.row_numbers[row], ranks[row]), row)

    conversations, first = [], []
    for root in replies.get(None, []):
        path, seen = [root], {root}
        while nexts := [i for i in replies.get(ids[path[-1]], []) if i not in seen]:
            path.append(min(nexts, key=rank))
            seen.add(path[-1])
        messages = [{"role": roles[i], "content": texts[i]} for i in path]
        if len(messages) > 1:
            conversations.append(messages)
            first.append(root)
    others = {name: x for name, x in table.columns.items() if name not in COLUMNS}
    columns = {"messages": conversations, **{n: [x[i] for i in first] for n, x in others.items()}}
    numbers = table.row_numbers
    return replace(table, columns=columns, numbers=[numbers[i] for i in first])


def _deleted(table: Table, number: int, value: Any) -> bool:
    """Returns whether a message is deleted; a file may say so in texts."""
    known = "False" if is_missing(value) else plain(str(value))
    if known not in _BOOLS:
        fault = f"has {brief(value)} in the column 'deleted', which is neither true nor false."
        raise table.error(number, fault)
    return _BOOLS[known]


def _rank(table: Table, number: int, value: Any) -> int:
    known = str(_LAST) if is_missing(value) else plain(str(value))
    if not whole_number(known):
        raise table.error(number, f"has the rank {brief(value)}, which is no whole number.")
    return int(known)
