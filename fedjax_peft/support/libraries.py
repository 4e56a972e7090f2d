"""Settings of other libraries that hold for the whole process. No other module changes them.

Importing this package changes nothing. A setting is made where it is first needed, or at the start
of the command line (:func:`prepare`), and what the user has set stays:

* ``OPENBLAS_NUM_THREADS=1``, before scipy is loaded: by the first matrix decomposition, or by what
  imports scikit-learn, seqeval or scipy (:func:`limit_blas_threads`);
* ``TRANSFORMERS_NO_ADVISORY_WARNINGS=1``, by the command line.

The last one, and log levels (of absl, which orbax uses, and of ``datasets``), are otherwise changed
only for the duration of a call (:func:`without_advice`, :func:`log_level`).

JAX's own settings are made in :mod:`fedjax_peft.engine.compilation`.
"""

import importlib.util
import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import metadata
from pathlib import Path

_NO_ADVICE = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
_HUB_LOGGERS = ("huggingface_hub", "datasets")


def prepare() -> None:
    """Makes all settings; the command line calls this before anything else."""
    limit_blas_threads()
    os.environ.setdefault(_NO_ADVICE, "1")


def limit_blas_threads() -> None:
    """Makes OpenBLAS run in one thread, unless ``OPENBLAS_NUM_THREADS`` is set.

    On a CPU, XLA's LAPACK is scipy's OpenBLAS. Its threads wait for each other at every small
    product: on an idle machine they gain nothing here, and on a busy one a decomposition of 0.3 s
    was seen to take 70 s. OpenBLAS reads the variable when scipy is loaded, so a program that
    imports scipy or scikit-learn itself, before it uses this package, must set the variable itself.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


@contextmanager
def without_advice() -> Iterator[None]:
    """Stops ``transformers`` from warning that PyTorch is missing, which is not needed here.

    It does so when it is imported, so the block has to begin before.
    """
    before = os.environ.get(_NO_ADVICE)
    os.environ.setdefault(_NO_ADVICE, "1")
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_NO_ADVICE, None)


@contextmanager
def log_level(logger: str, level: int) -> Iterator[None]:
    """Drops what a library logs below a level in the block, or in the decorated function.

    Args:
      logger: its name, such as ``absl``, the logger of orbax.
      level: such as ``logging.WARNING``; a higher level that is already set stays.
    """
    target = logging.getLogger(logger)
    before = target.level
    target.setLevel(max(level, before))
    try:
        yield
    finally:
        target.setLevel(before)


@contextmanager
def printed_once() -> Iterator[None]:
    """Makes warnings of the Hugging Face hub's client appear once in the block.

    These libraries print through a handler of their own. absl, which optax and orbax import, gives
    the root logger another one, so that every message would be printed twice.
    """
    with ExitStack() as stack:
        for name in _HUB_LOGGERS:
            logger = logging.getLogger(name)
            if logger.handlers:
                stack.callback(setattr, logger, "propagate", logger.propagate)
                logger.propagate = False
        yield


def install(extra: str) -> str:
    """Returns the command that installs what an extra of this package needs.

    It names the libraries. The name of this package on the package index is nobody's yet, so a
    command with that name would run code of whoever registers it.
    """
    try:
        needed = [*requirements("fedjax_peft", extra)]
    except metadata.PackageNotFoundError:
        needed = []
    if not needed:  # this package is not installed: Python has found its folder
        return f"{pip()} install -e '.[{extra}]' in a checkout"
    quoted = " ".join(f"'{one}'" for one in needed)
    return f"{pip()} install {quoted}"


def pip() -> str:
    """Returns the command that installs into this environment: one that uv made has no pip."""
    made = Path(sys.prefix, "pyvenv.cfg")
    if importlib.util.find_spec("pip") or not made.is_file():
        return "pip"
    return "uv pip" if re.search(r"^uv\b", made.read_text(errors="replace"), re.M) else "pip"


def requirements(package: str, extra: str) -> Iterator[str]:
    """Yields what an extra of an installed package needs, such as ``h5py<4,>=3.11``.

    Raises:
      PackageNotFoundError: the package is not installed.
    """
    for line in metadata.requires(package) or ():
        needed, _, condition = map(str.strip, line.partition(";"))
        match = re.search(r"""extra == ["']([\w-]+)["']""", condition)
        if match is None or match[1] != extra:
            continue
        own = re.fullmatch(rf"{package}\[([\w,-]+)\]", needed)
        for name in own[1].split(",") if own else ():
            yield from requirements(package, name)
        if own is None:
            yield needed
