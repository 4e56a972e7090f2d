"""A data set as columns on the host, and its division among clients."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import numpy as np

from fedjax_peft.contracts import Task
from fedjax_peft.contracts.arguments import Count, Probability, strict
from fedjax_peft.contracts.part import data_part
from fedjax_peft.data.packing import packed
from fedjax_peft.numerics.ragged import Ragged
from fedjax_peft.numerics.random import host_rng
from fedjax_peft.support.display import counted, plural
from fedjax_peft.support.errors import InputError, nearest

IGNORE = -100
"""The label of a token that has none, as in ``transformers``."""


@dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """Examples as columns. Made by :func:`fedjax_peft.load_dataset` or by hand.

    Raises:
      InputError: no columns, columns of unequal length, a label without a name, or two classes of
        one name.
    """

    columns: dict[str, np.ndarray]
    """Column name -> array ``[examples, ...]``, such as ``input_ids`` int32 ``[examples, length]``,
    ``attention_mask`` bool ``[examples, length]``, ``labels`` int32 ``[examples]``. These go to the
    device."""
    label_names: tuple[str, ...] = ()
    """Names of the classes; a label is an index into them."""
    name: str = ""
    task: Task | str | None = None
    """What is learned from it: a task, or the name of a function of :mod:`fedjax_peft.tasks`; None:
    the class of each example (:func:`fedjax_peft.tasks.classification`)."""
    meta: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Columns that stay on the host, ``[examples, ...]``: keys to partition by (``client``,
    ``source``, ``tag_set``), and what a score needs. ``unit`` (int) is the number of the question
    or text that an example was cut from; a partition keeps the examples of a unit together."""
    references: Sequence[Any] = ()
    """What a score compares predictions with, one for each unit, such as gold answers."""
    vocabulary: tuple[str, ...] = ()
    """The words that ``input_ids`` are indices of, if ``load_dataset(vocabulary=...)`` chose them;
    empty: the tokens are those of a tokenizer. A run keeps them, so that its model can read
    texts."""
    tokenizer: Any = None
    """The tokenizer of the texts, for scores that read what a model generates; None: no score
    does."""
    notes: tuple[str, ...] = ()
    """Sentences on what was done to the rows, such as those left out; row 0 of a run has them."""
    no_keys: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Columns of the rows that cannot be keys to partition by, and why."""

    def __post_init__(self) -> None:
        lengths = {key: len(column) for key, column in (self.columns | dict(self.meta)).items()}
        if not self.columns:
            raise InputError(f"The data set {self.name!r} has no columns.")
        for key, length in lengths.items():
            if length != len(self):
                raise InputError(
                    f"The columns of the data set {self.name!r} differ in length:"
                    f" {next(iter(lengths))!r} has {len(self)} rows, {key!r} has {length}."
                )
        for key, column in self.columns.items():
            if not hasattr(column, "dtype") or column.dtype.kind in "OUS":
                raise InputError(
                    f"The column {key!r} of the data set {self.name!r} must be an array of numbers."
                    " Texts and other keys to partition by belong to `meta`."
                )
        if "labels" in self.columns:
            self._check_labels(self.columns["labels"])

    def _check_labels(self, labels: np.ndarray) -> None:
        out = (labels < 0) | (labels >= len(self.label_names))
        if labels.ndim > 1:  # of tokens
            out &= labels != IGNORE
        wrong = np.argwhere(out)
        if len(wrong) and not self.label_names:
            raise InputError(
                f"The data set {self.name!r} has labels and no label_names: name each class, such"
                " as fp.Dataset(columns, label_names=('no', 'yes'))."
            )
        if len(wrong):
            raise InputError(
                f"The column 'labels' of the data set {self.name!r} has the value"
                f" {labels[tuple(wrong[0])]} in row {wrong[0][0]}, but labels go from 0 to"
                f" {len(self.label_names) - 1}, the last of label_names."
            )
        if len({*self.label_names}) < len(self.label_names):
            twin = next(x for i, x in enumerate(self.label_names) if x in self.label_names[:i])
            raise InputError(f"Two classes of the data set {self.name!r} have the name {twin!r}.")

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __repr__(self) -> str:
        shapes = (f"{name} {list(array.shape[1:]) or ''}" for name, array in self.columns.items())
        classes = f", {len(self.label_names)} classes" if self.label_names else ""
        columns = ", ".join(shape.strip() for shape in shapes)
        return f"Dataset({self.name!r}: {counted(len(self), 'example')}{classes}; {columns})"

    @property
    def labels(self) -> np.ndarray:
        """The column ``labels``."""
        if "labels" not in self.columns:
            raise InputError(
                f"The data set {self.name!r} has no column 'labels', only"
                f" {', '.join(self.columns)}."
            )
        return self.columns["labels"]

    def take(self, indices: np.ndarray) -> "Dataset":
        """Returns the data set of the given rows, in the given order (int ``[m]``)."""
        columns = {key: column[indices] for key, column in self.columns.items()}
        return replace(self, columns=columns, meta={k: x[indices] for k, x in self.meta.items()})


DataT = TypeVar("DataT", Dataset, np.ndarray)
"""What can be partitioned: a data set, or a bare array of integer labels ``[examples]``."""


@dataclass(frozen=True, eq=False, repr=False)
class Clients(Generic[DataT]):
    """A federated data set: all examples, and the rows of each client. Made by a partition.

    Raises:
      InputError: no clients, an index outside of the data, names that are not all different, or
        weights that do not fit.
    """

    data: DataT
    indices: Sequence[np.ndarray]
    """One list of row numbers, int32 ``[examples of the client]``, per client. They are kept as one
    flat array, which takes 8 bytes for each client (:class:`fedjax_peft.numerics.ragged.Ragged`).
    """
    names: tuple[str, ...] = ()
    """Names of the clients, such as users; empty: they have numbers only."""
    weights: np.ndarray | None = None
    """The weight of each client in an aggregation, and in sampling by size, float64 ``[clients]``;
    None: its number of examples. A client of weight 0 trains, but its update does not count."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "indices", _checked(self.indices, len(self.data)))
        if self.weights is not None:
            usable = self.weights.shape == (len(self),) and np.isfinite(self.weights).all()
            if not usable or (self.weights < 0).any():
                raise InputError(
                    f"{len(self)} clients need {len(self)} weights that are numbers from 0 up."
                )
        if self.names and not len(set(self.names)) == len(self.names) == len(self):
            n = len(self)
            raise InputError(f"{n} clients need {n} different names, not {self.names!r:.80}.")

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, client: int | str) -> DataT:
        """Returns the examples of a client, by its number or its name."""
        if isinstance(client, str):
            if client not in self.names:
                raise InputError(f"There is no client {client!r}. {nearest(client, self.names)}")
            client = self.names.index(client)
        rows = self.indices[client]
        return self.data.take(rows) if isinstance(self.data, Dataset) else self.data[rows]

    def __repr__(self) -> str:
        sizes = self.sizes
        spread = f"{sizes.min()} to {sizes.max()}" if sizes.min() < sizes.max() else f"{sizes[0]}"
        name = f" of {self.data.name!r}" if isinstance(self.data, Dataset) else ""
        each = f"{spread} {plural('example', int(sizes.max()))} each"
        return f"Clients({len(self)} with {each}, {sizes.sum()} in all{name})"

    @property
    def sizes(self) -> np.ndarray:
        """Number of examples of each client, int32 ``[clients]``."""
        return Ragged.of(self.indices).sizes.astype(np.int32)

    @property
    def rows(self) -> np.ndarray:
        """The row numbers of all clients, one client after another, int32 ``[examples]``."""
        return Ragged.of(self.indices).flat

    @data_part
    def pack(self, length: int | None = None) -> "Clients[Dataset]":
        """Returns the same clients with several examples in each row of tokens.

        For the training of language models, where most examples are short: a batch of packed rows
        has little padding. ``batch_size`` then counts rows, and a local step averages over the
        learned tokens of its rows. The weights stay the clients' numbers of examples before
        packing. See :func:`fedjax_peft.data.packing.packed`.

        Args:
          length: tokens of a row; None: the length of the examples.

        Raises:
          InputError: the data are not those of ``instruction_tuning``, an example is longer, or the
            rows are packed already.
        """
        if not isinstance(self.data, Dataset):
            raise InputError("Packing needs a data set with tokens, not labels alone.")
        if length is None:
            length = self.data.columns.get("input_ids", np.zeros((0, 1))).shape[1]
        if not isinstance(length, int | np.integer) or isinstance(length, bool) or length < 2:
            raise InputError(f"length = {length!r} must be a whole number of at least 2 tokens.")
        data = self.data
        columns, indices = packed(data.columns, self.indices, int(length), data.name)
        kept = {"task": data.task, "tokenizer": data.tokenizer, "notes": data.notes}
        rows = Dataset(columns, name=data.name, **kept)
        weights = self.sizes.astype(np.float64) if self.weights is None else self.weights
        return Clients(rows, indices, self.names, weights)

    @data_part
    def holdout(
        self, fraction: Probability, seed: int = 0
    ) -> tuple["Clients[DataT]", "Clients[DataT]"]:
        """Returns ``(train, held_out)``: every client's own list, split at random.

        A client with n examples holds out ``round(fraction * n)`` of them, but it always keeps one
        for training: a client with one example holds out nothing. If the data have units
        (``meta``), units are counted and held out instead of examples.

        Args:
          fraction: the share of each client's examples.
          seed: a client's split depends on the seed and the client's number only.

        Raises:
          InputError: the clients have weights already.
        """
        if self.weights is not None:
            raise InputError("Hold out examples before clients get weights or packed rows.")
        units = self.data.meta.get("unit") if isinstance(self.data, Dataset) else None
        own = Ragged.of(self.indices)
        things = np.arange(len(own.flat)) if units is None else units[own.flat]
        each = enumerate(Ragged(things, own.sizes))
        mask = np.concatenate([_held_out(rows, fraction, seed, client) for client, rows in each])
        return replace(self, indices=own.where(~mask)), replace(self, indices=own.where(mask))

    @strict
    def sample(
        self, examples: Count, batch_size: Count, *, seed: int = 0, stream: str = "sample"
    ) -> Iterator[dict[str, Any]]:
        """Returns batches of examples of all clients, drawn without repetition.

        They are for what reads some examples before training, such as
        :func:`fedjax_peft.peft.gradient_start`. All batches have the same shape: the rows that the
        last one lacks are masked out.

        Args:
          examples: their number in all; more than the clients have are all of them.
          batch_size: the rows of a batch.
          stream: the name of the random numbers; a run of a config has ``gradient start`` or
            ``activation start`` for its start.
        """
        if not isinstance(self.data, Dataset):
            raise InputError("Batches need a data set, not labels alone.")
        data, rows = self.data, host_rng(seed, stream).permutation(self.rows)[:examples]
        size = min(batch_size, len(rows))

        def batch(start: int) -> dict[str, Any]:
            place = np.arange(start, start + size)
            columns = data.take(rows[np.minimum(place, len(rows) - 1)]).columns
            return {**columns, "mask": place < len(rows)}

        return map(batch, range(0, len(rows), size or 1))


def _checked(indices: Sequence[Any], examples: int) -> Ragged:
    """Returns the rows of clients; raises InputError unless they are rows of so many examples."""
    if not len(indices):
        raise InputError("A federated data set needs at least one client.")
    if not isinstance(indices, Ragged):
        for client, rows in enumerate(map(np.asarray, indices)):
            if rows.ndim != 1 or (rows.size and rows.dtype.kind not in "iu"):
                form = f"{rows.dtype} {list(rows.shape)}"
                raise InputError(f"Client {client} needs a list of row numbers, and has {form}.")
    found = Ragged.of(indices)
    wrong = np.flatnonzero((found.flat < 0) | (found.flat >= examples))
    if len(wrong):
        client = int(np.searchsorted(np.cumsum(found.sizes), wrong[0], side="right"))
        row = found.flat[wrong[0]]
        raise InputError(f"Client {client} owns row {row}, and rows go from 0 to {examples - 1}.")
    return found


def _held_out(units: np.ndarray, fraction: float, seed: int, client: int) -> np.ndarray:
    """Returns which examples of one client are held out, bool ``[n]``; ``units`` is int ``[n]``."""
    distinct, unit = np.unique(units, return_inverse=True)
    n = len(distinct)
    count = max(0, min(round(fraction * n), n - 1))
    if not count:  # most of a million clients may have one example: nothing is drawn for them
        return np.zeros(len(unit), bool)
    return (host_rng(seed, "holdout", client).permutation(n) < count)[unit]
