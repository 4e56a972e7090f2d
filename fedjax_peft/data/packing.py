"""Packing: several short examples in one row of tokens.

Rows of a client hold examples of this client only, so the clients stay apart. An example is never
cut or divided between rows. Tokens attend to their own example (``segment_ids``), and positions
start at 0 in each (``position_ids``), so the sum of losses and its gradient are those of the
unpacked examples.
"""

import bisect
from collections.abc import Container, Mapping, Sequence

import numpy as np

from fedjax_peft.data.tokens import padded
from fedjax_peft.support.errors import InputError

_TOKENS = ("loss_mask", "input_ids", "attention_mask")


def packed(
    columns: Mapping[str, np.ndarray], indices: Sequence[np.ndarray], length: int, name: str
) -> tuple[dict[str, np.ndarray], tuple[np.ndarray, ...]]:
    """Returns the packed rows of all clients, and the rows of each client.

    Args:
      columns: ``input_ids``, ``attention_mask`` and ``loss_mask`` ``[examples, tokens]``, padded on
        the right; of preferences also ``segment_ids``, ``position_ids`` and ``preferred``. Other
        columns are left out: they belong to single examples.
      length: tokens of a row.

    Returns:
      the columns of :func:`side_by_side`; of preferences also ``preferred``
      ``[rows, most texts of a row]``; and the rows of each client.

    Raises:
      InputError: data without these columns, or an example of more than ``length`` tokens.
    """
    missing = [column for column in _TOKENS if column not in columns]
    if missing:
        raise InputError(
            f"Packing is for instruction_tuning and preference; {name!r} has no {missing[0]!r}."
        )
    if is_packed(columns):
        raise InputError(f"The rows of {name!r} are packed already.")
    mask = columns["attention_mask"].astype(bool)
    sizes = mask.sum(axis=1)
    longest = max((int(sizes[rows].max(initial=0)) for rows in indices), default=0)
    if longest > length:
        raise InputError(
            f"An example of {name!r} has {longest} tokens, which do not fit into rows of {length}."
            f" Pack into longer rows, or load the data with max_length = {length}."
        )
    rows: list[list[int]] = []
    owned = []
    for own in indices:
        first = len(rows)
        rows += [[int(own[i]) for i in one] for one in bins(sizes[own], length)]
        owned.append(np.arange(first, len(rows), dtype=np.int32))
    made = side_by_side(columns, rows, length)
    if "preferred" in columns:
        texts = [np.concatenate([columns["preferred"][i] for i in one]) for one in rows]
        made["preferred"] = padded(texts, max(map(len, texts)), 0)[0].astype(bool)
    return made, tuple(owned)


def is_packed(columns: Container[str]) -> bool:
    """Returns whether rows hold several examples: only rows of one have a prompt of their own."""
    return "segment_ids" in columns and "prompt_ids" not in columns


def text_length(columns: Mapping[str, np.ndarray]) -> int | None:
    """Returns the tokens that each text was cut and padded to; None of rows that are no texts.

    A row of preferences has room for two texts. For packed rows these are the tokens of a row.
    """
    if "input_ids" not in columns:
        return None
    texts = 2 if "preferred" in columns and not is_packed(columns) else 1
    return int(columns["input_ids"].shape[1]) // texts


def side_by_side(
    columns: Mapping[str, np.ndarray], rows: Sequence[Sequence[int]], length: int
) -> dict[str, np.ndarray]:
    """Returns rows of tokens, each with the texts of some examples.

    Args:
      columns: as for :func:`packed`.
      rows: the examples of each row.
      length: tokens of a row.

    Returns:
      ``input_ids`` int32, ``attention_mask`` and ``loss_mask`` bool, ``segment_ids`` int32 (1, 2,
      ... for the texts of each row; 0: padding) and ``position_ids`` int32, each
      ``[rows, length]``.
    """
    mask = columns["attention_mask"].astype(bool)
    sizes, whole = mask.sum(axis=1), np.broadcast_to(np.arange(mask.shape[1]), mask.shape)
    one = np.broadcast_to(np.int32(1), mask.shape)
    of_text, place = columns.get("segment_ids", one), columns.get("position_ids", whole)
    ids, loss = columns["input_ids"], columns["loss_mask"].astype(bool)
    padding = ids[~mask][0] if not mask.all() else 0
    tokens, learned, segments, places = [], [], [], []
    for examples in rows:
        own = [(example, int(sizes[example])) for example in examples]
        tokens.append(np.concatenate([ids[example, :size] for example, size in own]))
        learned.append(np.concatenate([loss[example, :size] for example, size in own]))
        places.append(np.concatenate([place[i, :size] for i, size in own]))
        texts = [of_text[i, :size] for i, size in own]
        before = np.cumsum([0, *(part.max(initial=0) for part in texts)])
        pairs = zip(texts, before, strict=False)
        segments.append(np.concatenate([part + first for part, first in pairs]))
    packed = {
        "input_ids": padded(tokens, length, padding)[0],
        "segment_ids": padded(segments, length, 0)[0],
        "position_ids": padded(places, length, 0)[0],
    }
    packed["attention_mask"] = packed["segment_ids"] > 0
    # Nothing comes before the first token of a text.
    packed["loss_mask"] = (padded(learned, length, 0)[0] > 0) & (packed["position_ids"] > 0)
    return packed


def bins(sizes: np.ndarray, capacity: int) -> list[list[int]]:
    """Returns groups of items whose sizes add up to at most ``capacity``.

    Best fit, largest first: every item goes to the fullest group that has room for it. Equal sizes
    keep their order, so the result depends on the sizes only.

    Args:
      sizes: of the items, int ``[n]``, each at most ``capacity``.
    """
    groups: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (what is left, group), sorted
    for item in np.argsort(-sizes, kind="stable"):
        size = int(sizes[item])
        at = bisect.bisect_left(room, (size, -1))
        if at == len(room):
            left, group = capacity, len(groups)
            groups.append([])
        else:
            left, group = room.pop(at)
        groups[group].append(int(item))
        bisect.insort(room, (left - size, group))
    return groups
