"""Errors of files, encodings and memory are printed as one paragraph, with exit code 2."""

import errno
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from internals import cli

from fedjax_peft.cli import faults

pytestmark = pytest.mark.slow


def _start(*arguments, stdout=subprocess.PIPE, shell=None, **variables):
    """Runs the command line in a new process, after the shell command ``shell``."""
    command = [sys.executable, "-m", "fedjax_peft.cli.main", *map(str, arguments)]
    if shell is not None:
        command = ["sh", "-c", f'{shell}; exec "$0" "$@"', *command]
    environment = {**os.environ, **variables}
    return subprocess.run(
        command, stdout=stdout, stderr=subprocess.PIPE, text=True, env=environment, check=False
    )


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/x/y"), ["/x/y", "Free some space"]),
        (OSError(errno.EMFILE, "Too many open files"), ["Too many open files", "ulimit -n"]),
        (NotADirectoryError(errno.ENOTDIR, "Not a directory", b"/a/b"), ["/a/b", "is a file"]),
        (UnicodeEncodeError("latin-1", "東", 0, 1, "ordinal not in range"), ["latin-1", "UTF-8"]),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), ["utf-8", "invalid"]),
        (MemoryError(), ["not enough memory"]),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes."), ["allocating 9"]),
        (RecursionError("maximum recursion depth exceeded"), ["nested too deeply"]),
        (ImportError("libx.so: failed to map segment from shared object"), ["memory"]),
        (ValueError("embedded null byte"), ["NUL"]),
        (RuntimeError("Could not determine home directory."), ["~"]),
    ],
)
def test_errors_of_the_operating_system_are_one_paragraph(error, words, monkeypatch, capsys):
    def fails(*_):
        raise error

    monkeypatch.setattr(cli, "_main", fails)
    assert cli.main(["list"]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("fedjax-peft: ")
    assert "Traceback" not in printed
    for word in words:
        assert word in printed


def test_numpys_memory_error_is_explained():
    with pytest.raises(MemoryError) as caught:
        np.zeros(2**60, np.uint8)
    assert "EiB" in faults.explain(caught.value)


def test_other_exceptions_keep_their_traceback(monkeypatch):
    def fails(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "_main", fails)
    with pytest.raises(ZeroDivisionError):
        cli.main(["list"])


def test_unknown_arguments_are_shown_without_terminal_escapes(capsys):
    with pytest.raises(SystemExit):
        cli.main(["assets", "a", "\x1b[2J" + "x" * 10_000])
    printed = capsys.readouterr().err
    assert "\x1b" not in printed
    assert len(printed) < 2000


@pytest.mark.parametrize(
    "locale",
    [
        pytest.param({"LC_ALL": "C"}, marks=pytest.mark.exhaustive),  # Python takes UTF-8 for it
        {"LC_ALL": "POSIX", "PYTHONUTF8": "0"},
        {"PYTHONIOENCODING": "ascii"},
    ],
)
@pytest.mark.sample("locale1")
def test_output_works_in_a_locale_without_unicode(locale):
    done = _start("list", **locale)
    assert done.returncode == 0, done.stderr
    assert "aggregator" in done.stdout


def test_a_full_output_device_is_one_paragraph():
    with open("/dev/full", "w") as full:
        done = _start("list", stdout=full)
        # argparse ignores the error of a write, which a buffer delays to the end of the process.
        helped, ignored = (_start("--help", stdout=full, PYTHONUNBUFFERED=x) for x in ("", "1"))
    assert done.returncode == 2
    assert done.stderr.startswith("fedjax-peft: Standard output cannot be written: No space")
    assert done.stderr.count("\n") == 1
    assert (helped.returncode, helped.stderr) == (2, done.stderr)
    assert (ignored.returncode, ignored.stderr) == (0, "")


def test_commands_work_with_closed_streams():
    for closed in (">&-", "2>&-", ">&- 2>&- <&-"):
        done = _start("assets", shell=f"exec {closed}")
        assert done.returncode == 0
        assert "Traceback" not in done.stderr


def test_a_closed_pipe_is_not_an_error():
    command = f"{sys.executable} -m fedjax_peft.cli.main assets | true"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert done.stderr == ""


def test_too_little_address_space_is_an_error_before_xla_aborts():
    done = _start("bench", shell="ulimit -v 1500000")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "ulimit -v" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_long_wait_is_told_on_a_terminal_only(capsys, monkeypatch):
    for terminal, after, said in ((True, 0.0, "Loading.\n"), (False, 0.0, ""), (True, 60.0, "")):
        monkeypatch.setattr(sys.stderr, "isatty", lambda terminal=terminal: terminal)
        with faults.telling("Loading.", after):
            for thread in threading.enumerate():
                if isinstance(thread, threading.Timer) and not after:
                    thread.join()
        assert capsys.readouterr().err == said
