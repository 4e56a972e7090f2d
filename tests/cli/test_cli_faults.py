"""The machine refuses: every fault of files, encodings and memory is one paragraph and exit 2."""

import errno
import os
import subprocess
import sys

import numpy as np
import pytest

from fedjax_peft.cli import faults
from fedjax_peft.cli import main as cli


def _start(*arguments, stdout=subprocess.PIPE, shell=None, **variables):
    """Runs the command line in a process of its own; ``shell`` goes before it."""
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
        (OSError(errno.ENOSPC, "No space left on device", "/x/y"), ["/x/y", "Make room"]),
        (OSError(errno.EMFILE, "Too many open files"), ["Too many open files", "ulimit -n"]),
        (NotADirectoryError(errno.ENOTDIR, "Not a directory", b"/a/b"), ["/a/b", "is a file"]),
        (UnicodeEncodeError("latin-1", "東", 0, 1, "ordinal not in range"), ["latin-1", "UTF-8"]),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), ["utf-8", "invalid"]),
        (MemoryError(), ["not enough memory"]),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes."), ["allocating 9"]),
        (RecursionError("maximum recursion depth exceeded"), ["nested too deeply"]),
        (ImportError("libx.so: failed to map segment from shared object"), ["memory"]),
        (ValueError("embedded null byte"), ["NUL"]),
    ],
)
def test_every_fault_of_the_machine_has_a_paragraph(error, words, monkeypatch, capsys):
    def fails(*_):
        raise error

    monkeypatch.setattr(cli, "_main", fails)
    assert cli.main(["list"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("fedjax-peft: ")
    assert "Traceback" not in told
    for word in words:
        assert word in told


def test_numpy_that_asks_for_too_much_memory_is_explained():
    with pytest.raises(MemoryError) as caught:
        np.zeros(2**60, np.uint8)
    assert "EiB" in faults.explain(caught.value)


def test_a_defect_keeps_its_traceback(monkeypatch):
    def fails(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "_main", fails)
    with pytest.raises(ZeroDivisionError):
        cli.main(["list"])


def test_refused_arguments_are_shown_without_escapes(capsys):
    with pytest.raises(SystemExit):
        cli.main(["assets", "a", "\x1b[2J" + "x" * 10_000])
    told = capsys.readouterr().err
    assert "\x1b" not in told
    assert len(told) < 2000


@pytest.mark.parametrize(
    "locale",
    [{"LC_ALL": "C"}, {"LC_ALL": "POSIX", "PYTHONUTF8": "0"}, {"PYTHONIOENCODING": "ascii"}],
)
def test_output_works_in_a_locale_without_unicode(locale):
    done = _start("list", **locale)
    assert done.returncode == 0, done.stderr
    assert "fedavg" in done.stdout


def test_output_that_cannot_be_written_is_one_paragraph():
    with open("/dev/full", "w") as full:
        done = _start("list", stdout=full)
        helped = _start("--help", stdout=full)  # argparse prints it, and ignores the fault
    assert done.returncode == 2
    assert done.stderr.startswith("fedjax-peft: Standard output cannot be written: No space")
    assert done.stderr.count("\n") == 1
    assert helped.stderr == ""


def test_closed_streams_do_no_harm():
    for closed in (">&-", "2>&-", ">&- 2>&- <&-"):
        done = _start("assets", shell=f"exec {closed}")
        assert done.returncode == 0
        assert "Traceback" not in done.stderr


def test_a_reader_that_leaves_is_no_fault():
    command = f"{sys.executable} -m fedjax_peft.cli.main assets | true"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert done.stderr == ""


def test_too_little_address_space_is_said_before_xla_aborts():
    done = _start("bench", shell="ulimit -v 1500000")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "ulimit -v" in done.stderr
    assert done.stderr.count("\n") == 1
