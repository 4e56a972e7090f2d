"""Writing files completely or not at all, with the path in every error."""

import contextlib
import errno
import hashlib
import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path


def read_text(path: str | os.PathLike[str]) -> str:
    """Returns the text of a file in UTF-8, which may be a pipe or a terminal; without a BOM.

    Raises:
      OSError: no such file, or a device such as ``/dev/zero``, which never ends.
      UnicodeDecodeError: not UTF-8.
    """
    with naming(path), open(path, encoding="utf-8-sig") as file:
        if stat.S_ISCHR(os.fstat(file.fileno()).st_mode) and not file.isatty():
            raise OSError(errno.EINVAL, "It is a device, not a file")
        return file.read()


def replace_file(path: str | os.PathLike[str], data: bytes) -> None:
    """Writes a file so that it has the old content or the new one, also after a crash.

    Symbolic links are followed. A device or a pipe, such as ``/dev/stdout``, is written directly.

    Raises:
      OSError: with the path.
    """
    check_output(path)
    target = Path(os.path.realpath(path) if os.path.islink(path) else path)
    with naming(path):
        if target.exists() and not target.is_file():
            with target.open("wb") as file:
                file.write(data)
            return
        # A name may have 255 bytes; a character takes up to four.
        scratch = target.with_name(f".{target.name[:50]}.{os.getpid()}.tmp")
        try:
            with scratch.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            scratch.replace(target)
        finally:
            with contextlib.suppress(OSError):
                scratch.unlink(missing_ok=True)


def check_output(path: str | os.PathLike[str]) -> None:
    """Raises OSError with the path and the reason if a file cannot be written there.

    Call it before long work whose result is written there. It creates nothing.
    """
    with naming(path):
        try:
            mode = os.stat(path).st_mode
        except FileNotFoundError:
            folder = os.path.dirname(os.path.realpath(path)) or "."
            if not stat.S_ISDIR(os.stat(folder).st_mode):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from None
            checked = folder
        else:
            if stat.S_ISDIR(mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            checked = os.fspath(path)
        if not os.access(checked, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


@contextlib.contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Puts a path into every OSError of the block; some, as of a full disk, come without one."""
    try:
        yield
    except OSError as error:
        error.filename, error.filename2 = os.fspath(path), None
        raise


def folder_names(texts: Mapping[str, str]) -> dict[str, str]:
    """Returns key -> a name for one directory, made from the text of this key.

    Separators and other characters that a file system may refuse become ``_``. A name that is too
    long, or taken by an earlier key, ends in a digest of its key. Names differ in more than case.
    """
    found: dict[str, str] = {}
    taken: set[str] = set()
    for key, text in texts.items():
        name = re.sub(r"[^\w.+\-\[\](){}=,' ]+", "_", text)
        if not name.strip(". "):
            name = f"_{name}"
        if len(name.encode()) > _LONGEST or name.casefold() in taken:
            short = name.encode()[:_LONGEST].decode(errors="ignore")
            name = f"{short}-{hashlib.blake2b(key.encode(), digest_size=4).hexdigest()}"
        found[key] = name
        taken.add(name.casefold())
    return found


_LONGEST = 200
"""Bytes of a directory's name, which file systems limit to 255."""
