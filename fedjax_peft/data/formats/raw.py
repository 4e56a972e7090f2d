"""The bytes of a file."""

import gzip
import zlib
from pathlib import Path

from fedjax_peft.errors import InputError

__all__ = ["read_bytes"]


def read_bytes(path: Path, size: int = -1) -> bytes:
    """Returns the first ``size`` bytes of a file, or all; unpacked if its name ends in ``.gz``.

    Raises:
      InputError: a file that is missing, cut short or damaged.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rb") as file:
            return file.read(size)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{path} could not be read: {reason}.") from error
