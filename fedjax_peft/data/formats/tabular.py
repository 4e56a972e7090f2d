"""One file per split: json, jsonl, csv, tsv or parquet; and tables of the hub."""

import codecs
import json
import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from datetime import date, datetime, time
from pathlib import Path
from typing import Any

from fedjax_peft.data.formats.delimited import PLAIN, Csv, csv_columns, csv_form, read_csv
from fedjax_peft.data.formats.files import lines, only, read_bytes, refuse_twins, stem, unpacked
from fedjax_peft.data.formats.json_rows import columns_of, read_json_rows
from fedjax_peft.data.table import Table, named
from fedjax_peft.support.assets import cache_dir
from fedjax_peft.support.errors import InputError
from fedjax_peft.support.libraries import printed_once

__all__ = ["PLAIN", "Csv", "csv_form"]

_KINDS = {
    **{".json": "json", ".jsonl": "json", ".ndjson": "json"},
    **{".csv": "csv", ".tsv": "csv", ".parquet": "parquet"},
}
ENDINGS = (".json", ".jsonl", ".csv", ".tsv", ".parquet", ".json.gz", ".jsonl.gz", ".csv.gz")
"""Endings of the files that can be read, for messages."""


_WORKBOOKS = (".xlsx", ".xls", ".xlsm", ".xlsb", ".ods", ".numbers")
_MAGIC = (b"PK\x03\x04", b"\xd0\xcf\x11\xe0")
"""The first bytes of a workbook: a zip archive, or Excel's form before 2007."""
_SAVE = "In the spreadsheet program, save the sheet as CSV UTF-8."


def endings_advice(*files: Path) -> str:
    """Returns the endings of the files that can be read, and how a workbook becomes one."""
    work = any(path.suffix.lower() in _WORKBOOKS for path in files)
    return f"{', '.join(ENDINGS)}.{f' {_SAVE}' if work else ''}"


def find_files(folder: Path) -> dict[str, list[Path]]:
    """Returns the tables of a folder: name up to the first dot -> files of this name, sorted."""
    files: dict[str, list[Path]] = {}
    for path in sorted(folder.iterdir()):
        if kind(path) is not None:
            files.setdefault(stem(path), []).append(path)
    return files


def first_part(folder: Path, split: str, files: Sequence[Path]) -> Path:
    """Returns the file of a split, or the first of its parts.

    Raises:
      InputError: several files that are not the parts of one, or not all of the parts.
    """
    parts = _parts(files[0])
    if not {*files} <= {*parts}:
        only(folder, files)  # raises
    missing = next((path for path in parts if path not in files), None)
    if missing is not None:
        raise InputError(f"{missing} is missing: the split {split!r} has {len(parts)} parts.")
    return parts[0]


def _parts(path: Path) -> list[Path]:
    """Returns the 3 files of ``train-00000-of-00003.parquet``; of most, the one itself."""
    match = re.search(r"-\d{5}-of-(\d{5})\.", path.name)
    if match is None:
        return [path]
    start, end = path.name[: match.start()], path.name[match.end() :]
    return [
        path.with_name(f"{start}-{part:05}-of-{match[1]}.{end}") for part in range(int(match[1]))
    ]


def kind(path: Path) -> str | None:
    """Returns which reader a file is for: csv, json or parquet; None if none is."""
    name = unpacked(path).suffix.lower()
    if name in _KINDS and (_KINDS[name] != "parquet" or path.suffix.lower() == name):
        return _KINDS[name]
    # pandas' users name the compression inside of a parquet file.
    return "parquet" if path.with_suffix("").suffix.lower() == ".parquet" else None


def read_file(path: Path, *, alone: bool = False, form: Csv = PLAIN) -> Table:
    """Returns the rows of one file and of its further parts, with the file's column names.

    Args:
      path: as :func:`first_part` gives it.
      alone: leaves out the further parts.

    Raises:
      InputError: a file that cannot be read.
    """
    parts = [path] if alone else _parts(path)
    tables = [_read_part(part, form) for part in parts]
    names = dict.fromkeys(name for table in tables for name in table.columns)
    for i, table in enumerate(tables):  # a column that a part lacks is empty there
        columns = {name: table.columns.get(name, [None] * len(table)) for name in names}
        tables[i] = replace(table, columns=columns)
    return tables[0] if len(tables) == 1 else replace(Table.joined(str(path), tables), numbers=None)


def _read_part(path: Path, form: Csv) -> Table:
    readers = {
        "csv": lambda: Table(str(path), read_csv(path, form)),
        "json": lambda: Table(str(path), read_json_rows(path)),
        "parquet": lambda: _read_parquet(path),
    }
    try:
        table = readers[kind(path) or ""]()
    except (InputError, MemoryError):
        raise
    except Exception as error:  # the readers raise many kinds for damaged files
        reason = _encoding_advice(path, form) if isinstance(error, UnicodeError) else cause(error)
        raise InputError(f"{path} could not be read: {reason}") from error
    if not table.columns or not len(table):
        raise InputError(f"{path} could not be read: it has no rows.")
    return table


def _read_parquet(path: Path) -> Table:
    """Returns the columns that can be read, and why others cannot: few of them are needed."""
    import pyarrow as pa
    import pyarrow.parquet
    from datasets import Dataset
    from datasets.table import InMemoryTable

    file = pyarrow.parquet.ParquetFile(path)
    refuse_twins(path, file.schema_arrow.names)
    columns, orders, unread = {}, {}, {}
    for name in file.schema_arrow.names:
        try:
            read = file.read([name]).select([name]).unify_dictionaries()
            own = from_datasets(Dataset(InMemoryTable(read)), str(path))
            columns[name] = own.columns[name][:]
        except MemoryError:
            raise
        except Exception as error:  # many kinds, such as types that ``datasets`` does not know
            unread[name] = cause(error)
            continue
        form = read.schema.field(name).type
        if pa.types.is_dictionary(form) and form.ordered and read.num_rows:
            orders[name] = tuple(read[name].chunk(0).dictionary.to_pylist())
        orders.update(own.orders)
    if unread and not columns:
        raise ValueError("; ".join(unread.values()))
    return Table(str(path), columns, orders=orders, unread=unread)


def load(*args: Any, **options: Any) -> Any:
    """Returns ``datasets.load_dataset(...)``, with its files in our cache."""
    import datasets

    with printed_once():
        return datasets.load_dataset(*args, cache_dir=str(cache_dir() / "datasets"), **options)


def from_datasets(rows: Any, origin: str) -> Table:
    """Returns a data set of ``datasets`` as a ``Table``; numbers of a ClassLabel become names.

    Columns are read when they are used, because some on the hub are larger than the memory. Those
    of a stream, and of a data set with a transform, are read at once, as the transform makes them.

    Raises:
      InputError: a transform fails, or makes no columns.
    """
    features = rows.features or {}
    columns = _made_columns(rows, origin)
    if columns is None:
        plain = rows.with_format(None)
        columns = {name: plain.select_columns([name])[name] for name in features}
    orders = {}
    for name in columns.keys() & features.keys():
        feature = features[name]
        names = getattr(getattr(feature, "feature", feature), "names", None)
        if names is not None:
            orders[name] = tuple(names)
            columns[name] = [named(value, names) for value in columns[name][:]]
        if str(getattr(feature, "dtype", "")).startswith(("date", "timestamp")):
            columns[name] = dates_as_texts(columns[name][:])
    return Table(origin, columns, orders=orders)


def _made_columns(rows: Any, origin: str) -> dict[str, Sequence[Any]] | None:
    """Returns the columns of a stream or a transform; None for a plain table."""
    stream = not hasattr(rows, "select")
    if not stream and rows.format["type"] != "custom":
        return None
    try:
        made = columns_of([*rows.with_format(None)]) if stream else rows[:]
        columns: dict[str, Sequence[Any]]
        columns = {str(name): [*map(_plain, values)] for name, values in made.items()}
        if len({*map(len, columns.values())}) > 1:
            raise ValueError("the columns of its transform differ in length")
    except Exception as error:  # whatever the user's functions raise
        raise InputError(
            f"The rows of {origin} could not be made: {cause(error)}. Keep what its transform makes"
            " with .map(...), or leave the transform out with .with_format(None)."
        ) from error
    return columns


def _plain(value: Any) -> Any:
    """Returns a Python number in place of one of NumPy, torch or JAX."""
    return value.item() if hasattr(value, "item") and not getattr(value, "shape", (0,)) else value


def dates_as_texts(values: Sequence[date | None]) -> list[str | None]:
    """Returns dates in ISO form, as json has them, with their times unless all are midnight."""
    days = all(not isinstance(one, datetime) or one.time() == time() for one in values)
    end = len("2020-01-31") if days else None
    return [None if one is None else one.isoformat()[:end] for one in values]


def cause(error: BaseException) -> str:
    """Returns the innermost cause of an error in one line; ``datasets`` wraps it several times."""
    while error.__cause__ is not None:
        error = error.__cause__
    encoding = "it is not UTF-8: " if isinstance(error, UnicodeDecodeError) else ""
    return f"{encoding}{type(error).__name__}: {' '.join(str(error).split())}"


_HEAD = 1000
"""The lines of json whose names are the columns of a file before all of it is read."""


def header(path: Path, form: Csv, wanted: Collection[str] = ()) -> list[str] | None:
    """Returns the column names of a file, from its start; None if only all rows tell.

    Args:
      wanted: further columns, which the first :data:`_HEAD` lines of json may lack.

    Raises:
      InputError: it is a csv file whose columns cannot be read.
    """
    try:
        if kind(path) == "csv":
            return csv_columns(path, form)
        if kind(path) == "parquet":
            import pyarrow.parquet

            return list(pyarrow.parquet.read_schema(path).names)
        if unpacked(path).suffix.lower() != ".json":
            names: dict[str, None] = {}
            for number, line in lines(path):
                # A column that the first row lacks is empty there.
                names |= dict.fromkeys(json.loads(line) if line.strip() else ())
                if number >= _HEAD and names.keys() >= {*wanted}:
                    break
            return list(names) or None
    except UnicodeError:
        raise InputError(f"{path} could not be read: {_encoding_advice(path, form)}") from None
    except (OSError, EOFError, ValueError, TypeError, RecursionError):
        pass  # the reader of the rows explains it
    return None


def _encoding_advice(path: Path, form: Csv) -> str:
    """Returns why a csv file could not be decoded, and what to do."""
    if read_bytes(path, 4) in _MAGIC:
        return f"it is a workbook or an archive, and no text with the ending {path.suffix}. {_SAVE}"
    default = form.encoding == PLAIN.encoding
    what, other = ("UTF-8", "cp1252") if default else (f"in {form.encoding!r}", "utf-8")
    if read_bytes(path, 2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        other = "utf-16"
    return (
        f"it is not {what}. Name its encoding, such as {other}: csv = {{ encoding = {other!r} }} in"
        " [data], or --encoding of `fedjax-peft init`."
    )
