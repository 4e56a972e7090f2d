"""What travels: a tree of arrays and a small table, as safetensors bytes.

Both sides know the form of every tree, so a message has no structure of its own: :func:`unpack` is
given the form, and refuses other leaves, shapes and dtypes. Nothing is read by pickle. An array
travels in the shortest of these ways::

    base      nothing, because it is equal to what the other side has
    as N      nothing, because it is equal to leaf N of the message
    places    the positions and the values of the entries that differ
    levels N  int8 levels, and a scale for each N, if an upload transform has rounded it so
    whole     the array
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from fedjax_peft.contracts import PyTree, Wire
from fedjax_peft.support.digests import digest
from fedjax_peft.support.display import show
from fedjax_peft.support.errors import InputError

_TRIED = 64
_ROOM = 1 << 20
"""The bytes that the table of a message may take beside its arrays."""


def leaves_of(values: PyTree, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """Returns the leaves of a tree by the names of their places."""
    found = jax.tree_util.tree_leaves_with_path(values, is_leaf=is_leaf)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in found}


def pack(
    values: PyTree,
    table: Mapping[str, Any],
    base: PyTree | None = None,
    wires: Mapping[str, Wire] | None = None,
) -> bytes:
    """Returns a message.

    Args:
      table: values of JSON.
      base: what the other side has, in the structure of ``values``; None: zeros.
      wires: leaf -> what an upload transform says of its size.
    """
    known: dict[str, Any] = {} if base is None else leaves_of(base)
    stored, seen, ways = dict[str, np.ndarray](), dict[tuple, int](), list[str]()
    leaves = leaves_of(values)
    for number, (name, leaf) in enumerate(leaves.items()):
        array = np.ascontiguousarray(leaf).reshape(np.shape(leaf))
        start = np.asarray(known[name]) if name in known else np.zeros_like(array)
        content = (str(array.dtype), array.shape, array.tobytes())
        if array.tobytes() == start.tobytes():
            ways.append("base")
        elif content in seen:
            ways.append(f"as {seen[content]}")
        else:
            way, parts = _shortest(array, start, (wires or {}).get(name))
            ways.append(way)
            stored |= {f"{number}:{part}": x for part, x in parts.items()}
            seen[content] = number
    text = json.dumps({"leaves": digest([*leaves]), "ways": ways, "rest": dict(table)})
    return safetensors.numpy.save(stored, {"table": text})


def _shortest(array: np.ndarray, start: np.ndarray, wire: Wire | None) -> tuple[str, dict]:
    """Returns the way in which an array travels, and its parts."""
    differs = array.reshape(-1) != start.reshape(-1)
    places = np.flatnonzero(differs).astype(np.int32)
    if len(places) * (4 + array.itemsize) < 0.9 * array.nbytes:
        return "places", {"places": places, "values": array.reshape(-1)[places]}
    if wire is not None:
        for size in _block_sizes(array, wire):
            if (levels := _levels(array, start, size, _most(wire))) is not None:
                return f"levels {size}", levels
    return "whole", {"whole": array}


def _block_sizes(array: np.ndarray, wire: Wire) -> list[int]:
    """Returns how many entries can share a scale, if the size of a leaf is that of levels."""
    blocks, rest = divmod(wire.extra, 32)
    if array.dtype != np.float32 or not 2 <= wire.bits <= 8 or rest or not blocks:
        return []
    if not np.isfinite(array).all():
        return []
    least = -(-array.size // blocks)
    most = array.size if blocks == 1 else (array.size - 1) // (blocks - 1)
    powers = [1 << k for k in range(most.bit_length()) if least <= 1 << k <= most]
    return list(dict.fromkeys([*powers, *range(least, min(most, least + _TRIED) + 1)]))


def _levels(
    array: np.ndarray, start: np.ndarray, size: int, most: int
) -> dict[str, np.ndarray] | None:
    """Returns an array's difference as levels and scales; None if more than rounding is lost."""
    blocks = -(-array.size // size)

    def in_blocks(x: np.ndarray) -> np.ndarray:
        return np.pad(x.reshape(-1), (0, blocks * size - x.size)).reshape(blocks, size)

    change = in_blocks(array - start)
    scales = np.abs(change).max(axis=1, keepdims=True)
    levels = np.round(most * (change / np.where(scales > 0, scales, 1)))
    # The change was rounded when it was added to the start: the best scale is one for all entries.
    weight = np.maximum((levels**2).sum(axis=1), 1)
    fitted = (most * (change * levels).sum(axis=1) / weight).astype(np.float32)
    parts = {"levels": levels.astype(np.int8).reshape(-1)[: array.size], "scales": fitted}
    made = _from_levels(parts["levels"], fitted, start, size, most)
    largest = in_blocks(np.maximum(np.abs(array), np.abs(start))).max(axis=1, keepdims=True)
    near = 2 * np.finfo(np.float32).eps * largest + 1e-30
    return parts if np.all(np.abs(in_blocks(made - array)) <= near) else None


def _most(wire: Wire) -> int:
    """Returns the highest level of a number of so many bits."""
    return int(2 ** (int(wire.bits) - 1) - 1)


def _from_levels(
    levels: np.ndarray, scales: np.ndarray, start: np.ndarray, size: int, most: int
) -> np.ndarray:
    change = levels.astype(np.float32) / np.float32(most) * np.repeat(scales, size)[: start.size]
    return start + change.reshape(start.shape)


def unpack(
    message: bytes,
    form: PyTree,
    sender: str,
    base: PyTree | None = None,
    wires: Mapping[str, Wire] | None = None,
) -> tuple[PyTree, dict[str, Any]]:
    """Returns the tree and the table of a message.

    Args:
      form: arrays, or their shapes, in the structure of the tree.
      sender: who has sent it, for errors.
      base: as for :func:`pack`, like ``wires``.

    Raises:
      InputError: the message is too large, is damaged, or has another form.
    """
    wanted, known = leaves_of(form), {} if base is None else leaves_of(base)
    stored, ways, table = _read(message, form, sender)
    if table["leaves"] != digest([*wanted]) or len(ways) != len(wanted):
        raise InputError(
            f"{sender} sent other leaves than there are here, such as {show(next(iter(wanted)))}:"
            " its model, PEFT method or algorithm is another one."
        )
    found: list[np.ndarray] = []
    for number, (way, (name, like)) in enumerate(zip(ways, wanted.items(), strict=True)):
        start = np.asarray(known[name]) if name in known else np.zeros(like.shape, like.dtype)
        parts = {key: stored.get(f"{number}:{key}") for key in _PARTS}
        try:
            made = _made(way, parts, found, start, (wires or {}).get(name))
        except (ValueError, IndexError, TypeError, AttributeError, OverflowError) as error:
            raise _damaged(sender, f"{name}: {error!r}") from None
        if made.shape != like.shape or made.dtype != like.dtype:
            raise InputError(
                f"{sender} sent {made.dtype}{[*made.shape]} as {show(name)}, and here it is"
                f" {like.dtype}{[*like.shape]}: its model or its PEFT method is another one."
            )
        found.append(made)
    return jax.tree.unflatten(jax.tree.structure(form), found), table["rest"]


def table_of(message: bytes, sender: str, form: PyTree | None = ()) -> dict[str, Any]:
    """Returns the table of a message, whose arrays may have another form; None: any size.

    Raises:
      InputError: the message is larger than one of this form can be, or is damaged.
    """
    rest: dict[str, Any] = _read(message, form, sender)[2]["rest"]
    return rest


_PARTS = ("whole", "places", "values", "levels", "scales")


def _read(
    message: bytes, form: PyTree | None, sender: str
) -> tuple[dict[str, np.ndarray], list[str], dict]:
    """Returns the arrays of a message, how each leaf travels, and the table."""
    most = _ROOM + 2 * sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(form))
    if form is not None and len(message) > most:
        raise InputError(
            f"{sender} sent {len(message):,} bytes, and here a message has at most {most:,}."
        )
    try:
        stored = safetensors.numpy.load(message)
        size = int.from_bytes(message[:8], "little")
        table = json.loads(json.loads(message[8 : 8 + size])["__metadata__"]["table"])
        ways = [str(way) for way in table["ways"]]
        if not isinstance(table["rest"], dict) or not isinstance(table["leaves"], str):
            raise ValueError("its table is none")
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise _damaged(sender, repr(error)) from None
    return stored, ways, table


def _made(
    way: str,
    parts: Mapping[str, Any],
    found: list[np.ndarray],
    start: np.ndarray,
    wire: Wire | None,
) -> np.ndarray:
    """Returns a leaf from what has travelled of it."""
    if way == "base":
        return start
    if way == "whole":
        return np.asarray(parts["whole"])
    if way.startswith("as ") and 0 <= int(way[3:]) < len(found):
        return found[int(way[3:])]
    if way == "places":
        places, values = parts["places"], parts["values"]
        if values.dtype != start.dtype or np.any((places < 0) | (places >= start.size)):
            raise ValueError("places outside of the leaf")
        made = start.reshape(-1).copy()
        made[places] = values
        return made.reshape(start.shape)
    name, _, size = way.partition(" ")
    known = [] if wire is None or name != "levels" else _block_sizes(start, wire)
    if wire is None or int(size or 0) not in known or len(parts["scales"]) * 32 != wire.extra:
        raise ValueError(f"an unknown way, {show(way)}")
    return _from_levels(parts["levels"], parts["scales"], start, int(size), _most(wire))


def _damaged(sender: str, why: str) -> InputError:
    return InputError(f"The message of {sender} is damaged: {show(why, 200)}.")
