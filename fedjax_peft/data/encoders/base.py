"""The contract of an encoder: how the rows of a table become the columns that a model reads."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from fedjax_peft.contracts import Task
from fedjax_peft.data.dataset import Dataset
from fedjax_peft.data.table import Table

STAND_IN_WORDS = 59
"""Stand-ins have the words ``w0`` to ``w58``, which the tokenizer of
:func:`fedjax_peft.testing.write_tiny_checkpoint` knows."""


class Encode(Protocol):
    """Encodes the rows of one split. Its further keyword arguments are options of the encoder.

    An encoder's own docstring says which columns it reads and makes; the other arguments are these.
    """

    def __call__(
        self, table: Table, names: Sequence[str], tokenizer: Any, *, max_length: int, name: str
    ) -> Dataset:
        """Returns the data set of a table.

        Args:
          table: one split.
          names: all classes or tags; empty where the task has none.
          tokenizer: a fast tokenizer of ``transformers``; None where the encoder reads no texts.
          max_length: tokens per example.
          name: of the data set.

        Raises:
          InputError: a row that cannot be used (its number is in the message).
        """


class StandIn(NamedTuple):
    """The required form of a data set's made-up rows."""

    names: Sequence[str]
    """All classes or tags."""
    columns: Collection[str]
    """The columns, under our names, into which the entry renames others."""
    shape: tuple[int, ...]
    """Of an image; empty for texts."""


def recognising(*needed: str) -> Callable[[Collection[str]], int]:
    """Returns a function of column names: the number of those needed, 0 unless all are there."""
    return lambda columns: len(needed) if {*needed} <= {*columns} else 0


def needing(*names: str) -> Callable[[Collection[str]], Collection[str]]:
    """Returns a function of column names: those of the names that are there."""
    return lambda columns: [name for name in names if name in columns]


def texts_in(column: str) -> Callable[[Table], list[str]]:
    """Returns a function of a table: the values of a column, as :attr:`Encoder.texts`."""
    return lambda table: list(table.columns[column])


class Encoder(NamedTuple):
    """How the rows of a table become arrays. Only the first two fields have no default."""

    columns: tuple[str, ...]
    """The columns that the encoder reads. Further columns of a table are keys to partition by."""
    encode: Encode
    """Encodes one split. An option of ``load_dataset`` such as ``doc_stride`` reaches it if it has
    a keyword argument of this name."""
    recognises: Callable[[Collection[str]], int] = recognising()
    """(column names of a table) -> the number of columns by which the encoder recognises the table
    as its own; 0: it does not."""
    label_column: str | None = None
    """The column of class or tag names. A source may give numbers instead of names."""
    needed: Callable[[Collection[str]], Collection[str]] = lambda columns: ()
    """(column names of a table) -> the columns without a value of which a row cannot be used, such
    as its label and its text. ``drop_missing`` leaves out the rows that lack one."""
    group_column: str | None = None
    """A column whose equal values stay together when a share of the rows is held out for
    validation, such as the context of questions; None: every row for itself."""
    class_names: Callable[[Table], tuple[str, ...]] = lambda table: ()
    """table -> all class or tag names in it, in order."""
    check_splits: Callable[[Mapping[str, Table], Mapping[str, str]], None] = (
        lambda tables, renamed: None
    )
    """(tables by split, the entry's renamed columns: theirs -> ours) -> None. Raises InputError for
    splits whose columns do not fit together."""
    prepare: Callable[..., Table] = lambda table: table
    """Returns a table with its columns in the form that ``encode`` reads. An option of
    ``load_dataset`` such as ``turns`` reaches it if it has a keyword argument of this name."""
    check: Callable[[Table, Sequence[str]], None] = lambda table, names: None
    """(prepared table, class names) -> None. Raises InputError for a row that cannot be used. It
    sees all rows, also those that ``train_examples`` leaves out."""
    texts: Callable[[Table], list[str]] | None = None
    """Returns one text for each row, to make clusters of; None: the rows have no text."""
    words: Callable[[Table], list[str]] | None = None
    """Returns all texts that are tokenised, for a vocabulary of their words; None: ``texts``."""
    needs_tokenizer: bool = True
    """False for an encoder that reads no texts."""
    stand_in: Callable[[np.random.Generator, int, StandIn], dict[str, Any]] | None = None
    """(generator, n, required form) -> the columns of n made-up rows from which a model can learn.
    For ``source = "tiny"``; None: the encoder has no stand-in."""
    stand_in_length: int = 24
    """Tokens that every made-up row fits into."""


class Encoded(Task, Protocol):
    """A task whose data can be read from tables, such as :class:`fedjax_peft.tasks.Task`."""

    @property
    def name(self) -> str:
        """The name in messages."""

    @property
    def encoder(self) -> Encoder | None:
        """Turns rows into arrays; None: the data are arrays already."""


def texts_of(rng: np.random.Generator, words: np.ndarray) -> list[str]:
    """Returns a text for each row of ``words``: its first 5 words or more.

    Args:
      words: numbers of words, int ``[n, longest]``.
    """
    lengths = rng.integers(5, words.shape[1] + 1, len(words))
    return [" ".join(f"w{i}" for i in row[:k]) for row, k in zip(words, lengths, strict=True)]


def balanced_classes(rng: np.random.Generator, n: int, count: int) -> np.ndarray:
    """Returns the classes of n rows, int ``[n]``: each class about equally often."""
    return rng.permutation(np.arange(n) % count)
