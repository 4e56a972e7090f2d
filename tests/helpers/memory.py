"""Compiled programs, and the single operations that ran outside of programs, are given up here."""

import ctypes
import gc
import os
import sys

import jax

MANY_MAPS = 20_000
"""Memory maps of this process from which on all compiled programs are given up. Each holds up to
hundreds, Linux allows a process 65,530, and XLA dies of a segmentation fault beyond that."""
MUCH_MEMORY = 1.9e9
"""Bytes from which on they are given up too, so that a worker needs less than 2.5 GB."""
MORE_MEMORY = 1.5e8
"""Bytes more than after the last collection, from which on to look for unreachable programs:
a collection takes half a second, as much as many a file of tests."""
_last = {"memory": 0}


def release() -> None:
    """Frees unreachable programs; and all, with their memory for the system, if there are many."""
    if not sys.platform.startswith("linux"):
        gc.collect()
        jax.clear_caches()
        return
    if _memory() < _last["memory"] + MORE_MEMORY and _maps() < MANY_MAPS:
        return
    gc.collect()  # programs are parts of cycles
    if _memory() >= MUCH_MEMORY or _maps() >= MANY_MAPS:
        from fedjax_peft.engine.compilation import programs

        programs.clear()
        jax.clear_caches()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
    _last["memory"] = _memory()


def _maps() -> int:
    with open("/proc/self/maps", "rb") as maps:
        return sum(1 for _ in maps)


def _memory() -> int:
    with open("/proc/self/statm", "rb") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
