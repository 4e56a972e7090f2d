"""The JAX settings of a command's process."""

import argparse

from fedjax_peft.cli import faults
from fedjax_peft.engine import distributed
from fedjax_peft.support.errors import InputError


def prepare_jax(*, cache: bool = True) -> None:
    """Checks the limits of the process, then imports JAX and sets its compilation cache.

    Args:
      cache: whether compiled programs are stored on disk, so that the next start is faster.
    """
    faults.check_limits()
    import jax

    from fedjax_peft.engine.compilation import use_compilation_cache

    if cache:
        use_compilation_cache()
    else:
        jax.config.update("jax_enable_compilation_cache", False)


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
