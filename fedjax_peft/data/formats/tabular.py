"""One file per split: json, jsonl, csv or parquet, read by ``datasets``; and tables of the hub."""

import codecs
import csv
import glob
import gzip
import json
import logging
import re
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import date, datetime, time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_peft.data.formats.files import lines, only, read_bytes, refuse_twins, stem
from fedjax_peft.data.table import Table, named
from fedjax_peft.support import toml
from fedjax_peft.support.assets import cache_dir
from fedjax_peft.support.display import show
from fedjax_peft.support.errors import InputError, nearest
from fedjax_peft.support.libraries import log_level, printed_once

_KINDS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
ENDINGS = (*_KINDS, ".json.gz", ".jsonl.gz", ".csv.gz")
"""Endings of the files that can be read."""
_LABELS = ("label", "tags", "ner_tags")
"""Columns whose names of classes are those of the data set."""


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
    """Returns which builder of ``datasets`` reads a file, None if none does."""
    plain = path.with_suffix("") if path.suffix == ".gz" else path
    builder = _KINDS.get(plain.suffix)
    return None if builder == "parquet" and plain != path else builder


class Csv(NamedTuple):
    """How csv files are written."""

    sep: str = ","
    """The character between two fields."""
    encoding: str = "utf-8"
    header: bool = True
    """Whether the first row has the names of the columns; otherwise they are ``column_1``, ..."""


PLAIN = Csv()


def csv_form(given: Mapping[str, Any] | None) -> Csv:
    """Returns how csv files are written: the given fields of :class:`Csv`, and its defaults.

    Raises:
      InputError: an unknown field, a separator of several characters, or an unknown encoding.
    """
    given = given or {}
    for key in given:
        if key not in Csv._fields:
            raise InputError(f"csv has no key {key!r}. {nearest(key, Csv._fields)}")
    form = Csv(**given)
    if not isinstance(form.sep, str) or len(form.sep) != 1 or form.sep in '"\r\n':
        raise InputError(f"csv's sep = {form.sep!r} must be one character, such as ';'.")
    if not isinstance(form.header, bool):
        raise InputError(f"csv's header = {form.header!r} must be true or false.")
    try:
        "".encode(form.encoding)
        usual = codecs.lookup(form.encoding).name == PLAIN.encoding
    except (LookupError, TypeError):
        raise InputError(
            f"csv's encoding = {form.encoding!r} is unknown. Usual ones are utf-8, latin-1, cp1252"
            " (Windows) and gb18030."
        ) from None
    return form._replace(encoding=PLAIN.encoding) if usual else form  # UTF-8 has several names


def read_file(path: Path, *, alone: bool = False, form: Csv = PLAIN) -> Table:
    """Returns the rows of one file and of its further parts, with the file's column names.

    Args:
      path: as :func:`first_part` gives it.
      alone: leaves out the further parts.

    Raises:
      InputError: a file that cannot be read.
    """
    import datasets

    builder, parts = kind(path), [path] if alone else _parts(path)
    for part in parts:
        if not read_bytes(part, 1):
            raise InputError(f"{part} could not be read: it has no rows.")
        if builder == "json" and _is_deep(part):
            raise InputError(f"{part} could not be read: it is nested too deeply.")
    try:
        # A new folder: ``datasets`` would confuse files with the same name and time.
        with _quiet(), tempfile.TemporaryDirectory() as own:
            rows = datasets.load_dataset(
                builder,
                data_files=[glob.escape(str(part)) for part in parts],
                split="train",  # the one name that ``datasets`` gives to files without a split
                cache_dir=own,
                **(_csv_options(parts, form) if builder == "csv" else {}),
            )
            table = from_datasets(rows, str(path))
            # Read here, where an error about UTF-8 can be explained.
            return replace(table, columns={name: v[:] for name, v in table.columns.items()})
    except InputError:
        raise
    except MemoryError:
        raise
    except Exception as error:  # the readers below ``datasets`` raise many kinds for damaged files
        empty = "corresponds to no data" in str(error)
        reason = "it has no rows." if empty else cause(error)
        if isinstance(error.__cause__ or error, UnicodeError) and builder == "csv":
            reason = _encoding_advice(path, form)
        raise InputError(f"{path} could not be read: {reason}") from error


_DEPTH = 200
"""The deepest allowed nesting. The reader below ``datasets`` is recursive, and some thousand levels
end the process with a segmentation fault."""
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)


def _is_deep(path: Path) -> bool:
    """Returns whether a file of JSON is nested more deeply than can be read."""
    content = read_bytes(path)
    # Brackets in strings only increase the count, so strings are removed only if it is too high.
    return _depth(content) > _DEPTH and _depth(_STRING.sub(b"", content)) > _DEPTH


def _depth(content: bytes) -> int:
    """Returns the largest number of open brackets."""
    steps = np.zeros(256, np.int8)
    steps[list(b"[{")], steps[list(b"]}")] = 1, -1
    depth = deepest = 0
    for start in range(0, len(content), 1 << 20):
        part = np.frombuffer(content[start : start + (1 << 20)], np.uint8)
        open_here = np.cumsum(steps[part], dtype=np.int32)
        deepest = max(deepest, depth + int(open_here.max()))
        depth += int(open_here[-1])
    return deepest


def load(*args: Any, **options: Any) -> Any:
    """Returns ``datasets.load_dataset(...)``, with its files in our cache."""
    import datasets

    with printed_once():
        return datasets.load_dataset(*args, cache_dir=str(cache_dir() / "datasets"), **options)


def from_datasets(rows: Any, origin: str) -> Table:
    """Returns a table of ``datasets`` as a ``Table``; numbers of a ClassLabel become names.

    Columns are read when they are used, because some on the hub are larger than the memory.
    """
    columns: dict[str, Sequence[Any]] = {}
    label_names = None
    for name, feature in rows.features.items():
        names = getattr(getattr(feature, "feature", feature), "names", None)
        columns[name] = rows.select_columns([name])[name]
        if names is not None:
            label_names = tuple(names) if name in _LABELS else label_names
            columns[name] = [named(value, names) for value in columns[name][:]]
        if str(getattr(feature, "dtype", "")).startswith(("date", "timestamp")):
            columns[name] = _dates_as_texts(columns[name][:])
    return Table(origin, columns, label_names)


def _dates_as_texts(values: Sequence[date | None]) -> list[str | None]:
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


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences ``datasets`` over a local file: brief bars, and errors that are raised here."""
    import datasets

    silent = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        with log_level("datasets", logging.CRITICAL):
            yield
    finally:
        if not silent:
            datasets.enable_progress_bars()


def header(path: Path, form: Csv, wanted: Collection[str] = ()) -> list[str] | None:
    """Returns the column names of a file, from its start; None if only all rows tell.

    Args:
      wanted: further columns, which the first rows of json lines may lack.

    Raises:
      InputError: it is a csv file whose columns cannot be read.
    """
    try:
        if kind(path) == "csv":
            return _csv_columns(path, form)
        if kind(path) == "parquet":
            import pyarrow.parquet

            return list(pyarrow.parquet.read_schema(path).names)
        if ".jsonl" in path.suffixes:
            names: dict[str, None] = {}
            for _, line in lines(path):
                # A needed column that the first row lacks is empty there.
                names |= dict.fromkeys(json.loads(line))
                if names.keys() >= {*wanted}:
                    break
            return list(names) or None
    except UnicodeError:
        raise InputError(f"{path} could not be read: {_encoding_advice(path, form)}") from None
    except (OSError, EOFError, ValueError, TypeError, RecursionError, csv.Error):
        pass  # the reader of the rows explains it
    return None


def _csv_columns(path: Path, form: Csv) -> list[str]:
    """Returns the names of a csv file's columns.

    Raises:
      InputError: two columns of one name, a first row that is longer than the header, or fields
        that another character separates.
      UnicodeError: another encoding.
      csv.Error: not a csv file.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    encoding = "utf-8-sig" if form.encoding == PLAIN.encoding else form.encoding
    with opener(path, "rt", encoding=encoding, newline="") as file:
        # Blank lines are not rows.
        read = csv.reader(file, delimiter=form.sep)
        rows = (row for row in read if len(row) > 1 or "".join(row).strip())
        top = next(rows, []) if form.header else []
        limit = csv.field_size_limit(2**31 - 1)  # a text may be longer than a name
        try:
            first = next(rows, [])
        finally:
            csv.field_size_limit(limit)
    names = top if form.header else [f"column_{i + 1}" for i in range(len(first))]
    top = top if form.header else first
    other = next((c for c in ";\t|," if c in "".join(top) and c in "".join(first)), None)
    if len(names) == 1 and other is not None:
        raise InputError(
            f"{path} has one column, which begins with {show(top[0], 40)}. Its fields seem to be"
            f" separated by {other!r}: csv = {{ sep = {toml.literal(other)} }} in [data], or --sep"
            " of `fedjax-peft init`."
        )
    refuse_twins(path, names)
    # The reader would use the first field as a row name and shift the others.
    if len(first) > len(names):
        raise InputError(
            f"Row 1 of {path} has {len(first)} fields, but the header has {len(names)}."
        )
    return names


def _csv_options(paths: Sequence[Path], form: Csv) -> dict[str, Any]:
    """Returns options that read every field as text: no guessed numbers, no "NA" as missing."""
    from datasets import Features, Value

    names = [_csv_columns(path, form) for path in paths][-1]
    features = Features({column: Value("string") for column in names})
    options = {"features": features, "keep_default_na": False}
    options |= {} if form.header else {"header": None, "names": names}
    return options | {"sep": form.sep, "encoding": form.encoding}


def _encoding_advice(path: Path, form: Csv) -> str:
    """Returns why a csv file could not be decoded, and what to do."""
    default = form.encoding == PLAIN.encoding
    what, other = ("UTF-8", "cp1252") if default else (f"in {form.encoding!r}", "utf-8")
    if read_bytes(path, 2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        other = "utf-16"
    return (
        f"it is not {what}. Name its encoding, such as {other}: csv = {{ encoding = {other!r} }} in"
        " [data], or --encoding of `fedjax-peft init`."
    )
