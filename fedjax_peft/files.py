"""Writing files whole or not at all."""

import os
from pathlib import Path

__all__ = ["replace_file"]


def replace_file(path: str | os.PathLike[str], data: bytes) -> None:
    """Writes a file so that readers, and a crash, see the old content or the new, never a part."""
    path = Path(path)
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with scratch.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)
