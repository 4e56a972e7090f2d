"""A command in a process of its own, on the quick encoder. It can be held in its first run.

    python worker.py HOLD sweep study.toml --out S --share

With ``HOLD`` = ``hold`` it prints ``held`` after the first round of its first run, waits for a
line, and kills itself.
"""

import os
import signal
import sys

import pytest
from internals import cli, record
from shallow import simplify

from fedjax_peft.engine import lengths

lengths._GAIN = 1.0  # as in conftest.py
os.fsync = lambda file: None


def main(hold: str, *arguments: str) -> int:
    """Runs a command and returns its exit code."""
    write = record.append_metrics

    def held(path, row):
        write(path, row)
        if row["round"] == 1:
            print("held", flush=True)
            sys.stdin.readline()
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.MonkeyPatch.context() as patch:
        simplify(patch)
        if hold == "hold":
            patch.setattr(record, "append_metrics", held)
        return cli.main(list(arguments))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
