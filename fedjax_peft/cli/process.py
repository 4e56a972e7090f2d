"""A command's process: its JAX settings, and its place among several processes."""

import argparse
import os
from pathlib import Path

from fedjax_peft.cli import faults
from fedjax_peft.engine.devices import distributed
from fedjax_peft.support.errors import InputError


def prepare_jax(options: argparse.Namespace) -> None:
    """Checks the limits of the process, then imports JAX and sets its compilation cache.

    Compiled programs are stored on disk, so that the next start is faster, except where the time or
    the result of a compiler is asked for.
    """
    faults.check_limits()
    elsewhere = getattr(options, "device", None) is not None
    if elsewhere and options.compile:  # a compiler of GPUs on a machine without one
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import jax

    from fedjax_peft.engine.compilation import use_compilation_cache

    if elsewhere or options.command.startswith("bench."):
        jax.config.update("jax_enable_compilation_cache", False)
    else:
        use_compilation_cache(_of_workers(options))


def _of_workers(options: argparse.Namespace) -> Path | None:
    """Returns where the workers of a study keep their programs; None for other commands."""
    if not any(getattr(options, name, None) for name in ("share", "workers")):
        return None
    out = options.run if hasattr(options, "run") else options.out
    return (out or Path("runs") / options.config.stem).absolute() / "compiled"


def join_processes(options: argparse.Namespace) -> None:
    """Connects this process with the others of ``--distributed``; all but one become quiet.

    Raises:
      InputError: options are missing, or the processes cannot connect.
    """
    given = (options.coordinator, options.processes, options.process)
    if not options.distributed:
        if given != (None, None, None):
            raise InputError("--coordinator, --processes and --process need --distributed.")
        return
    distributed.initialize(*given)
    if not distributed.is_writer():
        options.quiet, options.verbose = 1, 0
        faults.silence_output()
