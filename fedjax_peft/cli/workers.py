"""Workers: processes that share a study, on this machine."""

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fedjax_peft.cli import faults
from fedjax_peft.support.display import counted
from fedjax_peft.support.errors import InputError

_CUDA = "CUDA_VISIBLE_DEVICES"
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def seconds(text: str) -> float:
    """Returns the seconds in a text such as ``30m`` or ``2h``.

    Raises:
      InputError: the text is not of this form.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text.strip())
    if found is None:
        raise InputError(f"--take-over {text!r} is not a time such as 30m, 2h or 1d.")
    return float(found[1]) * _UNITS[found[2]]


def choose_devices(options: argparse.Namespace) -> None:
    """Checks the options for workers, and leaves this process the devices that it is to use.

    Raises:
      InputError: an option is not possible, or this machine lacks such devices.
    """
    asked, count = options.devices, options.workers
    if count is not None and (count < 1 or asked is not None):
        raise InputError(
            "--workers is a number of processes, 1 or more, which take one device each: leave"
            " --devices out."
        )
    submits = getattr(options, "submit", False)
    if submits and (count is not None or asked is not None):
        raise InputError("--submit starts workers as [executor] says: give it jobs = N there.")
    options.share = options.share or submits or count is not None
    if not options.share and (asked or options.take_over):
        raise InputError("--devices and --take-over are options of workers: add --share.")
    if options.share and getattr(options, "overwrite", False):
        raise InputError(
            "--overwrite removes what other workers may have done: leave it out, or --share."
        )
    options.take_over = None if options.take_over is None else seconds(options.take_over)
    here = devices()
    options.gpus = here if count else []
    if asked is not None:
        places = asked.split(",")
        if bad := [one for one in places if not (one.isdigit() and int(one) < len(here))]:
            has = f"{counted(len(here), 'GPU')}, from 0 on" if here else "no GPU that CUDA shows"
            raise InputError(f"--devices {bad[0]}: this machine has {has}.")
        os.environ[_CUDA] = ",".join(here[int(one)] for one in places)
    elif options.gpus:
        if count > len(here):
            raise InputError(
                f"--workers {count}: this machine has {counted(len(here), 'GPU')}, and a worker"
                " needs one."
            )
        os.environ[_CUDA] = here[0]


def devices() -> list[str]:
    """Returns the GPUs that this process may use, as CUDA names them; JAX is not asked."""
    chosen = os.environ.get(_CUDA)
    if chosen is not None:
        return [one.strip() for one in chosen.split(",") if one.strip() not in ("", "-1")]
    return sorted(path.name[6:] for path in Path("/dev").glob("nvidia[0-9]*"))


def own_words(options: argparse.Namespace) -> list[str]:
    """Returns the options of a worker that works beside this one."""
    own = [] if options.take_over is None else ["--take-over", f"{options.take_over}s"]
    return ["--share", *own]


@contextlib.contextmanager
def started(words: Sequence[Any], out: Path, options: argparse.Namespace) -> Iterator[None]:
    """Starts the workers of ``--workers`` but this process, and waits for them at the end.

    If this process is interrupted, they get SIGTERM, and end after their rounds.

    Args:
      words: the command of a worker, to which its own options are added.
    """
    begun = []
    for place in range(1, options.workers or 1):
        gpu = options.gpus[place] if options.gpus else None
        begun.append(start([*words, *own_words(options)], out, place, gpu))
    try:
        yield
    except BaseException:
        for process, _ in begun:
            process.send_signal(signal.SIGTERM)
        raise
    finally:
        for process, log in begun:
            if code := process.wait():
                faults.print_error(f"fedjax-peft: a worker ended with the code {code}, see {log}")


def start(
    words: Sequence[Any], out: Path, place: int, gpu: str | None = None
) -> tuple[subprocess.Popen[bytes], Path]:
    """Starts a worker that does not end with this process; returns it and the file of its output.

    Args:
      words: the command and its arguments.
      place: the number of the worker, after which the file is called.
      gpu: the GPU that it is to use, as CUDA names it; by default those of this process.
    """
    log = out / "workers" / f"{place}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    env = {**os.environ, **({_CUDA: gpu} if gpu is not None else {})}
    command = [sys.executable, "-m", "fedjax_peft", *map(str, words)]
    with log.open("ab") as file:
        started = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env=env,
            start_new_session=True,
        )
    return started, log
