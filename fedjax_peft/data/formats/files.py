"""Files, packed or not, whole or line by line: what goes wrong names the file."""

import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedjax_peft.data.table import Table
from fedjax_peft.support.errors import InputError

_UNREADABLE = (OSError, EOFError, zlib.error)


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yields (line number from 1, line without its end) of a file in UTF-8; ``.gz`` is unpacked.

    Only a line feed ends a line: tweets have other characters that Python would take for one.

    Raises:
      InputError: a file that cannot be read, is cut short, or is not in UTF-8.
    """
    number = 0
    try:
        with opener(path)(path, "rb") as file:
            for number, line in enumerate(file, 1):
                # Line by line, to name the line that is not UTF-8. A BOM is allowed.
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                yield number, text.rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise InputError(f"Line {number} of {path} is not UTF-8: {error}.") from error
    except _UNREADABLE as error:
        raise InputError(
            f"{path} could not be read after line {number}: {type(error).__name__}: {error}."
        ) from error


def read_bytes(path: Path, size: int = -1) -> bytes:
    """Returns the first ``size`` bytes of a file, or all; unpacked if its name ends in ``.gz``.

    Raises:
      InputError: a file that is missing, cut short or damaged.
    """
    try:
        with opener(path)(path, "rb") as file:
            return file.read(size)
    except _UNREADABLE as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{path} could not be read: {reason}.") from error


def read_json(path: Path) -> Any:
    """Returns the content of a JSON file.

    Raises:
      InputError: a file that cannot be read, or is not JSON.
    """
    data = read_bytes(path)
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:  # also a wrong encoding; too deep nesting
        raise InputError(f"{path} is not a JSON file: {error}.") from error


def unpacked(path: Path) -> Path:
    """Returns a path without the ending ``.gz``."""
    return path.with_suffix("") if path.suffix.lower() == ".gz" else path


def opener(path: Path) -> Callable[..., Any]:
    """Returns the function that opens a file, packed or not."""
    return gzip.open if unpacked(path) != path else open


def stem(path: Path) -> str:
    """Returns the name up to its first dot or a part's number: ``train`` of ``train.jsonl.gz``."""
    return re.sub(r"-\d{5}-of-\d{5}$", "", path.name.split(".")[0])


def refuse_twins(path: Path, names: Sequence[str]) -> None:
    """Raises InputError for a table's file in which two columns have one name."""
    twin = next((name for i, name in enumerate(names) if name in names[:i]), None)
    if twin is not None:
        raise InputError(f"{path} has two columns {twin!r}: keep one of them.")


def find(folder: Path, *patterns: str, deep: bool = True) -> Path | None:
    """Returns the file in the folder that fits the first pattern with any match.

    Args:
      *patterns: of file names, such as ``train-v*.json``; the first that fits counts. ``.gz`` may
        follow.
      deep: whether files in subfolders count.

    Raises:
      InputError: several files for one pattern.
    """
    glob = folder.rglob if deep else folder.glob
    for pattern in patterns:
        paths = {*glob(pattern), *glob(f"{pattern}.gz")}
        found = only(folder, (path for path in paths if path.is_file()))
        if found is not None:
            return found
    return None


def only(folder: Path, paths: Iterable[Path], what: str = "files for one split") -> Path | None:
    """Returns the one path in a folder, None if there is none.

    Raises:
      InputError: several paths.
    """
    found = sorted(paths)
    if len(found) > 1:
        names = ", ".join(str(path.relative_to(folder)) for path in found)
        raise InputError(f"{folder} has several {what}: {names}. Keep one.")
    return found[0] if found else None


def read_splits(
    folder: Path,
    patterns: Mapping[str, Sequence[str]],
    read: Callable[[Path], Table],
    deep: bool = True,
) -> dict[str, Table] | None:
    """Returns the splits whose files exist, None if no file exists.

    Args:
      patterns: split -> patterns of its file, see :func:`find`.

    Raises:
      InputError: several files for one split, or one that cannot be read.
    """
    found = {split: find(folder, *names, deep=deep) for split, names in patterns.items()}
    return {split: read(path) for split, path in found.items() if path is not None} or None
