"""Clients whose data come as ``datasets.Dataset``, one for each client."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fedjax_peft import tasks
from fedjax_peft.data import arrays
from fedjax_peft.data.conversations import Turns
from fedjax_peft.data.dataset import Clients, Dataset
from fedjax_peft.data.encode import encoder_of
from fedjax_peft.data.formats.objects import KINDS, as_table, is_table
from fedjax_peft.data.missing import without_missing
from fedjax_peft.data.naming import check_spellings, prepare, rename_columns
from fedjax_peft.data.partition import natural
from fedjax_peft.data.reading import OWN
from fedjax_peft.data.table import Table
from fedjax_peft.support.errors import InputError
from fedjax_peft.tasks.base import Task

_NAME = "clients"


def load_clients(
    datasets: Mapping[str, Any] | Sequence[Any],
    *,
    tokenizer: Any = None,
    max_length: int = 128,
    columns: Mapping[str, str] | None = None,
    label_names: Sequence[str] | None = None,
    task: Task | str | None = None,
    turns: Turns | None = None,
    drop_missing: bool = False,
) -> Clients[Dataset]:
    """Returns the clients of a dict of Hugging Face data sets, encoded, in the order of the dict.

    The data sets become one, with the key ``client``; all have the same columns. For data sets of
    different tasks, see :func:`fedjax_peft.combine`.

    Args:
      datasets: client name -> its ``datasets.Dataset``, such as one split of
        ``datasets.load_dataset``, its DataFrame or its list of dicts; or a list of such tables,
        whose clients are "0", "1", ... A stream (``IterableDataset``) is read to its end, and the
        rows of a transform are those it makes.
      tokenizer: as for :func:`fedjax_peft.load_dataset`, like the next two.
      max_length: tokens per example.
      columns: our column name -> the name in the data sets, such as ``{"text": "review"}``.
      label_names: the names of all classes in order; numbers in the data sets are positions in this
        list, from 0. None: those of the data sets' ``ClassLabel``
        if it is the same in all, or else those that occur, sorted. Give the test set the names of
        the training set: ``label_names=train.data.label_names``.
      task: what is learned; None: the task that fits the columns.
      turns: as for :func:`fedjax_peft.load_dataset`, like ``drop_missing``.

    Raises:
      InputError: no data sets or no rows, columns that differ, or a row that cannot be used; the
        message names the client.
    """
    tables = dict(_tables(datasets, columns))
    first = next(iter(tables.values()), None)
    if first is None:
        raise InputError("There are no data sets to make clients of.")
    found = tasks.as_task(task or tasks.for_columns(first.columns.keys(), first.origin))
    encoder, given = encoder_of(found), None if label_names is None else tuple(label_names)
    entry = OWN._replace(task=found, label_names=given)
    tables = {
        name: prepare(without_missing(table, encoder, drop_missing), entry, turns=turns)
        for name, table in tables.items()
    }
    for table in tables.values():  # one by one, so that a message names the client
        encoder.check(table, tuple(label_names or encoder.class_names(table)))
    joined = _joined(tables)
    if label_names is None:
        check_spellings(joined, encoder)
    names = tuple(label_names or joined.label_names or encoder.class_names(joined))
    how = arrays.Encoding(tokenizer, max_length, 0, None)
    _, data = arrays.encode_rows(_NAME, found, joined, names, how, {})
    return natural(data, names=[*tables])


def _tables(
    datasets: Mapping[str, Any] | Sequence[Any], columns: Mapping[str, str] | None
) -> Iterator[tuple[str, Table]]:
    """Yields the rows of each client, under our column names and with the key ``client``."""
    if isinstance(datasets, list | tuple):
        datasets = {str(client): rows for client, rows in enumerate(datasets)}
    if not isinstance(datasets, Mapping):
        raise InputError(
            "The clients must be a dict, client name -> data set, or a list of data sets, not a"
            f" {type(datasets).__name__}. Of one data set, fp.load_dataset and a partition, or"
            " fp.partition.from_flwr, make clients."
        )
    if {*datasets} <= {"train", "validation", "test"} and datasets:
        raise InputError(
            f"The keys {', '.join(datasets)} are splits, not clients: give the data sets of the"
            " clients, by name, or use fp.load_dataset and a partition."
        )
    for client, rows in datasets.items():
        origin = f"the data set of client {client!r}"
        if not is_table(rows):
            raise InputError(
                f"The client {client!r} needs {KINDS}, not a {type(rows).__name__}. Of fp.Dataset,"
                " fp.combine makes clients."
            )
        table = as_table(rows, origin)
        if not table.columns or not len(table):
            raise InputError(f"The data set of client {client!r} has no rows.")
        table = rename_columns(table, OWN, columns)
        own = {"client": [str(client)] * len(table)}
        yield str(client), replace(table, columns={**table.columns, **own})


def _joined(tables: Mapping[str, Table]) -> Table:
    """Returns the rows of all clients, one client after the other."""
    first = next(iter(tables.values()))
    for table in tables.values():
        if {*table.columns} != {*first.columns}:
            odd = ", ".join(sorted({*table.columns} ^ {*first.columns}))
            raise InputError(f"The columns of {first.origin} and {table.origin} differ: {odd}.")
    same = all(table.label_names == first.label_names for table in tables.values())
    joined = Table.joined("the data sets of the clients", [*tables.values()])
    return joined if same else replace(joined, label_names=None)
