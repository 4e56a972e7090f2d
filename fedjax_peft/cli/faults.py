"""Errors of the operating system: files, encodings, memory and output, explained to users."""

import contextlib
import errno
import io
import os
import sys
import threading
import warnings
from collections.abc import Iterator

from fedjax_peft.support import memory
from fedjax_peft.support.display import paragraph, show
from fedjax_peft.support.errors import InputError
from fedjax_peft.support.libraries import pip

_ADVICE = {
    errno.ENOSPC: "Free some space there",
    errno.EDQUOT: "Free some space there",
    errno.EFBIG: "Raise the limit on file sizes (ulimit -f)",
    errno.EMFILE: "Raise the limit on open files (ulimit -n)",
    errno.ENFILE: "Close other programs",
    errno.EACCES: "Choose another path, or change its permissions",
    errno.EPERM: "Choose another path, or change its permissions",
    errno.EROFS: "Choose another path",
    errno.EEXIST: "Choose another path: a file or a link has this name",
    errno.ENOTDIR: "A part of the path is a file, not a folder",
    errno.EISDIR: "It is a folder, but a file is needed",
    errno.ELOOP: "The path contains a cycle of symbolic links",
    errno.ENAMETOOLONG: "Choose a shorter name",
}
"""Error number of the operating system -> remedy."""
_ADDRESS_SPACE = 3_500_000_000
"""Bytes that JAX needs. With jax 0.10, a run of a tiny model aborts at 3.0e9, not at 4.0e9."""
_WRITING = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF, errno.EINVAL)
"""Errors of writing to an open file; they do not contain its path."""
_NO_LIBRARY_MEMORY = ("failed to map segment", "cannot allocate memory", "Cannot allocate memory")


def guard_streams() -> None:
    """Makes standard output and error safe to print to.

    Characters that the terminal's encoding lacks are escaped. Streams that the caller has closed
    are opened on the null device; otherwise a file that is opened later would get their descriptor
    and receive what is printed.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor, which is this one
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def check_limits() -> None:
    """Raises InputError if the process is limited to less address space than JAX needs.

    XLA aborts the process when it cannot start a thread, and Python cannot catch this.
    """
    try:
        import resource
    except ImportError:  # the operating system has no such limits
        return
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and limit < _ADDRESS_SPACE:
        raise InputError(
            f"This process is limited to {limit / 1e9:.1f} GB of address space (ulimit -v). JAX"
            f" needs {_ADDRESS_SPACE / 1e9:.1f} GB, most of which is reserved and never used. Raise"
            " the limit: ulimit -v unlimited."
        )


def print_error(text: str) -> None:
    """Prints to standard error; does nothing if it cannot be written to."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def plain_warnings() -> Iterator[None]:
    """Makes warnings to users one paragraph like errors, without a line of this program."""
    usual = warnings.formatwarning

    def plain(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        line: str | None = None,
    ) -> str:
        if category is UserWarning or category.__module__.startswith("fedjax_peft."):
            return f"fedjax-peft: {paragraph(str(message))}\n"
        return usual(message, category, filename, lineno, line)

    warnings.formatwarning = plain
    try:
        yield
    finally:
        warnings.formatwarning = usual


@contextlib.contextmanager
def telling(text: str, after: float = 3.0) -> Iterator[None]:
    """Prints a line on a terminal if what is inside takes more than some seconds."""
    timer = threading.Timer(after, print_error, [text])
    timer.daemon = True
    if sys.stderr is not None and sys.stderr.isatty():
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def flush_output() -> None:
    """Flushes standard output, so that an error occurs while it can still be reported."""
    if sys.stdout is not None:
        sys.stdout.flush()


def is_output_fault() -> bool:
    """Returns whether standard output cannot be written to; the test writes an empty line."""
    try:
        flush_output()
        descriptor = sys.stdout.fileno()
    except (ValueError, AttributeError):  # closed, or not a file
        return False
    except OSError:
        return True
    try:
        os.write(descriptor, b"\n")  # flush alone is not enough: a failed flush empties the buffer
    except OSError:
        return True
    return False


def silence_output() -> None:
    """Redirects standard output to the null device, after a command has failed."""
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError, AttributeError):
        return
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)


def explain(error: BaseException) -> str | None:
    """Returns one paragraph about an error of files, encodings, memory or installation.

    Returns:
      The paragraph, with the path and the reason if they are known. None for any other exception,
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
            f" ({show(error.object, 60)}). Save files as UTF-8, and set a UTF-8 locale, such as"
            " LC_ALL=C.UTF-8."
        )
    if memory.is_exhausted(error):
        detail = f": {first}" if first else ""
        return (
            f"There is not enough memory{detail}. Try a smaller batch_size,"
            " evaluation.batch_size, placement.lanes, data.max_length or model. On an accelerator"
            " a sweep runs several points side by side: --replicas 1 needs the least memory."
        )
    if isinstance(error, RecursionError):
        return "A file or a value is nested too deeply to be read."
    if isinstance(error, ValueError) and "embedded null" in message:
        return "A path contains the character NUL, which file names cannot contain."
    if isinstance(error, RuntimeError) and message.startswith("Symlink loop"):
        return f"{first}: the symbolic links form a cycle."
    if isinstance(error, RuntimeError) and message.startswith("Could not determine home"):
        return "A path begins with ~, but the home directory of this user is not known."
    if isinstance(error, RuntimeError) and "can't start new thread" in message:
        return "The system allows no further threads (ulimit -u, ulimit -v)."
    if isinstance(error, ImportError):
        full = any(word in message for word in _NO_LIBRARY_MEMORY)
        advice = (
            "There is not enough memory (ulimit -v)."
            if full
            else f"Install the package again: {pip()} install -e . in its checkout."
        )
        return f"A library cannot be loaded: {first}. {advice}"
    return None


def _file_text(error: OSError, first: str) -> str:
    reason = error.strerror or first or type(error).__name__
    names = (error.filename, error.filename2)  # a descriptor is a number
    paths = [show(os.fsdecode(x)) for x in names if isinstance(x, str | bytes | os.PathLike)]
    if paths:
        where = f"{' -> '.join(paths)} cannot be used"
    elif error.errno in _WRITING and is_output_fault():
        where = "Standard output cannot be written"
    else:
        where = "A file cannot be used"
    advice = _ADVICE.get(error.errno or 0)
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        advice = f"{advice}; --resume continues an interrupted run from its last checkpoint"
    return f"{where}: {reason}." + (f" {advice}." if advice else "")
