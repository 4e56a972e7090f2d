"""Compiled programs, and the single operations that ran outside of programs, are given up here."""

import ctypes
import gc
import os
import sys

import jax

MANY_MAPS = 20_000
"""Memory maps of this process from which on all compiled programs are given up. Each holds up to
hundreds, Linux allows a process 65,530, and XLA dies of a segmentation fault beyond that."""
MUCH_MEMORY = 1.5e9
"""Bytes from which on they are given up too, so that a worker needs less than 2.5 GB."""


def release() -> None:
    """Frees unreachable programs; and all, with their memory for the system, if there are many."""
    gc.collect()  # programs are parts of cycles
    if not sys.platform.startswith("linux"):
        jax.clear_caches()
    elif _memory() >= MUCH_MEMORY or _maps() >= MANY_MAPS:
        from fedjax_peft.engine.compilation import programs

        programs.clear()
        jax.clear_caches()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)


def _maps() -> int:
    with open("/proc/self/maps", "rb") as maps:
        return sum(1 for _ in maps)


def _memory() -> int:
    with open("/proc/self/statm", "rb") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
