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

from fedjax_peft.data.formats.leaf import CONTENTS, User, user_table
from fedjax_peft.data.table import Table
from fedjax_peft.support.errors import InputError
from fedjax_peft.support.memory import require

_ENDINGS = {"train": ("train",), "validation": ("held_out", "validation"), "test": ("test",)}
"""Split -> how the names of its file end: ``fed_emnist_train.h5``, ``train.h5``."""
_PACKED = 1100
"""The largest ratio of an array to its packed bytes in the file; gzip reaches 1032."""
_ALL = "examples"
"""The group of all clients."""


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
    paths = {split: path for split in _ENDINGS if (path := _find(folder, split))}
    if not paths:
        return None
    chosen = None
    if users is not None:
        chosen = _drawn(paths, users, user_examples or 1, seed)
        paths.pop("validation", None)  # its clients are others
    return {split: _table(path, chosen) for split, path in paths.items()}


def _find(folder: Path, split: str) -> Path | None:
    """Returns the file of a split, None if there is none."""
    for ending in _ENDINGS[split]:
        paths = sorted(p for e in ("h5", "hdf5") for p in folder.glob(f"*{ending}.{e}"))
        if len(paths) > 1:
            names = ", ".join(path.name for path in paths)
            raise InputError(f"{folder} has several files for the split {split!r}: {names}.")
        if paths:
            return paths[0]
    return None


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
    field, contents = _contents(path, clients, name)
    values = _values(place, field, contents)
    if values.dtype.kind in "SO":
        values = np.array([_text(place, field, value) for value in values.tolist()], object)
    labels = None
    if "label" in clients[name]:
        found = _values(place, "label", _dataset(place, clients[name], "label"))
        if found.shape != (len(values),) or found.dtype.kind not in "iu":
            raise InputError(
                f"{place} has labels of shape {list(found.shape)} and type {found.dtype} for"
                f" {len(values)} examples: a whole number for each is needed."
            )
        labels = found.tolist()
    is_text = values.dtype.kind == "O"
    return User(name, place, field, values.tolist() if is_text else values, labels)


def _text(place: str, field: str, value: Any) -> str:
    try:
        return value.decode("utf-8") if isinstance(value, bytes) else str(value)
    except UnicodeDecodeError as error:
        raise InputError(f"{place} has in {field!r} a text that is not UTF-8: {error}.") from None


def _contents(path: Path, clients: Any, name: str) -> tuple[str, Any]:
    """Returns the name and the array of a client's contents."""
    import h5py

    place = f"{path}: the client {name!r}"
    _check_link(place, clients, name)
    record = clients[name]
    if not isinstance(record, h5py.Group):
        raise InputError(f"{place} is an array, not a group of fields.")
    field = next((field for field in CONTENTS if field in record), None)
    if field is None:
        raise InputError(
            f"{place} has the fields {', '.join(record) or 'none'}, and none of"
            f" {', '.join(CONTENTS)}."
        )
    return field, _dataset(place, record, field)


def _dataset(place: str, record: Any, field: str) -> Any:
    """Returns an array on disk that lies in this file alone and fits into memory."""
    import h5py

    _check_link(place, record, field)
    array = record[field]
    if not isinstance(array, h5py.Dataset) or not array.shape:
        raise InputError(f"{place} has no list {field!r}.")
    if array.external or array.is_virtual:
        raise InputError(f"{place} has its {field!r} in another file, which is not read.")
    stored = min(array.id.get_storage_size(), Path(record.file.filename).stat().st_size)
    if array.nbytes > _PACKED * stored:
        raise InputError(
            f"{place} claims {array.nbytes:,} bytes of {field!r}, but the file has {stored:,} bytes"
            " of them: it is damaged."
        )
    require(array.nbytes, f"{place}, {field!r} of shape {list(array.shape)},", "Read fewer users.")
    return array


def _values(place: str, field: str, array: Any) -> np.ndarray:
    """Returns an array of numbers or of texts as bytes."""
    values = array[()]
    if values.dtype.kind not in "iufSO" or (values.dtype.kind in "SO" and values.ndim != 1):
        raise InputError(
            f"{place} has in {field!r} an array of type {array.dtype} and shape"
            f" {list(array.shape)}: neither numbers nor a list of texts."
        )
    return values


def _check_link(place: str, group: Any, name: str) -> None:
    """Raises InputError for a link that leaves the file or its place in it."""
    import h5py

    if not isinstance(group.get(name, getlink=True), h5py.HardLink):
        raise InputError(f"{place}: {name!r} is a link to another place, which is not followed.")


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Yields the group of clients of a file; errors of the format name the file."""
    try:
        import h5py
    except ImportError:
        raise InputError(
            f"{path} is an HDF5 file, which h5py reads: pip install 'fedjax_peft[h5]'."
        ) from None
    try:
        with h5py.File(path, "r") as file:
            if not isinstance(file.get(_ALL, getlink=True), h5py.HardLink):
                raise InputError(
                    f"{path} has no group {_ALL!r}, only: {', '.join(file) or 'nothing'}. TFF's"
                    " files have the examples of a client in examples/<client>."
                )
            if not isinstance(file[_ALL], h5py.Group):
                raise InputError(f"{path}: {_ALL!r} is an array, not a group of clients.")
            yield file[_ALL]
    except (OSError, KeyError, RuntimeError, ValueError, TypeError, UnicodeError) as error:
        if isinstance(error, InputError):
            raise
        reason = str(error).strip() or type(error).__name__
        raise InputError(f"{path} cannot be read as an HDF5 file: {reason}.") from error
