"""One file per split: json, jsonl, csv or parquet, read by ``datasets``; and tables of the hub."""

import csv
import glob
import gzip
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedjax_peft.assets import cache_dir
from fedjax_peft.data.formats.files import stem
from fedjax_peft.data.table import Table
from fedjax_peft.errors import InputError

__all__ = ["cause", "find_splits", "from_datasets", "kind", "load", "read_file"]

_KINDS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
_LABELS = ("label", "tags", "ner_tags")
"""Columns whose names of classes are those of the data set."""
_UNREADABLE = (OSError, ValueError, RuntimeError, EOFError)
"""What the readers below ``datasets`` raise for damaged files, before it wraps it."""


def find_splits(
    folder: Path, splits: Mapping[str, Sequence[str]], *, whole: Sequence[str] = ("all",)
) -> dict[str, Path]:
    """Returns the file of each split, or of ``all`` rows together.

    Args:
      folder: where to look.
      splits: split -> names its file may have, the first that is there counts.
      whole: names of a file that has to be split. A file of a split goes before it.

    Raises:
      InputError: no file for a split, or several.
    """
    files: dict[str, list[Path]] = {}
    for path in sorted(folder.iterdir()):
        if kind(path) is not None:
            files.setdefault(stem(path), []).append(path)
    if not any(name in files for name in splits["test"]):
        splits = {"all": whole} if any(name in files for name in whole) else splits
    found = {}
    for split, names in splits.items():
        name = next((name for name in names if name in files), None)
        if name is None:
            raise InputError(
                f"{folder} has no file for the split {split!r}: it needs"
                f" {' or '.join(names)} with the ending {', '.join(_KINDS)} (or .json.gz,"
                f" .jsonl.gz, .csv.gz). It has: {', '.join(sorted(files)) or 'none of these'}."
            )
        if len(files[name]) > 1:
            raise InputError(
                f"{folder} has several files for one split:"
                f" {', '.join(path.name for path in files[name])}. Keep one."
            )
        found[split] = files[name][0]
    return found


def kind(path: Path) -> str | None:
    """Returns which builder of ``datasets`` reads a file, None if none does."""
    plain = path.with_suffix("") if path.suffix == ".gz" else path
    builder = _KINDS.get(plain.suffix)
    return None if builder == "parquet" and plain != path else builder


def read_file(path: Path) -> Table:
    """Returns the rows of one file, under the file's own column names.

    Raises:
      InputError: a file that cannot be read.
    """
    import datasets

    builder = kind(path)
    try:
        with _quiet():
            rows = load(
                builder,
                data_files=glob.escape(str(path)),
                split="train",  # the one name that ``datasets`` gives to a single file
                **(_csv_options(path) if builder == "csv" else {}),
            )
            return from_datasets(rows, str(path))
    except (*_UNREADABLE, datasets.exceptions.DatasetsError) as error:
        empty = "corresponds to no data" in str(error)
        reason = "it has no rows." if empty else cause(error)
        raise InputError(f"{path} could not be read: {reason}") from error


def load(*args: Any, **options: Any) -> Any:
    """Returns ``datasets.load_dataset(...)``, which keeps its files in our cache."""
    import datasets

    return datasets.load_dataset(*args, cache_dir=str(cache_dir() / "datasets"), **options)


def from_datasets(rows: Any, origin: str) -> Table:
    """Returns a table of ``datasets`` as ours; numbers of a ClassLabel become its names.

    Columns are read when they are used: some on the hub are larger than the memory.
    """
    columns: dict[str, Sequence[Any]] = {}
    label_names = None
    for name, feature in rows.features.items():
        names = getattr(getattr(feature, "feature", feature), "names", None)
        columns[name] = rows.select_columns([name])[name]
        if names is not None:
            label_names = tuple(names) if name in _LABELS else label_names
            columns[name] = [_named(value, names) for value in columns[name][:]]
    return Table(origin, columns, label_names)


def _named(value: Any, names: Sequence[str]) -> Any:
    """Returns the names of class numbers; -1, which says "unlabelled", stays a number."""
    if isinstance(value, list):
        return [_named(x, names) for x in value]
    return names[value] if isinstance(value, int) and 0 <= value < len(names) else value


def cause(error: BaseException) -> str:
    """Returns the innermost cause of an error in one line; ``datasets`` wraps it several times."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences ``datasets`` over a local file: brief bars, and errors that we tell ourselves."""
    import datasets

    logger = logging.getLogger("datasets")
    level, silent = logger.level, datasets.are_progress_bars_disabled()
    logger.setLevel(logging.CRITICAL)
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        logger.setLevel(level)
        if not silent:
            datasets.enable_progress_bars()


def _csv_options(path: Path) -> dict[str, Any]:
    """Returns options that read every field as written: no guessed numbers, no "NA" as missing."""
    from datasets import Features, Value

    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8-sig", newline="") as file:
        header = next(csv.reader(file), [])
    features = Features({column: Value("string") for column in header})
    return {"features": features, "keep_default_na": False}
