"""Examples by user: LEAF's JSON files (Caldas et al. 2018), and TFF's data sets as JSON.

LEAF's files are ``{"users": [...], "num_samples": [...], "user_data": {user: {"x": [...], "y":
[...]}}}``, several for a split; only ``user_data`` is read. A data set of TensorFlow Federated is
``{client: {"tokens": [...], "label": [...]}}``, in place of ``tokens`` also ``snippets``, ``text``,
``pixels`` or ``image``.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_peft.data.formats.files import read_bytes, read_json
from fedjax_peft.data.table import Table
from fedjax_peft.support.errors import InputError

CONTENTS = ("tokens", "snippets", "text", "pixels", "image")
"""Content fields of TFF."""
_LEAF = re.compile(
    rb'\s*\{\s*"(users|num_samples|hierarchies)"\s*:\s*\[|\s*\{\s*"user_data"\s*:\s*\{'
)
_TFF = re.compile(
    rb'\s*\{\s*"([^"\\]|\\.)*"\s*:\s*\{\s*"(tokens|snippets|text|pixels|image|(coarse_)?label|'
    rb'creation_date)"\s*:\s*\['
)
_HEAD = 4096
"""The first bytes, from which the two formats are recognised. A user's name is not longer."""


def read_users(folder: Path) -> dict[str, Table] | None:
    """Returns the splits of a folder of examples by user, None if it has no such files.

    Files are ``train/*.json`` and ``test/*.json`` (perhaps ``val``), or ``train.json`` and
    ``test.json``, or ``all_data*.json`` without a split (then the name is ``all``). They are in the
    folder or in its subfolder ``data``, perhaps gzipped. Rows are in the order of the files, user
    by user; the column ``client`` has the user. The other columns depend on the kind of example:

    * a text: ``text``;
    * tokens, in one list or several (LEAF's Reddit: a comment's): ``text``, joined by spaces,
      without LEAF's marks ``<BOS>``, ``<EOS>`` and ``<PAD>``;
    * pixels from 0 to 1, or whole numbers to 255: ``image`` uint8, square if the list is flat;

    and ``label``, if there is one. LEAF's next character (Shakespeare) or next token is not a
    label; it is appended to the text.

    Raises:
      InputError: a file is damaged or contradicts itself (with the user and the field).
    """
    names = {split: [f"{split}.json", f"{split}/*.json"] for split in ("train", "val", "test")}
    names["all"] = ["all_data*.json", "all_data/*.json", "all.json"]
    files = {split: paths for split, own in names.items() if (paths := _find(folder, own))}
    if not files:
        return None
    if len(files) > 1:
        files.pop("all", None)
    head = read_bytes(next(iter(files.values()))[0], _HEAD)
    if not (_LEAF.match(head) or _TFF.match(head)):
        return None
    return {split: _table(paths) for split, paths in files.items()}


def _find(folder: Path, patterns: Sequence[str]) -> list[Path]:
    """Returns the files of a split, of the first pattern that has any."""
    for base in (folder, folder / "data"):
        for pattern in patterns:
            paths = sorted([*base.glob(pattern), *base.glob(f"{pattern}.gz")])
            if paths:
                return paths
    return []


class User(NamedTuple):
    """A user's examples."""

    name: str
    place: str
    """Where they are from, to begin a message with: a file and the user."""
    field: str
    """The name of ``contents`` there."""
    contents: list[Any] | np.ndarray
    """Texts or lists of tokens; or images, also as one array ``[examples, ...]``."""
    labels: list[Any] | None


def _table(paths: list[Path]) -> Table:
    origin = str(paths[0]) if len(paths) == 1 else f"{paths[0].parent} ({len(paths)} files)"
    return replace(user_table(paths[0], _distinct(paths)), origin=origin)


def _distinct(paths: list[Path]) -> Iterator[User]:
    """Yields the users of all files.

    Raises:
      InputError: a user is in two files.
    """
    seen: dict[str, Path] = {}
    for path in paths:
        for user in _users(path):
            if user.name in seen:
                raise InputError(f"The user {user.name!r} is in {seen[user.name]} and in {path}.")
            seen[user.name] = path
            yield user


def user_table(path: Path, users: Iterable[User]) -> Table:
    """Returns the examples of users in one table, user by user.

    Args:
      path: the (first) file, for messages.
      users: with contents of one kind: texts, or images of one shape.

    Raises:
      InputError: contents that cannot be used, users whose examples differ in kind, or no examples.
    """
    columns: dict[str, list[Any]] = {}
    shape = None
    for user in users:
        if not len(user.contents):
            continue
        rows = _rows(user)
        found = (rows.keys(), np.shape(rows["image"][0]) if "image" in rows else None)
        shape = shape or found
        if found != shape:
            here, before = _described(found), _described(shape)
            raise InputError(
                f"{user.place} has {here} an example, but others before have {before}."
            )
        for column, values in rows.items():
            columns.setdefault(column, []).extend(values)
    if not columns:
        raise InputError(f"{path} has no examples.")
    return Table(str(path), columns)


def _described(found: tuple[Iterable[str], tuple[int, ...] | None]) -> str:
    columns, shape = found
    names = ", ".join(name for name in columns if name != "client")
    return names if shape is None else f"{names} {list(shape)}"


def _users(path: Path) -> Iterator[User]:
    """Yields the users of a file, in its order."""
    content = read_json(path)
    users = content.get("user_data", content) if isinstance(content, dict) else None
    if not isinstance(users, dict):
        raise InputError(f"{path} has no examples by user.")
    is_leaf = "user_data" in content
    for name, record in users.items():
        place = f"{path}: the user {name!r}"
        fields = record if isinstance(record, dict) else {}
        field, label = "x", "y"
        if not is_leaf:
            field = next((field for field in CONTENTS if field in fields), CONTENTS[0])
            label = "label"
        contents = _list(fields, field, place)
        if not is_leaf and label not in fields:
            yield User(name, place, field, contents, None)
            continue
        labels = _list(fields, label, place)
        if len(contents) != len(labels):
            counts = f"{len(contents)} values in {field!r}, but {len(labels)} in {label!r}"
            raise InputError(f"{place} has {counts}.")
        used = _leaf_examples(place, contents, labels) if is_leaf else (contents, labels)
        yield User(name, place, field, *used)


def _leaf_examples(place: str, x: list[Any], y: list[Any]) -> tuple[list[Any], list[Any] | None]:
    """Returns contents and labels; a successor (of a character, of tokens) goes to the contents."""
    if not y or isinstance(y[0], int):
        return x, y
    if isinstance(y[0], dict):  # Reddit's targets: the same tokens, shifted by one
        return x, None
    return _each(place, "y", _continued, list(zip(x, y, strict=True)), "a successor of 'x'"), None


def _continued(pair: tuple[Any, Any]) -> Any:
    x, y = pair
    return x + y if isinstance(x, str) else [*x, y if isinstance(y, str) else y[-1]]


def _list(fields: dict[str, Any], field: str, place: str) -> list[Any]:
    if not isinstance(fields.get(field), list):
        raise InputError(f"{place} has no list {field!r}.")
    return fields[field]


# Examples.


def _rows(user: User) -> dict[str, Any]:
    """Returns the columns of a user's examples (one or more)."""
    if isinstance(user.contents, list) and isinstance(_first(user.contents), str):
        rows = {"text": _each(user.place, user.field, _text, user.contents, "a text")}
    else:
        rows = {"image": list(_images(user))}
    if user.labels is not None:
        rows["label"] = user.labels
    return rows | {"client": [user.name] * len(user.contents)}


def _first(value: Any) -> Any:
    """Returns the first thing that is no list in lists of lists."""
    while isinstance(value, list) and value:
        value = value[0]
    return value


def _each(
    place: str, field: str, function: Callable[[Any], Any], values: list[Any], what: str
) -> list[Any]:
    results = []
    for number, value in enumerate(values, 1):
        try:
            results.append(function(value))
        except (TypeError, IndexError) as error:
            raise InputError(
                f"{place} has in {field!r}, value {number}, something other than {what}."
            ) from error
    return results


_MARKS = ("<BOS>", "<EOS>", "<PAD>")


def _text(value: Any) -> str:
    """Returns a text, or tokens joined by spaces."""
    if isinstance(value, str):
        return value
    tokens = [_text(token) for token in value if token not in _MARKS]
    return " ".join(token for token in tokens if token)


def _images(user: User) -> np.ndarray:
    """Returns uint8 ``[examples, height, width]`` or ``[examples, height, width, 3]``."""
    try:
        x = np.asarray(user.contents)
    except ValueError as error:
        raise InputError(
            f"{user.place} has images of different sizes in {user.field!r}."
        ) from error
    largest = 1.0 if x.dtype.kind == "f" else 255
    if x.dtype.kind not in "fiu":
        raise InputError(f"{user.place} has something other than numbers in {user.field!r}.")
    wrong = np.argwhere(~((x >= 0) & (x <= largest)))  # and NaN
    if len(wrong):
        raise InputError(
            f"{user.place} has in {user.field!r}, value {wrong[0][0] + 1}, the pixel"
            f" {x[tuple(wrong[0])]}: pixels are from 0 to {largest:g}."
        )
    if x.dtype.kind == "f":
        x = np.rint(255 * x)
    side = math.isqrt(x.shape[1]) if x.ndim == 2 else 0
    if side and side**2 == x.shape[1]:
        x = x.reshape(len(x), side, side)
    if x.ndim != 3 and not (x.ndim == 4 and x.shape[-1] == 3):
        raise InputError(
            f"{user.place} has in {user.field!r} examples of {list(x.shape[1:])} numbers: neither a"
            " square image nor [height, width] or [height, width, 3]."
        )
    return x.astype(np.uint8)
