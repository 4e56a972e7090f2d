"""Rows in JSON: one object a line, a list of objects, or pandas' columns."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedjax_peft.data.formats.files import lines, read_bytes, unpacked
from fedjax_peft.data.table import brief
from fedjax_peft.data.text import clean
from fedjax_peft.support.errors import InputError

_HALF = re.compile(r"\\u[dD][89a-fA-F]")
"""The escape of half a character, which JSON may have without the other half, and UTF-8 may not."""


def json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Yields (line number, value) of a file with one value of JSON a line; not for blank lines.

    Raises:
      InputError: a line that is not JSON.
    """
    for number, line in lines(path):
        if line.strip():
            try:
                yield number, _parsed(line)
            except (ValueError, RecursionError) as error:
                raise InputError(
                    f"Line {number} of {path} is not JSON: {_fault(error)}."
                ) from error


def read_json_rows(path: Path) -> dict[str, list[Any]]:
    """Returns the columns of a file with rows in JSON; what a row lacks is None.

    The file has one object a line, or one value: a list of objects, or an object in ``.json`` of
    one of the forms of :func:`_rows_of`.

    Raises:
      InputError: a file that is not JSON, or has other values than objects.
    """
    try:
        rows = [value for _, value in json_lines(path)]
    except InputError as error:
        rows = [_whole(path, error)]
    if len(rows) == 1 and isinstance(rows[0], list):
        rows = rows[0]
    elif len(rows) == 1 and isinstance(rows[0], dict) and unpacked(path).suffix.lower() == ".json":
        rows = _rows_of(rows[0])
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise InputError(f"Row {number} of {path} is {brief(row)}, and not an object.")
    return columns_of(rows)


def columns_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Returns the columns of rows; what a row lacks is None."""
    columns: dict[str, list[Any]] = {}
    for number, row in enumerate(rows):
        columns |= {name: [None] * number for name in row if name not in columns}
        for name, column in columns.items():
            column.append(row.get(name))
    return columns


def _rows_of(whole: dict[str, Any]) -> list[Any]:
    """Returns the rows of a file that is one object: those of ``data``, of columns, or itself.

    The forms are those of ``pandas.DataFrame.to_json`` (``table``, ``split``, ``index`` and
    ``columns``), the same ``data`` in other files, and one list for each column.
    """
    names, data, parts = whole.get("columns"), whole.get("data"), [*whole.values()]
    if isinstance(data, list) and data:
        if all(isinstance(row, dict) for row in data):
            return data
        if isinstance(names, list) and all(isinstance(row, list) for row in data):
            return [dict(zip(names, row, strict=False)) for row in data]
    if parts and all(isinstance(part, dict) for part in parts):
        inner = [*parts[0]]
        if all(map(str.isdecimal, whole)):
            return parts
        if inner and all(map(str.isdecimal, inner)) and all([*part] == inner for part in parts):
            return [{name: part[row] for name, part in whole.items()} for row in inner]
    lists = all(isinstance(part, list) and len(part) == len(parts[0]) for part in parts)
    if parts and lists and not any(isinstance(value, dict) for part in parts for value in part):
        return [dict(zip(whole, row, strict=True)) for row in zip(*parts, strict=True)]
    return [whole]


def _whole(path: Path, error: InputError) -> Any:
    """Returns the one value of a file, or raises the error of its line that is no value."""
    try:
        return _parsed(read_bytes(path).decode("utf-8-sig"))
    except (ValueError, RecursionError) as fault:
        if not isinstance(fault, json.JSONDecodeError) or fault.msg == "Extra data":
            raise error from None  # it has one object a line
        raise InputError(f"{path} is not JSON: {_fault(fault)}.") from fault


def _parsed(text: str) -> Any:
    """Returns a value of JSON, in which no text has half a character."""
    value = json.loads(text)
    return json.loads(clean(json.dumps(value, ensure_ascii=False))) if _HALF.search(text) else value


def _fault(error: Exception) -> str:
    """Returns why a text is not JSON."""
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
