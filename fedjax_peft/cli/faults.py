"""What the command line says when the machine refuses: files, encodings, memory, output."""

import contextlib
import errno
import io
import os
import sys

from fedjax_peft.display import paragraph, show
from fedjax_peft.errors import InputError

__all__ = [
    "check_limits",
    "explain",
    "flush_output",
    "guard_streams",
    "is_output_fault",
    "silence_output",
    "tell",
]

_ADVICE = {
    errno.ENOSPC: "Make room there",
    errno.EDQUOT: "Make room there",
    errno.EFBIG: "Raise the limit for the size of a file (ulimit -f)",
    errno.EMFILE: "Raise the limit for open files (ulimit -n)",
    errno.ENFILE: "Close other programs",
    errno.EACCES: "Choose another path, or change its permissions",
    errno.EPERM: "Choose another path, or change its permissions",
    errno.EROFS: "Choose another path",
    errno.EEXIST: "Choose another path: a file or a link of this name is in the way",
    errno.ENOTDIR: "A part of the path is a file, not a folder",
    errno.EISDIR: "It is a folder, and a file is needed",
    errno.ELOOP: "Symbolic links on the path lead in a circle",
    errno.ENAMETOOLONG: "Choose a shorter name",
}
"""Error number of the operating system -> what helps."""
_ADDRESS_SPACE = 3_500_000_000
"""Bytes. With jax 0.10 a run of a tiny model aborts at 3.0e9 and completes at 4.0e9."""
_WRITING = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF, errno.EINVAL)
"""Errors that name no path where a file that is already open cannot be written to."""
_NO_MEMORY = ("RESOURCE_EXHAUSTED", "Out of memory", "out of memory", "bad_alloc")
_NO_LIBRARY_MEMORY = ("failed to map segment", "cannot allocate memory", "Cannot allocate memory")


def guard_streams() -> None:
    """Makes output safe: no character that the terminal's encoding lacks can stop a command.

    Output and error streams that the caller has closed are opened on nothing, so that no file which
    is opened later takes their place and receives what is printed.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def check_limits() -> None:
    """Raises InputError where the process may have so little address space that JAX would abort.

    XLA ends the process when it can start no thread, without a chance to say so in Python.
    """
    try:
        import resource
    except ImportError:  # not on this system
        return
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and limit < _ADDRESS_SPACE:
        raise InputError(
            f"This process may use {limit / 1e9:.1f} GB of address space (ulimit -v), and JAX needs"
            f" {_ADDRESS_SPACE / 1e9:.1f} GB, most of which is reserved and never used. Raise the"
            " limit: ulimit -v unlimited."
        )


def tell(text: str) -> None:
    """Prints to standard error, if there is one that can be written to."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def flush_output() -> None:
    """Writes out what was printed, so that a fault shows while it can still be reported."""
    if sys.stdout is not None:
        sys.stdout.flush()


def is_output_fault() -> bool:
    """Returns whether standard output cannot be written to; tries with an empty line."""
    try:
        flush_output()
        descriptor = sys.stdout.fileno()
    except (ValueError, AttributeError):  # closed, or no file at all
        return False
    except OSError:
        return True
    try:
        os.write(descriptor, b"\n")  # a buffer forgets what it could not write
    except OSError:
        return True
    return False


def silence_output() -> None:
    """Sends what is still to be printed to nowhere, at the end of a command that has failed."""
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError, AttributeError):
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def explain(error: BaseException) -> str | None:
    """Returns one paragraph about a fault of files, encodings, memory or installation.

    Args:
      error: what stopped the command.

    Returns:
      The paragraph, with the path and the reason where they are known; None for any other error,
      which is a defect of the program and needs its traceback.
    """
    text = _text(error)
    return None if text is None else paragraph(text)


def _text(error: BaseException) -> str | None:
    message = str(error).strip()
    first = message.split("\n")[0]
    if isinstance(error, OSError):
        return _file_text(error, first)
    if isinstance(error, UnicodeEncodeError | UnicodeDecodeError):
        what = "written" if isinstance(error, UnicodeEncodeError) else "read"
        return (
            f"A text or a path cannot be {what} in the encoding {error.encoding!r}: {error.reason}"
            f" ({show(error.object, 60)}). Save files as UTF-8, and set a locale with UTF-8, such"
            " as LC_ALL=C.UTF-8."
        )
    if isinstance(error, MemoryError) or any(word in message for word in _NO_MEMORY):
        detail = f": {first}" if first else ""
        return (
            f"There is not enough memory{detail}. Try a smaller batch_size, eval_batch_size, lanes,"
            " max_length or model."
        )
    if isinstance(error, RecursionError):
        return "A file or a value is nested too deeply to be read."
    if isinstance(error, ValueError) and "embedded null" in message:
        return "A path holds the character NUL, which no name of a file may have."
    if isinstance(error, RuntimeError) and message.startswith("Symlink loop"):
        return f"{first}: the links lead in a circle."
    if isinstance(error, RuntimeError) and "can't start new thread" in message:
        return "The system allows no further threads (ulimit -u, ulimit -v)."
    if isinstance(error, ImportError):
        full = any(word in message for word in _NO_LIBRARY_MEMORY)
        advice = (
            "There is not enough memory (ulimit -v)."
            if full
            else "Check the installation: python -m pip install --upgrade fedjax_peft."
        )
        return f"A library cannot be loaded: {first}. {advice}"
    return None


def _file_text(error: OSError, first: str) -> str:
    reason = error.strerror or first or type(error).__name__
    paths = [show(os.fsdecode(p)) for p in (error.filename, error.filename2) if _is_path(p)]
    if paths:
        where = f"{' -> '.join(paths)} cannot be used"
    elif error.errno in _WRITING and is_output_fault():
        where = "Standard output cannot be written"
    else:
        where = "A file cannot be used"
    advice = _ADVICE.get(error.errno or 0)
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        advice = f"{advice}; a run that was interrupted goes on from its last checkpoint (--resume)"
    return f"{where}: {reason}." + (f" {advice}." if advice else "")


def _is_path(value: object) -> bool:
    return isinstance(value, str | bytes | os.PathLike)
