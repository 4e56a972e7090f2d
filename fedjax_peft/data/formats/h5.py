"""TensorFlow Federated's HDF5 files of examples by user: ``examples/<client>/<field>``.

The fields of a client are arrays of equal length: ``tokens`` (Stack Overflow) or ``snippets``
(Shakespeare), texts; ``pixels`` from 0 to 1 (EMNIST) or ``image`` uint8 (CIFAR-100), and ``label``.
Other fields, such as ``creation_date`` and ``coarse_label``, are not read.

Truncated files, links to other files, and arrays that the file cannot hold are refused. But the
HDF5 library itself can run for ever on a file whose texts (its global heap) are damaged, so compare
the checksum of a file from an unknown place.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_peft.data.formats.files import find
from fedjax_peft.data.formats.leaf import CONTENTS, User, user_table
from fedjax_peft.data.table import Table
from fedjax_peft.support.errors import InputError
from fedjax_peft.support.libraries import install
from fedjax_peft.support.memory import require

_ENDINGS = {"train": ("train",), "validation": ("held_out", "validation"), "test": ("test",)}
"""Split -> how the names of its file end: ``fed_emnist_train.h5``, ``train.h5``."""
_PACKED = 1100
"""The largest ratio of an array to its packed bytes in the file; gzip reaches 1032."""


def read_h5(
    folder: Path, *, users: int | None = None, user_examples: int | None = None, seed: int = 0
) -> dict[str, Table] | None:
    """Returns the splits of a folder with TFF's HDF5 files, None if it has none.

    Files are ``*train.h5``, ``*test.h5`` and ``*held_out.h5`` (the split ``validation``). Rows are
    in the order of the clients' names. Columns are those of
    :func:`fedjax_peft.data.formats.leaf.read_users`.

    Args:
      users: read only this many clients, drawn by
        :func:`fedjax_peft.data.subsets.draw_users` out of those in the training and the test file.
        All others stay on disk. None: all.
      user_examples: least number of training examples of a drawn client, by default 1.

    Raises:
      InputError: h5py is not installed; a file is damaged, is not of this form, or points to other
        files; or there are too few clients.
    """
    paths = {}
    for split, endings in _ENDINGS.items():
        names = [f"*{ending}.{kind}" for ending in endings for kind in ("h5", "hdf5")]
        path = find(folder, *names, deep=False)
        if path is not None:
            paths[split] = path
    if not paths:
        return None
    chosen = None
    if users is not None:
        chosen = _drawn(paths, users, user_examples or 1, seed)
        paths.pop("validation", None)  # its clients are others
    return {split: _table(path, chosen) for split, path in paths.items()}


def _drawn(paths: dict[str, Path], users: int, least: int, seed: int) -> list[str]:
    """Returns the drawn clients, sorted; sizes are read of the clients that are tried."""
    from fedjax_peft.data.subsets import draw_users  # imports JAX, which the catalogue does not

    train, *others = [paths[split] for split in ("train", "test") if split in paths]
    with _opened(train) as clients:
        names = set(clients)
        for path in others:
            with _opened(path) as more:
                names &= set(more)

        def size(name: str) -> int:
            return len(_contents(train, clients, name)[1])

        return sorted(draw_users(names, size, users, least, seed))


def _table(path: Path, chosen: list[str] | None) -> Table:
    """Returns the examples of the chosen clients of a file; of all clients for None."""
    with _opened(path) as clients:
        names = sorted(clients) if chosen is None else chosen
        return user_table(path, (_user(path, clients, name) for name in names))


def _user(path: Path, clients: Any, name: str) -> User:
    place = f"{path}: the client {name!r}"
    field, array = _contents(path, clients, name)
    contents, labels = _values(place, field, array), None
    if "label" in clients[name]:
        found = np.asarray(_values(place, "label", _array(place, clients[name], "label")))
        if found.shape != (len(contents),) or found.dtype.kind not in "iu":
            raise InputError(
                f"{place} has labels of shape {list(found.shape)} and type {found.dtype} for"
                f" {len(contents)} examples: a whole number for each is needed."
            )
        labels = found.tolist()
    return User(name, place, field, contents, labels)


def _contents(path: Path, clients: Any, name: str) -> tuple[str, Any]:
    """Returns the name and the array of a client's contents."""
    place = f"{path}: the client {name!r}"
    record = _member(str(path), clients, name, "Group")
    field = next((field for field in CONTENTS if field in record), None)
    if field is None:
        found, known = ", ".join(record) or "none", ", ".join(CONTENTS)
        raise InputError(f"{place} has the fields {found}, and none of {known}.")
    return field, _array(place, record, field)


def _array(place: str, record: Any, field: str) -> Any:
    """Returns an array on disk that lies in this file alone and fits into memory."""
    array = _member(place, record, field, "Dataset")
    if array.external or array.is_virtual:
        raise InputError(f"{place} has its {field!r} in another file, which is not read.")
    if not array.shape:
        raise InputError(f"{place} has no list {field!r}.")
    stored = min(array.id.get_storage_size(), Path(record.file.filename).stat().st_size)
    if array.nbytes > _PACKED * stored:
        raise InputError(
            f"{place} claims {array.nbytes:,} bytes of {field!r}, but the file has {stored:,} bytes"
            " of them: it is damaged."
        )
    require(array.nbytes, f"{place}, {field!r} of shape {list(array.shape)},", "Read fewer users.")
    return array


def _values(place: str, field: str, array: Any) -> list[str] | np.ndarray:
    """Returns an array of numbers, or the texts of a list."""
    values = array[()]
    if values.dtype.kind in "iuf":
        return values
    texts: list[Any] = values.tolist() if values.ndim == 1 else [None]
    if not all(isinstance(x, bytes | str) for x in texts):  # others can be arrays or references
        raise InputError(
            f"{place} has in {field!r} an array of type {array.dtype} and shape"
            f" {list(array.shape)}: neither numbers nor a list of texts."
        )
    try:
        return [x.decode() if isinstance(x, bytes) else x for x in texts]
    except UnicodeDecodeError as error:
        raise InputError(f"{place} has in {field!r} a text that is not UTF-8: {error}.") from None


def _member(place: str, group: Any, name: str, kind: str) -> Any:
    """Returns a ``Group`` or ``Dataset`` in a group, if it lies there and no link leads to it."""
    import h5py

    there = isinstance(group.get(name, getlink=True), h5py.HardLink)
    if not there or not isinstance(group[name], getattr(h5py, kind)):
        raise InputError(
            f"{place} has no {kind.lower()} {name!r} of its own (links are not followed), only:"
            f" {', '.join(group) or 'nothing'}. TFF's files have examples/<client>/<field>."
        )
    return group[name]


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Yields the group of clients of a file; errors of the format name the file."""
    try:
        import h5py
    except ImportError:
        raise InputError(f"{path} is an HDF5 file, which h5py reads: {install('h5')}.") from None
    try:
        with h5py.File(path, "r") as file:
            yield _member(str(path), file, "examples", "Group")
    except InputError:
        raise
    except (OSError, KeyError, RuntimeError, ValueError, TypeError, UnicodeError) as error:
        reason = str(error).strip() or type(error).__name__
        raise InputError(f"{path} cannot be read as an HDF5 file: {reason}.") from error
