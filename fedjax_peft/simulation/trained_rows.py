"""The examples that a model was trained on, by digests of what the model reads.

A run keeps them in ``trained_rows.safetensors``, so that a run that starts from it, perhaps with
another split, does not test on them. A digest tells whether an example that somebody has is among
them. It does not tell the example.
"""

import hashlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from fedjax_peft.data.dataset import Clients, Dataset
from fedjax_peft.support.errors import InputError, users_level
from fedjax_peft.support.files import replace_file

NAME = "trained_rows.safetensors"
_ROWS = "rows"
_NOT_READ = ("labels", "attention_mask")
_BLOCK = 4096


def digests(data: Any) -> np.ndarray:
    """Returns a digest of each example, uint64 ``[examples]``; labels do not count.

    Texts are compared by their tokens, however long they are padded, and packed or not.

    Args:
      data: a :class:`Dataset`, or :class:`Clients`, whose own rows count.
    """
    if isinstance(data, Clients):
        data, rows = data.data, data.rows.astype(np.int64)
    else:
        rows = np.arange(len(data))
    found = [
        hashlib.blake2b(example, digest_size=8).digest()
        for start in range(0, len(rows), _BLOCK)
        for example in _examples(data, rows[start : start + _BLOCK])
    ]
    return np.frombuffer(b"".join(found), np.uint64)


def _examples(data: Dataset, rows: np.ndarray) -> Iterator[bytes]:
    """Yields what the model reads of each example."""
    columns = {name: np.asarray(data.columns[name])[rows] for name in sorted(data.columns)}
    ids, mask = (columns.get(name) for name in ("input_ids", "attention_mask"))
    if ids is None or mask is None or ids.shape != mask.shape:
        read = {name: x for name, x in columns.items() if name not in _NOT_READ} or columns
        for row in range(len(rows)):
            yield b"".join(x[row].tobytes() for x in read.values())
        return
    texts, segments = ids.astype(np.int32), columns.get("segment_ids")
    for row, real in enumerate(mask.astype(bool)):
        if segments is None:
            yield texts[row, real].tobytes()
        else:
            ends = np.flatnonzero(np.diff(segments[row, real])) + 1
            yield from (one.tobytes() for one in np.split(texts[row, real], ends))


def trained_rows(
    clients: Clients, tested: Mapping[str, Any], before: np.ndarray | None
) -> np.ndarray:
    """Returns the digests of a run's training examples, sorted.

    An example that also stands in the data that the run itself tests on does not count: data sets
    have duplicates, and a new run with the same split has them too.

    Args:
      tested: name -> what the run is evaluated on.
      before: those of the run that it starts from; None without one.
    """
    own = digests(clients) if before is None else np.concatenate([digests(clients), before])
    held = [digests(data) for data in tested.values()]
    return np.setdiff1d(own, np.concatenate([np.zeros(0, np.uint64), *held]))


def when_asked(*arguments: Any) -> Callable[[], np.ndarray]:
    """Returns the function that computes :func:`trained_rows` once: that takes seconds a million.

    Args:
      *arguments: of ``trained_rows``.
    """
    return cache(partial(trained_rows, *arguments))


def rows_before(origin: Any, resumed: str | Path | None) -> np.ndarray | None:
    """Returns the examples that a run's model was trained on before; None if nothing says it.

    Args:
      origin: the run that it starts from, if any.
      resumed: the directory of a run that goes on, whose origin may be gone.
    """
    known = None if origin is None else origin.trained_on()
    if known is not None:
        return np.asarray(known)
    return None if resumed is None else read_rows(Path(resumed))


def check_unseen(tested: Mapping[str, Any], before: np.ndarray | None, run: str) -> None:
    """Raises InputError if a run is evaluated on training examples of the run that it starts from.

    Args:
      tested: name -> what the new run is evaluated on.
      before: :func:`trained_rows` of the earlier run; None: they are not known, which a warning
        says.
      run: where the earlier run is.
    """
    if before is None:
        warnings.warn(
            f"{run} does not say which examples it was trained on (it has no {NAME}), so nothing"
            " tells whether this run is tested on some of them.",
            stacklevel=users_level(),
        )
        return
    wrong = []
    for name, data in tested.items():
        known = np.isin(digests(data), before)
        if known.any():
            wrong.append(f"{known.sum():,} of the {len(known):,} examples of {name}")
    if wrong:
        raise InputError(
            f"{' and '.join(wrong)} are training examples of {run}, which this run starts from: a"
            " score on them says nothing about new examples. Keep that run's split (in a config its"
            " data.seed, partition.seed, evaluation.holdout_seed, and the shares that are held"
            " out), or leave these examples out of the evaluation."
        )


def save_rows(directory: Path, rows: np.ndarray) -> None:
    """Writes the digests of a run's training examples."""
    replace_file(directory / NAME, safetensors.numpy.save({_ROWS: rows}))


def read_rows(directory: Path) -> np.ndarray | None:
    """Returns what :func:`save_rows` has written; None if the directory has no such file.

    Raises:
      InputError: the file is damaged.
    """
    path = directory / NAME
    if not path.exists():
        return None
    try:
        return safetensors.numpy.load(path.read_bytes())[_ROWS].astype(np.uint64)
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise InputError(f"{path} is damaged: {error}.") from None
